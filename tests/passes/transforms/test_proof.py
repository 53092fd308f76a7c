"""The transformation passes, compared with JAX's on random programs, samples and JAX's programs.

See `beside`: the result of a pass is equivalent to the trace of the transformed function.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.passes.transforms.beside import PROOFS, prove_transform
from tests.programs import harness_programs, sample_programs
from tests.programs.corpus import prove_corpus
from tests.sweep.corpora import Harnesses, RandomPrograms, Samples
from tests.sweep.parts import Part

CHUNKS = 8
QUICK_SAMPLES = {"custom_gradients.py", "branches.py"}


def prove_every(number: int, case) -> Counter[str]:
    """Prove all transformations of a case, and raise all failures."""
    outcomes: Counter[str] = Counter()
    failures = []
    for name in PROOFS:
        try:
            outcomes[f"{name}: {prove_transform(case, name)}"] += 1
        except Exception as error:
            error.add_note(f"{name} of {case.name}")
            failures.append(error)
    if failures:
        raise ExceptionGroup(f"{len(failures)} failed", failures)
    return outcomes


def test_random_programs_are_transformed_as_in_jax():
    names = random.Random(0).sample(list(PROOFS), 4)
    prove_corpus(4, lambda number, case: prove_transform(case, names[number]))


@pytest.mark.parametrize("file", sorted(QUICK_SAMPLES))
def test_some_samples_are_transformed_as_in_jax(file):
    case, *_ = sample_programs(file)
    names = ("grad", "jvp", "vjp", "linearize", "jit")
    assert [prove_transform(case, name) for name in names].count("same") >= 4


@pytest.mark.parametrize("name", PROOFS)
def test_some_of_jaxs_test_programs_are_transformed_as_in_jax(name):
    cases = harness_programs(1)[11::2500]
    assert len([prove_transform(case, name) for case in cases]) >= 2


SWEEP = [
    Part(
        "transforms: harnesses",
        Harnesses(),
        prove_every,
        refusals=(),
        expected=lambda n: n["jit: same"] > 4000,
    ),
    Part(
        "transforms: random programs",
        RandomPrograms(400),
        prove_every,
        refusals=(),
        expected=lambda n: all(n[f"{name}: same"] > 100 for name in PROOFS),
    ),
    Part("transforms: samples", Samples(), prove_every, refusals=()),
]
