"""Which equation first computes something else: two runs of programs, compared value by value.

Both programs are run one equation at a time, and it is kept what each equation was given and
gave, at every depth and in every round. A value of one run is *known* to the other if an equation
of the same primitive and source line, or of the same line, or any at all, has given the same there,
by the tolerance of its dtype. (A boolean or a scalar is soon found by chance: of these, only what
the same line has given counts, if that line has given any.) An equation is to blame if what it
gives is not known, and leads to a result that differs by values none of which are known. The first
of them in order is the first equation that differs: all that it was given is known.

Rewriting that is right makes values that are not known, too, but what is made of them is known
again before it reaches a result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.execute.compare import as_numpy, type_of, values_agree
from jaxprtool.execute.effects import Effects, leaves_the_program
from jaxprtool.ir.equations import named
from jaxprtool.ir.interpret import Interpreter, bind, row_of
from jaxprtool.jaxcompat import JaxprEqn


@dataclass(eq=False)
class Execution:
    """One run of an equation: what it gave, and the runs that made what it depends on."""

    number: int
    eqn: JaxprEqn
    needs: list[Execution]
    results: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class Traced:
    """A value, and the runs of equations that it was made by."""

    data: Any
    made: tuple[Execution, ...] = ()


class Trail(Interpreter):
    """A run that keeps every execution, in order."""

    def __init__(self, closed: Any, args: Sequence[Any], effects: Effects):
        self.effects = effects
        self.executions: list[Execution] = []
        #: Arguments and constants.
        self.given: list[Any] = list(args)
        self._deciders: list[Traced] = []
        self._states: dict[int, Traced] = {}
        self.results = self.run(closed, [Traced(x) for x in args])

    def constant(self, value: Any, aval: Any) -> Traced:
        # A literal is a Python number that bears a dtype.
        self.given.append(value if hasattr(value, "shape") else jnp.asarray(value))
        return Traced(value)

    def concrete(self, value: Traced) -> Any:
        return value.data

    def row(self, value: Traced, i: int) -> Traced:
        return Traced(row_of(value.data, i), value.made)

    def stack(self, rows: Sequence[Traced], var: Any) -> Traced:
        makers = dict.fromkeys(maker for row in rows for maker in row.made)
        return Traced(super().stack([row.data for row in rows], var), tuple(makers))

    def enter(self, body: Any, operands: list[Any], decider: Any = None) -> list[Any]:
        if decider is None:
            return self.run(body, operands)
        self._deciders.append(decider)
        results = self.run(body, operands)
        self._deciders.pop()
        return results

    def decided(self, values: list[Any], decider: Any) -> list[Any]:
        return [Traced(value.data, (*value.made, *decider.made)) for value in values]

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> list[Traced]:
        # What is in a ref now was put there by the equation that wrote it last.
        states = [self._states[id(x.data)] for x in operands if id(x.data) in self._states]
        sources = [*operands, *states, *self._deciders]
        needs = list(dict.fromkeys(maker for value in sources for maker in value.made))
        execution = Execution(len(self.executions), eqn, needs)
        self.executions.append(execution)
        values = [x.data for x in operands]
        if leaves_the_program(eqn):
            results = list(self.effects.call(eqn, values))
        else:
            results = list(bind(eqn, values))
        for x in (*values, *results):
            if isinstance(jaxcompat.aval_of(x), jaxcompat.AbstractRef):
                contents = x[...]
                self._states[id(x)] = Traced(contents, (execution,))
                execution.results.append(contents)
        execution.results += [x for x in results if _is_array(x)]
        return [Traced(x, (execution,)) for x in results]


def _is_array(x: Any) -> bool:
    return not isinstance(jaxcompat.aval_of(x), jaxcompat.AbstractRef) and hasattr(x, "dtype")


class Known:
    """The values of a run, to be asked for."""

    def __init__(self, trail: Trail):
        self._groups: dict[Any, _Values] = {}
        for value in trail.given:
            if _is_array(value):
                self._put([(type_of(value),)], value)
        for execution in trail.executions:
            for value in execution.results:
                self._put(_keys(execution.eqn, value), value)

    def _put(self, keys: Iterable[Any], value: Any) -> None:
        array = as_numpy(value)
        for key in keys:
            self._groups.setdefault(key, _Values()).add(array)

    def has(self, value: Any, eqn: JaxprEqn) -> bool:
        """Whether the run has a value that an equation of another run gave."""
        array = as_numpy(value)
        groups = [g for g in map(self._groups.get, _keys(eqn, value)) if g is not None]
        if array.size <= 1 or array.dtype == bool:
            groups = groups[:1]
        return any(group.has(array) for group in groups)

    def misses(self, execution: Execution) -> bool:
        """Whether something that an execution gave is not known."""
        return not all(self.has(value, execution.eqn) for value in execution.results)


def _keys(eqn: JaxprEqn, value: Any) -> list[Any]:
    """The groups that a value belongs to, the narrowest first."""
    line, kind = (jaxcompat.user_frame(eqn) or ())[:2], type_of(value)
    return [(eqn.primitive.name, line, kind), (line, kind), (kind,)]


class _Values:
    """Arrays of one type."""

    def __init__(self) -> None:
        self._exact: dict[bytes, np.ndarray] = {}

    def add(self, array: np.ndarray) -> None:
        self._exact[array.tobytes()] = array

    def has(self, array: np.ndarray) -> bool:
        if array.tobytes() in self._exact:
            return True
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            return False
        return any(values_agree(known, array).all() for known in self._exact.values())


def first_difference(before: Trail, after: Trail, wrong: Sequence[int]) -> str:
    """In words, the first equations of both that lead to the results `wrong`, which differ."""
    new = _first(after, Known(before), wrong)
    old = _first(before, Known(after), wrong)
    if new is None and old is None:
        return "every equation gives what one gave before, but other values are handed on"
    if new is None:
        assert old is not None
        return f"no equation gives any more what {_shown(old)} gave before"
    text = f"the first equation that differs is {_shown(new)}, of values that were there before"
    return text if old is None else f"{text}; before, there was {_shown(old)}"


def _first(trail: Trail, known: Known, wrong: Sequence[int]) -> Execution | None:
    todo = [maker for i in wrong for maker in trail.results[i].made]
    seen: set[Execution] = set()
    blamed: list[Execution] = []
    while todo:
        execution = todo.pop()
        if execution in seen:
            continue
        seen.add(execution)
        if known.misses(execution):
            blamed.append(execution)
            todo += execution.needs
    return min(blamed, key=lambda e: e.number, default=None)


def _shown(execution: Execution) -> str:
    values = ", ".join(_short(value) for value in execution.results)
    return f"{named(execution.eqn)} giving {values}"


def _short(value: Any) -> str:
    array = as_numpy(value)
    some = ", ".join(map(str, array.ravel()[:4])) + (", …" if array.size > 4 else "")
    return f"{type_of(value)} {f'[{some}]' if array.ndim else some}"
