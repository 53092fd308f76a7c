"""Comparing: arrays with one another, variants of a program, and where two of them part."""
