"""The `.jaxpr` file: JAX's listing in exact notation under a short header; see `write`, `read`."""

from jaxprtool.formats.jaxpr import values  # noqa: F401  (fills the table of values)
