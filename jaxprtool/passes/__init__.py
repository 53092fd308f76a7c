"""Rewrites of programs: the base class of passes, their registry, and one module for each pass."""
