"""The `.jaxpr` file: JAX's own listing made exact, under a short header; see `write` and `read`."""
