"""Rules for elementwise primitives, beside JAX's, for every choice of mapped dimensions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import primitives

from jaxprtool import trace
from jaxprtool.passes.batch import Axis, Batch, batch_body, batch_rules
from tests.programs.mapped import Cost
from tests.programs.one_equation import example, savings

ARRAY = example((2, 4))
SCALAR = example(())
ROW = example((8,))
MASK = example((8,), bool)
FLAG = example((), bool)

#: With three lanes: the bytes of an array of them, and of one lane that they share.
LANES, LANE = 96, 32

# The equation, and what is saved for some of the dimensions along which its operands are mapped.
CASES = {
    "arrays": (lax.add, [ARRAY, ARRAY], {(1, None): Cost(1, LANES), (2, 2): Cost(0, 0)}),
    "arrays apart": (lax.nextafter, [ARRAY, ARRAY], {(1, 2): Cost(1, LANES), (0, 1): Cost(0, 0)}),
    "a comparison": (lax.lt, [ARRAY, ARRAY], {(None, 2): Cost(1, LANES)}),
    "a larger type": (lax.complex, [ARRAY, ARRAY], {(1, None): Cost(0, 0)}),
    "three dimensions": (lax.mul, [example((2, 1, 2))] * 2, {(3, None): Cost(1, 48)}),
    "size 1 beside more": (
        primitives.sub_p.bind,
        [example((2, 1)), ARRAY],
        {(1, 1): Cost(2, 24 + LANES), (None, 1): Cost(1, LANES), (1, None): Cost(0, 0)},
    ),
    "outer": (primitives.max_p.bind, [example((2, 1)), example((1, 4))], {(1, 2): Cost(0, 0)}),
    "a scalar": (primitives.sub_p.bind, [SCALAR, ARRAY], {(0, 2): Cost(1, LANES)}),
    "scalars": (lax.max, [SCALAR, SCALAR], {(None, 0): Cost(0, 0)}),
    "no elements": (lax.add, [example((0, 4))] * 2, {(None, 1): Cost(1, 0)}),
    "cotangents": (
        primitives.add_jaxvals_p.bind,
        [ARRAY, ARRAY],
        {(1, None): Cost(0, LANES - LANE), (0, 2): Cost(0, 0)},
    ),
    "scalar cotangents": (
        primitives.add_jaxvals_p.bind,
        [SCALAR, SCALAR],
        {(None, 0): Cost(1, 12)},
    ),
    "clamp": (
        lax.clamp,
        [SCALAR, ROW, ROW],
        {(None, 1, 1): Cost(3, 3 * LANES), (None, 0, 0): Cost(1, LANES), (0, 0, None): Cost(0, 0)},
    ),
    "clamp between scalars": (
        lax.clamp,
        [SCALAR, ROW, SCALAR],
        {(0, 1, None): Cost(2, 2 * LANES), (0, 0, None): Cost(1, LANES)},
    ),
    # JAX's rule fails here.
    "clamp a scalar": (lax.clamp, [SCALAR, SCALAR, SCALAR], {(None, None, 0): None}),
    "select": (
        lax.select_n,
        [MASK, ROW, ROW],
        {(1, 1, None): Cost(2, LANES // 4 + LANES), (1, None, None): Cost(0, 0)},
    ),
    "select one": (
        lax.select_n,
        [FLAG, ROW, ROW],
        {(None, 1, None): Cost(1, LANES), (0, 1, None): Cost(1, LANES)},
    ),
    "select a scalar": (lax.select_n, [FLAG, SCALAR, SCALAR], {(0, None, None): Cost(0, 0)}),
    "select of three": (
        lambda p, x, y: lax.select_n(p, x, y, x),
        [example((8,), jnp.int32) % 3, ROW, ROW],
        {(1, 1, None): Cost(3, 3 * LANES), (1, 1, 0): Cost(2, 2 * LANES)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_elementwise_rules_cost_no_more_than_jaxs_and_less_where_they_can(case):
    fun, lanes, expected = CASES[case]
    saved = savings(fun, *lanes)
    assert {dims: saved[dims] for dims in expected} == expected


def test_a_primitive_that_broadcasts_and_has_several_results():
    words = jnp.arange(4, dtype=jnp.uint32)

    def bits(key, count):
        return primitives.threefry2x32_p.bind(key, key, count, count)

    saved = savings(bits, words, words, size=2)
    assert saved[1, None] == Cost(2, 64)


def test_keys_are_left_to_jaxs_rules():
    keys = jax.random.split(jax.random.key(0), (4, 3))
    case = primitives.ne_p, [keys, keys[:, 0]], [1, None], {}
    assert batch_rules["ne"](Axis(None, 3), *case) is None


@pytest.mark.parametrize("dims", [(0, None), (None, 0), (1, None)])
def test_sums_of_cotangents_keep_their_weak_types(dims):
    strong, weak = (jax.ShapeDtypeStruct((4,), "float32", weak_type=w) for w in (False, True))
    for terms in [(strong, weak), (weak, strong), (weak, weak)]:
        program = trace(primitives.add_jaxvals_p.bind, *terms)
        (result,) = Batch(dims, 0, 3)(program).out_avals
        assert result.weak_type == terms[0].weak_type


@pytest.mark.parametrize("dims", [(1, None), (None, 2), (1, 2), (0, 1)])
def test_symbolic_dimensions(dims):
    n, m = jax.export.symbolic_shape("n, m")
    x = jax.ShapeDtypeStruct((n, 2), "float32")
    for fun in [lax.add, lambda x, y: lax.select_n(x > 0, x, y), lambda x, y: lax.clamp(x, y, x)]:
        program = Batch(dims, 0, m)(trace(fun, x, x))
        specs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.in_avals]
        expected = jax.eval_shape(jax.vmap(fun, in_axes=dims), *specs)
        assert program.out_avals[0].shape == expected.shape


def test_a_net_is_mapped_without_a_transpose_but_at_its_end():
    def net(w, b, x):
        for _ in range(3):
            x = jnp.maximum(w @ x + b, 0.0)
        return x

    spec = jax.ShapeDtypeStruct
    program = trace(net, spec((4, 4), "float32"), spec((4,), "float32"), spec((4,), "float32"))
    eqns = Batch((None, None, 0), 0, 8)(program).jaxpr.eqns
    transposes = [i for i, eqn in enumerate(eqns) if eqn.primitive.name == "transpose"]
    assert transposes == [len(eqns) - 1]


def test_where_jaxs_rules_fail_ours_are_used_on_a_plain_axis_too():
    scalar = jax.ShapeDtypeStruct((), "float32")
    program = trace(lax.clamp, scalar, scalar, scalar)
    for axis in [Axis(None, 3), Axis(None, 3, plain=True)]:
        _, dims = batch_body(program.jaxpr, [None, None, 0], axis)
        assert dims == (0,)


@pytest.mark.parametrize("spread", [{"spmd_name": ("i",)}, {"mesh_axes": ("i",)}])
def test_lanes_that_are_spread_over_a_mesh_are_left_to_jaxs_rules(spread):
    axis = Axis(None, 3, **spread)
    case = primitives.add_p, [example((2, 3)), example((2,))], [1, None], {}
    assert batch_rules["add"](axis, *case) is None
    assert batch_rules["add"](Axis(None, 3), *case) is not None
