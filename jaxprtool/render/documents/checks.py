"""Documents of what is found wrong: NaNs and infinities, differences, and the smallest program."""

from __future__ import annotations

from typing import Annotated, TypedDict

from jaxprtool.render.documents.programs import Program


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


class MeasureDocument(TypedDict):
    """How a value of a variant differs from the reference's; what is not finite has no error."""

    name: Annotated[str, "What it is: the path of a result."]
    type: Annotated[str, "Its type."]
    reference_type: Annotated[str, "The type of the reference's."]
    equal: Annotated[bool, "Whether types and bits are the same, any NaN being like any other."]
    within: Annotated[bool, "Whether every element is within tolerance."]
    rtol: Annotated[float, "The relative error that is tolerated."]
    atol: Annotated[float, "The absolute error that is tolerated."]
    absolute: Annotated[float | None, "The largest absolute error; null of what has no numbers."]
    relative: Annotated[float | None, "The largest relative error, where the reference is not 0."]
    ulps: Annotated[int | None, "The largest error in units in the last place; null of no floats."]
    cosine: Annotated[float | None, "The cosine of the angle between both; null of one element."]
    nans: Annotated[int, "How many NaNs it has."]
    reference_nans: Annotated[int, "How many NaNs the reference's has."]
    infinities: Annotated[int, "How many infinities it has."]
    reference_infinities: Annotated[int, "How many infinities the reference's has."]
    proof: Annotated[bool, "Whether most elements are finite; if not, nothing is proved by it."]
    differing: Annotated[int, "How many elements have other bits."]
    beyond: Annotated[int, "How many elements are beyond tolerance."]
    size: Annotated[int, "How many elements there are."]
    position: Annotated[
        list[int] | None, "The position of the first beyond tolerance, or of the largest error."
    ]


class SmallestArgument(TypedDict):
    """An argument of the smallest input for which a variant fails."""

    name: Annotated[str, "The argument."]
    value: Annotated[str, "What it is, in words: `zero but for [2] = 1.0`."]


class VariantDocument(TypedDict):
    """A variant beside the reference."""

    name: Annotated[str, "What it is called: `-O2, gpu`."]
    error: Annotated[str, "Why it has no results, as the signal that killed it; or empty."]
    equal: Annotated[bool, "Whether all results are equal to the bit."]
    within: Annotated[bool, "Whether all results are within tolerance."]
    results: Annotated[list[MeasureDocument], "How each result differs; none if it failed."]


# Not a class body: "pass" is a keyword of Python.
PartingDocument = TypedDict(
    "PartingDocument",
    {
        "variant": Annotated[str, "The variant."],
        "found": Annotated[bool, "Whether an equation was found."],
        "why": Annotated[str, "Why none was; or empty."],
        "pass": Annotated[str, "The pass that makes the difference; empty if it is none."],
        "place": Annotated[int, "Which of the passes that is, from 1."],
        "passes": Annotated[int, "How many passes there are."],
        "strict": Annotated[bool, "Whether it shows only where each element is held to tolerance."],
        "primitive": Annotated[str, "What gives other values first."],
        "source": Annotated[str, "The user's line, with the library's behind; empty if not known."],
        "scope": Annotated[str, "The name scopes around it."],
        "path": Annotated[list[str], "The equations around it, the outermost first."],
        "iteration": Annotated[list[int], "The number of the round of each loop around, from 0."],
        "counterpart": Annotated[str, "The equation of the variant, if that is another."],
        "parameters": Annotated[list[str], "The parameters that it has otherwise there."],
        "operands": Annotated[list[MeasureDocument], "How what it is given differs."],
        "results": Annotated[list[MeasureDocument], "How what it gives differs."],
        "removed": Annotated[list[str], "Equations of the reference alone, between these."],
        "added": Annotated[list[str], "Equations of the variant alone, between these."],
    },
)
PartingDocument.__doc__ = "The first equation at which a variant parts from the reference."


class CompareDocument(TypedDict):
    """`compare`: variants of a program on the same inputs."""

    name: Annotated[str, "The name of the program."]
    reference: Annotated[str, "The variant that the others are compared with: the first."]
    inputs: Annotated[str, "What the inputs are."]
    random: Annotated[list[str], "The arguments that are random."]
    smallest: Annotated[list[SmallestArgument], "With `--trials`, the input, if one has failed."]
    within: Annotated[bool, "Whether all variants ran, and are within tolerance."]
    error: Annotated[str, "Why the reference has no results; or empty."]
    variants: Annotated[list[VariantDocument], "The others."]
    partings: Annotated[list[PartingDocument], "With `--bisect`, where each parts that differs."]


class ReduceDocument(TypedDict):
    """`reduce`: how a program was made smaller, and what it is now."""

    equations_before: Annotated[int, "The number of equations at first, at every depth."]
    equations_after: Annotated[int, "The number at the end."]
    tries: Annotated[int, "How many programs were tried."]
    seconds: Annotated[float, "How long it took."]
    seen: Annotated[str, "What the check saw at first: a signal, a message; may be empty."]
    smaller: Annotated[bool, "Whether the check holds for anything smaller."]
    holds: Annotated[bool, "Whether it held for the result when that was tried once more."]
    interrupted: Annotated[bool, "Whether the search was cut short by Ctrl-C."]
    program: Annotated[Program, "The smallest program found."]
