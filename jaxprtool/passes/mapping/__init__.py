"""Passes that map a program over an axis, whose elements may differ in size."""
