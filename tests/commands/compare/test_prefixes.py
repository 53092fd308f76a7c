"""The smallest prefix of a program that two variants compute differently."""

import jax.numpy as jnp
import numpy as np

import jaxprtool
from jaxprtool.commands.compare.divergence import differing_prefix
from jaxprtool.commands.compare.variants import Executor, Variant

X = jnp.linspace(0.1, 1, 8)


def chain(x):
    y = jnp.sin(x)
    y = jnp.cos(y)
    z = y * 3
    return jnp.tanh(z) + y


class AsIfFused(Executor):
    """Returns other values if the compiled program multiplies, as a fusion might."""

    def run(self, body, arguments):
        results = super().run(body, arguments)
        fused = any(eqn.primitive.name == "mul" for eqn in body.eqns)
        return [np.nextafter(each, np.inf) if fused else each for each in results]


def executors(program, second=AsIfFused):
    variant = Variant("first", program)
    return Executor(variant, [X]), second(variant, [X])


def test_the_last_equation_of_the_prefix_is_named_with_its_line():
    program = jaxprtool.trace(chain, X)
    found = differing_prefix(program, executors(program))
    assert (found.count, found.total, found.primitive) == (3, 5, "mul")
    assert found.source.startswith("tests/commands/compare/test_prefixes.py:")
    assert found.code == "z = y * 3"
    # `y` is read later too.
    assert [each.name.split()[0] for each in found.results] == ["mul", "cos"]
    assert all(each.ulps == 1 for each in found.results)


def test_no_prefix_is_found_if_the_whole_program_is_equal():
    program = jaxprtool.trace(chain, X)
    assert differing_prefix(program, executors(program, Executor)) is None
