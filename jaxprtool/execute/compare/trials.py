"""Random inputs, and the reduction of an input on which two variants differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool.ir.basics.dtypes import is_extended

#: The number of inputs tried during a reduction.
MOST_TRIES = 300

#: The maximum number of elements of an input that is described.
_FEW = 4

#: The scales of floats after the first trial, as powers of ten.
_POWERS = (-2, -1, 0, 1, 2)


def scaled(values: Sequence[Any], random: Sequence[bool], trial: int) -> list[Any]:
    """Return the inputs of a trial; after the first, random floats are scaled."""
    rng = np.random.default_rng((trial, len(values)))
    return [
        (np.asarray(x) * 10.0 ** int(rng.choice(_POWERS))).astype(x.dtype)
        if trial and is_random and _is_number(x) and jnp.issubdtype(x.dtype, jnp.inexact)
        else x
        for x, is_random in zip(values, random, strict=True)
    ]


def _is_number(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and not is_extended(dtype) and dtype != jax.dtypes.float0


def minimized(
    values: Sequence[Any], free: Sequence[bool], fails: Callable[[Sequence[Any]], bool]
) -> tuple[list[Any], int]:
    """Return a reduced input that still fails, and the number of inputs tried.

    An argument becomes zero, or else keeps as few nonzero elements as needed, by bisection. The
    remaining elements become one, or else integers.

    Args:
        values: Flat arguments.
        free: Whether each argument may change.
        fails: Returns True if the failure occurs for values of the same types.
    """
    search = _Minimizer(list(values), fails)
    for place, is_free in enumerate(free):
        if is_free and _is_number(values[place]):
            search.minimize(place)
    return search.values, search.tries


class _Minimizer:
    def __init__(self, values: list[Any], fails: Callable[[Sequence[Any]], bool]):
        self.values, self.tries, self._fails = values, 0, fails

    def minimize(self, place: int) -> None:
        """Reduce one argument."""
        array = np.asarray(self.values[place])
        if not array.any() or self._take(place, np.zeros_like(array)):
            return
        self._drop(place)
        left = np.asarray(self.values[place])
        if self._take(place, (left != 0).astype(left.dtype)) or left.dtype == bool:
            return
        if jnp.issubdtype(left.dtype, jnp.floating):
            self._take(place, np.rint(left.astype(np.float64)).astype(left.dtype))

    def _drop(self, place: int) -> None:
        """Set elements to zero, starting with large parts, as long as it still fails."""
        parts = 2
        while self.tries < MOST_TRIES:
            array = np.asarray(self.values[place])
            nonzero = np.flatnonzero(array)
            if len(nonzero) < 2:
                return
            parts = min(parts, len(nonzero))
            if any(self._take(place, each) for each in _without(array, nonzero, parts)):
                parts = max(parts - 1, 2)
            elif parts == len(nonzero):
                return
            else:
                parts *= 2

    def _take(self, place: int, array: np.ndarray) -> bool:
        """Replace an argument by an array if it still fails; return whether it was replaced."""
        if self.tries >= MOST_TRIES or np.array_equal(array, np.asarray(self.values[place])):
            return False
        self.tries += 1
        tried = [*self.values[:place], array, *self.values[place + 1 :]]
        if not self._fails(tried):
            return False
        self.values = tried
        return True


def _without(array: np.ndarray, nonzero: np.ndarray, parts: int) -> Iterator[np.ndarray]:
    for part in np.array_split(nonzero, parts):
        made = array.copy()
        made.reshape(-1)[part] = 0
        yield made


def described(value: Any) -> str:
    """Return an input in words: `zero except [2, 1] = 1.0`."""
    if not _is_number(value):
        return "random"
    array = np.asarray(value)
    indices = np.argwhere(array)
    if not len(indices):
        return "zero"
    if array.ndim == 0:
        return str(array)
    if len(indices) > _FEW:
        return f"{len(indices):,} of {array.size:,} elements are not zero"
    parts = (f"{list(map(int, place))} = {array[tuple(place)]}" for place in indices)
    return "zero except " + ", ".join(parts)
