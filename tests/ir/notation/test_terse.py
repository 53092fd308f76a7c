"""JAX's notation without parameters that have their default value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import jaxprtool
from jaxprtool.render.terminal.listing import ShowOptions, listing
from jaxprtool.render.terminal.tree import tree

X = jnp.ones((4, 4))


def shown(fun, *args):
    return listing(jaxprtool.trace(fun, *args), ShowOptions(width=200, terse=True)).plain()


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (lambda x: x @ x, "dot_general[dimension_numbers=(([1], [0]), ([], []))] a a"),
        (lambda x: x.reshape(16), "reshape[new_sizes=(16,)] a"),
        (lambda x: x.sum(), "reduce_sum[axes=(0, 1)] a"),
        (lambda x: x[1:], "slice[limit_indices=(4, 4) start_indices=(1, 0)] a"),
        (lambda x: x[::2], "strides=(2, 1)"),
        (lambda x: jax.lax.sort(x, is_stable=False), "is_stable=False"),
        (lambda x: jnp.cumsum(x, 0), "cumsum[axis=0] "),
        (lambda x: jax.lax.cumsum(x, reverse=True), "reverse=True"),
        (lambda x: jax.lax.approx_min_k(x, 2), "is_max_k=False"),
        (lambda x: jax.lax.linalg.eigh(x, lower=False), "lower=False"),
        (lambda x: jax.checkpoint(jnp.sin, prevent_cse=False)(x), "prevent_cse=False"),
        (
            lambda x: jax.lax.dot(x, x, preferred_element_type="bfloat16").astype("float32"),
            "dot_general[dimension_numbers=(([1], [0]), ([], []))] a a",
        ),
    ],
)
def test_only_defaults_are_left_out(fun, expected):
    assert expected in shown(fun, X)


def test_a_loop_keeps_its_body_and_length():
    text = shown(lambda x: jax.lax.scan(lambda c, y: (c + y, c), x[0], x), X)
    assert "length=4" in text and "{ lambda ;" in text
    assert "unroll" not in text and "reverse" not in text and "linear" not in text


def test_convolutions_keep_non_default_parameters():
    image, kernel = jnp.ones((1, 1, 8, 8)), jnp.ones((1, 1, 3, 3))
    text = shown(lambda x, k: jax.lax.conv_general_dilated(x, k, (2, 1), "VALID"), image, kernel)
    assert "window_strides=(2, 1)" in text and "dimension_numbers=" in text
    for default in ("padding", "lhs_dilation", "rhs_dilation", "group_count", "precision"):
        assert default not in text


def test_long_values_are_truncated_and_numpy_numbers_are_written_like_python_numbers():
    def f(x):
        return jax.lax.gather_p.bind(
            x,
            jnp.zeros((2, 1), "int32"),
            dimension_numbers=jax.lax.GatherDimensionNumbers((1,), (0,), (0,)),
            slice_sizes=(np.int64(1), 4),
            indices_are_sorted=False,
            unique_indices=False,
            mode=jax.lax.GatherScatterMode.CLIP,
            fill_value=None,
        )

    text = shown(f, X)
    assert "dimension_numbers=GatherDimensionNumbers(offset_dims=(1,), col" in text
    assert "…" in text and "slice_sizes=(1, 4)" in text
    assert max(map(len, text.splitlines())) < 250
    assert "np.int64(1)" in listing(jaxprtool.trace(f, X)).plain()


def test_the_tree_is_also_terse():
    program = jaxprtool.trace(lambda x: x.reshape(16), X)
    assert "reshape[new_sizes=(16,)] a" in tree(program, ShowOptions(terse=True)).plain()
    assert "sharding=None" in tree(program).plain()


def test_a_kernel_has_its_grid_and_a_row_for_each_block_and_scratch():
    def kernel(order_ref, x_ref, y_ref, o_ref, acc_ref):
        acc_ref[...] = x_ref[...] + y_ref[...]
        o_ref[:4] = acc_ref[...]

    specs = [
        pl.BlockSpec((4, 128), lambda i, j, order: (order[(i + 1) % 2], j * 2 // 2)),
        pl.BlockSpec((None, 4, pl.Element(128)), lambda i, j, order: (jnp.minimum(i, j), 0, 0)),
    ]
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(2, 1),
        in_specs=specs,
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[pltpu.VMEM((4, 128), jnp.float32)],
    )
    params = pltpu.CompilerParams(vmem_limit_bytes=1 << 20)

    def call(order, x, y):
        return pl.pallas_call(kernel, x, grid_spec=grid, compiler_params=params)(order, x, y)

    arrays = jnp.zeros(2, jnp.int32), jnp.ones((8, 128)), jnp.ones((2, 4, 128))
    lines = """
        grid=(i=2, j=1)
        x_ref=f32[8,128] in [4,128] at (order_ref[(i + 1) % 2], (j * 2) // 2)
        y_ref=f32[2,4,128] in [None,4,Element(128)] at (min(i, j), 0, 0)
        o_ref=f32[8,128] whole, any
        acc_ref=f32[4,128] scratch in vmem
        compiler_params=CompilerParams(vmem_limit_bytes=1048576)
    """
    text = shown(call, *arrays)
    for line in lines.strip().splitlines():
        assert line.strip() in map(str.strip, text.splitlines()), text
    assert "GridMapping" not in text and "out_avals" not in text
