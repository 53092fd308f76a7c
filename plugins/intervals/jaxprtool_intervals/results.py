"""The bounds of a program's results: what `jaxprtool bounds` computes, and its document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxprtool import Program
from jaxprtool.extend import type_of
from jaxprtool_intervals.intervals import bounds


@dataclass(frozen=True)
class ResultBounds:
    """The bounds of all elements of a result.

    Attributes:
        name: The name of the result.
        type: Its type.
        low: The lower bound; -Infinity if there is none.
        high: The upper bound; Infinity if there is none.
        nan: Whether an element may be NaN.
    """

    name: str
    type: str
    low: float
    high: float
    nan: bool


@dataclass(frozen=True)
class ProgramBounds:
    """The bounds of the results of a program.

    Attributes:
        name: The name of the program.
        results: The bounds of each result.
    """

    name: str
    results: tuple[ResultBounds, ...]


def program_bounds(
    program: Program, arguments: Mapping[str, tuple[float, float]] | None = None
) -> ProgramBounds:
    """Return the bounds of a program's results; the arguments are those of `bounds`."""
    types = (type_of(var.aval) for var in program.jaxpr.outvars)
    results = zip(bounds(program, dict(arguments or {})).items(), types, strict=True)
    return ProgramBounds(
        program.name,
        tuple(
            ResultBounds(name, type, interval.low, interval.high, interval.nan)
            for (name, interval), type in results
        ),
    )
