"""Symbolic shapes: symbols, bounds, lengths, and programs at given sizes."""
