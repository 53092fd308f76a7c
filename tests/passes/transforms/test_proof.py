"""The transformation passes beside JAX's own, on random programs, samples and JAX's test programs.

See `beside`: what a pass makes is equivalent to what the transformed function traces to.
"""

from __future__ import annotations

from collections import Counter

import hypothesis
import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.passes.transforms.beside import PROOFS, prove_transform
from tests.programs import harness_programs, random_programs, sample_programs
from tests.programs.samples import sample_files

CHUNKS = 8
QUICK_SAMPLES = {"custom_gradients.py", "branches.py"}

checks = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


def prove_all(cases, names=tuple(PROOFS)) -> Counter[str]:
    """Counts what came of each; all that fail are told."""
    outcomes: Counter[str] = Counter()
    failures = []
    for number, case in enumerate(cases):
        for name in names:
            try:
                outcomes[f"{name}: {prove_transform(case, name)}"] += 1
            except Exception as error:
                failures.append(f"{name} of {case.name}: {type(error).__name__}: {error}"[:400])
        if number % 50 == 49:
            jax.clear_caches()
    assert not failures, f"{len(failures)} failed\n" + "\n".join(failures)
    return outcomes


@settings(checks, max_examples=4)
@given(random_programs(), st.sampled_from(list(PROOFS)))
def test_random_programs(program, name):
    prove_transform(program.case(), name)


@pytest.mark.parametrize("file", sorted(QUICK_SAMPLES))
def test_some_samples(file):
    outcomes = prove_all(sample_programs(file)[:1], ["grad", "jvp", "vjp", "linearize", "jit"])
    assert sum(n for what, n in outcomes.items() if what.endswith(": same")) >= 4


@pytest.mark.parametrize("name", PROOFS)
def test_some_of_jaxs_test_programs(name):
    assert prove_all(harness_programs(1)[11::2500], [name]).total() >= 2


@pytest.mark.sweep
@pytest.mark.parametrize("name", PROOFS)
def test_all_random_programs(name, record_property):
    outcomes: Counter[str] = Counter()

    @settings(checks, max_examples=400)
    @given(random_programs())
    def prove(program):
        outcomes[prove_transform(program.case(), name)] += 1
        if outcomes.total() % 50 == 0:
            jax.clear_caches()

    prove()
    record_property("outcomes", dict(outcomes))
    assert outcomes["same"] > 100


@pytest.mark.sweep
@pytest.mark.parametrize("file", sample_files())
def test_all_samples(file, record_property):
    outcomes = prove_all(sample_programs(file))
    record_property("outcomes", dict(outcomes))
    assert outcomes.total() > 0


@pytest.mark.sweep
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_all_harnesses(chunk, record_property):
    outcomes = prove_all(harness_programs(1)[chunk::CHUNKS])
    record_property("outcomes", dict(outcomes))
    assert outcomes["jit: same"] > 500
