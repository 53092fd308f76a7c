"""Find the first equation in which two programs differ, by comparing their execution traces.

Both programs are evaluated one equation at a time. Their traces record the operands and results of
each equation, at every depth and in every iteration. A value has a *match* in the other trace if an
equation with the same primitive and source line, or the same line, or any equation, returned an
equal value up to the tolerance of its dtype. (Booleans and scalars easily match by chance: for them
only values of the same line count, if that line returned any.)

Blame the first equation whose result has no match in the other trace and reaches a wrong result
only through values without a match: all of its operands have one. A correct rewrite may also
produce values without a match, but values computed from them match again before they reach a
result.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.errors import Details
from jaxprtool.execute.running.arrays import as_numpy, type_of, values_agree
from jaxprtool.execute.stepping.effects import Effects
from jaxprtool.ir.core.equations import named
from jaxprtool.ir.evaluation.interpret import Interpreter, row_of
from jaxprtool.jaxcompat import Aval, ClosedJaxpr, JaxprEqn, Var


@dataclass(eq=False)
class Execution:
    """One execution of an equation: its results and the executions on which they depend."""

    number: int
    eqn: JaxprEqn
    needs: list[Execution]
    results: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class TracedValue:
    """A value, and the executions that computed it."""

    data: Any
    made: tuple[Execution, ...] = ()


class ExecutionTrace(Interpreter):
    """Evaluates a program and records every execution, in order."""

    def __init__(self, closed: ClosedJaxpr, args: Sequence[Any], effects: Effects):
        self.effects = effects
        self.executions: list[Execution] = []
        #: Arguments and constants.
        self.inputs: list[Any] = list(args)
        self._predicates: list[TracedValue] = []
        self._states: dict[int, TracedValue] = {}
        self.results = self.run(closed, [TracedValue(x) for x in args])

    def constant(self, value: Any, aval: Aval) -> TracedValue:
        # A literal is a Python number with a dtype.
        self.inputs.append(value if hasattr(value, "shape") else jnp.asarray(value))
        return TracedValue(value)

    def concrete(self, value: TracedValue) -> Any:
        return value.data

    def row(self, value: TracedValue, i: int) -> TracedValue:
        return TracedValue(row_of(value.data, i), value.made)

    def stack(self, rows: Sequence[TracedValue], var: Var) -> TracedValue:
        executions = dict.fromkeys(execution for row in rows for execution in row.made)
        return TracedValue(super().stack([row.data for row in rows], var), tuple(executions))

    def enter(
        self, body: ClosedJaxpr, operands: list[Any], predicate: TracedValue | None = None
    ) -> list[Any]:
        if predicate is None:
            return self.run(body, operands)
        self._predicates.append(predicate)
        results = self.run(body, operands)
        self._predicates.pop()
        return results

    def selected(self, values: list[Any], predicate: TracedValue) -> list[Any]:
        return [TracedValue(value.data, (*value.made, *predicate.made)) for value in values]

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> list[TracedValue]:
        # The current value of a ref comes from the equation that wrote it last.
        states = [self._states[id(x.data)] for x in operands if id(x.data) in self._states]
        sources = [*operands, *states, *self._predicates]
        needs = list(dict.fromkeys(execution for value in sources for execution in value.made))
        execution = Execution(len(self.executions), eqn, needs)
        self.executions.append(execution)
        values = [x.data for x in operands]
        results = self.effects.results(eqn, values)
        for x in (*values, *results):
            if isinstance(jax.typeof(x), jaxcompat.AbstractRef):
                contents = x[...]
                self._states[id(x)] = TracedValue(contents, (execution,))
                execution.results.append(contents)
        execution.results += [x for x in results if _is_array(x)]
        return [TracedValue(x, (execution,)) for x in results]


def _is_array(x: object) -> bool:
    return not isinstance(jax.typeof(x), jaxcompat.AbstractRef) and hasattr(x, "dtype")


class ValueIndex:
    """The values of an execution trace, to look up matches in."""

    def __init__(self, trace: ExecutionTrace):
        self._groups: dict[Hashable, _Values] = {}
        for value in trace.inputs:
            if _is_array(value):
                self._put([(type_of(value),)], value)
        for execution in trace.executions:
            for value in execution.results:
                self._put(_keys(execution.eqn, value), value)

    def _put(self, keys: Iterable[Hashable], value: Any) -> None:
        array = as_numpy(value)
        for key in keys:
            self._groups.setdefault(key, _Values()).add(array)

    def has(self, value: Any, eqn: JaxprEqn) -> bool:
        """Return True if a value returned by an equation of another trace has a match here."""
        array = as_numpy(value)
        groups = [g for g in map(self._groups.get, _keys(eqn, value)) if g is not None]
        if array.size <= 1 or array.dtype == bool:
            groups = groups[:1]
        return any(group.has(array) for group in groups)

    def misses(self, execution: Execution) -> bool:
        """Return True if some result of an execution in another trace has no match here."""
        return not all(self.has(value, execution.eqn) for value in execution.results)


def _keys(eqn: JaxprEqn, value: Any) -> list[Hashable]:
    """Return the keys of the groups of a value, narrowest first."""
    line, type_text = (jaxcompat.user_frame(eqn) or ())[:2], type_of(value)
    return [(eqn.primitive.name, line, type_text), (line, type_text), (type_text,)]


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
        return any(values_agree(known, array)[0].all() for known in self._exact.values())


def first_difference(
    before: ExecutionTrace, after: ExecutionTrace, wrong: Sequence[int]
) -> Details:
    """Return the first equations of both traces that lead to the differing results `wrong`."""
    new = _first(after, ValueIndex(before), wrong)
    old = _first(before, ValueIndex(after), wrong)
    found = []
    if new is not None:
        found.append(("first equation", f"{_shown(new)}, from the same values as before"))
    if old is not None:
        label = "instead of" if new is not None else "removed"
        found.append((label, _shown(old)))
    same = "every equation computes the same values as before, but different values are passed on"
    return found or [("equations", same)]


def _first(trace: ExecutionTrace, index: ValueIndex, wrong: Sequence[int]) -> Execution | None:
    todo = [execution for i in wrong for execution in trace.results[i].made]
    seen: set[Execution] = set()
    blamed: list[Execution] = []
    while todo:
        execution = todo.pop()
        if execution in seen:
            continue
        seen.add(execution)
        if index.misses(execution):
            blamed.append(execution)
            todo += execution.needs
    return min(blamed, key=lambda e: e.number, default=None)


def _shown(execution: Execution) -> str:
    values = ", ".join(_short(value) for value in execution.results)
    return f"{named(execution.eqn)}, giving {values}"


def _short(value: Any) -> str:
    array = as_numpy(value)
    some = ", ".join(map(str, array.ravel()[:4])) + (", …" if array.size > 4 else "")
    return f"{type_of(value)} {f'[{some}]' if array.ndim else some}"
