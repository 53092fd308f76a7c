"""Comparison of arrays and of program variants, and the search for where two variants diverge."""
