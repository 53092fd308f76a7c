"""Recording of watched values in rows by line, scope or equation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.execute.running.summary import plain
from jaxprtool.execute.watch.numbers import Numbers, Tally, has_numbers, is_inexact, tallies
from jaxprtool.execute.watch.selected import IterationChoice
from jaxprtool.execute.watch.stops import value_names
from jaxprtool.execute.watch.watched_run import Result
from jaxprtool.ir.basics.documents import document
from jaxprtool.ir.core.equations import bodies, holders, type_of
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.source.frames import BEHIND, frames_now
from jaxprtool.ir.source.scopes import Part, Scope, ScopeReader, is_backward
from jaxprtool.jaxcompat import Atom, Aval, Jaxpr, JaxprEqn, Var

#: The groupings of values.
By: TypeAlias = Literal["line", "scope", "equation"]


@document(without=("code",), flat=("numbers",))
@dataclass(frozen=True)
class WatchedRow:
    """The values of a line, of a scope, or of a result of an equation.

    Attributes:
        name: The line, scope or value: `model.py:9`, `Block_0/Dense_0`, or the user's name for the
            value, else the primitive; numbered if several have the same name.
        source: The user's line, followed by the library's if there is only one; "" for a scope, or
            if unknown.
        code: The source text of that line, if its file exists.
        backward: Whether the values belong to the backward pass of a gradient.
        iteration: The iteration of each enclosing loop, if iterations were selected.
        primitives: The primitives that compute the values.
        types: Their types.
        path: The enclosing equations, the outermost first: `scan at model.py:7`.
        times: The number of executions.
        numbers: The statistics of the values.
    """

    name: str
    source: str
    code: str
    backward: bool
    iteration: tuple[int, ...]
    primitives: tuple[str, ...]
    types: tuple[str, ...]
    path: tuple[str, ...]
    times: int
    numbers: Numbers


@dataclass(eq=False)
class _Group:
    """The attributes of a row except for its numbers."""

    name: str
    source: str
    code: str
    backward: bool
    path: tuple[str, ...]
    place: int
    #: The library lines called by the user's line.
    behind: dict[str, None] = field(default_factory=dict)
    primitives: dict[str, None] = field(default_factory=dict)
    types: dict[str, None] = field(default_factory=dict)
    #: By iteration numbers if iterations are separate; else by ().
    times: Counter[tuple[int, ...]] = field(default_factory=Counter)
    tallies: dict[tuple[int, ...], Tally] = field(default_factory=dict)

    def with_library(self, line: str) -> str:
        """Return the user's line, followed by the library's if there is only one."""
        return "".join((line, *self.behind)) if line and len(self.behind) == 1 else line


class Recorder:
    """Collects values into rows.

    Args:
        program: The program.
        by: The grouping of values into rows.
        selected: The iterations to watch; if selected by the user, each has a separate row.
        keeps: Whether to keep the values.
        computed: Whether rows of lines and scopes leave out equations that only move values.
    """

    def __init__(
        self, program: Program, by: By, selected: IterationChoice, keeps: bool, computed: bool
    ):
        self._by, self._apart = by, selected.chosen is not None
        self._keeps, self._computed = keeps, computed
        self._frames, self._names = frames_now(program.roots), value_names(program)
        self._scopes = _Scopes(program) if by == "scope" else None
        self._groups: dict[Any, _Group] = {}
        #: The group of each result; None if it belongs to none.
        self._known: dict[tuple[int, ...], _Group | None] = {}
        self._results: dict[tuple[int, ...], str] = {}
        self._order, self._unique = _in_order(jaxcompat.open_jaxpr(program.jaxpr), self._names)
        self._seen: Counter[str] = Counter()
        self._kept: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}

    def wants(self, eqn: JaxprEqn, result: int) -> bool:
        """Return True if the values of an equation's result are kept or belong to a row."""
        aval = eqn.outvars[result].aval
        return has_numbers(aval) and (self._keeps or self._counts(eqn, aval))

    def _counts(self, eqn: JaxprEqn, aval: Aval) -> bool:
        if self._by == "equation":
            return True
        return is_inexact(aval.dtype) and not (self._computed and _moves(eqn, aval))

    def take(self, result: Result, iterations: np.ndarray, data: Any) -> None:
        """Record the values of some executions."""
        key = (id(result.eqn), result.number, *map(id, result.around))
        if key not in self._known:
            self._results[key] = self._name(result)
            self._known[key] = self._group(result, self._results[key])
        if self._keeps:
            self._keep(self._results[key], result, iterations, data)
        group = self._known[key]
        if group is None:
            return
        parts = [tuple(row) for row in iterations.tolist()] if self._apart else [()]
        for numbers, tally in zip(parts, tallies(data, len(parts)), strict=True):
            group.tallies.setdefault(numbers, Tally()).add(tally)
        for numbers in parts:
            group.times[numbers] += 1 if self._apart else len(iterations)

    def rows(self) -> tuple[WatchedRow, ...]:
        """Return the rows in program order."""
        return tuple(
            WatchedRow(
                group.with_library(group.name) if group.name == group.source else group.name,
                *(group.with_library(group.source), group.code, group.backward, numbers),
                *(tuple(group.primitives), tuple(group.types), group.path),
                group.times[numbers],
                group.tallies[numbers].numbers,
            )
            for group in sorted(self._groups.values(), key=lambda group: group.place)
            for numbers in sorted(group.tallies)
        )

    def values(self) -> Mapping[str, np.ndarray]:
        """Return the kept values; those in loops are in the order of iterations."""
        found = {}
        for name, parts in self._kept.items():
            iterations, values = map(np.concatenate, zip(*parts, strict=True))
            alone = not iterations.shape[1] and len(values) == 1
            order = np.lexsort(iterations.T[::-1]) if iterations.shape[1] else slice(None)
            found[name] = values[0] if alone else values[order]
        return found

    def _keep(self, name: str, result: Result, iterations: np.ndarray, data: Any) -> None:
        shape = result.eqn.outvars[result.number].aval.shape
        values = plain(data).reshape(len(iterations), *shape).copy()
        self._kept.setdefault(name, []).append((iterations, values))

    def _name(self, result: Result) -> str:
        """Return a unique name for a result of an equation."""
        name = self._unique[id(result.eqn), result.number]
        self._seen[name] += 1
        # The body of a function that is called several times.
        return name if self._seen[name] == 1 else f"{name} #{self._seen[name]}"

    def _group(self, result: Result, name: str) -> _Group | None:
        eqn = result.eqn
        aval = eqn.outvars[result.number].aval
        if not self._counts(eqn, aval):
            return None
        eqns = (*result.around, eqn)
        source, behind, library = self._frames.line_of(eqns).partition(BEHIND)
        backward = any(map(is_backward, eqns))
        key: Any = name
        if self._by == "line":
            name, key = source or "unknown line", (source, backward)
        elif self._scopes is not None:
            name = self._scopes.name(eqns) or "outside all scopes"
            source, key = "", (name, backward)
        if key not in self._groups:
            path = self._frames.path_of(result.around) if self._by == "equation" else ()
            code = self._frames.code_of(eqns) if source else ""
            place = self._order[id(eqn)]
            self._groups[key] = _Group(name, source, code, backward, path, place)
        group = self._groups[key]
        group.behind[behind + library] = None
        group.place = min(group.place, self._order[id(eqn)])
        group.primitives[str(eqn.primitive.name)] = None
        group.types[type_of(aval)] = None
        return group


def _moves(eqn: JaxprEqn, aval: Aval) -> bool:
    """Return True if an equation computes nothing from its operands, as for the NaN of `jnp.var`.

    It moves values, casts a constant, or changes nothing but the weak type.
    """
    if traits(eqn).moves or traits(eqn).gives != "cast":
        return traits(eqn).moves
    operand = eqn.invars[0]
    is_weak_cast = operand.aval != aval and operand.aval.dtype == aval.dtype
    return is_weak_cast or not isinstance(operand, Var)


def _in_order(
    root: Jaxpr, names: Callable[[Atom], str]
) -> tuple[dict[int, int], dict[tuple[int, int], str]]:
    """Return the positions of equations by `id`, and unique names of their results."""
    order: dict[int, int] = {}
    unique: dict[tuple[int, int], str] = {}
    counts, taken = Counter[str](), set[str]()
    todo, seen = [iter(root.eqns)], {root}
    while todo:
        eqn = next(todo[-1], None)
        if eqn is None:
            todo.pop()
            continue
        order[id(eqn)] = len(order)
        for number, var in enumerate(eqn.outvars):
            wanted = name = names(var) or str(eqn.primitive.name)
            while name in taken:
                counts[wanted] += 1
                name = f"{wanted}_{counts[wanted]}"
            taken.add(name)
            unique[id(eqn), number] = name
        new = [body for _, body in bodies(eqn) if body not in seen]
        seen.update(new)
        todo += (iter(body.eqns) for body in reversed(new))
    return order, unique


class _Scopes:
    """The scopes of equations, by `id`."""

    def __init__(self, program: Program):
        self._paths: dict[int, tuple[str, ...]] = {}
        root = jaxcompat.open_jaxpr(program.jaxpr)
        reader, todo, seen = ScopeReader(program.roots), [root], {root}
        for jaxpr in todo:
            self._read(reader.parts(jaxpr), ())
            inside = (body for _, held in holders(jaxpr) for _, body in held)
            new = dict.fromkeys(body for body in inside if body not in seen)
            seen.update(new)
            todo += new

    def _read(self, parts: Sequence[Part], path: tuple[str, ...]) -> None:
        for part in parts:
            if isinstance(part, Scope):
                self._read(part.parts, (*path, part.name))
            else:
                self._paths[id(part)] = path

    def name(self, eqns: Sequence[JaxprEqn]) -> str:
        """Return the scopes around an equation, given after its enclosing equations."""
        return "/".join(name for eqn in eqns for name in self._paths.get(id(eqn), ()))
