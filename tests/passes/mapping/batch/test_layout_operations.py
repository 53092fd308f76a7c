"""The transposes and broadcasts that remain of those from batching after `simplify, cse, dce`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool import trace
from jaxprtool.ir.program import Program, type_check
from jaxprtool.passes.mapping.batch import Batch


def values(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


def batched(fun, in_axes, *args, size: int = 5, out_axes=0) -> Program:
    """Return the batched program, cleaned up, which returns the same as vmap."""
    program = Batch(in_axes, out_axes, size)(trace(fun, *args)).apply("simplify, cse, dce")
    type_check(program)
    flat = [values(*aval.shape) for aval in program.in_avals]
    lanes, _ = jax.tree.unflatten(program.in_tree, flat)
    expected = jax.vmap(fun, in_axes, out_axes)(*lanes)
    jax.tree.map(np.testing.assert_allclose, program(*lanes), expected)
    return program


def names(program: Program) -> list[str]:
    return [eqn.primitive.name for eqn in program.jaxpr.eqns]


def test_a_value_is_broadcast_once_for_all_uses():
    def f(w, x):
        return x + w, x * w, x - w

    program = batched(f, (None, 0), values(3), values(3))
    assert names(program) == ["broadcast_in_dim", "add", "mul", "sub"]


def test_nested_broadcasts_are_merged():
    def f(b, x):
        return jnp.broadcast_to(b, (4, 3)) + x

    program = batched(f, (None, 0), values(3), values(4, 3))
    assert names(program) == ["broadcast_in_dim", "add"]


def test_a_broadcast_with_another_use_is_kept():
    def f(b, x):
        wide = jnp.broadcast_to(b, (4, 3))
        return wide + x, wide.sum()

    program = batched(f, (None, 0), values(3), values(4, 3), out_axes=(0, None))
    assert names(program).count("broadcast_in_dim") == 2


def test_two_inverse_transposes_are_removed():
    program = batched(lambda x: x.T.T, 1, values(3, 4), out_axes=1)
    assert names(program) == []


def test_consecutive_transposes_are_merged():
    def f(x):
        return jnp.transpose(jnp.transpose(x, (1, 0, 2)), (0, 2, 1)) * 2

    program = batched(f, 0, values(2, 3, 4))
    assert names(program) == ["transpose", "mul"]


def test_a_transpose_that_is_only_transposed_again_is_removed():
    def f(x):
        turned = x.T
        return turned.T * 2, turned

    program = batched(f, 0, values(3, 4))
    assert names(program).count("transpose") == 1


@pytest.mark.parametrize("out_axes", [0, 1, 2, -1])
def test_results_are_moved_to_the_requested_axes(out_axes):
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
