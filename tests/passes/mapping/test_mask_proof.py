"""Results of `mask` equal those of tracing at a size, over the corpus with symbols."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

from hypothesis import given, settings

from tests.programs import harness_programs
from tests.programs.masking import prove_masked
from tests.programs.once import Once
from tests.programs.symbolic import SymbolicPlan, symbolic_plans, symbolic_programs
from tests.sweep.corpora import Harnesses, RandomPrograms, SymbolicModels
from tests.sweep.parts import Part

prove_all = Once(prove_masked)


def prove_case(number: int, case: Any) -> Counter[str]:
    return prove_all(symbolic_programs(case), number)


def prove_plan(number: int, plan: SymbolicPlan) -> Counter[str]:
    return prove_all(plan.programs(), number)


SWEEP = [
    Part("mask: harnesses", Harnesses(), prove_case),
    Part("mask: random programs", RandomPrograms(1000, programs=symbolic_plans), prove_plan),
    Part("mask: models", SymbolicModels(), lambda number, found: prove_masked(found, number)),
]


def test_harnesses_compute_the_same():
    """One of a few groups, as all of them take minutes."""
    cases = harness_programs(1)
    some = [
        next(c for c in cases if c.name.startswith(f"{name}_")) for name in ("tanh", "reduce_max")
    ]
    found = sum((prove_all(islice(symbolic_programs(case), 2), 0) for case in some), Counter())
    assert found["sizes"] > 15 and found["reverse"], found


@settings(max_examples=3)
@given(symbolic_plans())
def test_random_programs_compute_the_same(plan):
    prove_plan(0, plan)
