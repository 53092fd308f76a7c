"""Counts and origins of NaNs and infinities in a compiled body.

Each equation of the body, at any depth, has two counts: the executions that produced a NaN, and
those that produced an infinity. Origins that are known before the body runs are followed: each
value has a mask of the possible origins of its non-finite elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial, reduce
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.execute.nans.states import has_state, is_inexact, may_make, nonfinite
from jaxprtool.execute.stepping import iterations
from jaxprtool.execute.stepping.iterations import advanced, started
from jaxprtool.ir.core.structured import Cond, Scan, While
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.evaluation.interpret import Interpreter, LoopOperands, bind
from jaxprtool.jaxcompat import Aval, ClosedJaxpr, JaxprEqn

#: The number of origins that are followed, each by an element of a mask; further ones share the
#: last.
FOLLOWED = 32

#: The mask of a value, as booleans; None for no origins and for values without numbers.
Mask = Any


@jax.tree_util.register_pytree_node_class
class Masked:
    """A traced value and the mask of its origins.

    Its state is computed only when needed.
    """

    def __init__(self, data: Any, mask: Mask = None):
        self.data, self.mask = data, mask

    @cached_property
    def state(self) -> tuple[Any, Any]:
        """Whether it has a NaN, and whether it has an infinity."""
        return nonfinite(self.data)

    def tree_flatten(self) -> tuple[tuple[Any, Mask], None]:
        return (self.data, self.mask), None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: tuple[Any, Mask]) -> Masked:
        return cls(*leaves)


class _Written(Masked):
    """A literal or a constant; a NaN in it is attributed to the equation that reads it."""

    @cached_property
    def state(self) -> tuple[Any, Any]:
        return False, nonfinite(self.data)[1]


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

    def results(self, body: ClosedJaxpr, arguments: Sequence[Masked]) -> list[Masked]:
        """Return the results of a body with their masks."""
        return self._masked(self.run(body, arguments))

    def _masked(self, values: Sequence[Masked]) -> list[Masked]:
        return [Masked(x.data, self._mask(x)) for x in values]

    def _mask(self, value: Masked) -> Mask:
        if self._indices is None or not has_state(value.data):
            return None
        return self._everywhere(no_origins() if value.mask is None else value.mask)

    def counts(self) -> Any:
        """Return the numbers of NaNs and infinities that each equation produced."""
        counts = self._zeros()
        if self._single:
            numbers = jnp.array(list(self._single))
            made = [self._everywhere(each) for each in self._single.values()]
            counts = counts.at[numbers].set(jnp.stack(made))
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

    def constant(self, value: object, aval: Aval) -> Masked:
        return _Written(value)

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Masked]:
        results = self.bound(eqn, operands)
        made = self._made(eqn, operands, results) if may_make(eqn) else None
        if made is not None:
            number = self._numbers[id(eqn)]
            self._single[number] = self._single.get(number, 0) + made.astype(jnp.int32)
        if self._indices is not None:
            origins = self._origins(eqn, operands, made)
            for x in results:
                if has_state(x.data):
                    x.mask = origins & (x.state[0] | x.state[1])
        return results

    def bound(self, eqn: JaxprEqn, operands: Sequence[Masked]) -> list[Masked]:
        """Return the results of an equation."""
        return list(map(Masked, bind(eqn, [x.data for x in operands])))

    def _made(self, eqn: JaxprEqn, operands: Sequence[Masked], results: Sequence[Masked]) -> Any:
        """Return flags for whether an equation produces a NaN, and, if not, an infinity."""
        nan, inf = self._states(results)
        given_nan, given_inf = self._states(operands)
        if traits(eqn).collective:
            given_nan, given_inf = map(self._anywhere, (given_nan, given_inf))
        made_nan = nan & ~given_nan
        return jnp.stack([made_nan, inf & ~(given_nan | given_inf | made_nan)])

    @staticmethod
    def _states(values: Sequence[Masked]) -> tuple[Any, Any]:
        nan = inf = jnp.array(False)
        for x in values:
            nan, inf = nan | x.state[0], inf | x.state[1]
        return nan, inf

    def _origins(self, eqn: JaxprEqn, operands: Sequence[Masked], made: Any) -> Mask:
        """Return the combined mask of the operands and of new origins of an equation."""
        mask = any_of([x.mask for x in operands])
        if traits(eqn).collective:
            mask = self._anywhere(mask)
        if made is not None:
            indices = self._indices[self._numbers[id(eqn)]][:, None]
            mask |= ((jnp.arange(FOLLOWED) == indices) & made[:, None]).any(0)
        return mask

    def _anywhere(self, flags: Any) -> Any:
        """Return flags that are set if set on any device."""
        everywhere = self._everywhere(jnp.asarray(flags).astype(jnp.int32))
        return jax.lax.pmax(everywhere, self._axes) > 0 if self._axes else flags

    # --- branches and loops -----------------------------------------------------------------------

    def inner(self) -> OriginCounter:
        """Return an evaluator for the body of an equation."""
        return OriginCounter(self._numbers, self._indices, self._axes, self._varying)

    def branch(self, cond: Cond, operands: list[Masked]) -> list[Masked]:
        def taken(body: ClosedJaxpr, values: list[Masked]) -> tuple[list[Masked], Any]:
            inner = self.inner()
            return inner.results(body, values), inner.counts()

        branches = [partial(taken, body) for body in cond.branches]
        results, counts = jax.lax.switch(operands[0].data, branches, self._masked(operands[1:]))
        self._whole.append(counts)
        return results  # type: ignore[no-any-return]

    def scan(self, scan: Scan, operands: list[Masked]) -> list[Masked]:
        _, consts, start, xs = LoopOperands.of(scan, self._masked(operands))
        count = len(start)

        def one(state: Any, rows: Any) -> Any:
            carry, masks, counts = state
            inner = self.inner()
            slices = [Masked(row, x.mask) for row, x in zip(rows, xs, strict=True)]
            outs = inner.results(scan.body, [*consts, *carry, *slices])
            masks = either(masks, [y.mask for y in outs[count:]])
            return (outs[:count], masks, counts + inner.counts()), [y.data for y in outs[count:]]

        following = self._indices is not None
        none = [
            self._everywhere(no_origins()) if following and is_inexact(y.aval.dtype) else None
            for y in scan.ys
        ]
        rows = [x.data for x in xs]
        (carry, masks, counts), ys = jax.lax.scan(
            one, (start, none, self._zeros()), rows, scan.length, scan.reverse, scan.unroll
        )
        self._whole.append(counts)
        return [*carry, *map(Masked, ys, masks)]

    def while_loop(self, loop: While, operands: list[Masked]) -> list[Masked]:
        given = LoopOperands.of(loop, self._masked(operands))
        inner = self.inner()
        start = started(loop, given, 0, given.carry, inner.results), inner.counts()

        def one(state: Any) -> Any:
            inner = self.inner()
            after = advanced(loop, given, state[0], inner.results)
            return after, state[1] + inner.counts()

        end, counts = jax.lax.while_loop(lambda state: state[0].more, one, start)
        self._whole.append(counts)
        return list(end.carry)


def row_at(stack: Masked, i: Any) -> Masked:
    """Return the row at an index of the first axis, with the origins of the whole array."""
    return Masked(iterations.row_at(stack.data, i), stack.mask)


def put_at(stack: Masked, row: Masked, i: Any) -> Masked:
    """Return a stack with the row at an index replaced."""
    (mask,) = either([stack.mask], [row.mask])
    return Masked(iterations.put_at(stack.data, row.data, i), mask)


def no_origins() -> Mask:
    """Return the mask of a value without origins."""
    return jnp.zeros(FOLLOWED, bool)


def any_of(masks: Sequence[Mask]) -> Mask:
    """Return the mask of all origins of some values."""
    return reduce(or_, (mask for mask in masks if mask is not None), no_origins())


def either(masks: Sequence[Mask], others: Sequence[Mask]) -> list[Mask]:
    """Return the elementwise unions of two lists of masks."""
    return [None if a is None else a | b for a, b in zip(masks, others, strict=True)]
