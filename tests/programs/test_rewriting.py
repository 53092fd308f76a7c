"""The check of rewriting passes detects faults, and wasteful programs have their features."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool.ir.program import Program
from jaxprtool.loading.trace import trace
from tests.programs.case import Case
from tests.programs.ops import OPS, Type, coerce
from tests.programs.recorder import record
from tests.programs.rewriting import Rewriter, gradient_case, prove_rewrites
from tests.programs.rules import RULE_FACTOR, with_jvp_rule
from tests.programs.waste import WASTE, WASTEFUL, wasteful

X = jnp.arange(1.0, 4.0)


@dataclass(frozen=True)
class To(Rewriter):
    """A rewriter that replaces any program by another function."""

    function: Any = field(default=None, kw_only=True)

    def __call__(self, program: Program) -> Program:
        made = trace(lambda x: self.function(x), X)
        return program.replace(jaxpr=made.jaxpr)


def proved(before, after, *, gradients=False, **traits):
    to = To("to", function=after, **traits)
    return prove_rewrites(Case("case", before, (X,)), [to], [to] if gradients else ())


def refuted(before, after, match, **options):
    with pytest.raises(ExceptionGroup) as caught:
        proved(before, after, **options)
    (fault,) = caught.value.exceptions
    assert fault.__notes__ == ["rewritten by to"]
    assert match in str(fault)


def test_correct_rewrites_are_counted():
    outcomes = proved(lambda x: x * 1.0 + 2.0, lambda x: x + 2.0, gradients=True)
    assert outcomes == {
        "programs": 1,
        "rewritings": 1,
        "compiled": 1,
        "gradients: reverse": 1,
    }


def test_more_equations_are_detected():
    refuted(lambda x: x + 2.0, lambda x: x * 1.0 + 2.0, "1 equations became 2")
    proved(lambda x: x + 2.0, lambda x: x * 1.0 + 2.0, grows=True)


def test_a_last_bit_is_detected_if_a_pass_is_exact():
    before, after = jnp.sin, (lambda x: jnp.sin(x) * np.float32(1 + 2**-23))
    refuted(before, after, "results, step by step", grows=True)
    proved(before, after, exact=False, grows=True)
    refuted(lambda x: x * 2.0, lambda x: x, "results", exact=False)


def test_lost_effects_are_detected():
    def noted(x):
        jax.debug.callback(lambda v: record(1, False, v), x)
        return x

    def branches(x):
        return jax.lax.cond(x[0] > 5, noted, lambda x: x, x)

    refuted(noted, lambda x: x, "callbacks", drops_effects=True)
    refuted(branches, lambda x: x * 1.0, "", grows=True)
    proved(branches, lambda x: x * 1.0, drops_effects=True)


def test_a_lost_derivative_rule_is_detected():
    with_rule = with_jvp_rule(lambda x: jnp.sin(x))
    refuted(lambda x: with_rule(x), jnp.sin, "reverse gradients", gradients=True)
    proved(lambda x: with_rule(x), jnp.sin, gradients=True, drops_rules=True)


def test_a_pass_that_does_not_settle_is_detected():
    refuted(lambda x: x + 1.0 + 0.0, lambda x: x + 1.0, "a second time", settles=True)


def test_the_gradient_of_a_case_is_by_all_inexact_arguments():
    rule = with_jvp_rule(lambda x, i: x * x * i)
    case = gradient_case(Case("square", lambda x, i: rule(x, i), (jnp.float32(3.0), 2)))
    (value,) = case.fun(*case.args)
    direction = gradient_case(Case("line", lambda x: x, (jnp.float32(3.0),)))
    (seed,) = direction.fun(*direction.args)
    assert value == pytest.approx(RULE_FACTOR * 12.0 * float(seed))
    assert gradient_case(Case("integer", lambda i: i, (3,))) is None


@pytest.mark.parametrize("kind", WASTE)
def test_wrappers_contain_the_function_and_more_equations(kind):
    case = Case("tanh", lambda x, y: jnp.tanh(x * y) + x, (jnp.float32(0.3), jnp.arange(3.0)))
    assert len(wasteful(case, kind).program().jaxpr.eqns) >= 1
    leaves = jax.tree.leaves(wasteful(case, kind).fun(*case.args))
    expected = np.asarray(case.fun(*case.args))
    assert any(_close(leaf, expected) for leaf in leaves)


def _close(leaf, expected):
    """Return True if an array, or each row of a stack, is close to the expected one."""
    return np.shape(leaf)[-1:] == expected.shape and np.allclose(leaf, expected)


def test_wasteful_operations_support_their_declared_types():
    assert not WASTEFUL.keys() & OPS.keys()
    dtypes = {"f": "bf16", "c": "c64", "i": "i8", "u": "u32", "b": "bool", "e": "f8_e5m2"}
    dtypes |= {"n": "i4", "k": "key<fry>"}
    for name, operation in WASTEFUL.items():
        for kind in operation.kinds:
            for shape in ((), (0,)):
                x = coerce(jnp.arange(6.0), Type(dtypes[kind], shape))
                made = jax.eval_shape(operation.apply, *[x] * operation.arity)
                results = made if isinstance(made, tuple) else [made]
                assert all(isinstance(each, jax.ShapeDtypeStruct) for each in results), name
