"""mask: results and gradients at every size, whatever the padding contains."""

from __future__ import annotations

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxprtool import equivalent, mask, read, trace, write
from jaxprtool.errors import ArgumentsError, PipelineError, UnsupportedError
from jaxprtool.extend import add_traits, rule
from jaxprtool.ir.equations import equations
from jaxprtool.ir.symbols import SizeBound
from jaxprtool.loading.argspec import read_args
from tests.programs.masking import count_masks
from tests.share import for_sweep_unless, share

BOUND = 5


def _normalized(x):
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1)


def _attention(x, w):
    scores = (x @ w) @ (x @ w).T
    return jax.nn.softmax(scores) @ (x @ w)


def _rnn(x, w):
    def step(state, row):
        state = jnp.tanh(state @ w + row)
        return state, state

    return lax.scan(step, jnp.ones(4), x)


def _reverse_rnn(x, w):
    return lax.scan(lambda s, row: (jnp.tanh(s @ w + row), s), jnp.ones(4), x, reverse=True)


@jax.custom_vjp
def _clipped(x, w):
    return x @ w


_clipped.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda held, ct: (ct @ held[1].T, jnp.clip(held[0].T @ ct, -1, 1))
)


def _hard_rnn(x, w):
    """A body with singularities, calls, a branch and custom rules, on loop-invariant values."""

    @jax.checkpoint
    def mixed(state, row):
        return jnp.log(row * w[0]) / jnp.sqrt(row - 0.5) + jnp.where(row > 0, state @ w, 0)

    def step(state, row):
        state = jax.jit(mixed)(state, row) + jax.nn.relu(row @ w) + _clipped(row[None], w)[0]
        state = lax.cond(row[0] > 2, lambda s: s * w[1], lambda s: s / w[2], state)
        inner, _ = lax.scan(lambda s, v: (jnp.tanh(s * v), None), state, w)
        return inner, inner * w[3]

    return lax.scan(step, jnp.ones(4), x)


def _rnn_with_while(x, w):
    def step(state, row):
        halved = lax.while_loop(lambda v: v.max() > 1, lambda v: v / 2, lax.stop_gradient(row))
        return jnp.tanh(state @ w + halved / row), state

    return lax.scan(step, jnp.ones(4), x)


def _rounds(x, w):
    return lax.fori_loop(0, x.shape[0], lambda i, y: jnp.tanh(y @ w), x)


def _branches(x, w):
    return lax.cond(w[0, 0] > 0, lambda x: x.sum(0), lambda x: x.max(0), x)


def _with_rules(x, w):
    return jax.nn.relu(x @ w), jax.nn.logsumexp(x @ w, axis=0), jax.nn.silu(x)


#: Functions of x: f32[n,4] and w: f32[4,4].
FUNCTIONS = {
    "sums": lambda x, w: (x.sum(), x.sum(0), x.sum(1), (x * w[0]).mean()),
    "extremes": lambda x, w: (x.max(0), x.min(0), x.prod(0), jnp.all(x > 1, 0), jnp.any(x > 3, 0)),
    "logarithms": lambda x, w: jnp.log(x * w[0]).sum(),
    "variance": lambda x, w: (x.var(), _normalized(x @ w)),
    "sizes": lambda x, w: (x.shape[0] * 2, jnp.arange(x.shape[0]) * x.sum(1), jnp.ones(x.shape)),
    "transposed": lambda x, w: x.T @ x,
    "attention": _attention,
    "rnn": _rnn,
    "reverse_rnn": _reverse_rnn,
    "hard_rnn": _hard_rnn,
    "rnn_with_while": _rnn_with_while,
    "rounds": _rounds,
    "branches": _branches,
    "rules": _with_rules,
    "custom_vjp": _clipped,
    "remat": jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w)).sum()),
}


def masked(fun, types="f32[n,4], f32[4,4]", bound=BOUND):
    args, _ = read_args(types)
    return trace(fun, *args).apply(f"mask(n={bound})")


def padded(x, junk, bound=BOUND):
    return jnp.concatenate([x, jnp.full((bound - len(x), *x.shape[1:]), junk, x.dtype)])


def arguments(n):
    rng = np.random.default_rng(n)
    x, w = rng.uniform(1, 4, (n, 4)), rng.uniform(0.1, 1, (4, 4))
    return jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)


@pytest.mark.proof
def test_the_gradient_of_values_computed_from_padding_is_zero():
    """Rows of zeros have no direction: its derivative in padding is NaN."""
    program = masked(lambda x, w: jnp.sum(x @ w / jnp.linalg.norm(x, axis=1, keepdims=True)))
    x, w = arguments(3)

    def loss(scale, x, n):
        return program(x * scale, w, n)

    got = jax.grad(loss)(w[0], padded(x, 0.0), 3)
    close(got, jax.grad(loss)(w[0], padded(x, 1.0), 3), 3)
    assert np.isfinite(np.asarray(got)).all()


@pytest.mark.proof
@pytest.mark.parametrize("name", for_sweep_unless(share(list(FUNCTIONS)), FUNCTIONS))
def test_results_and_gradients_equal_those_at_every_size(name):
    fun, program = jax.jit(FUNCTIONS[name]), masked(FUNCTIONS[name])

    def at(x, w, n):
        return program(x, w, jnp.int32(n))

    run = jax.jit(at)
    for n in range(1, BOUND + 1):
        x, w = arguments(n)
        for junk in (jnp.nan, -jnp.inf, 7.0):
            got = _without_sizes(run(padded(x, junk), w, n))
            wanted = fun(x, w)
            close(got, wanted, n)
        if name != "rounds":  # a while loop
            _check_gradients(fun, run, x, w, forward=name not in ("custom_vjp", "hard_rnn"))


def _without_sizes(results):
    is_pair = isinstance(results, tuple) and len(results) == 2
    return results[0] if is_pair and _is_sizes(results[1]) else results


def _is_sizes(tree):
    leaves = jax.tree.leaves(tree)
    return bool(leaves) and all(leaf.dtype == jnp.int32 and leaf.shape == () for leaf in leaves)


def _loss(results, like):
    """Return a number that depends on everything but padding."""
    pairs = zip(jax.tree.leaves(results), jax.tree.leaves(like), strict=True)
    parts = [jnp.asarray(value)[tuple(map(slice, jnp.shape(real)))] for value, real in pairs]
    return sum(jnp.sin(part.astype(jnp.float32)).sum() for part in parts)


def _check_gradients(fun, run, x, w, forward):
    like, n = fun(x, w), len(x)
    at_size = jax.jit(lambda x, w: _loss(fun(x, w), like))
    wanted = jax.grad(at_size, (0, 1))(x, w)

    def loss(x, w):
        return _loss(_without_sizes(run(x, w, n)), like)

    got = jax.grad(loss, (0, 1))(padded(x, jnp.nan), w)
    close(got, wanted, n, 1e-3)
    assert not np.asarray(got[0])[n:].any()
    if not forward:
        return
    tangents = x + 1, w - 1
    moved = padded(tangents[0], jnp.nan), tangents[1]
    wanted = jax.jvp(at_size, (x, w), tangents)
    got = jax.jvp(loss, (padded(x, jnp.inf), w), moved)
    close(got, wanted, n, 1e-3)


def close(got, wanted, n, tolerance=1e-5):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        real = np.asarray(one)[tuple(map(slice, jnp.shape(other)))]
        np.testing.assert_allclose(real, other, tolerance, tolerance, err_msg=f"at n={n}")


def test_guards_are_named_after_the_guarded_values():
    listing = str(masked(lambda x, w: x @ w + w[0]).jaxpr)
    assert "name=masked_dot_general" in listing and "jvp=masked_derivative" in listing


def test_the_size_is_the_last_positional_argument_and_sizes_are_additional_results():
    program = masked(lambda x, w: {"y": x @ w, "total": x.sum()})
    assert program.arg_names == ("x", "w", "n")
    assert [str(aval) for aval in program.in_avals] == ["float32[5,4]", "float32[4,4]", "int32[]"]
    results, sizes = program(jnp.ones((5, 4)), jnp.ones((4, 4)), 3)
    assert results["y"].shape == (5, 4) and results["total"] == 12
    assert sizes == {"y": (3, 4), "total": None}
    assert program.out_names[-2:] == ("result[1]['y'][0]", "result[1]['y'][1]")


def test_a_result_without_padding_is_unchanged():
    program = masked(lambda x: x.sum(), "f32[n]")
    assert program(jnp.array([1.0, 2, jnp.nan, 3, 4]), 2) == 3
    assert program.out_names == ("result",)


@pytest.mark.proof
def test_several_symbols_are_arguments_in_the_order_of_their_names():
    args, _ = read_args("f32[n,m], f32[m]")
    program = trace(lambda x, y: x @ y, *args).apply("mask(n=4, m=3)")
    assert program.arg_names == ("x", "y", "m", "n")
    x = jnp.full((4, 3), jnp.nan).at[:3, :2].set(1.0)
    (result, sizes) = program(x, jnp.array([2.0, 3.0, jnp.inf]), 2, 3)
    np.testing.assert_array_equal(result[:3], [5.0, 5.0, 5.0])
    assert sizes == (3,)


def test_unbounded_symbols_are_kept():
    args, _ = read_args("f32[n,m], f32[m]")
    program = trace(lambda x, y: (x * y).sum(), *args).apply("mask(n=4)")
    x = jnp.full((4, 3), jnp.nan).at[:2].set(1.0)
    assert program(x, jnp.array([2.0, 3.0, 1.0]), 2) == 12


def test_equations_without_a_masked_symbol_are_unchanged():
    program = trace(lambda x, y: (jnp.sin(y) @ y.T, x.sum()), *read_args("f32[n], f32[3,4]")[0])
    old = {id(eqn) for eqn in program.jaxpr.eqns}
    made = program.apply("mask(n=4)").jaxpr.eqns
    assert sum(id(eqn) in old for eqn in made) == len(old) - 1


def test_masks_are_inserted_only_where_needed():
    def selects(fun, types="f32[n,4], f32[4,4]"):
        return count_masks(masked(fun, types))

    assert selects(lambda x, w: jax.nn.gelu(x @ w + w[0])) == 0
    assert selects(lambda x, w: jnp.zeros(x.shape).sum()) == 0
    assert selects(lambda x, w: (x.sum(0), x.max(1))) == 1
    assert selects(_attention) == 4  # the maximum, the sum, and the operands of the last product
    assert selects(_rnn) == 2  # the carry, and the operand of the product


@pytest.mark.proof
def test_batched_programs_take_a_size_for_each_batch_element():
    program = masked(_attention)
    xs = jnp.stack([padded(arguments(n)[0], jnp.nan) for n in (1, 4, 5)])
    w = arguments(1)[1]
    got, _ = jax.vmap(program, (0, None, 0))(xs, w, jnp.array([1, 4, 5]))
    for lane, n in zip(got, (1, 4, 5), strict=True):
        close(lane, _attention(arguments(n)[0], w), n)


@pytest.mark.proof
def test_gradients_of_batched_iterations_are_summed_over_the_batch():
    program, w = masked(_rnn), arguments(1)[1]
    lengths = (1, 4, 5)
    xs = jnp.stack([padded(arguments(n)[0], jnp.nan) for n in lengths])

    def loss(w):
        (last, _), _ = jax.vmap(program, (0, None, 0))(xs, w, jnp.array(lengths))
        return last.sum()

    def wanted(w):
        return sum(_rnn(arguments(n)[0], w)[0].sum() for n in lengths)

    np.testing.assert_allclose(jax.grad(loss)(w), jax.grad(wanted)(w), 1e-3)


def test_batched_iterations_store_one_mask_of_each_shape_for_a_gradient():
    program, w = masked(_rnn), arguments(1)[1]

    def loss(w, xs, lengths):
        return jax.vmap(program, (0, None, 0))(xs, w, lengths)[0][0].sum()

    of_gradient = trace(jax.grad(loss), w, jnp.ones((2, BOUND, 4)), jnp.array([1, 4])).jaxpr
    forward, _ = (eqn for eqn in equations(of_gradient) if eqn.primitive.name == "scan")
    stored = [v.aval.shape for v in forward.outvars if v.aval.dtype == bool]
    assert stored == [(BOUND, 2, 4)]


@pytest.mark.parametrize("name", ["attention", "rnn", "rules"])
def test_masked_programs_are_written_to_files_with_their_derivatives(name, tmp_path):
    program = masked(FUNCTIONS[name])
    write(program, tmp_path / "p.jaxpr")
    again = read(tmp_path / "p.jaxpr")
    assert equivalent(program, again) and again.bounds == (("n", SizeBound(BOUND)),)
    x, w = arguments(3)
    moved = [padded(x, jnp.nan), w], [padded(x, jnp.nan), w]
    for got, wanted in zip(*(_tangents(p, *moved) for p in (again, program)), strict=True):
        np.testing.assert_array_equal(got, wanted)


def _tangents(program, primals, tangents):
    return jax.tree.leaves(jax.jvp(lambda *xs: program(*xs, 3)[0], primals, tangents))


@pytest.mark.parametrize(
    ("passes", "error", "message"),
    [
        ("mask", PipelineError, "pass 'mask' needs the bound of a symbol"),
        ("mask(n=0)", PipelineError, "n=0 must be from 1 to 2147483647"),
        ("mask(n=2147483648)", PipelineError, "n=2147483648 must be from 1 to 21474836"),
        ("mask(buckets={'n': ()})", PipelineError, "buckets must be sizes from 1 to 21"),
        ("mask(m=3)", ArgumentsError, "no symbol 'm'"),
    ],
)
def test_bad_bounds_are_refused(passes, error, message):
    program = trace(lambda x: x.sum(), *read_args("f32[n]")[0])
    with pytest.raises(error, match=message):
        program.apply(passes)


def test_a_primitive_without_a_rule_is_refused_with_its_line():
    program = trace(lambda x: lax.rng_uniform(x[0, 0], 1.0, x.shape), *read_args("f32[n,4]")[0])
    no_rule = r"rng_uniform.* cannot be masked: no masking rule"
    with pytest.raises(UnsupportedError, match=no_rule):
        program.apply("mask(n=4)")


def test_equations_that_mix_in_padding_are_refused_with_the_reason():
    program = trace(lambda x: jnp.linalg.qr(x @ x.T)[0], *read_args("f32[n,4]")[0])
    with pytest.raises(UnsupportedError, match=r"qr.* cannot be masked: it mixes all elements"):
        program.apply("mask(n=4)")


def test_a_reshape_that_is_valid_at_one_size_only_is_refused_with_the_reason():
    program = trace(lambda x: lax.reshape(x, (3, 2)), *read_args("f32[n,3]")[0])
    with pytest.raises(UnsupportedError, match=r"reshape.* does not keep the number of elements"):
        program.apply("mask(n=4)")


def test_a_size_without_a_bound_is_refused_with_its_line():
    program = trace(lambda x: jnp.arange(x.shape[0] // x.shape[1]), *read_args("f32[n,d]")[0])
    message = r"iota at .*test_mask.py:\d+ cannot be masked: the bound of floordiv\(n, d\)"
    with pytest.raises(UnsupportedError, match=message):
        program.apply("mask(n=4)")


def test_rules_of_other_packages_are_found_in_the_table():
    doubled = jax.extend.core.Primitive("doubled_sum")
    doubled.def_abstract_eval(lambda x: x.update(shape=()))
    doubled.def_impl(lambda x: 2 * x.sum())

    @rule("mask", "doubled_sum")
    def _(masking, eqn, x):
        return masking.bind(eqn, masking.filled(x, {0: 0}))

    program = masked(doubled.bind, "f32[n]")
    assert program(jnp.array([1, 2, jnp.nan, jnp.inf, 4]), 2) == 6


def test_an_elementwise_primitive_needs_no_rule():
    cubed = jax.extend.core.Primitive("cubed")
    cubed.def_abstract_eval(lambda x: x)
    cubed.def_impl(lambda x: x**3)
    add_traits("cubed", elementwise=True)
    program = masked(lambda x: cubed.bind(x).sum(), "f32[n]")
    assert program(jnp.array([1, 2, jnp.nan, jnp.inf, 4]), 2) == 9


@pytest.mark.parametrize(
    "options", ["buckets=(8, 4)", "n=8, buckets=(4,)", "buckets={'n': (4, 8)}"]
)
def test_each_bucket_is_a_program(options):
    x, w = arguments(3)
    args, _ = read_args("f32[n,4], f32[4,4]")
    made = trace(lambda x, w: (x @ w).sum(), *args).apply(f"mask({options})")
    assert list(made) == ["n4", "n8"]
    for name, program in made.items():
        bound = int(name[1:])
        np.testing.assert_allclose(
            program(padded(x, np.nan, bound), w, n=3), (x @ w).sum(), rtol=1e-6
        )


def test_each_pair_of_buckets_of_two_symbols_is_a_program():
    args, _ = read_args("f32[n,m], f32[m]")
    made = trace(lambda x, y: x @ y, *args).apply("mask(buckets={'n': (4,), 'm': (2, 3)})")
    assert {name: program.bounds for name, program in made.items()} == {
        "n4_m2": (("m", SizeBound(2)), ("n", SizeBound(4))),
        "n4_m3": (("m", SizeBound(3)), ("n", SizeBound(4))),
    }


@pytest.mark.parametrize(
    ("passes", "error", "message"),
    [
        (
            "mask(buckets=(4, 8))",
            ArgumentsError,
            "needs a program with one symbol; .* has: n, m",
        ),
        (
            "mask(n=4, buckets={'n': (8,)})",
            ArgumentsError,
            "the bucket n=8 exceeds the bound n=4",
        ),
        ("mask(buckets={'k': (8,)})", ArgumentsError, "no symbol 'k'"),
        (
            "mask(buckets=(0, 8))",
            PipelineError,
            r"buckets must be sizes from 1 to .*, not \(0, 8\)",
        ),
        (
            "mask(buckets={'n': 8})",
            PipelineError,
            r"buckets must be sizes from 1 to .*, not {'n': 8}",
        ),
        ("mask(n='8')", PipelineError, "option 'n' of pass 'mask' must be int, not '8'"),
    ],
)
def test_invalid_buckets_are_refused(passes, error, message):
    args, _ = read_args("f32[n,m], f32[m]")
    with pytest.raises(error, match=message):
        trace(lambda x, y: x @ y, *args).apply(passes)


@pytest.mark.parametrize("constraint", ["2*n >= 4", "mod(n, 4) == 0", "n <= 7"])
def test_sizes_that_violate_a_constraint_are_refused(constraint):
    types = jax.export.symbolic_args_specs(jnp.ones(4), "n", constraints=[constraint])
    program = trace(lambda x: x[:2].sum(), types)
    with pytest.raises(ArgumentsError, match="does not hold for all sizes from 0"):
        program.apply("mask(n=8)")


def test_a_constraint_that_all_sizes_satisfy_is_kept():
    types = jax.export.symbolic_args_specs(
        jnp.ones(4), "n", constraints=["n + 2 >= 2", "n <= 2147483647"]
    )
    assert trace(jnp.sin, types).apply("mask(n=8)")


def test_types_determine_the_minimum_size(tmp_path):
    (x,), _ = read_args("f32[2<=n<=8]")
    program = trace(lambda x: (x[1:] * x[:-1]).sum(), x).apply("mask(n=8)")
    write(program, tmp_path / "p.jaxpr")
    for each in program, read(tmp_path / "p.jaxpr"):
        assert each.bounds == (("n", SizeBound(8, at_least=2)),)
        values = jnp.array([1.0, 2, 3, 4, jnp.nan, jnp.nan, jnp.nan, jnp.nan])
        assert [float(each(values, n)) for n in (2, 4)] == [2, 20]
        with pytest.raises(ArgumentsError, match="is 1, but must be a size from 2 to 8"):
            each(values, 1)
    summed = mask(lambda x: (x[1:] * x[:-1]).sum(), "f32[n>=2]", "f32[]")
    assert summed([values], {"n": 3}) == 8
    with pytest.raises(ArgumentsError, match="is 0, but must be a size from 2 to 8"):
        summed([values], {"n": 0})
    with pytest.raises(ArgumentsError, match="n=1 is too small: n is at least 2"):
        trace(lambda x: x[1:], x).apply("mask(n=1)")


def test_a_constraint_of_a_masked_symbol_is_not_applied_to_others():
    (x,), _ = read_args("f32[n<=8,2<=m]")
    program = trace(lambda x: x.sum(0) + jnp.arange(8.0)[: x.shape[0]].sum(), x).apply("mask(n=8)")
    found = program(jnp.ones((8, 3)), 4)
    np.testing.assert_array_equal(found, [10, 10, 10])
    with pytest.raises(ArgumentsError, match="constraint m >= 2"):
        program(jnp.ones((8, 1)), 4)
