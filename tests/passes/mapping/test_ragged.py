"""ragged: examples of different lengths in one program, compared with a loop over them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxprtool import trace
from jaxprtool.errors import ArgumentsError, PipelineError, UnsupportedError
from jaxprtool.ir.equations import equations, named
from jaxprtool.loading.argspec import read_args
from tests.share import first_and_proofs, for_sweep_unless, share

LENGTHS = np.array([2, 0, 5, 1, 3], np.int32)
FILLED = np.array([2, 4, 1], np.int32)
W = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)


def rows(lengths):
    shape = int(lengths.sum()), 4
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def traced(fun, types="f32[n,4], f32[4,4]"):
    positional, keywords = read_args(types)
    return trace(fun, *positional, **keywords)


def ragged(fun, lengths, types="f32[n,4], f32[4,4]", **options):
    more = "".join(f", {name}={value!r}" for name, value in options.items())
    return traced(fun, types).apply(f"ragged(axis='n', lanes={len(lengths)}{more})")


def examples(x, lengths):
    ends = np.cumsum(lengths)
    return [x[end - n : end] for end, n in zip(ends, lengths, strict=True)]


def one_by_one(fun, x, w, lengths, avals):
    """Return the results of a loop: with concatenated rows, and zeros for unused ones."""
    each = [jax.tree.leaves(fun(example, w)) for example in examples(x, lengths)]
    results = []
    for aval, parts in zip(avals, zip(*each, strict=True), strict=True):
        axes = [i for i, size in enumerate(aval.shape) if "n" in str(size)]
        if not axes:
            results.append(jnp.stack(parts))
            continue
        result = jnp.concatenate(parts, axes[0])
        missing = [(0, 0)] * result.ndim
        if str(aval.shape[axes[0]]) == "n - 1":
            missing[axes[0]] = (0, len(x) - result.shape[axes[0]])
        results.append(jnp.pad(result, missing))
    return results


def check(fun, lengths, layout=None, derivatives=True, longest=None):
    """Compare results, and derivatives, with those of a loop. Each is compiled once."""
    x = rows(lengths)
    program, avals = ragged(fun, lengths, layout=layout, longest=longest), traced(fun).out_avals
    floats = [i for i, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.floating)]

    def run(results_of):
        def total(x, w):
            results = results_of(x, w)
            parts = [jnp.sin(results[i]).reshape(-1) for i in floats]
            value = sum(jnp.sum(part * (1 + jnp.arange(part.size) / 7)) for part in parts)
            return jnp.float32(value), results

        if derivatives:
            return jax.jit(jax.grad(total, (0, 1), has_aux=True))(x, W)
        return (), jax.jit(results_of)(x, W)

    mine, found = run(lambda x, w: jax.tree.leaves(program(x, w, lengths)))
    theirs, expected = run(lambda x, w: one_by_one(fun, x, w, lengths, avals))
    for result, wanted in zip(found, expected, strict=True):
        assert result.dtype == wanted.dtype and result.shape == wanted.shape
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)
    for gradient, wanted in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-3, atol=1e-3)


@jax.custom_vjp
def clipped(x, w):
    return x @ w


clipped.defvjp(
    lambda x, w: (clipped(x, w), (x, w)),
    lambda held, ct: (ct @ held[1].T + held[0].sum(0), jnp.clip(held[0].T @ ct, -1, 1)),
)


@jax.custom_jvp
def halved(x):
    return x / 2


halved.defjvp(lambda primals, tangents: (halved(*primals), tangents[0] - primals[0].sum(0) * 0.1))


def _layers(x, w):
    def layer(h, w):
        h = jnp.tanh(h @ w) + h.mean(0)
        return h, (h.sum(1), h.sum())

    return lax.scan(layer, x, jnp.stack([w, w.T]))


def _rnn(x, w):
    def step(state, row):
        state = jnp.tanh(state @ w + row)
        return state, state

    return lax.scan(step, jnp.ones(4), x)


def _scan_of_columns(x, w):
    def step(total, column):
        return total + column.sum(), column * total

    return lax.scan(step, x.sum(), x.T)


#: Functions for any examples, and those that need non-empty examples.
FUNCTIONS = {
    "elementwise": lambda x, w: (jnp.where(x > 0, x, x.sum(0)), jnp.clip(x, x.min(initial=0), 1)),
    "sums": lambda x, w: (x.sum(), x.sum(0), x.sum(1), (x @ w).sum((0, 1))),
    "logic": lambda x, w: (jnp.all(x > -1, 0), jnp.any(x > 1, 0), jnp.any(x > 1)),
    "counts": lambda x, w: (x.shape[0], x.size, jnp.arange(x.shape[0]) * 2, (x > 0).sum(0)),
    "scans": lambda x, w: (x.cumsum(0), x.cumsum(1), lax.cummax(x), lax.cumlogsumexp(x)),
    "scans from the end": lambda x, w: (lax.cumsum(x, 0, True), lax.cumprod(x + 2, 0, True)),
    "sorted": lambda x, w: (jnp.sort(x, 0), jnp.sort(x, 1), jnp.argsort(x[:, 0]), lax.rev(x, (0,))),
    "sorted by a key": lambda x, w: lax.sort((x[:, 0], x[:, 1]), num_keys=1),
    "reshaped": lambda x, w: (
        x.reshape(-1, 2, 2).sum(1),
        x.reshape(-1) * 2,
        x.T.reshape(2, 2, -1)[0, 0],
    ),
    "joined": lambda x, w: (
        jnp.concatenate([x, x @ w], 1),
        jnp.concatenate([w[:1], x, x.sum(0)[None]]),
        jnp.pad(x, ((1, 2), (0, 1)), constant_values=7),
    ),
    "split": lambda x, w: (jnp.split(x, 2, 1)[0], jnp.stack([x, x], 1).sum(2)),
    "looked up": lambda x, w: (
        w[jnp.arange(x.shape[0]) % 4],
        jnp.take_along_axis(x, jnp.argsort(x, 1)[:, :2], 1),
        x[:, 1:3],
        x[::-1],
    ),
    "products": lambda x, w: (x @ w, w @ x.T, jnp.einsum("nd,nd->n", x, x), x[:, 0] @ x),
    "products of rows": lambda x, w: (x.T @ x, jnp.einsum("nd,ne,de->", x, x, w)),
    "by lane": lambda x, w: (x @ jnp.outer(x.sum(0), w[0]), jnp.tanh(x.sum(0)) @ w),
    "scores": lambda x, w: jax.nn.softmax(jnp.where(w[0, 0] > 5, 0, x @ x.T)) @ x,
    "functions": lambda x, w: (jax.nn.relu(x), jax.nn.silu(x), jax.nn.gelu(x @ w)),
    "normal rows": lambda x, w: jax.nn.standardize(x @ w) + jax.nn.softmax(x),
    "custom_jvp": lambda x, w: halved(x * w[0]),
    "custom_vjp": clipped,
    "jit": lambda x, w: jax.jit(lambda v: (v.sum(0), v * 2))(x @ w),
    "remat": jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w)).sum(0)),
    "cond": lambda x, w: lax.cond(
        w[0, 0] > 0, lambda v: v.sum(0), lambda v: v[:, 0].sum() + w[0], x
    ),
    "cond by lane": lambda x, w: lax.cond(x.sum() > 0, lambda v: v.sum(0), lambda v: -v.sum(0), x),
    "while": lambda x, w: lax.fori_loop(
        0, jnp.int32(w[0, 0] * 0 + 3), lambda i, v: jnp.sin(v @ w), x
    ),
    "scan of layers": _layers,
    "scan of rows": _rnn,
    "scan of columns": _scan_of_columns,
}
FOR_ROWS = {
    "extremes": lambda x, w: (x.max(0), x.min(), x.max(1), jnp.argmax(x, 0), jnp.argmin(x, 1)),
    "softmax": lambda x, w: (
        jax.nn.softmax(x @ w, 0),
        jax.nn.logsumexp(x, 0),
        jax.nn.log_softmax(x),
    ),
    "norms": lambda x, w: ((x - x.mean(0)) / jnp.sqrt(x.var(0) + 1), jnp.linalg.norm(x, axis=1)),
    "rows": lambda x, w: (x[0], x[-1], x[jnp.argmax(x[:, 0])], x[1:] - x[:-1]),
    "rows at indices": lambda x, w: (x[jnp.array([0, 0])], x[jnp.arange(x.shape[0]), 1], x[:1]),
    "products over rows": lambda x, w: (x.prod(0), x.mean(0)),
}


#: The cases in CI, packed, and padded by the rules of `mask`. The sweep tries all.
PACKED = ["sums", "counts", "joined", "sorted", "scores", "custom_vjp", "scan of layers", "rows"]
PADDED = ["sums", "scan of rows", "softmax"]


def names(all_of, few):
    """Return a few names, of which each JAX release takes every second. The sweep takes all."""
    few = [name for name in all_of if name in few]
    return for_sweep_unless(share(few) or few, all_of)


@pytest.mark.parametrize("name", names(FUNCTIONS, PACKED))
def test_results_equal_those_of_a_loop(name):
    check(FUNCTIONS[name], LENGTHS, derivatives=name != "while")


@pytest.mark.parametrize("name", names(FOR_ROWS, PACKED))
def test_results_for_non_empty_examples_equal_those_of_a_loop(name):
    check(FOR_ROWS[name], FILLED)


@pytest.mark.parametrize("name", names(FUNCTIONS | FOR_ROWS, PADDED))
def test_all_may_be_padded(name):
    many = name in FUNCTIONS
    check((FUNCTIONS | FOR_ROWS)[name], LENGTHS if many else FILLED, "padded", derivatives=False)


def names_and_sizes(program):
    """Return the equations of a program that compute on floats, with the sizes of their results."""
    return [
        (eqn.primitive.name, *(str(n) for v in eqn.outvars for n in v.aval.shape))
        for eqn in equations(program.jaxpr)
        if any(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.outvars)
    ]


def test_rowwise_functions_cost_the_same_as_one_example_of_all_rows():
    def network(x, w):
        return jax.nn.relu(jnp.tanh(x @ w) * x + w[0]).sum(1)

    packed = ragged(network, LENGTHS)
    one = traced(network, "f32[N,4], f32[4,4]")
    assert sorted(names_and_sizes(packed)) == sorted(names_and_sizes(one))


def test_longest_bounds_the_size_of_padded_values():
    program = ragged(lambda x, w: jax.nn.softmax(x @ x.T) @ x, LENGTHS, longest=6)
    shapes = {v.aval.shape for e in equations(program.jaxpr) for v in e.outvars}
    wide = [shape for shape in shapes if len(shape) > 2]
    assert (5, 6, 6) in wide and all("N" not in map(str, shape) for shape in wide)


def test_padding_of_the_operands_of_an_equation_has_its_line():
    program = ragged(lambda x, w: (x @ x.T).sum(), FILLED, longest=4)
    gathers = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "gather"]
    assert gathers and all("test_ragged.py" in named(eqn) for eqn in gathers)


@pytest.mark.proof
@pytest.mark.parametrize("longest", first_and_proofs([6, None]))
def test_scans_over_an_unknown_number_of_rows_are_packed(longest):
    def scans(x, w):
        ends = lax.cumsum(x[:, 0], 0, True), lax.cumprod(x[:, 1], 0, True)
        return x.cumsum(0), lax.cumprod(x), lax.cummax(x), lax.cumlogsumexp(x), *ends

    program = ragged(scans, LENGTHS, longest=longest)
    shapes = {v.aval.shape for e in equations(program.jaxpr) for v in e.outvars}
    assert not [shape for shape in shapes if len(shape) > 2]
    x = rows(LENGTHS)
    # a NaN affects only its batch element, and so does a zero that a product loses
    x[2, 1], x[5, 2] = 0, np.nan
    weights = [
        np.random.default_rng(1).normal(size=x.shape[: v.aval.ndim]) for v in program.jaxpr.outvars
    ]

    def total(results):
        return sum((w * r).sum() for w, r in zip(weights, results, strict=True))

    def of_loop(x):
        avals = traced(scans).out_avals
        return total(one_by_one(scans, x, W, LENGTHS, avals))

    expected = one_by_one(scans, x, W, LENGTHS, traced(scans).out_avals)
    for mine, other in zip(program(x, W, LENGTHS), expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)
    mine = jax.jit(jax.grad(lambda x: total(program(x, W, LENGTHS))))(x)
    np.testing.assert_allclose(mine, jax.jit(jax.grad(of_loop))(x), rtol=1e-4, atol=1e-4)


def test_other_arguments_are_shared_or_batched():
    def fun(x, w, *, b):
        return x @ w + b, w.sum()

    program = traced(fun, "f32[n,4], f32[4,4], b=f32[4]")
    x, w = rows(LENGTHS), np.stack([W * i for i in range(5)])
    made = program.apply("ragged(axis='n', lanes=5, in_axes=(0, 0))")
    assert made.arg_names == ("x", "w", "lengths", "b")
    result = jax.jit(made)(x, w, LENGTHS, b=W[1])
    expected = [part @ v + W[1] for part, v in zip(examples(x, LENGTHS), w, strict=True)]
    np.testing.assert_allclose(result[0], np.concatenate(expected), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result[1], w.sum((1, 2)), rtol=1e-5)


@pytest.mark.proof
def test_axes_of_independent_lengths():
    def fun(x, y):
        return jnp.tanh(x @ y.T).sum(1), y.sum(0)

    program = traced(fun, "f32[n,4], f32[m,4]").apply("ragged(axis=('n', 'm'), lanes=3)")
    assert program.arg_names == ("x", "y", "n_lengths", "m_lengths")
    lengths = FILLED, np.array([1, 0, 3], np.int32)
    x, y = map(rows, lengths)
    pairs = zip(examples(x, lengths[0]), examples(y, lengths[1]), strict=True)
    expected = [jax.jit(fun)(*pair) for pair in pairs]
    result = jax.jit(program)(x, y, *lengths)
    np.testing.assert_allclose(result[0], np.concatenate([a for a, _ in expected]), rtol=1e-5)
    np.testing.assert_allclose(result[1], np.stack([b for _, b in expected]), rtol=1e-5)


def test_symbols_that_are_not_ragged_are_kept():
    program = ragged(lambda x, w: (x @ w).max(0), FILLED, "f32[n,d], f32[d,k]")
    assert str(program.in_avals[0].shape[1]) == "d"
    x = rows(FILLED)
    expected = np.stack([(part @ W).max(0) for part in examples(x, FILLED)])
    np.testing.assert_allclose(program(x, W, FILLED), expected, rtol=1e-5)
    assert program.apply("specialize(N=7, d=4, k=4)").symbols == {}


@pytest.mark.parametrize(
    ("fun", "types", "options", "message"),
    [
        (jnp.sin, "f32[n]", "axis='N', lanes=2", "ragged: sin: no symbol 'N'"),
        (jnp.sin, "f32[4]", "axis='n', lanes=2", "ragged: sin: no symbol 'n'"),
        (
            jnp.sin,
            "f32[n]",
            "axis='n', lanes=0",
            "ragged: lanes must be from 1 to 2147483647, not 0",
        ),
        (
            jnp.sin,
            "f32[n]",
            "axis='n', lanes=2147483648",
            "ragged: lanes must be from 1 to 2147483647, not 2147483648",
        ),
        (
            jnp.sin,
            "f32[n]",
            "axis=('n', 'n'), lanes=2",
            "ragged: axis=('n', 'n') names a symbol twice",
        ),
        (jnp.sin, "f32[n]", "axis=(), lanes=2", "ragged: axis=() must name a symbol"),
        (
            jnp.sin,
            "f32[n]",
            "axis='n', lanes=2, longest=0",
            "ragged: longest must be from 1 to 2147483647, not 0",
        ),
        (
            jnp.sin,
            "f32[n]",
            "axis='n', lanes=2, layout='tight'",
            "option 'layout' of pass 'ragged' must be Optional[Literal['packed', 'padded']], not "
            "'tight'",
        ),
        (
            jnp.add,
            "f32[n], f32[]",
            "axis='n', lanes=2, in_axes=(0, 1)",
            "ragged: in_axes=(0, 1) may contain only 0 and None",
        ),
        (
            jnp.sin,
            "f32[n,n]",
            "axis='n', lanes=2",
            "ragged: argument x is f32[n,n], but an argument can have only one ragged axis, of a "
            "size such as n, 2*n or n + 1",
        ),
        (
            lambda x: jnp.outer(x, x),
            "f32[n]",
            "axis='n', lanes=2",
            "result is f32[n,n] for each example, but a result can have only one ragged axis, of "
            "a size such as n, 2*n or n + 1",
        ),
    ],
)
def test_invalid_options_are_a_one_line_error(fun, types, options, message):
    with pytest.raises((ArgumentsError, PipelineError, UnsupportedError)) as error:
        traced(fun, types).apply(f"ragged({options})")
    assert error.value.message == message


def test_an_equation_that_cannot_be_batched_is_named():
    def fun(x):
        jax.debug.print("{}", x)
        return x

    with pytest.raises(
        UnsupportedError, match=r"debug_\w+ at .*test_ragged.py:\d+ cannot be made ragged"
    ):
        traced(fun, "f32[n]").apply("ragged(axis='n', lanes=2)")


def test_an_effect_on_unbatched_values_is_kept(capfd):
    def fun(x, w):
        w = jax.jit(lambda x, w: (x, w + 1))(x, w)[1]
        jax.debug.print("{} and {}", 7, w)
        return x * w

    program = traced(fun, "f32[n], f32[]").apply("ragged(axis='n', lanes=3)")
    jax.block_until_ready(program(np.ones(7), 1.0, FILLED))
    jax.effects_barrier()
    assert capfd.readouterr().out == "7 and 2.0\n"


def test_the_maximum_of_no_columns_is_minus_infinity_for_each_example():
    program = traced(lambda x: lax.reduce_max(x, (0, 1)), "f32[n,0]")
    found = program.apply("ragged(axis='n', lanes=3)")(np.ones((7, 0)), FILLED)
    np.testing.assert_array_equal(found, [-np.inf] * 3)


def test_a_missing_bound_that_an_equation_needs_is_reported():
    def fun(x):
        return jnp.roll(x @ x.T, 1, 0).sum(1)

    with pytest.raises(UnsupportedError, match="is unknown") as error:
        traced(fun, "f32[n,3]").apply("ragged(axis='n', lanes=2)")
    assert error.value.hint == "give it with longest=512"
    x = rows(FILLED)
    program = traced(fun, "f32[n,4]").apply("ragged(axis='n', lanes=3, longest=8)")
    found = jax.jit(program)(x, FILLED)
    expected = np.concatenate([fun(each) for each in examples(x, FILLED)])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("constraint", ["2*n >= 7", "mod(n, 4) == 0"])
def test_sizes_that_violate_a_constraint_are_refused(constraint):
    types = jax.export.symbolic_args_specs(jnp.ones(4), "n", constraints=[constraint])
    program = trace(lambda x: x[:2].sum(), types)
    with pytest.raises(ArgumentsError, match="does not hold for all sizes from 0"):
        program.apply("ragged(axis='n', lanes=2)")


def test_a_constraint_that_all_sizes_satisfy_is_kept():
    types = jax.export.symbolic_args_specs(
        jnp.ones(4), "n", constraints=["n + 2 >= 2", "n <= 2147483647"]
    )
    assert trace(jnp.sin, types).apply("ragged(axis='n', lanes=2)")


@pytest.mark.proof
def test_types_determine_the_maximum_length():
    table = jnp.arange(12.0).reshape(6, 2)

    def fun(x):
        return x + table[: x.shape[0]]

    (x,), _ = read_args("f32[n<=6,2]")
    program = trace(fun, x).apply("ragged(axis='n', lanes=3)")
    assert dict(program.bounds)["lengths"].longest == 6
    given = jnp.ones((FILLED.sum(), 2))
    found = program(given, FILLED)
    expected = np.concatenate([fun(each) for each in examples(given, FILLED)])
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(ArgumentsError, match=r"is 7 at \[1\], but must be a length from 0 to 6"):
        program(given, np.array([0, 7, 0], np.int32))
    with pytest.raises(
        ArgumentsError, match="the constraint n <= 6 does not hold for all sizes from 0"
    ):
        trace(fun, x).apply("ragged(axis='n', lanes=3, longest=8)")


def test_types_determine_the_minimum_length():
    def fun(x):
        return x[1:] - x[:-1] if x.shape[0] > 1 else x

    (x,), _ = read_args("f32[n>=2]")
    program = trace(fun, x).apply("ragged(axis='n', lanes=3)")
    assert dict(program.bounds)["lengths"].shortest == 2
    found = jax.jit(program)(np.arange(9, dtype=np.float32) ** 2, np.array([2, 4, 3]))
    np.testing.assert_array_equal(found[:6], [1, 5, 7, 9, 13, 15])
    with pytest.raises(ArgumentsError, match=r"is 1 at \[1\], but must be a length of at least 2"):
        program(jnp.arange(9.0), np.array([5, 1, 3]))
    with pytest.raises(ArgumentsError, match="ragged: fun: longest=1, but n is at least 2"):
        trace(fun, x).apply("ragged(axis='n', lanes=3, longest=1)")
