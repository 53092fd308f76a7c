"""Documents of programs, and of the commands that show, rewrite and run them."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

# --- programs ---------------------------------------------------------------------------------


class SourceLine(TypedDict):
    """A place in a source file."""

    file: Annotated[
        str, "The path: from the folder of the user's files, or of a library from its package on."
    ]
    line: Annotated[int, "The line, from 1."]


class Binder(TypedDict):
    """A variable where it is bound."""

    variable: Annotated[str, "Its name in the listing, unique in the program but for `_`."]
    type: NotRequired[Annotated[str, "Its type, as a jaxpr prints it; left out with `--no-types`."]]


class Operand(TypedDict):
    """A variable, or a literal, where it is used."""

    variable: NotRequired[Annotated[str, "The name of the variable."]]
    literal: NotRequired[
        Annotated[str, "Instead of `variable`: the literal's value, as a jaxpr prints it."]
    ]
    type: NotRequired[Annotated[str, "The type of the literal."]]


class NamedValue(TypedDict):
    """A value that is counted."""

    name: Annotated[str, "Its readable path, such as `params['w']`."]
    type: Annotated[str, "Its type, as a jaxpr prints it."]
    bytes: Annotated[int | None, "Its size; null where it is unknown."]
    at_most: NotRequired[
        Annotated[
            int | None,
            "Of an argument that is a size, or lengths of examples: its largest value; null where "
            "it is unknown.",
        ]
    ]
    at_least: NotRequired[
        Annotated[int, "Of an argument that is a size, or lengths of examples: its least value."]
    ]
    rows: NotRequired[
        Annotated[str, "Of an argument that is lengths of examples: how many rows these have."]
    ]


class BoundValue(NamedValue):
    """An argument, a constant or an output of a program."""

    variable: NotRequired[Annotated[str, "The name of the variable."]]
    literal: NotRequired[
        Annotated[str, "Instead of `variable`, of an output: the literal that is returned."]
    ]


class Held(TypedDict):
    """A jaxpr among the parameters of an equation: one of `shared`, `jaxpr` and `folded`."""

    parameter: Annotated[str, "Where it is: `jaxpr`, `branches[0]`."]
    shared: NotRequired[Annotated[str, "The name of a Body in the program's `shared`."]]
    jaxpr: NotRequired[Annotated[Body, "The jaxpr itself."]]
    folded: NotRequired[
        Annotated[int, "How many equations it has, if it is deeper than `--depth`."]
    ]


class Equation(TypedDict):
    """An equation."""

    primitive: Annotated[str, "The name of its primitive."]
    inputs: Annotated[list[Operand], "Its operands."]
    outputs: Annotated[list[Binder], "The variables that it binds."]
    parameters: Annotated[
        dict[str, str], "Its parameters by name, as text; the jaxprs among them are in `bodies`."
    ]
    bodies: Annotated[list[Held], "The jaxprs that it holds."]
    effects: NotRequired[Annotated[list[str], "Its effects, as text, if it has any."]]
    source: NotRequired[
        Annotated[SourceLine, "The line of the user's code that it comes from, if that is known."]
    ]
    library: NotRequired[
        Annotated[SourceLine, "If that line calls a library: the line of this that it comes from."]
    ]
    scope: NotRequired[Annotated[str, "Its name stack, if it has one."]]


class Skipped(TypedDict):
    """Equations that `--only` or `--depth` leave out."""

    skipped: Annotated[int, "How many."]


class Body(TypedDict):
    """A jaxpr in a program."""

    constants: Annotated[list[Binder], "The variables of its constants."]
    arguments: Annotated[list[Binder], "Its arguments."]
    equations: Annotated[list[Equation | Skipped], "Its equations, in order."]
    outputs: Annotated[list[Operand], "What it returns."]


class Program(TypedDict):
    """A program."""

    format: Annotated[Literal["jaxprtool.program"], "What this is."]
    version: Annotated[Literal[1], "The version of the format."]
    name: Annotated[str, "The name of the function."]
    arguments: Annotated[list[BoundValue], "Its arguments, in order."]
    constants: Annotated[list[BoundValue], "Its constants."]
    outputs: Annotated[list[BoundValue], "What it returns."]
    effects: Annotated[list[str], "Its effects, as text."]
    equations: Annotated[list[Equation | Skipped], "Its equations, in order."]
    shared: Annotated[dict[str, Body], "The jaxprs that several equations have in common, by name."]


class PrimitiveCount(TypedDict):
    """How often a primitive occurs."""

    name: Annotated[str, "The primitive."]
    total: Annotated[int, "How many equations it has in all."]
    by_depth: Annotated[list[int], "How many at each depth; the program's own is 0."]


class Stats(TypedDict):
    """The size of a program."""

    format: Annotated[Literal["jaxprtool.stats"], "What this is."]
    version: Annotated[Literal[1], "The version of the format."]
    name: Annotated[str, "The name of the function."]
    equations: Annotated[int, "How many equations there are in all."]
    by_depth: Annotated[list[int], "How many at each depth; the program's own is 0."]
    primitives: Annotated[
        list[PrimitiveCount], "How often each primitive occurs, the most frequent first."
    ]
    constants: Annotated[list[NamedValue], "The constants of the program and of its bodies."]
    arguments: Annotated[list[NamedValue], "The arguments."]
    outputs: Annotated[list[NamedValue], "The outputs."]


# --- show, opt --------------------------------------------------------------------------------


class ShowDocument(TypedDict):
    """`show`."""

    programs: Annotated[list[Program], "What is shown; several if a pass has given several."]


class StatsDocument(TypedDict):
    """`show --stats`."""

    stats: Annotated[list[Stats], "The size of each program."]


# Not a class body: "pass" is a keyword of Python.
PassRun = TypedDict(
    "PassRun",
    {
        "pass": Annotated[str, "The pass, with its options."],
        "program": Annotated[str, "The name of the program."],
        "seconds": Annotated[float, "How long it took."],
        "equations_before": Annotated[int, "How many equations it was given."],
        "equations_after": Annotated[int, "How many it left."],
    },
)
PassRun.__doc__ = "What a pass did to a program."


class OptDocument(TypedDict):
    """`opt`."""

    programs: Annotated[list[Program], "The programs after the passes."]
    passes: Annotated[list[PassRun], "What each pass did, in the order in which they ran."]


# --- run --------------------------------------------------------------------------------------


class Times(TypedDict):
    """How long each step of a run took, in seconds."""

    trace: Annotated[float, "Tracing."]
    passes: Annotated[float | None, "All passes; null where they are counted with the tracing."]
    lower: Annotated[float | None, "Lowering; null under `jax_disable_jit`."]
    compile: Annotated[float | None, "Compiling; null under `jax_disable_jit`."]
    cached: Annotated[bool, "Whether it was not compiled, but found in JAX's cache."]
    first_call: Annotated[float, "The first call."]
    repeat: Annotated[float | None, "The median of the calls after it; null if there were none."]
    repeats: Annotated[int, "How many these were."]


class Output(TypedDict):
    """A result of a run: its value if it is small, or else statistics."""

    name: Annotated[str, "Its readable path."]
    type: Annotated[str, "Its type, as a jaxpr prints it."]
    value: NotRequired[Annotated[object, "The numbers, as nested lists."]]
    statistics: NotRequired[
        Annotated[
            dict[str, object], "By name: `min`, `max`, `mean`, `nan`, `inf`, or `true` and `false`."
        ]
    ]


class CheckFinding(TypedDict):
    """Values that a check of `--check` is against."""

    check: Annotated[str, "The check."]
    primitives: Annotated[list[str], "What computes them; nothing of an argument."]
    source: Annotated[str, "The user's line, with the library's behind; or the argument."]
    backward: Annotated[bool, "Whether they are of the backward part of a gradient."]
    iteration: Annotated[list[int], "The round of each loop around, of NaNs and infinities."]
    count: Annotated[int, "How many elements are such."]
    size: Annotated[int, "How many elements there are."]
    reaches: Annotated[list[str], "The results that have a NaN or an infinity of it."]


class RunDocument(TypedDict):
    """`run`."""

    name: Annotated[str, "The name of the program."]
    devices: Annotated[list[str], "Where it ran: `cpu:0`."]
    random: Annotated[list[str], "The arguments that were filled with random values."]
    times: Annotated[Times, "How long each step took."]
    outputs: Annotated[list[Output], "The results, in order."]
    found: NotRequired[Annotated[list[CheckFinding], "With `--check`: what is found."]]


# --- unzip, vmap ------------------------------------------------------------------------------


class Variable(TypedDict):
    """A variable that init makes and apply takes."""

    name: Annotated[str, "Its path: `first/w`."]
    type: Annotated[str, "Its type, as a jaxpr prints it."]
    shape: Annotated[list[int | str], "Its dimensions; a symbolic one is a text."]
    dtype: Annotated[str, "Its dtype, as NumPy calls it."]
    bytes: Annotated[int | None, "Its size; null where it is unknown."]
    source: Annotated[SourceLine | None, "The line that declares it; null where it is unknown."]
    library: NotRequired[
        Annotated[SourceLine, "If that line calls a library: the line of this that declares it."]
    ]


class UnzipDocument(TypedDict):
    """`unzip`."""

    variables: Annotated[list[Variable], "The variables, in the order in which they are declared."]
    programs: Annotated[list[Program], "init and apply, after the passes."]
    runs: NotRequired[
        Annotated[list[RunDocument], "With `--run`: the run of init and that of apply."]
    ]


class MappedArgument(TypedDict):
    """An argument of a program that is mapped."""

    name: Annotated[str, "Its readable path."]
    axis: Annotated[int | None, "The axis along which it is mapped; null if all lanes share it."]


class VmapDocument(TypedDict):
    """`vmap`."""

    axis_size: Annotated[int, "How many lanes there are."]
    axis_name: Annotated[str | None, "What collectives call the axis, or null."]
    chunk: Annotated[int | None, "How many lanes are computed at a time; null if all are."]
    arguments: Annotated[list[MappedArgument], "Where each argument is mapped."]
    equations_before: Annotated[int, "How many equations the program of one lane has."]
    equations_after: Annotated[int, "How many the mapped one has."]
    programs: Annotated[list[Program], "The mapped program, or what the passes made of it."]
