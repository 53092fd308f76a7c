"""Derivatives of mapped functions whose custom rules close over batched values."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool import vmap
from tests.share import shared_proofs

LANES = jnp.array([1.0, 2.0])


def by_jvp(y):
    @jax.custom_jvp
    def scaled(z):
        return jnp.sin(z) * y

    scaled.defjvp(lambda p, t: (scaled(*p), 5 * scaled(*p) * y * t[0]))
    return scaled


def by_the_rule_alone(y):
    @jax.custom_jvp
    def doubled(z):
        return z * 2

    doubled.defjvp(lambda p, t: (doubled(*p), 5 * p[0] * y * t[0]))
    return doubled


def by_symbolic_zeros(y):
    @jax.custom_jvp
    def scaled(z, w):
        return z * y + w

    def rule(primals, tangents):
        assert type(tangents[1]) is jax.custom_derivatives.SymbolicZero
        return scaled(*primals), 5 * y * tangents[0]

    scaled.defjvp(rule, symbolic_zeros=True)
    return lambda z: scaled(z, 1.0)


def by_forward_rule(y):
    @jax.custom_vjp
    def scaled(z):
        return z * y

    scaled.defvjp(lambda z: (z * y, (y, z)), lambda r, t: (5 * r[0] * r[1] * t,))
    return scaled


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def applied(f, x):
    return f(x)


@applied.defjvp
def _(f, primals, tangents):
    return applied(f, *primals), 3 * f(primals[0]) * tangents[0]


def by_an_argument(y):
    return partial(applied, lambda z: z * y)


def by_one_inside_another(y):
    return lambda z: applied(lambda u: applied(lambda w: w * y, u) * jnp.sin(y), z)


def by_jaxs_vmap(y):
    return lambda z: jax.vmap(by_jvp(y))(jnp.stack([z, z + 1])).sum()


def by_our_vmap(y):
    return lambda z: vmap(lambda w: by_jvp(y * w)(z) + by_jvp(y)(w))(jnp.arange(2.0)).sum()


def forwards(f):
    return lambda x: jax.jvp(f, (x,), (1.0,))


AROUND = {
    "grad": jax.grad,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "jvp": forwards,
    "grad of grad": lambda f: jax.grad(jax.grad(f)),
}
FUNCTIONS = [
    by_jvp,
    by_the_rule_alone,
    by_symbolic_zeros,
    by_forward_rule,
    by_an_argument,
    by_one_inside_another,
    by_jaxs_vmap,
    by_our_vmap,
]


@pytest.mark.parametrize("made", shared_proofs(FUNCTIONS), ids=lambda f: f.__name__)
def test_rules_may_close_over_batched_values(made):
    def total(mapping, x):
        return mapping(lambda y: made(y)(x * 1.5) * y)(LANES).sum()

    for name, around in AROUND.items():
        if made is by_forward_rule and name == "jvp":
            continue
        expected, got = (around(partial(total, mapping))(2.0) for mapping in (jax.vmap, vmap))
        np.testing.assert_allclose(got, expected, rtol=1e-5, err_msg=name)


def test_batched_values_passed_to_the_function_of_a_rule():
    def total(x):
        return vmap(lambda y: applied(lambda z: z * y, x * y))(LANES).sum()

    assert jax.grad(total)(2.0) == jax.grad(
        lambda x: jax.vmap(lambda y: applied(lambda z: z * y, x * y))(LANES).sum()
    )(2.0)


def test_closed_over_values_of_a_rule_are_not_differentiated():
    for mapping in jax.vmap, vmap:
        with pytest.raises(jax.errors.UnexpectedTracerError):
            jax.grad(lambda x: mapping(lambda y: by_jvp(y * x)(2.0 * x))(LANES).sum())(2.0)  # noqa: B023


def test_a_rule_that_raises_does_so_only_when_it_is_used():
    @jax.custom_jvp
    def refusing(z):
        return z * 2

    @refusing.defjvp
    def _(primals, tangents):
        raise KeyError("no derivative")

    assert jax.grad(lambda x: vmap(lambda y: refusing(y) + x)(LANES).sum())(2.0) == 2
    with pytest.raises(KeyError, match="no derivative"):
        jax.grad(lambda x: vmap(lambda y: refusing(x * y))(LANES).sum())(2.0)
