"""Masking of reshapes, which keep the order of elements by logical position.

A reshape is split into groups of axes with the same number of elements before and after:
`f32[n,6] -> f32[n,2,3]` is `n -> n` and `6 -> (2, 3)`. In most groups the padding comes last both
before and after, and JAX's reshape is used. In the others, as in `f32[2,n] -> f32[2*n]`, each
element is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxprtool.ir.basics.rules import rule
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mapping.mask.sizes import Bounds
from jaxprtool.passes.mapping.mask.slicing import pad_end
from jaxprtool.passes.mapping.mask.table import MaskContext, mask_rules
from jaxprtool.passes.mapping.mask.values import Facts, Filled, Padded


@dataclass(frozen=True)
class _Group:
    """Axes of the operand that become axes of the result."""

    before: range
    after: range


def _groups(before: Sequence[Any], after: Sequence[Any]) -> list[_Group]:
    """Return the smallest groups of axes with the same number of elements."""
    groups = []
    i = j = 0
    while i < len(before) or j < len(after):
        rest = product(range(len(before) - i + 1), range(len(after) - j + 1))
        fitting = [
            (m, n)
            for m, n in sorted(rest, key=sum)
            if m + n and prod(before[i : i + m]) == prod(after[j : j + n])
        ]
        if not fitting:  # JAX traces such a reshape, which is valid only at some sizes
            raise ValueError("it does not keep the number of elements at all sizes")
        m, n = fitting[0]
        groups.append(_Group(range(i, i + m), range(j, j + n)))
        i, j = i + m, j + n
    return groups


def reshaped(context: MaskContext, x: Padded, shape: Sequence[Any]) -> Any:
    """Return a value reshaped to another logical shape."""
    bounds = context.bounds
    if any(size == 0 for size in (*x.shape, *shape) if isinstance(size, int)):
        return lax.full(bounds.shape(shape), 0, x.dtype)
    groups = _groups(x.shape, shape)
    plain = [g for g in groups if _is_prefix(bounds, x.shape, shape, g)]
    # Reshape each group to one axis first, whose elements are ordered by padded position.
    sizes = [prod(bounds.shape([x.shape[i] for i in g.before])) for g in groups]
    wanted = [prod(bounds.shape([shape[i] for i in g.after])) for g in groups]
    array = x.array
    if sizes != wanted or len(plain) < len(groups):
        array = lax.reshape(array, sizes)
        for axis, group in enumerate(groups):
            if group not in plain:
                array = _looked_up(context, array, axis, x.shape, shape, group)
            elif sizes[axis] != wanted[axis]:
                array = _fitted(array, axis, wanted[axis])
    array = lax.reshape(array, bounds.shape(shape))
    moved = [i for g in groups if g not in plain for i in g.after]
    made = context.isolate_cotangent(array, shape, moved, active=x.active)
    fills = {}
    for group, size, other in zip(groups, sizes, wanted, strict=True):
        if group in plain and size == other:
            before = [i for i in group.before if bounds.is_masked(x.shape[i])]
            after = [i for i in group.after if bounds.is_masked(shape[i])]
            fills.update({j: x.fill(i) for i, j in zip(before, after, strict=True)})
    return Filled(made, fills if sizes == wanted else {})


def _is_prefix(bounds: Bounds, before: Sequence[Any], after: Sequence[Any], group: _Group) -> bool:
    """Return True if the padding of a group comes last, both before and after."""
    sides = [before[i] for i in group.before], [after[i] for i in group.after]
    if not any(map(bounds.is_masked, (*sides[0], *sides[1]))):
        return True
    for sizes in sides:
        first = next((i for i, size in enumerate(sizes) if size != 1), 0)
        if any(map(bounds.is_masked, sizes[first + 1 :])) or not bounds.axes(sizes):
            return False
    return True


def _fitted(array: Any, axis: int, size: Any) -> Any:
    """Pad or crop an array along an axis to this size."""
    more = [0] * array.ndim
    if size > array.shape[axis]:
        more[axis] = size - array.shape[axis]
        return pad_end(array, more)
    return lax.slice_in_dim(array, 0, size, axis=axis)


def _looked_up(
    context: MaskContext,
    array: Any,
    axis: int,
    before: Sequence[Any],
    after: Sequence[Any],
    group: _Group,
) -> Any:
    """Reshape a group by a gather: compute the old position of each element of the result.

    Args:
        context: The context of the rule.
        array: An array with one axis for each group.
        axis: The axis of this group.
        before: The logical shape of the operand.
        after: The logical shape of the result.
        group: The axes of the group.

    Returns:
        The array with the elements of the group in their new order along `axis`.
    """
    old, new = [before[i] for i in group.before], [after[i] for i in group.after]
    number = _numbers(context, new)
    place, step = 0, 1
    for size in reversed(old):
        logical = jnp.asarray(context.size(size), np.int32)
        positive = lax.max(logical, np.int32(1))
        place = place + lax.rem(number, lax.broadcast(positive, number.shape)) * step
        number = lax.div(number, lax.broadcast(positive, number.shape))
        step = step * context.bounds.padded(size)
    indices = lax.reshape(place, (prod(context.bounds.shape(new)),))
    return jnp.take(array, indices, axis=axis, mode="clip")


def _numbers(context: MaskContext, shape: Sequence[Any]) -> Any:
    """Return the row-major index of each element of a padded array in its logical shape."""
    sizes = context.bounds.shape(shape)
    number, step = jnp.zeros(sizes, np.int32), jnp.int32(1)
    for axis in reversed(range(len(shape))):
        number = number + lax.broadcasted_iota(np.int32, sizes, axis) * step
        step = step * context.size(shape[axis])
    return number


@rule(mask_rules, "reshape")
def _reshape(context: MaskContext, eqn: JaxprEqn, x: Padded, *sizes: Padded) -> Any:
    order, shape = eqn.params["dimensions"], eqn.outvars[0].aval.shape
    if order is not None:
        facts = x.facts
        moved = Facts(
            tuple(facts.shape[i] for i in order),
            tuple(facts.fills[i] for i in order),
            facts.active,
        )
        x = Padded(lax.transpose(x.array, order), moved)
    return reshaped(context, x, shape)


@rule(mask_rules, "tile")
def _tile(context: MaskContext, eqn: JaxprEqn, x: Padded) -> Any:
    """Repeat along new axes, and merge these with those of the operand by a reshape."""
    repeats, bounds = eqn.params["reps"], context.bounds
    shape = tuple(size for pair in zip(repeats, x.shape, strict=True) for size in pair)
    own = tuple(range(1, len(shape), 2))
    whole = bounds.shape(shape)
    array = context.apply(
        lambda array: lax.broadcast_in_dim(array, whole, own),
        [x],
        shape,
        mixed=[i for i in bounds.axes(shape) if i not in own],
    )
    fills = tuple(x.facts.fills[i // 2] if i in own else None for i in range(len(shape)))
    repeated = Padded(array, Facts(shape, fills, x.active))
    return reshaped(context, repeated, eqn.outvars[0].aval.shape)
