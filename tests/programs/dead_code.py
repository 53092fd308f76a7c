"""Cases with added dead code, for dead-code elimination."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.case import Case
from tests.programs.rules import with_jvp_rule, with_vjp_rule

Function = Callable[..., Any]


def with_dead_code(case: Case, kind: str) -> Case:
    """Return the case wrapped in a `kind` of `DEAD_CODE`, with a dead result.

    Its results are unchanged. Custom rules change its gradients (see `rules.py`).
    """
    function = DEAD_CODE[kind](case.fun)
    return Case(f"{case.name} in {kind}", function, case.args, case.kwargs, case.x64)


def _twice(f: Function) -> Function:
    """Return `f` with an additional result, which is dead if the caller drops it."""

    def twice(*args: Any) -> Any:
        return f(*args), jax.tree.map(_other, f(*args))

    return twice


def _other(x: Any) -> Any:
    is_key = jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key)
    return x if is_key else jnp.where(x == x, x, x)


def _in_jit(f: Function) -> Function:
    return lambda *args: jax.jit(_twice(f))(*args)[0]


def _in_remat(f: Function) -> Function:
    return lambda *args: jax.checkpoint(_twice(f))(*args)[0]


def _in_cond(f: Function) -> Function:
    def switched(*args: Any) -> Any:
        which = jnp.argmax(jnp.zeros(2))
        branches = [_twice(f), lambda *xs: (f(*xs), f(*xs))]
        return lax.switch(which, branches, *args)[0]

    return switched


def _in_scan(f: Function) -> Function:
    """A scan with a dead result, and a carry that only it and the carry itself depend on."""

    def scanned(*args: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            out, other = _twice(f)(*args)
            return (carry[0] + 1, carry[1] * 2.0 + x), (out, other, carry)

        _, (outs, _, _) = lax.scan(body, (0, 1.0), jnp.arange(2.0))
        return jax.tree.map(lambda x: x[1], outs)

    return scanned


def _in_while(f: Function) -> Function:
    """A loop with a carry that only the carry itself depends on."""

    def looped(*args: Any) -> Any:
        def body(state: Any) -> Any:
            count, _, (dead, steps) = state
            out, other = _twice(f)(*args)
            return count + 1, out, (jax.tree.map(lambda a, b: a, other, dead), steps + 1)

        start = f(*args)
        first = jax.tree.map(_other, start)
        return lax.while_loop(lambda s: s[0] < 2, body, (0, start, (first, 0)))[1]

    return looped


def _in_custom_jvp(f: Function) -> Function:
    return lambda *args: with_jvp_rule(_twice(f))(*args)[0]


def _in_custom_vjp(f: Function) -> Function:
    return lambda *args: with_vjp_rule(_twice(f), saving=False)(*args)[0]


#: The wrappers by name.
DEAD_CODE: dict[str, Callable[[Function], Function]] = {
    "jit": _in_jit,
    "remat": _in_remat,
    "cond": _in_cond,
    "scan": _in_scan,
    "while": _in_while,
    "custom_jvp": _in_custom_jvp,
    "custom_vjp": _in_custom_vjp,
}
