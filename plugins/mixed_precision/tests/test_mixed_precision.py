"""The pass against the program it was given: by value, by type and by structure."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxprtool_mixed_precision import NarrowProducts
from jaxprtool_mixed_precision.casting import PRODUCTS

import jaxprtool
from jaxprtool.errors import PipelineError
from jaxprtool.ir.program import type_check
from jaxprtool.ir.regions import sub_jaxprs
from jaxprtool.jaxcompat import open_jaxpr, user_frame

X = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32) / 3


def equations(jaxpr):
    """Every equation at every depth; those of a shared body once for each equation that has it."""
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        for _, body in sub_jaxprs(eqn):
            yield from equations(body)


def products(program):
    return [eqn for eqn in equations(program.jaxpr) if eqn.primitive.name in PRODUCTS]


def dtypes(eqn):
    return [x.aval.dtype.name for x in (*eqn.invars, *eqn.outvars)]


def narrowed(fun, *args, **options):
    """The program of `fun` before and after the pass, which has kept its types."""
    before = jaxprtool.trace(fun, *args)
    after = NarrowProducts(**options)(before)
    type_check(after)
    assert [str(a) for a in after.out_avals] == [str(a) for a in before.out_avals]
    return before, after


def assert_near(before, after, *args):
    for expected, actual in zip(
        jax.tree.leaves(before(*args)), jax.tree.leaves(after(*args)), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=0.05, atol=0.05)


def through_jit(x, w):
    return jax.jit(jnp.matmul)(x, w)


def through_scan(x, w):
    return lax.scan(lambda x, _: (jnp.tanh(x @ w), x @ w), x, None, length=3)


def through_while(x, w):
    def unfinished(state):
        x, steps = state
        return ((x @ w).sum() < 1e6) & (steps < 3)

    def step(state):
        x, steps = state
        return jnp.tanh(x @ w), steps + 1

    return lax.while_loop(unfinished, step, (x, 0))


def through_cond(x, w):
    return lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x @ w.T, x)


def through_switch(x, w):
    return lax.switch(1, [lambda x: x, lambda x: x @ w, lambda x: 2 * x @ w], x)


def through_remat(x, w):
    return jax.checkpoint(lambda x: jnp.sin(x @ w) @ w)(x)


def through_custom_jvp(x, w):
    @jax.custom_jvp
    def product(x, w):
        return x @ w

    product.defjvps(lambda dx, _, x, w: dx @ w, lambda dw, _, x, w: x @ dw)
    return product(x, w)


def through_custom_vjp(x, w):
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))
    return product(x, w)


def through_shard_map(x, w):
    mesh = jax.make_mesh((1,), ("i",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    specs = {"in_specs": (P("i"), P()), "out_specs": P("i")}
    return jax.shard_map(jnp.matmul, mesh=mesh, **specs)(x, w)


def through_linear_solve(x, w):
    def matvec(v):
        return w.T @ (w @ v) + 4 * v

    return lax.custom_linear_solve(matvec, x[0], lambda f, b: b / 4 - f(b / 4) / 16, symmetric=True)


THROUGH = [f for name, f in list(globals().items()) if name.startswith("through_")]

#: JAX differentiates no while loop in reverse, rewritten or not.
DIFFERENTIABLE = [f for f in THROUGH if f is not through_while]


@pytest.mark.parametrize("fun", THROUGH, ids=lambda f: f.__name__)
def test_every_product_at_every_depth_multiplies_narrow_and_accumulates_wide(fun):
    before, after = narrowed(fun, X, W)
    assert len(products(after)) == len(products(before)) > 0
    for eqn in products(before):
        assert dtypes(eqn) == ["float32"] * 3
    for eqn in products(after):
        assert dtypes(eqn) == ["bfloat16", "bfloat16", "float32"]
    assert_near(before, after, X, W)


# JAX differentiates no while loop in reverse, rewritten or not.
@pytest.mark.parametrize(
    "fun", [f for f in THROUGH if f is not through_while], ids=lambda f: f.__name__
)
def test_the_result_is_differentiable(fun):
    before, after = narrowed(fun, X, W)

    def gradients(program):
        first = jax.grad(lambda x, w: jax.tree.leaves(program(x, w))[0].sum(), argnums=(0, 1))
        return jax.jit(first)(X, W)

    for expected, actual in zip(gradients(before), gradients(after), strict=True):
        assert actual.dtype == np.float32
        np.testing.assert_allclose(actual, expected, rtol=0.1, atol=0.15)


def test_convolutions_are_cast_and_differentiable():
    image = np.random.default_rng(2).standard_normal((2, 3, 8, 8)).astype(np.float32)
    kernel = np.random.default_rng(3).standard_normal((4, 3, 3, 3)).astype(np.float32)

    def fun(image, kernel):
        return lax.conv(image, kernel, (1, 1), "SAME")

    before, after = narrowed(fun, image, kernel)
    assert [dtypes(eqn) for eqn in products(after)] == [["bfloat16", "bfloat16", "float32"]]
    np.testing.assert_allclose(after(image, kernel), before(image, kernel), atol=0.2)
    gradients = jax.grad(lambda x, k: after(x, k).sum(), argnums=(0, 1))(image, kernel)
    assert [g.dtype for g in gradients] == [np.float32, np.float32]


def test_the_products_of_a_gradient_are_cast_too():
    before, after = narrowed(jax.grad(lambda x, w: jnp.sin(x @ w).sum(), argnums=(0, 1)), X, W)
    assert len(products(after)) == 3
    assert {tuple(dtypes(eqn)) for eqn in products(after)} == {("bfloat16", "bfloat16", "float32")}
    assert_near(before, after, X, W)


def test_other_compute_dtypes():
    _, after = narrowed(jnp.matmul, X, W, compute_dtype="float16")
    assert [dtypes(eqn) for eqn in products(after)] == [["float16", "float16", "float32"]]


def test_double_precision_is_cast_and_returned_in_double():
    with jax.enable_x64(True):
        _, after = narrowed(jnp.matmul, X.astype(np.float64), W.astype(np.float64))
        assert [dtypes(eqn) for eqn in products(after)] == [["bfloat16", "bfloat16", "float64"]]
        _, after = narrowed(
            jnp.matmul, X.astype(np.float64), W.astype(np.float64), compute_dtype="float32"
        )
        assert [dtypes(eqn) for eqn in products(after)] == [["float32", "float32", "float64"]]


def test_only_the_wider_operand_is_cast():
    dot = partial(lax.dot_general, dimension_numbers=(((1,), (0,)), ((), ())))
    _, after = narrowed(dot, X, W.astype(jnp.bfloat16))
    casts = [e for e in equations(after.jaxpr) if e.primitive.name == "convert_element_type"]
    assert len(casts) == 1
    assert [dtypes(eqn) for eqn in products(after)] == [["bfloat16", "bfloat16", "float32"]]


@pytest.mark.parametrize("dtype", ["int32", "int8", "bool", "complex64", "bfloat16", "float16"])
def test_integer_complex_and_narrow_products_are_left_alone(dtype):
    dot = partial(lax.dot_general, dimension_numbers=(((1,), (0,)), ((), ())))
    before, after = narrowed(dot, X.astype(dtype), W.astype(dtype))
    assert after.jaxpr is before.jaxpr


def test_a_product_with_an_algorithm_of_its_own_is_left_alone():
    before, after = narrowed(partial(jnp.matmul, precision="F32_F32_F32"), X, W)
    assert len(products(before)) == 1
    assert after.jaxpr is before.jaxpr


def test_a_shared_body_stays_shared():
    twice = jax.jit(lambda x, w: jnp.tanh(x @ w))
    _, after = narrowed(lambda x, w: twice(twice(x, w), w), X, W)
    first, second = after.jaxpr.eqns
    assert first.params["jaxpr"] is second.params["jaxpr"]


def test_the_program_given_is_left_as_it_was():
    before = jaxprtool.trace(through_scan, X, W)
    text = str(before.jaxpr)
    NarrowProducts()(before)
    assert str(before.jaxpr) == text


def test_effects_keep_their_order_and_casts_bear_the_source_line_of_their_product():
    def noisy(x, w):
        jax.debug.print("before {}", x[0, 0])
        y = x @ w
        jax.debug.print("after {}", x[0, 0])
        return y

    before, after = narrowed(noisy, X, W)
    assert after.jaxpr.effects == before.jaxpr.effects != set()
    names = [eqn.primitive.name for eqn in after.jaxpr.eqns]
    kept = [eqn.primitive.name for eqn in before.jaxpr.eqns]
    assert [name for name in names if name != "convert_element_type"] == kept
    casts = [e for e in after.jaxpr.eqns if e.primitive.name == "convert_element_type"]
    (product,) = products(after)
    assert len(casts) == 2
    assert {user_frame(cast) for cast in casts} == {user_frame(product)} != {None}


def test_custom_rules_keep_full_precision_when_differentiated_afterwards():
    _, after = narrowed(through_custom_vjp, X, W)
    gradient = jax.make_jaxpr(jax.grad(lambda x: after(x, W).sum()))(X)
    dots = [dtypes(e) for e in equations(gradient) if e.primitive.name == "dot_general"]
    assert ["float32"] * 3 in dots


def test_it_is_found_by_name_and_takes_its_option_from_a_pipeline():
    program = jaxprtool.trace(jnp.matmul, X, W)
    after = program.apply("narrow_products(compute_dtype='float16')")
    assert [dtypes(eqn) for eqn in products(after)] == [["float16", "float16", "float32"]]


def test_an_unknown_dtype_is_refused_with_the_nearest_name():
    with pytest.raises(PipelineError, match="'bfloat1' is not a compute_dtype") as caught:
        NarrowProducts(compute_dtype="bfloat1")
    assert caught.value.hint == "did you mean 'bfloat16'?"
    with pytest.raises(PipelineError) as caught:
        NarrowProducts(compute_dtype="int8x")
    assert "bfloat16" in caught.value.hint
