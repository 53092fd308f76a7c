"""outline on random programs with repetition, on JAX's own test programs, and on the samples.

Each result is compared with the original by `tests.programs.outlining`.
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
from jaxprtool.passes.loops.outline import Outline
from tests.programs import harness_programs, sample_programs
from tests.programs.outlining import prove_outlining
from tests.programs.plans import DIFFERENCES
from tests.programs.random_programs import RandomProgram, layered_programs, repeating_programs
from tests.programs.repeating import COPIES, repeating
from tests.programs.rewriting import gradient_case, prove_all
from tests.sweep.corpora import Harnesses, RandomPrograms, Samples
from tests.sweep.parts import Part

#: The seeds of random programs that are quick to prove.
SEED = 21

MARKS = ("unit", "unit", "call", "plain")


def prove(number: int, case: Any, *, deep: int = 8) -> Counter[str]:
    """Outline a program in some way. Compile and differentiate each `deep`-th."""
    rng = random.Random(number)
    mark = rng.choice(MARKS)
    equations, copies = rng.choice([3, 3, 6, None]), rng.choice([2, 2, 3])
    outline = Outline(equations=equations, copies=copies, mark=mark)
    return prove_outlining(case, outline, mark=mark, deep=number % deep == 0)


# --- copies that differ in one thing ------------------------------------------------------------


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize("difference", ["", *DIFFERENCES])
def test_copies_share_a_body_only_if_they_compute_the_same(difference, chained):
    case = repeating(difference, chained=chained)
    outline = Outline(equations=6)
    assert prove_outlining(case, outline)["outlined"]
    if difference in ("", "scale", "scope"):
        calls = [eqn for eqn in outline(case.program()).jaxpr.eqns if mark_of(eqn) == "unit"]
        assert len(calls) == COPIES


# --- random programs ------------------------------------------------------------------------------


def prove_random(number: int, case: Any) -> Counter[str]:
    """Outline a program, or for each third one its derivative."""
    return prove(number, (number % 3 == 0 and gradient_case(case)) or case)


def test_some_random_programs_that_repeat_compute_the_same():
    outcomes: Counter[str] = Counter()

    @hypothesis.seed(SEED)
    @settings(max_examples=2, phases=[Phase.generate])  # shrinking takes minutes
    @given(repeating_programs(), st.integers(0, 2**20))
    def check(drawn: RandomProgram, number: int) -> None:
        outcomes.update(prove_random(number, drawn.case()))

    check()
    jax.clear_caches()
    assert outcomes["outlined"]


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
        expected=lambda n: n["outlined"] > 5,
    ),
    Part(
        "outline: random programs",
        RandomPrograms(400, programs=repeating_programs),
        prove_random,
        expected=lambda n: n["outlined"] > 100,
    ),
    Part(
        "outline: random layers",
        RandomPrograms(100, programs=layered_programs, unit_size=10),
        prove_random,
        expected=lambda n: n["outlined"] > 60,
    ),
    Part("outline: samples", Samples(), prove),
]
