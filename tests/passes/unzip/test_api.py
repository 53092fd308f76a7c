"""`jaxprtool.unzip` numbers arguments as the function does, including static ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.errors import ArgumentsError

KEY, X = jax.random.key(0), jnp.arange(3.0)


def scaled(power, key, x):
    return x * jaxprtool.variable(jax.random.normal(key) ** power, name="w")


def test_positions_count_static_arguments():
    init, apply = jaxprtool.unzip(scaled, key_args=1)(jaxprtool.static(2), KEY, X)
    np.testing.assert_array_equal(apply(init(KEY), X), scaled(2, KEY, X))


def test_known_positions_count_static_arguments():
    def f(power, y, x):
        return jnp.sin(y**power) * x

    init, apply = jaxprtool.unzip(f, known=(1,))(jaxprtool.static(2), X, X)
    np.testing.assert_allclose(apply(init(X), X), f(2, X, X), rtol=1e-6)


def test_a_static_argument_cannot_be_a_key():
    with pytest.raises(ArgumentsError, match="argument 0 is static, so it is not traced"):
        jaxprtool.unzip(scaled)(jaxprtool.static(2), KEY, X)
