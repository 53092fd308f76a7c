"""Passes on loops and on repeated equations."""
