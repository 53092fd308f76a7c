"""Documents of what is found while a program runs: NaNs and infinities."""

from __future__ import annotations

from typing import Annotated, TypedDict


class FoundOperand(TypedDict):
    """A value that an equation was given, or one on the way to it."""

    type: Annotated[str, "Its type."]
    argument: Annotated[str, "The argument that it is; empty if it is none."]
    primitive: Annotated[str, "What computes it; empty of an argument or a constant."]
    source: Annotated[str, "The user's line that computes it; empty if that is not known."]
    low: Annotated[float | None, "Its least number; null if it has none."]
    high: Annotated[float | None, "Its greatest number; null if it has none."]
    nans: Annotated[int, "How many NaNs are in it."]
    infs: Annotated[int, "How many infinities are in it."]


class FoundValue(TypedDict):
    """A NaN or an infinity that an equation makes of values that have none, or an argument has."""

    kind: Annotated[str, "`NaN` or `infinity`."]
    argument: Annotated[str, "The argument that has it; empty if an equation makes it."]
    primitive: Annotated[str, "What makes it; empty if an argument has it."]
    source: Annotated[str, "The user's line, with the library's behind; empty if not known."]
    scope: Annotated[str, "The name scopes around the equation."]
    path: Annotated[list[str], "The equations around it, the outermost first."]
    iteration: Annotated[list[int], "The number of the round of each loop around it, from 0."]
    times: Annotated[int, "How often the equation makes one."]
    type: Annotated[str, "The type of the result."]
    count: Annotated[int, "How many elements of the result are such."]
    size: Annotated[int, "How many elements the result has."]
    position: Annotated[list[int], "The position of the first."]
    devices: Annotated[list[str], "The devices that have one, if the result is on several."]
    operands: Annotated[list[FoundOperand], "What the equation was given."]
    way: Annotated[list[FoundOperand], "The values that led to it, the nearest first."]
    reaches: Annotated[list[str], "The results that are not finite because of it."]
    dropped: Annotated[str, "If it reaches none, the last equation that read it."]
    leads_to: Annotated[list[str], "The equations that make another of it."]
    forward: Annotated[str, "In a backward pass, the equation that it is the derivative of."]


class NansDocument(TypedDict):
    """`nans`: the first NaN or infinity that reaches a result, or else the first; and all others.

    Of an argument that has one, `primitive` and `source` are empty.
    """

    name: Annotated[str, "The name of the program."]
    found: Annotated[bool, "Whether there is one."]
    primitive: Annotated[str, "What makes it; empty if there is none."]
    source: Annotated[str, "The user's line, with the library's behind; empty if not known."]
    path: Annotated[list[str], "The equations around it, the outermost first."]
    iteration: Annotated[list[int], "The number of the round of each loop around it, from 0."]
    operands: Annotated[list[FoundOperand], "What it was given."]
    all: Annotated[list[FoundValue], "Every one; those that reach a result first."]
