"""A user's source files with the cost of each line, forward and backward, and its residuals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from jaxprtool.analysis.cost import Group, Sides, cost_by_side
from jaxprtool.analysis.cost.groupings import LineReader
from jaxprtool.analysis.cost.work import NOTHING
from jaxprtool.analysis.residuals import Residual
from jaxprtool.analysis.slices import EquationsByLine
from jaxprtool.ir.basics.collector import without_collector
from jaxprtool.ir.basics.documents import document
from jaxprtool.ir.core.equations import equations
from jaxprtool.ir.dataflow.slicing import everything
from jaxprtool.ir.programs.border import border
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.source.frames import BEHIND, frames_now
from jaxprtool.jaxcompat import AnyJaxpr

_NONE = Group("", NOTHING, NOTHING)
_NOTHING = Sides(_NONE, _NONE, _NONE)


_KEYS = {"number": "line", "kept": "residual_bytes"}


@document(without=("forward", "backward"), names=_KEYS, optional=("kept",))
@dataclass(frozen=True)
class SourceLine:
    """A line that equations come from.

    Attributes:
        number: The line, from 1.
        equations: How many equations come from it, where they run.
        total: What they cost.
        forward: What those cost that are not of the backward part of a gradient.
        backward: What those cost that are.
        kept: The bytes of the residuals that it computes; None if these are not known.
    """

    number: int
    equations: int
    total: Group
    forward: Group
    backward: Group
    kept: int | None = None


@document(names=_KEYS, optional=("kept",))
class GradientLine(SourceLine):
    """A line of a program with the backward part of a gradient: its document has both parts."""


@document(without=("file",), names={"path": "file"})
@dataclass(frozen=True)
class SourceFile:
    """A file of the user's.

    Attributes:
        file: The file.
        path: What it is called, from the user's folder on.
        lines: The lines that equations come from, in order.
    """

    file: str
    path: str
    lines: tuple[SourceLine, ...]


@dataclass(frozen=True)
class Kept:
    """The residuals of a program, in bytes.

    Attributes:
        total: All of them; of those whose sizes are symbolic, none.
        arguments: Those that are arguments.
        elsewhere: Those that no line of the user's computes.
    """

    total: int
    arguments: int
    elsewhere: int


@document(without=("has_backward", "kept", "why_not_kept", "package"), also=("residual_bytes",))
@dataclass(frozen=True)
class Source:
    """What the lines of a user's source cost.

    Attributes:
        name: The program.
        total: What all of it costs.
        files: The files, those with the most equations first.
        elsewhere: How many equations come from no line of the user's.
        has_backward: Whether there is the backward part of a gradient.
        unknown: The primitives of which no cost is known, with how many equations they have.
        kept: The residuals; None if these are not known.
        why_not_kept: If they were wanted, why they are not known.
        package: The package whose files these are, if no line is the user's.
    """

    name: str
    total: Group
    files: tuple[SourceFile, ...]
    elsewhere: int
    has_backward: bool
    unknown: Mapping[str, int]
    kept: Kept | None = None
    why_not_kept: str = ""
    package: str = ""

    @property
    def residual_bytes(self) -> int | None:
        """The bytes of all residuals; None if these are not known."""
        return None if self.kept is None else self.kept.total


@without_collector()
def source_lines(program: Program | AnyJaxpr) -> Source:
    """Return the cost of each line of the user's source."""
    about = border(program)
    frames = frames_now(about.roots)
    costs = cost_by_side(program)
    counts = EquationsByLine(LineReader(frames)).of(everything(about.jaxpr))
    backward = any(is_some(each.backward) for each in costs.lines.values())
    kind = GradientLine if backward else SourceLine
    by_file: dict[str, list[SourceLine]] = {}
    elsewhere = 0
    for line, count in counts.items():
        if line is None or not line.own:
            elsewhere += count.total()
            continue
        found = costs.lines.get(line, _NOTHING)
        by_file.setdefault(line.file, []).append(kind(line.line, count.total(), *found))
    files = [
        SourceFile(file, frames.path(file), tuple(sorted(lines, key=lambda each: each.number)))
        for file, lines in by_file.items()
    ]
    files.sort(key=lambda each: -sum(line.equations for line in each.lines))
    return Source(about.name, costs.total, tuple(files), elsewhere, backward, costs.unknown)


def called_package(program: Program | AnyJaxpr) -> str:
    """Return the package that most equations are first called from; "" if no lines are known."""
    about, counts = border(program), Counter[str]()
    frames = frames_now(about.roots)
    for eqn in equations(about.jaxpr):
        if found := frames.of(eqn):
            counts[frames.package(found[-1].file)] += 1
    return max(counts, key=counts.__getitem__, default="")


def is_some(group: Group) -> bool:
    """Return True if a group has any cost."""
    return any(type(number) is not int or number for number in group.work)


def with_residuals(source: Source, residuals: Iterable[Residual]) -> Source:
    """Add to each line the bytes of the residuals that it computes."""
    total = arguments = 0
    kept: Counter[str] = Counter()
    for each in residuals:
        size = each.bytes or 0
        total += size
        if each.argument:
            arguments += size
        else:
            kept[each.source.partition(BEHIND)[0]] += size
    files = []
    for file in source.files:
        lines = (
            replace(line, kept=kept.pop(f"{file.path}:{line.number}", 0)) for line in file.lines
        )
        files.append(replace(file, lines=tuple(lines)))
    return replace(source, files=tuple(files), kept=Kept(total, arguments, kept.total()))
