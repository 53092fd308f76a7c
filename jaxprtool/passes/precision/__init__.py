"""Compute in a narrower dtype, except at places that stay in the program's dtype."""
