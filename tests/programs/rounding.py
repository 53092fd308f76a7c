"""Estimate how far rounding may change a result, by Monte Carlo arithmetic.

A program runs one equation at a time, and each result of an equation is randomly changed by up to
one unit in the last place. The spread of the results is the tolerance for programs that compute the
same values in another order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.programs.stepwise import bind

Apply = Callable[[Any, Sequence[Any]], Sequence[Any]]

#: The number of runs. With few runs, the estimate of some spreads is too small by some factor.
RUNS = 4
FACTOR = 8.0


def differences_but_for_rounding(
    evaluate: Callable[[Apply], list[Any]],
    before: Sequence[Any],
    after: Sequence[Any],
    apply: Apply = bind,
) -> list[int]:
    """Return which values differ by more than rounding can explain.

    Args:
        evaluate: Returns the original values, with the given function to evaluate equations.
        before: The original values, inexact arrays.
        after: The values to compare.
        apply: Returns the results of an equation.
    """
    moved = [evaluate(_rounding_otherwise(apply, random.Random(run))) for run in range(RUNS)]
    return [
        i
        for i, pair in enumerate(zip(before, after, strict=True))
        if not _within(*map(_wide, pair), [_wide(values[i]) for values in moved])
    ]


def _rounding_otherwise(apply: Apply, rng: random.Random) -> Apply:
    draw = np.random.RandomState(rng.randrange(2**31))

    def moved(eqn: Any, operands: Sequence[Any]) -> list[Any]:
        return [_moved(x, draw) for x in apply(eqn, operands)]

    return moved


def _moved(x: Any, draw: np.random.RandomState) -> Any:
    if not jnp.issubdtype(getattr(x, "dtype", bool), jnp.inexact):
        return x
    by = 1 + float(jnp.finfo(x.dtype).eps) * draw.uniform(-1, 1, x.shape)
    return np.asarray(_wide(x) * by).astype(x.dtype)


def _within(before: np.ndarray, after: np.ndarray, moved: Sequence[np.ndarray]) -> bool:
    """Return True if all elements differ by at most the spread, or are never determined."""
    certain = np.isfinite(before) & np.all([np.isfinite(x) for x in moved], axis=0)
    far = [np.abs(x - before)[certain].max(initial=0.0) for x in moved]
    near = np.abs(after - before)[certain] <= FACTOR * max(far)
    return bool(near.all())  # non-finite values are never close


def _wide(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
