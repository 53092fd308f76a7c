"""Matching the equations of two programs, and the differences that are left."""
