"""The compiler of a TPU takes the block sizes that fit, and says why if it does not."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import jaxprtool
from tests.commands.kernels.test_block_sizes import added, by_heads, matmul, normed

pytest.importorskip("libtpu", reason="needs the package libtpu")


def report(fun, *types):
    program = jaxprtool.trace(fun, *types)
    (row,) = jaxprtool.kernels(program, fit=True, backend="tpu:v5e:2x2").kernels
    return row


def test_sizes_that_fit_are_compiled_and_a_kernel_that_does_not_has_the_words_of_mosaic():
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    row = report(lambda x, y: added(x, y, 2048), x, x)
    assert not row.fits and row.compiled.fits is False
    for words in ("size 48.00M and limit 16.00M", "exceeded scoped vmem limit by 32.00M"):
        assert words in row.compiled.message
    for choice in row.fit.choices[:5]:
        assert choice.compiled.fits and choice.compiled.message is None
        assert 0.9 * choice.compiled.bytes <= choice.vmem_bytes <= choice.compiled.bytes


def test_a_matmul_of_other_blocks_compiles_in_no_less_memory_than_counted():
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    row = report(matmul, x, x)
    assert row.compiled.fits
    for choice in row.fit.choices[:5]:
        assert choice.compiled.fits and choice.vmem_bytes <= choice.compiled.bytes


def test_whole_blocks_compile_in_parts():
    def softmax(x_ref, o_ref):
        e = jnp.exp(x_ref[...] - x_ref[...].max(1, keepdims=True))
        o_ref[...] = e / e.sum(1, keepdims=True)

    x = jax.ShapeDtypeStruct((4096, 2048), jnp.float32)
    row = report(lambda x: pl.pallas_call(softmax, out_shape=x)(x), x)
    assert row.compiled.fits is False
    # The model is no promise: values of the body may be in VMEM too.
    fitting = [choice.compiled.fits for choice in row.fit.choices[:5]]
    assert any(fitting)


def test_the_memory_is_that_of_the_kernel_and_not_of_copies_around_it():
    q = jax.ShapeDtypeStruct((2, 1024, 32), jnp.float32)
    row = report(by_heads, q, q)
    assert row.compiled.fits and all(c.compiled.bytes > 1 << 20 for c in row.fit.choices[:5])


def test_a_kernel_that_jax_cannot_lower_here_is_not_said_to_be_too_large():
    """JAX asks the machine for its TPU to lower a block of one axis."""
    x, scale = jax.ShapeDtypeStruct((64, 256), jnp.float32), jax.ShapeDtypeStruct((256,), "float32")
    row = report(normed, x, scale)
    assert row.compiled.fits is None and "Unsupported TPU device kind" in row.compiled.message
