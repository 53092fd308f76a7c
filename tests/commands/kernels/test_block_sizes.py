"""A kernel with other block sizes computes the same, and a size that would change it is refused."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention as fa

import jaxprtool
from jaxprtool.analysis.grids import GridSteps
from jaxprtool.commands.kernels.block_sizes import BlockSizes, alone
from jaxprtool.ir.equations import equations
from jaxprtool.ir.kernel_calls import kernel_call
from jaxprtool.ir.program import type_check
from tests.share import first_and_proofs

F32, BF16 = jnp.float32, jnp.bfloat16


def kernels_in(fun, *args):
    program = jaxprtool.trace(fun, *args)
    return [kernel for eqn in equations(program.jaxpr) if (kernel := kernel_call(eqn))]


def sizes_of(fun, *args):
    (kernel,) = kernels_in(fun, *args)
    return BlockSizes(GridSteps(kernel, in_order=True))


def run(eqn, *args):
    """Run a kernel in interpret mode."""
    params = {**eqn.params, "interpret": True}
    return jax.jit(lambda *args: eqn.primitive.bind(*args, **params))(*args)


def normal(*shape, dtype=F32, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, dtype)


def blocks(block, index):
    return pl.BlockSpec(block, index)


def on_rows(kernel, rows=16, columns=256, shape=(64, 256), **options):
    spec = blocks((rows, columns), lambda i: (i, 0))
    options = {"in_specs": [spec], "out_specs": spec, "grid": shape[0] // rows} | options

    def call(x):
        return pl.pallas_call(kernel, out_shape=x, **options)(x)

    return call, normal(*shape)


def softmax(x_ref, o_ref):
    x = x_ref[...]
    e = jnp.exp(x - x.max(1, keepdims=True))
    o_ref[...] = e / e.sum(1, keepdims=True)


def norm(x_ref, scale_ref, o_ref):
    x = x_ref[...].astype(F32)
    o_ref[...] = (x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)) * scale_ref[...][None]


def accumulate(x_ref, y_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=F32)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def matmul(x, y, kernel=accumulate, scratch=True):
    (m, k), (_, n) = x.shape, y.shape
    return pl.pallas_call(
        kernel,
        grid=(m // 64, n // 128, k // 128),
        in_specs=[
            blocks((64, 128), lambda i, j, k: (i, k)),
            blocks((128, 128), lambda i, j, k: (k, j)),
        ],
        out_specs=blocks((64, 128), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((64, 128), F32)] * scratch,
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
    )(x, y)


def accumulate_in_output(x_ref, y_ref, o_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        o_ref[...] = jnp.full_like(o_ref, 3)

    o_ref[...] += 2 * (x_ref[...] @ y_ref[...])


def total(x_ref, o_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += x_ref[...].sum(0, keepdims=True)


def total_of(x):
    return pl.pallas_call(
        total,
        grid=4,
        in_specs=[blocks((16, 256), lambda i: (i, 0))],
        out_specs=blocks((1, 256), lambda i: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((1, 256), x.dtype),
    )(x)


def by_heads(q, k):
    """Products of two operands with a squeezed axis, one of them transposed."""

    def kernel(q_ref, k_ref, o_ref):
        o_ref[...] = jax.lax.dot_general(q_ref[...], k_ref[...], (((1,), (1,)), ((), ())))

    heads, rows, _ = q.shape
    return pl.pallas_call(
        kernel,
        grid=(heads, rows // 64, rows // 128),
        in_specs=[
            blocks((None, 64, 32), lambda h, i, j: (h, i, 0)),
            blocks((None, 128, 32), lambda h, i, j: (h, j, 0)),
        ],
        out_specs=blocks((None, 64, 128), lambda h, i, j: (h, i, j)),
        out_shape=jax.ShapeDtypeStruct((heads, rows, rows), q.dtype),
    )(q, k)


def normed(x, scale):
    return pl.pallas_call(
        norm,
        grid=4,
        in_specs=[blocks((16, 256), lambda i: (i, 0)), blocks((256,), lambda i: (0,))],
        out_specs=blocks((16, 256), lambda i: (i, 0)),
        out_shape=x,
    )(x, scale)


def attend(q, k, v):
    sizes = fa.BlockSizes(block_q=128, block_k_major=128, block_k=128, block_b=1)
    return fa.flash_attention(q, k, v, block_sizes=sizes)


def gated(x_ref, o_ref):
    """Call a function with a derivative of its own, and one under jax.jit."""
    o_ref[...] = jax.nn.silu(x_ref[...]) * jax.jit(jax.nn.gelu)(x_ref[...])


def looped(x_ref, o_ref, buffer_ref):
    buffer_ref[...] = jnp.concatenate([x_ref[:, 128:], x_ref[:, :128]], 1)

    def body(_, x):
        return jnp.sin(x) + buffer_ref[...]

    o_ref[...] = jax.lax.fori_loop(0, 3, body, x_ref[...])


TWO = normal(256, 256), normal(256, 256, seed=1)
#: Functions with one kernel, and whether it has axes along which it sums.
RESIZED = {
    "rows": (*on_rows(softmax), {"i"}),
    "matmul": (matmul, *TWO, {"i", "j", "k"}),
    "matmul in bf16": (matmul, *(x.astype(BF16) for x in TWO), {"i", "j", "k"}),
    "matmul in the output": (
        lambda x, y: matmul(x, y, accumulate_in_output, False),
        *TWO,
        {"i", "j", "k"},
    ),
    "total": (total_of, normal(64, 256), {"i", "n"}),
    "by heads": (by_heads, normal(2, 256, 32), normal(2, 256, 32, seed=1), {"j", "k"}),
    "norm": (normed, normal(64, 256), normal(256), {"i"}),
    "loop": (
        *on_rows(looped, scratch_shapes=[pltpu.VMEM((16, 256), F32)]),
        {"i"},
    ),
    "calls": (*on_rows(gated), {"i", "n"}),
    "whole": (
        lambda x: pl.pallas_call(softmax, out_shape=x)(x),
        normal(64, 256),
        {"n"},
    ),
    "whole, of two axes": (
        lambda x: pl.pallas_call(
            lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...].T), out_shape=x
        )(x),
        normal(256, 256),
        {"n", "m"},
    ),
    "attention": (attend, *(normal(1, 2, 256, 128, seed=i) for i in range(3)), {"k"}),
}


@pytest.mark.parametrize("name", first_and_proofs(list(RESIZED)))
def test_a_kernel_with_other_blocks_computes_the_same(name):
    function, *args, names = RESIZED[name]
    sizes = sizes_of(function, *args)
    assert {axis.name for axis in sizes.axes} == names
    before = run(sizes.kernel.eqn, *args)
    for pick in (min, max, lambda choices: choices[len(choices) // 2]):
        chosen = {i: pick(axis.choices) for i, axis in enumerate(sizes.axes)}
        eqn = sizes.resized(chosen)
        new = kernel_call(eqn)
        type_check(alone(eqn))
        steps = math.prod(axis.extent // chosen[i] for i, axis in enumerate(sizes.axes))
        fixed = {i for i, a in enumerate(sizes.kernel.grid)} - {a.grid_axis for a in sizes.axes}
        assert new.steps == steps * math.prod(sizes.kernel.grid[i].size for i in fixed)
        for was, now in zip(before, run(eqn, *args), strict=True):
            tolerance = 2e-2 if was.dtype == BF16 else 1e-4
            np.testing.assert_allclose(*(np.asarray(x, F32) for x in (was, now)), tolerance, 1e-4)
    assert sizes.resized({}).params["grid_mapping"] == sizes.kernel.eqn.params["grid_mapping"]


# --- sizes that would change the kernel -----------------------------------------------------------


def masked(x_ref, o_ref):
    rows = jax.lax.broadcasted_iota(jnp.int32, x_ref.shape, 0)
    o_ref[...] = jnp.where(rows < 3, x_ref[...], 0)


def by_step(x_ref, o_ref):
    o_ref[...] = x_ref[...] + pl.program_id(0)


def carried(x_ref, o_ref, last_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        last_ref[...] = jnp.zeros_like(last_ref)

    o_ref[...] = x_ref[...] + last_ref[...]
    last_ref[...] = x_ref[...]


def uninitialized(x_ref, o_ref, last_ref):
    o_ref[...] = x_ref[...] + last_ref[...]
    last_ref[...] = x_ref[...]


def summed(x_ref, o_ref):
    o_ref[...] = x_ref[...] - x_ref[...].sum(0, keepdims=True)


def first_row(x_ref, o_ref):
    o_ref[...] = x_ref[...] * x_ref[0]


def flattened(x_ref, o_ref):
    o_ref[...] = x_ref[...].reshape(-1)[::-1].reshape(x_ref.shape)


def printed(x_ref, o_ref):
    pl.debug_print("{}", x_ref[0, 0])
    o_ref[...] = x_ref[...]


def squared_dot(x_ref, y_ref, o_ref, acc_ref):
    """Add a function of the product that is not linear."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.square(x_ref[...] @ y_ref[...])

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...]


def biased_dot(x_ref, y_ref, o_ref, acc_ref):
    """Add one in every step."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += x_ref[...] @ y_ref[...] + 1.0

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...]


def decayed_dot(x_ref, y_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] = 0.5 * acc_ref[...] + x_ref[...] @ y_ref[...]

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...]


def early_dot(x_ref, y_ref, o_ref, acc_ref):
    """Store the sum before it is complete."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    o_ref[...] = acc_ref[...]
    acc_ref[...] += x_ref[...] @ y_ref[...]


def scaled_dot(x_ref, y_ref, o_ref, acc_ref):
    """Scale the first step's product otherwise: another ref is read before it is set."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += (x_ref[...] * (1 + pl.program_id(2))) @ y_ref[...]

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...]


ROWS_BUFFER = {"scratch_shapes": [pltpu.VMEM((16, 256), F32)]}
FIXED = {
    "position": (*on_rows(masked), "i", "iota counts positions along it"),
    "step": (*on_rows(by_step), "i", "the body reads the step along it"),
    "carried": (*on_rows(carried, **ROWS_BUFFER), "i", "the body reads the step along it"),
    "uninitialized": (*on_rows(uninitialized, **ROWS_BUFFER), "i", "last_ref may carry values"),
    "sum": (*on_rows(summed), "i", "it sums along it"),
    "row": (*on_rows(first_row), "i", "a load or store has a part of it"),
    "flattened": (*on_rows(flattened), "i", "a reshape divides or joins it"),
    "print": (*on_rows(printed), "", "debug_print has effects or is unknown"),
    "index": (
        *on_rows(softmax, in_specs=[blocks((16, 256), lambda i: (3 - i, 0))]),
        *("i", "the index of x_ref is not i"),
    ),
    "steps": (*on_rows(softmax, grid=3), "i", "its 3 steps are not all blocks of 16 in 64"),
    **{
        kernel.__name__: (lambda x, y, kernel=kernel: matmul(x, y, kernel), *TWO, "k", reason)
        for kernel, reason in (
            (squared_dot, "the sum is not only accumulated"),
            (biased_dot, "the sum is not only accumulated"),
            (decayed_dot, "the sum is not only accumulated"),
            (early_dot, "other steps read or write the sum"),
            (scaled_dot, "the body reads the step along it"),
        )
    },
}


@pytest.mark.parametrize("name", FIXED)
def test_a_size_that_would_change_the_kernel_is_fixed_and_says_why(name):
    function, *args, axis, reason = FIXED[name]
    sizes = sizes_of(function, *args)
    assert axis not in {found.name for found in sizes.axes}
    assert reason in {f.name: f.reason.text for f in sizes.fixed}[axis]


def test_a_grid_without_order_has_fixed_sizes():
    function, x = on_rows(softmax)
    (kernel,) = kernels_in(function, x)
    assert BlockSizes(GridSteps(kernel, in_order=False)).axes == []


# --- figures --------------------------------------------------------------------------------------


def added(x, y, size=512):
    spec = blocks((size, size), lambda i, j: (i, j))

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    grid, specs = (x.shape[0] // size, x.shape[1] // size), [spec, spec]
    return pl.pallas_call(kernel, grid=grid, in_specs=specs, out_specs=spec, out_shape=x)(x, y)


def test_other_blocks_fit_and_the_best_have_the_lowest_bound_and_the_fewest_steps():
    x = jax.ShapeDtypeStruct((4096, 4096), BF16)
    program = jaxprtool.trace(lambda x, y: added(x, y, 2048), x, x)
    (row,) = jaxprtool.kernels(program, "tpu-v5e", fit=True).kernels
    assert row.fits is False and row.fit.now.vmem_bytes == row.vmem_bytes == 48 << 20
    best = row.fit.choices[0]
    assert best.vmem_bytes == 12 << 20 and math.prod(best.grid) == 16
    assert all(choice.fits for choice in row.fit.choices)
    ranks = [(c.seconds, c.bytes, math.prod(c.grid)) for c in row.fit.choices]
    assert ranks == sorted(ranks) and row.fit.tried == 9 * 6 - 1
    (figures,) = [c for c in row.fit.choices if c.sizes == (512, 512)]
    smaller = jaxprtool.trace(lambda x, y: added(x, y, 512), x, x)
    (same,) = jaxprtool.kernels(smaller, "tpu-v5e").kernels
    assert (figures.vmem_bytes, figures.bytes) == (same.vmem_bytes, same.work.bytes)
    assert (figures.seconds, figures.grid) == (same.seconds, same.grid)


def test_a_new_axis_divides_whole_blocks():
    x = jax.ShapeDtypeStruct((4096, 2048), F32)
    program = jaxprtool.trace(lambda x: pl.pallas_call(softmax, out_shape=x)(x), x)
    (row,) = jaxprtool.kernels(program, "tpu-v5e", fit=True).kernels
    (axis,) = row.fit.axes
    assert (axis.name, axis.is_new, row.fits) == ("n", True, False)
    assert row.fit.choices[0].sizes == (256,) and row.fit.choices[0].grid == (16,)
