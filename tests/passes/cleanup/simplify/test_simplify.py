"""`simplify` on whole programs, and rules of plug-ins."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxprtool import equivalent, jaxcompat, trace
from jaxprtool.errors import PluginError
from jaxprtool.ir.program import type_check
from jaxprtool.jaxcompat import Primitive
from jaxprtool.passes import Pipeline
from jaxprtool.passes.cleanup.dce import Dce
from jaxprtool.passes.cleanup.simplify import (
    RowMatch,
    Simplify,
    SimplifyRule,
    engine,
    equation,
    simplify_rules,
)
from jaxprtool.passes.cleanup.simplify.engine import simplified
from tests.programs import Case, prove, sample_programs
from tests.programs.same import count_equations
from tests.share import share

VECTOR = jax.ShapeDtypeStruct((4,), jnp.float32)
MATRIX = jax.ShapeDtypeStruct((3, 4), jnp.float32)


def primitives(program):
    return [eqn.primitive.name for eqn in program.jaxpr.eqns]


def simple(fun, *args, fast=False):
    """Return the primitives of a function after simplify and dce. The program is type-checked."""
    program = Dce()(Simplify(fast)(trace(fun, *args)))
    type_check(program)
    return primitives(program)


def test_rules_apply_to_results_of_rules():
    assert simple(lambda x: -((-x).reshape(2, 2).reshape(4) * 1.0), VECTOR) == []


def test_without_matches_the_jaxpr_is_the_same_object():
    program = trace(lambda x: jnp.sin(x) @ x, VECTOR)
    assert Simplify()(program).jaxpr is program.jaxpr
    once = Simplify()(trace(lambda x: lax.neg(-jnp.sin(x)), VECTOR))
    assert Simplify()(once).jaxpr is once.jaxpr


def test_the_conjugate_of_a_real_number_is_complex():
    assert simple(lambda x: lax.real(lax.conj(x)), VECTOR) == ["conj", "real"]
    assert simple(lambda x: lax.conj(lax.conj(x)), VECTOR) == ["conj", "conj"]


def test_an_outer_product_of_reshapes_keeps_its_shape():
    def outer(x):
        return x.reshape(-1, 1) * x.reshape(1, -1) - x.reshape(2, 1, 2).reshape(1, 4)

    assert simple(outer, VECTOR) == ["reshape", "reshape", "mul", "reshape", "sub"]
    same = trace(lambda x, y: x.reshape(2, 2) * y.reshape(2, 2), VECTOR, VECTOR)
    assert primitives(Dce()(Simplify()(same))) == ["mul", "reshape"]


def test_bodies_at_every_depth_are_simplified():
    def fun(x):
        def body(c, _):
            return lax.cond(c[0] > 0, lambda c: lax.neg(-c), jnp.sin, c), None

        return lax.scan(body, x, None, length=3)[0]

    before = trace(fun, VECTOR)
    after = Dce()(Simplify()(before))
    assert count_equations(before.jaxpr) - count_equations(after.jaxpr) == 2


def test_possible_nans_and_minus_zeros_are_kept_unless_fast():
    fun = lambda x: (x * 0.0, x + 0.0, x - x)  # noqa: E731
    assert simple(fun, VECTOR) == ["mul", "add", "sub"]
    assert simple(fun, VECTOR, fast=True) == ["broadcast_in_dim"] * 2
    assert simple(fun, jax.ShapeDtypeStruct((), jnp.float32), fast=True) == []


def test_equations_with_a_purpose_are_kept():
    fun = lambda x: lax.reduce_precision(jnp.copy(x), 8, 23)  # noqa: E731
    assert simple(fun, VECTOR) == ["copy", "reduce_precision"]
    assert simple(lambda x: -lax.optimization_barrier(-x), VECTOR) == [
        "neg",
        "optimization_barrier",
        "neg",
    ]


def test_sums_of_a_gradient_over_dimensions_of_size_1_are_removed():
    def loss(x, b):
        return jnp.sin(x + b).sum()

    program = trace(jax.grad(loss, 1), MATRIX, VECTOR)
    assert primitives(program)[-3:] == ["reduce_sum", "reshape", "reduce_sum"]
    assert primitives(Dce()(Simplify()(program)))[-2:] == ["cos", "reduce_sum"]


def test_a_broadcast_of_an_operand_that_broadcasts_implicitly_is_removed():
    def fun(x, s):
        return x * jnp.broadcast_to(s, x.shape) + jnp.broadcast_to(x[:1], x.shape)

    assert simple(fun, MATRIX, jax.ShapeDtypeStruct((), jnp.float32)) == ["mul", "slice", "add"]


@pytest.mark.proof
def test_a_broadcast_divisor_is_kept_since_xla_divides_differently_by_it():
    x, y = jnp.linspace(0.1, 3, 600).reshape(20, 30), jnp.linspace(1, 2, 20)[:, None]
    fun = lambda x, y: x / jnp.broadcast_to(y, x.shape)  # noqa: E731
    assert simple(fun, x, y) == ["broadcast_in_dim", "div"]
    assert simple(lambda x, y: jnp.broadcast_to(y, x.shape) / x, x, y) == ["div"]
    prove(Case("numerator", lambda x, y: jnp.broadcast_to(y, x.shape) / x, (x, y)), Simplify())


def test_functions_that_round_by_shape_keep_their_shape():
    fun = lambda x: jnp.exp(x[None]).reshape(4)  # noqa: E731
    assert simple(fun, VECTOR) == ["broadcast_in_dim", "exp", "reshape"]
    assert simple(lambda x: jnp.sqrt(x[None]).reshape(4), VECTOR) == ["sqrt"]


def test_a_sum_absorbs_the_negation_of_a_broadcast():
    def loss(x):
        return jax.nn.softmax(x).at[0].get().sum()

    names = primitives(Dce()(trace(jax.grad(loss), MATRIX)))
    assert "neg" in names and "sub" in names
    assert "neg" not in simple(jax.grad(loss), MATRIX)


def test_unknown_symbolic_sizes_are_left_alone():
    n, m = jax.export.symbolic_shape("n, m")
    x = jax.ShapeDtypeStruct((n, 1, m), jnp.float32)

    def fun(x):
        parts = lax.concatenate([x, x], 0)
        whole = lax.slice(parts, (0, 0, 0), (2 * n, 1, m))
        half = lax.slice(parts, (n, 0, 0), (2 * n, 1, m))
        return lax.reduce_sum(whole, (1,)), half, lax.reduce_sum(x, (0,)), x * 1.0

    program = trace(fun, x)
    after = Dce()(Simplify()(program))
    type_check(after)
    assert primitives(after) == ["concatenate", "slice", "squeeze", "reduce_sum"]


def test_keys_are_moved_like_other_arrays():
    keys = jax.random.split(jax.random.key(0), 6)
    assert simple(lambda k: k.reshape(2, 3).T.T.reshape(6), keys) == []


def test_effects_are_kept():
    def fun(x):
        jax.debug.print("{}", lax.neg(-x))
        return lax.neg(-x)

    expected = primitives(trace(lambda x: jax.debug.print("{}", x), VECTOR))
    assert len(expected) == 1 and simple(fun, VECTOR) == expected


def test_rules_apply_inside_shard_map():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")

    def body(x):
        return lax.neg(-x) * 1.0 + jnp.zeros_like(x)

    fun = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
    before, after, _ = prove(Case("shards", fun, (jnp.arange(4.0),)), Simplify())
    assert after.jaxpr is not before.jaxpr


@pytest.mark.proof
def test_gradients_are_unchanged():
    def fun(x, y):
        z = x - (-jnp.broadcast_to(y[:, :1], x.shape)) * 1.0
        p = jnp.broadcast_to(z[0, 0] > 0, z.shape)
        return lax.select(p, z / 2.0, lax.neg(-z).T.reshape(4, 3).T * 3.0).sum(0)

    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4)), jnp.float32)
    before, after, verdict = prove(Case("gradients", fun, (x, x)), Simplify())
    assert verdict.gradients == "reverse"
    assert count_equations(Dce()(after).jaxpr) < count_equations(before.jaxpr)


@pytest.mark.proof
@pytest.mark.parametrize("file", share(["transformer.py", "rnn.py"]))
def test_samples_and_their_gradients_compute_the_same(file):
    for case in sample_programs(file):
        before, after, _ = prove(case, Simplify(), gradients=False)
        assert count_equations(after.jaxpr) <= count_equations(before.jaxpr)


@pytest.mark.parametrize("dims", [((1,), (0,)), ((0,), (1,)), ((1,), (1,)), ((0,), (0,))])
def test_a_product_of_one_transposed_value_and_itself_needs_no_transpose(dims):
    def square(x):
        return (lambda t: lax.dot_general(t, t, (dims, ((), ()))))(x.T)

    x = jnp.arange(9).reshape(3, 3)
    after = Dce()(Simplify()(trace(square, x)))
    assert primitives(after) == ["dot_general"]
    np.testing.assert_array_equal(after(x), square(x))


def test_equal_transposes_of_operands_are_merged_if_nothing_else_reads_them():
    program = trace(lambda x, y: x.T + y.T, MATRIX, MATRIX)
    assert primitives(Simplify()(program)) == ["add", "transpose"]

    def shared(x, y):
        z = x.T
        return z + y.T, z

    program = trace(shared, MATRIX, MATRIX)
    assert Simplify()(program).jaxpr is program.jaxpr


def test_a_value_with_other_readers_through_an_alias_is_kept():
    def fun(x, y):
        z = -x
        same = z.reshape(2, 2).reshape(4)  # becomes z, which then has three readers
        return same * y * 2.0, same, jnp.sin(same)

    x = jnp.arange(4.0)
    _, after, _ = prove(Case("aliases", fun, (x, x)), Simplify())
    assert primitives(Dce()(after)) == ["neg", "mul", "mul", "sin"]


# --- plug-ins ---------------------------------------------------------------------------------

halve_p = Primitive("halve")
halve_p.def_abstract_eval(lambda x: x)


@pytest.fixture
def rules():
    before = list(simplify_rules)
    yield simplify_rules
    simplify_rules[:] = before


def test_a_plug_in_adds_a_rule_of_its_own_primitive(rules):
    def fun(x, y):
        return halve_p.bind(x) + halve_p.bind(x), halve_p.bind(x) + halve_p.bind(y)

    rules.append(SimplifyRule("add(halve(x), halve(x))", "x"))
    assert simple(fun, VECTOR, VECTOR) == ["halve", "halve", "add"]


def test_a_rule_may_build_its_equation(rules):
    def doubled(match: RowMatch):
        """there are two of them"""
        return equation(match, "mul", [match["x"], match.writer.constant(2, SCALAR)])

    rules.append(SimplifyRule("add(x, x)", "mul(x, 2)", build=doubled))
    assert simple(lambda x: x + x, VECTOR) == ["mul"]
    assert Simplify.rules()[-1] == {
        "pattern": "add(x, x)",
        "replacement": "mul(x, 2)",
        "condition": "there are two of them",
        "exact": "exact",
        "family": "",
    }


SCALAR = trace(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32)).in_avals[0]


def test_rules_that_undo_each_other_are_reported():
    rows = [SimplifyRule("max(x, y)", "min(y, x)"), SimplifyRule("min(x, y)", "max(y, x)")]
    program = trace(lambda x, y: lax.max(x, y), VECTOR, VECTOR)
    with pytest.raises(PluginError, match="endlessly on"):
        simplified(program.jaxpr, rows, fast=False)


@pytest.mark.parametrize("replacement", ["sub(x, y)", "reduce_max(x)"])
def test_a_rule_that_returns_another_type_is_reported(replacement):
    rows = [SimplifyRule("ge(x, y)", replacement, params=lambda _: PARAMS_OF[replacement])]
    program = trace(lambda x, y: x >= y, VECTOR, VECTOR)
    message = rf"the rule ge\(x, y\) → {re.escape(replacement)} changes bool\[4\] to f32.*, with "
    with pytest.raises(PluginError, match=message):
        simplified(program.jaxpr, rows, fast=False)


PARAMS_OF = {"sub(x, y)": {}, "reduce_max(x)": {"axes": (0,), "out_sharding": None}}


@pytest.mark.parametrize("pattern", ["add(x", "add(x,, y)", "add x", "x", "add(x) y", "add(x; y)"])
def test_a_malformed_pattern_is_reported(pattern):
    program = trace(jnp.sin, VECTOR)
    with pytest.raises(ValueError, match="pattern"):
        simplified(program.jaxpr, [SimplifyRule(pattern, "x")], fast=False)


def test_the_type_of_a_result_never_changes():
    program = trace(lambda x: lax.convert_element_type(x, jnp.int32), VECTOR)
    rows = [SimplifyRule("convert_element_type(x)", "x")]
    assert simplified(program.jaxpr, rows, fast=False) is program.jaxpr


def test_simplify_is_a_pass_of_a_pipeline():
    program = Pipeline.parse("simplify(fast=True), dce").run(trace(lambda x: x * 0.0 + x, VECTOR))
    assert primitives(program) == []
    assert jaxcompat.open_jaxpr(program.jaxpr).outvars == jaxcompat.open_jaxpr(program.jaxpr).invars


def _and_itself(operation, y):
    return operation(y, y)


REUSED = {
    "a sum of a negative": lambda a, b, c: -((-a) * b) + c,
    "the product is a result": lambda a, b, c: (-((-a) * b) + c, (-a) * b),
    "its negative is a result": lambda a, b, c: [
        f(-((-a) * b)) for f in (lambda e: e + c, lax.neg)
    ],
    "negated three times": lambda a, b, c: c - lax.neg(lax.neg((-a) * b)),
    "in two sums": lambda a, b, c: (-((-a) * b) + c, -((-a) * b) + a),
    "by a constant": lambda a, b, c: -(((-a) * b) * 2.0) + c,
    "subtracted from itself": lambda a, b, c: _and_itself(lax.sub, -c[None].T),
    "multiplied by itself": lambda a, b, c: _and_itself(lax.mul, -c[None].T),
    "added to itself": lambda a, b, c: _and_itself(lax.add, -c.reshape(1, -1)),
}


@pytest.mark.parametrize("name", REUSED)
def test_operands_that_a_rule_reads_are_kept_for_their_other_readers(name):
    fun = REUSED[name]
    args = [np.float32([1.5, -2.0, 0.0]), np.float32([3.0, 0.5, -0.0]), np.float32([1, 2, 3])]
    new = Simplify()(trace(fun, *args))
    type_check(new)
    results = zip(jax.tree.leaves(new(*args)), jax.tree.leaves(fun(*args)), strict=True)
    for got, want in results:
        np.testing.assert_array_equal(got, want)


# --- integers as predicates -----------------------------------------------------------------------

PREDICATES = {
    "of an inverse": (lambda p, x, y: lax.select_n(~p, x, y), ["not", "select_n"]),
    "of true and false": (
        lambda p, x, y: lax.select_n(p, jnp.full_like(p, 1, bool), jnp.full_like(p, 0, bool)),
        ["broadcast_in_dim", "broadcast_in_dim", "select_n"],
    ),
    "of false and true": (
        lambda p, x, y: lax.select_n(p, jnp.full_like(p, 0, bool), jnp.full_like(p, 1, bool)),
        ["broadcast_in_dim", "broadcast_in_dim", "select_n"],
    ),
    "of numbers": (
        lambda p, x, y: lax.select_n(p, jnp.full_like(p, 0), jnp.full_like(p, 1)),
        ["broadcast_in_dim", "broadcast_in_dim", "select_n"],
    ),
}


@pytest.mark.parametrize("name", PREDICATES)
def test_an_integer_predicate_is_not_a_boolean(name):
    fun, equations = PREDICATES[name]
    p, x, y = np.int32([0, 1, -1, -2, 5, 2**31 - 1]), np.float32(range(6)), -np.float32(range(6))
    assert simple(fun, p, x, y) == equations
    for passes in ("simplify", "-O1", "-O2", "-O3"):
        got = trace(fun, p, x, y).apply(passes)(p, x, y)
        np.testing.assert_array_equal(got, jax.jit(fun)(p, x, y))
        assert [trace(fun, v, 1.0, 2.0).apply(passes)(v, 1.0, 2.0) for v in p] == [
            fun(v, 1.0, 2.0) for v in p
        ]


def test_a_run_of_a_pipeline_does_not_visit_settled_equations_again(monkeypatch):
    def f(x):
        for i in range(20):
            x = jnp.sin(x) * (i + 2.0) + x
        return x * 1.0

    tried, apply = [], engine._apply
    monkeypatch.setattr(engine, "_apply", lambda *args: tried.append(1) or apply(*args))
    program = trace(f, VECTOR)
    once = program.apply("simplify, dce")
    first = len(tried)
    assert equivalent(program.apply("-O1"), once)
    assert first > 20 and len(tried) == 2 * first


def test_an_equation_is_visited_again_if_one_behind_it_has_changed():
    def f(x, y):  # `fold` finds the 0 only after `simplify` has removed x - x
        zero = jnp.int32(0) * (x - x)
        return jnp.where(zero == 0, y, -y) + zero

    program = trace(f, jnp.int32(1), jnp.int32(2)).apply("-O1")
    assert not program.jaxpr.eqns


def test_notes_of_a_run_change_no_result(monkeypatch):
    def loss(w, x):
        for _ in range(3):
            mean = x.mean(-1, keepdims=True)
            x = jax.nn.gelu((x - mean) / jnp.sqrt(jnp.square(x - mean).mean() + 1e-5) @ w)
        return jax.nn.softmax(x).sum()

    program = trace(jax.grad(loss), jax.ShapeDtypeStruct((4, 4), jnp.float32), MATRIX)
    settled, is_settled = [], engine.SettledEquations.is_settled

    def counted(*args):
        settled.append(is_settled(*args))
        return settled[-1]

    monkeypatch.setattr(engine.SettledEquations, "is_settled", counted)
    with_notes = program.apply("-O1")
    assert sum(settled) > 50
    monkeypatch.setattr(engine.SettledEquations, "is_settled", lambda *_: False)
    assert equivalent(program.apply("-O1"), with_notes)
