"""Follow values forward and backward, one step at a time, across the boundaries of bodies."""

from jaxprtool.ir.dataflow import DataFlow
from tests.ir.bodies import called, looped, top_of, value


def test_an_argument_of_a_body_is_the_operand_of_the_call():
    flow = DataFlow(top_of(called))
    body, var = value(flow.top, "tan")
    (holder,) = flow.holders[body]
    assert holder.eqn.primitive.name == "jit"
    (operand,) = body.eqns[flow.definition(body, var)].invars
    ((outer, atom),) = flow.origins(holder, flow.argument(body, operand))
    assert outer.eqns[flow.definition(outer, atom)].primitive.name == "exp"
    ((outer, result),) = flow.destinations(holder, flow.results(body, var)[0])
    assert [outer.eqns[i].primitive.name for i in flow.readers(outer, result)] == ["log"]


def test_a_carried_argument_is_the_initial_value_or_that_of_the_last_iteration():
    flow = DataFlow(top_of(looped))
    body, var = value(flow.top, "mul")
    (holder,) = flow.holders[body]
    carried = body.eqns[flow.definition(body, var)].invars[0]
    first, again = flow.origins(holder, flow.argument(body, carried))
    assert first[0] is flow.top and again == (body, var)
