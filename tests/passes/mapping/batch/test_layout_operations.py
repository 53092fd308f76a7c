"""What `batch, simplify, cse, dce` leaves of the transposes and broadcasts that batching makes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool import trace
from jaxprtool.ir.programs.program import Program, type_check
from jaxprtool.passes.mapping.batch import Batch


def values(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


def batched(fun, in_axes, *args, size: int = 5, out_axes=0) -> Program:
    """The batched program, cleaned up, which gives what vmap gives."""
    program = Batch(in_axes, out_axes, size)(trace(fun, *args)).apply("simplify, cse, dce")
    type_check(program)
    flat = [values(*aval.shape) for aval in program.in_avals]
    lanes, _ = jax.tree.unflatten(program.in_tree, flat)
    expected = jax.vmap(fun, in_axes, out_axes)(*lanes)
    jax.tree.map(np.testing.assert_allclose, program(*lanes), expected)
    return program


def names(program: Program) -> list[str]:
    return [eqn.primitive.name for eqn in program.jaxpr.eqns]


def test_a_value_is_moved_once_for_all_that_need_it_so():
    def f(w, x):
        return x + w, x * w, x - w

    program = batched(f, (None, 0), values(3), values(3))
    assert names(program) == ["broadcast_in_dim", "add", "mul", "sub"]


def test_a_broadcast_of_a_broadcast_is_one():
    def f(b, x):
        return jnp.broadcast_to(b, (4, 3)) + x

    program = batched(f, (None, 0), values(3), values(4, 3))
    assert names(program) == ["broadcast_in_dim", "add"]


def test_a_broadcast_that_is_needed_as_it_was_stays():
    def f(b, x):
        wide = jnp.broadcast_to(b, (4, 3))
        return wide + x, wide.sum()

    program = batched(f, (None, 0), values(3), values(4, 3), out_axes=(0, None))
    assert names(program).count("broadcast_in_dim") == 2


def test_two_transposes_that_undo_each_other_are_none():
    program = batched(lambda x: x.T.T, 1, values(3, 4), out_axes=1)
    assert names(program) == []


def test_transposes_in_a_row_are_one():
    def f(x):
        return jnp.transpose(jnp.transpose(x, (1, 0, 2)), (0, 2, 1)) * 2

    program = batched(f, 0, values(2, 3, 4))
    assert names(program) == ["transpose", "mul"]


def test_a_transpose_that_only_led_to_another_is_not_made():
    def f(x):
        turned = x.T
        return turned.T * 2, turned

    program = batched(f, 0, values(3, 4))
    assert names(program).count("transpose") == 1


@pytest.mark.parametrize("out_axes", [0, 1, 2, -1])
def test_results_are_moved_to_where_they_are_asked_for(out_axes):
    program = batched(lambda x: jnp.sin(x), 0, values(3, 4), out_axes=out_axes)
    assert names(program) == ["sin"] + ["transpose"] * (out_axes != 0)


def test_the_transpose_of_a_broadcast_is_a_broadcast():
    def f(b, x):
        return jnp.broadcast_to(b[:, None], (3, 4)).T + x

    program = batched(f, 0, values(3), values(4, 3))
    assert names(program) == ["broadcast_in_dim", "add"]


def test_a_program_without_mapped_arguments_is_broadcast_at_its_end():
    program = Batch(in_axes=None, axis_size=5)(trace(lambda x: jnp.sin(x), values(3)))
    assert names(program) == ["sin", "broadcast_in_dim"]
    assert program.out_avals[0].shape == (5, 3)
