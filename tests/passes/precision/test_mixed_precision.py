"""mixed_precision compared with the original program: values, types and structure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxprtool
from jaxprtool.errors import PipelineError
from jaxprtool.ir.equations import equations
from jaxprtool.ir.program import type_check
from jaxprtool.jaxcompat import open_jaxpr
from tests.share import shared_proofs

X = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32) / 3


def rewritten(fun, *args, options=""):
    """Return the program of `fun` before and after the pass, which must keep its types."""
    before = jaxprtool.trace(fun, *args)
    after = before.apply(f"mixed_precision({options})")
    type_check(after)
    assert [str(a) for a in after.out_avals] == [str(a) for a in before.out_avals]
    return before, after


def results(program, primitive):
    """Return the dtypes of the results of a primitive's equations, at every depth."""
    eqns = equations(open_jaxpr(program.jaxpr))
    return [e.outvars[0].aval.dtype.name for e in eqns if e.primitive.name == primitive]


def assert_near(before, after, *args, tolerance=0.05):
    results = (jax.tree.leaves(jax.jit(program)(*args)) for program in (before, after))
    for expected, actual in zip(*results, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def layer(x, w):
    return jnp.tanh(x @ w)


def through_jit(x, w):
    return jax.jit(layer)(x, w)


def through_scan(x, w):
    return lax.scan(lambda x, _: (layer(x, w), layer(x, w)), x, None, length=3)


def through_while(x, w):
    def step(state):
        x, steps = state
        return layer(x, w), steps + 1

    return lax.while_loop(lambda state: state[1] < 3, step, (x, 0))


def through_cond(x, w):
    return lax.cond(x[0, 0] > 0, layer, lambda x, w: x @ w.T, x, w)


def through_remat(x, w):
    return jax.checkpoint(lambda x: layer(layer(x, w), w))(x)


def through_custom_jvp(x, w):
    product = jax.custom_jvp(lambda x, w: layer(x, w))
    product.defjvps(lambda dx, _, x, w: dx @ w, lambda dw, _, x, w: x @ dw)
    return product(x, w)


def through_custom_vjp(x, w):
    product = jax.custom_vjp(lambda x, w: layer(x, w))
    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))
    return product(x, w)


def through_shard_map(x, w):
    mesh = jax.make_mesh((1,), ("i",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    return jax.shard_map(layer, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"))(x, w)


THROUGH = [f for name, f in list(globals().items()) if name.startswith("through_")]


@pytest.mark.parametrize("fun", THROUGH, ids=lambda f: f.__name__)
def test_products_and_functions_are_narrow_at_every_depth(fun):
    before, after = rewritten(fun, X, W)
    assert set(results(before, "tanh")) == {"float32"}
    assert set(results(after, "tanh")) == set(results(after, "dot_general")) == {"bfloat16"}
    assert_near(before, after, X, W)


@pytest.mark.parametrize(
    "fun", shared_proofs(f for f in THROUGH if f is not through_while), ids=lambda f: f.__name__
)
def test_gradients_of_the_result_and_results_of_the_gradient(fun):
    def total(f):
        return jax.grad(lambda x, w: jax.tree.leaves(f(x, w))[0].sum(), argnums=(0, 1))

    before, after = rewritten(total(fun), X, W)
    assert_near(before, after, X, W, tolerance=0.1)
    _, after = rewritten(fun, X, W)
    assert_near(total(fun), total(after), X, W, tolerance=0.1)


def test_sums_and_linear_algebra_stay_in_the_dtype_of_the_program():
    def fun(x, w):
        return jnp.cumsum(x @ w, 0), jnp.sum(x), jnp.linalg.cholesky(w @ w.T + jnp.eye(8))

    _, after = rewritten(fun, X, W)
    for name in ("cumsum", "reduce_sum", "cholesky"):
        assert set(results(after, name)) == {"float32"}


def test_a_parameter_is_cast_once_before_the_loop():
    _, after = rewritten(through_scan, X, W)
    (body,) = [e for e in open_jaxpr(after.jaxpr).eqns if e.primitive.name == "scan"]
    assert "bfloat16" in {v.aval.dtype.name for v in body.invars}  # the weights
    twice = rewritten(lambda x, w: (x @ w) @ w, X, W)[1]
    assert len(results(twice, "convert_element_type")) == 3  # x, w and the result


def test_carried_values_stay_and_stacked_results_are_narrow():
    _, after = rewritten(through_scan, X, W)
    (scan,) = [e for e in open_jaxpr(after.jaxpr).eqns if e.primitive.name == "scan"]
    assert [v.aval.dtype.name for v in scan.outvars] == ["float32", "bfloat16"]


def test_casts_of_the_program_to_the_dtype_disappear():
    def fun(x, w):
        return jnp.sin(jnp.sin(x).astype("bfloat16")).astype("float32") @ w

    _, after = rewritten(fun, X, W)
    assert len(results(after, "convert_element_type")) == 3


def test_a_line_to_keep_stays_wide():
    def fun(x, w):
        y = x @ w
        z = jnp.exp(y)
        return jnp.tanh(z)

    line = fun.__code__.co_firstlineno + 2
    before, after = rewritten(fun, X, W, options=f"keep=['test_mixed_precision.py:{line}']")
    found = [results(after, name) for name in ("dot_general", "exp", "tanh")]
    assert found == [["bfloat16"], ["float32"], ["bfloat16"]]
    every = [f"test_mixed_precision.py:{line + i}" for i in (-1, 0, 1)]
    _, after = rewritten(fun, X, W, options=f"keep={every}")
    assert after.jaxpr is before.jaxpr or str(after.jaxpr) == str(before.jaxpr)


def test_a_scope_to_keep_stays_wide_with_nested_scopes():
    def fun(x, w):
        with jax.named_scope("block"):
            with jax.named_scope("norm"):
                x = jnp.exp(x) * x
            x = jnp.sin(x @ w)
        return jnp.tanh(x)

    _, after = rewritten(fun, X, W, options="keep=['norm']")
    assert results(after, "exp") + results(after, "sin") == ["float32", "bfloat16"]
    _, after = rewritten(fun, X, W, options="keep=['block']")
    assert results(after, "exp") + results(after, "sin") == ["float32", "float32"]
    assert results(after, "tanh") == ["bfloat16"]


def test_a_line_or_scope_without_floats_is_an_error():
    with pytest.raises(PipelineError, match=r"computes no floats in 'model\.py:1'"):
        rewritten(layer, X, W, options="keep=['model.py:1']")
    with pytest.raises(PipelineError, match="'bfloat1' is not a compute_dtype") as caught:
        rewritten(layer, X, W, options="'bfloat1'")
    assert caught.value.hint == "did you mean 'bfloat16'?"


@pytest.mark.parametrize("dtype", ["int32", "complex64", "bfloat16", "float16"])
def test_other_dtypes_are_left_alone(dtype):
    before, after = rewritten(lambda x, w: (x @ w) + x, X.astype(dtype), W.astype(dtype))
    assert after.jaxpr is before.jaxpr


def test_double_precision_programs():
    with jax.enable_x64(True):
        args = X.astype(np.float64), W.astype(np.float64)
        before, after = rewritten(layer, *args, options="'float32'")
        assert results(after, "tanh") == ["float32"]
        assert_near(before, after, *args, tolerance=1e-5)


def test_an_algorithm_keeps_its_dtype():
    _, after = rewritten(lambda x, w: jnp.matmul(x, w, precision="F32_F32_F32"), X, W)
    assert results(after, "dot_general") == ["float32"]


def test_a_donated_operand_keeps_its_type():
    inner = jax.jit(layer, donate_argnums=0)
    before, after = rewritten(lambda x, w: inner(jnp.sin(x), w), X, W)
    (call,) = [e for e in open_jaxpr(after.jaxpr).eqns if e.primitive.name == "jit"]
    assert [v.aval.dtype.name for v in call.invars] == ["float32", "bfloat16"]
    assert_near(before, after, X, W)


def test_effects_keep_their_order():
    def noisy(x, w):
        jax.debug.print("before {}", x[0, 0])
        y = x @ w
        jax.debug.print("after {}", y[0, 0])
        return y

    before, after = rewritten(noisy, X, W)
    assert after.jaxpr.effects == before.jaxpr.effects != set()


def test_a_product_that_names_its_dtype_keeps_it():
    before, after = rewritten(lambda x, w: lax.mul(x, x, out_dtype=jnp.float32) @ w, X, W)
    assert results(after, "mul") == ["float32"]
    assert_near(before, after, X, W)
