"""Wrapping a case in dead code adds equations and changes no result."""

import jax
import jax.numpy as jnp
import pytest

from tests.programs import Case, same
from tests.programs.dead_code import DEAD_CODE, with_dead_code
from tests.programs.same import count_equations

X = jnp.array([0.5, -1.5, 2.0], jnp.float32)


@pytest.mark.parametrize("kind", DEAD_CODE)
@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda *args: jnp.sin(args[0]), (X,)),
        (lambda *args: (args[0] > args[1], {"n": args[0].sum()}), (X, X[::-1])),
        (lambda *args: jax.random.split(args[0]), (jax.random.key(0),)),
    ],
)
def test_results_equal_those_of_the_original_case(kind, function, args):
    case = Case("case", function, args)
    wrapped = with_dead_code(case, kind)
    before, after = case.program(), wrapped.program()
    assert count_equations(after.jaxpr) > count_equations(before.jaxpr)
    same(before, after, case.arguments(), gradients=kind in ("jit", "remat", "cond", "scan"))
