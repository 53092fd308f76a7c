"""The interpreters of the oracles and of the package agree with JAX's evaluator.

That of the oracles shares no code with the package.
"""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir import evaluation
from jaxprtool.loading.trace import trace
from tests.programs import harness_programs, interpreter
from tests.programs.recorder import record, recording
from tests.programs.rules import with_vjp_rule
from tests.programs.values import bits_agree, first_value_difference, values_agree
from tests.share import share
from tests.sweep.corpora import Harnesses
from tests.sweep.parts import Part

X = jnp.arange(6, dtype=jnp.int32).reshape(3, 2)


def loop(x):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 2 + s[0]), (0, x))


def scanned(x, **options):
    return lax.scan(lambda c, row: (c + row, (c * row, row[0])), x[0], x, **options)


def with_a_rule(x):
    function = jax.custom_jvp(loop)
    function.defjvp(lambda primals, tangents: jax.jvp(loop, primals, tangents))
    return function(x)


evaluators = pytest.mark.parametrize(
    "evaluate", [interpreter.evaluate, evaluation.evaluate], ids=["oracles", "package"]
)


@evaluators
@pytest.mark.parametrize(
    "function",
    [
        loop,
        scanned,
        lambda x: scanned(x, reverse=True),
        lambda x: scanned(x, unroll=2),
        lambda x: lax.scan(lambda c, _: (c, (c, jax.random.key(1))), x, None, length=0),
        lambda x: lax.scan(lambda k, _: (jax.random.split(k)[0], k), jax.random.key(0), x),
        lambda x: lax.switch(x[2, 1], [loop, loop, lambda y: (7, y)], x),
        lambda x: lax.switch(x[0, 0] - 5, [loop, lambda y: (7, y)], x),
        lambda x: jax.checkpoint(jax.jit(loop))(x),
        with_a_rule,
        with_vjp_rule(lambda x: loop(x), saving=True),
        lambda x: lax.scan(lambda c, y: (c, (c, y)), jnp.int4(1), x.astype(jnp.bfloat16)),
        lambda x: lax.scan(lambda c, y: (c, (c, y)), 0.0, x[:0], reverse=True),
        lambda x: lax.cond(x[0, 0] > 1, lambda y: scanned(y)[1], lambda y: scanned(y + 1)[1], x),
    ],
)
def test_loops_branches_and_calls_agree_with_jax(function, evaluate):
    program = trace(function, X)
    expected = jaxcompat.jaxpr_as_fun(program.jaxpr)(X)
    assert first_value_difference(expected, evaluate(program.jaxpr, [X]), bits_agree) is None


@evaluators
def test_refs_are_written_in_loops(evaluate):
    def function(x):
        ref = jax.new_ref(x)
        lax.fori_loop(0, 3, lambda i, _: ref.__setitem__(..., ref[...] * 2), None)
        return ref[...]

    program = trace(function, X)
    np.testing.assert_array_equal(evaluate(program.jaxpr, [X])[0], X * 8)


@evaluators
def test_callbacks_are_called_in_program_order(evaluate):
    def body(carry, x):
        jax.debug.callback(lambda v: record(1, False, v), x)
        jax.debug.callback(lambda v: record(2, False, v), carry)
        return carry + 1, None

    program = trace(lambda x: lax.scan(body, 0, x)[0], jnp.arange(3))
    with recording() as seen:
        evaluate(program.jaxpr, [jnp.arange(3)])
    assert [event.tag for event in seen.events] == [1, 2] * 3
    assert [int(event.value) for event in seen.events] == [0, 0, 1, 1, 2, 2]


def prove(number, case):
    """Compare both evaluators with JAX, except for XLA's rounding in loop bodies."""
    with case.setting(), recording():
        program, args = case.program(), case.arguments()
        expected = jaxcompat.jaxpr_as_fun(program.jaxpr)(*args)
        values = interpreter.evaluate(program.jaxpr, args)
    assert [jax.typeof(x) for x in values] == [jax.typeof(x) for x in expected]
    has_bodies = any(list(interpreter.bodies(eqn)) for eqn in program.jaxpr.eqns)
    assert (
        first_value_difference(expected, values, values_agree if has_bodies else bits_agree) is None
    )


def test_harnesses_agree_with_jax():
    for number, case in enumerate(share(harness_programs(1)[::100])):
        prove(number, case)


SWEEP = [Part("interpreter: harnesses", Harnesses(), prove)]


def test_interpreter_imports_nothing_of_the_package():
    tree = ast.parse(Path(interpreter.__file__).read_text())
    names = [
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    assert not [name for name in names if name.split(".")[0] in ("jaxprtool", "tests")]
