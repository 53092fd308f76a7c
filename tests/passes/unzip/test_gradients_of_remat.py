"""A variable that the gradient of a remat recomputes is the same variable."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.errors import JaxprToolError

KEY, X = jax.random.key(0), jnp.ones(3)


def layer(x, key):
    return jnp.tanh(x @ jaxprtool.variable(jax.random.normal(key, (3, 3)), name="w"))


def two_layers(x, key):
    first, second = jax.random.split(key)
    return layer(layer(x, first), second)


def scanned(body):
    def run(x, key):
        steps = jax.random.split(key, 2)
        return jax.lax.scan(lambda x, k: (jax.checkpoint(body)(x, k), None), x, steps)[0]

    return run


def gradient(fun):
    return jax.grad(lambda key, x: fun(x, key).sum(), 1)


@pytest.mark.parametrize("fun", [jax.checkpoint(layer), scanned(layer)])
def test_a_recomputed_variable_is_one_variable(fun):
    f = gradient(fun)
    init, apply = jaxprtool.unzip(f)(KEY, X)
    np.testing.assert_allclose(apply(init(KEY), X), f(KEY, X), rtol=1e-6)
    other = jax.tree.map(lambda w: w + 0.5, init(KEY))

    def expected(x):
        for w in other["w"].reshape(-1, 3, 3):
            x = jnp.tanh(x @ w)
        return x.sum()

    np.testing.assert_allclose(apply(other, X), jax.grad(expected)(X), atol=1e-5)


@pytest.mark.parametrize(
    "fun", [jax.checkpoint(two_layers), jax.checkpoint(scanned(two_layers)), scanned(two_layers)]
)
def test_two_variables_of_one_name_are_never_merged(fun):
    with pytest.raises(JaxprToolError, match=r"duplicate variable name: w|sown more than once"):
        jaxprtool.unzip(gradient(fun))(KEY, X)


def test_a_rule_whose_effect_needs_the_key_is_refused():
    @jax.custom_jvp
    def f(key, x):
        return jaxprtool.variable(jax.random.normal(key, (3,)), name="w") * x

    @f.defjvp
    def rule(primals, tangents):
        key, x = primals
        jax.debug.print("{}", jax.random.uniform(key))
        return f(key, x), tangents[1]

    with pytest.raises(JaxprToolError, match="its rule has an effect that needs a key"):
        jaxprtool.unzip(lambda key, x: f(key, x))(KEY, X)
