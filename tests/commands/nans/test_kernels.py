"""find_nan names the step of a kernel, the Ref and the line that make a NaN or an infinity."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import jaxprtool
from jaxprtool.commands.nans import kernels
from jaxprtool.commands.nans.command import first_found
from jaxprtool.commands.nans.nans import find_nan

F32 = jnp.float32
BUFFER = {"scratch_shapes": [pltpu.VMEM((8, 128), F32)]}
X = np.ones((64, 128), "float32")


def line_of(text):
    with open(__file__) as file:
        number = next(n for n, line in enumerate(file, 1) if line.rstrip().endswith(f"# {text}"))
    return f"tests/commands/nans/test_kernels.py:{number}"


def on_rows(kernel, **options):
    spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
    options = {"grid": 8, "in_specs": [spec], "out_specs": spec} | options
    out = options.pop("out_shape", jax.ShapeDtypeStruct((64, 128), F32))
    return lambda x: pl.pallas_call(kernel, out_shape=out, **options)(x)


def only(function, *args):
    (found,) = find_nan(jaxprtool.trace(function, *args), args).found
    return found


def at(position, value):
    x = X.copy()
    x[position] = value
    return x


def log(x_ref, o_ref):
    o_ref[...] = jnp.log(x_ref[...]) * 2  # the log


@pytest.mark.parametrize("interpret", [False, True])
def test_the_step_the_ref_and_the_line_of_a_nan_are_named(interpret):
    found = only(on_rows(log, interpret=interpret), at((19, 5), -1))
    assert (found.kind, found.primitive, found.source) == ("NaN", "log", line_of("the log"))
    step = found.kernel
    assert (step.name, step.axes, step.position, step.ref) == ("log", ("i",), (2,), "o_ref")
    assert (found.type, found.count, found.position) == ("f32[8,128]", 1, (3, 5))
    assert found.operands[0].element == -1 and found.reaches == ("result",)
    assert [part.argument for part in found.way] == ["", "x_ref"]
    assert found.path[0].startswith("pallas_call at tests/commands/nans/test_kernels.py")


def accumulated(x_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.sqrt(x_ref[...])  # the square root

    @pl.when(pl.program_id(1) == 3)
    def _():
        o_ref[...] = acc_ref[...]


def test_a_nan_in_scratch_is_followed_to_the_step_that_stores_it():
    x = np.ones((64, 512), "float32")
    x[20, 130] = -1
    specs = {
        "grid": (8, 4),
        "in_specs": [pl.BlockSpec((8, 128), lambda i, j: (i, j))],
        "out_specs": pl.BlockSpec((8, 128), lambda i, j: (i, 0)),
    }
    found = only(on_rows(accumulated, **specs, **BUFFER), x)
    assert (found.primitive, found.source) == ("sqrt", line_of("the square root"))
    assert (found.kernel.position, found.kernel.ref) == ((2, 1), "acc_ref")


def unset(x_ref, o_ref, acc_ref):
    acc_ref[...] += x_ref[...]  # never set
    o_ref[...] = acc_ref[...]


def unwritten(x_ref, o_ref):
    @pl.when(pl.program_id(0) != 3)
    def _():
        o_ref[...] = x_ref[...]


def row_sums(x_ref, o_ref):
    o_ref[...] = x_ref[...].sum(0, keepdims=True)  # the padding


def test_memory_that_no_step_has_written_is_named():
    found = only(on_rows(unset, **BUFFER), X)
    assert (found.primitive, found.source) == ("get", line_of("never set"))
    step = found.kernel
    assert (step.position, step.ref, step.note) == ((0,), "acc_ref", "which no step has written")
    left = only(on_rows(unwritten), X)
    assert left.primitive == "pallas_call" and left.kernel.position == (3,)
    assert (left.kernel.ref, left.kernel.note) == ("o_ref", "which no step writes")


def test_padding_beyond_the_array_is_named():
    sums = on_rows(
        row_sums,
        out_specs=pl.BlockSpec((1, 128), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((8, 128), F32),
    )
    found = only(sums, X[:60])
    assert (found.kernel.position, found.kernel.ref) == ((7,), "x_ref")
    assert found.kernel.note == "padding beyond the array"


def looped(x_ref, o_ref):
    def body(i, total):
        return total + jnp.exp(x_ref[pl.ds(i, 1), :])  # the exp

    o_ref[...] = jnp.broadcast_to(jax.lax.fori_loop(0, 8, body, jnp.zeros((1, 128))), (8, 128))


def test_an_infinity_in_a_loop_has_its_iteration():
    found = only(on_rows(looped), at((12, 7), 100))
    assert (found.kind, found.primitive, found.source) == ("infinity", "exp", line_of("the exp"))
    assert found.kernel.position == (1,) and found.iteration == (4,)


def gathered(order_ref, x_ref, o_ref):
    o_ref[...] = jnp.log(x_ref[...])


def test_blocks_at_prefetched_scalars_are_those_of_the_step():
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(8,),
        in_specs=[pl.BlockSpec((8, 128), lambda i, order: (order[i], 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i, order: (i, 0)),
    )
    order = np.arange(8, dtype="int32")[::-1].copy()
    found = only(lambda o, x: pl.pallas_call(gathered, x, grid_spec=grid)(o, x), order, at(19, -1))
    assert (found.primitive, found.kernel.position) == ("log", (5,))


def test_a_batch_of_a_kernel_has_an_axis_of_its_own():
    x = np.stack([X, at((19, 5), -1)])
    found = only(jax.vmap(on_rows(log)), x)
    assert (found.primitive, found.kernel.position) == ("log", (1, 2))


def test_steps_that_are_too_many_are_said_so(monkeypatch):
    monkeypatch.setattr(kernels, "MOST_STEPS", 4)
    x = at((19, 5), -1)
    search = find_nan(jaxprtool.trace(on_rows(log), x), (x,))
    assert search.first.primitive == "pallas_call" and search.first.kernel.position is None
    shown = first_found(search, 80).plain()
    assert "its steps are not shown: it has 8 of them" in shown


def test_a_kernel_is_shown_with_its_step():
    x = at((19, 5), -1)
    shown = first_found(find_nan(jaxprtool.trace(on_rows(log), x), (x,)), 80).plain()
    assert "log in the kernel log makes a NaN, which reaches result" in shown
    assert "step   i=2" in shown and "Ref    o_ref" in shown
