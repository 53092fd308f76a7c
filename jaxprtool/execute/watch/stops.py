"""Breakpoints: lines at which a running program stops, with the values there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.execute.watch.watched_run import Ran, Stop
from jaxprtool.ir.core.equations import equations, holders
from jaxprtool.ir.core.structured import Call, CustomJVP, view
from jaxprtool.ir.notation.user_names import UserNames
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.source.frames import frames_now
from jaxprtool.jaxcompat import Atom, Jaxpr, Literal
from jaxprtool.jaxcompat.identity import identity


@dataclass(frozen=True)
class Stopped:
    """A line at which a program has stopped.

    Attributes:
        source: The line.
        iteration: The number of the iteration of each loop around it.
        values: The operands and results of its equations, by name.
    """

    source: str
    iteration: tuple[int, ...]
    values: Mapping[str, Any]


def runs_of(program: Program, stops: Collection[int]) -> tuple[set[int], set[int]]:
    """Return the `id`s of equations at which to stop, and of the last in each run of them.

    Calls are not entered: their operands and results belong to the line.
    """
    kept, last = set(stops), set()
    bodies: dict[Jaxpr, None] = {jaxcompat.open_jaxpr(program.jaxpr): None}
    for body in (todo := list(bodies)):
        for eqn, inside in holders(body):
            for _, inner in inside:
                if id(eqn) in kept and isinstance(view(eqn), Call | CustomJVP):
                    kept -= {id(each) for each in (*inner.eqns, *equations(inner))}
                elif inner not in bodies:
                    bodies[inner] = None
                    todo.append(inner)
    for body in bodies:
        for eqn, after in zip_longest(body.eqns, body.eqns[1:]):
            if id(eqn) in kept and (after is None or id(after) not in kept):
                last.add(id(eqn))
    return kept, last


def value_names(program: Program) -> Callable[[Atom], str]:
    """Return a function from a variable to its name in the user's source, or ""."""
    root = jaxcompat.open_jaxpr(program.jaxpr)
    spaced = UserNames(root, set(), program.arg_names, program.roots).spaced

    def name(atom: Atom) -> str:
        found = "" if isinstance(atom, Literal) else spaced.get(identity(atom), "")[1:]
        return "" if found == "_" else found

    return name


def stopping(program: Program, stop: Callable[[Stopped], None] | None) -> Stop | None:
    """Return a function that calls `stop` with the values by name."""
    if stop is None:
        return None
    name_of, frames = value_names(program), frames_now(program.roots)

    def call(iterations: tuple[int, ...], ran: Sequence[Ran]) -> None:
        values: dict[str, Any] = {}
        known: set[object] = set()
        numbers: Counter[str] = Counter()
        for eqn, operands, results in ran:
            given = zip((*eqn.invars, *eqn.outvars), (*operands, *results), strict=True)
            for atom, value in given:
                if isinstance(atom, Literal) or identity(atom) in known:
                    continue
                known.add(identity(atom))
                made = any(atom is var for var in eqn.outvars)
                name = name_of(atom) or (str(eqn.primitive.name) if made else "given")
                number = numbers[name]
                numbers[name] += 1
                values[f"{name}_{number}" if number else name] = value
        stop(Stopped(frames.line_of([ran[-1][0]]), iterations, values))

    return call
