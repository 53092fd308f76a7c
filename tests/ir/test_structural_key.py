"""Structural keys are equal for jaxprs that differ only in names, and for no others."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxprtool import primitives
from jaxprtool.ir.equivalence import Unkeyable, equivalent, jaxpr_structure, value_key

x = jnp.arange(12.0).reshape(3, 4)


def traced(fun, *args):
    return jax.make_jaxpr(fun)(*(args or (x,)))


def scan_by(step):
    return lambda a: lax.scan(lambda c, row: (c + row, step(c)), a[0], a)


@pytest.mark.parametrize(
    "fun",
    [
        lambda a: jnp.sin(a) * 2.0,
        lambda a: jnp.sort(a),
        lambda a: scan_by(jnp.cos)(a),
        lambda a: lax.cond(a.sum() > 0, jnp.sin, jnp.cos, a),
        lambda a: lax.fori_loop(0, a.sum().astype(int), lambda i, c: c * 2, a),
        lambda a: jax.grad(lambda b: jax.checkpoint(jnp.sin)(b).sum())(a),
        lambda a: lax.reduce(a, 0.0, lambda p, q: p + q, (0,)),
        lambda a: a + np.arange(4.0, dtype=np.float32),
        lambda a: jax.random.normal(jax.random.key(0), a.shape) + a,
    ],
)
def test_two_traces_of_a_function_have_one_structure(fun):
    first, second = traced(lambda a: fun(a)), traced(lambda b: fun(b))
    assert first is not second and equivalent(first, second)
    assert jaxpr_structure(first) is jaxpr_structure(second)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda a: a * 0.0, lambda a: a * -0.0),
        (lambda a: a + 1, lambda a: a + 2),
        (lambda a: a - a[:, :1], lambda a: a[:, :1] - a),
        (lambda a: (a, jnp.sin(a)), lambda a: (jnp.sin(a), a)),
        (lambda a: a.sum(0), lambda a: a.sum(1).sum()),
        (scan_by(jnp.sin), scan_by(jnp.cos)),
        (lambda a: a + np.zeros((3, 4), np.float32), lambda a: a + -np.zeros((3, 4), np.float32)),
        (lambda a: lax.reduce(a, 0.0, lax.add, (0,)), lambda a: lax.reduce(a, 0.0, lax.max, (0,))),
        (lambda a: a + jnp.float32(1), lambda a: a.astype(jnp.bfloat16) + jnp.bfloat16(1)),
    ],
)
def test_a_difference_changes_the_structure(one, other):
    assert not equivalent(traced(one), traced(other))
    assert jaxpr_structure(traced(one)) is not jaxpr_structure(traced(other))


def test_rules_of_custom_derivatives_are_compared_by_identity():
    def make(scale):
        @jax.custom_jvp
        def f(a):
            return jnp.sin(a)

        f.defjvp(lambda primals, tangents: (f(*primals), tangents[0] * scale))
        return f

    f, g = make(2.0), make(3.0)
    assert jaxpr_structure(traced(f)) is jaxpr_structure(traced(lambda a: f(a)))
    assert jaxpr_structure(traced(f)) is not jaxpr_structure(traced(g))


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (jnp.sin, True),
        (lambda a: lax.scan(lambda c, b: (c + b, None), a[0], a)[0], True),
        (lambda a: primitives.variable(a, name="w"), False),
        (lambda a: lax.optimization_barrier(a), False),
        (lambda a: jax.checkpoint(jnp.sin)(a), False),
        (lambda a: jax.jit(lambda b: jax.debug.print("{}", b))(a), False),
        (lambda a: jax.pure_callback(np.sin, a, a), False),
    ],
)
def test_repeatable_is_true_if_two_calls_can_be_merged(fun, expected):
    body = traced(lambda a: jax.jit(fun)(a))
    assert jaxpr_structure(body).repeatable is expected


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ((1, 2), [1, 2]),
        ((1, 2), (True, 2)),
        ((1, 2), (1.0, 2)),
        (np.float32(1), np.float64(1)),
        (np.dtype("float32"), "float32"),
        (np.zeros(3), np.zeros(3, np.float32)),
        (np.zeros(40), -np.zeros(40)),
        (np.zeros(2), jnp.zeros(2)),
        (jax.random.key(0), jax.random.key(1)),
        ({"a": 1}, {"a": 2}),
        (jnp.sin, jnp.cos),
    ],
)
def test_different_values_have_different_keys(one, other):
    assert value_key(one) != value_key(other)
    assert value_key(one) == value_key(one)


def test_arrays_are_compared_by_content_and_placement():
    array = np.arange(100.0, dtype=np.float32)
    assert value_key(array) == value_key(array.copy())
    assert value_key(jnp.asarray(array)) == value_key(jnp.asarray(array.copy()))
    placed = jax.device_put(array, jax.devices()[0])
    assert value_key(placed) != value_key(jnp.asarray(array))
    assert value_key(jax.random.key(3)) == value_key(jax.random.key(3))
    assert value_key(np.float32("nan")) == value_key(np.float32("nan"))


def test_the_key_of_a_constant_can_be_computed_while_jax_traces():
    key, array = jax.random.key(0), jnp.arange(100.0)
    found = []

    @jax.jit
    def inside(a):
        found.extend([value_key(key), value_key(array), value_key(a)])
        return a

    inside(x)
    assert found[:2] == [value_key(key), value_key(array)]
    assert found[2][0] == "object"


def test_an_unhashable_value_has_no_key():
    with pytest.raises(Unkeyable):
        value_key({1, 2})
    with pytest.raises(Unkeyable):
        value_key(np.array([object()]))


@pytest.mark.proof
def test_a_structure_is_freed_with_its_jaxprs():
    from jaxprtool.ir import equivalence

    body = traced(lambda a: jnp.sin(a) * 1234.5)
    jaxpr_structure(body)
    gc.collect()
    before = len(equivalence._by_key)
    del body
    gc.collect()
    assert len(equivalence._by_key) < before
