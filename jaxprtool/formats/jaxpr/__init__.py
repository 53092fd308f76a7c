"""The `.jaxpr` file: JAX's own listing made exact, under a short header; see `write` and `read`."""

from jaxprtool.formats.jaxpr import jax_values  # noqa: F401  (fills the table of values)
