"""Passes on outlined programs keep the marks of calls, and shared bodies shared.

Each body is compiled once, so a pass that duplicates a body would undo outlining.
"""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.ir.equations import equations
from jaxprtool.ir.program import Program
from jaxprtool.jaxcompat import JaxprEqn, mark_of

X = np.sin(np.arange(32, dtype="f")).reshape(8, 4)
PARAMS = [
    {"g": np.full(4, i + 1.0, "f"), "w": np.cos(np.arange(16, dtype="f") + i).reshape(4, 4)}
    for i in range(4)
]


@jax.jit
def layer(x: Any, p: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    h = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["g"]
    return x + jax.nn.relu(jax.nn.softmax(h @ p["w"]) * jnp.where(h > 0, h, 2.0))


def loss(params: Any, x: Any) -> Any:
    for p in params:
        x = layer(x, p)
    return (x**2).sum()


def marked_calls(program: Program) -> list[JaxprEqn]:
    found = equations(jaxcompat.open_jaxpr(program.jaxpr))
    return [eqn for eqn in found if eqn.primitive.name == "jit" and mark_of(eqn) == "unit"]


def copies(program: Program) -> list[int]:
    """Return the number of calls of each body of marked calls."""
    called = Counter(id(jaxcompat.open_jaxpr(c.params["jaxpr"])) for c in marked_calls(program))
    return sorted(called.values())


def run(program: Program) -> list[Any]:
    return jax.tree.leaves(jax.jit(program)(PARAMS, X))


def marked(program: Program, name: str = "layer") -> Program:
    """Return a program whose calls are units of this name, as after `outline`."""
    eqns = [
        eqn.replace(ctx=jaxcompat.marked(eqn.ctx, "unit", name))
        if eqn.primitive.name == "jit"
        else eqn
        for eqn in program.jaxpr.eqns
    ]
    return program.replace(jaxpr=jaxcompat.replace_jaxpr(program.jaxpr, eqns=eqns))


FORWARD = marked(jaxprtool.trace(loss, PARAMS, X)).apply("-O1")
TRAINING = marked(jaxprtool.trace(jax.value_and_grad(loss), PARAMS, X)).apply("-O1")

PASSES = (
    *("dce", "cse", "fold", "hoist", "simplify", "forward", "schedule", "unroll", "inline"),
    *("-O1", "-O2"),
)


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("program", [FORWARD, TRAINING], ids=["forward", "training"])
def test_calls_that_share_a_body_still_share_one_afterwards(program: Program, passes: str) -> None:
    after = program.apply(passes)
    assert len(copies(program)) >= 1
    assert copies(after) == copies(program)
    for a, b in zip(run(after), run(program), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_forced_inlining_inlines_them() -> None:
    after = TRAINING.apply("inline(force=True)")
    assert not any(eqn.ctx.xla_metadata for eqn in equations(jaxcompat.open_jaxpr(after.jaxpr)))
    assert jaxprtool.equivalent(
        after.apply("-O1"), TRAINING.apply("inline(force=True), cse, dce, -O1")
    )


@pytest.mark.proof
def test_a_batched_program_has_the_same_calls() -> None:
    after = FORWARD.apply("batch(in_axes=(None, 0), axis_size=2)")
    assert copies(after) == copies(FORWARD)
    x = np.stack([X, X / 2])
    np.testing.assert_allclose(
        jax.jit(after)(PARAMS, x), [loss(PARAMS, X), loss(PARAMS, X / 2)], rtol=1e-4
    )


@pytest.mark.proof
def test_a_differentiated_program_has_calls_of_both_halves() -> None:
    after = FORWARD.apply("grad")
    assert sum(copies(after)) == 2 * sum(copies(FORWARD))
    marked_ones = [e for e in equations(jaxcompat.open_jaxpr(after.jaxpr)) if e.ctx.xla_metadata]
    assert {e.primitive.name for e in marked_ones} == {"jit"}
    expected = jax.tree.leaves(jax.jit(jax.grad(loss))(PARAMS, X))
    for a, b in zip(run(after), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@jax.jit
def summed(x: Any, p: Any) -> Any:
    x = layer(x, p)
    return x, (jnp.tanh(x) * x).sum()


def test_unused_code_of_one_copy_is_removed_from_that_copy_only() -> None:
    def model(params: Any, x: Any) -> Any:
        sums = []
        for p in params:
            x, total = summed(x, p)
            sums.append(total)
        return x, sums

    program = marked(jaxprtool.trace(model, PARAMS, X))
    assert copies(program) == [4]
    unused = program.replace(
        jaxpr=jaxcompat.replace_jaxpr(program.jaxpr, outvars=program.jaxpr.outvars[:-1]),
        out_tree=jax.tree.structure((0, [0] * (len(PARAMS) - 1))),
        out_names=program.out_names[:-1],
    )
    assert copies(unused.apply("dce")) == [1, 3]


# --- cse ------------------------------------------------------------------------------------------


def called(*bodies: Any) -> Program:
    """Return a program that calls bodies as units of one name, each on the same operand."""

    def fun(x: Any) -> list[Any]:
        return [jax.jit(body)(x) for body in bodies]

    return marked(jaxprtool.trace(fun, X))


def double(x: Any) -> Any:
    return jnp.tanh(x) * 2.0


def treble(x: Any) -> Any:
    return jnp.tanh(x) * 3.0


def test_different_bodies_of_one_name_are_not_merged() -> None:
    program = called(double, treble, double)
    after = program.apply("cse")
    assert len(marked_calls(after)) == 2
    for a, b in zip(after(X), program(X), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_marked_call_is_not_merged_with_an_unmarked_one() -> None:
    program = called(double, double)
    first, second = program.jaxpr.eqns
    plain = second.replace(ctx=jaxcompat.marked(second.ctx, "plain", "body"))
    program = program.replace(jaxpr=jaxcompat.replace_jaxpr(program.jaxpr, eqns=[first, plain]))
    assert len(program.apply("cse").jaxpr.eqns) == 2
