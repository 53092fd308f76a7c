"""The interval of an argument for which the results are finite."""

import math

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.ir.dataflow import POSITIVE, domain_text, input_domains

X = jax.ShapeDtypeStruct((4,), "float32")


def adam(moment, second, gradient):
    second = 0.999 * second + (1 - 0.999) * gradient**2
    moment = 0.9 * moment + 0.1 * gradient
    return moment / (jnp.sqrt(second / (1 - 0.999**3)) + 1e-8), second


def rms(second, gradient):
    return gradient * jax.lax.rsqrt(0.9 * second + gradient * gradient + 1e-6)


@jax.jit
def called(x, v):
    return jnp.where(x > 0, jnp.sqrt(v), x)


def carried(v):
    return jax.lax.scan(lambda c, _: (c * 0.5, jnp.sqrt(c)), v, None, length=3)


def branched(x, v):
    return jax.lax.cond(x[0] > 0, lambda v: jnp.log(v), lambda v: v, v)


def entropy(p):
    return -(p * jnp.log(p) + (1 - p) * jnp.log(1 - p)).sum()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (adam, [None, POSITIVE, None]),
        (rms, [POSITIVE, None]),
        (called, [None, POSITIVE]),
        (carried, [POSITIVE]),
        (branched, [None, POSITIVE]),
        (entropy, [(0.0, 1.0)]),
        (lambda x: jnp.sqrt(-x), [(-math.inf, 0.0)]),
        (lambda x: jnp.arcsin(2 * x - 1), [(0.0, 1.0)]),
        (lambda x: jnp.arccosh(x.reshape(2, 2)), [(1.0, math.inf)]),
        (lambda x: jax.nn.log_softmax(x), [None]),
        (lambda x: jnp.linalg.norm(x), [None]),
        (jax.grad(lambda v: jnp.sqrt(v).sum()), [POSITIVE]),
    ],
)
def test_the_use_of_an_argument_determines_its_interval(function, expected):
    program = jaxprtool.trace(function, *[X] * len(expected))
    assert input_domains(program.jaxpr) == expected


def test_intervals_are_described_in_words():
    ends = [(0.0, math.inf), (-math.inf, 0.0), (1.0, math.inf), (-math.inf, 2.0), (-1.0, 1.0)]
    assert list(map(domain_text, ends)) == [
        "positive",
        "negative",
        "above 1",
        "below 2",
        "between -1 and 1",
    ]
