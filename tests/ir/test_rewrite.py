"""Each body is rewritten once, types and effects stay correct, and rejected results are undone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.ir.equations import Contains, free_variables
from jaxprtool.ir.regions import view
from jaxprtool.ir.rewrite import Memo, as_constants, map_equations, rewrite

x = jnp.arange(12.0).reshape(3, 4)


def rule_for(primitive, replacement):
    """Return a visitor whose rule replaces one primitive, and keeps everything else."""

    def visitor(writer):
        return lambda eqn: replacement(writer, eqn) if eqn.primitive.name == primitive else None

    return visitor


def checked(jaxpr):
    jaxcompat.check_jaxpr(jaxcompat.open_jaxpr(jaxpr))
    return jaxpr


def run(jaxpr, *args):
    return jaxcompat.jaxpr_as_fun(checked(jaxpr))(*args)


def names(jaxpr):
    return [eqn.primitive.name for eqn in jaxpr.eqns]


SIN_IS_COS = rule_for("sin", lambda w, eqn: w.trace(lambda a: [lax.cos(a)], eqn.invars, eqn))
NEG_IS_NOTHING = rule_for("neg", lambda w, eqn: eqn.invars)


def test_results_are_replaced_by_atoms_at_every_depth():
    def f(fun, a):
        loop = lax.scan(lambda c, r: (jax.jit(fun)(c), fun(r)), 0.5, a)[1]
        return lax.cond(True, lambda b: jax.checkpoint(fun)(b), lambda b: b, loop)

    new = rewrite(jax.make_jaxpr(lambda a: f(jnp.sin, a))(x), SIN_IS_COS)
    np.testing.assert_allclose(run(new, x)[0], f(jnp.cos, x), rtol=1e-6)


def test_only_the_outermost_body_is_rewritten_on_request():
    jaxpr = jax.make_jaxpr(lambda a: jnp.sin(jax.jit(jnp.sin)(a)))(x)
    new = rewrite(jaxpr, SIN_IS_COS, nested=False)
    assert names(new) == ["jit", "cos"]
    assert new.eqns[0] is jaxpr.eqns[0]


def test_an_unchanged_program_is_the_same_object():
    jaxpr = jax.make_jaxpr(jax.jit(jnp.tan))(x)
    assert rewrite(jaxpr, SIN_IS_COS) is jaxpr


def test_a_shared_body_is_visited_once_and_stays_shared():
    asked = []

    def visitor(writer):
        rule = SIN_IS_COS(writer)
        return lambda eqn: asked.append(eqn.primitive.name) or rule(eqn)

    inner = jax.jit(jnp.sin)
    new = rewrite(jax.make_jaxpr(lambda a: inner(inner(a)))(x), visitor)
    first, second = (jaxcompat.open_jaxpr(view(eqn).body) for eqn in new.eqns)
    assert first is second
    assert asked.count("sin") == 1


def test_outside_in_a_rule_sees_equations_before_their_bodies_are_rewritten():
    seen = []

    def visitor(writer):
        rule = SIN_IS_COS(writer)

        def replacement(eqn):
            if eqn.primitive.name == "jit":
                seen.extend(names(view(eqn).body))
            return rule(eqn)

        return replacement

    jaxpr = jax.make_jaxpr(jax.jit(jnp.sin))(x)
    (call,) = rewrite(jaxpr, visitor, outside_in=True).eqns
    assert (seen, names(view(call).body)) == (["sin"], ["cos"])
    seen.clear()
    rewrite(jaxpr, visitor)
    assert seen == ["cos"]


# --- types --------------------------------------------------------------------------------------


def test_an_atom_of_another_type_is_rejected_and_its_equations_are_rolled_back():
    def wrong(writer, eqn):
        (total,) = writer.trace(lambda a: [a.sum() + np.ones(3)], eqn.invars, eqn)
        return [total]

    jaxpr = jax.make_jaxpr(lambda a: jnp.cos(jnp.sin(a)))(x)
    assert rewrite(jaxpr, rule_for("sin", wrong)) is jaxpr

    def wrong_beside_others(writer, eqn):
        return wrong(writer, eqn) if eqn.primitive.name == "sin" else eqn.invars

    def visitor(writer):
        return lambda eqn: wrong_beside_others(writer, eqn)

    new = rewrite(jaxpr, visitor)
    assert names(new) == ["sin"]
    assert not new.constvars and not new.consts


def test_equations_of_a_rule_that_keeps_the_equation_are_rolled_back():
    def keeps(writer, eqn):
        writer.trace(lambda a: [a + np.ones(4)], eqn.invars, eqn)

    def visitor(writer):
        return lambda eqn: keeps(writer, eqn) if eqn.primitive.name == "sin" else eqn.invars

    new = rewrite(jax.make_jaxpr(lambda a: jnp.cos(jnp.sin(a)))(x), visitor)
    assert names(new) == ["sin"]
    assert not new.constvars


def test_a_rule_may_not_change_a_weak_type():
    strong = lambda a: lax.convert_element_type(a, jnp.float32)  # noqa: E731
    visitor = rule_for("convert_element_type", lambda w, eqn: eqn.invars)
    for fun in (strong, lambda a: strong(a) * jnp.ones(3)):
        jaxpr = jax.make_jaxpr(fun)(1.0)
        assert rewrite(jaxpr, visitor) is jaxpr


def test_results_of_a_body_are_cast_to_the_weak_type_of_the_result():
    weak = jax.make_jaxpr(lambda a: a + 1)(1.0)
    visitor = rule_for("jit", lambda w, eqn: w.splice(weak, eqn.invars, eqn))
    called = jax.make_jaxpr(lambda a: jax.jit(lambda a: a + 1)(a))(np.float32(1))
    new = checked(rewrite(called, visitor))
    assert names(new) == ["convert_element_type", "add", "convert_element_type"]
    assert [v.aval.weak_type for v in new.outvars] == [False]


# --- constants ----------------------------------------------------------------------------------


def constant_rule(values):
    def replacement(writer, eqn):
        return [writer.constant(next(values), eqn.outvars[0].aval)]

    return rule_for("sin", replacement)


def test_scalars_are_literals_and_one_array_is_one_constant():
    jaxpr = jax.make_jaxpr(lambda a: (jnp.sin(a), jnp.sin(a * 2)))(1.0)
    new = rewrite(jaxpr, constant_rule(iter([0.5, np.float32(2)])))
    assert [v.val for v in new.outvars] == [0.5, 2] and not new.consts
    assert all(v.aval == old.aval for v, old in zip(new.outvars, jaxpr.outvars, strict=True))
    table, other = np.ones((3, 4), np.float32), np.zeros((3, 4), np.float32)
    jaxpr = jax.make_jaxpr(lambda a: (jnp.sin(a), jnp.sin(a * 2), jnp.sin(a + 2)))(x)
    new = rewrite(jaxpr, constant_rule(iter([table, other, table])))
    first, second, third = run(new, x)
    assert list(map(id, new.consts)) == [id(table), id(other)]
    assert new.outvars[0] is new.outvars[2]
    np.testing.assert_array_equal(second, other)
    np.testing.assert_array_equal(first, third)


@pytest.mark.parametrize("around", [jax.checkpoint, jax.jit], ids=["remat", "jit"])
def test_a_body_that_cannot_hold_constants_reports_it(around):
    values = iter([np.ones((3, 4), np.float32)])
    jaxpr = jax.make_jaxpr(around(jnp.sin))(x)
    if around is jax.checkpoint:
        with pytest.raises(ValueError, match="cannot hold constants"):
            rewrite(jaxpr, constant_rule(values))
    else:
        np.testing.assert_array_equal(run(rewrite(jaxpr, constant_rule(values)), x)[0], 1)


def test_can_hold_only_considers_arrays():
    asked = {}
    table = np.ones(4, np.float32)
    scalar = jax.make_jaxpr(lambda a: a + 1)(x)
    array = as_constants(jax.make_jaxpr(lambda a: a + table)(x))

    def replacement(writer, eqn):
        asked[writer.holds_constants] = writer.can_hold(scalar), writer.can_hold(array)

    rewrite(jax.make_jaxpr(jax.checkpoint(lambda a: jnp.sin(a)))(x), rule_for("sin", replacement))
    rewrite(jax.make_jaxpr(jnp.sin)(x), rule_for("sin", replacement))
    assert asked == {False: (True, False), True: (True, True)}


# --- splicing -----------------------------------------------------------------------------------


def spliced(writer, eqn):
    return writer.splice(view(eqn).body, eqn.invars, eqn)


def test_spliced_equations_have_fresh_variables_and_their_source_lines():
    @jax.jit
    def inner(a):
        with jax.named_scope("in"):
            return jnp.sin(a), a, 1.5

    def outer(a):
        with jax.named_scope("out"):
            return inner(inner(a)[0])

    new = rewrite(jax.make_jaxpr(outer)(x), rule_for("jit", spliced))
    assert names(new) == ["sin", "sin"]
    assert new.eqns[0].outvars[0] is not new.eqns[1].outvars[0]
    assert [str(eqn.source_info.name_stack) for eqn in new.eqns] == ["out/in"] * 2
    np.testing.assert_array_equal(run(new, x)[1], jnp.sin(x))

    def as_the_call(writer, eqn):
        return writer.splice(view(eqn).body, eqn.invars, eqn, keep_source=False)

    new = rewrite(jax.make_jaxpr(outer)(x), rule_for("jit", as_the_call))
    assert [str(eqn.source_info.name_stack) for eqn in new.eqns] == ["out"] * 2


def test_rules_are_applied_to_spliced_equations_too():
    def visitor(writer):
        def rule(eqn):
            match eqn.primitive.name:
                case "jit":
                    return writer.splice(view(eqn).body, eqn.invars, eqn, rule=rule)
                case "neg":
                    return eqn.invars

        return rule

    inner = jax.jit(lambda a: -jax.jit(lambda b: jnp.sin(-b))(a))
    jaxpr = jax.make_jaxpr(lambda a: lax.fori_loop(0, 3, lambda i, c: inner(c), inner(a)))(x)
    new = rewrite(jaxpr, visitor, outside_in=True)
    assert names(new) == ["sin", "scan"]
    assert names(view(new.eqns[1]).body) == ["add", "sin"]
    checked(new)


def test_equations_of_a_rule_that_keeps_a_spliced_equation_are_rolled_back():
    def visitor(writer):
        def rule(eqn):
            if eqn.primitive.name == "jit":
                return writer.splice(view(eqn).body, eqn.invars, eqn, rule=rule)
            writer.trace(lambda a: [a + np.ones(4)], eqn.invars[:1], eqn)

        return rule

    new = rewrite(jax.make_jaxpr(jax.jit(lambda a: jnp.cos(jnp.sin(a))))(x), visitor)
    assert names(new) == ["sin", "cos"]
    assert not new.constvars


@pytest.mark.proof
def test_effects_follow_their_refs():
    @jax.jit
    def write(ref, a):
        own = jax.new_ref(a)
        own[...] += a
        ref[...] += own[...]

    def outer(a):
        ref = jax.new_ref(-a)
        write(ref, -a)
        lax.fori_loop(0, 2, lambda i, _: write(ref, -a), None)
        return ref[...]

    for visitor in (NEG_IS_NOTHING, rule_for("jit", spliced)):
        jaxpr = jax.make_jaxpr(outer)(x)
        new = rewrite(jaxpr, visitor)
        (got,) = run(new, x)
        np.testing.assert_array_equal(jnp.abs(got), 7 * x)
        assert sorted(map(str, new.effects)) == sorted(map(str, jaxpr.effects))


def test_a_memo_computes_each_query_of_a_jaxpr_once():
    jaxpr, asked = jax.make_jaxpr(lambda x: jnp.sin(x))(1.0), []
    memo = Memo()
    make = lambda: asked.append(1) or len(asked)  # noqa: E731
    assert [memo(make, jaxpr), memo(make, jaxpr), memo(make, jaxpr, "more")] == [1, 1, 2]
    assert memo(make, jax.make_jaxpr(lambda x: jnp.sin(x))(1.0)) == 3
    assert Memo()(make, jaxpr) == 4


def test_free_variables_are_read_but_not_defined():
    body = jax.make_jaxpr(lambda a, b, c: (jnp.sin(a) * b, c))(1.0, 2.0, 3.0)
    a, b, c = body.jaxpr.invars
    sin, product = body.eqns
    assert list(free_variables(body.eqns)) == [a, b]
    assert list(free_variables(body.eqns, body.jaxpr.outvars)) == [a, b, c]
    assert list(free_variables([product])) == [*sin.outvars, b]


def test_contains_searches_at_every_depth():
    jaxpr = jax.make_jaxpr(lambda a: lax.scan(lambda c, r: (jax.jit(jnp.sin)(c), r), 1.0, a))(x)
    assert Contains(lambda eqn: eqn.primitive.name == "sin")(jaxpr)
    assert not Contains(lambda eqn: eqn.primitive.name == "cos")(jaxpr)


# --- donation -------------------------------------------------------------------------------------


def test_a_donated_operand_gets_no_second_name():
    takes = jax.jit(lambda a: a * 2, donate_argnums=0)

    def fun(x):
        kept, given = x + 1, x + 1
        return takes(given), kept

    program = jaxprtool.trace(fun, jnp.ones(3))
    after = program.apply("cse")
    assert [e.primitive.name for e in after.jaxpr.eqns] == ["add", "add", "jit"]
    for old, new in zip(program(jnp.ones(3)), after(jnp.ones(3)), strict=True):
        np.testing.assert_array_equal(old, new)


def test_constants_are_not_donated():
    takes = jax.jit(lambda a, b: (a * 2, b), donate_argnums=(0, 1))

    def fun(x):
        return takes(jnp.arange(3) + jnp.ones(3), jnp.sin(jnp.float32(1)) + x), 2.0

    program = jaxprtool.trace(fun, jnp.ones(3))
    for passes in ("fold", "simplify(fast=True)", "-O1", "-O2"):
        after = program.apply(passes)
        for _ in range(2):
            jax.tree.map(np.testing.assert_array_equal, program(jnp.ones(3)), after(jnp.ones(3)))


def test_a_literal_may_replace_a_result_next_to_a_donation():
    takes = jax.jit(lambda a: a * 2, donate_argnums=0)
    program = jaxprtool.trace(lambda x: (takes(x + 1), jnp.float32(1) + 2), jnp.ones(3))
    after = program.apply("fold")
    assert [e.primitive.name for e in after.jaxpr.eqns] == ["add", "jit"]


def test_a_donated_result_may_be_computed_differently():
    takes = jax.jit(lambda a: a * 2, donate_argnums=0)
    program = jaxprtool.trace(lambda x: takes(-(-(x * 2 - 1.0) * 3)), jnp.ones(3))
    jax.tree.map(
        np.testing.assert_array_equal,
        program(jnp.ones(3)),
        program.apply("simplify, cse, dce")(jnp.ones(3)),
    )


def test_an_inner_call_donates_nothing_after_its_outer_call_is_inlined():
    takes = jax.jit(lambda a: a * 2, donate_argnums=0)
    program = jaxprtool.trace(lambda x: (jax.jit(lambda a: takes(a) + 1)(x), x), jnp.ones(3))
    after = program.apply("inline")
    assert [e.primitive.name for e in after.jaxpr.eqns] == ["mul", "add"]
    x = jnp.ones(3)
    after(x)
    assert not x.is_deleted()


# --- map_equations ------------------------------------------------------------------------------


def sin_to_cos(eqn):
    if eqn.primitive.name != "sin":
        return None
    (body_eqn,) = jax.make_jaxpr(jnp.cos)(jnp.zeros(eqn.outvars[0].aval.shape)).eqns
    return [body_eqn.replace(invars=eqn.invars, outvars=eqn.outvars)]


def test_map_equations_reaches_every_depth():
    def f(fun, a):
        loop = lax.scan(lambda c, r: (jax.jit(fun)(c), fun(r)), 0.5, a)[1]
        return lax.cond(True, lambda b: jax.checkpoint(fun)(b), lambda b: b, loop)

    new = map_equations(jax.make_jaxpr(lambda a: f(jnp.sin, a))(x), sin_to_cos)
    np.testing.assert_allclose(run(new, x)[0], f(jnp.cos, x), rtol=1e-6)


def test_a_jaxpr_that_map_equations_does_not_change_is_the_same_object():
    jaxpr = jax.make_jaxpr(jax.jit(jnp.tan))(x)
    assert map_equations(jaxpr, sin_to_cos) is jaxpr


def test_map_equations_rewrites_a_shared_body_once():
    asked = []

    def rule(eqn):
        asked.append(eqn.primitive.name)
        return sin_to_cos(eqn)

    inner = jax.jit(jnp.sin)
    new = map_equations(jax.make_jaxpr(lambda a: inner(inner(a)))(x), rule)
    first, second = (jaxcompat.open_jaxpr(view(e).body) for e in new.eqns)
    assert first is second
    assert asked.count("sin") == 1


def test_map_equations_drops_the_effects_of_removed_equations():
    def f(a):
        jax.debug.print("{}", a)
        return jnp.sin(a)

    drop = lambda eqn: [] if eqn.primitive.name.startswith("debug") else None  # noqa: E731
    new = map_equations(jax.make_jaxpr(jax.jit(f))(x), drop)
    assert not new.effects and not new.eqns[0].effects
