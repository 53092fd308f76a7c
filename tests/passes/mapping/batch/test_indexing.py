"""Batched gathers, scatters, dynamic slices and updates, for every choice of batch dimensions.

They return the same as JAX's rules, cost no more, and have the same derivatives.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.programs.beside import batched, prove
from tests.programs.one_equation import savings

MODES = ["clip", "fill", "promise_in_bounds"]

#: Windows of an operand of shape (3, 4, 2), at rows of indices of shape (2, n): their sizes, the
#: dropped dimensions, the dimensions of the start index, the operand's batch dimensions, and those
#: of the indices.
WINDOWS = {
    "rows": ((1, 4, 2), (0,), (0,), (1, 2), (), ()),
    "columns": ((3, 1, 2), (1,), (1,), (0, 1), (), ()),
    "scattered columns": ((3, 1, 2), (1,), (1,), (0, 2), (), ()),
    "single numbers": ((1, 1, 1), (0, 1, 2), (2, 0, 1), (), (), ()),
    "windows": ((2, 3, 2), (), (1, 0), (0, 1, 3), (), ()),
    "in step": ((3, 2, 1), (), (1,), (0, 2), (2,), (0,)),
}


def operand():
    return jnp.sin(jnp.arange(24.0)).reshape(3, 4, 2)


def indices(starts):
    return jnp.arange(2 * len(starts), dtype=jnp.int32).reshape(2, len(starts)) % 2


def numbers(kind, name):
    _, dropped, starts, held, operand_steps, index_steps = WINDOWS[name]
    return kind(held, dropped, starts, operand_steps, index_steps)


def names(program):
    return [eqn.primitive.name for eqn in program.jaxpr.eqns]


def equations(saved):
    """Return the number of equations saved over all choices of batch dimensions."""
    return sum(cost.equations for cost in saved.values() if cost is not None)


def quickly(*some):
    """Return all kinds of windows, or only some of them in the quick suite."""
    return [n if n in some else pytest.param(n, marks=pytest.mark.sweep) for n in WINDOWS]


@pytest.mark.proof
@pytest.mark.parametrize("name", quickly("scattered columns", "in step"))
def test_a_gather_of_each_kind_of_window(name):
    sizes, starts = WINDOWS[name][0], WINDOWS[name][2]
    dimension_numbers = numbers(lax.GatherDimensionNumbers, name)

    def gather(x, i):
        return lax.gather(x, i, dimension_numbers, sizes, mode="clip")

    assert savings(gather, operand(), indices(starts))


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_a_gather_are_kept(mode):
    def gather(x, i):
        return lax.gather(
            x, i, numbers(lax.GatherDimensionNumbers, "rows"), (1, 4, 2), mode=mode, fill_value=7
        )

    outcome = prove(gather, operand(), indices((0,)), in_axes=(2, 1), derivatives=0)
    assert outcome.program.jaxpr.eqns[-1].params["mode"] == lax.GatherScatterMode.from_any(mode)


def test_indices_of_unbatched_operands_are_not_marked_unique():
    def gather(x, i):
        dimension_numbers = numbers(lax.GatherDimensionNumbers, "rows")
        return lax.gather(x, i, dimension_numbers, (1, 4, 2), unique_indices=True, mode="clip")

    alone, both = (
        batched(gather, operand(), indices((0,)), in_axes=a) for a in [(None, 0), (1, 0)]
    )
    assert [p.jaxpr.eqns[-1].params["unique_indices"] for p in (alone, both)] == [False, True]


SCATTERS = [lax.scatter_add, lax.scatter_sub, lax.scatter_mul, lax.scatter_min, lax.scatter_max]


def scatter(function, name, **options):
    dimension_numbers = numbers(lax.ScatterDimensionNumbers, name)
    return lambda x, i, u: function(x, i, u, dimension_numbers, **options)


def updates(name):
    sizes, dropped, _, held, operand_steps, _ = WINDOWS[name]
    window = [s for d, s in enumerate(sizes) if d not in dropped and d not in operand_steps]
    shape = []
    for d in range(len(held) + 1):
        shape.append(window.pop(0) if d in held else 2)
    return jnp.cos(jnp.arange(float(jnp.zeros(shape).size))).reshape(shape)


@pytest.mark.parametrize("name", quickly())
def test_a_scatter_of_each_kind_of_window(name):
    function = scatter(lax.scatter_add, name, mode="clip")
    starts = WINDOWS[name][2]
    assert savings(function, operand(), indices(starts), updates(name))


@pytest.mark.parametrize("function", [*SCATTERS, lax.scatter], ids=lambda f: f.__name__)
def test_every_kind_of_scatter_remains_one_equation(function):
    fun = scatter(function, "columns", mode="drop")
    program = batched(fun, operand(), indices((0,)), updates("columns"), in_axes=(1, None, 1))
    assert names(program).count(function.__name__.replace("_", "-")) == 1
    if function in (lax.scatter, lax.scatter_mul):
        prove(fun, operand(), indices((0,)), updates("columns"), in_axes=(2, 1, 0), derivatives=0)


@pytest.mark.proof
@pytest.mark.parametrize("in_axes", [(1, 1, 1), (2, 1, None)])
def test_gathers_and_scatters_have_the_same_derivatives(in_axes):
    def fun(x, i, u):
        written = scatter(lax.scatter_add, "columns", mode="clip")(x, i, u)
        return jnp.sin(written)[:, i[:, 0]] * written[i[0, 0], :2]

    prove(fun, operand(), indices((1,)), updates("columns"), in_axes=in_axes)


# --- dynamic slices and updates -----------------------------------------------------------------

START = jnp.int32(1)

# One equation each: a start is non-negative by construction, so it is not normalized.
dynamic_slice = partial(lax.dynamic_slice, allow_negative_indices=False)
dynamic_update_slice = partial(lax.dynamic_update_slice, allow_negative_indices=False)


@pytest.mark.parametrize("sizes", [(1, 2), (1, 3)])
def test_a_dynamic_slice_takes_fewer_equations(sizes):
    def fun(x, i, j):
        return dynamic_slice(x, (i, j), sizes)

    saved = savings(fun, operand()[:, :, 0].T, START, START)
    assert equations(saved) > 0


@pytest.mark.sweep
@pytest.mark.parametrize("sizes", [(2, 1), (1, 3)])
def test_a_dynamic_update_takes_fewer_equations(sizes):
    def fun(x, u, i, j):
        return dynamic_update_slice(x, u, (i, j))

    x = operand()[:, :, 0].T
    saved = savings(fun, x, -x[: sizes[0], : sizes[1]], START, START)
    assert equations(saved) > 0


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_an_unbatched_start_keeps_a_dynamic_slice(dim):
    program = batched(
        lambda x, i: dynamic_slice(x, (i, i), (2, 2)),
        jnp.ones((4, 3)),
        START,
        in_axes=(dim, None),
    )
    assert names(program) == ["transpose"] * (dim != 0) + ["dynamic_slice"]


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_an_unbatched_start_keeps_a_dynamic_update(dim):
    def fun(x, u, i):
        return dynamic_update_slice(x, u, (i, i))

    x = jnp.ones((4, 3))
    program = batched(fun, x, x[:2, :2], START, in_axes=(dim, dim, None))
    assert names(program) == ["transpose"] * 2 * (dim != 0) + ["dynamic_update_slice"]


def test_a_start_without_effect_batches_its_result_as_in_jax():
    prove(lambda x, i: dynamic_slice(x, (i,), (4,)), jnp.ones(4), START, in_axes=(None, 0))
    prove(
        lambda x, u, i: dynamic_update_slice(x, u, (i,)),
        *(jnp.ones(4), jnp.ones(4), START),
        in_axes=(None, None, 0),
    )


@pytest.mark.proof
@pytest.mark.parametrize("in_axes", [(1, 1, 1, 0), (0, None, None, None)])
def test_dynamic_slices_and_updates_have_the_same_derivatives(in_axes):
    def fun(x, u, i, j):
        x = dynamic_update_slice(x, u, (i, j))
        return jnp.sin(dynamic_slice(x, (j, i), (2, 2))) * u[0, 0]

    axes = [None if a is None else a if k < 2 else 0 for k, a in enumerate(in_axes)]
    prove(fun, jnp.ones((4, 3)), jnp.ones((2, 1)), START, START, in_axes=axes)


def test_an_empty_batch_reads_and_writes_nothing():
    def fun(x, i):
        return dynamic_slice(x, (i, i), (1, 2)), x[i], x.at[i].add(1.0)

    for in_axes in [(0, 0), (1, None), (None, 0), (2, 0)]:
        prove(fun, jnp.ones((4, 3)), START, in_axes=in_axes, size=0, derivatives=0)


@pytest.mark.proof
def test_arrays_of_keys_are_indexed_like_others():
    keys = jax.random.split(jax.random.key(0), (4, 3))

    def fun(keys, i):
        return keys[i], dynamic_slice(keys, (i, 0), (2, 3)), keys.at[i].set(keys[0])

    for in_axes in [(1, 0), (2, None), (None, 0), (0, 0)]:
        prove(fun, keys, START, in_axes=in_axes, derivatives=0)


def test_sizes_may_be_symbolic():
    from jax import export

    n, m = export.symbolic_shape("n, m")
    spec = jax.ShapeDtypeStruct((4, n, m), jnp.float32)

    def fun(x, i):
        return lax.dynamic_slice_in_dim(x, i, 2, 0), x[i]

    from jaxprtool import vmap

    start = jax.ShapeDtypeStruct((m,), jnp.int32)
    for in_axes in [(2, 0), (2, None)]:
        args = spec, start if in_axes[1] == 0 else jax.ShapeDtypeStruct((), jnp.int32)
        got, expected = (jax.eval_shape(v(fun, in_axes), *args) for v in (vmap, jax.vmap))
        assert got == expected
