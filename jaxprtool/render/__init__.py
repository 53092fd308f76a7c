"""A Program, or an analysis, as something to look at; nothing here computes."""
