"""What the equations of a compiled body make, and where it goes.

Each equation of the body, at any depth, has two counts: how often it has made a NaN, and how often
an infinity. Origins that are known before the body runs are followed: each value has a mask of
those that its elements which are not finite may come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, reduce
from operator import or_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.execute.nans.states import has_state, is_inexact, may_make, nonfinite
from jaxprtool.ir.interpret import Interpreter, bind
from jaxprtool.ir.structured import Cond, Scan, While, view
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import Aval, ClosedJaxpr, JaxprEqn

#: So many origins are followed, each by an element of a mask; what more there are share the last.
FOLLOWED = 32

#: The mask of a value, as booleans. None is that of no origin, and of what has no numbers.
Mask = Any


class Traced:
    """A traced value, and the mask of its origins.

    What it holds is asked for only where it matters.
    """

    def __init__(self, data: Any, mask: Mask = None):
        self.data, self.mask = data, mask

    @cached_property
    def state(self) -> tuple[Any, Any]:
        """Whether it has a NaN, and whether it has an infinity."""
        return nonfinite(self.data)


class _Written(Traced):
    """A literal or a constant: a NaN in it does not excuse the equation that reads it."""

    @cached_property
    def state(self) -> tuple[Any, Any]:
        return False, nonfinite(self.data)[1]


class Results(NamedTuple):
    """What a body gives.

    Attributes:
        data: Its results.
        masks: Their masks.
        counts: How often each equation made a NaN and an infinity.
    """

    data: list[Any]
    masks: list[Mask]
    counts: Any


class Compiled(Interpreter):
    """Evaluates a jaxpr while JAX traces.

    Args:
        numbers: The number of each equation, by its `id`.
        places: For each equation the places in masks of the NaN and of the infinity that it is
            known to make, or -1. If it is None, origins are not followed.
        axes: The axes of the mesh, in a `shard_map`.
        varying: Whether JAX checks which values vary over them.
    """

    def __init__(
        self,
        numbers: Mapping[int, int],
        places: Any = None,
        axes: tuple[Any, ...] = (),
        varying: bool = False,
    ):
        self._numbers, self._places, self._axes = numbers, places, axes
        self._varying = varying
        self._single: dict[int, Any] = {}
        self._whole: list[Any] = []

    def results(
        self, body: ClosedJaxpr, arguments: Sequence[Any], masks: Sequence[Mask] | None = None
    ) -> Results:
        """Return what a body gives for some arguments."""
        given = map(Traced, arguments, masks or [None] * len(arguments))
        values = self.run(body, list(given))
        return Results([x.data for x in values], list(map(self._mask, values)), self._counts())

    def _mask(self, value: Traced) -> Mask:
        if self._places is None or not has_state(value.data):
            return None
        return self._everywhere(no_origins() if value.mask is None else value.mask)

    def _counts(self) -> Any:
        counts = self._zeros()
        if self._single:
            numbers = jnp.array(list(self._single))
            made = [self._everywhere(each) for each in self._single.values()]
            counts = counts.at[numbers].set(jnp.stack(made))
        return sum(self._whole, counts)

    def _zeros(self) -> Any:
        """Return counts of nothing."""
        return self._everywhere(jnp.zeros((len(self._numbers), 2), jnp.int32))

    def _everywhere(self, array: Any) -> Any:
        """Return an array whose type says that it varies over all axes of the mesh."""
        if not self._varying:
            return array
        missing = tuple(a for a in self._axes if a not in jaxcompat.varying_axes(jax.typeof(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    def constant(self, value: object, aval: Aval) -> Traced:
        return _Written(value)

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Traced]:
        results = self.bound(eqn, operands)
        made = self._made(eqn, operands, results) if may_make(eqn) else None
        if made is not None:
            number = self._numbers[id(eqn)]
            self._single[number] = self._single.get(number, 0) + made.astype(jnp.int32)
        if self._places is not None:
            origins = self._origins(eqn, operands, made)
            for x in results:
                if has_state(x.data):
                    x.mask = origins & (x.state[0] | x.state[1])
        return results

    def bound(self, eqn: JaxprEqn, operands: Sequence[Traced]) -> list[Traced]:
        """Return the results of an equation."""
        return list(map(Traced, bind(eqn, [x.data for x in operands])))

    def _made(self, eqn: JaxprEqn, operands: Sequence[Traced], results: Sequence[Traced]) -> Any:
        """Return whether an equation makes a NaN, and if not, whether it makes an infinity."""
        nan, inf = self._states(results)
        given_nan, given_inf = self._states(operands)
        if traits(eqn).collective:
            given_nan, given_inf = map(self._anywhere, (given_nan, given_inf))
        made_nan = nan & ~given_nan
        return jnp.stack([made_nan, inf & ~(given_nan | given_inf | made_nan)])

    @staticmethod
    def _states(values: Sequence[Traced]) -> tuple[Any, Any]:
        nan = inf = jnp.array(False)
        for x in values:
            nan, inf = nan | x.state[0], inf | x.state[1]
        return nan, inf

    def _origins(self, eqn: JaxprEqn, operands: Sequence[Traced], made: Any) -> Mask:
        """Return the mask of what comes of some operands, and of what an equation made."""
        mask = any_of([x.mask for x in operands])
        if traits(eqn).collective:
            mask = self._anywhere(mask)
        if made is not None:
            places = self._places[self._numbers[id(eqn)]][:, None]
            mask |= ((jnp.arange(FOLLOWED) == places) & made[:, None]).any(0)
        return mask

    def _anywhere(self, flags: Any) -> Any:
        """Return flags that are set if they are set on any device."""
        everywhere = self._everywhere(jnp.asarray(flags).astype(jnp.int32))
        return jax.lax.pmax(everywhere, self._axes) > 0 if self._axes else flags

    # --- branches and loops -----------------------------------------------------------------------

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Traced]:
        held = view(eqn)
        match held:
            case Scan() if isinstance(held.length, int):
                return self._scanned(held, operands)
            case While():
                return self._looped(held, operands)
            case Cond():
                branches = [self._branch(branch) for branch in held.branches]
                data, masks = _data(operands[1:]), list(map(self._mask, operands[1:]))
                return self._noted(jax.lax.switch(operands[0].data, branches, data, masks))
        return super().equation(eqn, operands)

    def inside(self, body: ClosedJaxpr, arguments: Sequence[Any], masks: Sequence[Mask]) -> Results:
        """Return what a body of an equation gives."""
        inner = Compiled(self._numbers, self._places, self._axes, self._varying)
        return inner.results(body, arguments, masks)

    def _noted(self, found: tuple[Sequence[Any], Sequence[Mask], Any]) -> list[Traced]:
        data, masks, counts = found
        self._whole.append(counts)
        return list(map(Traced, data, masks))

    def _branch(self, body: ClosedJaxpr) -> Callable[[Any, Any], Results]:
        return lambda data, masks: self.inside(body, data, masks)

    def _scanned(self, scan: Scan, operands: list[Traced]) -> list[Traced]:
        n, k = len(scan.consts), len(scan.carry)
        data, masks = _data(operands), list(map(self._mask, operands))

        def one(state: Any, rows: Any) -> Any:
            carry, carry_masks, row_masks, counts = state
            outs = self.inside(
                scan.body, [*data[:n], *carry, *rows], [*masks[:n], *carry_masks, *masks[n + k :]]
            )
            state = outs.data[:k], outs.masks[:k], either(row_masks, outs.masks[k:])
            return (*state, counts + outs.counts), outs.data[k:]

        following = self._places is not None
        none = [
            self._everywhere(no_origins()) if following and is_inexact(y.aval.dtype) else None
            for y in scan.ys
        ]
        start = data[n : n + k], masks[n : n + k], none, self._zeros()
        (carry, carry_masks, row_masks, counts), ys = jax.lax.scan(
            one, start, data[n + k :], scan.length, scan.reverse, scan.unroll
        )
        return self._noted(([*carry, *ys], [*carry_masks, *row_masks], counts))

    def _looped(self, loop: While, operands: list[Traced]) -> list[Traced]:
        c, b = len(loop.cond_consts), len(loop.cond_consts) + len(loop.body_consts)
        data, masks = _data(operands), list(map(self._mask, operands))

        def asked(carry: Any, carry_masks: Any) -> tuple[Any, Any]:
            outs = self.inside(loop.cond, [*data[:c], *carry], [*masks[:c], *carry_masks])
            return outs.data[0], outs.counts

        def one(state: Any) -> Any:
            carry, carry_masks, _, counts = state
            new = self.inside(loop.body, [*data[c:b], *carry], [*masks[c:b], *carry_masks])
            more, deciding = asked(new.data, new.masks)
            return new.data, new.masks, more, counts + new.counts + deciding

        start = data[b:], masks[b:], *asked(data[b:], masks[b:])
        carry, carry_masks, _, counts = jax.lax.while_loop(lambda state: state[2], one, start)
        return self._noted((carry, carry_masks, counts))


def _data(values: Sequence[Traced]) -> list[Any]:
    return [value.data for value in values]


def no_origins() -> Mask:
    """Return the mask of a value without origins."""
    return jnp.zeros(FOLLOWED, bool)


def any_of(masks: Sequence[Mask]) -> Mask:
    """Return the mask of all origins that some values have."""
    return reduce(or_, (mask for mask in masks if mask is not None), no_origins())


def either(masks: Sequence[Mask], others: Sequence[Mask]) -> list[Mask]:
    """Return the masks of values that come from these origins, or from those of others."""
    return [None if a is None else a | b for a, b in zip(masks, others, strict=True)]
