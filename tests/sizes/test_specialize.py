"""specialize(n=512) equals tracing at that size; invalid sizes are refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.custom_derivatives import SymbolicZero
from jax.experimental import pallas

import jaxprtool
from jaxprtool import equivalent, trace
from jaxprtool.errors import ArgumentsError, PipelineError, UnsupportedError
from jaxprtool.ir.custom_rules import RuleRaised
from jaxprtool.ir.equations import equations
from jaxprtool.loading.argspec import read_args
from jaxprtool.sizes.mask import Specialize


def traced(fun, args):
    positional, keywords = read_args(args)
    return trace(fun, *positional, **keywords)


@jax.custom_jvp
def clipped(x):
    return jnp.clip(x, -1, 1) / x.shape[0]


@clipped.defjvp
def _(primals, tangents):
    return clipped(*primals), tangents[0] * primals[0].shape[0]


@jax.custom_vjp
def halved(x):
    return x / 2


halved.defvjp(lambda x: (halved(x), jnp.sum(x)), lambda total, ct: (ct * total / ct.shape[0],))


def statistics(x, y):
    n = x.shape[0]
    spread = x.var() + x.mean(0).std() + (n - 1) / 2
    return spread, jnp.full((n,), n), n, x.reshape(-1), y.sum() * (n + 0.5)


def loops(x, y):
    def body(carry, row):
        return carry + jnp.tanh(row @ row), jnp.cumsum(row)

    total, rows = lax.scan(body, 0.0, x)
    return lax.cond(total > 0, lambda: rows * x.shape[0], lambda: rows), lax.map(jnp.sin, y)


def shared(x, y):
    norm = jax.jit(lambda v: v / jnp.sqrt((v * v).sum()))
    return norm(y), norm(y + 1), jax.checkpoint(norm)(y), clipped(y), halved(y)


def random(x, y):
    key = jax.random.key(0)
    return jax.random.normal(key, x.shape) + x, jax.random.uniform(key, y.shape)


def references(x, y):
    ref = jax.new_ref(y)
    ref[...] += 1.0
    return ref[...] * x.sum()


def effects(x, y):
    """Effects without a result, and indices that are constant at a given size."""
    jax.debug.print("{}", y.sum())
    ref = jax.new_ref(y)

    def double():
        ref[...] *= 2.0

    lax.cond(y.sum() > 0, double, lambda: None)
    return x[1:]


FUNCTIONS = [statistics, loops, shared, random, references, effects]


@pytest.mark.parametrize("fun", FUNCTIONS)
@pytest.mark.parametrize("n", [1, 5])
def test_the_result_equals_tracing_at_that_size(fun, n):
    program = traced(fun, "f32[n,4], f32[n]")
    assert equivalent(program.apply(f"specialize(n={n})"), traced(fun, f"f32[{n},4], f32[{n}]"))


@pytest.mark.parametrize("fun", FUNCTIONS)
def test_some_symbols_may_be_kept(fun):
    program = traced(fun, "f32[n,m], f32[n]")
    some, rest = program.apply("specialize(n=3)"), traced(fun, "f32[3,m], f32[3]")
    assert equivalent(some, rest)
    assert equivalent(some.apply("specialize(m=4)"), traced(fun, "f32[3,4], f32[3]"))


def test_a_size_may_be_an_expression_of_others():
    program = traced(statistics, "f32[n,m], f32[n]")
    made = program.apply("specialize(m='n * 6 // 3')")
    assert equivalent(made, traced(statistics, "f32[n,2*n], f32[n]"))
    assert equivalent(
        program.apply("specialize(n=3, m='2*n')"), traced(statistics, "f32[3,6], f32[3]")
    )


def test_shared_bodies_stay_shared_and_parts_without_symbols_are_unchanged():
    def fun(x, y):
        f, g = jax.jit(lambda v: v * 2), jax.jit(lambda v: v * 3)
        return f(x), f(x + 1), g(y), g(y + 1)

    program = traced(fun, "f32[n], f32[4]")
    made = program.apply("specialize(n=3)")
    before, after = (
        [e for e in p.jaxpr.eqns if e.primitive.name == "jit"] for p in (program, made)
    )
    bodies = [eqn.params["jaxpr"] for eqn in after]
    assert bodies[0] is bodies[1] is not before[0].params["jaxpr"]
    assert after[2] is before[2]
    assert [e.source_info for e in after] == [e.source_info for e in before]


def test_rules_of_custom_derivatives_are_specialized():
    program = traced(lambda y: (clipped(y) + halved(y)).sum(), "f32[n]")
    gradient = program.apply("specialize(n=4), grad")
    y = jnp.array([0.5, 2.0, -3.0, 0.1])
    expected = jax.grad(lambda y: (clipped(y) + halved(y)).sum())(y)
    np.testing.assert_allclose(gradient(y), expected, rtol=1e-6)
    assert equivalent(program.apply("grad, specialize(n=4)"), gradient)


def ones(size):
    return np.ones(int(size), np.float32)


@jax.custom_vjp
def needs_sizes(x, y):
    return x * 2 + y.sum()


needs_sizes.defvjp(
    lambda x, y: (needs_sizes(x, y), ones(y.shape[0])),
    lambda ones_of_y, ct: (ct * 2 * ones(ct.shape[0]), ct.sum() * ones_of_y),
)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def needs_its_argument(n, x):
    return x * 3


@needs_its_argument.defjvp
def _(n, primals, tangents):
    return needs_its_argument(n, *primals), tangents[0] * 3 * ones(n)


@jax.custom_jvp
def takes_zeros(x, y):
    return x * 2, y * 3


def takes_zeros_jvp(primals, tangents):
    def times(tangent, factor):
        return tangent if isinstance(tangent, SymbolicZero) else tangent * factor

    dx, dy = tangents
    return takes_zeros(*primals), (times(dx, 2 * ones(dx.shape[0])), times(dy, 3.0))


takes_zeros.defjvp(takes_zeros_jvp, symbolic_zeros=True)


def closes_over_a_size(x, y):
    n = x.shape[0]

    @jax.custom_vjp
    def scaled(x):
        return x * n

    scaled.defvjp(lambda x: (scaled(x), None), lambda _, ct: (ct * n * ones(ct.shape[0]),))
    return scaled(x).sum() * y.sum()


RULES_AT_KNOWN_SIZES = [
    lambda x, y: needs_sizes(x, y).sum(),
    lambda x, y: jax.vmap(lambda z: needs_sizes(z, y))(jnp.stack([x, x])).sum(),
    lambda x, y: lax.scan(lambda c, _: (needs_sizes(c, y), None), x, None, length=2)[0].sum(),
    lambda x, y: needs_its_argument(x.shape[0], x).sum() * y.sum(),
    lambda x, y: takes_zeros(x, y)[0].sum(),
    closes_over_a_size,
]


@pytest.mark.parametrize("number", range(len(RULES_AT_KNOWN_SIZES)))
def test_rules_that_jax_cannot_trace_with_a_symbol_are_traced_at_the_size(number, tmp_path):
    fun = RULES_AT_KNOWN_SIZES[number]
    program, path = traced(fun, "f32[n], f32[m]"), tmp_path / "p.jaxpr"
    x, y = jnp.arange(3.0), jnp.arange(1.0, 3.0)
    at_once = program.apply("specialize(n=3, m=2)")
    in_steps = program.apply("specialize(n='m', m='n'), dce, specialize(n=2), specialize(m=3)")
    jaxprtool.write(at_once, path)
    expected = jax.jit(jax.grad(fun, (0, 1)))(x, y)
    for made in (at_once, in_steps, jaxprtool.read(path)):
        found = jax.jit(made.apply("grad(argnums=(0, 1))"))(x, y)
        for got, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert jax.grad(program)(x, y).shape == (3,)


def test_a_rule_that_cannot_be_traced_at_the_size_either_is_named():
    def fun(x):
        n = x.shape[0]

        @jax.custom_vjp
        def scaled(x):
            return x * n

        scaled.defvjp(lambda x: (scaled(x), None), lambda _, ct: (ct * ones(n),))
        return scaled(x).sum()

    made = traced(fun, "f32[n]").apply("specialize(n=3)")
    assert made(jnp.ones(3)) == 9
    with pytest.raises(RuleRaised, match="the rule <lambda> or <lambda> of scaled raised Inconclu"):
        made.apply("grad")


def test_only_a_rule_may_close_over_a_size():
    def fun(x, y):
        n = x.shape[0]

        @jax.custom_vjp
        def doubled(y):
            return y * 2

        doubled.defvjp(lambda y: (doubled(y), None), lambda _, ct: (ct * n,))
        return doubled(y).sum() + x.sum()

    made = traced(fun, "f32[n], f32[2]").apply("specialize(n=3), grad(argnums=1)")
    np.testing.assert_array_equal(made(jnp.ones(3), jnp.ones(2)), [3, 3])


def test_the_grid_of_a_kernel_gets_its_size():
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    def fun(x):
        block, out = pallas.BlockSpec((2,), lambda i: i), jax.ShapeDtypeStruct(x.shape, x.dtype)
        call = pallas.pallas_call(
            kernel, out, grid=(x.shape[0] // 2,), in_specs=[block], out_specs=block, interpret=True
        )
        return call(x) + 1

    program = traced(fun, "f32[n]")
    made, x = program.apply("specialize(n=6)"), jnp.arange(6.0)
    kernels = [e for e in made.jaxpr.eqns if e.primitive.name == "pallas_call"]
    assert [(e.params["grid_mapping"].grid, len(e.invars)) for e in kernels] == [((3,), 1)]
    for found in (made(x), program(x)):
        np.testing.assert_array_equal(found, x * 2 + 1)


@pytest.mark.proof
def test_named_axes_derivatives_and_files_support_symbols(tmp_path):
    program = traced(loops, "f32[n,4], f32[n]").apply("batch(axis_size=2)")
    path = tmp_path / "p.jaxpr"
    jaxprtool.write(program, path)
    at_3 = jaxprtool.read(path).apply("specialize(n=3)")
    x, y = jnp.ones((2, 3, 4)), jnp.ones((2, 3))
    results = (jax.tree.leaves(jax.jit(f)(x, y)) for f in (at_3, jax.vmap(loops)))
    for got, wanted in zip(*results, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


INDICES = {
    "x[1:]": lambda x: x[1:],
    "x[:-1, 1:]": lambda x: x[:-1, 1:],
    "x[:, ::2]": lambda x: x[:, ::2],
    "x[::2]": lambda x: x[::2],
    "x[::-1]": lambda x: x[::-1],
    "x[-1]": lambda x: x[-1],
    "x[2]": lambda x: x[2],
    "x[1, 1:]": lambda x: x[1, 1:],
    "x[:, 0]": lambda x: x[:, 0],
    "x[n // 2 :]": lambda x: x[x.shape[0] // 2 :],
    "arange": lambda x: (jnp.arange(x.shape[0]), jnp.arange(1, x.shape[0]), jnp.arange(7)),
    "read twice": lambda x: (x[jnp.arange(x.shape[0])[0]], x[::2], jnp.arange(x.shape[0]) * 2),
}


@pytest.mark.parametrize("indexed", INDICES)
def test_constant_indices_become_slices(indexed):
    n = 5
    (size,) = export.symbolic_shape("n", constraints=["n >= 4"])
    fun = INDICES[indexed]
    made, at_n = (
        trace(fun, jax.ShapeDtypeStruct((rows, 3), jnp.float32)).specialized(sizes)
        for rows, sizes in ((size, {"n": n}), (n, {}))
    )
    x = jnp.arange(3.0 * n).reshape(n, 3)
    for got, wanted in zip(*(jax.tree.leaves(jax.jit(f)(x)) for f in (made, fun)), strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert indexed == "read twice" or equivalent(made, at_n)


def rows_of_a_column(x):
    rows = lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)
    return x.at[rows].get(mode="promise_in_bounds")


def second_of_a_pair(x):
    pairs = lax.broadcasted_iota(jnp.int32, (x.shape[0], 2), 1)
    numbers = lax.GatherDimensionNumbers((), (0, 1), (0, 1))
    return lax.gather(x, pairs, numbers, (1, 1), mode="promise_in_bounds")


def one_of_three(x):
    n = jnp.int32(jnp.asarray(x.shape[0]))
    last = [lax.select_n(jnp.int32(which), n * 0, n - 2, n - 1) for which in (-1, 0, 1, 2, 3)]
    return [lax.dynamic_slice(x, (start, 0), (1, 1)) for start in last]


def doubled(x):
    start = jnp.int32(jnp.asarray(x.shape[0]))
    for _ in range(40):  # 0, computed from a negative number
        start = start + start
    return lax.dynamic_slice(x, (start, 0), (1, 1))


def counted_up(x):
    start = jnp.int32(jnp.asarray(x.shape[0])) * 0
    for _ in range(2000):
        start = start + 1
    return lax.dynamic_slice(x, (start - 1999, 0), (1, 1))


@pytest.mark.parametrize("indexed", [lambda x: x[0], lambda x: x[-1], lambda x: x[0, 1:]])
def test_a_gather_of_all_rows_is_not_a_slice(indexed):
    """So the gradient of a weakly typed array stays strongly typed, as in JAX."""
    (n,) = export.symbolic_shape("n", constraints=["n >= 1"])
    types = [jax.ShapeDtypeStruct((rows, 4), jnp.float32, weak_type=True) for rows in (n, 1)]
    made, at_1 = (trace(indexed, each).specialized({"n": 1}) for each in types)
    assert equivalent(made, at_1)


def rounded(x):
    far = (jnp.float32(jnp.asarray(x.shape[0])) * 1e30).astype(jnp.int32)
    return lax.dynamic_slice(x, (far, 0), (1, 1))


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(
    "indexed", [rows_of_a_column, second_of_a_pair, one_of_three, doubled, counted_up, rounded]
)
def test_indices_are_computed_as_jax_computes_them(indexed):
    x = jnp.arange(12.0).reshape(3, 4)
    made = traced(indexed, "f32[n,m]").apply("specialize(n=3, m=4)")
    for got, wanted in zip(jax.tree.leaves(made(x)), jax.tree.leaves(indexed(x)), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_explicit_gathers_and_slices_are_kept():
    def fun(x):
        rows = x.at[jnp.array([2, 0])].get(mode="promise_in_bounds")
        return rows, lax.dynamic_slice(x, (1,), (2,)), x[jnp.array([0, 1, 2])]

    (n,) = export.symbolic_shape("n", constraints=["n >= 3"])
    types = [jax.ShapeDtypeStruct((rows,), jnp.float32) for rows in (n, 3)]
    made, at_3 = (trace(fun, each).specialized({"n": 3}) for each in types)
    for got, wanted in zip(made(jnp.arange(3.0)), fun(jnp.arange(3.0)), strict=True):
        np.testing.assert_array_equal(got, wanted)
    names = [[e.primitive.name for e in p.jaxpr.eqns] for p in (made, at_3)]
    assert "dynamic_slice" in names[0] and names[0].count("gather") == names[1].count("gather")


def test_loops_over_a_size_compute_the_same_as_at_that_size():
    def fun(x):
        return lax.fori_loop(0, x.shape[0], lambda i, total: total + x[i], 0.0), jnp.sort(x)[0]

    x = jnp.array([3.0, 1.0, 2.0])
    made = traced(fun, "f32[n]").apply("specialize(n=3)")
    for got, wanted in zip(made(x), fun(x), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_no_equation_mentions_a_symbol_afterwards():
    for fun in FUNCTIONS:
        made = traced(fun, "f32[n,4], f32[n]").apply("specialize(n=3)")
        for eqn in equations(made.jaxpr if hasattr(made.jaxpr, "eqns") else made.jaxpr.jaxpr):
            assert "n" not in str([v.aval for v in eqn.outvars]).split("[", 2)[-1].split(",")
            assert eqn.primitive.name != "dim_as_value"


# --- invalid sizes --------------------------------------------------------------------------------


def constrained(*constraints):
    n, m = export.symbolic_shape("n, m", constraints=constraints)
    types = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in (n, m)]
    return trace(lambda x, y: x.sum() * y, *types)


@pytest.mark.parametrize(
    ("passes", "message", "hint"),
    [
        ("specialize(batch=3)", "no symbol 'batch'", "its symbols are: n, m"),
        ("specialize(N=3)", "no symbol 'N'", "its symbols are: n, m"),
        ("specialize(n=0)", "n=0 is not a size: a symbol is at least 1", None),
        ("specialize(n=-4)", "n=-4 is not a size", None),
        ("specialize(n='2*')", "the size of n", None),
        ("specialize(n='0')", "n=0 is not a size", None),
        ("specialize(n=3)", "n=3, m=m violates the constraint n >= 4", None),
        ("specialize(n=4, m=9)", r"n=4, m=9 violates the constraint m <= 2\*n", None),
        ("specialize(n='m', m=3)", "violates the constraint n >= 4", None),
    ],
)
def test_impossible_sizes_are_refused(passes, message, hint):
    program = constrained("n >= 4", "m <= 2*n")
    with pytest.raises(ArgumentsError, match=message) as caught:
        program.apply(passes)
    assert caught.value.hint == hint


def test_a_similar_name_is_hinted_at():
    program = traced(jnp.sin, "f32[batch]")
    with pytest.raises(ArgumentsError) as caught:
        program.apply("specialize(bach=3)")
    assert caught.value.hint == "did you mean 'batch'?"


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ("specialize", "needs the size of a symbol"),
        ("specialize(3)", "takes at most 0 options"),
        ("specialize(n=2.5)", r"option 'n' of pass 'specialize' must be int \| str, not 2.5"),
        ("specialize(n=True)", "not True"),
    ],
)
def test_invalid_sizes_are_refused_before_tracing(passes, message):
    with pytest.raises(PipelineError, match=message):
        jaxprtool.Pipeline.parse(passes)


def test_remaining_constraints_are_kept():
    made = constrained("n >= 4", "m <= 2*n").apply("specialize(n=4)")
    assert made(jnp.ones(4), jnp.ones(8)).shape == (8,)
    with pytest.raises(ArgumentsError, match="symbolic shape constraint"):
        made(jnp.ones(4), jnp.ones(9))


def test_an_equation_with_a_negative_size_is_named():
    def fun(x):
        return lax.slice(x, (2,), (x.shape[0],))

    (n,) = export.symbolic_shape("n", constraints=["n >= 2"])
    program = trace(fun, jax.ShapeDtypeStruct((n,), jnp.float32))
    assert program(jnp.arange(3.0)) == 2.0
    with pytest.raises(UnsupportedError, match=r"slice at .*test_specialize.py:\d+ would be"):
        program.specialized({"n": 1})


def test_the_text_of_the_pass_is_unchanged():
    assert str(Specialize({"n": 512, "m": "2*k"})) == "specialize(n=512, m='2*k')"
    assert str(jaxprtool.Pipeline.parse("specialize(n=3), dce")) == "specialize(n=3), dce"


def test_symbols_in_closures_are_specialized_too():
    n, m, k = jax.export.symbolic_shape("n, m, k")

    @jax.jit
    def joined(x):
        return jnp.concatenate([x, jnp.zeros(m)]) / (k + 1)

    program = trace(lambda x: joined(x) * 2, jax.ShapeDtypeStruct((n,), "float32"))
    part = program.apply("specialize(n='2*j', k=3)")
    assert [str(size) for size in part.out_avals[0].shape] == ["m + 2*j"]
    sized = part.apply("specialize(m=2)")
    x = jnp.arange(4.0)
    np.testing.assert_array_equal(sized(x), jnp.concatenate([x, jnp.zeros(2)]) / 4 * 2)
    for unsized in (
        program,
        program.apply("specialize(n=4)"),
        trace(lambda: jnp.ones(m) * 2),
        trace(lambda: m * 2),
    ):
        with pytest.raises(ArgumentsError, match="cannot be run: no argument has the symbol") as e:
            unsized(*([x] if unsized.in_avals else []))
        assert e.value.hint == "give it a size with specialize(m=…)"
