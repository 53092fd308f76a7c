"""Statistics of the values that a program computes.

    watched = jaxprtool.watch(program, (params, batch), by="line")
    watched.rows[0].numbers.high

The program runs compiled, with the values of its equations at every depth and in every iteration as
further results (`watched_run`). Rounding may differ from running each equation separately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias, get_args
from typing import Literal as OneOf

import jax
import numpy as np
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.commands.watch.values import (
    ITERATION_BYTES,
    BodyValues,
    CompiledScan,
    CompiledWhile,
    FormatLoss,
    Numbers,
    Tally,
    Wanted,
    WatchSite,
    has_numbers,
    is_inexact_dtype,
    is_stepped,
    on_host,
    shard_map_values,
    tallies,
)
from jaxprtool.errors import ArgumentsError, UnsupportedError
from jaxprtool.execute.running.arrays import plain_array
from jaxprtool.execute.running.run import ready_to_step
from jaxprtool.execute.stepping import (
    Frame,
    SteppingInterpreter,
    advanced,
    bodies_of,
    resumed_progress,
)
from jaxprtool.ir.backends import anchor, cached_method
from jaxprtool.ir.dataflow import DataFlow
from jaxprtool.ir.documents import Printed, document
from jaxprtool.ir.equations import (
    Contains,
    bodies,
    equations,
    free_variables,
    holders,
    named,
    size_of,
    type_of,
)
from jaxprtool.ir.evaluation import LoopOperands, slice_number
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.notation.layout import Selection
from jaxprtool.ir.notation.signatures import UserNames
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import Call, Cond, CustomJVP, Scan, ShardMap, View, While, view
from jaxprtool.ir.rewrite import narrow
from jaxprtool.ir.scopes import Part, ScopeCall, ScopeReader, is_backward
from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Aval, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.jaxcompat.jaxprs import identity

__all__ = ["FormatLoss", "Numbers", "Stopped", "Watched", "WatchedRow", "watch"]


@document(without=("values",))
@dataclass(frozen=True)
class Watched(Printed):
    """The statistics of watched values.

    Attributes:
        name: The name of the program.
        by: The grouping of values.
        rows: The groups, in program order.
        values: The values of each result of an equation, if requested, by the name of its row when
            grouped by equation. In a loop they have a leading axis for the executions, in the order
            of iterations.
        left_out: The loops in a `shard_map` whose bodies are not watched.
    """

    name: str
    by: By
    rows: tuple[WatchedRow, ...]
    values: Mapping[str, np.ndarray]
    left_out: tuple[str, ...]


def watch(
    program: Program,
    args: object,
    *,
    by: By = "line",
    only: str | Sequence[str] | None = None,
    rounds: int | slice | Sequence[int | slice] | None = None,
    values: bool = False,
    device: jax.Device | None = None,
    stops: Collection[int] = (),
    stop: Callable[[Stopped], None] | None = None,
) -> Watched:
    """Run a program and summarize the values that its equations compute.

    By line and by scope, only floats are summarized, without results of equations that only move
    values. Prints and other calls without results are skipped.

    Args:
        program: A `Program`.
        args: Its arguments, as a tuple, or as any pytree of the same leaves.
        by: The grouping of values into rows: `"line"`, `"scope"` or `"equation"`.
        only: Patterns of primitives, such as `"dot_general"` or `"conv*"`; None for all.
        rounds: The iterations of loops to watch, each in a separate row: numbers, counted from the
            end if negative, and slices. None for all, in one row.
        values: Whether to also keep the values themselves.
        device: The device to run on; by default placed by JAX and the arguments.
        stops: Equations by `id`; `stop` is called after each consecutive run of them.
        stop: Called with the values of these equations.

    Raises:
        ArgumentsError: If the arguments do not fit, or an iteration is neither a number nor a
            slice.
        UnsupportedError: If the program has free named axes.
    """
    if by not in get_args(By):
        raise ArgumentsError(f"values are grouped by line, scope or equation, not by {by!r}")
    chosen = IterationChoice([rounds] if isinstance(rounds, int | slice) else rounds)
    selection = None if only is None else Selection(only=[only] if isinstance(only, str) else only)
    with ready_to_step(program, args, device) as (program, arguments):
        recorder = RowCollector(program, by, chosen, values, selection is None)

        def wanted(eqn: JaxprEqn, result: int) -> bool:
            asked = selection.fits(eqn) if selection is not None else not _has_steps(eqn)
            return asked and recorder.wants(eqn, result)

        kept, last = stop_runs(program, stops)
        run = WatchedRun(wanted, chosen, recorder.take, kept, last, stopping(program, stop))
        run.run(program.jaxpr, arguments)
        return Watched(program.name, by, recorder.rows(), recorder.values(), tuple(run.left_out))


def _has_steps(eqn: JaxprEqn) -> bool:
    """Return True if the equations inside an equation are watched instead of the equation."""
    return isinstance(view(eqn), Scan | While | Cond | Call | CustomJVP | ShardMap)


# --- watched run ----------------------------------------------------------------------------------
# A run of a program, piece by piece, that reports the values of watched equations.
#
# Pieces are compiled with the values as further results (`collected`). Between pieces are loops
# without a known number of iterations, external calls, and equations at which it stops.


@dataclass(frozen=True)
class WatchedResult:
    """A result of an equation.

    Attributes:
        eqn: The equation.
        number: The index of the result.
        around: The equations whose bodies it is in, the outermost first.
    """

    eqn: JaxprEqn
    number: int
    around: tuple[JaxprEqn, ...]


#: Receives a result's values in some executions: the enclosing iteration numbers, one row per
#: execution, and all values in one array.
Take = Callable[[WatchedResult, np.ndarray, Any], None]

#: An equation that has run, with its operands and results.
Ran = tuple[JaxprEqn, list[Any], Sequence[Any]]

#: Called after an equation at which to stop, with the values of the equations run since.
Stop = Callable[[tuple[int, ...], list[Ran]], None]


class WatchedRun(SteppingInterpreter):
    """A run of a program that reports the values of equations.

    Args:
        wanted: Which results of equations are watched.
        iterations: The iterations of loops to watch.
        take: Receives the values.
        stops: The equations, by `id`, whose operands and results are passed to `stop`.
        last: Those of them after which `stop` is called.
        stop: Called with the values.
    """

    def __init__(
        self,
        wanted: Wanted,
        iterations: IterationChoice,
        take: Take,
        stops: Collection[int] = (),
        last: Collection[int] = (),
        stop: Stop | None = None,
    ):
        super().__init__()
        #: Equations whose inner equations are not watched.
        self.left_out: list[str] = []
        self._wanted, self._selected, self._take = wanted, iterations, take
        self._stops, self._last, self._stop = stops, last, stop
        self._kept: list[Ran] = []
        self._pieces = BodyPieces(wanted, lambda eqn: id(eqn) in stops)
        self._on = True
        self._compiled: dict[tuple[str, int], Any] = {}

    # --- the interpreter's hooks ------------------------------------------------------------------

    def run(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        self._on = all(
            frame.iteration is None or self._selected.has(frame.iteration, frame.length)
            for frame in self.frames
        )
        env: dict[Var, Any] = dict(zip(closed.invars, args, strict=True))
        env.update(zip(closed.constvars, closed.consts, strict=True))
        for piece in self._pieces.of(closed):
            operands = [env[v] for v in piece.body.invars]
            run = self._run_together if piece.together else self._run_by_step
            env.update(zip(piece.body.outvars, run(piece, operands), strict=True))
            env = {v: env[v] for v in piece.live}
        return [v.val if isinstance(v, Literal) else env[v] for v in closed.outvars]

    def _run_by_step(self, piece: Piece, operands: list[Any]) -> list[Any]:
        return super().run(piece.body, operands)

    def _run_together(self, piece: Piece, operands: list[Any]) -> list[Any]:
        run = self._made(("run", piece), lambda: BodyValues(piece.body, self._wanted, operands))
        results, values = run(operands)
        if self._on:
            self._take_sites(run.sites, values)
        return results

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        on = self._on
        results = super().equation(eqn, operands)
        self._on = on
        self._note(eqn, results)
        if id(eqn) in self._stops and self._on and self._stop is not None:
            self._kept.append((eqn, operands, results))
            if id(eqn) in self._last:
                self._stop(self.iterations, self._kept)
                self._kept = []
        return results

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        if isinstance(view(eqn), ShardMap):
            self._leave_out(eqn)
        return super().evaluate(eqn, operands)

    def frame(self, structured: View, operands: list[Any]) -> Frame:
        frame = super().frame(structured, operands)
        if isinstance(structured, While) and self._on and self._selected.need_length:
            frame.length = self._counted(structured, operands)
        return frame

    def is_compiled(self, loop: Scan | While) -> bool:
        if isinstance(loop, Scan) and not loop.length:
            return False
        return not any(map(self._pieces.steps, bodies_of(loop)))

    def _counted(self, loop: While, operands: list[Any]) -> int:
        """Return the number of iterations of a loop, which is run once to count them."""
        if loop.eqn.effects:
            raise UnsupportedError(
                f"iterations of {named(loop.eqn)} cannot be counted from the last one, because "
                "it has effects",
                "count them from the first: --rounds 0,10",
            )

        def count(by_role: LoopOperands) -> Any:
            return jax.lax.while_loop(
                lambda progress: progress.more,
                lambda progress: advanced(loop, by_role, progress),
                resumed_progress(loop, by_role, jnp.int32(0), by_role.carry),
            ).number

        run = self._made(("count", loop.eqn), lambda: jax.jit(count))
        return int(run(LoopOperands.of(loop, operands)))

    # --- values -----------------------------------------------------------------------------------

    def _note(self, eqn: JaxprEqn, results: Sequence[Any]) -> None:
        for i, x in enumerate(results if self._on else ()):
            if self._wanted(eqn, i):
                iterations = np.array([self.iterations], int)
                self._take(WatchedResult(eqn, i, self.around), iterations, on_host(x))

    def _leave_out(self, eqn: JaxprEqn) -> None:
        if (text := named(eqn)) not in self.left_out:
            self.left_out.append(text)

    def shards(self, shard_map: ShardMap, operands: list[Any]) -> list[Any]:
        outs, sites, values = shard_map_values(shard_map, self._wanted, operands)
        for inner in equations(jaxcompat.open_jaxpr(shard_map.body)):
            if isinstance(view(inner), While | ShardMap):
                self._leave_out(inner)
        if self._on:
            values = [np.asarray(x) for x in values]
            self.frames.append(self.frame(shard_map, operands))
            for device in range(shard_map.mesh.size):
                self._take_sites(sites, [x[device] for x in values])
            self.frames.pop()
        return outs

    def _take_sites(
        self, sites: Sequence[WatchSite], values: Sequence[Any], first: np.ndarray | None = None
    ) -> None:
        """Report the values of the running body.

        Args:
            sites: The sites.
            values: The collected values.
            first: The iteration number of each index of the first axis; None if there is no such
                axis.
        """
        values = list(map(on_host, values))
        executions: dict[Any, tuple[np.ndarray, np.ndarray]] = {}
        around = self.around
        for site in sites:
            # Sites in the same bodies run together.
            key = (*map(id, site.around), site.taken, site.offset)
            if key not in executions:
                executions[key] = self._executions(site, values, first)
            chosen, iterations = executions[key]
            if not len(iterations):
                continue
            data = values[site.place]
            data = data.reshape(chosen.size, *data.shape[chosen.ndim :])
            if len(iterations) < chosen.size:
                data = data[np.flatnonzero(chosen)]
            self._take(
                WatchedResult(site.eqn, site.result, (*around, *site.around)), iterations, data
            )

    def _executions(
        self, site: WatchSite, values: Sequence[Any], first: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the watched executions of a site, along the axes of its values.

        Also returns the enclosing iteration numbers of each.
        """
        outer = list(self.iterations)
        scans = (loop for eqn in site.around if isinstance(loop := view(eqn), Scan))
        lengths: list[Any] = [scan.length for scan in scans]
        numbers: list[np.ndarray] = [np.arange(length) for length in lengths]
        if first is not None:
            outer.pop()
            lengths.insert(0, self.frames[-1].length)
            numbers.insert(0, first + site.offset)
        chosen = np.ones(tuple(map(len, numbers)), bool)
        for axis, (row, length) in enumerate(zip(numbers, lengths, strict=True)):
            chosen &= _along(self._selected.among(row, length), axis, chosen.ndim)
        for place, branch in site.taken:
            chosen &= _along(np.asarray(values[place]) == branch, 0, chosen.ndim)
        indices = np.argwhere(chosen)
        iterations = np.empty((len(indices), len(outer) + len(numbers)), int)
        iterations[:, : len(outer)] = outer
        for axis, row in enumerate(numbers):
            iterations[:, len(outer) + axis] = row[indices[:, axis]]
        return chosen, iterations

    # --- loops ------------------------------------------------------------------------------------

    def compiled_loop(self, loop: Scan | While, operands: list[Any]) -> list[Any]:
        by_role, on = LoopOperands.of(loop, operands), self._on
        number, carry, more = 0, by_role.carry, True
        if isinstance(loop, While):
            (more,) = self.enter(loop.cond, [*by_role.cond_consts, *carry])
        stacked: list[Any] = []
        while more:
            make: Any = CompiledScan if isinstance(loop, Scan) else CompiledWhile
            run: Any = self._made(("run", loop.eqn), partial(make, loop, self._wanted, by_role))
            ran, carry, more, ys, values = run(number, by_role._replace(carry=carry))
            stacked.append(ys)
            if on:
                numbers = slice_number(loop, np.arange(number, number + ran))
                self._take_sites(run.sites, [on_host(x)[:ran] for x in values], np.sort(numbers))
            number += ran
        stacked = stacked[::-1] if isinstance(loop, Scan) and loop.reverse else stacked
        ys = [
            jnp.concatenate(parts) if len(parts) > 1 else parts[0]
            for parts in zip(*stacked, strict=True)
        ]
        return [*carry, *ys]

    def _made(self, key: tuple[str, object], make: Callable[[], Any]) -> Any:
        """Return the compiled form of a piece or a loop, which the cache keeps alive."""
        cache_key = key[0], id(key[1])
        if cache_key not in self._compiled:
            self._compiled[cache_key] = make()
        return self._compiled[cache_key]


def _along(values: Any, axis: int, rank: int) -> Any:
    """Return an array with axes of size 1 added around its own, which begin at `axis`."""
    return values.reshape((1,) * axis + values.shape + (1,) * (rank - axis - values.ndim))


# --- recorder -------------------------------------------------------------------------------------
# Recording of watched values in rows by line, scope or equation.

#: The groupings of values.
By: TypeAlias = OneOf["line", "scope", "equation"]


@document(without=("code",), names={"source": "place"}, flat=("numbers",))
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
        intermediate: Whether only the line itself reads the values. The values of a line that
            others read have a row of their own.
        iteration: The iteration of each enclosing loop, if iterations were selected.
        primitives: The primitives that compute the values.
        types: Their types.
        path: The enclosing equations, the outermost first: `scan at model.py:7`.
        times: The number of executions.
        numbers: The statistics of the values.
    """

    name: str
    source: Place
    code: str
    backward: bool
    intermediate: bool
    iteration: tuple[int, ...]
    primitives: tuple[str, ...]
    types: tuple[str, ...]
    path: tuple[str, ...]
    times: int
    numbers: Numbers


@dataclass(eq=False)
class _RowAttributes:
    """The attributes of a row except for its numbers."""

    name: str
    source: Place
    code: str
    backward: bool
    intermediate: bool
    path: tuple[str, ...]
    place: int
    #: The library lines called by the user's line.
    behind: dict[tuple[Place, ...] | None, None] = field(default_factory=dict)
    primitives: dict[str, None] = field(default_factory=dict)
    types: dict[str, None] = field(default_factory=dict)
    #: By iteration numbers if iterations are separate; else by ().
    times: Counter[tuple[int, ...]] = field(default_factory=Counter)
    tallies: dict[tuple[int, ...], Tally] = field(default_factory=dict)

    @property
    def line(self) -> Place:
        """The user's line, followed by the library's if there is only one."""
        [library, *others] = self.behind
        alone = others or not self.source
        return self.source if alone else replace(self.source, library=library)


class RowCollector:
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
        self._reads = LineReads(jaxcompat.open_jaxpr(program.jaxpr), self._source)
        self._scopes = _Scopes(program) if by == "scope" else None
        self._groups: dict[Any, _RowAttributes] = {}
        #: The group of each result; None if it belongs to none.
        self._known: dict[tuple[int, ...], _RowAttributes | None] = {}
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
        return is_inexact_dtype(aval.dtype) and not (self._computed and _moves(eqn, aval))

    def take(self, result: WatchedResult, iterations: np.ndarray, data: Any) -> None:
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
        places: dict[tuple[str, bool], int] = {}
        for group in self._groups.values():
            key = group.name, group.backward
            places[key] = min(places.get(key, group.place), group.place)

        def order(group: _RowAttributes) -> tuple[int, bool]:
            return places[group.name, group.backward], group.intermediate

        return tuple(
            WatchedRow(
                str(group.line) if group.name == group.source else group.name,
                *(group.line, group.code, group.backward, group.intermediate, numbers),
                *(tuple(group.primitives), tuple(group.types), group.path),
                group.times[numbers],
                group.tallies[numbers].numbers,
            )
            for group in sorted(self._groups.values(), key=order)
            for numbers in sorted(group.tallies)
        )

    def values(self) -> Mapping[str, np.ndarray]:
        """Return the kept values; those in loops are in the order of iterations."""
        arrays = {}
        for name, parts in self._kept.items():
            iterations, values = map(np.concatenate, zip(*parts, strict=True))
            alone = not iterations.shape[1] and len(values) == 1
            order = np.lexsort(iterations.T[::-1]) if iterations.shape[1] else slice(None)
            arrays[name] = values[0] if alone else values[order]
        return arrays

    def _keep(self, name: str, result: WatchedResult, iterations: np.ndarray, data: Any) -> None:
        shape = result.eqn.outvars[result.number].aval.shape
        values = plain_array(data).reshape(len(iterations), *shape).copy()
        self._kept.setdefault(name, []).append((iterations, values))

    def _name(self, result: WatchedResult) -> str:
        """Return a unique name for a result of an equation."""
        name = self._unique[id(result.eqn), result.number]
        self._seen[name] += 1
        # The body of a function that is called several times.
        return name if self._seen[name] == 1 else f"{name} #{self._seen[name]}"

    def _group(self, result: WatchedResult, name: str) -> _RowAttributes | None:
        eqn = result.eqn
        aval = eqn.outvars[result.number].aval
        if not self._counts(eqn, aval):
            return None
        eqns = (*result.around, eqn)
        line = self._frames.line_of(eqns)
        source = line.user
        backward, intermediate = any(map(is_backward, eqns)), False
        key: Any = name
        if self._by == "line":
            intermediate = bool(source) and not self._reads.leaves_line(result)
            name, key = source or "unknown line", (source, backward, intermediate)
        elif self._scopes is not None:
            name = self._scopes.name(eqns) or "outside all scopes"
            source, key = UNKNOWN, (name, backward)
        if key not in self._groups:
            path = self._frames.path_of(result.around) if self._by == "equation" else ()
            code = self._frames.code_of(eqns) if source else ""
            place = self._order[id(eqn)]
            group = _RowAttributes(name, source, code, backward, intermediate, path, place)
            if self._by == "line" and (other := self._groups.get((*key[:-1], not intermediate))):
                group.behind = other.behind  # a line has the same name in both rows
            self._groups[key] = group
        group = self._groups[key]
        group.behind[line.library] = None
        group.place = min(group.place, self._order[id(eqn)])
        group.primitives[str(eqn.primitive.name)] = None
        group.types[type_of(aval)] = None
        return group

    def _source(self, eqns: Sequence[JaxprEqn]) -> Place:
        return self._frames.line_of(eqns).user


class _ReadValue(NamedTuple):
    """A variable that holds a value of a line.

    Attributes:
        jaxpr: The jaxpr of the variable.
        var: The variable.
        around: The equations around the jaxpr, the outermost first.
        maker: The equation of the jaxpr that binds it; None in a body that reads it.
        is_away: Whether the value has left the call that the line is in.
    """

    jaxpr: Jaxpr
    var: Var
    around: tuple[JaxprEqn, ...]
    maker: JaxprEqn | None
    is_away: bool = False


class LineReads:
    """Tells the values of lines from intermediates, which only equations of the same line read.

    A line that runs again, in a Python loop or a call, reads the values of its last run. Its
    backward pass reads intermediates.

    Args:
        top: The program's open jaxpr.
        source: Returns the line of an equation, given after its enclosing equations.
    """

    def __init__(self, top: Jaxpr, source: Callable[[Sequence[JaxprEqn]], str]) -> None:
        self._flow, self._source = DataFlow(top), source

    def leaves_line(self, result: WatchedResult) -> bool:
        """Return True if another line reads a value, a ref stores it, or nothing reads it."""
        eqn, around = result.eqn, result.around
        todo = [_ReadValue(self._homes[id(eqn)], eqn.outvars[result.number], around, eqn)]
        line, backward = self._place((*around, eqn))
        seen = set[tuple[Var, str]]()
        while todo:
            value = todo.pop()
            # A body of a library is on each line that calls it.
            key = value.var, self._source(value.around) if value.around else ""
            if key in seen:
                continue
            seen.add(key)
            results = self._flow.results(value.jaxpr, value.var)
            readers = self._flow.readers(value.jaxpr, value.var)
            if not readers and not (results and value.around):
                return True
            for reader in (value.jaxpr.eqns[i] for i in readers):
                within = (*value.around, reader)
                inside = self._flow.arguments(reader, value.var)
                todo += [_ReadValue(body, var, within, None, value.is_away) for body, var in inside]
                if traits(reader).moves:
                    todo += [value._replace(var=var) for var in reader.outvars]
                if inside:
                    continue
                reads_line, reads_backward = self._place(within)
                if reads_line != line or reader.effects:
                    return True
                if reads_backward == backward and self._is_later_run(value, reader):
                    return True
            todo += self._outside(value, results, line)
        return False

    def _outside(
        self, value: _ReadValue, results: Sequence[int], line: str
    ) -> Iterator[_ReadValue]:
        """Yield the results of the equation around a body that have a value of the body."""
        *around, holding = value.around or (None,)
        is_away = value.is_away or self._place(value.around)[0] != line
        for holder in self._flow.holders[value.jaxpr]:
            for position in results if holder.eqn is holding else ():
                for jaxpr, var in self._flow.destinations(holder, position):
                    if jaxpr is holder.jaxpr:
                        yield _ReadValue(jaxpr, var, tuple(around), holder.eqn, is_away)

    def _place(self, eqns: Sequence[JaxprEqn]) -> tuple[str, bool]:
        """Return the line of an equation, and whether it is in a backward pass."""
        return self._source(eqns), any(map(is_backward, eqns))

    def _is_later_run(self, value: _ReadValue, reader: JaxprEqn) -> bool:
        if value.is_away or value.maker is None:
            return value.is_away
        runs = self._runs(value.jaxpr)
        return runs[id(value.maker)] != runs[id(reader)]

    @cached_method
    def _runs(self, jaxpr: Jaxpr) -> dict[int, int]:
        """Return which run of its line each equation of a body is from, by `id`."""
        firsts: dict[tuple[str, bool], object] = {}
        counts, runs = Counter[tuple[str, bool]](), dict[int, int]()
        for eqn in jaxpr.eqns:
            line = self._source((eqn,)), is_backward(eqn)
            place = eqn.source_info.traceback, eqn.primitive
            counts[line] += firsts.setdefault(line, place) == place
            runs[id(eqn)] = counts[line]
        return runs

    @cached_property
    def _homes(self) -> dict[int, Jaxpr]:
        """The jaxpr of each equation, by `id`."""
        return {id(eqn): jaxpr for jaxpr in self._flow.holders for eqn in jaxpr.eqns}


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
            inside = (body for _, numbered in holders(jaxpr) for _, body in numbered)
            new = dict.fromkeys(body for body in inside if body not in seen)
            seen.update(new)
            todo += new

    def _read(self, parts: Sequence[Part], path: tuple[str, ...]) -> None:
        for part in parts:
            if isinstance(part, ScopeCall):
                self._read(part.parts, (*path, part.name))
            else:
                self._paths[id(part)] = path

    def name(self, eqns: Sequence[JaxprEqn]) -> str:
        """Return the scopes around an equation, given after its enclosing equations."""
        return "/".join(name for eqn in eqns for name in self._paths.get(id(eqn), ()))


# --- stops ----------------------------------------------------------------------------------------
# Breakpoints: lines at which a running program stops, with the values there.


@dataclass(frozen=True)
class Stopped:
    """A line at which a program has stopped.

    Attributes:
        source: The line.
        iteration: The number of the iteration of each loop around it.
        values: The operands and results of its equations, by name.
    """

    source: Place
    iteration: tuple[int, ...]
    values: Mapping[str, Any]


def stop_runs(program: Program, stops: Collection[int]) -> tuple[set[int], set[int]]:
    """Return the `id`s of equations at which to stop, and of the last in each run of them.

    Calls are not entered: their operands and results belong to the line.
    """
    kept, last = set(stops), set()
    bodies: dict[Jaxpr, None] = {jaxcompat.open_jaxpr(program.jaxpr): None}
    for body in (todo := list(bodies)):
        for eqn, inside in holders(body):
            for _, inner in inside:
                if id(eqn) in kept and isinstance(view(eqn), Call | CustomJVP):
                    kept -= {id(inner_eqn) for inner_eqn in (*inner.eqns, *equations(inner))}
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
        text = "" if isinstance(atom, Literal) else spaced.get(identity(atom), "")[1:]
        return "" if text == "_" else text

    return name


def stopping(program: Program, stop: Callable[[Stopped], None] | None) -> Stop | None:
    """Return a function that calls `stop` with the values by name."""
    if stop is None:
        return None
    name_of, frames = value_names(program), frames_now(program.roots)

    def call(iterations: tuple[int, ...], ran: Sequence[Ran]) -> None:
        values: dict[str, Any] = {}
        seen: set[object] = set()
        numbers: Counter[str] = Counter()
        for eqn, operands, results in ran:
            pairs = zip((*eqn.invars, *eqn.outvars), (*operands, *results), strict=True)
            for atom, value in pairs:
                if isinstance(atom, Literal) or identity(atom) in seen:
                    continue
                seen.add(identity(atom))
                is_result = any(atom is var for var in eqn.outvars)
                name = name_of(atom) or (str(eqn.primitive.name) if is_result else "given")
                number = numbers[name]
                numbers[name] += 1
                values[f"{name}_{number}" if number else name] = value
        stop(Stopped(frames.line_of([ran[-1][0]]), iterations, values))

    return call


# --- selected -------------------------------------------------------------------------------------
# Selection of the iterations of loops to watch.


class IterationChoice:
    """A selection of iterations by list indices and slices.

    Args:
        chosen: `0` and `-1` are the first and the last, `slice(None, None, 10)` every tenth; None
            for all.
    """

    def __init__(self, chosen: Sequence[int | slice] | None):
        for iteration in chosen or ():
            if not isinstance(iteration, int | slice):
                raise ArgumentsError(f"an iteration must be a number or a slice, not {iteration!r}")
        self.chosen = chosen

    @cached_property
    def need_length(self) -> bool:
        """Whether some are counted from the end."""
        numbers = [
            n
            for iteration in self.chosen or ()
            for n in (
                (iteration.start, iteration.stop) if isinstance(iteration, slice) else (iteration,)
            )
        ]
        steps = [iteration.step for iteration in self.chosen or () if isinstance(iteration, slice)]
        return any(n is not None and n < 0 for n in (*numbers, *steps))

    def has(self, number: int, length: int | None) -> bool:
        """Return True if an iteration of a loop of `length` (None if unknown) is selected."""
        return bool(self.among(np.array([number]), length)[0])

    def among(self, numbers: np.ndarray, length: int | None) -> Any:
        """Return a mask of the selected iterations."""
        if self.chosen is None:
            return np.ones(numbers.shape, bool)
        mask = np.zeros(numbers.shape, bool)
        for iteration in self.chosen:
            if isinstance(iteration, slice):
                end = int(numbers.max(initial=0)) + 1 if length is None else length
                mask |= np.isin(numbers, range(*iteration.indices(end)))
            elif iteration >= 0 or length is not None:
                mask |= numbers == (iteration if iteration >= 0 else iteration + (length or 0))
        return mask


# --- pieces ---------------------------------------------------------------------------------------
# Pieces of bodies: equations compiled together, and stepped equations between them.

#: The limit in bytes of the values of equations compiled together, unless it is a single one.
_PIECE_BYTES = 1 << 28


@dataclass(frozen=True)
class Piece:
    """Consecutive equations.

    Attributes:
        body: Their jaxpr, from the values that they read to those read later.
        together: Whether they are compiled together.
        live: The variables read after them.
    """

    body: ClosedJaxpr
    together: bool
    live: tuple[Var, ...]


class BodyPieces:
    """The pieces of bodies.

    Args:
        wanted: Decides which results of equations are watched.
        stepped: The equations to step in addition to those that cannot be compiled with others.
    """

    def __init__(self, wanted: Wanted, stepped: Callable[[JaxprEqn], bool]):
        self._wanted = wanted
        #: Whether a body has a stepped equation.
        self.steps = Contains(lambda eqn: stepped(eqn) or is_stepped(eqn))
        self._known: dict[AnyJaxpr, list[Piece]] = {}
        self._bytes: dict[Jaxpr, int] = {}

    def of(self, closed: ClosedJaxpr) -> list[Piece]:
        """Return the pieces of a body, in order."""
        key = anchor(closed)
        if key not in self._known:
            self._known[key] = self._cut(closed)
        return self._known[key]

    def _cut(self, closed: ClosedJaxpr) -> list[Piece]:
        constants = set(closed.constvars)
        live = {v: None for v in closed.outvars if not isinstance(v, Literal)}
        pieces = []
        for together, eqns in reversed(self._groups(closed)):
            free = free_variables(eqns)
            results = [v for eqn in eqns for v in eqn.outvars if v in live]
            operands = [v for v in free if v not in constants]
            body = narrow(closed, operands, results, eqns)
            pieces.append(Piece(body, together, tuple(live)))
            for v in results:
                del live[v]
            live.update(free)
        return pieces[::-1]

    def _groups(self, closed: ClosedJaxpr) -> list[tuple[bool, list[JaxprEqn]]]:
        groups: list[tuple[bool, list[JaxprEqn]]] = []
        total = 0
        for eqn in closed.eqns:
            size = self._size(eqn)
            together = not self.steps.at(eqn) and (size <= ITERATION_BYTES or not _inside(eqn))
            total += size
            if not groups or groups[-1][0] != together or total > _PIECE_BYTES:
                groups.append((together, []))
                total = size
            groups[-1][1].append(eqn)
        return groups

    def _size(self, eqn: JaxprEqn) -> int:
        """Return the bytes of the values collected from an equation."""
        structured = view(eqn)
        wanted = (v for i, v in enumerate(eqn.outvars) if self._wanted(eqn, i))
        size = sum(size_of(v.aval, unknown=0) for v in wanted)
        times = structured.length if isinstance(structured, Scan) else 1
        return size + times * sum(map(self._size_inside, _inside(eqn)))

    def _size_inside(self, body: ClosedJaxpr) -> int:
        jaxpr = jaxcompat.open_jaxpr(body)
        if jaxpr not in self._bytes:
            self._bytes[jaxpr] = sum(map(self._size, jaxpr.eqns))
        return self._bytes[jaxpr]


def _inside(eqn: JaxprEqn) -> tuple[ClosedJaxpr, ...]:
    """Return the bodies from which values are collected."""
    structured = view(eqn)
    if isinstance(structured, Cond):
        return tuple(structured.branches)
    return (structured.body,) if isinstance(structured, Scan | Call | CustomJVP) else ()
