"""ragged with two ragged axes of a value: pairs of all rows, or padded examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxprtool
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.equations import equations
from jaxprtool.ir.ragged import Ragged, unchecked
from jaxprtool.passes.mapping.ragged import table
from tests.passes.mapping.test_ragged import (
    FILLED,
    LENGTHS,
    W,
    check,
    examples,
    names,
    ragged,
    rows,
)

ALL_LENGTHS = {
    "different": LENGTHS,
    "of one row": np.array([1, 1, 1], np.int32),
    "equal": np.array([3, 3], np.int32),
    "one long": np.array([9, 1, 0, 1, 1], np.int32),
}


def causal(x, w):
    scores, i = (x @ w) @ x.T / 2, jnp.arange(x.shape[0])
    return jax.nn.softmax(jnp.where(i[:, None] >= i, scores, -jnp.inf)) @ x


def _heads(x, w):
    q, k = (x @ w).reshape(-1, 2, 2), x.reshape(-1, 2, 2)
    i = jnp.arange(x.shape[0])
    scores = jnp.einsum("nhd,mhd->hnm", q, k) - jnp.abs(i[:, None] - i) * 0.3
    return jnp.einsum("hnm,mhd->nhd", jax.nn.softmax(scores), k).reshape(-1, 4)


def _of_jax(x, w):
    q = (x @ w).reshape(1, -1, 2, 2)
    return jax.nn.dot_product_attention(q, q, q, is_causal=True).reshape(-1, 4)


def _biased(x, w):
    i = jnp.arange(x.shape[0])
    table = jnp.concatenate([w.ravel()] * 2)
    return jax.nn.softmax(x @ x.T + table[jnp.clip(i[:, None] - i + 8, 0, 31)]) @ x


def _by_columns(x, w):
    return jax.nn.softmax(x @ w @ x.T, 0).T @ x


def _sums(x, w):
    s = jnp.tanh(x @ w @ x.T)
    return s.sum(0), s.sum(), jnp.sum(s * x.sum(1), 1), jnp.diff(s @ x, axis=1), (s.T @ s).sum(1)


def _extremes(x, w):
    s = jnp.tanh(x @ w @ x.T)
    by_lane = (s * x.sum()).max(0)
    return s.max(1), s.min(0), by_lane, (s > 0).all(0), (s > 0.5).any(1), jax.nn.relu(s).max(1)


def _layers(x, w):
    def layer(h, w):
        scores = jax.nn.softmax(h @ w @ h.T)
        return jnp.tanh(scores @ h), scores

    h, scores = lax.scan(layer, x, jnp.stack([w, w.T]))
    return h, scores.sum((0, 1))


def _sorted(x, w):
    return jnp.sort(jnp.tanh(x @ w @ x.T) * 2, 1).sum(0) @ x


def _gradient(x, w):
    return jax.grad(lambda x: jnp.sin(causal(x, w)).sum())(x)


FUNCTIONS = {
    "causal": causal,
    "heads": _heads,
    "of JAX": _of_jax,
    "biased": _biased,
    "by columns": _by_columns,
    "sums": _sums,
    "layers": _layers,
    "remat": jax.checkpoint(causal),
    "gradient": _gradient,
}
FEW = ["heads", "of JAX", "biased", "sums", "layers", "gradient"]


@pytest.fixture
def small_blocks(monkeypatch):
    """Make blocks so small that a few rows span several."""
    monkeypatch.setattr(table, "SMALLEST_BLOCK", 2)


@pytest.mark.proof
@pytest.mark.parametrize("name", names(FUNCTIONS, ["of JAX", "sums"]))
def test_pairs_of_all_rows_equal_a_loop(name):
    check(FUNCTIONS[name], LENGTHS, "packed")


@pytest.mark.proof
@pytest.mark.parametrize("name", names(FUNCTIONS, FEW))
def test_pairs_within_a_band_equal_a_loop(name, small_blocks):
    check(FUNCTIONS[name], LENGTHS, "packed", longest=5)


@pytest.mark.parametrize("lengths", names(ALL_LENGTHS, ["one long"]))
@pytest.mark.parametrize("layout", ["packed", "padded", None])
def test_attention_equals_a_loop_for_all_lengths(lengths, layout):
    check(causal, ALL_LENGTHS[lengths], layout)


@pytest.mark.parametrize("longest", [None, 4])
def test_extrema_of_non_empty_examples(longest, small_blocks):
    check(_extremes, FILLED, "packed", longest=longest)


def test_operations_without_a_rule_for_pairs_are_padded_and_continue_as_pairs():
    check(_sorted, LENGTHS)


@pytest.mark.proof
def test_pairs_within_a_band_are_padded_and_continue_as_pairs(small_blocks):
    lengths = np.tile(LENGTHS, 2)
    x = rows(lengths)

    def of_all(x):
        batch = unchecked(x, lengths, "n", 6, True)
        return jaxprtool.vmap(_sorted, in_axes=(0, None))(batch, W)

    @jax.jit
    def one_by_one(x):
        return jnp.stack([_sorted(each, W) for each in examples(x, lengths)])

    assert "[22,15]" in str(jax.make_jaxpr(of_all)(x))
    np.testing.assert_allclose(of_all(x), one_by_one(x), rtol=1e-5, atol=1e-5)
    mine, theirs = (jax.grad(lambda x, f=f: f(x).sum())(x) for f in (of_all, one_by_one))
    np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


def wide(program):
    """Return the shapes with all rows, a window, or a whole padded example along two axes."""
    shapes = {tuple(map(str, v.aval.shape)) for e in equations(program.jaxpr) for v in e.outvars}
    found = {shape for shape in shapes if len(shape) < 4 and max(map(shape.count, "N6")) == 2}
    return found | {shape for shape in shapes if shape == ("N", "48")}


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, ("N", "N")),  # an example may have all rows
        ({"longest": 6}, ("5", "6", "6")),  # N is unknown
        ({"longest": 6, "layout": "packed"}, ("N", "48")),
        ({"longest": 6, "layout": "padded"}, ("5", "6", "6")),
    ],
)
def test_scores_have_the_requested_layout_or_the_smaller_one(options, shape):
    program = ragged(lambda x, w: jax.nn.softmax(x @ x.T) @ x, LENGTHS, **options)
    assert wide(program) - {("6", "6")} == {shape}


@pytest.mark.parametrize(("rows", "size"), [(11, 11), (30, 6)])
def test_the_known_number_of_rows_decides_the_layout(rows, size):
    def mixed(values):
        batch = unchecked(values, LENGTHS, "n", 6, False)
        return jaxprtool.vmap(lambda x: jax.nn.softmax(x @ x.T) @ x)(batch).values

    text = str(jax.make_jaxpr(mixed)(jnp.ones((rows, 4))))
    assert ("[11,11]" in text) == (size == 11)
    assert ("[5,6,6]" in text) == (size == 6)


def test_an_unpackable_operation_is_refused_with_layout_packed():
    def fun(x, w):
        return lax.sort(x @ x.T, 1) @ x

    with pytest.raises(UnsupportedError, match=r"^sort at .*py:\d+ cannot be made") as error:
        ragged(fun, LENGTHS, layout="packed")
    assert error.value.message.endswith("it needs padding, but the layout is 'packed'")


@pytest.mark.parametrize("name", ["causal", "of JAX"])
def test_unused_rows_affect_no_result_and_no_derivative(name):
    fun, rows = FUNCTIONS[name], int(LENGTHS.sum())
    x = np.random.default_rng(0).normal(size=(rows, 4)).astype(np.float32)
    over = np.concatenate([x, np.full((4, 4), np.nan, np.float32)])

    def total(values, w):
        out = jaxprtool.vmap(fun, in_axes=(0, None))(
            unchecked(values, LENGTHS, "n", None, len(values) == rows), w
        ).values
        return jnp.sin(out).sum(), out

    (of_x, of_w), out = jax.jit(jax.grad(total, (0, 1), has_aux=True))(over, W)
    (wanted_x, wanted_w), wanted = jax.jit(jax.grad(total, (0, 1), has_aux=True))(x, W)
    np.testing.assert_array_equal(out[rows:], 0)
    np.testing.assert_array_equal(of_x[rows:], 0)
    np.testing.assert_allclose(out[:rows], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_x[:rows], wanted_x, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(of_w, wanted_w, rtol=1e-4, atol=1e-5)


@pytest.mark.proof
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_example_affects_no_result_of_another(bad):
    rng = np.random.default_rng(0)
    each = [rng.normal(size=(n, 4)).astype(np.float32) for n in LENGTHS]
    each[2][1, 2] = bad
    for fun in (causal, lambda x, w: (x @ x.T) @ x):
        out = jaxprtool.vmap(fun, in_axes=(0, None))(Ragged.of(each), W)
        for found, x in zip(out, each, strict=True):
            wanted = np.asarray(fun(jnp.asarray(x), W))
            np.testing.assert_array_equal(np.isfinite(found), np.isfinite(wanted))
            finite = np.isfinite(wanted)
            np.testing.assert_allclose(
                np.asarray(found)[finite], wanted[finite], rtol=1e-4, atol=1e-5
            )
