"""Where values come from and go to, a step at a time, through the borders of bodies."""

import jax
import jax.numpy as jnp
from jax import lax

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.ir.dataflow import DataFlow

x = jnp.arange(3.0)


def flow_of(fun, *args):
    program = jaxprtool.trace(fun, *(args or (x,)))
    return DataFlow(jaxcompat.open_jaxpr(program.jaxpr))


def value(flow, primitive):
    """The first result of the one equation of a primitive."""
    (found,) = [
        (jaxpr, eqn.outvars[0])
        for jaxpr in flow.holders
        for eqn in jaxpr.eqns
        if eqn.primitive.name == primitive
    ]
    return found


def called(a):
    inner = jax.jit(lambda p, q: (jnp.cos(p), jnp.tan(q)))
    b, c = inner(jnp.sin(a), jnp.exp(a))
    return jnp.tanh(b), jnp.log(c)


def looped(a):
    def step(carry, row):
        return (carry[0] + jnp.cos(row), carry[1] * 2.0), jnp.sin(carry[0])

    (p, q), rows = lax.scan(step, (a[0], a[1]), a)
    return jnp.tan(p), jnp.exp(q), jnp.log(rows)


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
