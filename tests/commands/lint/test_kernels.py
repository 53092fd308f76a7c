"""The rules of kernels find each injected fault, and nothing in the kernels without one."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu
from jax.experimental.pallas.ops.tpu import flash_attention as fa
from jax.experimental.pallas.ops.tpu.matmul import matmul as tiled_matmul
from jax.experimental.pallas.ops.tpu.megablox.ops import gmm
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as splash_masks,
)

import jaxprtool

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


def typed(shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def codes(fun, *types):
    return sorted({f.code for f in jaxprtool.lint(jaxprtool.trace(fun, *types), select="JT9")})


def when(condition):
    """Run the body of a function only if a condition holds; always if it is True."""
    return (lambda fun: fun()) if condition is True else pl.when(condition)


# --- maps -----------------------------------------------------------------------------------------


def mapped(
    inputs=lambda i, j: (i, j),
    outputs=lambda i, j: (i, j),
    grid=(4, 2),
    writes=lambda i, j: True,
    semantics=None,
    out=(64, 256),
    block=(16, 128),
    aliases=None,
    params=None,
):
    """Return a kernel that doubles f32[64,256] in blocks of 16 x 128."""

    def kernel(x_ref, o_ref):
        @when(writes(pl.program_id(0), pl.program_id(1)))
        def _():
            o_ref[...] = x_ref[...] * 2

    if semantics is not None:
        params = pltpu.CompilerParams(dimension_semantics=semantics)
    options = {"compiler_params": params} if params else {}
    return lambda x: pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[pl.BlockSpec((16, 128), inputs)],
        out_specs=pl.BlockSpec(block, outputs),
        out_shape=typed(out),
        input_output_aliases=aliases or {},
        **options,
    )(x)


PARALLEL = ("parallel", "parallel")
TRITON = plgpu.CompilerParams(num_warps=4)


def rows(i, j):
    return i % 4, j


def columns(i, j):
    return j % 4, i


def turns(i, j):
    return i, j % 2


def pairs(i, j):
    return i, j // 2


MAPS = [
    ("", {}),
    ("", {"semantics": PARALLEL}),
    ("", {"grid": (4, 3), "inputs": pairs, "outputs": pairs}),
    ("", {"params": TRITON}),
    ("", {"writes": lambda i, j: (i + j) % 2 == 0, "aliases": {0: 0}}),
    # Blocks outside of the array.
    ("JT901", {"inputs": lambda i, j: (i, j + 1)}),
    ("JT901", {"inputs": lambda i, j: (i - 1, j)}),
    ("JT901", {"inputs": lambda i, j: (16 * i, j)}),  # elements for blocks
    ("JT901", {"grid": (5, 2), "out": (80, 256)}),
    ("JT901", {"inputs": lambda i, j: (j, i)}),
    ("JT901", {"inputs": lambda i, j: (jnp.where(i == 3, 7, i), j)}),
    # Output blocks that are left and written again.
    ("JT902", {"grid": (8, 2), "inputs": rows, "outputs": rows}),
    ("JT902", {"grid": (2, 8), "inputs": columns, "outputs": columns}),
    ("JT902", {"outputs": lambda i, j: (0, j), "out": (16, 256)}),
    ("JT902", {"outputs": lambda i, j: (i // 2 * 0, j), "out": (16, 256)}),
    ("JT902", {"grid": (4, 3), "inputs": turns, "outputs": turns}),
    # Blocks that no step writes.
    ("JT903", {"writes": lambda i, j: j == 0}),
    ("JT903", {"writes": lambda i, j: i < 3}),
    ("JT903", {"writes": lambda i, j: i + j > 0}),
    ("JT903", {"grid": (3, 2)}),
    ("JT903", {"outputs": lambda i, j: (i, j // 2)}),
    ("JT903", {"writes": lambda i, j: i == 4}),
    ("JT903", {"out": (80, 256)}),
    # Steps that may run at the same time, and write the same block.
    ("JT905", {"outputs": lambda i, j: (i, 0), "out": (64, 128), "semantics": PARALLEL}),
    ("JT905", {"outputs": lambda i, j: (i, j // 2), "out": (64, 128), "semantics": PARALLEL}),
    ("JT905", {"outputs": lambda i, j: (i, 0), "out": (64, 128), "params": TRITON}),
    ("JT905", {"outputs": lambda i, j: (0, j), "out": (16, 256), "params": TRITON}),
    ("JT905", {"outputs": lambda i, j: (0, 0), "out": (16, 128), "params": TRITON}),
]


@pytest.mark.parametrize("case", range(len(MAPS)))
def test_a_fault_in_a_map_is_found(case):
    code, options = MAPS[case]
    assert codes(mapped(**options), typed((64, 256))) == [code] * bool(code)


# --- accumulators ---------------------------------------------------------------------------------


def matmul(
    x,
    y,
    starts=lambda i, j, k: k == 0,
    adds=True,
    ends=lambda i, j, k: k == 3,
    narrow=F32,
    in_output=False,
    order=(0, 1, 2),
    depth=128,
    masked=False,
):
    """A tiled matmul; each option may inject a fault."""
    sizes = [x.shape[0] // 64, y.shape[1] // 128, pl.cdiv(x.shape[1], depth)]

    def kernel(x_ref, y_ref, o_ref, *scratch):
        step = [pl.program_id(order.index(axis)) for axis in range(3)]
        acc_ref = o_ref if in_output else scratch[0]

        @when(starts(*step))
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        left, right = x_ref[...], y_ref[...]
        if masked:
            column = jax.lax.broadcasted_iota(jnp.int32, left.shape, 1) + step[2] * depth
            left = jnp.where(column < x.shape[1], left, 0)
            row = jax.lax.broadcasted_iota(jnp.int32, right.shape, 0) + step[2] * depth
            right = jnp.where(row < x.shape[1], right, 0)
        product = jnp.dot(left, right, preferred_element_type=F32).astype(acc_ref.dtype)
        acc_ref[...] = acc_ref[...] + product if adds else product
        if not in_output:

            @when(ends(*step))
            def _():
                o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    def spec(block, *axes):
        return pl.BlockSpec(block, lambda *step: tuple(step[order.index(axis)] for axis in axes))

    return pl.pallas_call(
        kernel,
        grid=tuple(sizes[axis] for axis in order),
        in_specs=[spec((64, depth), 0, 2), spec((depth, 128), 2, 1)],
        out_specs=spec((64, 128), 0, 1),
        scratch_shapes=[] if in_output else [pltpu.VMEM((64, 128), narrow)],
        out_shape=typed((x.shape[0], y.shape[1]), narrow if in_output else F32),
    )(x, y)


def never(i, j, k):
    return k < 0


MATMULS = [
    ([], {}, 512),
    ([], {"in_output": True}, 512),
    ([], {"depth": 192, "masked": True, "ends": lambda i, j, k: k == 2}, 512),
    (["JT904"], {"starts": never}, 512),
    (["JT904"], {"starts": lambda i, j, k: k == 1}, 512),
    (["JT904"], {"starts": never, "in_output": True}, 512),
    (["JT904"], {"starts": lambda i, j, k: (k == 0) & (j == 0), "in_output": True}, 512),
    (["JT904"], {"starts": lambda i, j, k: k == 3}, 512),
    (["JT902"], {"in_output": True, "order": (2, 0, 1)}, 512),
    (["JT902"], {"in_output": True, "order": (0, 2, 1)}, 512),
    (["JT903"], {"ends": lambda i, j, k: k == 4}, 512),
    (["JT903"], {"ends": lambda i, j, k: (k == 3) & (i > 0)}, 512),
    (["JT906"], {"depth": 192, "ends": lambda i, j, k: k == 2}, 512),
    (["JT906"], {"depth": 384, "ends": lambda i, j, k: k == 1, "adds": False}, 512),
    (["JT907"], {"narrow": BF16}, 512),
    (["JT907"], {"narrow": F16}, 512),
    (["JT907"], {"narrow": BF16, "in_output": True}, 512),
]


@pytest.mark.parametrize("case", range(len(MATMULS)))
def test_a_fault_in_a_matmul_is_found(case):
    wanted, options, depth = MATMULS[case]
    types = typed((128, depth), BF16), typed((depth, 256), BF16)
    assert codes(lambda x, y: matmul(x, y, **options), *types) == wanted


# --- padding --------------------------------------------------------------------------------------


def reduced(reduce, out=(64, 1), shape=(64, 200)):
    def kernel(x_ref, o_ref):
        o_ref[...] = reduce(x_ref[...])

    def call(x):
        return pl.pallas_call(
            kernel,
            grid=8,
            in_specs=[pl.BlockSpec((8, 256), lambda i: (i, 0))],
            out_specs=pl.BlockSpec((8, *out[1:]), lambda i: (i, 0)),
            out_shape=typed(out),
        )(x)

    return codes(call, typed(shape))


def test_padding_that_reaches_a_reduction_is_found():
    found = ["JT906"]
    assert reduced(lambda x: x.sum(1, keepdims=True)) == found
    assert reduced(lambda x: jnp.exp(x - 1).max(1, keepdims=True)) == found
    assert reduced(lambda x: x.astype(BF16).mean(1, keepdims=True).astype(F32)) == found
    assert reduced(lambda x: x.T.sum(0)[:, None]) == found
    assert reduced(lambda x: x @ jnp.ones((256, 1))) == found
    assert reduced(lambda x: jnp.where(jnp.arange(256) < 200, x, 0).sum(1, keepdims=True)) == []
    assert reduced(lambda x: x.sum(1, keepdims=True), shape=(64, 256)) == []
    assert reduced(lambda x: x * 2, out=(64, 256)) == []  # the padding is cut off again


def test_large_blocks_that_are_whole_arrays_are_found():
    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def call(x):
        return pl.pallas_call(double, out_shape=x)(x)

    assert codes(call, typed((1024, 512))) == ["JT908"]
    assert codes(call, typed((64, 512))) == []


def test_a_value_that_is_read_only_to_be_replaced_is_no_fault():
    """The idiom of JAX's ragged paged attention."""

    def kernel(x_ref, o_ref):
        old = jnp.where(pl.program_id(0) == 0, 0.0, o_ref[...])
        o_ref[...] = old + x_ref[...]

    def call(x):
        spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
        last = pl.BlockSpec((8, 128), lambda i: (0, 0))
        out = typed((8, 128))
        return pl.pallas_call(kernel, grid=8, in_specs=[spec], out_specs=last, out_shape=out)(x)

    assert codes(call, typed((64, 128))) == []


# --- shipped kernels ------------------------------------------------------------------------------


def with_gradient(fun):
    def value(*args):
        return fun(*args).astype(F32).sum()

    return lambda *args: jax.grad(value, (0, 1, 2))(*args)


def splashed(q, k, v):
    mask = splash_masks.MultiHeadMask([splash_masks.CausalMask((256, 256)) for _ in range(2)])
    return jax.vmap(splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1))(q, k, v)


QKV = [typed((1, 2, 256, 128), BF16)] * 3
PAGES = typed((8, 64, 16, 128), BF16)
SHIPPED = {
    "flash": (with_gradient(lambda *qkv: fa.flash_attention(*qkv, causal=True)), *QKV),
    "splash": (with_gradient(splashed), *QKV),
    "matmul": (
        lambda x, y: tiled_matmul(x, y, block_shape=(256, 256), block_k=256),
        *[typed((512, 512), BF16)] * 2,
    ),
    "megablox": (
        gmm,
        *(typed((512, 1024), BF16), typed((4, 1024, 512), BF16), typed((4,), jnp.int32)),
    ),
    "paged attention": (
        lambda *args: paged_attention(*args, pages_per_compute_block=4),
        *(typed((4, 8, 128), BF16), PAGES, PAGES),
        *(typed((4,), jnp.int32), typed((4, 16), jnp.int32)),
    ),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_the_kernels_that_jax_ships_have_no_fault(name):
    fun, *types = SHIPPED[name]
    assert codes(fun, *types) == []
