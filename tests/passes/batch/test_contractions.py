"""Contractions: as JAX batches them, convolutions in groups with fewer reshapes."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from jax import lax

from tests.programs.beside import batched, prove
from tests.programs.mapped import Cost
from tests.programs.one_equation import savings


def array(*shape):
    size = jnp.zeros(shape).size
    return (jnp.arange(float(size)) % 5 - 2).reshape(shape)


@pytest.mark.parametrize("in_axes", [(0, 0), (1, 2), (2, None), (None, 1)])
def test_a_dot_stays_one_equation_with_nothing_moved(in_axes):
    def fun(x, y):
        return lax.dot_general(x, y, (((1,), (0,)), ((0,), (1,))))

    program = batched(fun, array(2, 3, 4), array(3, 2, 5), in_axes=in_axes)
    assert [e.primitive.name for e in program.jaxpr.eqns].count("dot_general") == 1
    assert sum(e.primitive.name != "dot_general" for e in program.jaxpr.eqns) <= 1
    prove(fun, array(2, 3, 4), array(3, 2, 5), in_axes=in_axes, derivatives=0)


def convolution(lhs, rhs, layout, **options):
    def fun(x, w):
        return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=layout, **options)

    return savings(fun, array(*lhs), array(*rhs))


@pytest.mark.parametrize("layout", [("NWC", "WIO", "NWC"), ("NCW", "OIW", "NCW")])
@pytest.mark.parametrize("features", [4, 8])
def test_a_kernel_in_groups_is_mapped_with_fewer_reshapes(layout, features):
    sizes = {"N": 2, "C": 4, "W": 5}, {"W": 3, "I": 1, "O": features}
    lhs, rhs = ([size[d] for d in dims] for size, dims in zip(sizes, layout, strict=False))
    saved = convolution(lhs, rhs, layout, feature_group_count=4)
    each = 3 if features == 4 else 2
    assert all(saved[None, dim] == Cost(each, 0) for dim in range(4))


@pytest.mark.parametrize("groups", [2, 4])
def test_examples_in_groups_are_mapped_with_fewer_reshapes(groups):
    layout = ("NWC", "WIO", "NWC")
    saved = convolution((4, 5, 3), (2, 3, 4), layout, batch_group_count=groups)
    assert all(saved[dim, None] == Cost(1 + (groups == 4), 0) for dim in range(4))
    assert all(saved[None, dim].equations >= 2 for dim in range(4))


@pytest.mark.parametrize(
    ("option", "in_axes"), [("feature_group_count", (None, 1)), ("batch_group_count", (2, None))]
)
def test_convolutions_in_groups_have_the_same_derivatives(option, in_axes):
    def fun(x, w):
        layout = ("NWC", "WIO", "NWC")
        return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=layout, **{option: 2})

    channels = 4 if option == "feature_group_count" else 2
    prove(fun, array(2, 5, channels), array(3, 2, 4), in_axes=in_axes)


def test_of_no_lanes_a_convolution_in_groups_is_empty():
    def fun(x, w):
        return lax.conv_general_dilated(x, w, (1,), "SAME", feature_group_count=2)

    for in_axes in [(0, 0), (None, 0), (0, None)]:
        prove(fun, array(1, 4, 5), array(2, 2, 3), in_axes=in_axes, size=0, derivatives=0)
