"""Rules for what lays arrays out anew, beside JAX's, for every choice of mapped dimensions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxprtool import trace
from jaxprtool.passes.batch import Batch
from tests.programs.mapped import Cost
from tests.programs.one_equation import example, savings

MATRIX = example((2, 4))

# The equation, and what is saved for some of the dimensions along which its operands are mapped;
# three lanes of a matrix have 96 bytes.
CASES = {
    "squeeze": (
        lambda x: lax.squeeze(x, [1, 3]),
        [example((2, 1, 4, 1))],
        {(d,): Cost(1, 96) for d in range(1, 5)},
    ),
    "reshape that merges": (
        lambda x: lax.reshape(x, (2, 12)),
        [example((2, 3, 4))],
        {(1,): Cost(1, 288), (2,): Cost(0, 0), (3,): Cost(1, 288)},
    ),
    "reshape that splits": (
        lambda x: lax.reshape(x, (2, 2, 2)),
        [MATRIX],
        {(1,): Cost(1, 96), (2,): Cost(1, 96)},
    ),
    "reshape that mixes": (
        lambda x: lax.reshape(x, (4, 2)),
        [MATRIX],
        {(1,): Cost(0, 0), (2,): Cost(1, 96)},
    ),
    "reshape of no elements": (
        lambda x: lax.reshape(x, (0, 3)),
        [example((2, 0))],
        {(1,): Cost(0, 0), (2,): Cost(1, 0)},
    ),
    "reshape to a scalar": (
        lambda x: lax.reshape(x, ()),
        [example((1, 1))],
        {(1,): Cost(1, 12), (2,): Cost(1, 12)},
    ),
    "reshape from a scalar": (lambda x: lax.reshape(x, (1, 1)), [example(())], {}),
    "dimensions of size 1": (
        lambda x: lax.broadcast_in_dim(x, (1, 2, 1, 4), (1, 3)),
        [MATRIX],
        {(1,): Cost(1, 96), (2,): Cost(1, 96)},
    ),
    "broadcast": (
        lambda x: lax.broadcast_in_dim(x, (2, 3, 4), (0, 2)),
        [MATRIX],
        {(1,): Cost(0, 0), (2,): Cost(0, 0)},
    ),
    "broadcast of a scalar": (lambda x: lax.broadcast_in_dim(x, (2,), ()), [example(())], {}),
    "concatenate": (
        lambda x, y: lax.concatenate([x, y], 1),
        [MATRIX, MATRIX],
        {(1, 1): Cost(2, 192), (2, 2): Cost(2, 192), (1, 2): Cost(0, 0), (1, None): Cost(0, 0)},
    ),
    "concatenate three": (
        lambda x, y, z: lax.concatenate([x, y, z], 0),
        [example((2,))] * 3,
        {(1, 1, 1): Cost(3, 72)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_layout_rules_cost_no_more_than_jaxs_and_less_where_they_can(case):
    fun, lanes, expected = CASES[case]
    saved = savings(fun, *lanes)
    assert {dims: saved[dims] for dims in expected} == expected


def test_a_wider_type_does_not_take_the_mapped_dimension_up_in_its_elements():
    halves = jnp.arange(8, dtype=jnp.uint16).reshape(4, 2)
    saved = savings(lambda x: lax.bitcast_convert_type(x, jnp.uint32), halves, size=2)
    assert saved == {(0,): Cost(0, 0), (1,): Cost(0, 0), (2,): None}  # JAX's rule is wrong


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_symbolic_dimensions(dim):
    n, m = jax.export.symbolic_shape("n, m")
    x = jax.ShapeDtypeStruct((n, 4), "float32")
    for fun in [
        lambda x: lax.reshape(x, (n * 4,)),
        lambda x: lax.reshape(x, (n, 2, 2)),
        lambda x: lax.broadcast_in_dim(x, (n, 1, 4), (0, 2)),
        lambda x: lax.broadcast_in_dim(x, (n, n, 4), (0, 2)),
        lambda x: lax.concatenate([x, x], 0),
    ]:
        program = Batch(dim, 0, m)(trace(fun, x))
        (aval,) = program.in_avals
        spec = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        expected = jax.eval_shape(jax.vmap(fun, in_axes=dim), spec)
        assert program.out_avals[0].shape == expected.shape
