"""Each example in `ragged` equals the program traced at its length, over the corpus."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import jax
import jax.export
import numpy as np
import pytest
from hypothesis import given, settings

from jaxprtool.loading.trace import trace
from tests.programs import harness_programs
from tests.programs.lanes import prove_ragged
from tests.programs.once import Once
from tests.programs.symbolic import (
    SymbolicPlan,
    SymbolicProgram,
    symbolic_plans,
    symbolic_programs,
)
from tests.sweep.corpora import Harnesses, RandomPrograms, SymbolicModels
from tests.sweep.parts import Part

prove_all = Once(prove_ragged)


def prove_case(number: int, case: Any) -> Counter[str]:
    return prove_all(symbolic_programs(case), number)


def prove_plan(number: int, plan: SymbolicPlan) -> Counter[str]:
    return prove_all(plan.programs(), number)


SWEEP = [
    Part("ragged: harnesses", Harnesses(), prove_case),
    Part("ragged: random programs", RandomPrograms(1000, programs=symbolic_plans), prove_plan),
    Part("ragged: models", SymbolicModels(), lambda number, found: prove_ragged(found, number)),
]


def test_shared_arguments_are_the_same_for_all_examples():
    """A random program draws other values for them at each length."""

    def traced(sizes: dict[str, Any]) -> Any:
        types = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((sizes["n"],), ())]
        return trace(lambda x, shared: x + shared, *types)

    symbolic = SymbolicProgram(
        "shared",
        traced({"n": jax.export.symbolic_shape("n")[0]}),
        ({"n": 3},),
        traced,
        lambda sizes: [np.ones(sizes["n"], np.float32), np.float32(sizes["n"])],
        nullcontext,
    )
    assert prove_ragged(symbolic, 0)["differentiated"] == 1


@pytest.mark.sweep
def test_harnesses_compute_the_same():
    cases = list(harness_programs(1))[::700]
    found = sum((prove_case(i, case) for i, case in enumerate(cases)), Counter())
    assert sum(found[f"lanes, {how}"] for how in ("chosen", "packed", "padded")) > 10, found


@settings(max_examples=1)
@given(symbolic_plans())
def test_random_programs_compute_the_same(plan):
    prove_plan(0, plan)
