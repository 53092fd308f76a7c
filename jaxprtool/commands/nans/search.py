"""The search for origins: evaluates a program by equation and follows each NaN and infinity.

An equation *makes* a NaN if a result has one and no operand has, and an infinity if a result has
one and all operands are finite. Such a NaN or infinity is an origin. Non-finite values computed
from non-finite values inherit their origins. Each execution that makes one is a separate origin, up
to a limit; in the end, the first origin that reaches a result represents all those of the equation.

A NaN in a constant is made by the equation that reads it. If it is returned unchanged or passed to
a loop or a `shard_map`, the constant itself is an origin.

A loop of many iterations is compiled (`iterations`) and stops before an iteration that makes an
origin. That iteration is run equation by equation, and the compiled loop continues after it. It
stops again at an iteration whose results have an origin that was also made in earlier iterations
but dropped there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.commands.nans.compiled import (
    CheckedShards,
    OriginTable,
    SearchState,
    body_equations,
    compiled_iterations,
)
from jaxprtool.commands.nans.values import (
    FINITE,
    INF,
    NAN,
    ConstantValue,
    DataMovement,
    Evaluation,
    Index,
    NonfiniteOrigin,
    ProvenanceValue,
    Tracked,
    first_place,
    has_state,
    is_moving,
    may_make,
    origins_of,
    representative,
    state_of,
    union,
    with_origins,
)
from jaxprtool.execute.running.arrays import plain_array
from jaxprtool.execute.running.run import ready_to_step
from jaxprtool.execute.stepping import (
    Progress,
    SteppingInterpreter,
    bodies_of,
    row_quickly,
)
from jaxprtool.ir.equations import named
from jaxprtool.ir.equivalence import Unkeyable, jaxpr_structure
from jaxprtool.ir.evaluation import FiniteCheck, LoopOperands, bind, checks_disabled, slice_number
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import Cond, Scan, ShardMap, While, holds_jaxpr, regions, view
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import AbstractRef, Aval, ClosedJaxpr, JaxprEqn, Var

#: The limit in bytes of dead values that are kept to show the provenance of an origin.
_RETAINED_BYTES = 1 << 28

#: The maximum number of separate origins of one equation that are not dropped.
_APART = 16

#: The numbers of executed equations and iterations after which a loop is compiled. Compilation
#: takes as long as some hundred iterations.
_EQUATIONS_BY_HAND = 300
_ITERATIONS_BY_HAND = 32

#: The number of times a compiled loop stops for known NaNs and infinities of its equations.
_STOPS = 64

#: The number of iterations after which a compiled loop stops in any case.
_MOST_ITERATIONS = np.iinfo(np.int32).max


def origin_of(program: Program, arguments: Sequence[Any], position: int, check: FiniteCheck) -> str:
    """Return the origin of the first fault in a result: `log at model.py:9`.

    Args:
        program: A `Program`.
        arguments: Its flat arguments, with the values of Refs before it was run.
        position: The position of the result.
        check: The kind of fault.
    """
    with checks_disabled(), ready_to_step(program, list(arguments), None) as (program, placed):
        search = OriginSearch(program.jaxpr, placed, program.arg_names, known=NAN | INF)
        result = search.run_program()[position]
    states = NAN * check.nans | INF * check.infs
    origin = next((origin for origin in result.origins if origin.state & states), None)
    if origin is not None and origin.step is not None:
        return named(origin.step.eqn)
    if origin is not None and origin.name:
        return f"the argument '{origin.name}'"
    if result.state & states:
        return "a constant"
    return "no single equation: run one at a time, none produces it"


class OriginSearch(SteppingInterpreter):
    """A run of a program that finds all origins.

    Args:
        closed: The program's jaxpr.
        arguments: Its flat arguments.
        names: The names of the arguments.
        clean: Loops, by `id`, that make no origin from operands without origins.
        known: The states in which arguments are origins, since infinite arguments are often
            intended.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        arguments: Sequence[Any],
        names: Sequence[str],
        clean: Collection[int] = (),
        known: int = NAN,
    ):
        super().__init__()
        self._closed, self._named = closed, list(zip(arguments, names, strict=True))
        self._clean, self._known = clean, known
        self._arguments: list[NonfiniteOrigin] = []
        self._held: dict[int, NonfiniteOrigin] = {}
        self._by_equation: dict[tuple[int, int], list[NonfiniteOrigin]] = {}
        # Origins that live values may have, in order of creation.
        self._open: list[NonfiniteOrigin] = []
        self._number = 0
        self._refs: dict[int, tuple[NonfiniteOrigin, ...]] = {}
        self._retained: deque[tuple[Evaluation | DataMovement, int]] = deque()
        self._bytes = 0
        self._compiled: dict[Any, Any] = {}
        # The number of iterations of each loop run equation by equation.
        self._by_hand: Counter[int] = Counter()
        # The operands of the running equations, outermost first.
        self._operands: list[Sequence[Tracked]] = []

    def run_program(self) -> list[Tracked]:
        """Run the program, and return its results.

        Raises:
            RuntimeError: If a callback raises an error. `origins` are those found before.
        """
        tracked = [self._argument(*pair) for pair in self._named]
        try:
            results = list(map(self._result, self.run(self._closed, tracked)))
        except RuntimeError:
            for origin in self._origins_of_error():
                origin.raises = True
            raise
        for position, value in enumerate(results):
            for origin in value.origins:
                origin.reached.append(position)
        return results

    @cached_property
    def origins(self) -> list[NonfiniteOrigin]:
        """The origins found, one per equation and state, in order of creation.

        A NaN in a constant is one if it leads to a result or an error.
        """
        representatives = map(representative, self._by_equation.values())
        in_order = sorted(representatives, key=lambda origin: origin.number)
        found = [*self._arguments, *in_order, *self._held.values()]
        return [o for o in found if o.reached or o.raises or not o.held]

    def _origins_of_error(self) -> tuple[NonfiniteOrigin, ...]:
        """Return the origins of the nearest values that the failed equation depends on.

        It reads its operands, and the predicates of the branches around it.
        """
        running = zip(self.frames, self._operands, strict=False)
        predicates = [operands[0] for frame, operands in running if isinstance(frame.held, Cond)]
        values = deque([*chain(*self._operands[-1:]), *predicates])
        seen = set(map(id, values))
        while values:
            value = values.popleft()
            if value.origins:
                return value.origins
            new = [x for x in _read_by(value) if id(x) not in seen]
            seen.update(map(id, new))
            values.extend(new)
        return ()

    def _argument(self, data: Any, name: str) -> Tracked:
        value = Tracked(data, name=name)
        if state := value.state & self._known:
            origin = NonfiniteOrigin(state, None, name, [value])
            self._arguments.append(origin)
            value.origins = (origin,)
        return value

    def _result(self, value: Tracked) -> Tracked:
        """Return a result; a NaN in it without an origin comes from a constant."""
        if isinstance(jax.typeof(value.data), AbstractRef):
            return Tracked(value.data[...], origins=self._refs.get(id(value.data), ()))
        if value.origins or not state_of(value.data) & NAN:
            return value
        return self._holding(value.data)

    def _operand(self, value: Tracked) -> Tracked:
        """Return a value as an operand of a loop or a `shard_map`, not marked as a constant."""
        return self._holding(value.data) if _holds_nan(value) else value

    def _holding(self, data: Any) -> Tracked:
        """Return a value whose NaN comes from a constant."""
        value = Tracked(data)
        origin = self._held.setdefault(id(data), NonfiniteOrigin(NAN, None, "", [value]))
        value.origins = (origin,)
        return value

    # --- the interpreter's hooks ------------------------------------------------------------------

    def constant(self, value: object, aval: Aval) -> Tracked:
        return ConstantValue(value)

    def concrete(self, value: Tracked) -> Any:
        return value.data

    def row(self, value: Tracked, i: int) -> Tracked:
        moved = DataMovement([value], i)
        row = Tracked(row_quickly(value.data, i), value.step, (), value.name, value.position, moved)
        self._retain(moved, 0)
        return with_origins(row, value.origins)

    def stack(self, rows: Sequence[Tracked], var: Var) -> Tracked:
        data = super().stack([row.data for row in rows], var)
        if not rows:
            return Tracked(data)
        moved, last = DataMovement(rows), rows[-1]
        self._retain(moved, getattr(data, "nbytes", 0))
        return Tracked(data, last.step, origins_of(rows), last.name, last.position, moved)

    def enter(self, body: ClosedJaxpr, operands: list[Any], predicate: Any = None) -> list[Any]:
        first = len(self._open)
        results = super().enter(body, operands)
        self.close(first, results)
        return results

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Tracked]:
        if isinstance(view(eqn), Scan | While | ShardMap):
            operands = list(map(self._operand, operands))
        self._operands.append(operands)
        if id(eqn) in self._clean and not any(x.origins for x in operands) and not eqn.effects:
            results: Sequence[Tracked] = self.effects.results(eqn, _data(operands))
            results = self.step(eqn, operands, results)[1]
        else:
            results = super().equation(eqn, operands)
        self._operands.pop()
        return results

    def is_compiled(self, loop: Scan | While) -> bool:
        if isinstance(loop, While):  # only after many iterations
            return True
        self._by_hand[id(loop.eqn)] += loop.length
        equations = loop.length * len(body_equations(loop))
        many = self._by_hand[id(loop.eqn)] > _ITERATIONS_BY_HAND
        return equations > _EQUATIONS_BY_HAND and many

    # --- one equation -----------------------------------------------------------------------------

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> list[Tracked]:
        data = [x.data for x in operands]
        outs = self.effects.results(eqn, data)
        step, results = self.step(eqn, operands, outs)
        refs = [x for x in (*data, *outs) if isinstance(jax.typeof(x), AbstractRef)]
        ref_origins = tuple(dict.fromkeys(o for ref in refs for o in self._refs.get(id(ref), ())))
        origins = union([*origins_of(operands), *ref_origins])
        contents = [Tracked(ref[...]) for ref in refs]
        if not ref_origins and (may_make(eqn) or any(map(_holds_nan, operands))):
            new_origin = self._made(step, operands, [*results, *contents])
            if new_origin is not None:
                for origin in origins:
                    origin.led_to.setdefault((id(eqn), new_origin.state), new_origin)
                origins = union([*origins, new_origin])
        if origins:
            for x in (*results, *contents):
                with_origins(x, origins)
            if not any(x.origins for x in (*results, *contents)):
                for origin in origins:
                    origin.dropped = step
        for ref, x in zip(refs, contents, strict=True):
            self._refs[id(ref)] = x.origins
        return results

    def step(
        self, eqn: JaxprEqn, operands: Sequence[Tracked], outs: Sequence[Any]
    ) -> tuple[Evaluation, list[Tracked]]:
        """Return the step of an equation and its results."""
        is_held = _is_held(eqn, operands)
        step = Evaluation(eqn, self.around, self.iterations, operands, is_held)
        self._retain(step, sum(getattr(x, "nbytes", 0) for x in outs))
        return step, [Tracked(x, step, position=i) for i, x in enumerate(outs)]

    def _retain(self, step: Evaluation | DataMovement, size: int) -> None:
        """Keep the operands of a step, and drop those of old steps."""
        self._retained.append((step, size))
        self._bytes += size
        while self._bytes > _RETAINED_BYTES and len(self._retained) > 1:
            old, size = self._retained.popleft()
            old.operands = ()
            self._bytes -= size

    def _made(
        self, step: Evaluation, operands: Sequence[Tracked], results: Sequence[Tracked]
    ) -> NonfiniteOrigin | None:
        """Return the origin if an equation made a NaN or an infinity, else None."""
        old, new = FINITE, FINITE
        for x in results:
            new |= x.state
        if new == FINITE:
            return None
        for x in operands:
            old |= x.state
        if new & NAN and not old & NAN:
            state = NAN
        elif new & INF and old == FINITE:
            state = INF
        else:
            return None
        return self._found(state, step, operands, results)

    def _found(
        self, state: int, step: Evaluation, operands: Sequence[Tracked], results: Sequence[Tracked]
    ) -> NonfiniteOrigin:
        """Return the origin of a NaN or an infinity that an equation made."""
        origins = self._by_equation.setdefault((id(step.eqn), state), [])
        if sum(not origin.closed for origin in origins) >= _APART:
            origins[-1].times += 1
            return origins[-1]
        # Compute it now, before the operands are dropped.
        values = provenance(step, results) if results else ()
        origin = NonfiniteOrigin(
            state, step, "", results, tuple(operands), values, number=self._number
        )
        self._number += 1
        origins.append(origin)
        self._open.append(origin)
        return origin

    @property
    def open_count(self) -> int:
        """The number of origins that live values may have."""
        return len(self._open)

    def close(self, first: int, values: Sequence[Tracked]) -> None:
        """Close dropped origins: open ones from the `first` on that no value has.

        Among the dropped origins of one equation, the first is kept.
        """
        if len(self._open) == first:
            return
        in_refs = (origin for origins in self._refs.values() for origin in origins)
        live = {*origins_of(values), *in_refs}
        for origin in self._open[first:]:
            if origin not in live:
                origin.closed = True
                of_equation = self._by_equation[id(origin.step.eqn), origin.state]  # type: ignore[union-attr]
                earlier = next(other for other in of_equation if other.closed)
                if earlier is not origin:
                    earlier.times += origin.times
                    of_equation.remove(origin)
        self._open[first:] = [origin for origin in self._open[first:] if origin in live]

    def shards(self, shard_map: ShardMap, operands: list[Tracked]) -> list[Tracked]:
        checked = CheckedShards(shard_map, _data(operands))
        step, outs = self.step(shard_map.eqn, operands, checked.results)
        for shard_origin in checked.made():
            around = (*step.around, shard_map.eqn)
            sources = checked.sources(shard_origin.eqn)
            shard_operands = [
                _shard(*pair, operands, around, step.iterations)
                for pair in zip(shard_origin.operands, sources, strict=False)
            ]
            inner = Evaluation(shard_origin.eqn, around, step.iterations, shard_operands)
            results = [Tracked(x, inner, position=i) for i, x in enumerate(shard_origin.results)]
            origin = self._found(shard_origin.state, inner, inner.operands, results)
            origin.devices = tuple(dict.fromkeys([*origin.devices, *shard_origin.devices]))
        table = OriginTable(self.last_origins_of(checked.equations), operands)
        if table and any(x.state for x in outs):
            indices = table.indices(checked.equations)
            followed = checked.followed(indices, table.traced(operands))
            for x, traced in zip(outs, followed, strict=True):
                with_origins(x, table.origins(traced))
        return outs

    # --- loops ------------------------------------------------------------------------------------

    def compiled_loop(self, loop: Scan | While, operands: list[Tracked]) -> list[Tracked]:
        by_role = LoopOperands.of(loop, operands)
        stacked = loop.ys if isinstance(loop, Scan) else ()
        ys = [Tracked(jnp.zeros(var.aval.shape, var.aval.dtype)) for var in stacked]
        compiled = _CompiledLoop(self, loop, operands, by_role)
        number, carry, more = 0, by_role.carry, self._has_more(loop, by_role, 0, by_role.carry)
        while more:
            if self._is_compiled_by_now(loop, number, len(compiled.equations)):
                number, carry, ys, more = compiled.run(number, carry, ys)
                if not more:
                    break
            self.frames[-1].skip_to(number)
            place = slice_number(loop, number)
            rows = [self.row(x, place) for x in by_role.xs]
            outs = self.enter(loop.body, [*by_role.consts, *carry, *rows])
            carry, rows = outs[: len(carry)], outs[len(carry) :]
            ys = [
                Tracked(y.data.at[place].set(row.data), None, union([*y.origins, *row.origins]))
                for y, row in zip(ys, rows, strict=True)
            ]
            number += 1
            more = self._has_more(loop, by_role, number, carry)
        if isinstance(loop, While):
            return carry
        _, outs = self.step(loop.eqn, operands, _data([*carry, *ys]))
        return [*carry, *map(with_origins, outs[len(carry) :], (y.origins for y in ys))]

    def _has_more(
        self, loop: Scan | While, operands: LoopOperands, number: int, carry: list[Tracked]
    ) -> bool:
        if isinstance(loop, Scan):
            return number < loop.length
        (more,) = self.enter(loop.cond, [*operands.cond_consts, *carry])
        return bool(more.data)

    def _is_compiled_by_now(self, loop: Scan | While, number: int, equations: int) -> bool:
        """Return True unless a while loop of `equations` has run only few iterations."""
        if isinstance(loop, Scan):
            return True
        self._by_hand[id(loop.eqn)] += 1
        many = self._by_hand[id(loop.eqn)] > _ITERATIONS_BY_HAND
        return number >= _EQUATIONS_BY_HAND // max(equations, 1) and many

    def last_origins_of(self, eqns: Iterable[JaxprEqn]) -> dict[tuple[int, int], NonfiniteOrigin]:
        """Return the last origin of each equation, by `id` and state."""
        keys = [(id(eqn), state) for eqn in eqns for state in (NAN, INF)]
        return {key: self._by_equation[key][-1] for key in keys if key in self._by_equation}

    def compiled(self, loop: Scan | While) -> Any:
        """Return the compiled iterations of a loop, shared by loops of the same structure."""
        try:
            length = (loop.length, loop.reverse) if isinstance(loop, Scan) else None
            counts = len(loop.body.invars), len(loop.eqn.invars), len(loop.eqn.outvars)
            key: Any = (length, counts, *map(jaxpr_structure, bodies_of(loop)))
        except Unkeyable:
            key = id(loop.eqn)
        if key not in self._compiled:
            self._compiled[key] = compiled_iterations(loop)
        return self._compiled[key]


def _shard(
    data: Any,
    source: JaxprEqn | int | None,
    operands: Sequence[Tracked],
    around: tuple[JaxprEqn, ...],
    iterations: tuple[int, ...],
) -> Tracked:
    """Return a value on one device; `source` is its equation, or the operand it is a shard of."""
    if source is None:
        return ConstantValue(data)
    if isinstance(source, int):
        return Tracked(data, operands[source].step, name=operands[source].name)
    return Tracked(data, Evaluation(source, around, iterations, ()))


class _CompiledLoop:
    """Runs compiled iterations of a loop.

    Args:
        search: The search.
        loop: The loop.
        operands: The loop's operands.
        by_role: The operands by role.
    """

    def __init__(
        self,
        search: OriginSearch,
        loop: Scan | While,
        operands: Sequence[Tracked],
        by_role: LoopOperands,
    ):
        self._search, self._eqn, self._operands = search, loop.eqn, operands
        self._fixed = by_role._replace(carry=[])
        self.equations = body_equations(loop)
        self._run = search.compiled(loop)
        self._first = search.open_count
        self._stops = 0
        # The number of iterations of which one raises an error; None if none is known.
        self._failing: int | None = None

    def run(
        self, number: int, carry: list[Tracked], ys: list[Tracked]
    ) -> tuple[int, list[Tracked], list[Tracked], bool]:
        """Run iterations from `number` on, until one must be run by equation.

        Returns the number of that iteration, or of all iterations, the carry and the stacked
        results before it, and whether the loop continues. Iterations that raise an error are
        bisected.
        """
        end = _MOST_ITERATIONS if self._failing is None else (number + self._failing) // 2
        last_origins = self._search.last_origins_of(self.equations)
        table = OriginTable(last_origins, [*carry, *ys, *chain(*self._fixed)])
        ignored = [[(id(e), state) in last_origins for state in (NAN, INF)] for e in self.equations]
        search_state = SearchState(
            jnp.array(ignored, bool).reshape(-1, 2),
            table.indices(self.equations) if table else None,
            jnp.array(self._stops < _STOPS),
            jnp.int32(end),
        )
        start = Progress(jnp.int32(number), table.traced(carry), table.traced(ys), jnp.array(True))
        fixed = LoopOperands(*map(table.traced, self._fixed))
        with jaxcompat.callback_failures() as failures:
            try:
                ran, counts = jax.block_until_ready(self._run(search_state, start, fixed))
            except jax.errors.JaxRuntimeError:
                if not failures or not isinstance(failures[0], Exception):
                    raise
                self._failing = end
                return number, carry, ys, True
        self._stops += 1
        self._count(last_origins, np.asarray(counts))
        ys = [Tracked(y.data, None, table.origins(y)) for y in ran.ys]
        if int(ran.number) > number:
            _, outs = self._search.step(self._eqn, self._operands, [x.data for x in ran.carry])
            carry = list(map(with_origins, outs, map(table.origins, ran.carry)))
        self._search.close(self._first, [*carry, *ys])
        return int(ran.number), carry, ys, bool(ran.more)

    def _count(
        self, last_origins: Mapping[tuple[int, int], NonfiniteOrigin], counts: np.ndarray
    ) -> None:
        """Add the number of times that known origins were made again."""
        for number, column in np.argwhere(counts):
            key = id(self.equations[number]), (NAN, INF)[column]
            last_origins[key].times += int(counts[number, column])


def _is_held(eqn: JaxprEqn, operands: Sequence[Tracked]) -> bool:
    """Return True if an equation's results depend on no argument, except through indices."""
    if is_moving(eqn):
        operands = [x for x in operands if has_state(x.data)] or operands
    return not eqn.effects and all(x.held for x in operands)


def _read_by(value: Tracked) -> Sequence[Tracked]:
    """Return the values from which a value was computed or moved."""
    source = value.moved or value.step
    return () if source is None else source.operands


def _holds_nan(value: Tracked) -> bool:
    return isinstance(value, ConstantValue) and value.has_nan


def _data(values: Sequence[Tracked]) -> list[Any]:
    return [value.data for value in values]


# --- provenance -----------------------------------------------------------------------------------
# The path of a NaN or an infinity, from its equation back to an argument.

#: The maximum number of values of a path, and the most moved values that are skipped.
_MOST_VALUES, _MOST_STEPS = 12, 100


def provenance(step: Evaluation, results: Sequence[Tracked]) -> list[ProvenanceValue]:
    """Return the values that led to the results of a step, from its operands to an argument.

    The path follows one element at a time, from the first non-finite one to an element from which
    it was computed. Elements that depend on an argument are preferred to constants; among these,
    the most suspicious one is taken. Values that were only moved are left out.
    """
    trail: list[ProvenanceValue] = []
    value = next(x for x in results if x.state)
    place: Index | None = first_place(value)
    reads = source_elements(value, place) or [SourceElements(x, None) for x in step.operands]
    is_known = True
    for _ in range(_MOST_STEPS):
        reads = [x for x in reads if not isinstance(x.value, ConstantValue)]
        reads = [x for x in reads if has_state(x.value.data)] or reads[:1]
        reads = [x for x in reads if not x.value.held] or reads
        if not reads or len(trail) == _MOST_VALUES:
            break
        one = _element(value, place)
        read = max(reads, key=lambda x: _most_suspicious(x, one)[0])
        is_known &= read.where is not None
        value, place = read.value, _most_suspicious(read, one)[1]
        if not _is_moved(value):
            trail.append(ProvenanceValue(value, place if is_known else None))
        reads = source_elements(value, place)
    return trail


def _is_moved(value: Tracked) -> bool:
    if value.moved is not None:
        return bool(value.moved.operands)
    return value.step is not None and is_moving(value.step.eqn)


def _element(value: Tracked, place: Index | None) -> float | complex | None:
    if place is None or not has_state(value.data):
        return None
    return plain_array(value.data)[place].item()  # type: ignore[no-any-return]


def _most_suspicious(
    read: SourceElements, result: float | complex | None
) -> tuple[tuple[int, float], Index | None]:
    """Return the suspicion score of a read value for an element, and the most suspicious place.

    Non-finite elements rank first, then zeros, then the largest magnitude. If the element is
    another number, zeros do not count, nor do non-finite elements that may not have been read.
    """
    if not has_state(read.value.data) or not np.size(read.value.data):
        return (0, 0.0), None
    array = plain_array(read.value.data)
    sizes = np.abs(array if read.where is None else array[read.where])
    is_finite = result is None or np.isfinite(result)
    ranks = np.where(sizes == 0, 0 if is_finite and result else 2, 1)
    ranks = np.where(np.isfinite(sizes), ranks, -1 if is_finite and sizes.ndim else 3)
    rank = int(ranks.max())
    likeliest = np.where(ranks == rank, sizes if rank == 1 else 1, -1)
    inside = iter(np.unravel_index(int(likeliest.argmax()), sizes.shape))
    index = [slice(None)] * array.ndim if read.where is None else read.where
    place = tuple(int(next(inside)) if isinstance(i, slice) else i for i in index)
    return (rank, float(likeliest.max())), place


# --- source elements ------------------------------------------------------------------------------
# The elements of operands from which an element of a result is computed.


class SourceElements(NamedTuple):
    """Elements of a value from which an element of a result is computed.

    Attributes:
        value: The value.
        where: The elements; None if any of them may be read.
    """

    value: Tracked
    where: Index | None


def source_elements(value: Tracked, place: Index | None) -> list[SourceElements]:
    """Return the elements that an element of a value is computed from; empty for an argument."""
    if value.moved is not None:
        return [_before_movement(value.moved, place)] if value.moved.operands else []
    step = value.step
    if step is None or not step.operands:
        return []
    if place is not None and has_state(value.data) and not step.eqn.effects:
        sources = _elements(step, value, place) or _alike(step.operands, value, place)
        if sources:
            return sources
    started = _start(step.eqn, value.position)
    if started is not None and not step.operands[started].held:
        return [SourceElements(step.operands[started], None)]
    return [SourceElements(x, None) for x in step.operands]


def _before_movement(moved: DataMovement, place: Index | None) -> SourceElements:
    """Return the element of the stack or row that an element was moved from."""
    if moved.row is not None:
        return SourceElements(moved.operands[0], None if place is None else (moved.row, *place))
    if place is None:
        return SourceElements(moved.operands[-1], None)
    return SourceElements(moved.operands[place[0]], place[1:])


def _elements(step: Evaluation, value: Tracked, place: Index) -> list[SourceElements]:
    """Return the elements that an element of a result is computed from; empty if unknown."""
    eqn, operands = step.eqn, step.operands
    like, name = traits(eqn), eqn.primitive.name
    if like.gives == "same":
        return [SourceElements(operands[value.position], place)]
    if like.elementwise:
        reads = [SourceElements(x, _broadcast(np.shape(x.data), place)) for x in operands]
        chooses = _CHOOSES.get(name)
        chosen = [] if chooses is None else list(chooses(reads, plain_array(value.data)[place]))
        # If the selected value is a constant of the program, blame the value it replaces.
        return [x for x in chosen if not x.value.held] or reads
    if is_moving(eqn):
        return _origin(step, value, place)
    if like.reduces and "axes" in eqn.params:
        return [
            SourceElements(
                operands[0], _reduced(np.ndim(operands[0].data), eqn.params["axes"], place)
            )
        ]
    if name == "dot_general":
        return list(map(SourceElements, operands, _contracted(step, place)))
    return []


def _alike(operands: Sequence[Tracked], value: Tracked, place: Index) -> list[SourceElements]:
    """Return an operand's element that was probably forwarded: equal and nonzero."""
    element = plain_array(value.data)[place]
    for x in operands:
        if element and has_state(x.data) and not x.held:
            same = plain_array(x.data) == element
            if same.any():
                there = same.shape == np.shape(value.data) and same[place]
                return [SourceElements(x, place if there else _first(same))]
    return []


def _broadcast(shape: Sequence[int], place: Index) -> Index:
    return tuple(i if n > 1 else 0 for i, n in zip(place, shape, strict=False)) if shape else ()


def _chosen(reads: Sequence[SourceElements], element: Any) -> Iterator[SourceElements]:
    """Yield the selected case of a `select_n`: for an invalid integer, the nearest valid one."""
    predicate, *cases = reads
    number = int(plain_array(predicate.value.data)[predicate.where])
    yield cases[min(max(number, 0), len(cases) - 1)]


def _equal(reads: Sequence[SourceElements], element: Any) -> Iterator[SourceElements]:
    """Yield the operands to which an element of a `max`, `min` or `clamp` is equal."""
    for read in reads:
        if np.array_equal(plain_array(read.value.data)[read.where], element, equal_nan=True):
            yield read


_CHOOSES: dict[str, Callable[[Sequence[SourceElements], Any], Iterator[SourceElements]]] = {
    "select_n": _chosen,
    "max": _equal,
    "min": _equal,
    "clamp": _equal,
}


def _origin(step: Evaluation, value: Tracked, place: Index) -> list[SourceElements]:
    """Return the element moved to a place; empty if it is a fill value or computed.

    To find it, the equation is run on element indices instead of elements.
    """
    eqn, movable = step.eqn, [x for x in step.operands if has_state(x.data)]
    ends = np.cumsum([np.size(x.data) for x in movable])
    if not movable or ends[-1] > np.iinfo(np.int32).max or holds_jaxpr(eqn.params.values()):
        return []
    data = [x.data for x in step.operands]
    for i, x in enumerate(step.operands):
        if has_state(x.data):
            end = ends[movable.index(x)]
            numbers = np.arange(end - np.size(x.data), end, dtype=np.int32)
            data[i] = _like(x.data, numbers.reshape(np.shape(x.data)))
    if "fill_value" in eqn.params:
        eqn = eqn.replace(params={**eqn.params, "fill_value": -1})
    number = int(plain_array(bind(eqn, data)[value.position])[place])
    if not 0 <= number < ends[-1]:
        return []
    which = int(np.searchsorted(ends, number, side="right"))
    x = movable[which]
    index = np.unravel_index(number - ends[which] + np.size(x.data), np.shape(x.data))
    return [SourceElements(x, tuple(map(int, index)))]


def _like(array: Any, numbers: np.ndarray) -> Any:
    """Return numbers placed on the devices of an array."""
    sharding = getattr(array, "sharding", None)
    return numbers if sharding is None else jax.device_put(numbers, sharding)


def _reduced(rank: int, axes: Sequence[int], place: Index) -> Index:
    kept = iter(place)
    return tuple(slice(None) if axis in axes else next(kept) for axis in range(rank))


def _first(flags: np.ndarray) -> Index:
    return tuple(map(int, np.unravel_index(int(flags.argmax()), flags.shape)))


def _contracted(step: Evaluation, place: Index) -> Iterator[Index]:
    """Yield the operand elements from which an element of a `dot_general` is computed."""
    contracted, batch = step.eqn.params["dimension_numbers"]
    begin = len(batch[0])
    for x, summed, shared in zip(step.operands, contracted, batch, strict=True):
        rank = np.ndim(x.data)
        index: list[Any] = [slice(None)] * rank
        for axis, i in zip(shared, place, strict=False):
            index[axis] = i
        free = [axis for axis in range(rank) if axis not in (*summed, *shared)]
        for axis, i in zip(free, place[begin:], strict=False):
            index[axis] = i
        begin += len(free)
        yield tuple(index)


def _start(eqn: JaxprEqn, position: int) -> int | None:
    """Return the position of the operand with the initial value of a loop result, or None."""
    inside = regions(eqn) if holds_jaxpr(eqn.params.values()) else None
    return None if inside is None else {out: i for i, out in inside.carried}.get(position)
