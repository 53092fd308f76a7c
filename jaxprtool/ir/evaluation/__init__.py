"""Evaluating jaxprs, equation by equation."""
