"""Measured times of variants of a program, which take turns."""
