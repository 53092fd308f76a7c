"""Passes that remove, merge or simplify equations."""
