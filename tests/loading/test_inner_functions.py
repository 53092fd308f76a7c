"""A function inside a program is a TARGET: `run/update:loss`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.errors import TargetError, UnsupportedError
from jaxprtool.loading.inner_functions import inner_function

PARAMS = {"w": jnp.arange(6.0).reshape(3, 2) / 10}
BATCH = jnp.linspace(-1, 1, 12).reshape(4, 3)


def layer(params, x):
    return jnp.tanh(x @ params["w"])


def loss(params, x):
    return jnp.mean(jnp.square(layer(params, x) - layer(params, 0.5 * x)))


def update(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


def jitted_update(params, x):
    value, grads = jax.value_and_grad(jax.jit(loss))(params, x)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


def sine(x):
    return jnp.sin(x)


def scanned(params, xs):
    def body(params, x):
        return update(params, x)

    return jax.lax.scan(body, params, xs)


@pytest.mark.parametrize("step", [update, jitted_update])
def test_a_differentiated_function_computes_its_value_from_its_arguments(step):
    inner, note = inner_function(jaxprtool.trace(step, PARAMS, BATCH), "loss")
    assert inner.name == "loss" and inner.arg_names == ("params['w']", "x")
    assert np.array_equal(inner(PARAMS["w"], BATCH)[0], jax.jit(loss)(PARAMS, BATCH))
    assert "the forward part of loss in a gradient" in note
    assert jaxprtool.why_gradient(inner, "params").groups[0].kind == "nonzero"


@pytest.mark.proof
def test_the_body_of_a_loop_and_a_function_that_takes_a_gradient_are_whole():
    program = jaxprtool.trace(scanned, PARAMS, BATCH[None])
    new, value = update(PARAMS, BATCH)
    for name in ("body", "update"):
        inner, note = inner_function(program, name)
        results = inner(PARAMS["w"], BATCH)
        assert inner.arg_names == ("params['w']", "x") and not note
        np.testing.assert_allclose(results[0], new["w"], rtol=1e-6)
        np.testing.assert_allclose(results[1], value, rtol=1e-6)


def test_functions_of_one_name_are_numbered_and_listed_with_their_lines():
    program = jaxprtool.trace(update, PARAMS, BATCH)
    with pytest.raises(TargetError, match="2 functions of the name 'layer'") as error:
        inner_function(program, "layer")
    assert error.value.hint.count("test_inner_functions.py:") == 2
    assert error.value.hint.startswith("write layer#1 (")
    first, second = (inner_function(program, f"layer#{i}")[0] for i in (1, 2))
    assert np.array_equal(first(PARAMS["w"], BATCH)[0], layer(PARAMS, BATCH))
    assert second.arg_names[0] == "params['w']"
    with pytest.raises(TargetError, match="and no 'layer#3'"):
        inner_function(program, "layer#3")
    with pytest.raises(TargetError, match="no function 'los' inside") as error:
        inner_function(program, "los")
    assert error.value.hint == "did you mean 'loss'?"


def test_a_function_of_shards_is_refused():
    def shard(x):
        return jax.lax.psum(x, "d")

    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("d")
    program = jaxprtool.trace(
        jax.shard_map(shard, mesh=mesh, in_specs=spec, out_specs=jax.P()), jnp.ones(4)
    )
    with pytest.raises(UnsupportedError, match="shard runs on the shards"):
        inner_function(program, "shard")


def test_calls_of_one_equation_are_functions_of_their_own():
    def f(x):
        return sine(x) + sine(sine(x) * 2)

    program = jaxprtool.trace(f, jnp.ones(3))
    assert all(len(inner_function(program, f"sine#{i}")[0].jaxpr.eqns) == 1 for i in (1, 2, 3))
    with pytest.raises(TargetError, match="3 functions of the name 'sine'"):
        inner_function(program, "sine")


def test_the_forward_part_of_a_gradient_is_no_function_of_that_name():
    def forward(w):
        return jnp.tanh(w)

    program = jaxprtool.trace(jax.grad(lambda w: jnp.exp(forward(w)).sum()), jnp.ones(3))
    names = [eqn.primitive.name for eqn in inner_function(program, "forward")[0].jaxpr.eqns]
    assert "tanh" in names and "exp" not in names


def test_a_call_that_is_only_in_part_differentiated_is_one_function():
    def block(w, x, index):
        return jnp.tanh(x[index] @ w) * jnp.cos(index)[:, None]

    def objective(params, x, index):
        h = jax.checkpoint(block)(params["w"], x, index + 1)
        return jnp.sum(jax.checkpoint(block)(params["w"], jnp.cos(x), index * 2) * h)

    def step(params, x, index):
        return jax.value_and_grad(objective)(params, x, index)

    index = jnp.array([0, 1])
    inner, _ = inner_function(jaxprtool.trace(step, PARAMS, BATCH, index), "objective")
    arguments = {"params['w']": PARAMS["w"], "x": BATCH, "index": index}
    results = inner(*(arguments[name] for name in inner.arg_names))
    value = objective(PARAMS, BATCH, index)
    assert any(r.shape == () and np.allclose(r, value) for r in results)
