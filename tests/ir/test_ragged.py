"""Ragged: examples of different lengths in one array, as a pytree with checks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool import Ragged, vmap
from jaxprtool.errors import ArgumentsError
from jaxprtool.ir.ragged import row_positions

ROWS = np.arange(16, dtype=np.float32).reshape(8, 2)
LENGTHS = np.array([3, 0, 5], np.int32)


def test_examples_can_be_extracted():
    ragged = Ragged(ROWS, LENGTHS)
    assert len(ragged) == 3
    for each, (start, stop) in zip(ragged, [(0, 3), (3, 3), (3, 8)], strict=True):
        np.testing.assert_array_equal(each, ROWS[start:stop])
    np.testing.assert_array_equal(ragged[-1], ROWS[3:])
    with pytest.raises(IndexError):
        ragged[3]
    again = Ragged.of(list(ragged))
    np.testing.assert_array_equal(again.values, ROWS)
    np.testing.assert_array_equal(again.lengths, LENGTHS)


def test_unused_rows_are_allowed():
    ragged = Ragged.of([ROWS[:3], ROWS[3:]], rows=10)
    assert ragged.values.shape == (10, 2) and not ragged.values[8:].any()
    np.testing.assert_array_equal(ragged[1], ROWS[3:])


def test_unused_rows_are_allowed_with_traced_lengths():
    def loss(values, lengths):
        return vmap(lambda x: jnp.log(x).sum())(Ragged(values, lengths)).sum()

    over = np.concatenate([ROWS + 1, np.full((2, 2), np.nan, np.float32)])
    found = jax.jit(jax.grad(loss))(over, LENGTHS)
    np.testing.assert_allclose(found[:8], 1 / (ROWS + 1), rtol=1e-6)
    assert not found[8:].any()


@pytest.mark.parametrize("size", [None, 7])
def test_padded_has_zeros_after_each_example(size):
    bad = np.concatenate([ROWS, np.full((2, 2), np.nan, np.float32)])
    ragged = jax.tree.map(lambda leaf: bad if leaf is ROWS else leaf, Ragged(ROWS, LENGTHS))
    expected = np.zeros((3, size or 5, 2), np.float32)
    for lane, example in zip(expected, Ragged(ROWS, LENGTHS), strict=True):
        lane[: len(example)] = example
    np.testing.assert_array_equal(ragged.padded(size), expected)
    if size:
        np.testing.assert_array_equal(jax.jit(lambda r: r.padded(size))(ragged), expected)


def test_a_ragged_is_a_pytree_that_passes_through_transformations():
    ragged = Ragged(ROWS, LENGTHS, axis="time", longest=6)
    doubled = jax.jit(lambda r: jax.tree.map(lambda leaf: leaf * 2, r))(ragged)
    assert isinstance(doubled, Ragged) and (doubled.axis, doubled.longest) == ("time", 6)
    np.testing.assert_array_equal(doubled.values, ROWS * 2)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path({"x": ragged})]
    assert paths == ["['x'].values", "['x'].lengths"]
    assert jax.tree.map(lambda _: None, ragged).values is None


@pytest.mark.parametrize(
    ("rows", "lengths"), [(8, [3, 0, 5]), (10, [0, 0, 8, 0]), (3, [0]), (0, [0, 0])]
)
def test_positions_of_rows(rows, lengths):
    examples = [i for i, n in enumerate(lengths) for _ in range(n)]
    positions = [p for n in lengths for p in range(n)]
    left = range(rows - len(examples))
    found = jax.jit(row_positions, static_argnums=1)(np.array(lengths, np.int32), rows)
    assert found.examples.tolist() == examples + [len(lengths) for _ in left]
    assert found.positions.tolist() == positions + list(left)


@pytest.mark.parametrize(
    ("ragged", "shown"),
    [
        (Ragged(ROWS, LENGTHS), "Ragged(f32[8,2], lengths=[3, 0, 5], axis='n')"),
        (
            Ragged(jnp.arange(10), np.ones(10, int), longest=4),
            "Ragged(i32[10], lengths=i64[10] of 1 to 1, axis='n', longest=4)",
        ),
        (
            jax.tree.map(lambda _: None, Ragged(ROWS, LENGTHS)),
            "Ragged(None, lengths=None, axis='n')",
        ),
    ],
)
def test_repr_has_shape_and_lengths(ragged, shown):
    assert repr(ragged).replace("i64", "i32") == shown.replace("i64", "i32")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ragged(ROWS, [3, 4]), "Ragged: lengths add up to 7, but values have 8 rows"),
        (lambda: Ragged(ROWS, [3, 6]), "Ragged: lengths add up to 9, but values have 8 rows"),
        (lambda: Ragged(ROWS, [9, -1]), "Ragged: lengths[1] is -1"),
        (
            lambda: Ragged(ROWS, [3.0, 5.0]),
            "Ragged: lengths must be i32[B], one for each example, not f32[2]",
        ),
        (
            lambda: Ragged(ROWS, 8),
            "Ragged: lengths must be i32[B], one for each example, not i32[]",
        ),
        (lambda: Ragged(np.float32(1), [1]), "Ragged: values f32[] have no rows"),
        (lambda: Ragged("rows", [1]), "Ragged: values must be an array, not str"),
        (lambda: Ragged(ROWS, LENGTHS, axis="2n"), "Ragged: axis must be an identifier, not '2n'"),
        (lambda: Ragged(ROWS, LENGTHS, longest=4), "Ragged: lengths[2] is 5, but longest=4"),
        (
            lambda: Ragged(Ragged(ROWS, LENGTHS), [3]),
            "Ragged: values must be an array, not a Ragged",
        ),
        (lambda: Ragged.of([]), "Ragged.of: examples must have at least one element"),
        (
            lambda: Ragged.of([ROWS, ROWS[:, :1]]),
            "Ragged.of: example 1 is f32[8,1], but example 0 is f32[8,2]: examples may differ "
            "only in their number of rows",
        ),
        (
            lambda: Ragged.of([ROWS[:2], ROWS[2:]], longest=5),
            "Ragged: lengths[1] is 6, but longest=5",
        ),
        (lambda: Ragged.of([ROWS], rows=7), "Ragged.of: rows=7, but the examples have 8"),
        (
            lambda: Ragged(ROWS, LENGTHS).padded(4),
            "Ragged.padded: size=4, but an example has 5 rows",
        ),
        (
            lambda: jax.jit(lambda r: r.padded())(Ragged(ROWS, LENGTHS)),
            "Ragged.padded: the lengths are traced, so the size must be given",
        ),
        (
            lambda: jax.jit(lambda r: r[0])(Ragged(ROWS, LENGTHS)),
            "Ragged: the lengths are traced, so no example can be selected",
        ),
    ],
)
def test_invalid_arguments_are_a_one_line_error(make, message):
    with pytest.raises(ArgumentsError) as error:
        make()
    assert error.value.message == message


def test_a_ragged_is_not_an_array():
    with pytest.raises(TypeError, match=r"requires ndarray or scalar arguments, got .*Ragged"):
        jnp.sin(Ragged(ROWS, LENGTHS))
    with pytest.raises(TypeError, match="a Ragged is not an array"):
        np.asarray(Ragged(ROWS, LENGTHS))
