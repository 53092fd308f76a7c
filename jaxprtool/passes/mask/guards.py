"""Guards: what keeps padding out of derivatives.

Where an operation brings elements together along a padded axis, or repeats them along one, its
transpose sums over padding: over cotangents that may be NaN, times coefficients that may be. A
guard computes what the operation does, with a derivative in which both are 0.

Its derivatives are those of `safe`, which is made of selections alone. So they are of any order. A
rule of a custom derivative would do for the first: JAX forgets it where it differentiates a scan in
reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jaxprtool.passes.mask.values import Facts

#: An axis of an array, the number that fills the padding along it, and the index of its mask.
MaskedFill = tuple[int, Any, int]


@dataclass(frozen=True, eq=False)
class Guard:
    """A function of operands and masks whose derivatives keep what is in padding apart.

    Attributes:
        name: The name of the function.
        compute: What is computed of operands.
        before: For each operand, what its padding is filled with.
        after: For each operand, what its padding is filled with where the derivative is taken.
        mixed: The axes of the result along which the transpose sums, and the indices of their
            masks.
        varying: In the body of a scan of masked length, for each operand whether it differs from
            round to round. The last mask then says whether the round is no padding.
    """

    name: str
    compute: Callable[..., Any]
    before: Sequence[Sequence[MaskedFill]]
    after: Sequence[Sequence[MaskedFill]]
    mixed: Sequence[tuple[int, int]]
    varying: Sequence[bool] | None = None

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The function, as JAX differentiates it."""

        def value(*args: Any) -> Any:
            return self._value(*args)

        def masked_derivative(primals: Any, tangents: Any) -> tuple[Any, Any]:
            return self._derivative(primals, tangents)

        value.__name__ = self.name  # listings show it
        guarded = jax.custom_jvp(value)
        guarded.defjvp(masked_derivative, symbolic_zeros=True)
        return guarded

    def _value(self, *args: Any) -> Any:
        arrays, masks = self._split(args)
        filled = (_filled(x, fills, masks) for x, fills in zip(arrays, self.before, strict=True))
        return self.compute(*filled)

    def safe(self, *args: Any) -> Any:
        """Compute the result, and with it what all its derivatives need."""
        arrays, masks = self._split(args)
        points = [_filled(x, fills, masks) for x, fills in zip(arrays, self.after, strict=True)]
        if self.varying is not None:
            pairs = zip(points, self.varying, strict=True)
            points = [
                in_round(masks[-1], x, lax.full_like(x, 0)) if varies else x for x, varies in pairs
            ]
        result = self.compute(*points)
        fixed = lax.stop_gradient(result)
        for axis, place in self.mixed:
            result = lax.select(_along(axis, masks[place], result), result, fixed)
        return result if self.varying is None else in_round(masks[-1], result, fixed)

    def _split(self, args: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        count = len(self.before)
        return args[:count], args[count:]

    def _derivative(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

        def of(*values: Any) -> Any:
            args = list(primals)
            for i, value in zip(moving, values, strict=True):
                args[i] = value
            return self.safe(*args)

        return jax.jvp(of, [primals[i] for i in moving], [tangents[i] for i in moving])


def _filled(array: Any, fills: Sequence[MaskedFill], masks: Sequence[Any]) -> Any:
    for axis, value, place in fills:
        array = with_fill(array, axis, value, masks[place])
    return array


def with_fill(array: Any, axis: int, value: Any, mask: Any) -> Any:
    """Return an array with a number where the mask along an axis is False."""
    return lax.select(_along(axis, mask, array), array, lax.full_like(array, value))


def _along(axis: int, mask: Any, array: Any) -> Any:
    return lax.broadcast_in_dim(mask, array.shape, (axis,))


# --- rounds of a scan of masked length ------------------------------------------------------------


def mixes_rounds(facts: Sequence[Facts]) -> bool:
    """Return True for operands of which some differ between rounds, and others have a derivative.

    That derivative is summed over the rounds.
    """
    return any(each.varies for each in facts) and any(
        each.active and not each.varies for each in facts
    )


def guarded(flag: Any, array: Any) -> Any:
    """Return an array whose derivative is zero where a flag is False."""
    return in_round(flag, array, lax.stop_gradient(array))


def in_round(flag: Any, new: Any, old: Any) -> Any:
    """Return an array where a flag is True, and another one where it is False.

    The flag is broadcast here, so that equal masks are merged. Each that JAX makes of it, where a
    batched flag selects, would be stored in every round for derivatives.
    """
    return lax.select(lax.broadcast(flag, new.shape), new, old)
