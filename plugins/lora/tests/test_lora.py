"""The adapter: the identity by itself, variables to unzip, trained without touching the weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprtool_lora import adapt

import jaxprtool

KEY = jax.random.key(0)
W = jax.random.normal(jax.random.key(1), (6, 5))
X = jax.random.normal(jax.random.key(2), (3, 6))


def net(key, w, x):
    return x @ adapt(w, key, rank=2, name="out", alpha=4.0)


def halves(fun=net, *args):
    return jaxprtool.unzip(fun)(*(args or (KEY, W, X)))


def test_is_the_identity_where_nobody_interprets_it():
    np.testing.assert_array_equal(net(KEY, W, X), X @ W)
    np.testing.assert_array_equal(jax.jit(net)(KEY, W, X), jax.jit(jnp.matmul)(X, W))
    slope = jax.grad(lambda w: net(KEY, w, X).sum())(W)
    np.testing.assert_allclose(slope, jax.grad(lambda w: (X @ w).sum())(W))


def test_is_one_equation_of_a_jaxpr():
    names = [eqn.primitive.name for eqn in jax.make_jaxpr(net)(KEY, W, X).eqns]
    assert names == ["lora", "dot_general"]


def test_unzip_gives_an_adapter_that_adds_nothing_yet():
    init, apply = halves()
    adapters = init(KEY)
    assert jax.tree.map(jnp.shape, adapters) == {"out": {"down": (6, 2), "up": (2, 5)}}
    assert jnp.abs(adapters["out"]["down"]).min() > 0
    np.testing.assert_allclose(apply(adapters, W, X), X @ W, rtol=1e-6)


def test_apply_adds_the_scaled_product():
    init, apply = halves()
    down, up = init(KEY)["out"]["down"], jnp.ones((2, 5))
    expected = X @ (W + 2.0 * down @ up)
    np.testing.assert_allclose(apply({"out": {"down": down, "up": up}}, W, X), expected, rtol=1e-5)


def test_the_adapter_alone_can_be_trained():
    init, apply = halves()
    adapters, target = init(KEY), X @ (W + 1.0)

    def loss(adapters):
        return jnp.mean((apply(adapters, W, X) - target) ** 2)

    first, slope = loss(adapters), jax.jit(jax.grad(loss))
    for _ in range(200):
        adapters = jax.tree.map(lambda a, g: a - 0.02 * g, adapters, slope(adapters))
    assert loss(adapters) < 0.05 * first


def test_adapters_inside_calls_and_scopes_are_found():
    def deep(key, w, x):
        inner = jaxprtool.nest(jax.jit(net), scope="head")
        return jax.checkpoint(inner)(key, w, x)

    init, apply = halves(deep)
    adapters = init(KEY)
    assert list(adapters) == ["head"]
    np.testing.assert_allclose(apply(adapters, W, X), X @ W, rtol=1e-6)


def test_adapters_of_a_scan_are_stacked():
    def layers(key, ws, x):
        def layer(x, key_w):
            key, w = key_w
            return jnp.tanh(x @ adapt(w, key, rank=1, name="layer")), None

        return jax.lax.scan(layer, x, (jax.random.split(key, 4), ws))[0]

    ws, x = jnp.stack([jnp.eye(6)] * 4), jnp.ones(6)
    init, apply = halves(layers, KEY, ws, x)
    adapters = init(KEY)
    assert adapters["layer"]["down"].shape == (4, 6, 1)
    np.testing.assert_allclose(apply(adapters, ws, x), layers(KEY, ws, x), rtol=1e-6)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="takes a matrix, not an array of shape"):
        adapt(jnp.ones(3), KEY, rank=1, name="w")
    with pytest.raises(ValueError, match="rank of an adapter must be at least 1, not 0"):
        adapt(W, KEY, rank=0, name="w")


def test_a_weight_that_is_mapped_over_is_refused():
    def mapped(key, ws, x):
        return jax.vmap(net, (None, 0, None))(key, ws, x)

    with pytest.raises(jaxprtool.errors.UnsupportedError, match=r"lora at .*test_lora.py:\d+"):
        halves(mapped, KEY, jnp.stack([W, W]), X)
