"""A Program on a backend."""
