"""The operations that stop a gradient are named; gradients are zero where JAX's are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxprtool
from jaxprtool.commands.why.gradients import gradient_flow

w = jnp.linspace(-2.0, 2.3, 12).reshape(3, 4)
x = jnp.linspace(0.5, 9.0, 12)


@jax.custom_vjp
def none(w):
    return w * 2


none.defvjp(lambda w: (w * 2, None), lambda _, ct: (None,))


@jax.custom_vjp
def zeros(w):
    return w * 2


zeros.defvjp(lambda w: (w * 2, w), lambda w, ct: (jnp.zeros_like(w),))


@jax.custom_jvp
def flat(w):
    return w * 2


flat.defjvp(lambda p, t: (flat(*p), jnp.zeros_like(p[0])))


@jax.custom_jvp
def straight(w):
    return jnp.round(w)


straight.defjvp(lambda p, t: (straight(*p), t[0]))


def branches(w, x):
    return lax.cond(x[0] > 0, lambda w: jnp.round(w).sum(), lambda w: jnp.floor(w).sum(), w)


STOPPED = {
    "round": (lambda w, x: (x * (jnp.round(w.ravel() * 8) / 8)).sum(), {"round"}),
    "stop_gradient": (lambda w, x: lax.stop_gradient(w).sum() * x.sum(), {"stop_gradient"}),
    "argmax": (lambda w, x: x[jnp.argmax(w)], {"argmax"}),
    "argsort": (lambda w, x: (x[jnp.argsort(w.ravel())] * x).sum(), {"sort"}),
    "cast": (lambda w, x: w.astype(int).astype(float).sum(), {"convert_element_type"}),
    "comparison": (lambda w, x: jnp.where(w > 0, 1.0, 2.0).sum(), {"gt"}),
    "predicate": (lambda w, x: lax.cond(w.sum() > 0, lambda: 1.0, lambda: 2.0), {"gt"}),
    "none": (lambda w, x: none(w).sum(), {"none"}),
    "zeros": (lambda w, x: zeros(w).sum(), {"zeros"}),
    "flat": (lambda w, x: flat(w).sum(), {"flat"}),
    "row of a scan": (
        lambda w, x: lax.scan(lambda c, r: (c + jnp.sign(r), r), x[:4], w)[0].sum(),
        {"sign"},
    ),
    "carry": (
        lambda w, x: lax.scan(lambda c, _: (jnp.sign(c), None), w, None, 3)[0].sum(),
        {"sign"},
    ),
    "branches": (branches, {"round", "floor"}),
    "jit": (lambda w, x: jax.jit(jnp.floor)(w).sum(), {"floor"}),
    "remat": (lambda w, x: jax.checkpoint(jnp.ceil)(w).sum(), {"ceil"}),
}

GOES_ON = {
    "smooth": (lambda w, x: jnp.tanh(w).sum(), set()),
    "straight": (lambda w, x: straight(w).sum(), set()),
    "some": (lambda w, x: (jnp.round(w) + jnp.sign(w) + w).sum(), {"round", "sign"}),
    "one branch": (lambda w, x: lax.cond(x[0] < 0, jnp.round, jnp.sin, w).sum(), {"round"}),
    "late": (
        lambda w, x: lax.scan(lambda c, r: ((c[1], r), None), (w[0], w[0]), w)[0][0].sum(),
        set(),
    ),
}


@pytest.mark.parametrize("name", STOPPED)
def test_operations_that_stop_every_path_are_named(name):
    fun, stops = STOPPED[name]
    flow = gradient_flow(jaxprtool.trace(fun, w, x), [0])
    assert not np.any(jax.jit(jax.grad(fun))(w, x))
    assert (flow.zero, flow.reached) == (("result",), ())
    assert {stop.primitive for stop in flow.stops} == stops
    assert all("test_gradient_flow.py:" in stop.source for stop in flow.stops)


@pytest.mark.parametrize("name", GOES_ON)
def test_a_non_zero_gradient_is_not_stopped(name):
    fun, stops = GOES_ON[name]
    flow = gradient_flow(jaxprtool.trace(fun, w, x), [0])
    assert np.any(jax.jit(jax.grad(fun))(w, x))
    assert (flow.zero, flow.reached) == ((), ("result",))
    assert {stop.primitive for stop in flow.stops} == stops


def test_an_integer_has_no_gradient():
    flow = gradient_flow(jaxprtool.trace(lambda i, x: x[i], 2, x), [0])
    assert flow.type == "i32[]" and not flow.zero


def test_a_primitive_with_a_custom_derivative_is_named():
    # In JAX 0.12 one of expm's is a primitive of a class, which has no jaxpr to get a name from.
    program = jaxprtool.trace(lambda w: jax.scipy.linalg.expm(w).sum(), jnp.ones((4, 4)))
    flow = gradient_flow(program, [0])
    assert flow.reached == ("result",) and "floor" in {stop.primitive for stop in flow.stops}
