"""vmap of a Ragged equals a Python loop over its examples, in one call."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxprtool
from jaxprtool import Ragged, vmap
from jaxprtool.errors import JaxprToolError
from tests.share import first_and_proofs

LENGTHS = {
    "some empty": [0, 3, 0, 1],
    "one row each": [1, 1, 1],
    "equal": [4, 4],
    "all different": [5, 2, 0, 3, 1],
    "one long, many short": [17, 1, 2, 1, 2, 1],
    "all empty": [0, 0],
}

W = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)


def ragged(lengths, tail=(4,), axis="n", seed=0):
    values = np.random.default_rng(seed).normal(size=(sum(lengths), *tail)).astype(np.float32)
    return Ragged(values, lengths, axis=axis)


def assert_alike(result, expected):
    """Assert that results equal those of the examples: rows of a Ragged or of an array."""
    if isinstance(result, Ragged):
        found = [np.asarray(each) for each in result]
        assert [each.shape for each in found] == [np.shape(each) for each in expected]
    else:
        assert result.shape == (len(expected), *np.shape(expected[0]))
        found = list(result)
    for mine, each in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, each, rtol=2e-5, atol=2e-5)


def total(result):
    values = result.values if isinstance(result, Ragged) else result
    return jnp.sum(jnp.cos(values) * (1 + jnp.arange(values.size).reshape(values.shape) / 7))


def changed(batch, lengths):
    """Return a Ragged whose lengths were replaced after its construction."""
    batch.lengths = np.array(lengths, np.int32)
    return batch


def of_all(fun, lengths, values, w):
    """Return the results for all examples, and a number to differentiate."""
    result = vmap(fun, in_axes=(0, None))(Ragged(values, lengths), w)
    return total(result), result


def one_by_one(fun, lengths, values, w):
    """Return the result of `of_all`, computed by a loop."""
    each = [fun(example, w) for example in Ragged(values, lengths)]
    join = jnp.concatenate if each[0].shape[:1] == (lengths[0],) else jnp.stack
    return total(join(each)), each


def _layer(x, w):
    """Apply a transformer layer: attention with two heads, a residual, a norm, a small network."""

    def norm(v):
        return (v - v.mean(-1, keepdims=True)) / jnp.sqrt(v.var(-1, keepdims=True) + 1e-3)

    q, k, v = (norm(x) @ (w * c) for c in (0.5, 0.7, 0.9))
    heads = [t.reshape(-1, 2, 2).transpose(1, 0, 2) for t in (q, k, v)]
    scores = jnp.einsum("hid,hjd->hij", heads[0], heads[1]) / np.sqrt(2)
    causal = jnp.arange(x.shape[0])[:, None] >= jnp.arange(x.shape[0])
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
    mixed = jnp.einsum("hij,hjd->hid", weights, heads[2]).transpose(1, 0, 2).reshape(-1, 4)
    x = x + mixed @ w
    return x + jax.nn.gelu(norm(x) @ w) @ w.T


def _normal(x, w):
    return (
        jax.nn.softmax(jnp.sqrt(x @ x.T + 9)) @ (x / jnp.linalg.norm(x, axis=1, keepdims=True)) @ w
    )


#: Functions of one example, f32[n,4], and of a shared f32[4,4].
CASES = {
    "elementwise": lambda x, w: jnp.sin(x) * x + 1,
    "a number for each row of a lane": lambda x, w: jnp.arange(x.shape[0]) * x.sum(1),
    "iota alone": lambda x, w: jnp.arange(x.shape[0]),
    "a scalar of a lane broadcast along it": lambda x, w: x - jnp.tanh(x.sum()),
    "a vector of a lane broadcast along it": lambda x, w: x * x.sum(0),
    "what is shared broadcast along it": lambda x, w: jnp.broadcast_to(w[0], x.shape),
    "sums in each lane": lambda x, w: x.sum(0),
    "sums of each row": lambda x, w: x.sum(1),
    "sums of sums": lambda x, w: (x.sum(1) * 2).sum(),
    "a mean": lambda x, w: x.sum(0) / (x.shape[0] + 1),
    "a product with a matrix": lambda x, w: x @ w,
    "a product with a vector": lambda x, w: x @ w[1],
    "transposed and back": lambda x, w: (w @ x.T).T,
    "the rows against each other": lambda x, w: x.T @ x,
    "einsum": lambda x, w: jnp.einsum("nd,de,ne->n", x, w, x),
    "all pairs of rows": lambda x, w: jnp.tanh(x @ x.T) @ x,
    "a transformer layer": _layer,
}


#: The cases in CI. The sweep tries all.
FEW_CASES = ["iota alone", "sums of sums", "einsum", "a transformer layer"]
FEW_LENGTHS = ["some empty"]


@pytest.mark.parametrize(
    ("name", "lengths"),
    first_and_proofs(
        [
            (name, lengths)
            if name in FEW_CASES and lengths in FEW_LENGTHS
            else pytest.param(name, lengths, marks=pytest.mark.sweep)
            for name in CASES
            for lengths in LENGTHS
        ]
    ),
)
def test_results_and_derivatives_equal_those_of_a_loop_over_examples(name, lengths):
    numbers = np.array(LENGTHS[lengths], np.int32)
    values = ragged(numbers).values

    def run(of):
        gradients = jax.grad(partial(of, CASES[name], numbers), (0, 1), has_aux=True)
        return jax.jit(gradients)(values, W)

    found, result = run(of_all)
    expected, each = run(one_by_one)
    assert_alike(result, each)
    for gradient, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-4)


def test_results_are_ragged_or_have_a_leading_batch_axis():
    batch = ragged([2, 3])
    result = vmap(lambda x: {"rows": x * 2, "sum": (x.sum(0), x.shape[0]), "one": 1.0})(batch)
    assert isinstance(result["rows"], Ragged) and result["rows"].axis == "n"
    assert result["rows"].lengths is batch.lengths
    assert result["sum"][0].shape == (2, 4)
    assert result["sum"][1].tolist() == [2, 3] and result["one"].tolist() == [1, 1]
    again = vmap(lambda x, y: (x * y).sum())(batch, result["rows"])
    assert_alike(again, [(x * x * 2).sum() for x in batch])


def test_the_program_compiles_once_for_all_lengths_with_the_same_number_of_rows():
    traces = []

    @jax.jit
    def one(x):
        return jax.nn.softmax(x @ x.T).sum(0).max()

    @jax.jit
    def sums(batch):
        traces.append(batch)
        return vmap(lambda x: jax.nn.softmax(x @ x.T).sum(0).max())(batch)

    for lengths in ([3, 4, 1], [0, 8, 0], [2, 2, 2]):
        batch = Ragged.of([ragged([n], seed=n).values for n in lengths], rows=8)
        if sum(lengths) < 8 or traces == []:
            expected = [one(x) if len(x) else -np.inf for x in batch]
            np.testing.assert_allclose(sums(batch), expected, rtol=1e-5)
    assert len(traces) <= 2  # the second is of unused rows


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: x + x.mean(0),
        lambda x: jax.nn.softmax(x @ x.T) @ x,
        lambda x: x.T @ x,
        lambda x: lax.scan(lambda state, row: (state + row, state), jnp.ones(4), x),
    ],
)
def test_a_batch_may_have_no_examples(fun):
    batch = Ragged(jnp.zeros((0, 4)), jnp.zeros(0, jnp.int32))
    for result in jax.tree.leaves(jax.jit(vmap(fun))(batch)):
        assert result.shape[0] == 0


@pytest.mark.proof
def test_unused_rows_affect_no_result_and_no_gradient():
    lengths, rows = np.array([3, 0, 2], np.int32), ragged([5]).values
    over = np.full((3, 4), np.nan, np.float32)
    batch = Ragged.of([rows[:3], rows[:0], rows[3:]], rows=8)

    def value(values, w):
        spare = jax.tree.map(lambda leaf: values if leaf is batch.values else leaf, batch)
        whole = vmap(_normal, in_axes=(0, None))(spare, w)
        return total(Ragged(whole.values[:5], lengths)) + jnp.sum(whole.values[5:] * 3)

    def expected(values, w):
        return of_all(_normal, lengths, values[:5], w)[0]

    bad = np.concatenate([rows, over])
    mine = jax.jit(jax.grad(value, (0, 1)))(bad, W)
    theirs = jax.jit(jax.grad(expected, (0, 1)))(bad, W)
    np.testing.assert_allclose(mine[0][:5], theirs[0][:5], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mine[1], theirs[1], rtol=1e-4, atol=1e-5)
    assert not np.asarray(mine[0][5:]).any()


@pytest.mark.proof
def test_other_arguments_are_mapped_or_shared_as_in_vmap():
    batch = ragged([2, 0, 3])
    scales, offsets = jnp.arange(3.0) + 1, jnp.arange(12.0).reshape(4, 3)

    def fun(x, scale, options, offset):
        assert options["power"] == 2  # a shared value is the same as outside
        return (x * scale) ** options["power"] + offset + options["bias"]

    result = vmap(fun, in_axes=(0, 0, None, 1))(batch, scales, {"power": 2, "bias": W[0]}, offsets)
    assert_alike(
        result, [(x * s) ** 2 + o + W[0] for x, s, o in zip(batch, scales, offsets.T, strict=True)]
    )
    pairs = vmap(lambda x, y: (x.sum(0), y.sum(0)), out_axes=(1, 0))(batch, scales[:, None])
    np.testing.assert_allclose(pairs[0].T, [x.sum(0) for x in batch], rtol=1e-5)


@pytest.mark.proof
def test_two_independent_lengths():
    sources, targets = ragged([3, 1, 2]), ragged([2, 4, 1], axis="m", seed=3)

    def attend(x, y):
        return jax.nn.softmax(x @ y.T) @ y

    result = vmap(attend)(sources, targets)
    assert result.axis == "n"
    assert_alike(result, [attend(x, y) for x, y in zip(sources, targets, strict=True)])


def test_rows_of_other_lengths_are_returned_with_these():
    batch = ragged([3, 0, 1])
    result = jax.jit(vmap(lambda x: x[1:] - x[:-1]))(batch)
    assert result.lengths.tolist() == [2, 0, 0] and result.axis == "n_minus_1"
    assert_alike(result, [x[1:] - x[:-1] for x in batch])
    doubled = jax.jit(vmap(lambda x: jnp.concatenate([x, x])))(batch)
    assert_alike(doubled, [jnp.concatenate([x, x]) for x in batch])


@pytest.mark.proof
def test_under_other_transformations():
    batch, directions = ragged([2, 1]), ragged([2, 1], seed=5)

    def fun(values):
        return vmap(lambda x: jnp.tanh(x).sum(0))(Ragged(values, batch.lengths))

    primal, tangent = jax.jvp(fun, (batch.values,), (directions.values,))
    np.testing.assert_allclose(primal, [jnp.tanh(x).sum(0) for x in batch], rtol=1e-5)
    np.testing.assert_allclose(
        tangent,
        [((1 - jnp.tanh(x) ** 2) * t).sum(0) for x, t in zip(batch, directions, strict=True)],
        rtol=1e-5,
    )
    stack = jnp.stack([batch.values, directions.values])
    np.testing.assert_allclose(jax.vmap(fun)(stack), [fun(v) for v in stack], rtol=1e-5)
    program = jaxprtool.trace(fun, batch.values)
    np.testing.assert_allclose(program(batch.values), fun(batch.values), rtol=1e-6)


@pytest.mark.proof
@pytest.mark.parametrize("array", [np.array, jnp.array])
def test_lengths_that_are_known_may_be_used_where_jax_traces(array):
    values, lengths = np.arange(12, dtype=np.float32).reshape(4, 3), array([1, 0, 3])

    def mapped(values):
        batch = Ragged(values, lengths)
        sums, pairs = vmap(lambda x: (x.sum(0), x @ x.T @ x))(batch)
        twice = vmap(lambda x: jnp.concatenate([x, x]))(batch)
        return sums, pairs.values, twice.values, twice.lengths, batch.padded(), batch[2]

    alone = mapped(values)
    assert [each.shape for each in alone] == [(3, 3), (4, 3), (8, 3), (3,), (3, 3, 3), (3, 3)]
    looped = lax.scan(lambda carry, _: (carry, mapped(values + carry)), 0.0, None, length=1)[1]
    for results in (
        jax.jit(mapped)(values),
        jaxprtool.trace(mapped, values)(values),
        jax.tree.map(lambda x: x[0], looped),
        lax.cond(True, mapped, lambda x: jax.tree.map(jnp.zeros_like, alone), values),
    ):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), results, alone)


def test_a_mapped_size_is_explained():
    for make in (jnp.arange, jnp.ones, lambda n: jnp.ones(3)[:n]):
        with pytest.raises((TypeError, IndexError)) as error:
            vmap(make)(jnp.array([1, 2]))
        assert "cannot depend on a mapped value" in error.value.__notes__[-1]


def test_batched_prints_happen_for_each_example_and_shared_ones_once(capfd):
    def fun(x):
        jax.debug.print("shared {}", 1 + jnp.float32(2))
        jax.debug.print("sum {}", x.shape[0] * 1)
        return x

    vmap(fun)(ragged([2, 0]))
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "shared 3.0", "sum 0", "sum 2"]


# --- piles --------------------------------------------------------------------------------------
# In 2022, JAX represented such values as piles. These were the tests of their functions.


def test_the_stacked_axis_of_a_pile():
    """pile_axis: rows of examples are concatenated, numbers are stacked."""
    result = vmap(lambda n_rows: (n_rows, n_rows[:, 0].sum()))(ragged([2, 1, 3]))
    assert result[0].values.shape == (6, 4) and result[1].shape == (3,)


def test_an_example_is_taken_from_a_pile_and_put_back():
    """to_elt and from_elt: a function takes and returns one example, outside it is a pile."""
    batch, seen = ragged([2, 1, 3]), []

    def fun(x):
        seen.append((x.ndim, x.shape[1], isinstance(x.shape[0], int)))
        return x

    result = vmap(fun)(batch)
    assert seen == [(2, 4, False)]
    np.testing.assert_array_equal(result.values, batch.values)
    np.testing.assert_array_equal(result.lengths, batch.lengths)


def test_unbatched_zeros_are_broadcast():
    """zero_if_mapped: the derivative of a value that an example does not use."""
    batch = ragged([2, 1])
    gradient = vmap(jax.grad(lambda x, y: (y * y).sum(), argnums=(0, 1)))(batch, batch)
    assert not np.asarray(gradient[0].values).any()
    np.testing.assert_allclose(gradient[1].values, 2 * batch.values)


def test_a_pile_is_combined_with_an_array():
    """matchaxis: a batched or shared value is broadcast to each row."""
    batch, bias = ragged([2, 0, 1]), jnp.arange(3.0)
    result = vmap(lambda x, b: jnp.where(b > 0, x, b * x))(batch, bias)
    assert_alike(result, [jnp.where(b > 0, x, b * x) for x, b in zip(batch, bias, strict=True)])
    shared = vmap(lambda x: x + lax.cumsum(jnp.ones(4)))(batch)
    assert_alike(shared, [x + np.arange(1, 5) for x in batch])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: vmap(lambda x: vmap(lambda y: y)(Ragged(x, jnp.array([1]))).values)(
                ragged([2])
            ),
            "argument y is a Ragged inside an example of another Ragged, which is not supported",
        ),
        (
            lambda: vmap(lambda x, y: x)(ragged([2, 1]), ragged([1, 2])),
            "argument y and argument x have examples of different lengths, but both have axis 'n'",
        ),
        (
            lambda: vmap(lambda x: x, in_axes=None, axis_size=2)(ragged([2, 1])),
            "argument x is a Ragged, whose examples are mapped: its in_axes must be 0, not None",
        ),
        (
            lambda: vmap(lambda x, y: x)(ragged([2, 1]), jnp.ones(3)),
            "vmap got inconsistent sizes for array axes to be mapped: * one axis had size 2: axis "
            "0 of argument x of type i32[2]; * one axis had size 3: axis 0 of argument y of type "
            "float32[3]",
        ),
        (
            lambda: vmap(lambda x: x, out_axes=1)(ragged([2, 1])),
            "result has a row for each row of an example: its out_axes must be 0, not 1",
        ),
        (
            lambda: vmap(lambda x: {"t": x.T})(ragged([2, 1])),
            "result['t'] is f32[4,n] for each example, but its rows must be along axis 0",
        ),
        (
            lambda: vmap(lambda x: x @ x.T)(ragged([2, 1])),
            "result is f32[n,n] for each example, but a result can have only one ragged axis, of "
            "a size such as n, 2*n or n + 1",
        ),
        (
            lambda: Ragged(W, [4], longest=0),
            "Ragged: longest must be an integer of at least 1, not 0",
        ),
        (
            lambda: Ragged(W, [4], longest="4"),
            "Ragged: longest must be an integer of at least 1, not '4'",
        ),
        (
            lambda: Ragged(W, [4], shortest=-1),
            "Ragged: shortest must be an integer of at least 0, not -1",
        ),
        (
            lambda: Ragged(W, [4], longest=4, shortest=5),
            "Ragged: shortest=5 is more than longest=4",
        ),
        (lambda: Ragged(W, [3, 1], shortest=2), "Ragged: lengths[1] is 1, but shortest=2"),
        (lambda: Ragged.of([W, W[:1]], shortest=2), "Ragged: lengths[1] is 1, but shortest=2"),
        (
            lambda: vmap(lambda x: x)(changed(Ragged(W, [2, 2], shortest=1), [0, 4])),
            "argument x.lengths is 0 at [0], but must be a length of at least 1",
        ),
        (lambda: Ragged.of([W], axis="1x"), "Ragged.of: axis must be an identifier, not '1x'"),
        (
            lambda: Ragged.of([W], rows=4.5),
            "Ragged.of: rows must be an integer of at least 0, not 4.5",
        ),
        (lambda: Ragged.of([W, W[0, 0]]), "Ragged.of: example 1 is f32[], which has no rows"),
        (lambda: Ragged.of(3), "Ragged.of: examples must be a sequence of arrays, not 3"),
        (
            lambda: ragged([2]).padded("x"),
            "Ragged.padded: size must be an integer of at least 0, not 'x'",
        ),
        (
            lambda: vmap(jnp.sum)(jax.tree.map(jnp.zeros_like, ragged([2, 1]))),
            "argument a.lengths adds up to 0, but there are 3 rows",
        ),
        (
            lambda: vmap(lambda x: x)(changed(ragged([2, 1]), [4, -1])),
            "argument x.lengths is -1 at [1], but must be a length of at least 0",
        ),
        (
            lambda: vmap(lambda x: x)(changed(Ragged(W, [2, 2], longest=2), [1, 3])),
            "argument x.lengths is 3 at [1], but must be a length from 0 to 2",
        ),
        (
            lambda: vmap(lambda x: x)(changed(Ragged.of([W], rows=6), [7])),
            "argument x.lengths adds up to 7, but there are 6 rows",
        ),
        (
            lambda: jax.jit(vmap(lambda x: x))(jax.tree.map(jnp.float32, ragged([2, 1]))),
            "argument x.lengths are of dtype float32",
        ),
        (
            lambda: vmap(lambda x: x.sum(), axis_name="i")(ragged([2, 1])),
            "vmap axis_name='i' cannot be combined with a Ragged argument",
        ),
        (
            lambda: vmap(lambda x: x.sum(), in_axes=1)(ragged([2, 1])),
            "argument x is a Ragged, whose examples are mapped: its in_axes must be 0, not 1",
        ),
        (
            lambda: vmap(lambda x: Ragged(x, jnp.array([1, 1])))(ragged([2, 2])),
            "the result is a Ragged made of the rows of one example of a Ragged",
        ),
        (
            lambda: vmap(lambda x: x.sum(), out_axes=None)(ragged([2, 1])),
            "at vmap out_axes, got axis spec None but output was batched on axis 0",
        ),
    ],
)
def test_invalid_arguments_are_a_one_line_error(call, message):
    with pytest.raises((JaxprToolError, ValueError)) as error:
        call()
    assert message in str(error.value).replace("int32[", "i32[").replace("i64", "i32")


TABLE = jnp.arange(32.0).reshape(8, 4)

#: Functions of an example of up to 6 rows, which slice a table of 8 rows.
CUT = {
    "x[:n]": lambda x: TABLE[: x.shape[0]] * x,
    "x[2:n+2]": lambda x: (TABLE[2 : x.shape[0] + 2] * x).sum(0),
    "columns": lambda x: TABLE.T[:, : x.shape[0]].T * x,
    "slice": lambda x: lax.slice(TABLE, (1, 0), (x.shape[0] + 1, 4)) * x,
    "dynamic slice": lambda x: lax.dynamic_slice_in_dim(TABLE, 2, x.shape[0]) * x,
    "two axes": lambda x: (TABLE @ TABLE.T)[: x.shape[0], : x.shape[0]] @ x,
}


def next_token_loss(tokens, w):
    scores = jax.nn.log_softmax(TABLE[tokens[:-1]] @ w)
    return -jnp.take_along_axis(scores, tokens[1:, None], 1).mean()


@pytest.mark.proof
def test_examples_with_a_minimum_number_of_rows():
    w = jnp.arange(32.0).reshape(4, 8) / 9
    examples = [np.arange(n, dtype=np.int32) % 8 for n in (5, 2, 3)]
    batch = Ragged.of(examples, shortest=2)
    assert repr(batch) == "Ragged(i32[10], lengths=[5, 2, 3], axis='n', shortest=2)"
    loss = vmap(next_token_loss, in_axes=(0, None))
    expected = [next_token_loss(each, w) for each in examples]
    np.testing.assert_allclose(loss(batch, w), expected, rtol=1e-5)
    found = jax.jit(jax.grad(lambda w, batch: loss(batch, w).sum()))(w, batch)
    gradient = sum(jax.grad(next_token_loss, 1)(each, w) for each in examples)
    np.testing.assert_allclose(found, gradient, rtol=1e-4, atol=1e-5)
    both = vmap(lambda x, y: x[:-1] + y[:-1].mean())(Ragged.of(examples), batch)
    assert [len(each) for each in both] == [4, 1, 2]
    same = vmap(lambda x: x + 1)(batch)
    assert same.shortest == 2 and jax.tree.structure(same) == jax.tree.structure(batch)
    with pytest.raises(jax.errors.InconclusiveDimensionOperation) as error:
        loss(Ragged.of(examples), w)
    assert error.value.__notes__[-1] == (
        "declare the range with Ragged(values, lengths, shortest=2) or longest=64"
    )


@pytest.mark.parametrize("name", first_and_proofs(CUT))
@pytest.mark.parametrize("lengths", [[3, 0, 5], [1, 6, 2]])
def test_a_shared_array_is_sliced_to_the_rows_of_each_example(name, lengths):
    values = jnp.asarray(np.random.default_rng(0).normal(size=(sum(lengths), 4)), jnp.float32)
    batch = Ragged(values, jnp.array(lengths), longest=6)
    found = list(jax.jit(vmap(CUT[name]))(batch))
    for one, example in zip(found, batch, strict=True):
        np.testing.assert_allclose(one, jax.jit(CUT[name])(example), rtol=1e-4, atol=1e-4)
