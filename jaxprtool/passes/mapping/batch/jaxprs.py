"""`batch_jaxpr`: map a jaxpr over an axis, as JAX's internal functions of 2022 did.

There were three of those, one for each way to specify the axes of results; here it is an option.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.jaxcompat import AnyJaxpr, ClosedJaxpr, Var
from jaxprtool.passes.mapping.batch.axis import Axis, Dim
from jaxprtool.passes.mapping.batch.body import batch_body

#: Request that a result be mapped along its first axis if it is mapped at all.
ZERO_IF_MAPPED = "zero_if_mapped"


def batch_jaxpr(
    jaxpr: AnyJaxpr,
    size: int,
    in_axes: Dim | Sequence[Dim] = 0,
    out_axes: Any = None,
    axis_name: Hashable = None,
) -> tuple[ClosedJaxpr, tuple[Dim, ...]]:
    """Map a jaxpr over an axis: return the jaxpr of `jax.vmap` of its function.

    A single value represents a sequence of that value. Axes are positions in values with the mapped
    axis, and may count from the end.

    Args:
        jaxpr: A closed jaxpr, or an open one without constants.
        size: The size of the mapped axis, in elements.
        in_axes: The mapped axis of each argument; None for unmapped ones.
        out_axes: The requested mapped axis of each result: None accepts any, a number moves or
            broadcasts the result to be mapped there, and "zero_if_mapped" moves the mapped axis to
            the front if there is one.
        axis_name: The name of the axis, for collectives.

    Returns:
        The mapped jaxpr, closed, and the mapped axis of each result; None for unmapped ones.

    Raises:
        ValueError: If a sequence's length is not the jaxpr's, or an axis is invalid.
        BatchUnsupported: If an equation, which the message names, cannot be batched.
    """
    body = jaxcompat.close_jaxpr(jaxpr)
    if len(body.consts) != len(body.constvars):
        raise ValueError("batch_jaxpr takes a closed jaxpr, or an open one without constants")
    dims = _axes("in_axes", in_axes, body.invars)
    asked = _axes("out_axes", out_axes, body.outvars)
    axis = Axis(axis_name, size)
    made, outs = batch_body(body, dims, axis)
    pairs = zip(asked, outs, strict=True)
    wanted = tuple(
        (None if out is None else 0) if ask == ZERO_IF_MAPPED else ask for ask, out in pairs
    )
    return (made, outs) if wanted == (None,) * len(wanted) else batch_body(body, dims, axis, wanted)


def _axes(option: str, axes: Any, variables: Sequence[Var]) -> tuple[Any, ...]:
    """Return the axis of each variable, counted from 0 in a value with one more axis."""
    each = axes if isinstance(axes, Sequence) and not isinstance(axes, str) else None
    each = [axes] * len(variables) if each is None else each
    if len(each) != len(variables):
        raise ValueError(f"{option} has {len(each)} entries for the jaxpr's {len(variables)}")
    found = []
    for axis, var in zip(each, variables, strict=True):
        rank = len(getattr(var.aval, "shape", ())) + 1
        if axis is None or (axis == ZERO_IF_MAPPED and option == "out_axes"):
            found.append(axis)
        elif type(axis) is int and -rank <= axis < rank:
            found.append(axis % rank)
        else:
            raise ValueError(f"{option} has {axis!r} for a value with {rank} axes when mapped")
    return tuple(found)
