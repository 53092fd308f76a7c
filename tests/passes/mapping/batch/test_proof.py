"""batch on JAX's own test programs, random programs and samples, compared with `jax.vmap`.

Each is batched in several ways and compared by `tests.programs.mapped`: types, mapped results,
values, effects, errors, and cost, which must not exceed JAX's.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import hypothesis
import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxprtool.ir.program import Program
from jaxprtool.loading.trace import trace
from tests.programs import harness_share, random_programs, sample_programs
from tests.programs.corpus import prove_corpus
from tests.programs.mapped import (
    Mapping,
    Outcome,
    are_equivalent,
    flat,
    mappings,
    ours,
    prove_mapped,
    same_programs,
    theirs,
)
from tests.programs.ops import AXES
from tests.programs.random_programs import RandomProgram
from tests.programs.rewriting import prove_all
from tests.programs.samples import sample_files
from tests.share import share
from tests.sweep.corpora import Harnesses, RandomPrograms, Samples
from tests.sweep.parts import Part

CHUNKS = 4


def prove_ways(program: Program, args: list, ways: Iterable[Mapping]) -> Counter[str]:
    """Prove each mapping of a program, and that it costs no more than JAX's. Return the counts."""
    outcomes: Counter[str] = Counter()
    for mapping in ways:
        try:
            outcome = prove_mapped(program, mapping, args)
            assert_no_worse(outcome)
        except Exception as error:
            error.add_note(f"mapped by {mapping}")
            raise
        outcomes += counted(outcome)
    return outcomes


def prove_case(case: Any, seed: Any, ways: int) -> Counter[str]:
    """Prove `count` mappings of a case, drawn with a seed."""
    with case.setting():
        program = case.program()
        chosen = mappings(program, random.Random(seed), ways)
        return prove_ways(program, case.arguments(), chosen)


def assert_no_worse(outcome: Outcome) -> None:
    assert not outcome.is_worse, f"ours costs {outcome.ours}, JAX's {outcome.theirs}"


def counted(outcome: Outcome) -> Counter[str]:
    """Return the kind of the outcome and both costs, to be summed over programs."""
    count = Counter({outcome.how: 1, "programs": 1})
    for name, cost in (("ours", outcome.ours), ("JAX's", outcome.theirs)):
        if cost is not None:
            count[f"{name}: equations"] = cost.equations
            count[f"{name}: bytes moved"] = cost.moved
    return count


# --- JAX's own test programs ------------------------------------------------------------------


def prove_harness(number: int, case: Any, ways: int = 4) -> Counter[str]:
    return prove_case(case, case.name, ways)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_share_of_the_harnesses_batches_as_in_jax(chunk):
    cases = enumerate(harness_share()[chunk::CHUNKS])
    assert prove_all(cases, partial(prove_harness, ways=1))["programs"] > 65


# --- random programs --------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", share(range(4)))
def test_random_programs_batch_as_in_jax(chunk):
    prove = partial(prove_random, ways=1)
    assert prove_corpus(20, prove, start=chunk // 2, step=2)["programs"] >= 10


# --- named axes -------------------------------------------------------------------------------


def prove_collectives(number: int, case: Any) -> Counter[str]:
    """Prove a program with collectives over two axes, mapped over each of them, and over both.

    The number determines the order of the axes.
    """
    outcomes: Counter[str] = Counter()
    with case.setting():
        program, args = flat(trace(case.fun, *case.args, axis_env=AXES)), case.arguments()
        reference = program
        for name, size in AXES if number % 2 else AXES[::-1]:
            mapping = every(program, size, name)
            outcome = prove_mapped(program, mapping, args)
            assert_no_worse(outcome)
            outcomes.update(counted(outcome))
            if outcome.program is None:
                return outcomes
            reference, _ = theirs(reference, mapping)
            program, args = outcome.program, mapping.stack(args)
        outcomes[f"over both axes: {same_programs(program, reference, args)}"] += 1
    return outcomes


def every(program: Program, size: int, name: str | None = None) -> Mapping:
    """Return the mapping of all arguments and all results at their first axis."""
    return Mapping((0,) * len(program.in_avals), (0,) * len(program.out_avals), size, name)


def test_programs_with_collectives_batch_as_in_jax():
    outcomes: Counter[str] = Counter()

    @hypothesis.seed(0)
    @settings(max_examples=15)
    @given(random_programs(collectives=True), st.integers(0, 2**20))
    def check(drawn: RandomProgram, number: int) -> None:
        outcomes.update(prove_collectives(number, drawn.case()))

    check()
    jax.clear_caches()
    assert outcomes["programs"] >= 15


# --- two axes ---------------------------------------------------------------------------------


def prove_two_axes(number: int, case: Any) -> Counter[str]:
    """Prove a batched program batched again: equal to JAX's, and the same in either order."""
    with case.setting():
        program, args = flat(case.program()), case.arguments()
        inner, outer = every(program, 2), every(program, 3)
        try:
            reference = theirs(theirs(program, inner)[0], outer)[0]
        except Exception as error:  # ours raises too, as tested above
            return Counter({f"JAX raises {type(error).__name__}": 1})
        twice = ours(ours(program, inner), outer)
        arguments = outer.stack(inner.stack(args))
        outcomes = Counter({f"twice: {same_programs(twice, reference, arguments)}": 1})
        if program.jaxpr.effects:
            return outcomes
        at_1 = Mapping((1,) * len(program.in_avals), (1,) * len(program.out_avals), 2)
        swapped = ours(ours(program, outer), at_1)
        outcomes[f"either order: {same_programs(swapped, twice, arguments)}"] += 1
        outcomes["either order: the same equations"] += are_equivalent(swapped.jaxpr, twice.jaxpr)
    return outcomes


def test_two_axes_at_once_are_two_nested_batches_in_either_order():
    assert prove_corpus(10, prove_two_axes).total() >= 10


# --- samples ----------------------------------------------------------------------------------


@pytest.mark.parametrize("file", share(sample_files()))
def test_a_program_of_each_sample_batches_as_in_jax(file):
    for case in sample_programs(file)[:1]:
        prove_case(case, case.name, 1)


def prove_sample(number: int, case: Any) -> Counter[str]:
    return prove_case(case, case.name, 6)


def prove_random(number: int, case: Any, ways: int = 4) -> Counter[str]:
    return prove_case(case, number, ways)


REFUSALS = ("JAX fails", "JAX raises", "raises")
SWEEP = [
    Part(
        "batch: harnesses",
        Harnesses(),
        prove_harness,
        refusals=REFUSALS,
        expected=lambda n: n["programs"] > 20_000,
    ),
    Part("batch: random programs", RandomPrograms(2500), prove_random, refusals=REFUSALS),
    Part(
        "batch: collectives",
        RandomPrograms(2000, programs=partial(random_programs, collectives=True)),
        prove_collectives,
        refusals=REFUSALS,
    ),
    Part("batch: two axes", RandomPrograms(1000), prove_two_axes, refusals=REFUSALS),
    Part("batch: samples", Samples(), prove_sample, refusals=REFUSALS),
]
