"""The estimate of compile time counts distinct kernels, as XLA does."""

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.commands.outline.compile_time import (
    DRAW,
    KERNEL,
    VECTOR,
    compile_estimate,
    compile_profile,
)


def layers(count):
    """Return the gradient of equal layers."""

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return (x**2).sum()

    matrix = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    return jaxprtool.trace(jax.grad(loss), [matrix] * count, matrix)


def recurrence(count):
    """Return the gradient of steps over the rows of an array, at constant positions."""

    def loss(w, xs):
        h = jnp.zeros(w.shape[0])
        for t in range(count):
            h = jnp.tanh(w @ h + xs[t])
        return (h**2).sum()

    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 4), (count, 4))]
    return jaxprtool.trace(jax.grad(loss), *types)


def test_equal_layers_are_compiled_once():
    few, many = compile_estimate(layers(4)), compile_estimate(layers(40))
    assert many.different == few.different
    assert many.kernels > 8 * few.kernels
    assert few.seconds < many.seconds < 1.5 * few.seconds


def test_rows_at_different_positions_are_different_kernels():
    few, many = compile_estimate(recurrence(5)), compile_estimate(recurrence(50))
    assert many.different - few.different == 45
    assert many.seconds > 3 * few.seconds


@pytest.mark.parametrize("passes", ["roll", "outline(equations=3)"])
def test_the_body_of_a_loop_or_a_unit_is_compiled_once(passes):
    few, many = (compile_estimate(recurrence(n).apply(passes)) for n in (20, 40))
    if passes == "roll":
        assert few.equations == many.equations and few.different == many.different
    assert many.equations < compile_estimate(recurrence(40)).equations


def test_stacks_and_rows_of_a_loop_are_kernels_too():
    """So a loop of cheap layers may take longer to compile than the layers."""
    program = layers(12)
    assert compile_estimate(program).seconds < compile_estimate(program.apply("roll")).seconds


def test_literals_and_parameters_distinguish_kernels():
    def scaled(*factors):
        return jaxprtool.trace(lambda x: [jnp.sort(x) * f + 1 for f in factors], jnp.ones(4))

    assert compile_estimate(scaled(2, 2)).different < compile_estimate(scaled(2, 3)).different


def test_symbolic_sizes_have_no_estimate():
    (n,) = jax.export.symbolic_shape("n")
    program = jaxprtool.trace(jnp.sin, jax.ShapeDtypeStruct((n,), jnp.float32))
    assert compile_estimate(program) is None


@pytest.mark.proof
def test_the_kernels_are_those_that_xla_compiles():
    program = recurrence(12)
    arguments = [jnp.ones(aval.shape) for aval in program.in_avals]
    profile = compile_profile(program, arguments, None, 0.0)
    compiled = sum(body.kernels for body in profile.bodies)
    assert compiled == pytest.approx(compile_estimate(program).different, rel=0.3)


def test_random_bits_count_where_they_are_slow_to_compile(monkeypatch):
    def noisy(key, x):
        return jnp.sin(x @ x) + jax.random.normal(key, x.shape)

    program = jaxprtool.trace(noisy, jax.random.key(0), jnp.ones((4, 4)))
    monkeypatch.setattr(jaxcompat, "compiles_draws_slowly", lambda: False)
    fast = compile_estimate(program).seconds
    monkeypatch.setattr(jaxcompat, "compiles_draws_slowly", lambda: True)
    assert compile_estimate(program).seconds == pytest.approx(fast + DRAW)


def elementwise(count):
    """Return the gradient of a long elementwise chain without a product."""

    def loss(x):
        for _ in range(count):
            x = jnp.sin(x) * x + 1
        return x.sum()

    return jaxprtool.trace(jax.grad(loss), jax.ShapeDtypeStruct((4,), jnp.float32))


def unrolled(unroll):
    """Return a loop of products, with the option `unroll`."""

    def loss(w, x):
        return jax.lax.fori_loop(0, 9, lambda i, x: jnp.tanh(x @ w), x, unroll=unroll)

    matrix = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    return jaxprtool.trace(loss, matrix, matrix)


def test_there_is_a_time_only_for_kinds_of_programs_that_were_compared_with_xla():
    for program in (layers(4), recurrence(5), unrolled(1)):
        assert compile_estimate(program).seconds is not None
    for program in (elementwise(20), unrolled(4)):
        estimate = compile_estimate(program)
        assert estimate.seconds is None and estimate.kernels > 0


def test_outer_products_are_no_products_and_each_product_with_a_vector_is_compiled():
    def outer(x):
        for _ in range(5):
            x = jnp.einsum("i,j->ij", x, x).sum(0)
        return x

    vector = jax.ShapeDtypeStruct((8,), jnp.float32)
    assert compile_estimate(jaxprtool.trace(outer, vector)).seconds is None
    few, many = (compile_estimate(recurrence(steps)) for steps in (5, 10))
    kernels = many.different - few.different
    assert many.seconds - few.seconds >= 5 * VECTOR + kernels * KERNEL


def test_a_program_made_by_a_pass_is_of_the_kind_of_its_origin():
    program, other = layers(4), elementwise(20)
    assert compile_estimate(other, compile_estimate(program)).seconds is not None
    assert compile_estimate(program, compile_estimate(other)).seconds is None
