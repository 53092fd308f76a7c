"""Checks on the values that a program computes: `nan`, `inf`, `subnormal`, `overflow-f16`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxprtool.errors import ArgumentsError, did_you_mean
from jaxprtool.execute.nans import BadValue, find_nan
from jaxprtool.execute.watch import WatchedRow, watch
from jaxprtool.execute.watch.numbers import FORMATS
from jaxprtool.ir.programs.program import Program

#: The checks of `find_nan` and the kinds they find.
_NOT_FINITE = {"nan": "NaN", "inf": "infinity"}

#: All checks. A finite number overflows in a format if it is not finite there, and underflows if it
#: becomes zero.
CHECKS = (
    *_NOT_FINITE,
    "subnormal",
    *(f"{what}-{name}" for what in ("overflow", "underflow") for name in FORMATS),
)


@dataclass(frozen=True)
class Finding:
    """Values that fail a check.

    Attributes:
        check: The name of the check.
        primitives: The primitives that compute them; empty for an argument that has a NaN.
        source: The user's line, followed by the library's; or the argument.
        backward: Whether they belong to the backward pass of a gradient.
        iteration: For NaNs and infinities, the iteration of each enclosing loop.
        count: The number of elements that fail.
        size: The number of all elements.
        reaches: The results that have a NaN or an infinity because of them.
    """

    check: str
    primitives: tuple[str, ...]
    source: str
    backward: bool
    iteration: tuple[int, ...]
    count: int
    size: int
    reaches: tuple[str, ...] = ()


def require_checks(names: Sequence[str]) -> None:
    """Raise ArgumentsError unless these are names of checks."""
    for name in names:
        if name not in CHECKS:
            hint = did_you_mean(name, CHECKS) or f"available: {', '.join(CHECKS)}"
            raise ArgumentsError(f"unknown check '{name}'", hint)


def findings(
    program: Program, args: object, checks: Sequence[str], device: jax.Device | None = None
) -> list[Finding]:
    """Return the findings of each check in turn, in program order.

    NaNs and infinities are reported where they are produced, others for every line that computes
    them.
    """
    require_checks(checks)
    found: list[Finding] = []
    if any(name in _NOT_FINITE for name in checks):
        bad = find_nan(program, args, device).found
        names = {kind: name for name, kind in _NOT_FINITE.items()}
        found += (_of_bad(names[each.kind], each) for each in bad if names[each.kind] in checks)
    others = [name for name in checks if name not in _NOT_FINITE]
    if others:
        rows = watch(program, args, device=device).rows
        found += (each for row in rows for each in _of_row(row, others))
    return sorted(found, key=lambda each: checks.index(each.check))


def _of_bad(check: str, bad: BadValue) -> Finding:
    made = (bad.primitive,) if bad.primitive else ()
    source = bad.source or bad.argument or "a constant of the program"
    backward = bool(bad.forward)
    return Finding(check, made, source, backward, bad.iteration, bad.count, bad.size, bad.reaches)


def _of_row(row: WatchedRow, checks: Sequence[str]) -> Iterator[Finding]:
    numbers = row.numbers
    for check in checks:
        what, _, name = check.partition("-")
        count: Any = numbers.subnormals
        if name:
            count = round(getattr(numbers.lost[name], what) * numbers.size)
        if count:
            yield Finding(
                *(check, row.primitives, row.source, row.backward, ()), count, numbers.size
            )
