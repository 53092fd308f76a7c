"""Documents of the values that a program computes on the way."""

from __future__ import annotations

from typing import Annotated, TypedDict


class LostNumbers(TypedDict):
    """What a format would lose of some values, as fractions of all elements."""

    overflow: Annotated[float, "Those that are finite, and beyond its largest number."]
    underflow: Annotated[float, "Those that are not zero, and would be."]
    subnormal: Annotated[float, "Those that it has with fewer digits."]


class WatchedValues(TypedDict):
    """The values of a line, of a scope, or of a result of an equation."""

    name: Annotated[str, "The line, the scope, or what the value is called, told from others."]
    source: Annotated[str, "The user's line, with the library's behind; empty of a scope."]
    backward: Annotated[bool, "Whether they are of the backward part of a gradient."]
    iteration: Annotated[list[int], "The round of each loop around, if rounds were chosen."]
    primitives: Annotated[list[str], "What computes them."]
    types: Annotated[list[str], "Their types."]
    path: Annotated[list[str], "The equations around an equation, the outermost first."]
    times: Annotated[int, "How often values were computed."]
    size: Annotated[int, "How many elements there are, of all executions."]
    low: Annotated[float | str | None, "The least that is no NaN; null if there is none."]
    high: Annotated[float | str | None, "The greatest."]
    mean: Annotated[float | str | None, "The mean of those that are finite."]
    deviation: Annotated[float | str | None, "Their standard deviation."]
    zeros: Annotated[int, "How many are zero."]
    nans: Annotated[int, "How many are NaN."]
    infs: Annotated[int, "How many are infinite."]
    subnormals: Annotated[int, "How many are subnormal numbers of their own type."]
    exponents: Annotated[
        dict[str, int], "How many have a magnitude from 2 to the power of this to the next."
    ]
    lost: Annotated[dict[str, LostNumbers], "What narrower formats would lose; none of integers."]


class WatchDocument(TypedDict):
    """`watch`: the values that a function computes on the way."""

    name: Annotated[str, "The name of the program."]
    by: Annotated[str, "What they are grouped by: `line`, `scope` or `equation`."]
    rows: Annotated[list[WatchedValues], "The groups, in the order of the program."]
    left_out: Annotated[list[str], "Loops in a `shard_map`, whose insides are not watched."]
