"""How far rounding alone may take a result: Monte Carlo arithmetic.

A program is run one equation at a time, and each number that an equation gives is moved by up to a
unit in its last place, at random. What the results then differ by is what they may differ by in
programs that compute the same in another order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.programs.stepwise import bind

Apply = Callable[[Any, Sequence[Any]], Sequence[Any]]

#: How often a program is run. Few runs may miss how far some result can go, by some factor.
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
        evaluate: Gives the values before, computed by what it is given.
        before: The values before, inexact arrays.
        after: Those after.
        apply: Gives the results of an equation.
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
    """Return True if all elements differ by what the moved ones do, or are nowhere certain."""
    certain = np.isfinite(before) & np.all([np.isfinite(x) for x in moved], axis=0)
    far = [np.abs(x - before)[certain].max(initial=0.0) for x in moved]
    near = np.abs(after - before)[certain] <= FACTOR * max(far)
    return bool(near.all())  # what is not finite after is not near


def _wide(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
