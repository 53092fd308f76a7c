"""outline on random programs made to repeat, on JAX's own test programs, and on the samples.

Each result is held against the original by `tests.programs.outlining`.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any

import hypothesis
import jax
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jaxprtool.jaxcompat import mark_of
from jaxprtool.passes.outline import Outline
from tests.programs import harness_programs, sample_programs
from tests.programs.ops import Type
from tests.programs.outlining import prove_outlining
from tests.programs.plans import DIFFERENCES, Block, Copy, Detail, Op, Plan, Repeat
from tests.programs.random_programs import RandomProgram, repeating_programs
from tests.programs.rewriting import gradient_case, prove_all
from tests.sweep.corpora import Harnesses, RandomPrograms, Samples
from tests.sweep.parts import Part

MARKS = ("unit", "unit", "call", "plain")


def prove(number: int, case: Any, *, deep: int = 8) -> Counter[str]:
    """Outline a program in some way; compile and differentiate each `deep`-th."""
    rng = random.Random(number)
    mark = rng.choice(MARKS)
    equations, copies = rng.choice([3, 3, 6, None]), rng.choice([2, 2, 3])
    outline = Outline(equations=equations, copies=copies, mark=mark)
    return prove_outlining(case, outline, mark=mark, deep=number % deep == 0)


# --- copies that differ in one thing ------------------------------------------------------------

_A = Type("f32", (3,))
_STEPS = Op("sin", _A, (0,)), Op("mul", _A, (0, 1)), Detail(_A, (0, 2)), Op("exp", _A, (0,))
BODY = Block((_A, _A), (*_STEPS, Op("dot", _A, (0, 3)), Op("add", _A, (0, 1))), (0,))


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize("difference", ["", *DIFFERENCES])
def test_copies_share_a_body_if_they_do_the_same(difference, chained):
    copies = tuple(Copy((0, 3), difference if i == 3 else "") for i in range(6))
    repeat = Repeat(BODY, copies, (Op("neg", _A, (0,)),), chained, closed=True)
    case = RandomProgram(Plan(Block((_A, _A), (repeat,)))).case()
    outline = Outline(equations=6)
    assert prove_outlining(case, outline)["outlined"]
    if difference in ("", "scale", "scope"):
        calls = [eqn for eqn in outline(case.program()).jaxpr.eqns if mark_of(eqn) == "unit"]
        assert len(calls) == len(copies)


# --- random programs ------------------------------------------------------------------------------


def prove_random(number: int, case: Any) -> Counter[str]:
    """Outline a program, or each third time its derivative."""
    return prove(number, (number % 3 == 0 and gradient_case(case)) or case)


def test_some_random_programs_that_repeat_compute_the_same():
    outcomes: Counter[str] = Counter()

    @hypothesis.seed(6)
    @settings(max_examples=4, phases=[Phase.generate])  # to shrink one takes minutes
    @given(repeating_programs(), st.integers(0, 2**20))
    def check(drawn: RandomProgram, number: int) -> None:
        outcomes.update(prove_random(number, drawn.case()))

    check()
    jax.clear_caches()
    assert outcomes["outlined"] and outcomes["nothing repeats"]


def test_some_harnesses_compute_the_same():
    cases = enumerate(harness_programs(1)[::1301])
    assert prove_all(cases, partial(prove, deep=3)).total() > 4


def test_a_sample_computes_the_same():
    assert prove(1, sample_programs("layers.py")[0])["outlined"]


SWEEP = [
    Part(
        "outline: harnesses",
        Harnesses(),
        prove,
        expected=lambda n: n["outlined"] > 50,
    ),
    Part(
        "outline: random programs",
        RandomPrograms(400, programs=repeating_programs),
        prove_random,
        expected=lambda n: n["outlined"] > 100,
    ),
    Part("outline: samples", Samples(), prove),
]
