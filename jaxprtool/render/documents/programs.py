"""Documents that commands assemble: of programs, and of findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, NotRequired, TypedDict

from jaxprtool.ir.documents import Number, document
from jaxprtool.ir.program import NamedValue

if TYPE_CHECKING:
    from jaxprtool.analysis.stats import Stats
    from jaxprtool.commands.cost.estimate import Cost, Group
    from jaxprtool.commands.diff.diff import BorderChange, DiffTimes, Size
    from jaxprtool.commands.memory.compiled import CompiledPeak
    from jaxprtool.commands.memory.estimate import Live, Memory, Point
    from jaxprtool.commands.nans.nans import BadValue
    from jaxprtool.commands.nans.nans import Operand as NanOperand
    from jaxprtool.commands.outline.compile_profile import CompileProfile
    from jaxprtool.commands.outline.compile_time import CompileWay, UnrolledLoop
    from jaxprtool.commands.run.checked import Finding
    from jaxprtool.commands.shardings.partitions import Shardings
    from jaxprtool.commands.show.summary import Summary
    from jaxprtool.commands.source.lines import Source
    from jaxprtool.execute.running.run import RunReport, RunTimes
    from jaxprtool.ir.repetition import Repetition

# --- programs -------------------------------------------------------------------------------------
# Documents of programs, and of the commands that show, rewrite and run them.

# --- files ------------------------------------------------------------------------------------


@document(optional=("text", "path", "bytes"))
class EmittedProgram(NamedTuple):
    """A program in another format.

    Attributes:
        name: The name of the program.
        text: The program in this format; None if it was written to a file.
        path: Its file; None without -o.
        bytes: The size of the file, in bytes; None without -o.
    """

    name: str
    text: str | None
    path: str | None
    bytes: int | None


class EmitDocument(NamedTuple):
    """Programs in another format.

    Attributes:
        format: The format, as --to names it.
        programs: The programs.
    """

    format: str
    programs: Sequence[EmittedProgram]


class ReportDocument(NamedTuple):
    """`report`: the written page, and the summaries at its start.

    Attributes:
        path: The file of the page.
        bytes: Its size, in bytes.
        programs: The summary of each program.
    """

    path: str
    bytes: int
    programs: Sequence[Summary]


class ClaimDocument(NamedTuple):
    """Types of results that hold for all sizes.

    Attributes:
        function: The name of the function.
        arguments: The types of its arguments, as given.
        results: The types of its results, as given.
    """

    function: str
    arguments: str
    results: str


# --- programs ---------------------------------------------------------------------------------


class SourcePosition(TypedDict):
    """A line of a source file."""

    file: Annotated[
        str, "The path: from the folder of the user's files, or of a library from its package on."
    ]
    line: Annotated[int, "The line, from 1."]


class Binder(TypedDict):
    """A variable where it is bound."""

    variable: Annotated[str, "Its name in the listing, unique in the program except for `_`."]
    type: NotRequired[Annotated[str, "Its type, as a jaxpr prints it; left out with `--no-types`."]]


class Operand(TypedDict):
    """A variable, or a literal, where it is used."""

    variable: NotRequired[Annotated[str, "The name of the variable."]]
    literal: NotRequired[
        Annotated[str, "Instead of `variable`: the literal's value, as a jaxpr prints it."]
    ]
    type: NotRequired[Annotated[str, "The type of the literal."]]


@document(flat=("value", "atom"))
class BoundValue(NamedTuple):
    """An argument, a constant or an output of a program: its names, its type and its bytes."""

    value: NamedValue
    atom: Operand


class HeldJaxpr(TypedDict):
    """A jaxpr among the parameters of an equation: one of `shared`, `jaxpr` and `folded`."""

    parameter: Annotated[str, "The parameter that holds it: `jaxpr`, `branches[0]`."]
    shared: NotRequired[Annotated[str, "The name of a Body in the program's `shared`."]]
    jaxpr: NotRequired[Annotated[Body, "The jaxpr itself."]]
    folded: NotRequired[
        Annotated[int, "The number of its equations, if it is deeper than `--depth`."]
    ]


class Equation(TypedDict):
    """An equation."""

    primitive: Annotated[str, "The name of its primitive."]
    inputs: Annotated[list[Operand], "Its operands."]
    outputs: Annotated[list[Binder], "The variables that it binds."]
    parameters: Annotated[
        dict[str, str], "Its parameters by name, as text; the jaxprs among them are in `bodies`."
    ]
    bodies: Annotated[list[HeldJaxpr], "The jaxprs that it holds."]
    effects: NotRequired[Annotated[list[str], "Its effects, as text, if it has any."]]
    source: NotRequired[Annotated[SourcePosition, "The user's line, if known."]]
    library: NotRequired[
        Annotated[SourcePosition, "If that line calls a library, the line of the library."]
    ]
    scope: NotRequired[Annotated[str, "Its name stack, if it has one."]]


class Skipped(TypedDict):
    """Equations that `--only` or `--depth` leave out."""

    skipped: Annotated[int, "The number of equations."]


class Body(TypedDict):
    """A jaxpr in a program."""

    constants: Annotated[list[Binder], "The variables of its constants."]
    arguments: Annotated[list[Binder], "Its arguments."]
    equations: Annotated[list[Equation | Skipped], "Its equations, in order."]
    outputs: Annotated[list[Operand], "Its results."]


class Program(TypedDict):
    """A program."""

    format: Annotated[Literal["jaxprtool.program"], "The kind of document."]
    version: Annotated[Literal[1], "The version of the format."]
    name: Annotated[str, "The name of the function."]
    arguments: Annotated[list[BoundValue], "Its arguments, in order."]
    constants: Annotated[list[BoundValue], "Its constants."]
    outputs: Annotated[list[BoundValue], "Its results."]
    effects: Annotated[list[str], "Its effects, as text."]
    equations: Annotated[list[Equation | Skipped], "Its equations, in order."]
    shared: Annotated[dict[str, Body], "The jaxprs that several equations share, by name."]


# --- show, opt --------------------------------------------------------------------------------


class ShowDocument(NamedTuple):
    """`show`."""

    programs: Annotated[list[Program], "The programs shown; several if a pass returned several."]


class StatsDocument(NamedTuple):
    """`show --stats`."""

    stats: Annotated[Sequence[Stats], "The size of each program."]


@document(names={"step": "pass"})
class PassRun(NamedTuple):
    """The effect of a pass on a program."""

    step: Annotated[str, "The pass, with its options."]
    program: Annotated[str, "The name of the program."]
    seconds: Annotated[float, "The time of the pass."]
    equations_before: Annotated[int, "The number of equations before the pass."]
    equations_after: Annotated[int, "The number of equations after the pass."]


class OptDocument(NamedTuple):
    """`opt`."""

    programs: Annotated[list[Program], "The programs after the passes."]
    passes: Annotated[Sequence[PassRun], "The effect of each pass, in the order in which they ran."]


# --- run --------------------------------------------------------------------------------------


@document(flat=("times",))
class StepTimes(NamedTuple):
    """The time of each step of a run, in seconds."""

    trace: Annotated[float, "Tracing."]
    passes: Annotated[float | None, "All passes; null if included in the time of tracing."]
    times: RunTimes


@document(optional=("value", "statistics"))
class Output(NamedTuple):
    """A result of a run: its value if it is small, or else statistics."""

    name: Annotated[str, "Its readable path."]
    type: Annotated[str, "Its type, as a jaxpr prints it."]
    value: Annotated[object, "The numbers, as nested lists."] = None
    statistics: Annotated[
        dict[str, object] | None,
        "By name: `min`, `max`, `mean`, `nan`, `inf`, or `true` and `false`.",
    ] = None


@document(optional=("found",))
class RunDocument(NamedTuple):
    """`run`."""

    name: Annotated[str, "The name of the program."]
    devices: Annotated[list[str], "The devices that it ran on: `cpu:0`."]
    random: Annotated[Sequence[str], "The arguments that were filled with random values."]
    times: Annotated[StepTimes, "The time of each step."]
    outputs: Annotated[list[Output], "The results, in order."]
    found: Annotated[Sequence[Finding] | None, "With `--check`: the values that fail a check."] = (
        None
    )


# --- unzip, vmap ------------------------------------------------------------------------------


@document(optional=("library",))
class Variable(NamedTuple):
    """A variable: a result of init and an argument of apply."""

    name: Annotated[str, "Its path: `first/w`."]
    type: Annotated[str, "Its type, as a jaxpr prints it."]
    shape: Annotated[Sequence[Number], "Its dimensions; a symbolic one as text."]
    dtype: Annotated[str, "Its dtype, as NumPy calls it."]
    bytes: Annotated[int | None, "Its size in bytes; null if unknown."]
    source: Annotated[SourcePosition | None, "The line that declares it; null if unknown."]
    library: Annotated[
        SourcePosition | None,
        "If that line calls a library, the line of the library that declares it.",
    ] = None


@document(optional=("runs",))
class UnzipDocument(NamedTuple):
    """`unzip`."""

    variables: Annotated[list[Variable], "The variables, in the order in which they are declared."]
    programs: Annotated[list[Program], "init and apply, after the passes."]
    runs: Annotated[list[RunDocument] | None, "With `--run`: the runs of init and apply."] = None


class MappedArgument(NamedTuple):
    """An argument of a program that is mapped."""

    name: Annotated[str, "Its readable path."]
    axis: Annotated[int | None, "The axis along which it is mapped; null if unmapped."]


class VmapDocument(NamedTuple):
    """`vmap`."""

    axis_size: Annotated[int, "The number of batch elements."]
    axis_name: Annotated[str | None, "The name by which collectives call the axis, or null."]
    chunk: Annotated[int | None, "The number of batch elements computed at a time; null for all."]
    arguments: Annotated[Sequence[MappedArgument], "The mapped axis of each argument."]
    equations_before: Annotated[int, "The number of equations of the program of one batch element."]
    equations_after: Annotated[int, "The number of equations of the mapped program."]
    programs: Annotated[list[Program], "The mapped program, after the passes."]


# --- found ----------------------------------------------------------------------------------------
# Documents assembled from findings.


@document(optional=("compiled",))
class CostDocument(NamedTuple):
    """`cost`, of one program."""

    total: Annotated[Group, "The cost of the whole first program."]
    groups: Annotated[Sequence[Group], "The groups of the first program."]
    programs: Annotated[Sequence[Cost], "Each program."]
    compiled: Annotated[
        Shardings | None, "With `--compiled`: the shardings of the program, and its collectives."
    ] = None


@document(optional=("compiled",))
class MemoryDocument(NamedTuple):
    """`memory`, of one program."""

    peak_bytes: Annotated[int, "The bytes that the first program needs."]
    at: Annotated[Point, "The peak."]
    live: Annotated[Sequence[Live], "The values live at the peak, the largest first."]
    programs: Annotated[Sequence[Memory], "Each program."]
    compiled: Annotated[CompiledPeak | None, "With `--compiled`: XLA's buffers."] = None


class SourceDocument(NamedTuple):
    """`source`."""

    programs: Annotated[Sequence[Source], "Each program."]


class Measurements(NamedTuple):
    """A program measured as traced, and outlined."""

    devices: Annotated[Sequence[str], "The devices that both ran on: `cpu:0`."]
    random: Annotated[Sequence[str], "The arguments that were filled with random values."]
    trace: Annotated[float, "The time of tracing and the passes before, in seconds."]
    outline: Annotated[float, "The time of `outline`, in seconds."]
    as_traced: Annotated[RunReport, "The program as it was traced."]
    outlined: Annotated[RunReport | None, "The program outlined; null if nothing repeats."]


@document(optional=("measured", "profile"))
class OutlineDocument(NamedTuple):
    """`outline`."""

    programs: Annotated[
        Sequence[Repetition], "The repetition in each program; several if a pass returned several."
    ]
    measured: Annotated[Measurements | None, "With `--compile`: the time and memory of both."] = (
        None
    )
    ways: Annotated[
        Sequence[CompileWay],
        "The given pipeline, then those that compile faster; empty if the program has symbolic "
        "sizes, or there are several.",
    ] = ()
    unrolled: Annotated[
        Sequence[UnrolledLoop], "The loops that `unroll` makes XLA compile several times."
    ] = ()
    profile: Annotated[
        CompileProfile | None, "With `--compile-profile`: the compile time by stage, pass and body."
    ] = None


class NansDocument(NamedTuple):
    """`nans`: the first NaN or infinity that reaches a result, or else the first; and all others.

    If it is in an argument, `primitive` and `source` are empty.
    """

    name: Annotated[str, "The name of the program."]
    found: Annotated[bool, "Whether a NaN or an infinity was found."]
    primitive: Annotated[str, "The primitive that computes it; empty if there is none."] = ""
    source: Annotated[str, "The user's line, followed by the library's; empty if unknown."] = ""
    path: Annotated[Sequence[str], "The enclosing equations, the outermost first."] = ()
    iteration: Annotated[Sequence[int], "The iteration of each enclosing loop, from 0."] = ()
    operands: Annotated[Sequence[NanOperand], "The operands of the equation."] = ()
    all: Annotated[Sequence[BadValue], "All values found; those that reach a result first."] = ()


class DiffLine(NamedTuple):
    """An equation that only one program has, or that differs from its counterpart."""

    hunk: Annotated[int, "The number of its hunk, from 0."]
    primitive: Annotated[str, "The primitive; empty if a body's results or constants differ."]
    text: Annotated[str, "The equation; for a changed one, the old and the new text."]
    source: Annotated[str, "The user's line, followed by the library's; empty if unknown."]
    path: Annotated[Sequence[str], "The enclosing equations, the outermost first."]
    differs_in: Annotated[
        list[str],
        "For a changed equation: `constant`, `dtype`, `shape`, `parameter`, `operand`, "
        "`primitive`, `call`.",
    ]


@document(optional=("measured",))
class DiffDocument(NamedTuple):
    """`diff`: the differences between two programs."""

    verdict: Annotated[
        str, "`equivalent`, `same up to constants`, `same up to dtypes` or `different`."
    ]
    removed: Annotated[list[DiffLine], "The equations that only the first program has."]
    added: Annotated[list[DiffLine], "The equations that only the second program has."]
    changed: Annotated[list[DiffLine], "The equations that differ from their counterparts."]
    retyped: Annotated[
        int, "The number of equations that differ only in types, because their operands do."
    ]
    border: Annotated[Sequence[BorderChange], "The arguments, results and axes that differ."]
    before: Annotated[Size, "The size of the first program."]
    after: Annotated[Size, "The size of the second program."]
    measured: Annotated[DiffTimes | None, "With `--measure`: the measured times."] = None
