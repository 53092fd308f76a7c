"""Guards, which keep padding out of derivatives.

If an operation combines elements along a padded axis, or repeats them along one, its transpose sums
over padding: over products of cotangents and coefficients, both of which may be NaN. A guard
computes the same values as the operation, with a derivative in which both are 0.

The derivatives of a guard are those of `Guard.safe`, which consists of selections, and so has
derivatives of any order. In a scan `safe` itself is used: JAX loses a `custom_jvp` rule where it
differentiates a scan in reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jaxprtool.passes.mapping.mask.values import Facts

#: An axis of an array, the number to fill the padding along it with, and the index of its mask.
MaskedFill = tuple[int, Any, int]


@dataclass(frozen=True, eq=False)
class Guard:
    """A function of operands and masks, whose derivatives do not depend on the padding.

    Attributes:
        name: The name of the function, shown in listings of jaxprs.
        compute: The operation, a function of the operands.
        before: For each operand, the fills of its padding before the operation.
        after: For each operand, the fills of its padding where the derivative is taken.
        mixed: The axes of the result over which the transpose sums, and the indices of their masks.
        varying: In the body of a scan of masked length, for each operand whether it differs between
            iterations. The last mask is then the flag of the iteration, True unless it is padding.
    """

    name: str
    compute: Callable[..., Any]
    before: Sequence[Sequence[MaskedFill]]
    after: Sequence[Sequence[MaskedFill]]
    mixed: Sequence[tuple[int, int]]
    varying: Sequence[bool] | None = None

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The function of operands and masks, with a custom derivative."""

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
        """Compute the result in a form that JAX differentiates without a custom rule."""
        arrays, masks = self._split(args)
        points = [_filled(x, fills, masks) for x, fills in zip(arrays, self.after, strict=True)]
        if self.varying is not None:
            pairs = zip(points, self.varying, strict=True)
            points = [
                select_if(masks[-1], x, lax.full_like(x, 0)) if varies else x for x, varies in pairs
            ]
        result = self.compute(*points)
        fixed = lax.stop_gradient(result)
        for axis, place in self.mixed:
            result = lax.select(_along(axis, masks[place], result), result, fixed)
        return result if self.varying is None else select_if(masks[-1], result, fixed)

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
    """Replace the elements of an array by a number where a mask along an axis is False."""
    return lax.select(_along(axis, mask, array), array, lax.full_like(array, value))


def _along(axis: int, mask: Any, array: Any) -> Any:
    return lax.broadcast_in_dim(mask, array.shape, (axis,))


# --- iterations of a scan of masked length --------------------------------------------------------


def mixes_iterations(facts: Sequence[Facts]) -> bool:
    """Return True if some operands vary between iterations, and loop-invariant ones are active.

    The derivative with respect to the latter is a sum over the iterations.
    """
    return any(each.varies for each in facts) and any(
        each.active and not each.varies for each in facts
    )


def guarded(flag: Any, array: Any) -> Any:
    """Return an array whose derivative is zero if a flag is False."""
    return select_if(flag, array, lax.stop_gradient(array))


def select_if(flag: Any, new: Any, old: Any) -> Any:
    """Return `new` if a flag is True, otherwise `old`.

    The flag is broadcast here, so that CSE merges equal masks. If `select` took a scalar, batching
    would broadcast it each time, and JAX would store each mask in every iteration for derivatives.
    """
    return lax.select(lax.broadcast(flag, new.shape), new, old)
