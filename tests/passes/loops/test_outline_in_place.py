"""Bodies that update a large argument are calls, since units would copy it each time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.jaxcompat import mark_of
from jaxprtool.passes.loops.outline.choice import writes_into_arguments

#: The sizes of a large and a small array: 128 KiB and 128 bytes.
LARGE, SMALL = 2**15, 2**5


def step(x: Any) -> Any:
    centred = x - x.mean()
    return jnp.tanh(centred * jax.lax.rsqrt((centred**2).mean() + 1e-5)) + jnp.sin(x) * x


def recorded(cache: Any, x: Any, i: Any) -> Any:
    x = step(x)
    return jax.lax.dynamic_update_slice(cache, x, (i,)), x


def scattered(cache: Any, x: Any, i: Any) -> Any:
    x = step(x)
    return cache.reshape(-1, 4).at[i, jnp.array([0, 2])].add(x[:2]).reshape(-1), x


def recorded_in_a_loop(cache: Any, x: Any, i: Any) -> Any:
    def body(j: Any, carry: Any) -> Any:
        return recorded(*carry, i + j)

    return jax.lax.fori_loop(0, 2, body, (cache, x))


def read(cache: Any, x: Any, i: Any) -> Any:
    return step(x) + jax.lax.dynamic_slice(cache, (i,), x.shape)


def forwarded(cache: Any, x: Any, i: Any) -> Any:
    return cache, step(x) * i


def computed_with(cache: Any, x: Any, i: Any) -> Any:
    return step(cache) * i, step(x)


def momentum(cache: Any, x: Any, i: Any) -> Any:
    return jnp.sqrt(0.9 * cache + x[0]) * i


@pytest.mark.parametrize(
    ("body", "size", "writes"),
    [
        (recorded, LARGE, True),
        (scattered, LARGE, True),
        (recorded_in_a_loop, LARGE, True),
        (jax.jit(recorded), LARGE, True),
        (forwarded, LARGE, True),
        (momentum, LARGE, True),
        (momentum, SMALL, False),
        (recorded, SMALL, False),
        (read, LARGE, False),
        (computed_with, LARGE, False),
    ],
)
def test_updates_of_large_arguments_are_detected(body, size, writes) -> None:
    traced = jaxprtool.trace(body, np.zeros(size, "f"), np.arange(4, dtype="f"), 1)
    assert writes_into_arguments(traced.jaxpr) == writes


def test_a_step_of_an_optimizer_updates_donated_arguments() -> None:
    def update(params: Any, moments: Any, grads: Any) -> Any:
        def step(p: Any, m: Any, g: Any) -> Any:
            m = 0.9 * m + 0.1 * g * jnp.abs(g) + 1e-3 * m * m
            return p - 1e-3 * (m / (jnp.sqrt(m * m + 1e-8) + 1e-4) + jax.nn.relu(p)), m

        return jax.tree.transpose(
            jax.tree.structure([0] * len(params)),
            jax.tree.structure((0, 0)),
            list(map(step, params, moments, grads)),
        )

    args = 3 * ([np.full(LARGE, i + 1, "f") for i in range(4)],)
    outlined = jaxprtool.trace(update, *args).apply("outline(equations=6)")
    assert {mark_of(e) for e in outlined.jaxpr.eqns if e.primitive.name == "jit"} == {"call"}
    compiled = jax.jit(outlined, donate_argnums=(0, 1)).lower(*args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * LARGE


def cached_attention(cache: Any, x: Any) -> Any:
    for i in range(8):
        cache = jax.lax.dynamic_update_slice(cache, step(x), (i,))
        x = jax.nn.softmax(step(x) + jax.lax.dynamic_slice(cache, (i,), x.shape))
    return cache, x


@pytest.mark.proof
@pytest.mark.parametrize(
    ("size", "asked", "mark"),
    [(LARGE, "unit", "call"), (LARGE, "plain", "plain"), (SMALL, "unit", "unit")],
)
def test_bodies_that_update_a_large_argument_are_calls(size: int, asked: str, mark: str) -> None:
    args = np.zeros(size, "f"), np.arange(4, dtype="f")
    outlined = jaxprtool.trace(cached_attention, *args).apply(f"outline(mark='{asked}')")
    calls = [eqn for eqn in outlined.jaxpr.eqns if eqn.primitive.name == "jit"]
    assert {mark_of(eqn) for eqn in calls} == {mark}
    compiled = jax.jit(outlined, donate_argnums=0).lower(*args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * LARGE
    expected = jax.jit(cached_attention)(*args)
    for a, b in zip(compiled(*map(jnp.array, args)), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
