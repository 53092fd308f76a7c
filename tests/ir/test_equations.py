"""Queries on the equations of a program."""

import jax
import jax.numpy as jnp

from jaxprtool.ir.equations import equations
from jaxprtool.ir.program import top_jaxpr


def test_a_body_that_an_equation_holds_twice_is_visited_once():
    def solve(b):
        return jax.lax.custom_linear_solve(lambda x: 2 * x, b, lambda f, y: y / 2, symmetric=True)

    found = list(equations(top_jaxpr(jax.make_jaxpr(solve)(jnp.ones(3)))))
    assert len(found) == len(set(map(id, found)))
