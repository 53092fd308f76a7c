"""Slices of a program from a value, and shortest paths between values, by the user's lines.

    found = why(program, "params['w']")
    found.forward.equations, found.forward.results

The flow of values is found by `ir.dataflow`, and names are resolved by `analysis.points`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from jaxprtool.analysis.points import Kind, NamedPoint, point
from jaxprtool.commands.cost.estimate import LineReader
from jaxprtool.commands.why.gradients import GradientFlow, gradient_flow
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.backends import cached_method
from jaxprtool.ir.dataflow import (
    BodySlice,
    DataFlow,
    Holder,
    Start,
    Value,
    backward_slice,
    everything,
    forward_slice,
)
from jaxprtool.ir.documents import Printed, document
from jaxprtool.ir.equations import bodies, has_ref_type, type_of
from jaxprtool.ir.frames import Line, frames_now
from jaxprtool.ir.program import Program, ProgramSignature, program_signature
from jaxprtool.ir.regions import regions
from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.jaxcompat.source_locations import UserFrame

# --- slices ---------------------------------------------------------------------------------------
# Forward and backward slices of a program from a value, by the user's lines.


@document(without=("line",))
@dataclass(frozen=True)
class SlicedLine:
    """A source line with equations in a slice.

    Attributes:
        place: The line, `model.py:9`; "" if unknown. With `jaxprtool.frames("all")`, followed by
            the library frames behind it.
        line: The file and the number; None if unknown.
        equations: The number of its equations in the slice.
        of: The number of all its equations.
        primitives: The number of equations in the slice by primitive, the most frequent first.
    """

    place: Place
    line: Line | None
    equations: int
    of: int
    primitives: Mapping[str, int]

    @property
    def name(self) -> str:
        """The line without the library frames."""
        return self.place.user

    @property
    def behind(self) -> str:
        """The library frames, or ""."""
        return self.place.behind


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
    about, start = program_signature(program), point(program, what)
    if forward is None and back is None:
        forward, back = start.kind != "result", start.kind != "argument"
    slices = _ProgramSlices(about)
    return Why(
        about.name,
        start.name,
        start.kind,
        start.ends,
        slices.forward(start) if forward else None,
        slices.back(start) if back else None,
        _gradient(program, about, start) if forward and start.kind == "argument" else None,
        tuple(argument.name for argument in about.arguments),
        tuple(output.name for output in about.outputs),
    )


def _gradient(
    program: Program | AnyJaxpr, about: ProgramSignature, start: NamedPoint
) -> GradientFlow:
    names = {argument.name: i for i, argument in enumerate(about.arguments)}
    return gradient_flow(program, [names[name] for name in start.ends])


#: The number of equations of each primitive, by line.
_Counts: TypeAlias = dict[Line | None, Counter[str]]


class _ProgramSlices:
    """The slices of a program."""

    def __init__(self, about: ProgramSignature):
        self._about = about
        self._frames = frames_now(about.roots)
        self._reader = LineReader(self._frames, self._frames.choice == "all")
        self._counted = EquationsByLine(self._reader)
        self._whole = self._counted.of(everything(about.jaxpr))

    def forward(self, start: NamedPoint) -> Slice:
        run = forward_slice(self._about.jaxpr, start.start)
        names = [output.name for output in self._about.outputs]
        return self._slice(run, results=_chosen(names, run.results))

    def back(self, start: NamedPoint) -> Slice:
        run = backward_slice(self._about.jaxpr, start.start)
        names = [argument.name for argument in self._about.arguments]
        return self._slice(run, arguments=_chosen(names, run.arguments))

    def _slice(self, run: BodySlice, **border: tuple[str, ...]) -> Slice:
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
            place, primitives = self._reader.place(line), dict(count.most_common())
            yield SlicedLine(place, line, count.total(), self._whole[line].total(), primitives)


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
    def of(self, run: BodySlice) -> _Counts:
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
            for inner_run in inside:
                for inner, more in self.of(inner_run).items():
                    at = self._lines.line_around(inner, line)
                    counts.setdefault(at, Counter()).update(more)
        return counts


# --- flow paths -----------------------------------------------------------------------------------
# Find a shortest path along which values flow from one point of a program to another.

#: The maximum number of states that are visited: a body counts once for each chain of calls to it.
_MOST = 500_000


@document(names={"source": "place"}, without=("frame",))
@dataclass(frozen=True)
class PathStep:
    """An equation that a value passes through.

    Attributes:
        primitive: The name of its primitive.
        type: The type of the result, or of the operand if the path enters a body.
        depth: The number of bodies around the equation.
        source: The user's line, `model.py:9`; "" if unknown.
        frame: The same as a frame; None if unknown.
    """

    primitive: str
    type: str
    depth: int
    source: Place
    frame: UserFrame | None


@document(names={"program": "name"})
@dataclass(frozen=True)
class Path(Printed):
    """A shortest path from one point of a program to another.

    Attributes:
        program: The name of the program.
        start: The name of the first point.
        end: The name of the last point.
        steps: The equations between them, in order; None if there is no path.
    """

    program: str
    start: str
    end: str
    steps: tuple[PathStep, ...] | None


def flow_path(program: Program | AnyJaxpr, start: str, end: str) -> Path:
    """Return a path with the fewest equations along which values flow between two points.

    Args:
        program: A `Program`, or a jaxpr.
        start: The first point: an argument, a result, a line or a variable (`analysis.points`).
        end: The last point.

    Returns:
        The path. Its `steps` are None if no value flows between the points.

    Raises:
        PointError: If the program has no such point, or several.
        UnsupportedError: If there are too many chains of calls between the two.
    """
    about = program_signature(program)
    first, last = point(program, start), point(program, end)
    search = _PathSearch(about, first.start, last.start)
    return Path(about.name, first.name, last.name, search.steps())


#: The call stack of a body, the innermost call first; None if the calls are not known.
_Calls: TypeAlias = "tuple[Holder, _Calls] | None"

#: A variable of a body, in a call stack.
_State: TypeAlias = tuple[_Calls, Jaxpr, Var]


class _PathSearch:
    """A breadth-first search among the equations that `start` reaches and `end` depends on."""

    def __init__(self, about: ProgramSignature, start: Start, end: Start):
        top = about.jaxpr
        self._flow = DataFlow(top)
        self._frames = frames_now(about.roots)
        self._start = dict.fromkeys(_values(start))
        self._goals = set(_values(end))
        self._between = forward_slice(top, start).members() & backward_slice(top, end).members()
        holders = (holder for group in self._flow.holders.values() for holder in group)
        self._holders = {(holder.jaxpr, holder.index, holder.number): holder for holder in holders}
        #: The predecessor of each state, and the equation between, if there is one.
        self._before: dict[_State, tuple[_State, JaxprEqn | None] | None] = {}

    def steps(self) -> tuple[PathStep, ...] | None:
        """Return the equations on the path, in order; None if there is no path."""
        state = self._found()
        if state is None:
            return None
        steps: list[PathStep] = []
        while (link := self._before[state]) is not None:
            previous, eqn = link
            if eqn is not None:
                steps.append(self._step(previous, eqn, state))
            state = previous
        return tuple(reversed(steps))

    def _found(self) -> _State | None:
        """Return the first goal that the search reaches, or None."""
        todo: deque[tuple[_State, _State | None, JaxprEqn | None]] = deque(
            ((None, *value), None, None) for value in self._start
        )
        while todo:
            state, previous, eqn = todo.popleft()
            if state in self._before:
                continue
            self._before[state] = None if previous is None else (previous, eqn)
            if state[1:] in self._goals:
                return state
            if len(self._before) > _MOST:
                raise UnsupportedError("no path found: there are too many calls between the points")
            for new, through in self._moves(state):
                if through is None:  # leaving a body is not a step
                    todo.appendleft((new, state, None))
                else:
                    todo.append((new, state, through))
        return None

    def _moves(self, state: _State) -> Iterator[tuple[_State, JaxprEqn | None]]:
        """Yield the next states of a value, with the equation that it passes through."""
        calls, jaxpr, var = state
        for index in self._flow.readers(jaxpr, var):
            eqn = jaxpr.eqns[index]
            if id(eqn) not in self._between:
                continue
            inside = regions(eqn)
            if inside is None:
                for out in (*eqn.outvars, *filter(has_ref_type, eqn.invars)):
                    yield (calls, jaxpr, out), eqn
                continue
            places = {i for i, atom in enumerate(eqn.invars) if atom is var}
            for body, arg in self._flow.arguments(eqn, var):
                yield ((self._holder(jaxpr, index, body), calls), body, arg), eqn
            outs = [out for place, out in inside.carried if place in places]
            if not places.isdisjoint(inside.predicates):
                outs = list(range(len(eqn.outvars)))
            for out in outs:
                yield (calls, jaxpr, eqn.outvars[out]), eqn
        yield from self._moves_out(state)

    def _moves_out(self, state: _State) -> Iterator[tuple[_State, None]]:
        """Yield the states outside a body that its result or ref argument flows to."""
        calls, jaxpr, var = state
        callers: list[tuple[Holder, _Calls]] = (
            [calls] if calls else [(holder, None) for holder in self._flow.holders[jaxpr]]
        )
        positions, argument = self._flow.results(jaxpr, var), self._flow.argument(jaxpr, var)
        for holder, outer in callers:
            destinations: list[tuple[Jaxpr, Atom]] = []
            for position in positions:
                destinations += self._flow.controlled_results(holder) or self._flow.destinations(
                    holder, position
                )
            if argument is not None and has_ref_type(var):
                destinations += self._flow.origins(holder, argument)[:1]
            for where, value in destinations:
                if where is holder.jaxpr:
                    yield (outer, where, value), None
                else:
                    yield (
                        ((self._holder(holder.jaxpr, holder.index, where), outer), where, value),
                        None,
                    )

    def _holder(self, jaxpr: Jaxpr, index: int, body: Jaxpr) -> Holder:
        siblings = [inner for _, inner in bodies(jaxpr.eqns[index])]
        return self._holders[jaxpr, index, siblings.index(body)]

    def _step(self, before: _State, eqn: JaxprEqn, after: _State) -> PathStep:
        location, depth, calls = self._frames.location(eqn), 0, before[0]
        while calls is not None:
            depth, calls = depth + 1, calls[1]
        frame = None if location is None else location.frame
        source = UNKNOWN if frame is None else self._frames.text(frame)
        return PathStep(eqn.primitive.name, type_of(after[2].aval), depth, source, frame)


def _values(point: Start) -> Iterator[Value]:
    """Yield the values of a point: its own, and the results (or else operands) of its equations."""
    yield from point.values
    for jaxpr, ids in point.equations.items():
        for eqn in jaxpr.eqns:
            if id(eqn) in ids:
                for atom in eqn.outvars or eqn.invars:
                    if not isinstance(atom, Literal):
                        yield jaxpr, atom
