"""Rules for reductions of several arrays at once, whole or in windows, and for transforms.

Reductions of one array keep the mapped dimension where it is by JAX's rules; so do these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxprtool.jaxcompat import Primitive
from jaxprtool.passes.batch.axis import Axis, Dim
from jaxprtool.passes.batch.placing import nbytes, only, placed, result_sizes, rule_for, together

Params = dict[str, Any]


@rule_for("reduce")
def _reduce(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Params
) -> Any:
    """A reduction by a function of the user's. JAX has none from values that differ by lane."""
    count = len(operands) // 2
    if any(dim is not None for dim in dims[count:]):
        return None
    sizes = result_sizes(axis, primitive, operands, dims, params)
    arrays, target = together(axis, operands[:count], dims[:count], sizes)
    reduced = tuple(d + (d >= target) for d in params["dimensions"])
    results = primitive.bind(*arrays, *operands[count:], **{**params, "dimensions": reduced})
    return results, [target - sum(d < target for d in reduced)] * count


#: What a window is along the mapped dimension: one lane wide.
_ONE_WIDE = {
    "window_dimensions": 1,
    "window_strides": 1,
    "padding": (0, 0),
    "base_dilation": 1,
    "window_dilation": 1,
}


@rule_for("reduce_window")
def _reduce_window(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Params
) -> Any:
    """Windows reduced by a function of the user's. JAX has none from values that differ by lane."""
    count = len(operands) // 2
    if any(dim is not None for dim in dims[count:]):
        return None
    sizes = result_sizes(axis, primitive, operands, dims, params)
    arrays, target = together(axis, operands[:count], dims[:count], sizes)
    results = primitive.bind(*arrays, *operands[count:], **_with_window(params, target))
    return results, [target] * count


@rule_for("select_and_scatter_add", "select_and_gather_add")
def _select_in_windows(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Params
) -> Any:
    """What goes from or to the largest, or the least, in each window."""
    sizes = result_sizes(axis, primitive, operands, dims, params)
    arrays, target = together(axis, operands, dims, sizes)
    return primitive.bind(*arrays, **_with_window(params, target)), target


def _with_window(params: Params, dim: int) -> Params:
    """The parameters of windows with one dimension more, the mapped one."""
    entries = {name: value for name, value in _ONE_WIDE.items() if name in params}
    new = {name: (*params[name][:dim], e, *params[name][dim:]) for name, e in entries.items()}
    return {**params, **new}


@rule_for("fft")
def _fft(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Params
) -> Any:
    """A transform is along the last dimensions; what is before them stays, unless the result, which
    is larger for some kinds, would be dearer to move than the operand."""
    x, dim = only(operands, dims)
    size = sum(result_sizes(axis, primitive, operands, dims, params))
    stays = dim < x.ndim - len(params["fft_lengths"]) and size <= nbytes(x.shape, x.dtype)
    target = dim if stays else 0
    return primitive.bind(placed(axis, x, dim, target), **params), target
