"""Forward and backward slices of a program from a value, by the user's lines.

    found = why(program, "params['w']")
    found.forward.equations, found.forward.results

The flow of values is found by `ir.dataflow.slicing`, and names are resolved by `analysis.points`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from jaxprtool.analysis.cost.groupings import Line, LineReader
from jaxprtool.analysis.gradient_flow import GradientFlow, gradient_flow
from jaxprtool.analysis.points import Kind, Point, point
from jaxprtool.ir.basics.caches import cached_method
from jaxprtool.ir.basics.documents import document
from jaxprtool.ir.basics.printed import Printed
from jaxprtool.ir.dataflow.slicing import Run, backward_slice, everything, forward_slice
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.program_signature import ProgramSignature, program_signature
from jaxprtool.ir.source.frames import BEHIND, frames_now
from jaxprtool.jaxcompat import AnyJaxpr


@document(without=("line",), names={"name": "source", "behind": "library"}, optional=("behind",))
@dataclass(frozen=True)
class SlicedLine:
    """A source line with equations in a slice.

    Attributes:
        name: The line: `model.py:9`; "" if unknown.
        line: The file and the number; None if unknown.
        equations: The number of its equations in the slice.
        of: The number of all its equations.
        primitives: The number of equations in the slice by primitive, the most frequent first.
        behind: With `jaxprtool.frames("all")`, the library frames behind it.
    """

    name: str
    line: Line | None
    equations: int
    of: int
    primitives: Mapping[str, int]
    behind: str = ""


@document(without=("other_lines", "members"))
@dataclass(frozen=True)
class Slice:
    """A forward or backward slice of a program.

    Equations of the body of a jit are counted at each call.

    Attributes:
        equations: The number of equations in the slice.
        of: The number of equations in the program.
        lines: Their source lines, in program order.
        other_lines: The number of lines without an equation in the slice.
        arguments: For a backward slice, the arguments that it reaches.
        results: For a forward slice, the results that it reaches.
        members: The equations by `id`; those of a shared body once.
    """

    equations: int
    of: int
    lines: tuple[SlicedLine, ...]
    other_lines: int
    arguments: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    members: frozenset[int] = field(default=frozenset(), repr=False)


@document(
    without=("ends", "all_arguments", "all_results"),
    names={"program": "name"},
    optional=("forward", "back", "gradient"),
)
@dataclass(frozen=True)
class Why(Printed):
    """The slices from a point of a program.

    Attributes:
        program: The name of the program.
        what: The name of the point.
        kind: The kind of point: "argument", "result", "line" or "variable".
        ends: The arguments or results that it refers to.
        forward: Everything that depends on it; None if not requested.
        back: Everything that it depends on; None if not requested.
        gradient: For an argument with a forward slice, what stops the gradient with respect to it;
            None otherwise.
        all_arguments: The arguments of the program.
        all_results: The results of the program.
    """

    program: str
    what: str
    kind: Kind
    ends: tuple[str, ...]
    forward: Slice | None
    back: Slice | None
    gradient: GradientFlow | None
    all_arguments: tuple[str, ...] = field(repr=False)
    all_results: tuple[str, ...] = field(repr=False)


def why(
    program: Program | AnyJaxpr, what: str, *, forward: bool | None = None, back: bool | None = None
) -> Why:
    """Return the forward and the backward slice of a program from a value.

    Args:
        program: A `Program`, or a jaxpr.
        what: An argument by its path (`params['w']`, or `params` for all below it), a result
            (`result[0]`, `loss`), a line (`model.py:30`), or a variable by its name in the listing.
        forward: Whether to find the forward slice: everything that depends on the value. If both
            options are None: yes unless it is a result.
        back: Whether to find the backward slice: everything that the value depends on. If both
            options are None: yes unless it is an argument.

    Returns:
        The slices, by source line.

    Raises:
        PointError: If the program has no such point, or several.
    """
    about, found = program_signature(program), point(program, what)
    if forward is None and back is None:
        forward, back = found.kind != "result", found.kind != "argument"
    slices = _Slices(about)
    return Why(
        about.name,
        found.name,
        found.kind,
        found.ends,
        slices.forward(found) if forward else None,
        slices.back(found) if back else None,
        _gradient(program, about, found) if forward and found.kind == "argument" else None,
        tuple(each.name for each in about.arguments),
        tuple(each.name for each in about.outputs),
    )


def _gradient(program: Program | AnyJaxpr, about: ProgramSignature, found: Point) -> GradientFlow:
    names = {each.name: i for i, each in enumerate(about.arguments)}
    return gradient_flow(program, [names[name] for name in found.ends])


#: The number of equations of each primitive, by line.
_Counts: TypeAlias = dict[Line | None, Counter[str]]


class _Slices:
    """The slices of a program."""

    def __init__(self, about: ProgramSignature):
        self._about = about
        self._frames = frames_now(about.roots)
        self._counted = EquationsByLine(LineReader(self._frames, self._frames.choice == "all"))
        self._whole = self._counted.of(everything(about.jaxpr))

    def forward(self, start: Point) -> Slice:
        run = forward_slice(self._about.jaxpr, start.start)
        names = [each.name for each in self._about.outputs]
        return self._slice(run, results=_chosen(names, run.results))

    def back(self, start: Point) -> Slice:
        run = backward_slice(self._about.jaxpr, start.start)
        names = [each.name for each in self._about.arguments]
        return self._slice(run, arguments=_chosen(names, run.arguments))

    def _slice(self, run: Run, **border: tuple[str, ...]) -> Slice:
        counts = self._counted.of(run)
        lines = tuple(self._lines(counts))
        return Slice(
            sum(line.equations for line in lines),
            sum(count.total() for count in self._whole.values()),
            lines,
            len(self._whole) - len(lines),
            members=run.members(),
            **border,
        )

    def _lines(self, counts: _Counts) -> Iterator[SlicedLine]:
        for line, count in counts.items():
            places = () if line is None else (line[:2], *line.behind)
            name, *behind = [f"{self._frames.path(file)}:{n}" for file, n in places] or [""]
            whole, primitives = self._whole[line].total(), dict(count.most_common())
            frames_behind = BEHIND.join(behind)
            yield SlicedLine(name, line, count.total(), whole, primitives, frames_behind)


def _chosen(names: list[str], flags: tuple[bool, ...]) -> tuple[str, ...]:
    return tuple(name for name, flag in zip(names, flags, strict=True) if flag)


class EquationsByLine:
    """The equations of parts of programs by line; those of each part are counted once.

    The line is the user's nearest line. A library body without one has the line of the equation
    that holds it.
    """

    def __init__(self, lines: LineReader):
        self._lines = lines

    @cached_method
    def of(self, run: Run) -> _Counts:
        """Return the number of equations of a run by line, in the order of the program."""
        counts: _Counts = {}
        eqns = run.jaxpr.eqns
        for i, inside in run.inside.items():
            eqn = eqns[i]
            line = self._lines.line(eqn)
            count = counts.get(line)
            if count is None:
                count = counts[line] = Counter()
            count[eqn.primitive.name] += 1
            for held in inside:
                for inner, more in self.of(held).items():
                    at = self._lines.line_around(inner, line)
                    counts.setdefault(at, Counter()).update(more)
        return counts
