"""Model-based test of `rewrite`, with rules that replace, write unused equations, or are rejected.

Each step adds an equation to a body, with the action of the rule for it, or opens a call or a loop
for the next steps. The model has the value of each equation after the replacements, and the
expected number of equations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.regions import sub_jaxprs
from jaxprtool.ir.rewrite import rewrite

ARGUMENTS = np.array([[3, -5], [7, 11]], np.int32)
TABLE = ARGUMENTS[1] * 2
REPLACEMENTS = [
    "keep",
    "operand",
    "negative",
    "shared",
    "abandoned",
    "withdrawn",
    "rejected",
    "constant",
    "spliced",
]
NUMBERS = st.integers(0, 99)


@dataclass
class Step:
    """An equation that adds two earlier values, and its replacement."""

    operands: tuple[int, int]
    replacement: str


@dataclass
class Body:
    """A body of two arguments. The rule replaces the call of an inlined one by its equations."""

    operands: tuple[int, int] = (0, 1)
    kind: str = "call"
    steps: list[Step | Body] = field(default_factory=list)

    def bodies(self) -> Iterator[Body]:
        """Yield this body and nested ones, in the order of visits."""
        yield self
        for step in self.steps:
            if isinstance(step, Body):
                yield from step.bodies()


ROUNDS = 2


def function(body: Body):
    """Return the function to rewrite, which computes a body."""

    def everything(*args):
        values = list(args)
        for step in body.steps:
            x, y = (values[n % len(values)] for n in step.operands)
            if isinstance(step, Step):
                values.append(lax.add(x, y))
            elif step.kind == "loop":
                inner = function(step)
                values += lax.scan(
                    lambda carry, _, inner=inner: (_next_round(inner(*carry), carry), None),
                    (x, y),
                    None,
                    length=ROUNDS,
                )[0]
            else:
                values += jax.jit(function(step))(x, y)
        return values[len(args) :]

    return everything


def _next_round(values, carry):
    return [*carry, *values][-1], carry[0]


def modelled(body: Body, arguments):
    """Return the values of a body after rewriting, and its number of equations."""
    values, count, shared = list(arguments), 0, False
    for step in body.steps:
        x, y = (values[n % len(values)] for n in step.operands)
        if isinstance(step, Body):
            found, inside = modelled(step, (x, y))
            count += inside if step.kind == "inlined" else 1
            if step.kind == "loop":
                carry = x, y
                for _ in range(ROUNDS):
                    carry = _next_round(modelled(step, carry)[0], carry)
                found = carry
            values += found
            continue
        match step.replacement:
            case "keep" | "withdrawn" | "rejected":
                value, written = x + y, 1
            case "operand" | "abandoned":
                value, written = x, 0
            case "negative":
                value, written = -x, 1
            case "shared":  # with all earlier requests
                value, written = -arguments[0], 0 if shared else 1
                shared = True
            case "constant":
                value, written = TABLE, 0
            case "spliced":
                value, written = -x - y, 2
        values.append(value)
        count += written
    return values[len(arguments) :], count


def replacing(body: Body, writer):
    """Return the rule that returns the replacements of a body's steps."""
    replacements = iter([step.replacement for step in body.steps if isinstance(step, Step)])
    kinds = iter([step.kind for step in body.steps if isinstance(step, Body)])
    shared = []
    spliced = jax.make_jaxpr(lambda x, y: -x - y)(*ARGUMENTS)
    argument = jaxcompat.open_jaxpr(writer.body).invars[0]

    def negative(eqn, atom):
        return writer.emit(lax.neg_p, [atom], {}, eqn)

    def replaced(eqn):
        if eqn.primitive is not lax.add_p:
            ((_, inner),) = sub_jaxprs(eqn)
            inlined = next(kinds) == "inlined"
            closed = jaxcompat.close_jaxpr(inner)
            return writer.splice(closed, eqn.invars, eqn) if inlined else None
        match next(replacements):
            case "operand":
                return eqn.invars[:1]
            case "negative":
                return negative(eqn, eqn.invars[0])
            case "shared":
                if not shared:
                    shared.extend(negative(eqn, argument))
                return shared
            case "abandoned":  # equations written by the rule are marked as dead, and removed
                negative(eqn, eqn.invars[1])
                writer.dead[id(writer.eqns[-1])] = writer.eqns[-1]
                return eqn.invars[:1]
            case "withdrawn":
                negative(eqn, eqn.invars[1])
                if writer.holds_constants:
                    writer.constant(np.array([1, 2], np.int32), eqn.outvars[0].aval)
                return None
            case "rejected":
                negative(eqn, eqn.invars[0])
                return [jaxcompat.as_literal(1, jax.core.ShapedArray((), jnp.int32))]
            case "constant":
                return [writer.constant(TABLE, eqn.outvars[0].aval)]
            case "spliced":
                return writer.splice(spliced, eqn.invars, eqn)
        return None

    return replaced


def require_counts(body: Body, jaxpr):
    """Assert the number of equations of the model, at every depth."""
    assert len(jaxpr.eqns) == modelled(body, ARGUMENTS)[1]
    held = [inner for eqn in jaxpr.eqns for _, inner in sub_jaxprs(eqn)]
    steps = [step for step in body.steps if isinstance(step, Body)]
    if not any(step.kind == "inlined" for step in steps):
        for step, inner in zip(steps, held, strict=True):
            require_counts(step, jaxcompat.open_jaxpr(inner))


class Rewriting(RuleBasedStateMachine):
    """A sum of two earlier values at each step, or another body."""

    @initialize()
    def start(self):
        self.open = [Body()]

    @rule(first=NUMBERS, second=NUMBERS, replacement=st.sampled_from(REPLACEMENTS))
    def add(self, first, second, replacement):
        if replacement == "constant" and len(self.open) > 1:
            replacement = "spliced"  # not every body can hold constants
        self.open[-1].steps.append(Step((first, second), replacement))

    @precondition(lambda self: len(self.open) < 3)
    @rule(first=NUMBERS, second=NUMBERS, kind=st.sampled_from(["call", "inlined", "loop"]))
    def enter(self, first, second, kind):
        body = Body((first, second), kind)
        self.open[-1].steps.append(body)
        self.open.append(body)

    @precondition(lambda self: len(self.open) > 1)
    @rule()
    def leave(self):
        self.open.pop()

    @invariant()
    def computes_what_the_model_says(self):
        if not getattr(self, "open", None):
            return
        body = self.open[0]
        bodies = body.bodies()
        closed = jax.make_jaxpr(function(body))(*ARGUMENTS)
        new = rewrite(closed, lambda writer: replacing(next(bodies), writer))
        jaxcompat.check_jaxpr(jaxcompat.open_jaxpr(new))
        found = jax.core.eval_jaxpr(new.jaxpr, new.consts, *map(jnp.asarray, ARGUMENTS))
        np.testing.assert_array_equal(
            np.reshape(found, (-1, 2)), np.reshape(modelled(body, ARGUMENTS)[0], (-1, 2))
        )
        require_counts(body, new)
        replacements = [step.replacement for step in body.steps if isinstance(step, Step)]
        assert len(new.consts) == ("constant" in replacements)


TestRewriting = Rewriting.TestCase
TestRewriting.settings = settings(max_examples=15, stateful_step_count=10, deadline=None)
