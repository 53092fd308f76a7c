"""The cost of each equation, at every depth, over all its executions."""

import jax.numpy as jnp
from jax import jit, lax

from jaxprtool import jaxcompat, trace
from jaxprtool.commands.cost.estimate import work_by_equation
from jaxprtool.ir.equations import equations
from tests.commands.cost.test_cost import W, X


def by_primitive(fun, *args):
    jaxpr = jaxcompat.open_jaxpr(trace(fun, *args).jaxpr)
    works = work_by_equation(jaxpr)
    return [(e.primitive.name, works[id(e)].flops) for e in equations(jaxpr) if id(e) in works]


def test_a_body_equation_counts_in_each_iteration_and_the_loop_has_the_total():
    def f(x, w):
        return lax.scan(lambda x, _: (w @ x, None), x, length=10)[0] + 1

    product = 2 * 512 * 512
    assert dict(by_primitive(f, X, W)) == {
        "scan": 10 * product,
        "dot_general": 10 * product,
        "add": 512,
    }


def test_nested_loops_and_repeated_calls():
    double = jit(lambda x: x + x)

    def f(x):
        def outer(x, _):
            return lax.scan(lambda x, _: (double(double(x)), None), x, length=3)[0], None

        return lax.scan(outer, x, length=5)[0]

    found = by_primitive(f, X)
    assert [flops for name, flops in found if name == "scan"] == [15 * 1024] * 2
    assert ("add", 15 * 1024) in found  # one equation, in a body that is called twice


def test_all_branches_count():
    found = by_primitive(lambda i, x: lax.cond(i > 0, jnp.square, lambda x: x * x + x, x), 1, X)
    assert ("cond", 1024) in found
    assert [flops for name, flops in found if name == "add"] == [512]
