"""Functions to map a user's function over examples, as `vmap` does.

`TracedElement` traces the function for one example. `flat_out_axes`, `axis_size_of` and
`check_unmapped` handle `in_axes` and `out_axes` like `jax.vmap`, with its errors, and `match_axis`
moves the mapped axis of a value.
"""

from jaxprtool.jaxcompat import match_axis
from jaxprtool.jaxcompat.mapping import TracedElement
from jaxprtool.passes.mapping.batch.axes import (
    BatchError,
    BatchTypeError,
    Names,
    axis_size_of,
    check_unmapped,
    flat_out_axes,
    result_type,
)

__all__ = [
    "BatchError",
    "BatchTypeError",
    "Names",
    "TracedElement",
    "axis_size_of",
    "check_unmapped",
    "flat_out_axes",
    "match_axis",
    "result_type",
]
