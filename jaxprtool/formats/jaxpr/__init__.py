"""The `.jaxpr` file: JAX's own listing made exact, under a short header; see `write` and `read`."""

from jaxprtool.formats.jaxpr import jax_values, policies  # noqa: F401  (fill the table of values)
