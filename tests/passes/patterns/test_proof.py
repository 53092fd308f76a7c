"""Any part of a program is found where it was taken from, and may be replaced by itself.

The parts are some connected equations of JAX's own test programs, of random programs and of the
samples; the results of the program must stay the same to the last bit.
"""

from __future__ import annotations

import random
from collections import Counter

import hypothesis
import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxprtool.ir.program import type_check
from tests.passes.patterns.parts import rewrite_of_a_part
from tests.programs import harness_programs, random_programs, same, sample_programs
from tests.programs.random_programs import RandomProgram
from tests.programs.samples import sample_files


def prove_part(case, rng: random.Random, *, values: bool = True) -> int:
    """Replace a part of a program by itself; gives how often it was found.

    Without `values` the result is type-checked, and not run: what takes time is compiling it.
    """
    with case.setting():
        before = case.program()
        part = rewrite_of_a_part(before, rng)
        if part is None:
            return 0
        after, matches = part.applied(before)
        assert matches, f"{case.name}: a part of it is not found: {part.outlines(None, 0, False)}"
        type_check(after)
        if values:
            same(before, after, case.arguments(), gradients=False)
    return len(matches)


def prove_harnesses(every: int, start: int, step: int) -> Counter[int]:
    found: Counter[int] = Counter()
    for number, case in enumerate(harness_programs(every)[start::step]):
        found[prove_part(case, random.Random(number))] += 1
        if number % 200 == 199:
            jax.clear_caches()
    return found


def prove_random_programs(examples: int, seed: int, *, values: bool) -> Counter[int]:
    found: Counter[int] = Counter()

    @hypothesis.seed(seed)
    @settings(max_examples=examples)
    @given(random_programs(), st.randoms(use_true_random=False))
    def check(drawn: RandomProgram, rng: random.Random) -> None:
        found[prove_part(drawn.case(), rng, values=values)] += 1

    check()
    jax.clear_caches()
    return found


def test_parts_of_some_harnesses_are_replaced_by_themselves():
    found = prove_harnesses(10, 3, 60)
    assert found.total() - found[0] > 8


def test_parts_of_random_programs_are_replaced_by_themselves():
    assert prove_random_programs(examples=4, seed=2, values=False).total() >= 4


def test_parts_of_a_few_random_programs_compute_the_same():
    assert prove_random_programs(examples=1, seed=3, values=True).total() >= 1


@pytest.mark.sweep
@pytest.mark.parametrize("chunk", range(8))
def test_parts_of_all_harnesses_are_replaced_by_themselves(chunk, record_property):
    found = prove_harnesses(1, chunk, 8)
    record_property("found", dict(found))
    assert found.total() - found[0] > 800


@pytest.mark.sweep
@pytest.mark.parametrize("chunk", range(8))
def test_parts_of_many_random_programs_are_replaced_by_themselves(chunk, record_property):
    found = prove_random_programs(examples=100, seed=200 + chunk, values=True)
    record_property("found", dict(found))


@pytest.mark.sweep
@pytest.mark.parametrize("file", sample_files())
def test_parts_of_samples_and_their_gradients_are_replaced_by_themselves(file):
    for number, case in enumerate(sample_programs(file)):
        for turn in range(4):
            prove_part(case, random.Random(10 * number + turn))
