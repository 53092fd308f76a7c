"""Definitions and uses of values, within a body and through bodies."""
