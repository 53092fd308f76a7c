"""NaNs and infinities in compiled bodies: counts, origins, iterations and shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial, reduce
from operator import or_
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.commands.nans.values import (
    FINITE,
    INF,
    NAN,
    Evaluation,
    NonfiniteOrigin,
    Tracked,
    can_be_nonfinite,
    has_state,
    may_make,
    nonfinite_flags,
    origins_of,
    union,
)
from jaxprtool.execute import stepping
from jaxprtool.execute.stepping import (
    Progress,
    advanced,
    bodies_of,
    on_shards,
    resumed_progress,
)
from jaxprtool.ir.dataflow import DataFlow
from jaxprtool.ir.equations import equations
from jaxprtool.ir.evaluation import Interpreter, LoopOperands, bind
from jaxprtool.ir.regions import Cond, Scan, ShardMap, While
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import (
    Atom,
    Aval,
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
)

# --- compiled -------------------------------------------------------------------------------------
# Counts and origins of NaNs and infinities in a compiled body.
#
# Each equation of the body, at any depth, has two counts: the executions that produced a NaN, and
# those that produced an infinity. Origins that are known before the body runs are followed: each
# value has a mask of the possible origins of its non-finite elements.

#: The number of origins that are followed, each by an element of a mask; further ones share the
#: last.
FOLLOWED = 32

#: The mask of a value, as booleans; None for no origins and for values without numbers.
Mask = Any


@jax.tree_util.register_pytree_node_class
class MaskedValue:
    """A traced value and the mask of its origins.

    Its state is computed only when needed.
    """

    def __init__(self, data: Any, mask: Mask = None):
        self.data, self.mask = data, mask

    @cached_property
    def state(self) -> tuple[Any, Any]:
        """Whether it has a NaN, and whether it has an infinity."""
        return nonfinite_flags(self.data)

    def tree_flatten(self) -> tuple[tuple[Any, Mask], None]:
        return (self.data, self.mask), None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: tuple[Any, Mask]) -> MaskedValue:
        return cls(*leaves)


class _MaskedConstant(MaskedValue):
    """A literal or a constant; a NaN in it is attributed to the equation that reads it."""

    @cached_property
    def state(self) -> tuple[Any, Any]:
        return False, nonfinite_flags(self.data)[1]


class OriginCounter(Interpreter):
    """Evaluates a jaxpr under tracing.

    Args:
        numbers: The number of each equation, by its `id`.
        indices: For each equation, the mask indices of the NaN and the infinity that it is known to
            produce, or -1. If None, origins are not followed.
        axes: The mesh axes in a `shard_map`.
        varying: Whether JAX checks which values vary over these axes.
    """

    def __init__(
        self,
        numbers: Mapping[int, int],
        indices: Any = None,
        axes: tuple[Any, ...] = (),
        varying: bool = False,
    ):
        self._numbers, self._indices, self._axes = numbers, indices, axes
        self._varying = varying
        self._single: dict[int, Any] = {}
        self._whole: list[Any] = []

    def results(self, body: ClosedJaxpr, arguments: Sequence[MaskedValue]) -> list[MaskedValue]:
        """Return the results of a body with their masks."""
        return self._masked(self.run(body, arguments))

    def _masked(self, values: Sequence[MaskedValue]) -> list[MaskedValue]:
        return [MaskedValue(x.data, self._mask(x)) for x in values]

    def _mask(self, value: MaskedValue) -> Mask:
        if self._indices is None or not has_state(value.data):
            return None
        return self._everywhere(no_origins() if value.mask is None else value.mask)

    def counts(self) -> Any:
        """Return the numbers of NaNs and infinities that each equation produced."""
        counts = self._zeros()
        if self._single:
            numbers = jnp.array(list(self._single))
            single_counts = [self._everywhere(count) for count in self._single.values()]
            counts = counts.at[numbers].set(jnp.stack(single_counts))
        return sum(self._whole, counts)

    def _zeros(self) -> Any:
        """Return zero counts."""
        return self._everywhere(jnp.zeros((len(self._numbers), 2), jnp.int32))

    def _everywhere(self, array: Any) -> Any:
        """Return an array whose type varies over all mesh axes."""
        if not self._varying:
            return array
        missing = tuple(a for a in self._axes if a not in jaxcompat.varying_axes(jax.typeof(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    def constant(self, value: object, aval: Aval) -> MaskedValue:
        return _MaskedConstant(value)

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[MaskedValue]:
        results = self.bound(eqn, operands)
        produced = self._made(eqn, operands, results) if may_make(eqn) else None
        if produced is not None:
            number = self._numbers[id(eqn)]
            self._single[number] = self._single.get(number, 0) + produced.astype(jnp.int32)
        if self._indices is not None:
            origins = self._origins(eqn, operands, produced)
            for x in results:
                if has_state(x.data):
                    x.mask = origins & (x.state[0] | x.state[1])
        return results

    def bound(self, eqn: JaxprEqn, operands: Sequence[MaskedValue]) -> list[MaskedValue]:
        """Return the results of an equation."""
        return list(map(MaskedValue, bind(eqn, [x.data for x in operands])))

    def _made(
        self, eqn: JaxprEqn, operands: Sequence[MaskedValue], results: Sequence[MaskedValue]
    ) -> Any:
        """Return flags for whether an equation produces a NaN, and, if not, an infinity."""
        nan, inf = self._states(results)
        given_nan, given_inf = self._states(operands)
        if traits(eqn).collective:
            given_nan, given_inf = map(self._anywhere, (given_nan, given_inf))
        made_nan = nan & ~given_nan
        return jnp.stack([made_nan, inf & ~(given_nan | given_inf | made_nan)])

    @staticmethod
    def _states(values: Sequence[MaskedValue]) -> tuple[Any, Any]:
        nan = inf = jnp.array(False)
        for x in values:
            nan, inf = nan | x.state[0], inf | x.state[1]
        return nan, inf

    def _origins(self, eqn: JaxprEqn, operands: Sequence[MaskedValue], produced: Any) -> Mask:
        """Return the combined mask of the operands and of new origins of an equation."""
        mask = any_of([x.mask for x in operands])
        if traits(eqn).collective:
            mask = self._anywhere(mask)
        if produced is not None:
            indices = self._indices[self._numbers[id(eqn)]][:, None]
            mask |= ((jnp.arange(FOLLOWED) == indices) & produced[:, None]).any(0)
        return mask

    def _anywhere(self, flags: Any) -> Any:
        """Return flags that are set if set on any device."""
        everywhere = self._everywhere(jnp.asarray(flags).astype(jnp.int32))
        return jax.lax.pmax(everywhere, self._axes) > 0 if self._axes else flags

    # --- branches and loops -----------------------------------------------------------------------

    def inner(self) -> OriginCounter:
        """Return an evaluator for the body of an equation."""
        return OriginCounter(self._numbers, self._indices, self._axes, self._varying)

    def branch(self, cond: Cond, operands: list[MaskedValue]) -> list[MaskedValue]:
        def taken(body: ClosedJaxpr, values: list[MaskedValue]) -> tuple[list[MaskedValue], Any]:
            inner = self.inner()
            return inner.results(body, values), inner.counts()

        branches = [partial(taken, body) for body in cond.branches]
        results, counts = jax.lax.switch(operands[0].data, branches, self._masked(operands[1:]))
        self._whole.append(counts)
        return results  # type: ignore[no-any-return]

    def scan(self, scan: Scan, operands: list[MaskedValue]) -> list[MaskedValue]:
        _, consts, start, xs = LoopOperands.of(scan, self._masked(operands))
        count = len(start)

        def one(state: Any, rows: Any) -> Any:
            carry, masks, counts = state
            inner = self.inner()
            slices = [MaskedValue(row, x.mask) for row, x in zip(rows, xs, strict=True)]
            outs = inner.results(scan.body, [*consts, *carry, *slices])
            masks = either(masks, [y.mask for y in outs[count:]])
            return (outs[:count], masks, counts + inner.counts()), [y.data for y in outs[count:]]

        following = self._indices is not None
        none = [
            self._everywhere(no_origins()) if following and can_be_nonfinite(y.aval.dtype) else None
            for y in scan.ys
        ]
        rows = [x.data for x in xs]
        (carry, masks, counts), ys = jax.lax.scan(
            one, (start, none, self._zeros()), rows, scan.length, scan.reverse, scan.unroll
        )
        self._whole.append(counts)
        return [*carry, *map(MaskedValue, ys, masks)]

    def while_loop(self, loop: While, operands: list[MaskedValue]) -> list[MaskedValue]:
        by_role = LoopOperands.of(loop, self._masked(operands))
        inner = self.inner()
        start = resumed_progress(loop, by_role, 0, by_role.carry, inner.results), inner.counts()

        def one(state: Any) -> Any:
            inner = self.inner()
            after = advanced(loop, by_role, state[0], inner.results)
            return after, state[1] + inner.counts()

        end, counts = jax.lax.while_loop(lambda state: state[0].more, one, start)
        self._whole.append(counts)
        return list(end.carry)


def masked_row(stack: MaskedValue, i: Any) -> MaskedValue:
    """Return the row at an index of the first axis, with the origins of the whole array."""
    return MaskedValue(stepping.row_at(stack.data, i), stack.mask)


def put_masked_row(stack: MaskedValue, row: MaskedValue, i: Any) -> MaskedValue:
    """Return a stack with the row at an index replaced."""
    (mask,) = either([stack.mask], [row.mask])
    return MaskedValue(stepping.put_at(stack.data, row.data, i), mask)


def no_origins() -> Mask:
    """Return the mask of a value without origins."""
    return jnp.zeros(FOLLOWED, bool)


def any_of(masks: Sequence[Mask]) -> Mask:
    """Return the mask of all origins of some values."""
    return reduce(or_, (mask for mask in masks if mask is not None), no_origins())


def either(masks: Sequence[Mask], others: Sequence[Mask]) -> list[Mask]:
    """Return the elementwise unions of two lists of masks."""
    return [None if a is None else a | b for a, b in zip(masks, others, strict=True)]


# --- origin table ---------------------------------------------------------------------------------
# Origins followed through a compiled body.


class OriginTable:
    """Origins by their mask index; false if there are none.

    Args:
        by_equation: The origins of equations of the body, by `id` and state.
        values: The arguments of the body.
    """

    def __init__(
        self, by_equation: Mapping[tuple[int, int], NonfiniteOrigin], values: Iterable[Tracked]
    ):
        origins = union([*origins_of(values), *by_equation.values()])
        self._indices = {origin: min(i, FOLLOWED - 1) for i, origin in enumerate(origins)}
        self._made = by_equation

    def __bool__(self) -> bool:
        return bool(self._indices)

    def indices(self, eqns: Sequence[JaxprEqn]) -> np.ndarray:
        """Return for each equation the mask indices of its NaN and its infinity, or -1."""
        rows = [[self._made_at(id(eqn), state) for state in (NAN, INF)] for eqn in eqns]
        return np.array(rows, np.int32).reshape(-1, 2)

    def _made_at(self, eqn: int, state: int) -> int:
        origin = self._made.get((eqn, state))
        return -1 if origin is None else self._indices[origin]

    def traced(self, values: Iterable[Tracked]) -> list[MaskedValue]:
        """Return values as arguments of a compiled body, with masks if any origin is followed."""
        return [MaskedValue(value.data, self._mask(value)) for value in values]

    def _mask(self, value: Tracked) -> Mask:
        if not self or not has_state(value.data):
            return None
        mask = np.zeros(FOLLOWED, bool)
        mask[[self._indices[origin] for origin in value.origins]] = True
        return mask

    def origins(self, value: MaskedValue) -> tuple[NonfiniteOrigin, ...]:
        """Return the origins of a result of a compiled body."""
        if value.mask is None:
            return ()
        mask = np.asarray(value.mask)
        return tuple(origin for origin, index in self._indices.items() if mask[index])


# --- iterations -----------------------------------------------------------------------------------
# Compiled iterations of a loop, which run until an equation produces a NaN or an infinity.
#
# A loop stops before the first iteration that produces a NaN or an infinity that is not ignored, or
# whose results have an origin that no value had before, so that this iteration can be rerun
# equation by equation.


class SearchState(NamedTuple):
    """The state of the search before iterations run.

    Attributes:
        ignored: For each equation, whether a NaN and an infinity that it produces are ignored.
        indices: For each equation, the mask indices of the NaN and the infinity that it is known to
            produce, or -1; None if nothing is followed.
        watched: Whether to stop if a result of an iteration has an origin that no value had before.
        end: The iteration before which to stop.
    """

    ignored: Any
    indices: Any
    watched: Any
    end: Any


def body_equations(loop: Scan | While) -> list[JaxprEqn]:
    """Return the equations with counts: those in the bodies of a loop, at any depth."""
    eqns = {id(e): e for body in bodies_of(loop) for e in equations(jaxcompat.open_jaxpr(body))}
    return list(eqns.values())


def compiled_iterations(loop: Scan | While) -> Callable[..., tuple[Progress, Any]]:
    """Return a function that runs iterations of a loop.

    It takes the `SearchState` state, the progress of the loop, and its operands. It returns the new
    progress, and how often each equation produced a NaN and an infinity.
    """
    numbers = {id(eqn): i for i, eqn in enumerate(body_equations(loop))}

    @jax.jit
    def run(search: SearchState, start: Progress, operands: LoopOperands) -> tuple[Progress, Any]:
        def one(state: Any) -> Any:
            before, counts, _ = state
            inner = OriginCounter(numbers, search.indices)
            after = advanced(loop, operands, before, inner.results, masked_row, put_masked_row)
            new_counts = inner.counts()
            values = (
                *operands.cond_consts,
                *operands.consts,
                *operands.xs,
                *before.carry,
                *before.ys,
            )
            new = _origins(after.carry, after.ys) & ~_origins(values)
            stops = ((new_counts > 0) & ~search.ignored).any() | (search.watched & new.any())
            # Stacked results need not be restored: the iteration rewrites its rows.
            pair = (before._replace(ys=[]), counts), (after._replace(ys=[]), counts + new_counts)
            kept, counts = jax.tree.map(lambda a, b: jnp.where(stops, a, b), *pair)
            return kept._replace(ys=after.ys), counts, stops

        counts = jnp.zeros((len(numbers), 2), jnp.int32)

        def continues(state: Any) -> Any:
            progress, _, stopped = state
            return progress.more & ~stopped & (progress.number < search.end)

        state = start, counts, jnp.array(False)
        return jax.lax.while_loop(continues, one, state)[:2]

    return run


def _origins(*groups: Any) -> Any:
    return any_of([x.mask for group in groups for x in group])


# --- shards ---------------------------------------------------------------------------------------
# NaNs and infinities produced by the equations of a `shard_map` on each device.


class ShardOrigin(NamedTuple):
    """An equation of a `shard_map` that produces a NaN or an infinity.

    Attributes:
        eqn: The equation.
        state: Which of the two.
        devices: The devices on which it does.
        operands: Its operands on the first of them; empty in a loop or a branch.
        results: Its results there.
    """

    eqn: JaxprEqn
    state: int
    devices: tuple[str, ...]
    operands: Sequence[Any]
    results: Sequence[Any]


class CheckedShards:
    """A `shard_map` compiled as a whole with checks of its equations.

    Args:
        view: The `shard_map`.
        operands: Its operands.
    """

    def __init__(self, view: ShardMap, operands: Sequence[Any]):
        self._view, self._operands = view, operands
        #: The equations inside, at any depth.
        self.equations = list(equations(jaxcompat.open_jaxpr(view.body)))
        self._numbers = {id(eqn): i for i, eqn in enumerate(self.equations)}
        outs, counts = self._run(None, list(map(MaskedValue, operands)))
        #: The results.
        self.results = [x.data for x in outs]
        self._flags = np.asarray(counts) > 0

    def made(self) -> Iterator[ShardOrigin]:
        """Yield each equation that produces a NaN, or else an infinity."""
        for number in np.flatnonzero(self._flags.any((0, 2))):
            nan, inf = self._flags[:, number].T
            state, flags = (NAN, nan) if nan.any() else (INF, inf)
            yield self._recorded(self.equations[number], state, flags)

    def sources(self, eqn: JaxprEqn) -> list[JaxprEqn | int | None]:
        """Return the source of each operand of an equation.

        It is the equation that computes the operand, or the position of the `shard_map` operand of
        which it is a shard; None for a literal or a constant.
        """
        top = jaxcompat.open_jaxpr(self._view.body)
        flow = DataFlow(top)
        jaxpr = next(body for body in flow.holders if any(other is eqn for other in body.eqns))
        return [_source(flow, jaxpr, atom) for atom in eqn.invars]

    def followed(self, indices: Any, operands: Sequence[MaskedValue]) -> list[MaskedValue]:
        """Return the results with their masks.

        Args:
            indices: For each equation, the mask indices of its NaN and its infinity.
            operands: The operands with their masks.
        """
        return self._run(indices, operands)[0]

    def _run(self, indices: Any, operands: Sequence[MaskedValue]) -> tuple[list[MaskedValue], Any]:
        """Return the results and the counts on each device."""
        axes = self._view.mesh.axis_names
        varying = bool(self._view.eqn.params["check_vma"])
        masks = [x.mask for x in operands]

        def checked(*shards: Any) -> Any:
            run = OriginCounter(self._numbers, indices, axes, varying)
            outs = run.results(self._view.body, list(map(MaskedValue, shards, masks)))
            noted = [x.mask for x in outs], run.counts()
            return [x.data for x in outs], jax.tree.map(lambda x: x[None], noted)

        run = jax.jit(on_shards(self._view, checked))
        outs, (of_devices, counts) = run(*(x.data for x in operands))
        everywhere = (None if mask is None else np.asarray(mask).any(0) for mask in of_devices)
        return list(map(MaskedValue, outs, everywhere)), counts

    def _recorded(self, eqn: JaxprEqn, state: int, flags: np.ndarray) -> ShardOrigin:
        """Return the NaN or infinity of an equation, with its values on the first such device."""
        place, count = int(flags.argmax()), len(eqn.invars)

        def recorded(*shards: Any) -> Any:
            run = _OperandRecorder(eqn)
            run.run(self._view.body, list(map(MaskedValue, shards)))
            return [jnp.asarray(x)[None] for x in run.values]

        stacked = jax.jit(on_shards(self._view, recorded, with_results=False))(*self._operands)
        values = [x[place] for x in stacked]
        devices = self._view.mesh.devices.flatten()
        names = tuple(str(device) for device, flag in zip(devices, flags, strict=True) if flag)
        return ShardOrigin(eqn, state, names, values[:count], values[count:])


def _source(flow: DataFlow, jaxpr: Jaxpr, atom: Atom) -> JaxprEqn | int | None:
    """Return the equation of an atom, or its argument position, looking through calls."""
    while type(atom) is not Literal:
        position = flow.definition(jaxpr, atom)
        if position is not None:
            return jaxpr.eqns[position]
        position = flow.argument(jaxpr, atom)
        if position is None or jaxpr is flow.top:
            return position
        origins = flow.origins(flow.holders[jaxpr][0], position)
        if not origins:
            return None
        jaxpr, atom = origins[0]
    return None


class _OperandRecorder(OriginCounter):
    """Records operands and results of equations outside of loops and branches."""

    def __init__(self, wanted: JaxprEqn):
        super().__init__({})
        self._wanted = wanted
        self.values: list[Any] = []

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        results = self.bound(eqn, operands)
        if eqn is self._wanted:
            self.values = [x.data for x in (*operands, *results)]
        return results

    def inner(self) -> _OperandRecorder:
        return _OperandRecorder(self._wanted)


# --- cone -----------------------------------------------------------------------------------------
# The jaxpr of the equations that lead from finite values to one equation.
#
# The values come from one run. Calls and loops are flattened: each value is the result of the
# equation that computed it, in whichever body and iteration.

#: The maximum number of equations of a cone.
_MOST = 64


def cone_of(step: Evaluation, operands: Sequence[Tracked]) -> tuple[ClosedJaxpr, list[Any]]:
    """Return the equation of a step, and those that produced its non-finite operands.

    Args:
        step: The step.
        operands: The operands of its equation.

    Returns:
        The jaxpr, with the results of the equation, and the values of its arguments.
    """
    cone = _Cone()
    outs = cone.add(step, operands)
    jaxpr = jaxcompat.replace_jaxpr(
        jaxcompat.trace_in_setting(list, [], step.eqn),
        invars=list(cone.arguments),
        outvars=[v for v in outs if type(v) is not DropVar],
        eqns=cone.equations,
    )
    return jaxpr, list(cone.arguments.values())


class _Cone:
    """The equations that lead from finite values to one equation, in order.

    Attributes:
        equations: The equations, with new variables.
        arguments: The variables that they read but do not compute, with their values.
    """

    def __init__(self) -> None:
        self.equations: list[JaxprEqn] = []
        self.arguments: dict[Var, Any] = {}
        self._atoms: dict[int, Atom] = {}
        self._begun = 0

    def add(self, step: Evaluation, operands: Sequence[Tracked]) -> Sequence[Var]:
        """Add the equation of a step after those that computed its operands."""
        self._begun += 1
        eqn = step.eqn
        pairs = zip(eqn.invars, operands, strict=True)
        invars = [v if type(v) is Literal else self._atom(v, x) for v, x in pairs]
        outvars = [v if type(v) is DropVar else Var(v.aval) for v in eqn.outvars]
        source = eqn.source_info
        for call in reversed(step.around):
            source = jaxcompat.source_under(call)(source)
        self.equations.append(eqn.replace(invars=invars, outvars=outvars, source_info=source))
        return outvars

    def _atom(self, var: Atom, value: Tracked) -> Atom:
        if id(value) not in self._atoms:
            step = value.step
            if step is not None and self._begun < _MOST and _is_made_by(value, step):
                (self._atoms[id(value)],) = self.add(step, step.operands)
            else:
                self._atoms[id(value)] = new = Var(var.aval)
                self.arguments[new] = value.data
        return self._atoms[id(value)]


def _is_made_by(value: Tracked, step: Evaluation) -> bool:
    """Return True if a non-finite value is the only result of a step, not just a row of it."""
    outs = step.eqn.outvars
    is_whole = len(outs) == 1 and getattr(outs[0].aval, "shape", None) == np.shape(value.data)
    return value.state != FINITE and is_whole and len(step.operands) == len(step.eqn.invars)
