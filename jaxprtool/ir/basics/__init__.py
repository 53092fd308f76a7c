"""Tables, caches, dtypes, paths and texts, which the other packages of `ir` stand on."""
