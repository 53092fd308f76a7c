"""roll on programs that repeat, on JAX's own test programs, and on the samples.

Each result is held against the original by `tests.programs.outlining`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.programs.outlining import prove_rolling
from tests.programs.plans import DIFFERENCES
from tests.programs.random_programs import repeating_programs
from tests.programs.repeating import repeating
from tests.programs.rewriting import gradient_case
from tests.sweep.corpora import Harnesses, RandomPrograms, Samples
from tests.sweep.parts import Part


@pytest.mark.parametrize("difference", ["", *DIFFERENCES])
def test_copies_are_rolled_as_far_as_they_do_the_same(difference):
    outcomes = prove_rolling(repeating(difference, chained=True))
    assert outcomes["rolled"] and outcomes["unrolled: equivalent"]


def prove(number: int, case: Any) -> Counter[str]:
    """Roll a program; compile and differentiate each eighth."""
    return prove_rolling(case, deep=number % 8 == 0)


def prove_random(number: int, case: Any) -> Counter[str]:
    """Roll a program, or each third time its derivative."""
    return prove(number, (number % 3 == 0 and gradient_case(case)) or case)


SWEEP = [
    Part("roll: harnesses", Harnesses(every=4), prove),
    Part(
        "roll: random programs",
        RandomPrograms(400, programs=repeating_programs),
        prove_random,
        expected=lambda n: n["rolled"] > 40,
    ),
    Part("roll: samples", Samples(), prove),
]
