"""stacking returns the bytes that scans need for stacked values."""

import jax
import jax.numpy as jnp

import jaxprtool
from jaxprtool.passes.loops.roll.chains import stacking


def loss(weights, x):
    for w in weights:
        x = x + jnp.tanh(x @ w) * jax.nn.sigmoid(x)
    return (x**2).sum()


WEIGHTS, X = [jnp.eye(4) * i for i in range(6)], jnp.ones((2, 4))


def test_values_stacked_inside_are_copied_and_arguments_are_not():
    program = jaxprtool.trace(loss, WEIGHTS, X)
    assert stacking(program).scans == 0
    found = stacking(program.apply("roll"))
    assert (found.scans, found.copied, found.results) == (1, 6 * 4 * 4 * 4, 0)
    found = stacking(program.apply("roll(stack='arguments')")["rolled"])
    assert (found.scans, found.copied, found.results) == (1, 0, 0)


def test_residuals_of_a_gradient_are_stacked_results():
    found = stacking(jaxprtool.trace(jax.grad(loss, (0, 1)), WEIGHTS, X).apply("roll"))
    assert found.scans == 2
    assert found.copied == 6 * 4 * 4 * 4
    assert found.results % (6 * 4) == 0 and found.results > 6 * 4 * 4 * 4
