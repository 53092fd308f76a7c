"""in_axes, out_axes and axis_size of a program, and every error in them."""

import re
from collections import namedtuple
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxprtool import trace
from jaxprtool.errors import JaxprToolError
from jaxprtool.passes.mapping.batch.axes import (
    BatchError,
    BatchTypeError,
    axis_size_of,
    check_axes,
    check_unmapped,
    flat_in_axes,
    flat_out_axes,
    program_axes,
    result_dims,
)

MATRIX, VECTOR = jnp.ones((3, 4)), jnp.ones(5)
Pair = namedtuple("Pair", "first second")


@pytest.fixture(scope="module")
def program():
    """Return a program of a dict with a list of matrices, a vector, and a keyword argument."""

    def fun(params, x, *, scale):
        return {"sum": params["w"][0] + params["w"][1]}, x * scale

    return trace(fun, {"w": [MATRIX, MATRIX]}, VECTOR, scale=VECTOR)


def structure(*args, **kwargs):
    return jax.tree.structure((args, kwargs))


@pytest.mark.parametrize(
    "in_axes, dims",
    [
        (0, [0, 0, 0, 0]),
        (1, [1, 1, 1, 0]),
        (-1, [2, 2, 1, 0]),
        (None, [None, None, None, 0]),
        ((None, 1), [None, None, 1, 0]),
        ([0, None], [0, 0, None, 0]),
        (({"w": 2}, -2), [2, 2, 0, 0]),
        (({"w": [None, -3]}, None), [None, 0, None, 0]),
    ],
)
def test_a_prefix_sets_the_axis_of_each_argument_of_a_program(program, in_axes, dims):
    assert program_axes(program, in_axes, 7) == (dims, 7)


def test_sizes_are_non_negative_numbers_or_symbolic_dimensions(program):
    assert program_axes(program, 0, 0)[1] == 0
    assert program_axes(program, 0, jnp.int32(3))[1] == 3
    (n,) = jax.export.symbolic_shape("n")
    assert program_axes(program, 0, 2 * n)[1] is not None


def test_axes_support_custom_nodes_and_none_is_a_leaf_of_axes_only():
    tree = structure(Pair(MATRIX, {"a": VECTOR, "b": None}), None)
    assert flat_in_axes(tree, (Pair(0, {"a": None, "b": 3}), None)) == [0, None]
    assert flat_in_axes(tree, (Pair(1, 2), 0)) == [1, 2]
    assert flat_in_axes(structure(), 0) == flat_in_axes(structure(None), (5,)) == []


@pytest.mark.parametrize("out_axes", [0, None, (0, None), ({"sum": None}, 1)])
def test_out_axes_are_a_prefix_of_the_results(program, out_axes):
    marked = jax.tree.broadcast(
        out_axes,
        jax.tree.unflatten(program.out_tree, [0, 0]),
        is_leaf=lambda node: node is None,
    )
    expected = jax.tree.leaves(marked, is_leaf=lambda node: node is None)
    assert flat_out_axes(program.out_tree, out_axes) == expected


def test_axes_of_results_are_counted_from_the_front():
    assert result_dims([0, -1, None, -2], [0, 2, 2, 1], list) == [0, 2, None, 0]


def test_the_size_is_that_of_the_mapped_arguments():
    avals = [jax.typeof(MATRIX), None, jax.typeof(VECTOR)]
    assert axis_size_of(None, [-1, None, None], avals, list) == 4
    assert axis_size_of(4, [1, None, None], avals, list) == 4
    assert axis_size_of(9, [None, None, None], avals, list) == 9


WRONG_FOR_A_PROGRAM = [
    (
        0,
        None,
        "axis_size must be specified: the arguments of a program do not have the mapped axis",
    ),
    (0, -1, "axis_size must be an integer that is not negative, but got -1"),
    (0, 2.5, "axis_size must be an integer, but got 2.5"),
    (0, True, "axis_size must be an integer that is not negative, but got True"),
    ((0,), 2, "but got len(in_axes)=1, len(args)=2"),
    (3, 2, "in_axes has 3 for params['w'][0], but its mapped axis is from -3 to 2"),
    ((0, 2), 2, "in_axes has 2 for x, but its mapped axis is from -2 to 1"),
    ((0, -3), 2, "in_axes has -3 for x, but its mapped axis is from -2 to 1"),
    (({"v": 0}, 0), 2, "at vmap in_axes[0] it is a dict with keys ['v'], but the value is a dict"),
    (({"w": (0, 0)}, 0), 2, "at vmap in_axes[0]['w'] it is a tuple of 2, but the value is a list"),
    (({"w": [0, 0, 0]}, 0), 2, "it is a list of 3, but the value is a list of 2"),
    ((0, (0,)), 2, "at vmap in_axes[1] it is a tuple of 1, but the value is a leaf"),
    ((Pair(0, 0), 0), 2, "at vmap in_axes[0] it is a Pair of 2, but the value is a dict"),
]


@pytest.mark.parametrize("in_axes, axis_size, message", WRONG_FOR_A_PROGRAM)
def test_axes_that_do_not_fit_a_program_are_reported(program, in_axes, axis_size, message):
    pattern = re.escape(message).replace(r"\.\*", ".*")
    with pytest.raises((BatchError, BatchTypeError), match=pattern) as caught:
        program_axes(program, in_axes, axis_size)
    assert isinstance(caught.value, JaxprToolError) and "\n" not in str(caught.value)


def test_an_axis_out_of_range_is_reported_with_the_name_of_the_argument(program):
    with pytest.raises(BatchError) as caught:
        program_axes(program, (({"w": [0, 7]}), None), 2)
    assert caught.value.hint == "params['w'][1] has type f32[3,4] and gets one more axis"


def test_keyword_arguments_have_no_entry_in_in_axes(program):
    with pytest.raises(BatchError) as caught:
        program_axes(program, (0, 0, 0), 2)
    assert "keyword arguments, here scale, which are mapped along axis 0" in caught.value.hint


@pytest.mark.parametrize(
    "in_axes, out_axes, option",
    [
        (True, 0, "in_axes"),
        (0.5, 0, "in_axes"),
        ({"a": 0}, 0, "in_axes"),
        (Pair(0, 0), 0, "in_axes"),
        ((0, "x"), 0, "in_axes"),
        (0, (None, False), "out_axes"),
        (0, jnp.int32(0), "out_axes"),
    ],
)
def test_axes_are_ints_and_none(in_axes, out_axes, option):
    with pytest.raises(BatchTypeError, match=f"vmap {option} must be an int, None, or"):
        check_axes(in_axes, out_axes)


def test_registered_types_have_their_own_axes():
    check_axes(Pair(0, 0), ["x", 0, None], (Pair, str))


def test_different_sizes_are_listed_with_their_arguments():
    avals = [jax.typeof(x) for x in (MATRIX, VECTOR, MATRIX, VECTOR, VECTOR)]
    with pytest.raises(BatchError) as caught:
        axis_size_of(9, [0, 0, 1, 0, None], avals, lambda: list("abcde"))
    assert str(caught.value) == (
        "vmap got inconsistent sizes for array axes to be mapped: "
        "* the `axis_size` argument was 9; "
        "* most axes (2 of them) had size 5, e.g. axis 0 of b of type float32[5]; "
        "* one axis had size 3: axis 0 of a of type float32[3,4]; "
        "* one axis had size 4: axis 1 of c of type float32[3,4]"
    )


def test_results_mapped_at_a_missing_axis_are_named():
    for axis in (2, -3):
        with pytest.raises(BatchError, match=f"axis {axis} is out of bounds for array of dim"):
            result_dims([0, axis], [0, 1], partial(list, "pq"))


def test_a_mapped_result_with_out_axes_none_is_named():
    tree = jax.tree.structure(({"a": 0, "b": None}, [0, 0]))
    check_unmapped([None, 0, None], [None, 1, None], tree, None)
    path = re.escape("at vmap out_axes[1][1], got axis spec None but output was batched on axis 2")
    with pytest.raises(BatchError, match=path):
        check_unmapped([None, 0, None], [None, 1, 2], tree, None)
    with pytest.raises(BatchError, match=r"mapped output \(axis_name=i\) but out_axes is None"):
        check_unmapped([None, 0, None], [None, 1, 2], tree, "i")
