"""Count non-finite results, which prove nothing, and find random inputs that avoid them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxprtool.errors import UnsupportedError
from jaxprtool.execute.nans import find_nan
from jaxprtool.execute.running.arrays import as_numpy, wide
from jaxprtool.execute.running.fill import Filled, fill
from jaxprtool.ir.dataflow.input_domains import POSITIVE, Domain
from jaxprtool.ir.programs.program import Program

#: The domains tried for arguments that lead to a NaN, in this order.
_DOMAINS: tuple[Domain, ...] = (
    "positive definite",
    POSITIVE,
    (0.0, 1.0),
    (-0.1, 0.1),
    (1.0, math.inf),
    (-math.inf, 0.0),
)

#: The number of searches for origins of NaNs.
_ORIGINS = 4


def nonfinite(value: Any) -> int:
    """Return the number of NaNs and infinities in a value."""
    if not hasattr(value, "dtype") or not jnp.issubdtype(value.dtype, jnp.inexact):
        return 0
    return int((~np.isfinite(wide(as_numpy(value)))).sum())


def is_mostly_nonfinite(count: int, size: int) -> bool:
    """Return True if `count` non-finite elements are most of a value."""
    return 2 * count > size


def unproven(names: Sequence[str], values: Sequence[Any]) -> list[str]:
    """Return a message for each result that is not finite in most elements."""
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
    """Return flat arguments like `fill`, chosen so that as many results as possible are finite.

    While a result contains a NaN or is not finite in most elements, other domains are tried: for
    the random arguments that the responsible equation depends on, and for all random arguments
    without a known domain.

    Args:
        program: The program.
        given: Values by argument name; a `jax.ShapeDtypeStruct` is filled.
        run: Runs the program on flat arguments.
        seed: The seed of random values.
    """

    def attempt(domains: Mapping[str, Domain]) -> _Attempt:
        filled = fill(program, given, seed, domains)
        values = run(filled.arguments)
        mostly = len(unproven(program.out_names, values))
        nans = any(bool(np.isnan(wide(as_numpy(each))).any()) for each in values if nonfinite(each))
        return _Attempt(filled, mostly, sum(map(nonfinite, values)), nans)

    best = attempt({})
    for _ in range(_ORIGINS):
        if not (best.nans or best.mostly):
            break
        before = best
        for domains in _other_domains(program, before.filled):
            tried = attempt({**before.filled.within, **domains})
            best = min(best, tried, key=lambda each: (each.mostly, each.elements))
            if not best.elements:
                return best.filled
        if best is before:
            break
    return best.filled


@dataclass(frozen=True)
class _Attempt:
    """Arguments, and the non-finite results for them.

    Attributes:
        filled: The arguments.
        mostly: The number of results that are not finite in most elements.
        elements: The number of non-finite elements in results.
        nans: Whether any of them is a NaN.
    """

    filled: Filled
    mostly: int
    elements: int
    nans: bool


def _other_domains(program: Program, filled: Filled) -> Iterator[dict[str, Domain]]:
    """Yield domains of arguments that may keep results finite, most likely first."""
    avals = dict(program.arguments)
    drawn = [name for name in filled.random if jnp.issubdtype(avals[name].dtype, jnp.floating)]
    free = [name for name in drawn if name not in filled.within]
    leading = [name for name in _leading_to_nan(program, filled) if name in drawn]
    for names in (leading, free):
        square = [name for name in names if _is_square(avals[name].shape)]
        for domain in _DOMAINS:
            drawn_so = square if domain == "positive definite" else names
            if drawn_so:
                yield dict.fromkeys(drawn_so, domain)


def _leading_to_nan(program: Program, filled: Filled) -> list[str]:
    """Return the arguments that lead to the first NaN or infinity in the results."""
    found = None
    with suppress(UnsupportedError):
        found = find_nan(program, filled.arguments).first
    if found is None:
        return []
    return [each.argument for each in (*found.operands, *found.way) if each.argument]


def _is_square(shape: Sequence[int]) -> bool:
    return len(shape) >= 2 and shape[-1] == shape[-2] > 1
