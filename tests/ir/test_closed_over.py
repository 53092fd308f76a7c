"""Rules of custom derivatives that close over traced values are converted, or refused by name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.errors import UnsupportedError


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def noisy(x, s):
    return x * s


@noisy.defjvp
def noisy_jvp(s, primals, tangents):
    return noisy(primals[0], s), tangents[0] * s * 3


def static_argument(x, s):
    return noisy(x, s * 2)


def jvp_of_a_closure(x, s):
    scale = s * 2

    @jax.custom_jvp
    def wave(z):
        return jnp.sin(z) * scale

    wave.defjvp(lambda p, t: (wave(*p), 5 * scale * t[0] * jnp.cos(p[0])))
    return wave(x)


def forward_of_a_closure(x, s):
    scale = s * 2

    @jax.custom_vjp
    def wave(z):
        return jnp.sin(z)

    wave.defvjp(lambda z: (wave(z), z * scale), lambda kept, ct: (kept * ct,))
    return wave(x)


def backward_of_a_closure(x, s):
    scale = s * 2

    @jax.custom_vjp
    def wave(z):
        return jnp.sin(z)

    wave.defvjp(lambda z: (wave(z), z), lambda kept, ct: (kept * ct * scale,))
    return wave(x)


def around_a_loop(x, s):
    scale = s * 2

    @jax.custom_jvp
    def wave(z):
        return jnp.sin(z)

    wave.defjvp(lambda p, t: (wave(*p), 5 * scale * t[0]))
    return jax.lax.scan(lambda c, _: (wave(c), None), x, None, 3)[0]


def in_a_branch(x, s):
    scale = s * 2

    @jax.custom_jvp
    def wave(z):
        return jnp.sin(z)

    wave.defjvp(lambda p, t: (wave(*p), 5 * scale * t[0]))
    return jax.lax.cond(x > 0, wave, jnp.cos, x)


def rule_of_a_rule(x, s):
    """Return a function whose rule calls another one that closes over what the first computes."""
    scale = s * 2

    @jax.custom_jvp
    def wave(z):
        return jnp.sin(z)

    wave.defjvp(lambda p, t: (wave(*p), noisy(t[0] * p[0] ** 2, jnp.cos(scale))))
    return wave(x)


COMPUTED = [static_argument, jvp_of_a_closure, forward_of_a_closure]


@pytest.mark.parametrize("fun", COMPUTED)
def test_gradients_equal_jaxs(fun):
    program = jaxprtool.trace(fun, 2.0, 5.0)
    wanted = jax.grad(fun)(2.0, 5.0)
    for passes in ("grad", "-O2, grad, -O2"):
        np.testing.assert_allclose(program.apply(passes)(2.0, 5.0), wanted, rtol=1e-6)
    np.testing.assert_allclose(program.apply("-O3")(2.0, 5.0), fun(2.0, 5.0), rtol=1e-6)


@pytest.mark.parametrize("fun", [*COMPUTED, rule_of_a_rule])
def test_second_derivatives_equal_jaxs(fun):
    program = jaxprtool.trace(fun, 2.0, 5.0)
    wanted = jax.grad(jax.grad(fun))(2.0, 5.0)
    for passes in ("grad, grad", "grad, -O2, grad"):
        np.testing.assert_allclose(program.apply(passes)(2.0, 5.0), wanted, rtol=1e-6)


@pytest.mark.parametrize("around", [jax.jit, jax.checkpoint])
def test_values_of_an_inner_body_are_operands_there(around):
    program = jaxprtool.trace(lambda x, s: around(static_argument)(x, s) + x, 2.0, 5.0)
    assert float(program.apply("grad")(2.0, 5.0)) == 31.0


@pytest.mark.parametrize(
    ("fun", "passes"),
    [
        (backward_of_a_closure, "grad"),
        (around_a_loop, "grad"),
        (around_a_loop, "jvp"),
        (in_a_branch, "grad"),
        (jvp_of_a_closure, "grad(argnums=1)"),
    ],
)
def test_unsupported_rules_are_refused_with_the_line(fun, passes):
    program = jaxprtool.trace(fun, 2.0, 5.0)
    np.testing.assert_allclose(program(2.0, 5.0), fun(2.0, 5.0), rtol=1e-6)
    rule = r"the rule of 'wave', the custom_.*_call at .*test_closed_over.py:\d+, closes over a"
    with pytest.raises(UnsupportedError, match=rule):
        program.apply(passes)
