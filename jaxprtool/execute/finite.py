"""Results that are not finite prove nothing: counting them, and random inputs that avoid them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxprtool.execute.compare.arrays import as_numpy, wide
from jaxprtool.execute.fill import Filled, fill
from jaxprtool.ir.input_domains import POSITIVE, Interval
from jaxprtool.ir.program import Program

#: Where arguments of whose use nothing is known are drawn from: the first for which most of the
#: results are finite.
_REST: tuple[Interval | None, ...] = (None, POSITIVE, (0.0, 1.0), (-math.inf, 0.0))


def nonfinite(value: Any) -> int:
    """Return how many elements of a value are a NaN or an infinity."""
    if not hasattr(value, "dtype") or not jnp.issubdtype(value.dtype, jnp.inexact):
        return 0
    return int((~np.isfinite(wide(as_numpy(value)))).sum())


def is_mostly_nonfinite(count: int, size: int) -> bool:
    """Return whether so many elements that are not finite are most of a value."""
    return 2 * count > size


def unproven(names: Sequence[str], values: Sequence[Any]) -> list[str]:
    """Return what to say of each result that is not finite in most elements."""
    found = []
    for name, value in zip(names, values, strict=True):
        count, size = nonfinite(value), getattr(value, "size", 0)
        if is_mostly_nonfinite(count, size):
            found.append(f"{name} is not finite in {count:,} of {size:,} elements")
    return found


def finite_fill(
    program: Program,
    given: Mapping[str, Any],
    run: Callable[[Sequence[Any]], Sequence[Any]],
    seed: int = 0,
) -> Filled:
    """Return flat arguments as `fill` does, for which as many results as can be are finite.

    Random floats of whose use nothing is known are drawn from all numbers; if results are not
    finite in most elements, from the positive ones, from 0 to 1, and from the negative ones.

    Args:
        program: The program.
        given: Values by argument name; a `jax.ShapeDtypeStruct` is filled.
        run: Runs the program on flat arguments.
        seed: The seed of random values.
    """
    best: tuple[int, Filled] | None = None
    for rest in _REST:
        filled = fill(program, given, seed, rest)
        bad = len(unproven(program.out_names, run(filled.arguments)))
        if best is None or bad < best[0]:
            best = bad, filled
        if not bad or not filled.random:
            break
    assert best is not None
    return best[1]
