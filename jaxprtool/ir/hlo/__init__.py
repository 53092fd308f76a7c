"""Compiled programs, as XLA describes them: operations with source lines, and memory."""
