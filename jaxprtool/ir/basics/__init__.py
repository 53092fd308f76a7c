"""Tables of rules, caches, dtypes, paths and texts: the lowest layer of `ir`."""
