"""What `ragged` gives computes in each lane what tracing at its length does, over the corpus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings

from tests.programs import harness_programs
from tests.programs.lanes import prove_ragged
from tests.programs.symbolic import SymbolicPlan, SymbolicProgram, symbolic_plans, symbolic_programs
from tests.sweep.corpora import Harnesses, RandomPrograms
from tests.sweep.parts import Part


def prove_all(programs: Iterable[SymbolicProgram], number: int) -> Counter[str]:
    """What came of the programs of a case; all that fail are told."""
    outcomes, failures = Counter({"cases": 1}), []
    for i, found in enumerate(programs):
        try:
            outcomes += prove_ragged(found, number + i)
        except Exception as error:
            error.add_note(f"in {found.name}:\n{found.program}")
            failures.append(error)
    if failures:
        raise ExceptionGroup(f"{len(failures)} programs are wrong", failures)
    return outcomes


def prove_case(number: int, case: Any) -> Counter[str]:
    return prove_all(symbolic_programs(case), number)


def prove_plan(number: int, plan: SymbolicPlan) -> Counter[str]:
    return prove_all(plan.programs(), number)


SWEEP = [
    Part("ragged: harnesses", Harnesses(), prove_case),
    Part("ragged: random programs", RandomPrograms(1000, programs=symbolic_plans), prove_plan),
]


@pytest.mark.sweep
def test_harnesses():
    cases = list(harness_programs(1))[::700]
    found = sum((prove_case(i, case) for i, case in enumerate(cases)), Counter())
    assert found["lanes, packed"] + found["lanes, padded"] > 10, found


@settings(max_examples=1)
@given(symbolic_plans())
def test_random_programs(plan):
    prove_plan(0, plan)
