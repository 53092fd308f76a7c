"""A call and a loop, and the location of an equation in them."""

import jax
import jax.numpy as jnp
from jax import lax

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.ir.dataflow import DataFlow

X = jnp.arange(3.0)


def top_of(fun, *args):
    """Return the jaxpr of a function, of three numbers by default."""
    return jaxcompat.open_jaxpr(jaxprtool.trace(fun, *(args or (X,))).jaxpr)


def value(top, primitive):
    """Return the first result of the only equation of a primitive, with its body."""
    (found,) = [
        (jaxpr, eqn.outvars[0])
        for jaxpr in DataFlow(top).holders
        for eqn in jaxpr.eqns
        if eqn.primitive.name == primitive
    ]
    return found


def called(a):
    inner = jax.jit(lambda p, q: (jnp.cos(p), jnp.tan(q)))
    b, c = inner(jnp.sin(a), jnp.exp(a))
    return jnp.tanh(b), jnp.log(c)


def looped(a):
    def step(carry, row):
        return (carry[0] + jnp.cos(row), carry[1] * 2.0), jnp.sin(carry[0])

    (p, q), rows = lax.scan(step, (a[0], a[1]), a)
    return jnp.tan(p), jnp.exp(q), jnp.log(rows)
