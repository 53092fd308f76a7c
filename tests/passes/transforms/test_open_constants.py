"""open_constants: constants of a program, at any depth, become an argument."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool import equivalent, trace
from jaxprtool.ir.equations import equations
from jaxprtool.ir.program import type_check
from jaxprtool.ir.regions import sub_jaxprs
from jaxprtool.jaxcompat import open_jaxpr
from jaxprtool.passes.transforms.calls import Closed

W = jnp.arange(6.0).reshape(2, 3) / 10
B = jnp.array([1.0, -2.0, 3.0])
X = jnp.linspace(-1.0, 1.0, 8).reshape(4, 2)


def dense(w, b):
    return jax.jit(lambda x: x @ w + b)


def flat(w, b):
    return lambda x: x @ w + b


def scanned(w, b):
    f = dense(w, b)
    return lambda x: jax.lax.scan(lambda c, row: (c + 1, f(row) * c), 1.0, x)[1] + f(x)


def branching(w, b):
    f = dense(w, b)
    bodies = [f, lambda x: jax.jit(lambda x: f(x) * b)(x), lambda x: x[:, :1] * b]
    return lambda x: jax.lax.switch(jnp.int32(x.sum() > -9), bodies, x)


def looping(w, b):
    f = dense(w, b)
    small = jax.jit(lambda y: jnp.any(y + b < 9.0))
    return lambda x: jax.lax.while_loop(small, lambda y: y + jax.nn.relu(f(x)) + 1, f(x))


def recomputed(w, b):
    f = dense(w, b)
    return lambda x: jax.checkpoint(lambda x: jnp.tanh(f(x)))(x)


FUNCTIONS = [flat, scanned, branching, looping, recomputed]


def opened(fun, *args, min_bytes=0):
    program = trace(fun, *args)
    parts = program.apply(f"open_constants(min_bytes={min_bytes})")
    for part in parts.values():
        type_check(part)
    return program, parts["constants"], parts["apply"]


def held(program):
    """Return the constants in a program at any depth."""
    bodies = (b for eqn in equations(open_jaxpr(program.jaxpr)) for _, b in sub_jaxprs(eqn))
    return [c for jaxpr in (program.jaxpr, *bodies) for c in getattr(jaxpr, "consts", ())]


@pytest.mark.parametrize("make", FUNCTIONS)
def test_the_result_is_the_function_of_the_constants(make):
    program, constants, apply = opened(make(W, B), X)
    assert held(program) and not held(apply)
    values = constants()
    assert sorted(map(id, values)) == sorted(map(id, (W, B)))  # each once
    run = jax.jit(apply)
    np.testing.assert_array_equal(run(X, values), jax.jit(program)(X))
    new = [value * 0.5 for value in values]
    np.testing.assert_allclose(run(X, new), jax.jit(make(W * 0.5, B * 0.5))(X), rtol=1e-6)


@pytest.mark.parametrize("make", [make for make in FUNCTIONS if make is not looping])
def test_the_result_is_differentiable_by_the_constants(make):
    _, constants, apply = opened(make(W, B), X)
    values = constants()
    order = [next(i for i, v in enumerate(values) if v is value) for value in (W, B)]
    got = jax.jit(jax.grad(lambda c: apply(X, c).sum()))(values)
    want = jax.jit(jax.grad(lambda w, b: make(w, b)(X).sum(), (0, 1)))(W, B)
    for i, expected in zip(order, want, strict=True):
        np.testing.assert_allclose(got[i], expected, rtol=1e-5, atol=1e-6)


def test_closed_is_the_inverse():
    program, constants, apply = opened(flat(W, B), X)
    for key in ("constants", -1):
        assert equivalent(apply.apply(Closed({key: constants()})), program)
    program, constants, apply = opened(scanned(W, B), X)
    closed = apply.apply(Closed({"constants": constants()}))
    type_check(closed)
    np.testing.assert_array_equal(closed(X), program(X))


def test_small_constants_are_kept():
    program, constants, apply = opened(scanned(W, B), X, min_bytes=W.nbytes)
    assert [value is W for value in constants()] == [True]
    assert {id(value) for value in held(apply)} == {id(B)}
    np.testing.assert_array_equal(apply(X, constants()), program(X))


def test_without_constants_the_list_is_empty():
    program, constants, apply = opened(jnp.sin, X)
    assert constants() == []
    np.testing.assert_array_equal(apply(X, []), program(X))


def test_constants_come_between_positional_and_keyword_arguments():
    program = trace(lambda x, *, a: x * W + a, W, a=2.0)
    constants, apply = program.apply("open_constants").values()
    type_check(apply)
    assert apply.arg_names == ("x", "constants[0]", "a")
    np.testing.assert_array_equal(apply(W, constants(), a=2.0), W * W + 2.0)


def test_bodies_that_calls_share_stay_shared():
    f = dense(W, B)
    _, _, apply = opened(lambda x: (f(x), f(x + 1)), X)
    first, second = (e.params["jaxpr"] for e in apply.jaxpr.eqns if e.primitive.name == "jit")
    assert open_jaxpr(first) is open_jaxpr(second)


@pytest.mark.proof
def test_keys_and_numpy_arrays_are_constants_too():
    key, table = jax.random.key(3), np.arange(4, dtype=np.float32)
    f = jax.jit(lambda: jax.random.normal(key, (4,)) * table)
    program, constants, apply = opened(lambda: f() + table)
    values = constants()
    assert len(values) == 2
    np.testing.assert_array_equal(apply(values), program())
    others = [v * 2 if v.dtype == table.dtype else jax.random.key(4) for v in values]
    want = jax.random.normal(jax.random.key(4), (4,)) * table * 2 + table * 2
    np.testing.assert_allclose(apply(others), want, rtol=1e-6)


def custom_jvp(w, b):
    @jax.custom_jvp
    def f(x):
        return x @ w

    f.defjvp(lambda primals, tangents: (f(*primals), tangents[0] @ w * 3))
    return lambda x: f(x) + x @ w + b


def custom_vjp(w, b):
    @jax.custom_vjp
    def f(x):
        return x @ W * 2

    f.defvjp(lambda x: (f(x), None), lambda _, ct: (ct @ w.T,))
    return lambda x: jax.lax.scan(lambda c, row: (c, f(row) + row @ w + b), 0.0, x)[1]


@pytest.mark.parametrize("make", [custom_jvp, custom_vjp])
def test_constants_that_a_custom_derivative_closes_over_are_kept(make):
    """JAX would leave it out of a gradient by the constants, and its rule keeps the old value."""
    program, constants, apply = opened(make(W, B), X)
    (value,) = constants()
    assert value is B
    np.testing.assert_array_equal(apply(X, [B]), program(X))
    want = jax.grad(lambda x: make(W, B)(x).sum())(X)
    np.testing.assert_allclose(jax.grad(lambda x: apply(x, [B]).sum())(X), want, rtol=1e-6)
