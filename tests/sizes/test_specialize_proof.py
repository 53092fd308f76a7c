"""Results of `specialize` equal those of tracing at that size, over the corpus with symbols.

If the two are not equivalent, they compute the same, and the reason is one of these:

*   indexing: JAX slices and pads at a known size, and gathers and scatters otherwise, at indices
    that depend on more than the size; for an empty array it then returns zeros;
*   coincidence: at this size two sizes are equal, and JAX omits what other sizes need;
*   rule: JAX cannot trace the rule of a custom derivative with a symbol;
*   trips: JAX makes a `fori_loop` with a known trip count a scan.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings

from jaxprtool import jaxcompat
from jaxprtool.errors import JaxprToolError, UnsupportedError
from jaxprtool.ir.equations import equations
from jaxprtool.ir.equivalence import structural_difference
from jaxprtool.ir.program import Program, type_check
from jaxprtool.sizes.mask import Specialize
from tests.programs import harness_programs
from tests.programs.same import Original
from tests.programs.symbolic import SymbolicPlan, SymbolicProgram, symbolic_plans, symbolic_programs
from tests.sweep.corpora import Harnesses, RandomPrograms
from tests.sweep.parts import Part


def prove(found: SymbolicProgram) -> Counter[str]:
    """Return the outcome of a program at each of its sizes."""
    outcomes = Counter({"programs": 1})
    with found.setting():
        for sizes in found.choices:
            try:
                traced = found.traced_at(sizes)
            except JaxprToolError:
                outcomes["not traced at that size"] += 1
                continue
            outcomes["sizes"] += 1
            made = Specialize(dict(sizes))(found.program)
            type_check(made)
            outcomes[outcome(found, sizes, made, traced)] += 1
    outcomes["programs equivalent at all sizes"] += outcomes["equivalent"] == outcomes["sizes"]
    return outcomes


def outcome(found: SymbolicProgram, sizes: Any, made: Program, traced: Program) -> str:
    """Return if two programs are equivalent; else why not, if they compute the same."""
    try:
        if structural_difference(made, traced) is None:
            return "equivalent"
    except UnsupportedError as error:
        assert "_DimExpr" in str(error) or "symbolic" in str(error).lower(), error
        return "other: rule"
    # One equation at a time: XLA aborts for some loops that JAX traced.
    Original(traced, found.arguments(sizes)).same_steps(made, exact=False)
    more, fewer = primitives(made), primitives(traced)
    extra = more - fewer
    if "while" in extra and "scan" in (fewer - more):
        return "other: trips"
    # JAX uses `dynamic_slice` for an index beyond an axis, even for a known size.
    moved = extra | Counter({"dynamic_slice": (fewer - more)["dynamic_slice"]})
    if {"gather", "dynamic_slice", "dynamic_update_slice", "scatter-add"} & (+moved).keys():
        return "other: indexing"
    missing = fewer - more
    if missing and not missing - empty_slices(traced):
        return "other: indexing"
    if 1 in sizes.values():  # values broadcast to size 1 are restored in a derivative
        del missing["broadcast_in_dim"]
    assert not missing, f"at {sizes}: {extra} instead of {missing}"
    return "other: coincidence"


def primitives(program: Program) -> Counter[str]:
    return Counter(eqn.primitive.name for eqn in equations(jaxcompat.open_jaxpr(program.jaxpr)))


def empty_slices(program: Program) -> Counter[str]:
    """Return the number of slices without elements, as `primitives` counts."""
    eqns = equations(jaxcompat.open_jaxpr(program.jaxpr))
    slices = (eqn for eqn in eqns if eqn.primitive.name == "slice")
    return Counter(eqn.primitive.name for eqn in slices if 0 in eqn.outvars[0].aval.shape)


def prove_case(number: int, case: Any) -> Counter[str]:
    return sum(map(prove, symbolic_programs(case)), Counter({"cases": 1}))


def prove_plan(number: int, plan: SymbolicPlan) -> Counter[str]:
    return sum(map(prove, plan.programs()), Counter({"cases": 1}))


SWEEP = [
    Part(
        "specialize: harnesses",
        Harnesses(),
        prove_case,
        expected=lambda n: n["programs"] > 15_000 and n["equivalent"] > 0.99 * n["sizes"],
    ),
    Part(
        "specialize: random programs",
        RandomPrograms(2000, programs=symbolic_plans),
        prove_plan,
        expected=lambda n: n["programs"] > 1500 and n["equivalent"] > 0.6 * n["sizes"],
    ),
]


def test_harnesses_compute_the_same():
    found = sum((prove_case(0, case) for case in harness_programs(1)[::250]), Counter())
    assert found["programs"] > 50 and found["equivalent"] > 0.98 * found["sizes"], found


@settings(max_examples=5)
@given(symbolic_plans())
def test_random_programs_compute_the_same(plan):
    prove_plan(0, plan)
