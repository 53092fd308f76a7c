"""A gradient is reported as zero exactly if it is zero in JAX for every input.

On random programs, samples, and JAX's own test programs. The loss of a program is the sum of its
real and imaginary results, with random weights. JAX's pullback determines whether a gradient is
zero for every input: then it does not depend on the cotangent, or it is a product with zeros that a
custom rule wrote.
"""

from __future__ import annotations

from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool import jaxcompat
from jaxprtool.commands.why.gradients import known_gradient
from jaxprtool.commands.why.why_gradient import only_result, pullback
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.conversions import with_contents
from jaxprtool.ir.dataflow import Start, forward_slice
from jaxprtool.ir.equations import equations, is_inexact
from jaxprtool.loading.trace import trace
from jaxprtool.passes.cleanup.inline import Inline
from tests.programs import harness_programs, sample_programs
from tests.programs.corpus import prove_corpus
from tests.sweep.corpora import Harnesses, RandomPrograms, Samples
from tests.sweep.parts import Part


def loss_of(program):
    """Return the weighted sum of a program's inexact results, as a program of flat arguments."""
    rng = np.random.default_rng(0)
    evaluate = jaxcompat.jaxpr_as_fun(program.jaxpr)
    ends = [i for i, v in enumerate(program.jaxpr.outvars) if is_inexact(v)]
    weights = {i: rng.uniform(0.5, 1.5, program.out_avals[i].shape) for i in ends}

    def loss(*args):
        results, total = evaluate(*args), jnp.float32(0)
        for i, weight in weights.items():
            value = results[i]
            parts = [value.real, value.imag] if jnp.iscomplexobj(value) else [value]
            for part in parts:
                total += (part * jnp.asarray(weight, part.dtype)).sum().astype(total.dtype)
        return total

    return only_result(trace(loss, *program.in_avals), 0) if ends else None


def prove_zero(number: int, case) -> Counter[str]:
    """Compare the report on each argument with JAX's pullback."""
    with case.setting():
        loss = loss_of(with_contents(case.program()))
        if loss is None:
            return Counter(["no inexact result"])
        tops = jaxcompat.open_jaxpr(loss.jaxpr).invars
        at = [i for i, v in enumerate(tops) if is_inexact(v)]
        known = [known_gradient(loss, loss, i).kind for i in at]
        try:
            back = pullback(loss, at)
        except JaxprToolError:
            return Counter(["no gradient in JAX"])
        top = jaxcompat.open_jaxpr(Inline()(back).jaxpr)
        has_empty = any(0 in v.aval.shape for v in variables_of(loss))
        depends = forward_slice(top, Start([(top, top.invars[-1])])).results[1:]
        outcomes = Counter[str]()
        for i, kind, moves in zip(at, known, depends, strict=True):
            said_zero = kind != "nonzero"
            if said_zero and moves:
                assert not _gradient_on(case, back, 1 + at.index(i)).any(), loss.arg_names[i]
            if not said_zero and not moves:
                assert has_empty, f"{loss.arg_names[i]}: zero in JAX, {kind} here"
                kind = "zero because of empty arrays"
            outcomes[kind] += 1
        return outcomes


def variables_of(program):
    """Return the results of all equations with shapes."""
    eqns = equations(jaxcompat.open_jaxpr(program.jaxpr))
    return [v for eqn in eqns for v in eqn.outvars if hasattr(v.aval, "shape")]


def _gradient_on(case, back, number):
    values = [*case.arguments(), np.float32(1)]
    return np.asarray(back(*values)[number])


def test_zero_gradients_of_random_programs():
    prove_corpus(4, prove_zero)


@pytest.mark.parametrize("file", ["branches.py", "custom_gradients.py"])
def test_zero_gradients_of_samples(file):
    outcomes = [prove_zero(0, case) for case in sample_programs(file)]
    assert sum(outcomes, Counter())["nonzero"] >= 2


def test_zero_gradients_of_some_of_jaxs_test_programs():
    chosen = harness_programs(1)[7::400]
    stepped = [c for c in harness_programs(60) if c.name.startswith(("floor_", "sign_", "round_"))]
    outcomes = sum((prove_zero(0, case) for case in chosen + stepped), Counter())
    assert outcomes["nonzero"] > 10 and outcomes["zero"] > 1, outcomes


SWEEP = [
    Part("gradients: harnesses", Harnesses(), prove_zero, expected=lambda n: n["nonzero"] > 2000),
    Part("gradients: random programs", RandomPrograms(200), prove_zero),
    Part("gradients: samples", Samples(), prove_zero),
]
