"""What a value is computed from, and what is computed from it, through the borders of bodies."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.ir.dataflow import DataFlow
from jaxprtool.ir.equations import equations

x = jnp.arange(3.0)


def flow_of(fun, *args):
    program = jaxprtool.trace(fun, *(args or (x,)))
    return DataFlow(jaxcompat.open_jaxpr(program.jaxpr))


def names(flow, ids):
    return sorted(eqn.primitive.name for eqn in equations(flow.top) if id(eqn) in ids)


def value(flow, primitive):
    """The first result of the one equation of a primitive."""
    (found,) = [
        (jaxpr, eqn.outvars[0])
        for jaxpr in flow.holders
        for eqn in jaxpr.eqns
        if eqn.primitive.name == primitive
    ]
    return found


def both(flow, primitive):
    start = value(flow, primitive)
    return names(flow, flow.dependencies([start])), names(flow, flow.dependents([start]))


def straight(a):
    b = jnp.sin(a)
    return jnp.cos(b) + jnp.tan(a), jnp.exp(b)


def called(a):
    inner = jax.jit(lambda p, q: (jnp.cos(p), jnp.tan(q)))
    b, c = inner(jnp.sin(a), jnp.exp(a))
    return jnp.tanh(b), jnp.log(c)


def looped(a):
    def step(carry, row):
        return (carry[0] + jnp.cos(row), carry[1] * 2.0), jnp.sin(carry[0])

    (p, q), rows = lax.scan(step, (a[0], a[1]), a)
    return jnp.tan(p), jnp.exp(q), jnp.log(rows)


def test_along_straight_code():
    flow = flow_of(straight)
    assert both(flow, "sin") == (["sin"], ["add", "cos", "exp"])
    assert both(flow, "add")[0] == ["add", "cos", "sin", "tan"]


def test_into_a_call_and_out_of_it_each_result_has_its_own_operands():
    flow = flow_of(called)
    assert both(flow, "exp") == (["exp"], ["jit", "log", "tan"])
    assert both(flow, "tanh") == (["cos", "jit", "sin", "tanh"], [])
    assert both(flow, "cos") == (["cos", "jit", "sin"], ["jit", "tanh"])


def test_round_a_loop():
    flow = flow_of(looped)
    before, after = both(flow, "sin")
    assert {"add", "cos", "scan"} <= set(before) and "mul" not in before
    assert after == ["log", "scan"]
    assert set(both(flow, "cos")[1]) == {"add", "sin", "scan", "tan", "log"}
    assert "cos" not in both(flow, "exp")[0] and "mul" in both(flow, "exp")[0]


def test_what_decides_how_often_a_loop_goes_round_is_part_of_all_its_results():
    def fun(a):
        limit = jnp.sin(a).sum()
        start = (jnp.float32(0.0), a)
        return jnp.exp(
            lax.while_loop(lambda c: c[0] < limit, lambda c: (c[0] + 1, c[1] * 2), start)[1]
        )

    flow = flow_of(fun)
    assert "sin" in both(flow, "exp")[0] and "exp" in both(flow, "sin")[1]


def test_what_decides_on_a_branch_is_part_of_its_results():
    flow = flow_of(lambda a: jnp.exp(lax.cond(jnp.cos(a[0]) > 0, jnp.sin, jnp.tan, a)))
    assert "cos" in both(flow, "exp")[0] and {"sin", "tan"} <= set(both(flow, "exp")[0])
    assert both(flow, "cos")[1] == ["cond", "convert_element_type", "exp", "gt"]


def test_what_is_written_to_a_ref_is_part_of_what_is_read_from_it():
    def fun(a):
        ref = jax.new_ref(jnp.zeros(3))
        ref[...] = jnp.sin(a)
        return jnp.exp(ref[...])

    flow = flow_of(fun)
    assert "sin" in both(flow, "exp")[0] and "exp" in both(flow, "sin")[1]


def test_an_argument_of_a_body_is_the_operand_of_the_call():
    flow = flow_of(called)
    body, var = value(flow, "tan")
    (holder,) = flow.holders[body]
    assert holder.eqn.primitive.name == "jit"
    (operand,) = body.eqns[flow.binder(body, var)].invars
    ((outer, atom),) = flow.origins(holder, flow.argument(body, operand))
    assert outer.eqns[flow.binder(outer, atom)].primitive.name == "exp"
    ((outer, result),) = flow.goals(holder, flow.results(body, var)[0])
    assert [outer.eqns[i].primitive.name for i in flow.readers(outer, result)] == ["log"]


def test_a_carried_argument_is_the_first_value_or_the_last_rounds():
    flow = flow_of(looped)
    body, var = value(flow, "mul")
    (holder,) = flow.holders[body]
    carried = body.eqns[flow.binder(body, var)].invars[0]
    first, again = flow.origins(holder, flow.argument(body, carried))
    assert first[0] is flow.top and again == (body, var)


@pytest.mark.parametrize("sample", ["transformer", "rnn"])
def test_results_depend_on_what_dce_leaves(sample):
    program = jaxprtool.load(f"samples/{sample}.py:loss").apply("grad")
    for each, everything in ((program, False), (program.apply("dce"), True)):
        flow = DataFlow(jaxcompat.open_jaxpr(each.jaxpr))
        leads = flow.dependencies([(flow.top, v) for v in flow.top.outvars])
        assert (leads == set(map(id, equations(flow.top)))) == everything
        if not everything:
            needed = names(flow, leads)
    assert needed == names(flow, leads)
