"""The dependencies and dependents of a value, through calls, loops, branches and refs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.ir.dataflow import Start, backward_slice, everything, forward_slice
from jaxprtool.ir.equations import equations
from tests.ir.bodies import X, called, looped, top_of, value


def names(top, run):
    members = run.members()
    return sorted(eqn.primitive.name for eqn in equations(top) if id(eqn) in members)


def both(top, primitive):
    start = Start([value(top, primitive)])
    return names(top, backward_slice(top, start)), names(top, forward_slice(top, start))


def reached(top, argument):
    return forward_slice(top, Start([(top, top.invars[argument])])).results


def needed(top, result):
    return backward_slice(top, Start([(top, top.outvars[result])])).arguments


def straight(a):
    b = jnp.sin(a)
    return jnp.cos(b) + jnp.tan(a), jnp.exp(b)


def test_slices_of_straight_line_code():
    top = top_of(straight)
    assert both(top, "sin") == (["sin"], ["add", "cos", "exp"])
    assert both(top, "add")[0] == ["add", "cos", "sin", "tan"]


def test_each_result_of_a_call_has_its_own_operands():
    top = top_of(called)
    assert both(top, "exp") == (["exp"], ["jit", "log", "tan"])
    assert both(top, "tanh") == (["cos", "jit", "sin", "tanh"], [])
    assert both(top, "cos") == (["cos", "jit", "sin"], ["jit", "tanh"])


def test_slices_of_a_loop():
    top = top_of(looped)
    before, after = both(top, "sin")
    assert {"add", "cos", "scan"} <= set(before) and "mul" not in before
    assert after == ["log", "scan"]
    assert set(both(top, "cos")[1]) == {"add", "sin", "scan", "tan", "log"}
    assert "cos" not in both(top, "exp")[0] and "mul" in both(top, "exp")[0]


def test_the_condition_of_a_loop_affects_all_its_results():
    def fun(a):
        limit = jnp.sin(a).sum()
        start = (jnp.float32(0.0), a)
        return jnp.exp(
            lax.while_loop(lambda c: c[0] < limit, lambda c: (c[0] + 1, c[1] * 2), start)[1]
        )

    top = top_of(fun)
    assert "sin" in both(top, "exp")[0] and "exp" in both(top, "sin")[1]


def test_the_predicate_of_a_branch_affects_its_results():
    top = top_of(lambda a: jnp.exp(lax.cond(jnp.cos(a[0]) > 0, jnp.sin, jnp.tan, a)))
    assert "cos" in both(top, "exp")[0] and {"sin", "tan"} <= set(both(top, "exp")[0])
    assert both(top, "cos")[1] == ["cond", "convert_element_type", "exp", "gt"]


def test_writes_to_a_ref_affect_its_reads():
    def fun(a):
        ref = jax.new_ref(jnp.zeros(3))
        ref[...] = jnp.sin(a)
        return jnp.exp(ref[...])

    top = top_of(fun)
    assert "sin" in both(top, "exp")[0] and "exp" in both(top, "sin")[1]


def test_a_call_has_only_the_equations_of_the_slice():
    inner = jax.jit(lambda p, q: (jnp.cos(p), jnp.tan(q)))

    def fun(a, b):
        return inner(a, a)[0], inner(b, b)[1]

    top = top_of(fun, X, X)
    assert reached(top, 0) == (True, False) and reached(top, 1) == (False, True)
    assert needed(top, 0) == (True, False) and needed(top, 1) == (False, True)
    assert names(top, backward_slice(top, Start([(top, top.outvars[0])]))) == ["cos", "jit"]


def test_a_result_does_not_depend_on_unrelated_carries():
    def fun(a, b):
        return lax.scan(lambda c, row: ((c[0] * 2, c[1] + row), c[1]), (a[0], b[0]), b)

    top = top_of(fun, X, X)
    assert reached(top, 0) == (True, False, False)
    assert needed(top, 0) == (True, False) and needed(top, 2) == (False, True)


def test_a_carry_affects_carries_of_later_iterations():
    def step(carry, _):
        first, second, third = carry
        return (first, first, second), third

    def fun(a):
        (_, _, last), rows = lax.scan(step, (a, X, X), None, length=5)
        return last, rows

    assert reached(top_of(fun), 0) == (True, True)


def test_refs_contain_what_was_written_before_they_are_read():
    def fun(a, b):
        ref = jax.new_ref(jnp.zeros(3))
        ref[...] = a
        early = ref[...]
        ref[...] = b
        return early, ref[...]

    top = top_of(fun, X, X)
    assert reached(top, 1) == (False, True)
    assert needed(top, 0) == (True, False)


def test_a_ref_written_in_a_loop_is_read_in_the_next_iteration():
    def fun(a):
        ref = jax.new_ref(jnp.zeros(3))

        def step(i, total):
            total = total + ref[...]
            ref[...] = a * 2.0
            return total

        return lax.fori_loop(0, 3, step, jnp.zeros(3))

    top = top_of(fun)
    assert reached(top, 0) == (True,) and needed(top, 0) == (True,)
    assert "mul" in names(top, backward_slice(top, Start([(top, top.outvars[0])])))


def test_a_slice_can_start_at_the_equations_of_a_line():
    top = top_of(straight)
    cos = next(eqn for eqn in top.eqns if eqn.primitive.name == "cos")
    start = Start((), {top: frozenset({id(cos)})})
    assert names(top, forward_slice(top, start)) == ["add", "cos"]
    assert names(top, backward_slice(top, start)) == ["cos", "sin"]


def test_a_slice_of_everything_has_all_equations():
    top = top_of(looped)
    assert everything(top).members() == {id(eqn) for eqn in equations(top)}


@pytest.mark.parametrize("sample", ["transformer", "rnn"])
def test_results_depend_on_all_equations_that_dce_leaves(sample):
    program = jaxprtool.load(f"samples/{sample}.py:loss").apply("grad")
    before, after = (jaxcompat.open_jaxpr(each.jaxpr) for each in (program, program.apply("dce")))
    found = [backward_slice(top, Start([(top, v) for v in top.outvars])) for top in (before, after)]
    assert found[1].members() == {id(eqn) for eqn in equations(after)}
    assert found[0].members() < {id(eqn) for eqn in equations(before)}
    assert names(before, found[0]) == names(after, found[1])
