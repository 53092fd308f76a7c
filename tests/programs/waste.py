"""Wasteful code for rewriting passes to improve: operations, and wrappers of functions.

`WASTEFUL` has operations for random programs. Each applies something that a pass removes: neutral
elements, chains of reshapes, duplicates, constants, loop-invariant code, pass-through operands of
calls. `WASTE` wraps a whole function in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.programs.case import Case
from tests.programs.ops import Operation
from tests.programs.rules import with_jvp_rule, with_vjp_rule

Function = Callable[..., Any]

# --- operations -------------------------------------------------------------------------------


def _full(x: Any, value: Any) -> Any:
    return lax.full(x.shape, value, x.dtype)


def _scalar(x: Any, value: Any) -> Any:
    return jnp.asarray(value, x.dtype)


def _neutral(x: Any) -> Any:
    """Operations with neutral elements, or that change only a zero's sign. Scalars are literals."""
    x = lax.mul(x, _full(x, 1)) + _scalar(x, 0)
    return lax.sub(x * _scalar(x, 1), _full(x, 0))


def _neutral_floats(x: Any) -> Any:
    zero = lax.neg(_full(x, 0))
    x = lax.div(lax.add(x, zero), _full(x, 1)) - _scalar(x, -0.0)
    return lax.max(x, _full(x, -np.inf)) + lax.min(x, _full(x, np.inf)) * _scalar(x, 0)


def _absorbing(x: Any) -> Any:
    return x * _scalar(x, 0) + lax.sub(x, x) + lax.mul(_full(x, 0), x)


def _involutions(x: Any) -> Any:
    return lax.neg(lax.neg(x)) - lax.neg(x)


def _nots(x: Any) -> Any:
    return lax.bitwise_not(lax.bitwise_not(x)) | x & x ^ lax.bitwise_xor(x, x)


def _bits(x: Any) -> Any:
    zero = _full(x, 0)
    return (x | zero) & lax.bitwise_not(zero) ^ zero


def _transposes(x: Any) -> Any:
    x = x[None]
    axes = tuple(range(x.ndim))[::-1]
    return x.transpose(axes).transpose(axes).transpose(tuple(range(x.ndim)))[0]


def _reshapes(x: Any) -> Any:
    return lax.reshape(lax.reshape(x, (x.size,)), (1, *x.shape, 1)).reshape(x.shape)


def _broadcasts(x: Any) -> Any:
    x = lax.broadcast_in_dim(x, (1, *x.shape), range(1, x.ndim + 1))
    x = lax.broadcast_in_dim(x, (2, *x.shape), range(1, x.ndim + 1))
    return lax.broadcast_in_dim(x, x.shape, range(x.ndim))


def _converts(x: Any) -> Any:
    """Conversions to a wider type and back, to a narrower and back, and to the same."""
    wide = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32
    narrow = jnp.bfloat16 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int8
    convert = lax.convert_element_type
    x = convert(convert(x, wide), x.dtype)
    return convert(convert(x, narrow), x.dtype), convert(convert(x, x.dtype), wide)


def _slices_of_concatenate(x: Any, y: Any) -> Any:
    both = lax.concatenate([x, y, x], 0)
    n = len(x)
    parts = both[:n], both[n : n + len(y)], both[len(both) - n :]
    return *parts, both[1 : n + 1], both[0 : len(both)]


def _concatenates(x: Any, y: Any) -> Any:
    return lax.concatenate([lax.concatenate([x], 0), x[:0], lax.concatenate([y, x], 0)], 0)


def _pads(x: Any) -> Any:
    zero = _scalar(x, 0)
    none = [(0, 0, 0)] * (x.ndim - 1)
    nothing = lax.pad(x, zero, [(0, 0, 0), *none])
    padded = lax.pad(x, zero, [(1, 2, 0), *none])
    return nothing, padded[1 : 1 + len(x)], lax.pad(padded, zero, [(-1, -2, 0), *none])


def _selects(x: Any, y: Any) -> Any:
    yes, no = jnp.ones(x.shape, bool), jnp.zeros(x.shape, bool)
    which = x > y
    return (
        lax.select(yes, x, y),
        lax.select(no, x, y),
        lax.select(which, x, x),
        lax.select(lax.bitwise_not(which), x, y),
        lax.select(np.True_, x, y),
    )


def _powers(x: Any) -> Any:
    return sum(lax.integer_pow(x, k) for k in (0, 1, 2, 3)), lax.integer_pow(x, 4)


def _float_powers(x: Any) -> Any:
    return lax.integer_pow(x, -1), lax.pow(x, 2), lax.pow(x, _full(x, 0.5)), lax.sqrt(x * x)


def _compares(x: Any, y: Any) -> Any:
    return x == x, x != x, lax.lt(x, x), lax.ge(x, x), ~(x < y), ~(x >= y) | (x < y)


def _reverses(x: Any) -> Any:
    return lax.rev(lax.rev(x, (0,)), (0,)), lax.rev(x, ()), lax.rev(x[:1], (0,))


def _reductions(x: Any) -> Any:
    """Reductions over no axis, and over axes of length one."""
    thin = x[:, None]
    return thin.sum(1), thin.max(1), lax.reduce_sum_p.bind(x, axes=(), out_sharding=None)


def _dots(x: Any, y: Any) -> Any:
    x, y = (z.reshape(len(z), math.prod(z.shape[1:])) for z in (x, y))
    return jnp.dot(x.T.T, y.T), jnp.dot(y, x.T).T


def _squeezes(x: Any) -> Any:
    return lax.squeeze(lax.expand_dims(x, (0, x.ndim + 1)), (0, x.ndim + 1))


def _dynamic(x: Any) -> Any:
    """Slices at constant positions, and of the whole array."""
    zeros = [jnp.int32(0)] * x.ndim
    whole = lax.dynamic_slice(x, zeros, x.shape)
    one = lax.dynamic_slice_in_dim(x, 1, min(1, len(x)))
    return whole, lax.dynamic_update_slice(x, whole, zeros), one


def _twice(x: Any, y: Any) -> Any:
    """Duplicates: with swapped operands, and inside a call."""
    first, second = lax.add(x, y), lax.add(y, x)
    square = jax.jit(lambda z: z * z)
    products = lax.mul(x, y) + lax.mul(y, x)
    return first - second, square(x) * square(x), products, lax.sub(x, y) + lax.sub(y, x)


def _draws(k: Any) -> Any:
    k = jax.random.fold_in(k.reshape(-1)[0] if k.size else jax.random.key(3), 1)
    other = jax.random.fold_in(k, 2)
    return jax.random.normal(k, (3,)), jax.random.normal(k, (3,)) - jax.random.normal(other, (3,))


def _constants(x: Any) -> Any:
    """An expression of constants only, and a large constant computed from a small one."""
    steps = lax.iota(jnp.int32, 3) * 2 + jnp.array([1, 2, 3])
    large = jnp.zeros((300, 300)).at[1].set(1.0)
    return x + _first(steps).astype(x.dtype), large[:2, :2], jnp.linspace(0.0, 1.0, 3)


def _first(x: Any) -> Any:
    return x.reshape(-1)[0]


def _known_branches(x: Any, y: Any) -> Any:
    """Branches whose index is constant or can be folded, or that are all equal."""
    index = lax.full((), 1, jnp.int32)
    return (
        lax.switch(index, [lax.add, lax.sub, lax.mul], x, y),
        lax.switch(index * 2 + 5, [lax.add, lax.sub, lax.mul], x, y),
        *lax.cond(_first(jnp.ones(1)) > 0, lambda a, b: (a, b), lambda a, b: (b, a), x, y),
        lax.cond(jnp.sum(x == x) > 1, lax.add, lax.add, x, y),
    )


def _known_loops(x: Any, y: Any) -> Any:
    """Loops of zero or one iterations, and a while loop that never starts."""
    step = lambda c, z: (c + y, c * 2)  # noqa: E731
    none = lax.scan(step, x, None, length=0)
    one = lax.scan(step, x, x[None], reverse=True)
    return *none, *one, lax.while_loop(lambda c: c[0] > 1, lambda c: (c[0], c[1] + y), (1, x))[1]


def _invariant(x: Any, y: Any) -> Any:
    """A loop with carries that are constant or swapped, and loop-invariant code."""

    def body(carry: Any, row: Any) -> Any:
        a, b, c, d, i = carry
        same = lax.mul(a, lax.add(y, y))
        return (a, lax.add(b, same), d, c, i + 1), (same, a, row, lax.full((), 2.0))

    carry, ys = lax.scan(body, (x, x, y, y, 0), jnp.arange(3.0))
    return *carry, *ys


def _invariant_while(x: Any, y: Any) -> Any:
    def body(carry: Any) -> Any:
        i, a, b = carry
        return i + 1, a, lax.add(b, lax.mul(a, y))

    return lax.while_loop(lambda c: c[0] < 2 + 0 * c[0], body, (0, x, y))


def _handed_on(x: Any, y: Any) -> Any:
    """Calls with duplicate operands that return their operands or a constant."""
    jitted = jax.jit(lambda a, b, c: (b, a, lax.add(a, c), 1.0, a), inline=False)
    b, a, c, one, _ = jitted(x, x, y)
    remat = jax.checkpoint(lambda a, b: (a, lax.mul(a, b), a))
    same = lax.cond(jnp.sum(x == y) > 2, *[lambda a, b: (a, b)] * 2, x, x)
    return b, a, c, one, *remat(c, c), same[1]


def _donated(x: Any) -> Any:
    return jax.jit(lambda a: a + a, donate_argnums=0)(x + x)


def _barrier(x: Any, y: Any) -> Any:
    a, b = lax.optimization_barrier((lax.mul(x, y), lax.mul(x, y)))
    return a - b, lax.mul(x, y)


def _rematerialized(x: Any) -> Any:
    inner = jax.checkpoint(lambda a: lax.sin(lax.sin(a)) * a)
    return jax.grad(lambda a: (jax.checkpoint(lambda b: inner(b) * inner(b))(a) * 1.0).sum())(x)


def _activations(x: Any) -> Any:
    """Functions with derivative rules of their own, and their derivatives."""
    values = jax.nn.relu(x) + jax.nn.silu(x) + jax.nn.relu(x)
    return values, jax.grad(lambda a: (jax.nn.relu(a) * jax.nn.relu(a)).sum())(x)


def _loop_gradient(x: Any) -> Any:
    def loss(a: Any) -> Any:
        c, ys = lax.scan(lambda c, _: (lax.sin(c) * a, c), a, None, length=2)
        return jnp.sum(c) + jnp.sum(ys)

    return jax.grad(loss)(x)


def _copies(x: Any) -> Any:
    return jnp.copy(x) + lax.stop_gradient(x), lax.clamp(x, x, x)


def _with_axis(function: Function) -> Function:
    return lambda *xs: function(*(x if x.ndim else x[None] for x in xs))


_ALL, _NUMBERS = "fciubenk", "fciu"
WASTEFUL: dict[str, Operation] = {
    "neutral": Operation(1, _NUMBERS, _neutral),
    "neutral_floats": Operation(1, "f", _neutral_floats),
    "absorbing": Operation(1, _NUMBERS, _absorbing),
    "involutions": Operation(1, _NUMBERS, _involutions),
    "nots": Operation(1, "iub", _nots),
    "neutral_bits": Operation(1, "iub", _bits),
    "transposes": Operation(1, _ALL, _transposes),
    "reshapes": Operation(1, _ALL, _reshapes),
    "broadcasts": Operation(1, _ALL, _broadcasts),
    "squeezes": Operation(1, _ALL, _squeezes),
    "converts": Operation(1, "fiu", _converts),
    "slices_of_concatenate": Operation(2, _ALL, _with_axis(_slices_of_concatenate)),
    "concatenates": Operation(2, _ALL, _with_axis(_concatenates)),
    "pads": Operation(1, _NUMBERS, _with_axis(_pads)),
    "selects": Operation(2, "fiu", _selects),
    "powers": Operation(1, "fci", _powers),
    "float_powers": Operation(1, "f", _float_powers),
    "compares": Operation(2, "fiu", _compares),
    "reverses": Operation(1, _ALL, _with_axis(_reverses)),
    "reductions": Operation(1, "fi", _with_axis(_reductions)),
    "dots": Operation(2, "f", _with_axis(_dots)),
    "dynamic": Operation(1, "fciub", _with_axis(_dynamic)),
    "twice": Operation(2, _NUMBERS, _twice),
    "draws": Operation(1, "k", _draws),
    "constants": Operation(1, _NUMBERS, _constants),
    "known_branches": Operation(2, _NUMBERS, _known_branches),
    "known_loops": Operation(2, _NUMBERS, _known_loops),
    "invariant": Operation(2, _NUMBERS, _invariant),
    "invariant_while": Operation(2, _NUMBERS, _invariant_while),
    "handed_on": Operation(2, _NUMBERS, _handed_on),
    "donated": Operation(1, _NUMBERS, _donated),
    "barrier": Operation(2, _NUMBERS, _barrier),
    "rematerialized": Operation(1, "f", _rematerialized),
    "activations": Operation(1, "f", _activations),
    "loop_gradient": Operation(1, "f", _loop_gradient),
    "copies": Operation(1, "f", _copies),
}

# --- wrappers ---------------------------------------------------------------------------------


def wasteful(case: Case, kind: str) -> Case:
    """Return the case wrapped in a `kind` of `WASTE`, with the same results, maybe more."""
    function = WASTE[kind](case.fun, case.args)
    return Case(f"{case.name} with {kind}", function, case.args, case.kwargs, case.x64)


def _done_twice(f: Function, args: Any) -> Function:
    shared = jax.jit(f)
    return lambda *xs: (f(*xs), shared(*xs), shared(*xs), jax.jit(f)(*xs))


def _of_constants(f: Function, args: Any) -> Function:
    """Compute the function of its arguments, and of constants, unused and in a loop."""
    constants = jax.tree.map(jnp.asarray, args)

    def function(*xs: Any) -> Any:
        _, rows = lax.scan(lambda c, _: (c + 1, f(*constants)), 0, None, length=2)
        return f(*xs), f(*constants), rows

    return function


def _in_vain_in_scan(f: Function, args: Any) -> Function:
    """A loop that computes the same in each iteration, from its closure and its carry."""

    def function(*xs: Any) -> Any:
        def body(carry: Any, i: Any) -> Any:
            same, count = carry
            return (same, count + 1), (f(*xs), f(*same), i)

        return lax.scan(body, (xs, 0), jnp.arange(2))

    return function


def _in_vain_in_while(f: Function, args: Any) -> Function:
    def function(*xs: Any) -> Any:
        def body(state: Any) -> Any:
            return state[0] + 1, f(*xs), state[2]

        return lax.while_loop(lambda s: s[0] < 2, body, (0, f(*xs), xs))

    return function


def _in_one_round(f: Function, args: Any) -> Function:
    """Loops of one and of zero iterations, and a while loop that never starts."""

    def function(*xs: Any) -> Any:
        start = f(*xs)
        one = lax.scan(lambda c, _: (c, f(*c)), xs, None, length=1)
        none = lax.scan(lambda c, _: (f(*xs), c), start, None, length=0)
        never = lax.while_loop(lambda s: s[0] > 1, lambda s: (s[0], f(*xs)), (0, start))
        return one, none, never

    return function


def _in_known_branch(f: Function, args: Any) -> Function:
    def function(*xs: Any) -> Any:
        other = lambda *ys: jax.tree.map(_changed, f(*ys))  # noqa: E731
        known = lax.switch(lax.full((), 1, jnp.int32) * 2 - 1, [other, f, other], *xs)
        return known, lax.cond(jnp.argmax(jnp.zeros(2)) > 0, f, f, *xs)

    return function


def _changed(x: Any) -> Any:
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.zeros_like(x)


def _in_neutral_code(f: Function, args: Any) -> Function:
    """Neutral operations, before and after the function."""

    def around(x: Any) -> Any:
        x = jnp.asarray(x)
        x = _squeezes(_reshapes(_transposes(x)))
        if jnp.issubdtype(x.dtype, jnp.integer):
            return _bits(_nots(_neutral(x)))
        if jnp.issubdtype(x.dtype, jnp.floating):
            return lax.neg(lax.neg(lax.mul(x, _full(x, 1))))
        return x

    return lambda *xs: jax.tree.map(around, f(*map(around, xs)))


def _in_calls(f: Function, args: Any) -> Function:
    """Nested calls that pass operands through, one with a donated argument."""

    def function(*xs: Any) -> Any:
        inner = jax.jit(lambda *ys: (ys, f(*ys[: len(xs)]), 2.0, ys), donate_argnums=())
        middle = jax.checkpoint(lambda *ys: (inner(*ys, *ys), ys))
        outer = jax.jit(lambda *ys: (middle(*ys), ys))
        return outer(*xs)

    return function


def _in_custom_rules(f: Function, args: Any) -> Function:
    """Custom derivative rules, twice."""

    def function(*xs: Any) -> Any:
        forwards, backwards = with_jvp_rule(f), with_vjp_rule(f, saving=False)
        return forwards(*xs), forwards(*xs), backwards(*xs), backwards(*xs)

    return function


#: The wrappers by name: `wrapper(function, arguments)`.
WASTE: dict[str, Callable[[Function, Any], Function]] = {
    "the same twice": _done_twice,
    "constants": _of_constants,
    "invariant scan": _in_vain_in_scan,
    "invariant while": _in_vain_in_while,
    "one round": _in_one_round,
    "known branch": _in_known_branch,
    "neutral code": _in_neutral_code,
    "calls": _in_calls,
    "custom rules": _in_custom_rules,
}
