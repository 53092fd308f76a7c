"""Find a shortest path along which values flow from one point of a program to another."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from jaxprtool.analysis.points import point
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.basics.documents import document
from jaxprtool.ir.basics.printed import Printed
from jaxprtool.ir.core.equations import bodies, is_ref, type_of
from jaxprtool.ir.core.regions import regions
from jaxprtool.ir.dataflow.dataflow import DataFlow, Holder, Value
from jaxprtool.ir.dataflow.slicing import Start, backward_slice, forward_slice
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.program_signature import ProgramSignature, program_signature
from jaxprtool.ir.source.frames import frames_now
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.jaxcompat.source_locations import UserFrame

#: The maximum number of states that are visited: a body counts once for each chain of calls to it.
_MOST = 500_000


@document(without=("frame",))
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
    source: str
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
        holders = (each for held in self._flow.holders.values() for each in held)
        self._holders = {(each.jaxpr, each.index, each.number): each for each in holders}
        #: The predecessor of each state, and the equation between, if there is one.
        self._before: dict[_State, tuple[_State, JaxprEqn | None] | None] = {}

    def steps(self) -> tuple[PathStep, ...] | None:
        """Return the equations on the path, in order; None if there is no path."""
        state = self._found()
        if state is None:
            return None
        steps: list[PathStep] = []
        while (link := self._before[state]) is not None:
            before, eqn = link
            if eqn is not None:
                steps.append(self._step(before, eqn, state))
            state = before
        return tuple(reversed(steps))

    def _found(self) -> _State | None:
        """Return the first goal that the search reaches, or None."""
        todo: deque[tuple[_State, _State | None, JaxprEqn | None]] = deque(
            ((None, *value), None, None) for value in self._start
        )
        while todo:
            state, before, eqn = todo.popleft()
            if state in self._before:
                continue
            self._before[state] = None if before is None else (before, eqn)
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
                for out in (*eqn.outvars, *filter(is_ref, eqn.invars)):
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
        held: list[tuple[Holder, _Calls]] = (
            [calls] if calls else [(holder, None) for holder in self._flow.holders[jaxpr]]
        )
        positions, argument = self._flow.results(jaxpr, var), self._flow.argument(jaxpr, var)
        for holder, outer in held:
            found: list[tuple[Jaxpr, Atom]] = []
            for position in positions:
                found += self._flow.controlled_results(holder) or self._flow.destinations(
                    holder, position
                )
            if argument is not None and is_ref(var):
                found += self._flow.origins(holder, argument)[:1]
            for where, value in found:
                if where is holder.jaxpr:
                    yield (outer, where, value), None
                else:
                    yield (
                        ((self._holder(holder.jaxpr, holder.index, where), outer), where, value),
                        None,
                    )

    def _holder(self, jaxpr: Jaxpr, index: int, body: Jaxpr) -> Holder:
        held = [each for _, each in bodies(jaxpr.eqns[index])]
        return self._holders[jaxpr, index, held.index(body)]

    def _step(self, before: _State, eqn: JaxprEqn, after: _State) -> PathStep:
        location, depth, calls = self._frames.location(eqn), 0, before[0]
        while calls is not None:
            depth, calls = depth + 1, calls[1]
        frame = None if location is None else location.frame
        source = "" if frame is None else self._frames.text(frame)
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
