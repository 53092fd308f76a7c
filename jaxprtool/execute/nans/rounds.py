"""Rounds of a loop, compiled: they run until an equation makes a NaN or an infinity.

Each equation of the body, at any depth, has flags, which are the bits of `states`: NAN is set if a
result has a NaN and no operand has one, INF if a result has an infinity and all operands are
finite. A loop stops before the first round in which a flag is set that is not to be ignored, so
that this round can be run again, equation by equation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.execute.nans.states import INF, NAN, may_make, nonfinite
from jaxprtool.ir.equations import equations
from jaxprtool.ir.interpret import Interpreter, bind
from jaxprtool.ir.structured import Cond, Scan, While, view
from jaxprtool.jaxcompat import Aval, ClosedJaxpr, JaxprEqn


def body_equations(loop: Scan | While) -> list[JaxprEqn]:
    """Return the equations that have flags: those of the bodies of a loop, at any depth."""
    bodies = (loop.body,) if isinstance(loop, Scan) else (loop.body, loop.cond)
    found = {id(e): e for body in bodies for e in equations(jaxcompat.open_jaxpr(body))}
    return list(found.values())


def scan_rounds(scan: Scan) -> Callable[..., tuple[Any, ...]]:
    """Return a function that runs rounds of a scan.

    It takes the flags to ignore, the number of the first round, the carry, the stacked results so
    far, the constants and the scanned operands. It returns the number of the round before which it
    stopped, which is the number of all rounds if it is through, the carry and the stacked results
    then, and the flags of that round.
    """
    numbers = {id(eqn): i for i, eqn in enumerate(body_equations(scan))}

    @jax.jit
    def run(ignored: Any, first: Any, carry: Any, ys: Any, consts: Any, xs: Any) -> Any:
        def going_on(state: Any) -> Any:
            return (state[0] < scan.length) & ~state[3].any()

        def one(state: Any) -> Any:
            number, carry, ys, _ = state
            place = scan.length - 1 - number if scan.reverse else number
            rows = [jax.lax.dynamic_index_in_dim(x, place, keepdims=False) for x in xs]
            checked = Checked(numbers)
            outs = checked.results(scan.body, [*consts, *carry, *rows])
            flags = checked.flags() & ~ignored
            new, made = outs[: len(carry)], outs[len(carry) :]
            stacked = [
                jax.lax.dynamic_update_index_in_dim(y, row, place, 0)
                for y, row in zip(ys, made, strict=True)
            ]
            kept = _chosen(flags.any(), carry, new)
            return number + (~flags.any()).astype(number.dtype), kept, stacked, flags

        return jax.lax.while_loop(going_on, one, (first, carry, ys, jnp.zeros_like(ignored)))

    return run


def while_rounds(loop: While) -> Callable[..., tuple[Any, ...]]:
    """Return a function that runs rounds of a while loop.

    It takes the flags to ignore, the number of the first round, the carry, whether there is another
    round, and the constants of the condition and of the body. It returns the number of the round
    before which it stopped, the carry and whether there is another round then, and its flags.
    """
    numbers = {id(eqn): i for i, eqn in enumerate(body_equations(loop))}

    @jax.jit
    def run(ignored: Any, first: Any, carry: Any, more: Any, deciding: Any, consts: Any) -> Any:
        def going_on(state: Any) -> Any:
            return state[2] & ~state[3].any()

        def one(state: Any) -> Any:
            number, carry, more, _ = state
            checked = Checked(numbers)
            new = checked.results(loop.body, [*consts, *carry])
            (again,) = checked.results(loop.cond, [*deciding, *new])
            flags = checked.flags() & ~ignored
            found = flags.any()
            kept, more = _chosen(found, carry, new), jnp.where(found, more, again)
            return number + (~found).astype(number.dtype), kept, more, flags

        return jax.lax.while_loop(going_on, one, (first, carry, more, jnp.zeros_like(ignored)))

    return run


def _chosen(found: Any, old: Sequence[Any], new: Sequence[Any]) -> list[Any]:
    return [jnp.where(found, a, b) for a, b in zip(old, new, strict=True)]


class Traced:
    """A traced value; what it holds is asked for only where it matters."""

    def __init__(self, data: Any):
        self.data = data

    @cached_property
    def state(self) -> tuple[Any, Any]:
        """Whether it has a NaN, and whether it has an infinity."""
        return nonfinite(self.data)


class _Written(Traced):
    """A literal or a constant: a NaN in it does not excuse the equation that reads it."""

    @cached_property
    def state(self) -> tuple[Any, Any]:
        return False, nonfinite(self.data)[1]


class Checked(Interpreter):
    """Evaluates a jaxpr while JAX traces, with flags for each equation.

    Args:
        numbers: The number of each equation's flags, by its `id`.
        axes: The axes of the mesh that flags vary over, in a `shard_map`.
    """

    def __init__(self, numbers: Mapping[int, int], axes: tuple[Any, ...] = ()):
        self._numbers, self._axes = numbers, axes
        self._single: dict[int, Any] = {}
        self._whole: list[Any] = []

    def results(self, body: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
        """Return the results of a body, as arrays."""
        return [value.data for value in self.run(body, list(map(Traced, arguments)))]

    def flags(self) -> Any:
        """Return the flags of what has been evaluated."""
        found = self._none()
        if self._single:
            places = jnp.array(list(self._single))
            found = found.at[places].set(jnp.stack(list(self._single.values())))
        for flags in self._whole:
            found |= flags
        return found

    def _none(self) -> Any:
        """Return flags of which none is set."""
        flags = jnp.zeros(len(self._numbers), jnp.uint8)
        return jax.lax.pcast(flags, self._axes, to="varying") if self._axes else flags

    def constant(self, value: object, aval: Aval) -> Traced:
        return _Written(value)

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Traced]:
        results = self.bound(eqn, operands)
        if may_make(eqn):
            made = self._made(operands, results)
            number = self._numbers[id(eqn)]
            self._single[number] = self._single.get(number, jnp.uint8(0)) | made
        return results

    def bound(self, eqn: JaxprEqn, operands: Sequence[Traced]) -> list[Traced]:
        """Return the results of an equation."""
        return list(map(Traced, bind(eqn, [x.data for x in operands])))

    @staticmethod
    def _made(operands: Sequence[Traced], results: Sequence[Traced]) -> Any:
        given_nan = given_inf = nan = inf = jnp.array(False)
        for x in results:
            nan, inf = nan | x.state[0], inf | x.state[1]
        for x in operands:
            given_nan, given_inf = given_nan | x.state[0], given_inf | x.state[1]
        made_nan, made_inf = nan & ~given_nan, inf & ~(given_nan | given_inf)
        return made_nan.astype(jnp.uint8) * NAN | made_inf.astype(jnp.uint8) * INF

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Traced]:
        held = view(eqn)
        data = [x.data for x in operands]
        match held:
            case Scan() if isinstance(held.length, int):
                return self._scanned(held, data)
            case While() if held.cond.outvars[0].aval.shape == ():
                return self._looped(held, data)
            case Cond():
                branches = [self._branch(branch) for branch in held.branches]
                return self._noted(jax.lax.switch(data[0], branches, data[1:]))
        return super().equation(eqn, operands)

    def _inside(self, body: ClosedJaxpr, arguments: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return the results of a body, and its flags."""
        inner = Checked(self._numbers, self._axes)
        return inner.results(body, arguments), inner.flags()

    def _noted(self, found: tuple[Sequence[Any], Any]) -> list[Traced]:
        results, flags = found
        self._whole.append(flags)
        return list(map(Traced, results))

    def _branch(self, body: ClosedJaxpr) -> Callable[[Any], Any]:
        return lambda operands: self._inside(body, operands)

    def _scanned(self, scan: Scan, data: list[Any]) -> list[Traced]:
        n, k = len(scan.consts), len(scan.carry)

        def one(state: Any, rows: Any) -> Any:
            carry, flags = state
            outs, new = self._inside(scan.body, [*data[:n], *carry, *rows])
            return (outs[:k], flags | new), outs[k:]

        start = data[n : n + k], self._none()
        (carry, flags), ys = jax.lax.scan(
            one, start, data[n + k :], scan.length, scan.reverse, scan.unroll
        )
        return self._noted(([*carry, *ys], flags))

    def _looped(self, loop: While, data: list[Any]) -> list[Traced]:
        c, b = len(loop.cond_consts), len(loop.body_consts)
        deciding, consts, carry = data[:c], data[c : c + b], data[c + b :]

        def one(state: Any) -> Any:
            carry, _, flags = state
            new, made = self._inside(loop.body, [*consts, *carry])
            (more,), asked = self._inside(loop.cond, [*deciding, *new])
            return new, more, flags | made | asked

        (more,), flags = self._inside(loop.cond, [*deciding, *carry])
        new, _, flags = jax.lax.while_loop(lambda state: state[1], one, (carry, more, flags))
        return self._noted((new, flags))
