"""Parts of a program that JAX's functions would add, reorder or omit round-trip exactly."""

import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxprtool import trace
from jaxprtool.formats.python.emit import python_parts, to_python
from jaxprtool.formats.python.layout import LocalNames
from jaxprtool.ir.equivalence import structural_difference
from tests.formats.python.emitting import defined, emitted

X, Y = np.arange(1.0, 4.0, dtype=np.float32), np.arange(2.0, 5.0, dtype=np.float32)


def by_platform(x):
    """Return two choices by platform, whose index `cse` merges."""
    first = lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)
    return first + lax.platform_dependent(x, cpu=jnp.cos, default=jnp.sin)


def switched(x, n):
    y = lax.switch(n, [jnp.sin, jnp.cos, jnp.tanh], x)
    return jnp.sum(lax.cond(n > 0, jnp.sin, jnp.cos, y) * y)


def forwarded(x, y, n):
    """A branch whose second result is an operand. JAX forwards it, but not in a derivative."""
    return lax.cond(n > 0, lambda x: x + 1.0, lambda x: x - 1.0, x) * y


def affine(x, weights):
    def step(carry, row):
        return jnp.tanh(carry * weights["w"] + weights["b"]), row * weights["b"]

    return sum(jnp.sum(r) for r in lax.scan(step, x, jnp.ones((4, 3))))


def closed_over_late(x, a, b, c):
    """A loop whose constants are not in the order in which its body reads them."""

    def step(carry, _):
        c_, a_ = map(lax.stage, (c, a))
        return carry * b + a_ * c_, None

    return lax.fori_loop(0, 3, lambda i, v: lax.scan(step, v, None, length=2)[0], x)


CONSTANTS = [jnp.asarray(X + i) for i in range(4)]


def constants_in_another_order(x):
    _, last = map(lax.stage, (CONSTANTS[3], CONSTANTS[2]))
    return x * CONSTANTS[0] + CONSTANTS[1] * last + CONSTANTS[3]


@jax.custom_jvp
def soft(x):
    return jnp.logaddexp(x, 0.0)


@soft.defjvp
def soft_jvp(primals, tangents):
    return soft(*primals), jax.nn.sigmoid(primals[0]) * tangents[0]


@jax.custom_jvp
def jvp_with_zeros(x):
    return jnp.sin(x)


jvp_with_zeros.defjvp(
    lambda xs, ts: (jvp_with_zeros(*xs), jnp.cos(xs[0]) * ts[0]), symbolic_zeros=True
)


@jax.custom_vjp
def vjp_with_zeros(x):
    return jnp.sin(x)


vjp_with_zeros.defvjp(
    lambda x: (vjp_with_zeros(x.value), x.value),
    lambda x, ct: (jnp.cos(x) * ct,),
    symbolic_zeros=True,
)


def root(x):
    """A call with custom rules, in a loop's body; derivatives contain calls of other kinds."""

    def solve(f, start):
        return lax.fori_loop(0, 3, lambda i, v: v - f(v) / jax.grad(f)(v), start)

    return lax.custom_root(lambda v: v * v - x, x, solve, lambda g, y: y / g(jnp.ones_like(y)))


def rejected(key):
    """A batched loop, whose condition is an array, which JAX's functions do not support."""
    return lax.while_loop(
        lambda c: jax.random.uniform(c[0]) < c[1],
        lambda c: (jax.random.split(c[0])[1], c[1] * 0.5),
        (key, 0.5),
    )[1]


N = np.int32(1)
EXACT: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "one platform for two choices": (by_platform, (X,), "cse"),
    "one index for a branch and its derivative": (jax.grad(switched), (X, N), ""),
    "a constant index": (lambda x: lax.switch(2, [jnp.sin, jnp.cos, jnp.tanh], x), (X,), ""),
    "an index from far away": (switched, (X, N), "batch(in_axes=(0, None), axis_size=2), sink"),
    "an operand that branches hand on": (forwarded, (X, Y, N), "jvp"),
    "constants of a gradient's loop": (jax.grad(affine), (X, {"w": X, "b": Y}), ""),
    "constants of loops in loops": (closed_over_late, (X, X, Y, Y), ""),
    "constants of a program": (constants_in_another_order, (X,), ""),
    "a rule of a function that was simplified": (lambda x: soft(x) * 2, (X,), "-O1"),
    "a jvp rule with symbolic zeros": (jvp_with_zeros, (X,), ""),
    "a vjp rule with symbolic zeros": (vjp_with_zeros, (X,), ""),
    "calls that a root leaves": (jax.value_and_grad(root), (np.float32(2.0),), ""),
    "a batched loop over keys": (rejected, (jax.random.key(0),), "batch(axis_size=2)"),
    "a function to be inlined": (partial(jax.jit(affine, inline=True), X), ({"w": X, "b": Y},), ""),
}


@pytest.mark.parametrize("name", EXACT)
def test_the_program_round_trips(name: str) -> None:
    function, arguments, passes = EXACT[name]
    program = trace(function, *arguments).apply(passes)
    source, again = emitted(program)
    assert structural_difference(program, again) is None, source


@pytest.mark.proof
@pytest.mark.parametrize("name", ["one platform for two choices", "constants of loops in loops"])
def test_the_program_computes_the_same(name: str) -> None:
    function, arguments, passes = EXACT[name]
    program = trace(function, *arguments).apply(passes)
    source, _ = emitted(program)
    np.testing.assert_array_equal(jax.jit(defined(source))(*arguments), program(*arguments))
    jax.jvp(jax.jit(defined(source)), arguments, arguments)
    jax.vmap(defined(source))(*(np.stack([a, a]) for a in arguments))


def test_only_out_of_order_parts_are_staged() -> None:
    def loop(x, a, b, c):
        def step(carry, _):
            return (carry * b + a) * c, None

        return lax.scan(step, x, None, length=2)[0]

    source, _ = emitted(trace(loop, X, X, Y, Y))
    assert "lax.stage" not in source


def test_a_large_constant_is_never_in_memory_as_a_whole():
    weights = np.arange(2**20, dtype=np.float32)
    program = trace(lambda x: x * weights, weights)
    tracemalloc.start()
    parts = [len(part) for part in python_parts(program, "refuse", True)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(parts) > 2 * weights.nbytes and max(parts) < weights.nbytes
    assert peak < weights.nbytes * 2
    assert np.array_equal(defined(to_python(program), program.name)(weights), weights * weights)


def test_names_are_found_in_linear_time():
    class Counted(set):
        asked = 0

        def __contains__(self, name):
            self.asked += 1
            return super().__contains__(name)

    outer = Counted()
    names = LocalNames(outer, set())
    assert [names.claim("step") for _ in range(3)] == ["step", "step_2", "step_3"]
    assert len({names.claim("step") for _ in range(500)}) == 500
    assert outer.asked <= 510
