"""temporary_memory estimates XLA's report on a compiled program."""

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.commands.memory.estimate import temporary_memory
from jaxprtool.jaxcompat.mapping import evaluated
from tests.programs.samples import sample_files, sample_programs

SIZE = 4 * 256 * 256
X = jnp.full((256, 256), 0.5)


def estimated(function, *args):
    return temporary_memory(jaxprtool.trace(function, *args))


def measured(program, *args):
    def run(*args):
        return evaluated(program.jaxpr, args)

    compiled = jax.jit(run).lower(*jax.tree.leaves(args)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def model(params, x):
    for w, v, scale in params:
        y = x - x.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5) * scale
        x = x + jax.nn.gelu(y @ w) @ v
    return (x**2).sum()


PARAMS = [(jnp.ones((64, 128)), jnp.ones((128, 64)), jnp.ones(64))] * 6


def test_fused_values_need_no_memory():
    assert estimated(lambda x: jnp.tanh(x) * 2 + x.T, X) == 0
    assert estimated(lambda x: x @ x, X) == 0


def test_operands_of_products_are_written():
    assert estimated(lambda x: jnp.sin(x) @ jnp.cos(x), X) == 2 * SIZE
    assert estimated(lambda x: x.reshape(256, 256) @ x.T, X) == 0


def test_values_read_by_several_kernels_are_recomputed_unless_expensive():
    assert estimated(lambda x: (x + 1, x * 2), X) == 0

    def shared(f):
        def function(x):
            y = f(x)
            return y + 1, y + 2

        return function

    assert estimated(shared(lambda x: x * x), X) == 0
    assert estimated(lambda x: tuple(y[:1] for y in shared(jnp.exp)(x)), X) == SIZE


def test_a_value_uses_the_buffer_of_a_later_result():
    def function(x):
        return jnp.sin(x) @ x @ x

    assert estimated(function, X) == SIZE
    assert estimated(lambda x: function(x)[:1], X) == 2 * SIZE


def test_an_elementwise_result_reuses_its_operand():
    assert estimated(lambda x: jnp.sin(x @ x), X) == 0
    assert estimated(lambda x: (jnp.exp(x) + 1, jnp.exp(x) + 2), X) == 0


def test_a_loop_needs_the_memory_of_its_body_and_a_branch_that_of_its_largest():
    def body(x, _):
        return jnp.sin(x) @ x, None

    looped = estimated(lambda x: jax.lax.scan(body, x, length=3)[0], X)
    assert looped == 2 * SIZE
    branches = [lambda x: x + 1, lambda x: jnp.sin(x) @ x]
    index = 4  # bytes, as in XLA's index, which is clamped
    assert estimated(lambda i, x: jax.lax.switch(i, branches, x), 0, X) == SIZE + index


@pytest.mark.proof
def test_a_gradient_as_traced_and_outlined_agrees_with_xla():
    program = jaxprtool.trace(jax.value_and_grad(model), PARAMS, jnp.ones((512, 64)))
    outlined = program.apply("outline")
    assert outlined is not program
    for each in (program, outlined):
        size = measured(each, PARAMS, jnp.ones((512, 64)))
        assert temporary_memory(each) == pytest.approx(size, rel=0.1)


def test_symbolic_sizes_and_exponentially_nested_calls_are_not_estimated():
    (n,) = jax.export.symbolic_shape("n")
    assert estimated(jnp.sin, jax.ShapeDtypeStruct((n,), jnp.float32)) is None

    def doubled(f):
        return jax.jit(lambda x: f(x) + f(x * 2))

    f = jax.jit(jnp.sin)
    for _ in range(40):
        f = doubled(f)
    assert estimated(f, 1.0) is None


@pytest.mark.sweep
@pytest.mark.parametrize("file", sample_files())
def test_samples_are_estimated(file):
    for case in sample_programs(file):
        found = temporary_memory(case.program())
        assert found is not None and found >= 0, case.name


def test_drawing_random_bits_needs_three_additional_arrays():
    def drawn(key):
        return jax.random.bits(key, (256, 256)).sum()

    key = jax.random.key(0)
    found = temporary_memory(jaxprtool.trace(drawn, key))
    expected = jax.jit(drawn).lower(key).compile().memory_analysis().temp_size_in_bytes
    assert found == 4 * SIZE == pytest.approx(expected, rel=0.01)


def test_the_initial_carry_of_a_loop_is_reused():
    def body(x, _):
        return x + 1, None

    def function(x):
        return (jax.lax.scan(body, x @ x, length=3)[0] @ x)[:1]

    assert estimated(function, X) == 2 * SIZE  # the last carry, and the product
