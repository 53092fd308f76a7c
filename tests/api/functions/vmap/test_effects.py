"""Effects happen as under `jax.vmap`: in the same order, and as often."""

import jax
import numpy as np
import pytest
from jax.experimental import io_callback

from jaxprtool import vmap
from tests.api.functions.vmap.beside import VECTOR, assert_alike, assert_both_raise, printed


def test_prints_have_jaxs_order():
    def fun(x):
        jax.debug.print("first {}", 3.0)
        jax.debug.print("mapped {x}", x=x)
        jax.debug.print("then {}", 2.0)
        jax.debug.callback(lambda: print("called"))
        jax.debug.print("last {x}", x=x + 1)
        return x

    text = printed(vmap(fun))
    assert text == printed(jax.vmap(fun)) and len(text.splitlines()) == 9


def test_callbacks_on_unmapped_values_return_values():
    def fun(x):
        value = io_callback(lambda: np.float32(3), jax.ShapeDtypeStruct((), "float32"))
        return x * 2 if value > 2 else x

    assert_alike(fun, VECTOR)


@pytest.mark.parametrize("ordered", [False, True])
def test_callbacks_on_mapped_values(ordered):
    def fun(x):
        return io_callback(np.sin, jax.ShapeDtypeStruct((), "float32"), x, ordered=ordered)

    if ordered:
        assert_both_raise(lambda v: v(fun)(VECTOR))
    else:
        assert_alike(fun, VECTOR)
