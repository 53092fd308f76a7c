"""Documents assembled from findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

from jaxprtool.ir.basics.documents import document

if TYPE_CHECKING:
    from jaxprtool.analysis.cost import Cost, Group
    from jaxprtool.analysis.diff import BorderChange, Size
    from jaxprtool.analysis.memory import Live, Memory, Point
    from jaxprtool.analysis.source_lines import Source
    from jaxprtool.execute.nans import BadValue, Operand
    from jaxprtool.execute.running.run import RunReport
    from jaxprtool.ir.programs.repetition import Repetition


class CostDocument(NamedTuple):
    """`cost`, of one program."""

    total: Annotated[Group, "All of the first program."]
    groups: Annotated[Sequence[Group], "The groups of the first program."]
    programs: Annotated[Sequence[Cost], "Each program."]


class MemoryDocument(NamedTuple):
    """`memory`, of one program."""

    peak_bytes: Annotated[int, "The bytes that the first program needs."]
    at: Annotated[Point, "Where it needs most."]
    live: Annotated[Sequence[Live], "What is alive there, the largest first."]
    programs: Annotated[Sequence[Memory], "Each program."]


class SourceDocument(NamedTuple):
    """`source`."""

    programs: Annotated[Sequence[Source], "Each program."]


class Measurements(NamedTuple):
    """A program measured as traced, and outlined."""

    devices: Annotated[Sequence[str], "Where both ran: `cpu:0`."]
    random: Annotated[Sequence[str], "The arguments that were filled with random values."]
    trace: Annotated[float, "How long tracing and the passes before took, in seconds."]
    outline: Annotated[float, "How long `outline` took, in seconds."]
    as_traced: Annotated[RunReport, "The program as it was traced."]
    outlined: Annotated[RunReport | None, "The program outlined; null if nothing repeats."]


@document(optional=("measured",))
class OutlineDocument(NamedTuple):
    """`outline`."""

    programs: Annotated[
        Sequence[Repetition], "What is repeated; several programs if a pass has given several."
    ]
    measured: Annotated[Measurements | None, "With `--compile`: what both take."] = None


class NansDocument(NamedTuple):
    """`nans`: the first NaN or infinity that reaches a result, or else the first; and all others.

    Of an argument that has one, `primitive` and `source` are empty.
    """

    name: Annotated[str, "The name of the program."]
    found: Annotated[bool, "Whether there is one."]
    primitive: Annotated[str, "What makes it; empty if there is none."] = ""
    source: Annotated[str, "The user's line, with the library's behind; empty if not known."] = ""
    path: Annotated[Sequence[str], "The equations around it, the outermost first."] = ()
    iteration: Annotated[Sequence[int], "The number of the iteration of each loop around it."] = ()
    operands: Annotated[Sequence[Operand], "What it was given."] = ()
    all: Annotated[Sequence[BadValue], "Every one; those that reach a result first."] = ()


class DiffLine(NamedTuple):
    """An equation that only one program has, or that differs from its counterpart."""

    hunk: Annotated[int, "The number of the hunk that it is in, from 0."]
    primitive: Annotated[str, "The primitive; empty if a body's results or constants differ."]
    text: Annotated[str, "The equation, with what it was before what it is."]
    source: Annotated[str, "The user's line, with the library's behind; empty if not known."]
    path: Annotated[Sequence[str], "The equations around it, the outermost first."]
    differs_in: Annotated[
        list[str],
        "`constant`, `dtype`, `shape`, `parameter`, `operand`, `primitive`, `call`; of what was "
        "changed.",
    ]


class DiffDocument(NamedTuple):
    """`diff`: in what two programs differ."""

    verdict: Annotated[
        str, "`equivalent`, `same up to constants`, `same up to dtypes` or `different`."
    ]
    removed: Annotated[list[DiffLine], "The equations that only the first program has."]
    added: Annotated[list[DiffLine], "The equations that only the second program has."]
    changed: Annotated[list[DiffLine], "The equations that differ from their counterparts."]
    retyped: Annotated[int, "How many more have other types because their operands do."]
    border: Annotated[Sequence[BorderChange], "The arguments, results and axes that differ."]
    before: Annotated[Size, "The size of the first program."]
    after: Annotated[Size, "The size of the second program."]
