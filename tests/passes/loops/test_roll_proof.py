"""roll on programs with repetition, on layers of JAX's own test programs, and on the samples.

Each result is compared with the original by `tests.programs.outlining`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.programs import Case
from tests.programs.chained import in_layers
from tests.programs.outlining import prove_rolling
from tests.programs.plans import DIFFERENCES
from tests.programs.random_programs import RandomProgram, layered_programs, repeating_programs
from tests.programs.repeating import repeating
from tests.programs.rewriting import gradient_case
from tests.sweep.corpora import Harnesses, RandomPrograms, Samples
from tests.sweep.parts import Part

#: The seeds of random programs that are quick to prove.
SEED = 1

X = np.linspace(-1, 1, 6, dtype="f").reshape(2, 3)


@pytest.mark.parametrize("difference", ["", *DIFFERENCES])
def test_copies_are_rolled_only_if_they_compute_the_same(difference):
    outcomes = prove_rolling(repeating(difference, chained=True))
    assert outcomes["rolled"] and outcomes["unrolled: equivalent"]


def prove(number: int, case: Any) -> Counter[str]:
    """Roll a program. Compile and differentiate each eighth."""
    return prove_rolling(case, deep=number % 8 == 0)


def prove_random(number: int, case: Any) -> Counter[str]:
    """Roll a program, or for each third one its derivative."""
    return prove(number, (number % 3 == 0 and gradient_case(case)) or case)


def prove_layers(number: int, case: Any) -> Counter[str]:
    """Roll layers of a program."""
    layers = in_layers(case)
    return prove(number, layers) if layers else Counter({"no layers": 1})


def test_some_random_layers_compute_the_same():
    outcomes: Counter[str] = Counter()

    @hypothesis.seed(SEED)
    @settings(max_examples=2, phases=[Phase.generate])  # shrinking takes minutes
    @given(layered_programs(), st.integers(0, 2**20))
    def check(drawn: RandomProgram, number: int) -> None:
        outcomes.update(prove(number, drawn.case()))

    check()
    jax.clear_caches()
    assert outcomes["rolled"] and outcomes["stacked arguments"]


def test_a_program_in_layers_is_rolled():
    outcomes = prove_layers(0, Case("sum", lambda a, b: (a + b, a.sum(), b), (X, X)))
    assert outcomes["rolled"] and outcomes["stacked arguments"]


SWEEP = [
    Part(
        "roll: harnesses",
        Harnesses(every=4),
        prove_layers,
        expected=lambda n: n["rolled"] > n["no layers"] and n["stacked arguments"] > 200,
    ),
    Part(
        "roll: random layers",
        RandomPrograms(400, programs=layered_programs, unit_size=10),
        prove,
        expected=lambda n: n["rolled"] > 160 and n["stacked arguments"] > 60,
    ),
    Part(
        "roll: random programs",
        RandomPrograms(400, programs=repeating_programs),
        prove_random,
        expected=lambda n: n["rolled"] > 40,
    ),
    Part("roll: samples", Samples(), prove),
]
