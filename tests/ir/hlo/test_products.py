"""The FLOPs of matrix products in a module equal XLA's count."""

import jax
import jax.numpy as jnp
import pytest

from jaxprtool.ir.hlo.module import compiled_module, product_flops
from tests.programs.sharded import floats


def flops(function, *args):
    return product_flops(compiled_module(jax.jit(function).lower(*args).compile()))


def convolved(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID")


def grouped(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (2, 2), "VALID", feature_group_count=2)


CASES = {
    "matrices": (jnp.matmul, floats(24, 32), floats(32, 40)),
    "a batch": (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), floats(3, 8, 16), floats(3, 16, 4)),
    "two contracted": (
        lambda a, b: jnp.tensordot(a, b, 2), floats(4, 5, 6), floats(5, 6, 7)
    ),
    "a vector": (jnp.dot, floats(64, 32), floats(32)),
    "a convolution": (convolved, floats(2, 4, 12, 12), floats(8, 4, 3, 3)),
    "groups": (grouped, floats(2, 4, 13, 13), floats(8, 2, 3, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_flops_equal_xlas(name):
    function, *args = CASES[name]
    wanted = jax.jit(function).lower(*args).compile().cost_analysis()["flops"]
    assert flops(function, *args) == {"f32": wanted}


def test_the_products_in_a_loop_count_in_each_iteration():
    def powers(x):
        return jax.lax.fori_loop(0, 7, lambda _, y: jnp.tanh(y @ x), x)

    assert flops(powers, floats(16, 16)) == {"f32": 7 * 2 * 16**3}


def test_products_are_counted_by_element_type():
    half = jax.ShapeDtypeStruct((16, 16), jnp.float16)
    found = flops(lambda a, b: (a @ a, b @ b), floats(8, 8), half)
    assert found.total() == 2 * 8**3 + 2 * 16**3 and found["f32"] >= 2 * 8**3
