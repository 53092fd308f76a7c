"""Programs in the form that `outline` returns: calls of shared bodies, marked for XLA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.ir.program import Program
from jaxprtool.ir.rewrite import map_equations
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.loading.trace import trace


def with_marked_calls(program: Program) -> Program:
    """Return a program with each `jit` call marked as a unit of its name. The body is unmarked."""

    def rule(eqn: JaxprEqn) -> Sequence[JaxprEqn] | None:
        if eqn.primitive.name != "jit":
            return None
        return [eqn.replace(ctx=jaxcompat.marked(eqn.ctx, "unit", eqn.params["name"]))]

    return program.replace(jaxpr=map_equations(program.jaxpr, rule))


def layers(copies: int) -> Program:
    """Return a model of `copies` calls of a marked layer, each of which calls a marked block."""

    @jax.jit
    def block(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w) * x

    @jax.jit
    def layer(x: Any, first: Any, second: Any) -> Any:
        y = block(x + 1.0, first)
        return x + block(y, second), jnp.max(y)

    def model(x: Any, params: Any) -> Any:
        greatest = []
        for weights in params:
            x, found = layer(x, *weights)
            greatest.append(found)
        return x, greatest

    weights = jnp.ones((4, 4))
    return with_marked_calls(trace(model, jnp.ones((3, 4)), [(weights, weights)] * copies))


def calls_in(jaxpr: Any) -> list[JaxprEqn]:
    """Return the `jit` calls among the equations of a jaxpr."""
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "jit"]


def assert_layers(jaxpr: Any, copies: int) -> None:
    """Assert that a jaxpr comes from `layers`: marked calls with shared bodies."""
    calls = calls_in(jaxpr)
    assert len(calls) == copies
    body, *others = {id(call.params["jaxpr"]): call.params["jaxpr"] for call in calls}.values()
    assert not others
    inner = calls_in(body)
    assert len(inner) == 2 and inner[0].params["jaxpr"] is inner[1].params["jaxpr"]
    for name, marked in ("layer", calls), ("block", inner):
        marks = {"inlineable": "false", "compilation_unit": name, "outlined": name}
        assert all(call.ctx.xla_metadata == marks for call in marked)
    plain = [*(e for e in body.eqns if e not in inner), *inner[0].params["jaxpr"].eqns]
    assert len(plain) > 4 and not any(eqn.ctx.xla_metadata for eqn in plain)
