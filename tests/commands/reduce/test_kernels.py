"""`reduce` makes the grids and blocks of kernels smaller, and the kernels stay valid."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention as fa

import jaxprtool
from jaxprtool.commands.reduce.kernels import ALL_STEPS
from jaxprtool.ir.equations import equations
from jaxprtool.ir.kernel_calls import kernel_call
from jaxprtool.ir.program import type_check
from jaxprtool.jaxcompat import open_jaxpr

F32 = jnp.float32
STEPS = {step.name: step for step in ALL_STEPS}


def kernel_of(program):
    return next(filter(None, map(kernel_call, equations(open_jaxpr(program.jaxpr)))), None)


def accumulated(x_ref, y_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += x_ref[...] @ y_ref[...]

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = jnp.sin(acc_ref[...])


def matmul(x, y):
    return pl.pallas_call(
        accumulated,
        grid=(2, 2, 4),
        in_specs=[
            pl.BlockSpec((16, 32), lambda i, j, k: (i, k)),
            pl.BlockSpec((32, 128), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((16, 128), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((16, 128), F32)],
        out_shape=jax.ShapeDtypeStruct((32, 256), F32),
        interpret=True,
    )(x, y)


X = np.random.default_rng(0).standard_normal((32, 128)).astype("float32")
Y = np.random.default_rng(1).standard_normal((128, 256)).astype("float32")


def test_a_kernel_becomes_one_step_of_small_blocks():
    program = jaxprtool.trace(lambda x, y: jnp.tanh(matmul(x + 1, y) * 2).sum(), X, Y)

    def has_sin(program):
        type_check(program)
        return "sin" in {eqn.primitive.name for eqn in equations(open_jaxpr(program.jaxpr))}

    found = jaxprtool.reduce(program, has_sin).program
    kernel = kernel_of(found)
    assert kernel.steps == 1 and all(set(block.sizes) <= {1, 2} for block in kernel.blocks)
    # Each step kept the kernel valid: it runs, and writes its result.
    arguments = [np.ones(aval.shape, aval.dtype) for aval in found.in_avals]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found(*arguments)))


@pytest.mark.parametrize("name", ["shrinking grids", "shrinking blocks"])
def test_a_smaller_kernel_computes_the_first_part(name):
    program = jaxprtool.trace(matmul, X, Y)
    step = STEPS[name]
    sites = step.sites(program)
    assert len(sites) >= 4
    for site in sites[::5]:  # each is compiled
        small = step.apply(program, [site]).program
        type_check(small, program)
        kernel = kernel_of(small)
        was = kernel_of(program)
        assert (
            kernel.steps < was.steps
            or kernel.blocks[0].sizes != was.blocks[0].sizes
            or (kernel.blocks[1].sizes != was.blocks[1].sizes)
        )
        (m, k), (_, n) = kernel.inputs[0].array.shape, kernel.inputs[1].array.shape
        expected = np.zeros((32, 256), "float32")
        expected[:m, :n] = np.sin(X[:m, :k] @ Y[:k, :n])
        np.testing.assert_allclose(small(X, Y), expected, atol=1e-4)


def test_a_kernel_that_would_leave_its_result_unwritten_stays():
    def third(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 2)
        def _():
            o_ref[...] = x_ref[...]

    def call(x):
        spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
        out = pl.BlockSpec((8, 128), lambda i: (0, 0))
        options = {"grid": 4, "in_specs": [spec], "out_specs": out, "interpret": True}
        return pl.pallas_call(third, jax.ShapeDtypeStruct((8, 128), F32), **options)(x)

    program, step = jaxprtool.trace(call, X), STEPS["shrinking grids"]
    assert [site.steps for site in step.sites(program)] == [1, 2]
    assert all(step.apply(program, [site]) is None for site in step.sites(program))


def test_a_size_that_the_body_needs_stays():
    q = jax.ShapeDtypeStruct((1, 2, 256, 128), F32)
    program = jaxprtool.trace(lambda *qkv: fa.flash_attention(*qkv, causal=True), q, q, q)
    for name in ("shrinking grids", "shrinking blocks"):
        for site in STEPS[name].sites(program):
            candidate = STEPS[name].apply(program, [site])
            if candidate is not None:
                type_check(candidate.program, program)
