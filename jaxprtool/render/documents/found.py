"""Documents assembled from findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

from jaxprtool.ir.basics.documents import document

if TYPE_CHECKING:
    from jaxprtool.analysis.compile_time import CompileWay, UnrolledLoop
    from jaxprtool.analysis.cost import Cost, Group
    from jaxprtool.analysis.diff import BorderChange, DiffTimes, Size
    from jaxprtool.analysis.memory import Live, Memory, Point
    from jaxprtool.analysis.memory.compiled import CompiledPeak
    from jaxprtool.analysis.shardings import Shardings
    from jaxprtool.analysis.source_lines import Source
    from jaxprtool.execute.nans import BadValue, Operand
    from jaxprtool.execute.running.compile_profile import CompileProfile
    from jaxprtool.execute.running.run import RunReport
    from jaxprtool.ir.programs.repetition import Repetition


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
    operands: Annotated[Sequence[Operand], "The operands of the equation."] = ()
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
