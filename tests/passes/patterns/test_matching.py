"""Where a pattern matches, and where it does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxprtool
from jaxprtool.ir.program import type_check
from jaxprtool.ir.regions import sub_jaxprs
from jaxprtool.jaxcompat import jaxpr_as_fun
from jaxprtool.passes.patterns import rewrite
from tests.programs.rules import with_jvp_rule

X = jnp.array([0.5, -1.5, 2.0])
ANY = "f32[...]"


def names(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for _, body in sub_jaxprs(eqn):
            yield from names(body)


def count(made, fun, *args):
    """Return how often a rewrite matches a function's program. The results must not change."""
    program = jaxprtool.trace(fun, *args)
    after, matches = made.applied(program)
    type_check(after)
    if not matches:
        assert after is program
    if not any(isinstance(arg, jax.ShapeDtypeStruct) for arg in args):
        outs = (jax.jit(jaxpr_as_fun(p.jaxpr))(*args) for p in (program, after))
        for old, new in zip(*outs, strict=True):
            assert old.dtype == new.dtype and old.weak_type == new.weak_type
            np.testing.assert_allclose(new, old, rtol=1e-5)
    return len(matches)


def tanh_of_product(x, y):
    return jnp.tanh(x * y)


@pytest.fixture
def product():
    """Write tanh(x * y) by exponentials."""

    def by_exp(x, y):
        e = jnp.exp(2 * (x * y))
        return ((e - 1) / (e + 1)).astype(x.dtype)

    return rewrite(tanh_of_product, by_exp, ANY, ANY)


# --- values -------------------------------------------------------------------------------------


def test_a_match_is_replaced_and_reported_with_its_location(product):
    program = jaxprtool.trace(lambda a: jnp.tanh(a * 2.0) + a, X)
    (match,) = product.matches(program)
    assert str(match).startswith("tanh_of_product(x: f32[3], y=2.0) at ")
    assert match.source.startswith("tests/passes/patterns/test_matching.py:")
    assert [eqn.primitive.name for eqn in match.equations] == ["mul", "tanh"]
    assert match.types["y"].shape == () and match.values == {"y": 2.0}
    assert list(names(product(program).jaxpr)).count("tanh") == 0


def test_a_program_without_a_match_is_unchanged(product):
    program = jaxprtool.trace(lambda a: jax.jit(jnp.sin)(a) * a, X)
    assert product(program) is program


def test_literals_must_be_equal():
    twice = rewrite(lambda x: x * 2.0, lambda x: x + x, ANY)
    assert count(twice, lambda a: a * 2.0, X) == 1
    assert count(twice, lambda a: a * 2.5, X) == 0
    assert count(twice, lambda a: a * 2.0, X.astype(jnp.bfloat16)) == 1
    nothing = rewrite(lambda x: x + 0.0, lambda x: x, ANY)
    assert count(nothing, lambda a: a + -0.0, X) == 0


def test_operands_of_commutative_operations_may_be_swapped():
    twice = rewrite(lambda x: x * 2.0, lambda x: x + x, ANY)
    assert count(twice, lambda a: 2.0 * a, X) == 1
    less = rewrite(lambda x: x - 2.0, lambda x: x + -2.0, ANY)
    assert count(less, lambda a: 2.0 - a, X) == 0
    both = rewrite(lambda x, y: x * y + jnp.sin(x), lambda x, y: jnp.sin(x) + x * y, ANY, ANY)
    assert count(both, lambda a, b: jnp.sin(b) + a * b, X, X) == 1


@pytest.mark.proof
def test_the_maximum_of_complex_numbers_is_matched_in_its_own_order_only():
    larger = lambda x, y: lax.max(jnp.sin(x), y)  # noqa: E731
    negated = lambda x, y: -lax.min(-jnp.sin(x), -y)  # noqa: E731
    swapped = lambda a, b: lax.max(b, jnp.sin(a))  # noqa: E731
    written = rewrite(larger, negated, ANY, ANY)
    assert count(written, swapped, X, X) == count(written, larger, X, X) == 1
    # The maximum of NaN and a complex number is the second one.
    z = X.astype(complex)
    written = rewrite(larger, negated, z, z)
    assert count(written, larger, z, z) == 1
    assert count(written, swapped, z, z) == 0


def test_equal_arguments_of_a_pattern_match_the_same_value():
    square = rewrite(lambda x: x * x, jnp.square, ANY)
    assert count(square, lambda a, b: a * a + a * b, X, X) == 1
    product = rewrite(lambda x, y: jnp.sin(x) * jnp.cos(y), lambda x, y: jnp.cos(y) * jnp.sin(x),
                      ANY, ANY)  # fmt: skip
    assert count(product, lambda a: jnp.sin(a) * jnp.cos(a), X) == 1


def test_two_equal_equations_of_a_pattern_may_be_one_in_the_program():
    pattern = rewrite(lambda x: (x + 1.0) * (x + 1.0), lambda x: jnp.square(x + 1.0), ANY)

    def shared(a):
        b = a + 1.0
        return b * b

    assert count(pattern, shared, X) == 1


def test_constants_of_the_pattern_are_compared_by_content():
    table = np.array([1.0, 2.0, 3.0], np.float32)
    made = rewrite(lambda x: x * table, lambda x: x + x * (table - 1), "f32[3]")
    assert count(made, lambda a: a * table.copy(), X) == 1
    assert count(made, lambda a: a * (table + 1), X) == 0


def test_a_constant_operand_of_a_loop_is_known_inside():
    below = rewrite(
        lambda x, m: jnp.where(m, x, -1.0),
        lambda x, m: jnp.where(m, x + 1.0, 0.0) - 1.0, "f32[...]", "bool[...]",
    )  # fmt: skip

    def loop(a, number):
        low = jnp.full(3, number)
        return jax.lax.scan(lambda c, m: (jnp.where(m, c, low), None), a, jnp.eye(3, dtype=bool))[0]

    assert count(below, lambda a: loop(a, -1.0), X) == 1
    assert count(below, lambda a: loop(a, -2.0), X) == 0


def test_a_constant_is_known_after_a_conversion_of_integers():
    def quotient(a, number):
        return lax.div(a, lax.convert_element_type(number, jnp.int32))

    def divided(number):
        return lambda a: jax.jit(quotient)(a, number)

    three = rewrite(lambda x: lax.div(x, 3), lambda x: lax.div(x - lax.rem(x, 3), 3), "i32[]")
    assert count(three, divided(np.int16(3)), jnp.int32(7)) == 1
    assert count(three, divided(np.int16(4)), jnp.int32(7)) == 0
    assert count(three, divided(np.float32(3)), jnp.int32(7)) == 0


# --- types --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4)])
def test_any_float_and_any_shape(product, dtype, shape):
    x = jax.ShapeDtypeStruct(shape, dtype)
    assert count(product, lambda a, b: jnp.tanh(a * b), x, x) == 1


def test_a_pattern_that_depends_on_the_precision_matches_in_each():
    total = rewrite(lambda x: x.sum(-1) * 2.0, lambda x: (x * 2.0).sum(-1), "f32[...,n]")
    for dtype in ("float32", "bfloat16", "float16"):
        assert count(total, lambda a: a.sum(-1) * 2.0, jax.ShapeDtypeStruct((2, 3), dtype)) == 1


def test_64_bit_types_match_if_x64_is_enabled(product):
    with jax.enable_x64(True):
        assert count(product, lambda a: jnp.tanh(a * a), np.arange(3.0)) == 1
        program = jaxprtool.trace(lambda a: jnp.tanh(a * a), np.arange(3.0))
    assert len(product.matches(program)) == 1


def test_a_name_stands_for_one_size():
    trace = rewrite(lambda x: (x @ x).sum(), lambda x: x.sum(0) @ x.sum(1), "f32[n,n]")
    assert count(trace, lambda a: (a @ a).sum(), jnp.ones((3, 3))) == 1
    pair = rewrite(
        lambda x, y: x.sum() * y.sum(), lambda x, y: y.sum() * x.sum(), "f32[n]", "f32[n]"
    )
    assert count(pair, lambda a, b: a.sum() * b.sum(), X, X) == 1
    assert count(pair, lambda a, b: a.sum() * b.sum(), X, jnp.ones(4)) == 0


def test_an_expression_of_names_is_evaluated():
    def halves(x, y):
        return jnp.sin(x).sum() * y.sum()

    made = rewrite(halves, lambda x, y: y.sum() * jnp.sin(x).sum(), "f32[2*n]", "f32[n]")
    assert count(made, halves, jnp.ones(6), jnp.ones(3)) == 1
    assert count(made, halves, jnp.ones(7), jnp.ones(3)) == 0


def test_numbers_are_examples_and_the_rank_must_match():
    made = rewrite(lambda x: jnp.sin(x) * 2.0, lambda x: 2.0 * jnp.sin(x), "f32[8,128]")
    assert count(made, lambda a: jnp.sin(a) * 2.0, jnp.ones((3, 1))) == 1
    assert count(made, lambda a: jnp.sin(a) * 2.0, X) == 0


def test_constants_that_depend_on_sizes_depend_on_those_of_the_match():
    mean = rewrite(lambda x: x.sum() / x.shape[0], jnp.mean, "f32[n]")
    assert count(mean, lambda a: a.sum() / 3, X) == 1
    assert count(mean, lambda a: a.sum() / 4, X) == 0


def test_symbolic_sizes_of_a_program():
    (n,) = jax.export.symbolic_shape("n")
    mean = rewrite(lambda x: x.sum() / x.shape[0], jnp.mean, "f32[k]")
    program = jaxprtool.trace(lambda a: a.sum() / n, jax.ShapeDtypeStruct((n,), "float32"))
    (match,) = mean.matches(program)
    assert match.sizes == {"k": n}


def test_a_scalar_may_be_weakly_typed_or_not():
    scaled = rewrite(lambda x, s: jnp.sin(x * s), lambda x, s: jnp.sin(s * x), "f32[n]", "f32[]")
    for scalar in (jnp.asarray(2.0), jnp.asarray(2.0, jnp.float32)):
        assert count(scaled, lambda a, s: jnp.sin(a * s), X, scalar) == 1
    assert count(scaled, lambda a: jnp.sin(a * 2.0), X) == 1


def test_weak_types_of_results_are_kept():
    one = rewrite(lambda x: x * 1, lambda x: x, ANY)
    assert count(one, lambda a: (a * 1, jnp.sin(a * 1)), jnp.asarray(2.0)) == 2
    assert count(one, lambda a: (a * 1, jnp.sin(a * 1)), jnp.asarray(2.0, jnp.float32)) == 2


# --- uses outside of a match ----------------------------------------------------------------------


def test_a_match_with_a_value_used_elsewhere_is_left_alone(product):
    def shares(a, b):
        c = a * b
        return jnp.tanh(c) + c

    assert count(product, shares, X, X) == 0
    with_it = rewrite(
        lambda x, y: (jnp.tanh(x * y), x * y),
        lambda x, y: (jnp.tanh(y * x), y * x), ANY, ANY,
    )  # fmt: skip
    assert count(with_it, shares, X, X) == 1
    assert count(product, lambda a, b: (jnp.tanh(a * b), a * b), X, X) == 1


def test_values_that_depend_on_no_argument_may_be_used_elsewhere():
    def shifted(x):
        return x + jnp.arange(float(x.shape[0]))

    made = rewrite(
        lambda x: jnp.sin(shifted(x)), lambda x: jnp.cos(shifted(x) - np.pi / 2), "f32[n]"
    )

    def shares(a):
        places = jnp.arange(3.0)
        return jnp.sin(a + places) * places

    assert count(made, shares, X) == 1


def test_dead_code_does_not_count_as_a_use(product):
    def wasteful(a, b):
        c = a * b
        jnp.cos(c + jnp.tanh(c))
        return jnp.tanh(c)

    assert count(product, wasteful, X, X) == 1


def test_several_results_are_replaced_at_the_last_one():
    pair = rewrite(
        lambda x: (jnp.sin(x), jnp.cos(x)),
        lambda x: (jnp.cos(x - np.pi / 2), jnp.sin(x + np.pi / 2)), ANY,
    )  # fmt: skip
    assert count(pair, lambda a: jnp.sin(a) * jnp.cos(a), X) == 1
    assert count(pair, lambda a: jnp.cos(a) * jnp.sin(a), X) == 1

    def used_between(a):
        s = jnp.sin(a)
        t = s + 1
        return t * jnp.cos(a)

    assert count(pair, used_between, X) == 0
    assert count(pair, lambda a, b: jnp.sin(a) * jnp.cos(b), X, X) == 0


def test_a_result_that_is_an_argument_is_not_replaced():
    made = rewrite(lambda x: (jnp.sin(x), x), lambda x: (jnp.cos(x - np.pi / 2), x), ANY)
    assert count(made, lambda a: jnp.sin(a) + a, X) == 1


def test_matches_do_not_overlap_and_are_found_from_the_front():
    three = rewrite(lambda x, y, z: x + y + z, lambda x, y, z: x + (y + z), ANY, ANY, ANY)
    assert count(three, lambda a: a + 1.0 + 2.0 + 3.0, X) == 1
    assert count(three, lambda a: a + 1.0 + 2.0 + 3.0 + 4.0, X) == 2


def test_replacements_are_not_matched_again():
    more = rewrite(lambda x: x * 1.5, lambda x: (x * 1.5) * 1.5 / 1.5, ANY)
    assert count(more, lambda a: a * 1.5, X) == 1


def test_a_check_can_reject_a_match(product):
    seen = []

    @product.check
    def _(match):
        seen.append(match)
        return match.types["x"].ndim == 2

    assert count(product, lambda a: jnp.tanh(a * a), X) == 0
    assert count(product, lambda a: jnp.tanh(a * a), jnp.ones((2, 2))) == 1
    assert [match.types["x"].ndim for match in seen] == [1, 2]


# --- where --------------------------------------------------------------------------------------


def inner(a):
    return jnp.tanh(a * 3.0)


WHERE = {
    "jit": lambda a: jax.jit(inner)(a),
    "across a jit": lambda a: jnp.tanh(jax.jit(lambda b: b * 3.0)(a)),
    "scan": lambda a: jax.lax.scan(lambda c, _: (inner(c), None), a, None, length=2)[0],
    "while": lambda a: jax.lax.while_loop(lambda c: (c > 1).any(), inner, a),
    "cond": lambda a: jax.lax.cond(a[0] > 0, inner, jnp.sin, a),
    "remat": lambda a: jax.checkpoint(inner)(a),
    "custom_jvp": with_jvp_rule(inner),
    "vmap": lambda a: jax.vmap(inner)(jnp.stack([a, a])),
    "deep": lambda a: jax.checkpoint(
        lambda b: jax.lax.scan(lambda c, _: (jax.jit(inner)(c), None), b, None, length=2)[0]
    )(a),
}


@pytest.mark.parametrize("where", WHERE)
def test_patterns_match_in_every_body(product, where):
    assert count(product, WHERE[where], X) == 1


def test_a_shared_body_is_rewritten_once(product):
    body = jax.checkpoint(inner)
    assert count(product, lambda a: body(a) + body(a + 1), X) == 1


def test_patterns_match_in_a_shard_map(product):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    mapped = jax.shard_map(inner, mesh=mesh, in_specs=spec, out_specs=spec)
    assert count(product, lambda a: mapped(a), jnp.arange(4.0)) == 1


def test_a_function_with_a_custom_rule_is_matched_whole_and_in_gradients():
    made = rewrite(lambda x: jax.nn.relu(x) * 2.0, lambda x: jax.nn.relu(x * 2.0), ANY)
    assert count(made, lambda a: jax.nn.relu(a) * 2.0, X) == 1
    assert count(made, lambda a: jnp.maximum(a, 0) * 2.0, X) == 1
    bare = rewrite(lambda x: jnp.maximum(x, 0) * 2.0, lambda x: jnp.maximum(x * 2.0, 0), ANY)
    assert count(bare, lambda a: jax.nn.relu(a) * 2.0, X) == 0


def test_loops_are_matched_by_their_bodies():
    def power(x):
        return jax.lax.fori_loop(0, 3, lambda _, c: jax.jit(jnp.sin)(c) * x, x)

    made = rewrite(power, lambda x: jnp.sin(jnp.sin(jnp.sin(x) * x) * x) * x, ANY)
    assert count(made, power, X) == 1
    other = jax.lax.fori_loop
    assert count(made, lambda a: other(0, 3, lambda _, c: jnp.cos(c) * a, a), X) == 0
    assert count(made, lambda a: other(0, 4, lambda _, c: jnp.sin(c) * a, a), X) == 0


def test_effects_are_kept(product):
    def noisy(a):
        b = a * 3.0
        jax.debug.print("between {}", a, ordered=True)
        return jnp.tanh(b)

    program = jaxprtool.trace(noisy, X)
    after, matches = product.applied(program)
    assert len(matches) == 1
    assert (
        list(names(after.jaxpr)).count("debug_callback")
        + list(names(after.jaxpr)).count("debug_print")
        == 1
    )


def test_a_body_that_cannot_hold_the_constants_of_the_replacement_is_left_alone():
    table = np.arange(3.0, dtype=np.float32)
    made = rewrite(lambda x: jnp.tanh(x * 3.0), lambda x: jnp.tanh(x * 3.0) + 0 * table, "f32[n]")
    assert count(made, inner, X) == 1
    program = jaxprtool.trace(lambda a: jax.checkpoint(inner)(a), X)
    assert made(program) is program


def test_a_rewrite_is_a_pass_that_can_run_twice(product):
    program = jaxprtool.trace(lambda a: jnp.tanh(a * a) + jnp.tanh(a * 2.0), X)
    once, again = program.apply(product), program.apply(product)
    assert jaxprtool.equivalent(once, again)
    assert str(product) == "tanh_of_product"
