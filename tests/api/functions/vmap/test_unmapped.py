"""Values that do not depend on a mapped argument stay concrete in Python."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxprtool import vmap
from tests.api.functions.vmap.beside import (
    MATRIX,
    VECTOR,
    assert_alike,
    assert_both_raise,
    jvp_of,
    printed,
)


def by_sign(w, x):
    return x * w if w > 0 else x


def by_a_derived_value(w, x):
    scale = jax.nn.relu(jnp.tanh(w) * jax.jit(jnp.sum)(jnp.ones(3)))
    return x * scale if scale > 0.5 else -x


def by_an_inner_derivative(w, x):
    return x if jax.grad(jnp.sin)(w) > 0 else -x


@jax.custom_jvp
def triple_jvp(x, y):
    return x * y


@jax.custom_vjp
def triple_vjp(x, y):
    return x * y


triple_jvp.defjvp(lambda p, t: (triple_jvp(*p), t[0] * 3 + t[1] * 5))
triple_vjp.defvjp(lambda x, y: (x * y, (x, y)), lambda r, g: (g * 3, g * r[0] * 7))


@pytest.mark.parametrize("fun", [by_sign, by_a_derived_value, by_an_inner_derivative])
@pytest.mark.parametrize("w", [2.0, -2.0, np.float32(0.1)])
def test_python_control_flow_on_unmapped_values(fun, w):
    assert_alike(fun, w, VECTOR, in_axes=(None, 0))


@pytest.mark.parametrize("fun", [by_sign, by_a_derived_value])
def test_python_control_flow_on_unmapped_values_that_are_differentiated(fun):
    def around(mapped):
        return jax.value_and_grad(lambda w, x: mapped(w, x).sum(), argnums=(0, 1))

    assert_alike(fun, 0.7, VECTOR, in_axes=(None, 0), around=around)
    assert_alike(fun, -2.0, VECTOR, in_axes=(None, 0), around=lambda m: partial(jvp_of, m))


@pytest.mark.parametrize("rule", [triple_jvp, triple_vjp])
def test_custom_derivatives_of_unmapped_values(rule):
    def fun(w, x):
        return x * rule(w, w) if rule(w, 3.0) > 1 else x

    def around(mapped):
        return jax.value_and_grad(lambda *args: mapped(*args).sum(), argnums=(0, 1))

    assert_alike(fun, 2.0, VECTOR, in_axes=(None, 0), around=around)
    assert_alike(lambda w, x: rule(x, w), 2.0, VECTOR, in_axes=(None, 0), around=around)
    assert_alike(jax.grad(rule), VECTOR, 2.0, in_axes=(0, None))


def test_custom_derivatives_may_close_over_mapped_values():
    def fun(x):
        @jax.custom_jvp
        def scaled(y):
            return x * y

        scaled.defjvp(lambda p, t: (scaled(*p), t[0] * 10))
        return scaled(2.0) + scaled(jnp.float32(2.0)) + scaled(x), jax.grad(scaled)(2.0)

    assert_alike(fun, VECTOR)


def scaled_by_a_count(w, x):
    count, total = lax.scan(lambda c, _: ((c[0] + w, c[1] * x), None), (w, x), length=3)[0]
    return total if count * 2 > 3 else -total


def chosen_by_a_jits_result(w, x):
    total, scale = jax.jit(lambda w, x: (x + w, jnp.sin(w) + 1))(w, x)
    offset = float(scale * 2) + np.asarray(scale) + complex(scale).real
    return total * offset if scale > 1 else -total


@pytest.mark.parametrize("fun", [scaled_by_a_count, chosen_by_a_jits_result])
@pytest.mark.parametrize("w", [0.7, -0.7])
def test_unmapped_results_of_calls_with_mapped_operands_are_concrete(fun, w):
    assert_alike(fun, w, VECTOR, in_axes=(None, 0))


def test_unmapped_results_are_concrete_after_an_effect_that_happens_once():
    def fun(x):
        jax.debug.print("{x}", x=x)
        count, total = lax.cond(True, lambda y: (2, y), lambda y: (3, -y), x)
        return total if count == 2 else x

    assert printed(vmap(fun)) == printed(jax.vmap(fun)) == "0.0\n1.0\n2.0\n"


def test_under_a_jit_no_value_is_concrete():
    mapped = [jax.jit(v(chosen_by_a_jits_result, in_axes=(None, 0))) for v in (jax.vmap, vmap)]
    for fun in mapped:
        with pytest.raises(jax.errors.ConcretizationTypeError):
            fun(2.0, VECTOR)


def test_python_control_flow_on_mapped_values_is_jaxs_error():
    theirs, ours = assert_both_raise(lambda v: v(by_sign)(VECTOR, VECTOR))
    assert "traced array with shape bool[]" in ours and "traced array with shape bool[]" in theirs


def test_constants_and_static_arguments():
    def fun(x):
        with jax.ensure_compile_time_eval():
            count = int(jnp.arange(3).sum())
        scale = float(jnp.sqrt(jnp.float32(2)))
        return jax.jit(lambda y, n: y * n, static_argnums=1)(x, count) * scale

    assert_alike(fun, MATRIX)
