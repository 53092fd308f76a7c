"""Screening: the program is compiled as a whole, with a flag for any NaN or infinity produced.

Most programs produce neither, and need no further search. The flag may have false positives but no
false negatives, apart from differences in XLA's computation.

Few values are checked. A value is not checked if a non-finite element would make a value computed
from it non-finite as well (`add`, `dot_general`), which is checked instead, up to operations that
may hide it: a comparison, a `where` or a division. Infinities in constants and arguments are
followed through operations that usually forward them, such as a mask; other values computed from
them must be finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, reduce
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp

from jaxprtool.execute.nans.states import (
    FINITE,
    INF,
    NAN,
    has_state,
    may_make,
    moves_constants,
    state_of,
)
from jaxprtool.execute.stepping.effects import has_external_effect
from jaxprtool.ir.core.equations import Contains
from jaxprtool.ir.core.structured import Call, Cond, CustomJVP, Scan, ShardMap, While, view
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.evaluation.interpret import Interpreter, bind
from jaxprtool.jaxcompat import AbstractRef, Aval, ClosedJaxpr, JaxprEqn

#: The maximum number of elements of values that are concatenated for the check; larger ones would
#: be kept alive.
_SMALL = 1024

#: The maximum number of values with a possible infinity in one body. Each needs its own kernels,
#: into which XLA duplicates the computation of the value.
_INFINITE = 250


class _TooMany(Exception):
    """Too many values may have an infinity."""


class _Screened:
    """A traced value.

    Attributes:
        data: The value.
        state: The non-finite elements it may have while no flag is set.
        held: Whether it is a constant, possibly moved.
    """

    def __init__(self, data: Any, state: int = FINITE, held: bool = False):
        self.data, self.state, self.held = data, state, held

    @cached_property
    def has_inf(self) -> Any:
        """Whether it has an infinity."""
        return jnp.isinf(self.data).any() if self.state & INF else False


def screened(closed: ClosedJaxpr, arguments: Sequence[Any]) -> tuple[bool, set[int]] | None:
    """Return whether a program may produce a NaN or infinity, and the `id`s of loops that do not.

    Only outermost loops are included. Returns None if unknown: an argument has a NaN, the program
    has effects or a `shard_map`, or an infinity is forwarded to many values.
    """
    states = list(map(state_of, arguments))
    if any(state & NAN for state in states) or _refused(closed):
        return None
    loops: list[JaxprEqn] = []

    def flags(*data: Any) -> Any:
        whole, of_loops = flags_of(closed, data, states)
        loops[:] = [eqn for eqn, _ in of_loops]
        return whole, [flag for _, flag in of_loops]

    try:
        whole, of_loops = jax.jit(flags)(*arguments)
    except _TooMany:
        return None
    pairs = list(zip(map(id, loops), map(bool, of_loops), strict=True))
    return bool(whole), {loop for loop, _ in pairs} - {loop for loop, flag in pairs if flag}


def flags_of(
    closed: ClosedJaxpr, data: Sequence[Any], states: Sequence[int]
) -> tuple[Any, list[tuple[JaxprEqn, Any]]]:
    """Return the flag of a program for traced arguments, and those of its loops.

    Args:
        closed: The program's jaxpr.
        data: The arguments.
        states: The state of each: its possible non-finite elements.
    """
    run = _Screener()
    for value in run.run(closed, list(map(_Screened, data, states))):
        run.require(value, INF)
    return run.flag(), run.loops


@Contains
def _refused(eqn: JaxprEqn) -> bool:
    held = view(eqn)
    if isinstance(held, While | Cond | Call | CustomJVP):
        return False
    if isinstance(held, Scan):
        return not isinstance(held.length, int)
    refs = any(isinstance(v.aval, AbstractRef) for v in (*eqn.invars, *eqn.outvars))
    return refs or isinstance(held, ShardMap) or bool(eqn.effects and eqn.outvars)


class _Screener(Interpreter):
    """Evaluates a jaxpr under tracing, and collects the values that must be finite."""

    def __init__(self) -> None:
        #: The outermost loops, each with its flag.
        self.loops: list[tuple[JaxprEqn, Any]] = []
        self._flags: list[Any] = []
        #: Values to check unless their readers are checked, by `id`, and values to check in any
        #: case.
        self._unchecked: dict[int, Any] = {}
        self._checked: list[Any] = []

    def flag(self) -> Any:
        """Return the traced flag for any NaN or infinity produced."""
        by_dtype: dict[Any, list[Any]] = {}
        whole: list[Any] = []
        for x in map(jnp.asarray, (*self._unchecked.values(), *self._checked)):
            if x.size > _SMALL:
                whole.append(x)
            else:
                by_dtype.setdefault(x.dtype, []).append(jnp.ravel(x))
        # One concatenated array needs one kernel, which compiles faster than many.
        whole += map(jnp.concatenate, by_dtype.values())
        flags = [*(~jnp.isfinite(x).all() for x in whole), *self._flags]
        return reduce(or_, flags, jnp.array(False))

    def require(self, value: _Screened, allowed: int) -> None:
        """Set the flag if a value has a state that is not allowed."""
        forbidden = value.state & ~allowed
        if forbidden & INF:
            self._checked.append(value.data)
        elif forbidden:
            self._flags.append(jnp.isnan(value.data).any())

    def constant(self, value: object, aval: Aval) -> _Screened:
        return _Screened(value, state_of(value), held=True)

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[_Screened]:
        if has_external_effect(eqn) and not eqn.outvars:
            return []
        results = bind(eqn, [x.data for x in operands])
        state = reduce(or_, (x.state for x in operands), FINITE)
        if state and moves_constants(eqn) and all(x.held for x in operands):
            return [_Screened(x, state if has_state(x) else FINITE, held=True) for x in results]
        return [self._result(eqn, operands, state, x) for x in results]

    def _result(self, eqn: JaxprEqn, operands: list[_Screened], state: int, data: Any) -> _Screened:
        if not has_state(data) or not jnp.size(data):
            return _Screened(data)
        like = traits(eqn)
        makes = may_make(eqn) or bool(state & NAN)
        passes_through = like.keeps_finite or like.broadcasts or like.gives or like.updates
        if state & INF and passes_through:
            result = _Screened(data, INF)
            if makes:
                if len(self._flags) > 2 * _INFINITE:
                    raise _TooMany
                given = reduce(or_, (x.has_inf for x in operands), jnp.array(False))
                self._flags += [jnp.isnan(data).any(), result.has_inf & ~given]
            return result
        if like.keeps_nonfinite:
            left = [self._unchecked.pop(id(x.data), None) is not None for x in operands]
            makes |= any(left)
        if makes or state & INF:
            if like.costly:
                # XLA may combine the product of two of these into one, whose result may be finite.
                self._checked.append(data)
            else:
                self._unchecked[id(data)] = data
        return _Screened(data)

    # --- loops and branches -----------------------------------------------------------------------

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[_Screened]:
        match held := view(eqn):
            case Scan() | While():
                for value in operands:
                    self.require(value, INF)
                loop = self._scanned if isinstance(held, Scan) else self._looped
                results, flag = loop(held, operands)  # type: ignore[arg-type]
                self.loops.append((eqn, flag))
                self._flags.append(flag)
                return results
            case Cond():
                return self._branched(held, operands)
        return super().equation(eqn, operands)

    def _inside(
        self, body: ClosedJaxpr, data: Sequence[Any], states: Sequence[int]
    ) -> tuple[list[_Screened], _Screener]:
        run = _Screener()
        return run.run(body, list(map(_Screened, data, states))), run

    def _scanned(self, scan: Scan, operands: list[_Screened]) -> tuple[list[_Screened], Any]:
        n, k = len(scan.consts), len(scan.carry)
        data, states = _data(operands), [x.state & INF for x in operands]
        stacked: list[int] = []

        def one(state: Any, rows: Any) -> Any:
            outs, run = self._inside(scan.body, [*data[:n], *state[0], *rows], states)
            for value, allowed in zip(outs, states[n : n + k], strict=False):
                run.require(value, allowed)
            stacked[:] = [value.state for value in outs[k:]]
            new = _data(outs)
            return (new[:k], state[1] | run.flag()), new[k:]

        start = data[n : n + k], jnp.array(False)
        (carry, flag), ys = jax.lax.scan(
            one, start, data[n + k :], scan.length, scan.reverse, scan.unroll
        )
        held = [jnp.isnan(y).any() for y, state in zip(ys, stacked, strict=True) if state & NAN]
        states = [*states[n : n + k], *(state & INF for state in stacked)]
        return list(map(_Screened, (*carry, *ys), states)), reduce(or_, held, flag)

    def _looped(self, loop: While, operands: list[_Screened]) -> tuple[list[_Screened], Any]:
        c, b = len(loop.cond_consts), len(loop.cond_consts) + len(loop.body_consts)
        data, states = _data(operands), [x.state & INF for x in operands]

        def asked(carry: Sequence[Any]) -> tuple[Any, Any]:
            outs, run = self._inside(loop.cond, [*data[:c], *carry], [*states[:c], *states[b:]])
            return outs[0].data, run.flag()

        def one(state: Any) -> Any:
            outs, run = self._inside(loop.body, [*data[c:b], *state[0]], states[c:])
            for value, allowed in zip(outs, states[b:], strict=True):
                run.require(value, allowed)
            more, flag = asked(_data(outs))
            return _data(outs), more, state[2] | run.flag() | flag

        carry, _, flag = jax.lax.while_loop(
            lambda state: state[1], one, (data[b:], *asked(data[b:]))
        )
        return list(map(_Screened, carry, states[b:])), flag

    def _branched(self, cond: Cond, operands: list[_Screened]) -> list[_Screened]:
        states = [FINITE] * len(cond.eqn.outvars)

        def branch(body: ClosedJaxpr) -> Callable[..., Any]:
            def taken(*data: Any) -> Any:
                outs, run = self._inside(body, data, [x.state for x in operands[1:]])
                states[:] = map(or_, states, (value.state for value in outs))
                return _data(outs), run.flag()

            return taken

        branches = list(map(branch, cond.branches))
        outs, flag = jax.lax.switch(operands[0].data, branches, *_data(operands[1:]))
        self._flags.append(flag)
        return list(map(_Screened, outs, states))


def _data(values: Sequence[_Screened]) -> list[Any]:
    return [value.data for value in values]
