"""`rewrite` against a model: any mixture of rules that answer, write in vain, or are rejected.

Each step adds an equation to a body, and what the rule does with it. The model holds the value of
each equation as the answers make it, and how many equations are to be left.
"""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.rewrite import rewrite

ARGUMENTS = np.array([[3, -5], [7, 11]], np.int32)
ANSWERS = [
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


class Rewriting(RuleBasedStateMachine):
    """A sum of two earlier values at each step, with what the rule answers for it."""

    @initialize()
    def start(self):
        self.steps = []
        self.values = list(ARGUMENTS)
        self.written = 0
        self.negated = set()

    @rule(first=st.integers(0, 99), second=st.integers(0, 99), answer=st.sampled_from(ANSWERS))
    def add(self, first, second, answer):
        a, b = first % len(self.values), second % len(self.values)
        x, y = self.values[a], self.values[b]
        self.steps.append((a, b, answer))
        match answer:
            case "keep" | "withdrawn" | "rejected":
                value, count = x + y, 1
            case "operand" | "abandoned":
                value, count = x, 0
            case "negative":
                value, count = -x, 1
            case "shared":  # with all that have asked for it before
                value, count = -ARGUMENTS[0], 0 if self.negated else 1
                self.negated.add(0)
            case "constant":
                value, count = ARGUMENTS[1] * 2, 0
            case "spliced":
                value, count = -x - y, 2
        self.values.append(value)
        self.written += count

    def rewritten(self):
        def fun(*args):
            values = list(args)
            for a, b, _ in self.steps:
                values.append(lax.add(values[a], values[b]))
            return values[len(args) :]

        closed = jax.make_jaxpr(fun)(*ARGUMENTS)
        return rewrite(closed, self.visitor)

    def visitor(self, writer):
        answers = iter([answer for _, _, answer in self.steps])
        shared = []
        table = ARGUMENTS[1] * 2
        body = jax.make_jaxpr(lambda x, y: -x - y)(*ARGUMENTS)
        argument = jaxcompat.open_jaxpr(writer.body).invars[0]

        def negative(eqn, atom):
            return writer.emit(lax.neg_p, [atom], {}, eqn)

        def answered(eqn):
            match next(answers):
                case "operand":
                    return eqn.invars[:1]
                case "negative":
                    return negative(eqn, eqn.invars[0])
                case "shared":
                    if not shared:
                        shared.extend(negative(eqn, argument))
                    return shared
                case "abandoned":  # what is written is marked as dead, and goes
                    negative(eqn, eqn.invars[1])
                    writer.dead[id(writer.eqns[-1])] = writer.eqns[-1]
                    return eqn.invars[:1]
                case "withdrawn":
                    negative(eqn, eqn.invars[1])
                    writer.constant(np.array([1, 2], np.int32), eqn.outvars[0].aval)
                    return None
                case "rejected":
                    negative(eqn, eqn.invars[0])
                    return [jaxcompat.as_literal(1, jax.core.ShapedArray((), jnp.int32))]
                case "constant":
                    return [writer.constant(table, eqn.outvars[0].aval)]
                case "spliced":
                    return writer.splice(body, eqn.invars, eqn)
            return None

        return answered

    @invariant()
    def computes_what_the_model_says(self):
        if not getattr(self, "steps", None):
            return
        new = self.rewritten()
        jaxcompat.check_jaxpr(jaxcompat.open_jaxpr(new))
        found = jax.core.eval_jaxpr(new.jaxpr, new.consts, *map(jnp.asarray, ARGUMENTS))
        np.testing.assert_array_equal(found, self.values[len(ARGUMENTS) :])
        assert len(new.eqns) == self.written
        assert len(new.consts) == any(answer == "constant" for _, _, answer in self.steps)


TestRewriting = Rewriting.TestCase
TestRewriting.settings = settings(max_examples=15, stateful_step_count=10, deadline=None)
