"""The figures of a kernel are those of Mosaic and of counts by hand, and no bound is too high."""

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu
from jax.experimental.pallas.ops.tpu import flash_attention as fa
from jax.experimental.pallas.ops.tpu.matmul import matmul as tiled_matmul

import jaxprtool
from jaxprtool.analysis.grids import padded_bytes
from jaxprtool.commands.kernels.kernels import kernels
from jaxprtool.commands.kernels.table import kernel_notes, kernels_table, kernels_view
from jaxprtool.testing import assert_budget
from jaxprtool.testing.assertions import measure
from tests.programs.pallas_ops import CASES

F32, BF16, I8, I32 = jnp.float32, jnp.bfloat16, jnp.int8, jnp.int32
V5E = "tpu-v5e"


def typed(shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def doubled(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


def copied(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def on_blocks(kernel, shape, block, index, grid, dtype=F32, **options):
    """Return a function that calls a kernel with the same blocks of its operand and result."""
    spec = pl.BlockSpec(block, index)
    options = {"in_specs": [spec], "out_specs": spec} | options
    out = options.pop("out_shape", typed(shape, dtype))
    return lambda x: pl.pallas_call(kernel, out_shape=out, grid=grid, **options)(x), typed(
        shape, dtype
    )


def only_kernel(fun, *args, **options):
    (row,) = kernels(jaxprtool.trace(fun, *args), **options).kernels
    return row


def accumulated(x_ref, y_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=F32)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def matmul(x, y, dtype=BF16, rows=512, columns=512, depth=256, **options):
    (m, k), (_, n) = x.shape, y.shape
    return pl.pallas_call(
        accumulated,
        grid=(m // rows, n // columns, k // depth),
        in_specs=[
            pl.BlockSpec((rows, depth), lambda i, j, k: (i, k)),
            pl.BlockSpec((depth, columns), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((rows, columns), F32)],
        out_shape=typed((m, n), dtype),
        **options,
    )(x, y)


def test_a_matmul_has_the_figures_of_a_count_by_hand():
    types = typed((1024, 1024), BF16), typed((1024, 1024), BF16)
    row = only_kernel(matmul, *types, device=V5E)
    products = 2 * 1024**3
    # Each of the 16 steps adds; 4 of them have the cast of the accumulator.
    assert row.products == {"bf16": products}
    assert row.work.flops == row.least_flops == products + 16 * 512**2 + 4 * 512**2
    assert row.work.bytes_read == 2 * (2 * 1024**2 * 2)  # each operand is read twice
    assert row.work.bytes_written == 1024**2 * 2
    assert row.vmem_bytes == 2 * 2 * 512 * 256 * 2 + 2 * 512**2 * 2 + 512**2 * 4
    assert (row.calls, row.limit, row.fits) == (1, "matrix unit", True)
    assert row.seconds == pytest.approx(products / 197e12)


def test_flash_attention_counts_the_blocks_that_its_mask_leaves():
    q = typed((2, 8, 2048, 128), BF16)
    full = only_kernel(fa.flash_attention, q, q, q, device=V5E)
    causal = only_kernel(lambda *qkv: fa.flash_attention(*qkv, causal=True), q, q, q, device=V5E)
    flops = 4 * 2 * 8 * 2048**2 * 128  # 34.4 GFLOP
    assert full.products == {"bf16": flops}
    # 16 blocks of rows have 1 to 16 blocks of columns.
    assert causal.products == {"bf16": flops * 136 // 256}
    assert full.seconds >= flops / 197e12 and causal.seconds < full.seconds


# --- HBM and FLOPs by hand ------------------------------------------------------------------------

ROWS = (128, 512), lambda i: (i, 0), (8,)


def with_weights(x, w):
    spec = pl.BlockSpec(*ROWS[:2])
    specs = [spec, pl.BlockSpec((512, 512), lambda i: (0, 0))]

    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = x_ref[...] @ w_ref[...]

    return pl.pallas_call(kernel, grid=8, in_specs=specs, out_specs=spec, out_shape=x)(x, w)


def softmax(x_ref, o_ref):
    x = x_ref[...]
    e = jnp.exp(x - x.max(1, keepdims=True))
    o_ref[...] = e / e.sum(1, keepdims=True)


def summed(x_ref, o_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += x_ref[...]


def looped(x_ref, o_ref):
    def body(i, x):
        return x + x

    o_ref[...] = jax.lax.fori_loop(0, 3, body, x_ref[...])


def half(x_ref, o_ref):
    @pl.when(pl.program_id(0) < 4)
    def _():
        o_ref[...] = x_ref[...] * 2


def first_axis(x_ref, o_ref):
    @pl.when(pl.program_id(0) // 2 == pl.program_id(1) % 3)
    def _():
        o_ref[...] = x_ref[...] * 2


N = 1024 * 512
BY_HAND = [
    # kernel, FLOPs, bytes read, bytes written
    (on_blocks(doubled, (1024, 512), *ROWS), N, 4 * N, 4 * N),
    (on_blocks(softmax, (1024, 512), *ROWS), 4 * N - 2 * 1024, 4 * N, 4 * N),
    (on_blocks(looped, (1024, 512), *ROWS), 3 * N, 4 * N, 4 * N),
    (on_blocks(half, (1024, 512), *ROWS), N // 2, 4 * N, 4 * N),
    ((with_weights, typed((1024, 512)), typed((512, 512))), 2 * N * 512, 4 * N + 2**20, 4 * N),
    # A ragged end: 8 blocks of 128 rows for 1000, of which only 1000 are copied.
    (on_blocks(doubled, (1000, 512), *ROWS), N, 4 * 1000 * 512, 4 * 1000 * 512),
    # An output that stays: one block of 512 columns for all 8 steps.
    (
        on_blocks(
            *(summed, (512, 4096), (512, 512), lambda i: (0, i), (8,)),
            out_specs=pl.BlockSpec((512, 512), lambda i: (0, 0)),
            out_shape=typed((512, 512)),
        ),
        *(8 * 512**2, 4 * 512 * 4096, 4 * 512**2),
    ),
    # The inner axis does not move the block; the outer one does.
    (on_blocks(copied, (1024, 512), (128, 512), lambda i, j: (i, 0), (8, 5)), 0, 4 * N, 4 * N),
    # Each step has another block than the one before, although there are only eight.
    (on_blocks(copied, (1024, 512), (128, 512), lambda i, j: (j, 0), (5, 8)), 0, 20 * N, 20 * N),
    # There and back: the last block of a row is the first of the next.
    (
        on_blocks(
            *(copied, (1024, 512), (128, 512)),
            *(lambda i, j: (jnp.where(i % 2 == 0, j, 7 - j), 0), (2, 8)),
        ),
        *(0, 4 * N * 15 // 8, 4 * N * 15 // 8),
    ),
    (on_blocks(copied, (1024, 512), None, None, ()), 0, 4 * N, 4 * N),
    (
        on_blocks(doubled, (8, 256, 512), (None, 128, 512), lambda b, i: (b, i, 0), (8, 2), BF16),
        *(2 * N, 4 * N, 4 * N),
    ),
    (
        on_blocks(
            copied,
            *((1024, 512), (pl.Element(128), pl.Element(512)), lambda i: (i * 128, 0), (8,)),
        ),
        *(0, 4 * N, 4 * N),
    ),
    (
        on_blocks(copied, (1024, 512), (64, 512), lambda i: (i // 2, 0), (16,), I8),
        *(0, N // 2, N // 2),
    ),
    # Steps (i, j) with i // 2 == j % 3: 2 * 2 + 2 * 2 + 2 * 1 of 6 * 5.
    (
        on_blocks(first_axis, (768, 512), (128, 512), lambda i, j: (i, 0), (6, 5)),
        *(10 * 128 * 512, 4 * 768 * 512, 4 * 768 * 512),
    ),
    (
        (matmul, typed((256, 128)), typed((128, 192)), F32, 64, 64, 64),
        *(2 * 256 * 128 * 192 + 24 * 64**2, 2 * 24 * 64**2 * 4, 12 * 64**2 * 4),
    ),
]


@pytest.mark.parametrize("case", range(len(BY_HAND)))
def test_operations_and_copies_are_those_of_a_count_by_hand(case):
    (fun, *types), flops, read, written = BY_HAND[case]
    arrays, options = (
        [t for t in types if hasattr(t, "shape")],
        [t for t in types if not hasattr(t, "shape")],
    )
    row = only_kernel(lambda *args: fun(*args, *options), *arrays)
    assert row.work.flops == row.least_flops == flops
    assert (row.work.bytes_read, row.work.bytes_written) == (read, written)
    assert not row.uncounted and not row.per_round


# --- ranges ---------------------------------------------------------------------------------------


def test_what_depends_on_data_is_a_range_and_is_named():
    def kernel(order_ref, x_ref, o_ref):
        @pl.when(order_ref[0] > 0)
        def _():
            o_ref[...] = x_ref[...] * 2

    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(16,),
        in_specs=[pl.BlockSpec((128, 512), lambda i, order: (order[i], 0))],
        out_specs=pl.BlockSpec((128, 512), lambda i, order: (i, 0)),
    )

    def call(order, x):
        return pl.pallas_call(kernel, grid_spec=grid, out_shape=x)(order, x)

    row = only_kernel(call, typed((16,), I32), typed((2048, 512)), device=V5E)
    x, o = row.parts[:2]
    assert (x.fetches, x.most_fetches, o.fetches, o.most_fetches) == (1, 16, 16, None)
    assert (x.bytes, x.most_bytes) == (2**18, 2**22)
    assert (row.least_flops, row.work.flops) == (0, 2048 * 512)


def test_a_copy_that_the_kernel_starts_is_named():
    def kernel(x_ref, o_ref, buffer, semaphore):
        copy = pltpu.make_async_copy(x_ref.at[pl.ds(0, 8)], buffer, semaphore)
        copy.start()
        copy.wait()
        o_ref[...] = buffer[...]

    def call(x):
        return pl.pallas_call(
            kernel,
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            scratch_shapes=[pltpu.VMEM((8, 128), F32), pltpu.SemaphoreType.DMA],
            out_shape=typed((8, 128)),
        )(x)

    row = only_kernel(call, typed((64, 128)))
    assert row.uncounted == {"dma_start": 1} and row.is_at_least
    assert row.work.bytes_read == 0 and row.vmem_bytes == 2 * 8 * 128 * 4


def test_a_size_that_is_an_operand_is_named():
    def call(n, x):
        spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
        return pl.pallas_call(doubled, grid=(n,), in_specs=[spec], out_specs=spec, out_shape=x)(x)

    row = only_kernel(call, typed((), I32), typed((64, 128)), device=V5E)
    assert row.grid == (None,) and row.uncounted == {"grid": 1} and row.is_at_least
    assert (row.least_flops, row.parts[0].fetches) == (0, 1)


def test_a_kernel_of_another_primitive_is_named():
    mesh = pltpu.create_tensorcore_mesh("core", num_cores=1)

    def double(x):
        @pl.run_state
        def run(refs):
            @pl.core_map(mesh)
            def _():
                pltpu.sync_copy(*refs)

        return run((x, jnp.zeros_like(x)))[1]

    report = kernels(jaxprtool.trace(double, typed((8, 128))))
    ((primitive, count),) = report.uncounted.items()
    assert report.kernels == () and count == 1 and primitive.endswith("_map")
    assert kernels_table(report, 80).plain().splitlines() == [
        "double: no Pallas kernel",
        f"not counted: {primitive} (1 equation)",
    ]


def test_a_grid_of_too_many_steps_is_named():
    fun, x = on_blocks(doubled, (2**22, 128), (1, 128), lambda i: (i, 0), (2**22,))
    row = only_kernel(fun, x, device=V5E)
    assert row.uncounted == {"grid": 1} and row.least_flops == 2**22 * 128
    assert (row.parts[0].fetches, row.parts[0].most_fetches) == (1, 2**22)


def test_loops_around_a_kernel_and_equal_kernels_on_a_line_are_calls():
    fun, x = on_blocks(doubled, (64, 128), (8, 128), lambda i: (i, 0), (8,))

    def step(x):
        x = jax.lax.fori_loop(0, 5, lambda i, x: fun(x), x)
        for _ in range(3):
            x = fun(x)
        return jax.lax.while_loop(lambda x: x.sum() < 9, fun, x)

    report = kernels(jaxprtool.trace(step, x))
    assert [(row.calls, row.per_round) for row in report.kernels] == [(9, True)]
    assert report.hbm_bytes == 9 * 2 * 64 * 128 * 4


def test_a_symbolic_number_of_calls_has_a_symbolic_total():
    fun, x = on_blocks(doubled, (64, 128), (8, 128), lambda i: (i, 0), (8,))
    (length,) = jax.export.symbolic_shape("n")

    def step(xs, x):
        return jax.lax.scan(lambda x, _: (fun(x), None), x, xs)[0]

    report = kernels(jaxprtool.trace(step, typed((length,)), x), V5E)
    assert str(report.kernels[0].calls) == "n" and report.vmem_bytes == 4 * 8 * 128 * 4
    assert str(report.hbm_bytes) == f"{2 * 64 * 128 * 4}*n"


def test_a_gpu_has_no_order_of_steps_and_no_vmem():
    fun, x = on_blocks(
        *(copied, (1024, 512), (128, 512), lambda i, j: (j, 0), (5, 8)),
        compiler_params=plgpu.CompilerParams(num_warps=4),
    )
    row = only_kernel(fun, x, device="h100")
    assert row.vmem_bytes is None and row.vmem_limit is None and row.fits is None
    assert (row.parts[0].fetches, row.parts[0].most_fetches) == (8, 40)
    assert row.work.bytes_read == 4 * 1024 * 512


def test_the_shared_memory_of_a_gpu_kernel_is_that_of_its_scratch_or_not_known():
    def copied_by(params, space):
        spec = pl.BlockSpec((128, 512), lambda i: (i, 0))

        def kernel(x_ref, o_ref, buffer, other):
            o_ref[...] = x_ref[...]

        scratch = [space((128, 64), BF16), space((32, 128), F32)] if space else []
        body = kernel if space else copied
        options = {"grid": 8, "in_specs": [spec], "out_specs": spec, "scratch_shapes": scratch}
        return lambda x: pl.pallas_call(body, x, compiler_params=params, **options)(x)

    x = typed((1024, 512))
    row = only_kernel(copied_by(mgpu.CompilerParams(), mgpu.SMEM), x, device="h100")
    assert (row.shared_bytes, row.shared_limit) == (2 * 128 * 64 + 4 * 32 * 128, 227 << 10)
    assert "scratch: at least 32.0 KiB of shared memory, of the limit of 227.0 KiB" in list(
        kernel_notes(row)
    )
    triton = only_kernel(copied_by(plgpu.CompilerParams(num_warps=4), None), x, device="h100")
    assert triton.shared_bytes is None and triton.backend == "triton"
    assert "shared memory: not known, Triton's compiler assigns it" in list(kernel_notes(triton))


def test_the_shared_memory_of_a_kernel_on_a_mesh_is_that_of_its_scopes():
    case = CASES["gpu.hopper_matmul"]()
    with case.context():
        report = kernels(jaxprtool.trace(case.function, *case.args), "h100")
    (kernel,) = report.others
    # Four steps in flight have a tile of each operand; two warpgroups have two tiles of the result.
    tiles = 4 * (2 * 128 * 64 + 64 * 128) * 2
    assert kernel.shared_bytes == tiles + 2 * 2 * 64 * 64 * 2
    assert kernel.shared_limit == 227 << 10
    assert "of shared memory" in kernels_table(report, 160).plain()


def test_an_array_that_may_be_in_vmem_counts_once_in_the_bound():
    """XLA may keep an array of 64 MiB in the vector memory of a v5e, so that no step copies it."""
    grid = (5, 8)
    for rows, copies in ((1024, 1), (2**17, 5)):
        block, size = (rows // 8, 512), rows * 512 * 4
        fun, x = on_blocks(copied, (rows, 512), block, lambda i, j: (j, 0), grid)
        row = only_kernel(fun, x, device=V5E)
        assert row.work.bytes == 2 * 5 * size
        assert row.seconds == pytest.approx(2 * copies * size / 819e9)
        assert row.fits == (rows == 1024)


def test_cost_has_the_operations_of_the_lines_of_a_kernel():
    x = typed((1024, 1024), BF16)
    total = jaxprtool.cost(jaxprtool.trace(matmul, x, x)).total
    assert total.work == only_kernel(matmul, x, x).work._replace(
        bytes_read=2 * 2**21, bytes_written=2**21
    )
    by = jaxprtool.cost(jaxprtool.trace(matmul, x, x)).groups
    assert [group.work.flops for group in by if group.products] == [2 * 1024**3 + 16 * 512**2]
    estimate = pl.CostEstimate(flops=7, transcendentals=0, bytes_accessed=5)
    tuned = jaxprtool.trace(lambda x, y: matmul(x, y, cost_estimate=estimate), x, x)
    assert jaxprtool.cost(tuned).total.work == total.work


def test_memory_and_budgets_have_the_same_figures():
    x = typed((1024, 1024), BF16)
    program = jaxprtool.trace(lambda x, y: matmul(jnp.tanh(x), y), x, x)
    row = only_kernel(matmul, x, x)
    assert jaxprtool.memory(program).vmem_bytes == row.vmem_bytes
    assert jaxprtool.memory(jaxprtool.trace(jnp.tanh, x)).vmem_bytes == 0
    measured = measure(program, ["vmem_bytes", "hbm_bytes"])
    assert measured["vmem_bytes"].amount == row.vmem_bytes
    assert measured["hbm_bytes"].amount == row.work.bytes
    assert_budget(program, vmem_bytes=row.vmem_bytes, hbm_bytes=row.work.bytes)
    with pytest.raises(AssertionError, match=r"takes 3\.0 MiB of vector memory, but the budget is"):
        assert_budget(program, vmem_bytes="2MiB")


def test_a_page_has_a_view_of_kernels():
    x = typed((1024, 1024), BF16)
    view = kernels_view([kernels(jaxprtool.trace(matmul, x, x))])
    assert [len(table.rows) for table in view.tables] == [1, 4]
    assert view.facts == ["accumulated: 2.1 GFLOP of bf16 products, reads 8.0 MiB, writes 2.0 MiB"]


def test_a_shipped_matmul_is_counted_through_its_jit():
    types = typed((1024, 1024), BF16), typed((1024, 1024), BF16)
    row = only_kernel(lambda x, y: tiled_matmul(x, y, block_shape=(512, 512), block_k=256), *types)
    assert row.products == {"bf16": 2 * 1024**3} and row.name == "matmul_kernel"


# --- VMEM -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [
        ((256, 512), F32, 256 * 512 * 4),
        ((1, 512), F32, 512 * 4),  # the layouts of XLA's custom call, such as T(4,128)(2,1)
        ((3, 100), F32, 4 * 128 * 4),
        ((3, 100), BF16, 4 * 128 * 2),
        ((5, 100), I8, 8 * 128),
        ((16, 3, 100), F32, 16 * 4 * 128 * 4),
        ((8, 1, 1024), F32, 8 * 1024 * 4),
        ((100,), F32, 512),
        ((), F32, 4),
    ],
)
def test_arrays_are_padded_to_tiles(shape, dtype, size):
    assert padded_bytes(shape, jnp.dtype(dtype)) == size


# Below are the least `vmem_limit_bytes` with which libtpu 0.0.52 compiles a kernel for a v5e, and
# for a v6e. It needs some bytes besides the blocks; more if values do not fit in registers.


def added(x, y):
    spec = pl.BlockSpec((512, 512), lambda i, j: (i, j))

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    specs = [spec, spec]
    return pl.pallas_call(kernel, grid=(2, 2), in_specs=specs, out_specs=spec, out_shape=x)(x, y)


def with_scratch(kernel, *shapes):
    spec = pl.BlockSpec((256, 512), lambda i: (i, 0))
    options = {"grid": 8, "in_specs": [spec], "out_specs": spec, "scratch_shapes": shapes}
    return lambda x: pl.pallas_call(kernel, out_shape=x, **options)(x), typed((2048, 512))


def by_rows(x_ref, o_ref, rows_ref):
    rows_ref[...] = x_ref[...]

    def body(i, _):
        o_ref[pl.ds(i * 8, 8)] = rows_ref[pl.ds(i * 8, 8)]

    jax.lax.fori_loop(0, 32, body, None)


def first_rows(x_ref, o_ref, rows_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        rows_ref[...] = x_ref[...]

    o_ref[...] = rows_ref[...]


def in_registers(x_ref, o_ref, a_ref, b_ref, column_ref):
    a_ref[...] = x_ref[...]
    b_ref[...] = x_ref[:8, :128]
    column_ref[...] = x_ref[:, :1]
    o_ref[...] = a_ref[...] + column_ref[...]


def started(x_ref, o_ref, buffer, semaphore):
    part = x_ref.at[pl.ds(pl.program_id(0) * 256, 256)]
    copy = pltpu.make_async_copy(part, buffer, semaphore)
    copy.start()
    copy.wait()
    o_ref[...] = buffer[...] * 2


def from_any(x):
    return pl.pallas_call(
        started,
        grid=8,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec((256, 512), lambda i: (i, 0)),
        scratch_shapes=[pltpu.VMEM((256, 512), F32), pltpu.SemaphoreType.DMA],
        out_shape=x,
    )(x)


def products(x, y):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jax.lax.dot_general(
            x_ref[...], y_ref[...], (((1,), (1,)), ((), ())), preferred_element_type=F32
        )

    return pl.pallas_call(
        kernel,
        grid=(2, 4, 4),
        in_specs=[
            pl.BlockSpec((None, 256, 128), lambda b, i, j: (b, i, 0)),
            pl.BlockSpec((None, 256, 128), lambda b, i, j: (b, j, 0)),
        ],
        out_specs=pl.BlockSpec((None, 256, 256), lambda b, i, j: (b, i, j)),
        out_shape=typed((2, 1024, 1024)),
    )(x, y)


def first_axis_only(i):
    return i, 0


BF1024 = typed((1024, 1024), BF16)
Q = typed((2, 8, 2048, 128), BF16)
ROW_BLOCKS = (2048, 512), (256, 512), first_axis_only, (8,)
MOSAIC = {
    "whole": (on_blocks(doubled, (512, 1024), None, None, ()), 4194315, 4194315),
    "vector": (on_blocks(doubled, (4096,), (1024,), lambda i: (i,), (4,)), 16393, 16393),
    "vector bf16": (
        on_blocks(doubled, (65536,), (2048,), lambda i: (i,), (32,), BF16),
        *(16393, 16393),
    ),
    "ragged vector": (
        on_blocks(doubled, (300000,), (1024,), lambda i: (i,), (293,)),
        *(16393, 16393),
    ),
    "squeezed": (
        on_blocks(doubled, (8, 256, 128), (None, 256, 128), lambda i: (i, 0, 0), (8,), BF16),
        *(262155, 262155),
    ),
    "i8": (on_blocks(copied, (2048, 512), (512, 512), first_axis_only, (4,), I8), 1048587, 1048587),
    "i8 padded": (
        on_blocks(copied, (4096, 1000), (200, 1000), first_axis_only, (21,), I8),
        *(819208, 819208),
    ),
    "f8": (
        on_blocks(*(copied, (4096, 1024), (256, 1024), first_axis_only, (16,), jnp.float8_e4m3fn)),
        *(1048587, 1048587),
    ),
    "4 axes": (
        on_blocks(
            *(copied, (4, 4, 128, 128), (1, 1, 128, 128), lambda i, j: (i, j, 0, 0), (4, 4), BF16)
        ),
        *(131084, 131084),
    ),
    "3 axes": (
        on_blocks(copied, (64, 8, 128), (16, 8, 128), lambda i: (i, 0, 0), (4,)),
        *(262155, 262155),
    ),
    "a row of one": (
        on_blocks(copied, (4096, 1, 1024), (8, 1, 1024), lambda i: (i, 0, 0), (512,)),
        *(131084, 131084),
    ),
    "one step": (
        on_blocks(doubled, (256, 512), (256, 512), first_axis_only, (1,)),
        1048587,
        1048587,
    ),
    "an axis of one": (
        on_blocks(copied, (4096, 512), (512, 512), lambda i, j: (j, i), (1, 8)),
        *(4194315, 4194315),
    ),
    "a batch of one": (
        on_blocks(copied, (1, 4096, 512), (1, 512, 512), lambda i, j: (i, j, 0), (1, 8)),
        *(4194315, 4194315),
    ),
    "one block": (
        on_blocks(copied, (512, 512), (512, 512), lambda i, j: (i, 0), (1, 8)),
        *(2097163, 2097163),
    ),
    "times 0": (
        on_blocks(copied, (512, 512), (512, 512), lambda i: (i * 0, 0), (8,)),
        *(2097163, 2097163),
    ),
    "elements": (
        on_blocks(
            *(copied, (4096, 1024), (pl.Element(256), pl.Element(1024))),
            *(lambda i: (i * 256, 0), (16,)),
        ),
        *(4194315, 4194315),
    ),
    "small": (on_blocks(copied, (2048, 512), (8, 128), first_axis_only, (8,)), 16393, 16393),
    "one buffer": (
        on_blocks(
            *(doubled, *ROW_BLOCKS),
            in_specs=[pl.BlockSpec((256, 512), first_axis_only, pipeline_mode=pl.Buffered(1))],
        ),
        *(1572872, 1572872),
    ),
    "aliased": (on_blocks(doubled, *ROW_BLOCKS, input_output_aliases={0: 0}), 2097163, 2097163),
    "transposed": (
        on_blocks(
            *(lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...].T), (1024, 1024), (256, 256)),
            *(lambda i, j: (i, j), (4, 4)),
            out_specs=pl.BlockSpec((256, 256), lambda i, j: (j, i)),
        ),
        *(1048587, 1048587),
    ),
    "a sum": (
        on_blocks(
            *(summed, (512, 4096), (512, 512), lambda i: (0, i), (8,)),
            out_specs=pl.BlockSpec((512, 512), lambda i: (0, 0)),
            out_shape=typed((512, 512)),
        ),
        *(3145736, 3145736),
    ),
    "added": ((added, typed((1024, 1024)), typed((1024, 1024))), 6291464, 6291464),
    "weights": ((with_weights, typed((1024, 512)), typed((512, 512))), 2146312, 2138122),
    "matmul": ((matmul, BF1024, BF1024), 3227656, 3145736),
    "products": (
        (products, typed((2, 1024, 128), BF16), typed((2, 1024, 128), BF16)),
        *(786440, 786440),
    ),
    "rows in a loop": (with_scratch(by_rows, pltpu.VMEM((256, 512), F32)), 2621454, 2621454),
    "rows in a branch": (with_scratch(first_rows, pltpu.VMEM((256, 512), F32)), 2621454, 2621454),
    "in registers": (
        with_scratch(
            in_registers,
            *(pltpu.VMEM(shape, F32) for shape in ((256, 512), (8, 128), (256, 1))),
        ),
        *(2228227, 2228227),
    ),
    "from HBM": ((from_any, typed((2048, 512))), 1572872, 1572872),
    "flash attention": (
        (lambda *qkv: fa.flash_attention(*qkv, causal=True), Q, Q, Q),
        *(458762, 458762),
    ),
    "shipped matmul": (
        (
            lambda x, y: tiled_matmul(x, y, block_shape=(512, 512), block_k=256),
            *(BF1024, BF1024),
        ),
        *(3231748, 3145736),
    ),
}


@pytest.mark.parametrize("name", MOSAIC)
def test_vector_memory_is_at_most_that_of_mosaic_and_nearly_all_of_it(name):
    (fun, *types), *mosaic = MOSAIC[name]
    size = only_kernel(fun, *types).vmem_bytes
    assert all(0.9 * needed <= size <= needed for needed in mosaic)
