"""batch on JAX's own test programs, on random programs and on the samples, beside `jax.vmap`.

Each is mapped in several ways and compared by `tests.programs.mapped`: types, which results are
mapped, values, effects, errors; and what it costs, which may not be more than what JAX's costs.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import hypothesis
import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxprtool.ir.program import Program
from jaxprtool.loading.trace import trace
from tests.programs import harness_programs, random_programs, sample_programs
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
from tests.programs.samples import sample_files

CHUNKS = 8

#: Programs that may cost more than JAX's, by a part of their names, and why.
EXCEPTIONS: dict[str, str] = {}


def prove_all(program: Program, args: list, ways: Iterable[Mapping]) -> Counter[str]:
    """Prove each mapping of a program, and that it costs no more than JAX's; counted."""
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


def assert_no_worse(outcome: Outcome) -> None:
    assert not outcome.is_worse, f"ours costs {outcome.ours}, JAX's {outcome.theirs}"


def counted(outcome: Outcome) -> Counter[str]:
    """How the outcome was found, and both costs, for sums over programs."""
    count = Counter({outcome.how: 1, "programs": 1})
    for name, cost in (("ours", outcome.ours), ("JAX's", outcome.theirs)):
        if cost is not None:
            count[f"{name}: equations"] = cost.equations
            count[f"{name}: bytes moved"] = cost.moved
    return count


def assert_none(failures: dict[str, BaseException]) -> None:
    lines = [
        f"{name}: {' '.join(getattr(e, '__notes__', ()))}: {type(e).__name__}: {str(e)[:600]}"
        for name, e in failures.items()
    ]
    assert not failures, f"{len(failures)} programs failed\n" + "\n".join(lines)


# --- JAX's own test programs ------------------------------------------------------------------


def prove_harnesses(every: int, chunk: int, ways: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    failures: dict[str, BaseException] = {}
    for number, case in enumerate(harness_programs(every)[chunk::CHUNKS]):
        try:
            with case.setting():
                program, rng = case.program(), random.Random(case.name)
                chosen = mappings(program, rng, ways)
                outcomes += prove_all(program, case.arguments(), chosen)
        except Exception as error:
            if not any(part in case.name for part in EXCEPTIONS):
                failures[case.name] = error
        if number % 200 == 199:
            jax.clear_caches()
    assert_none(failures)
    return outcomes


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_tenth_of_the_harnesses_batch_as_in_jax(chunk):
    outcomes = prove_harnesses(10, chunk, ways=1)
    assert outcomes["programs"] > 65


@pytest.mark.sweep
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_all_harnesses_batch_as_in_jax(chunk, record_property):
    outcomes = prove_harnesses(1, chunk, ways=4)
    record_property("outcomes", dict(outcomes))
    assert outcomes["programs"] > 2500


# --- random programs --------------------------------------------------------------------------


def prove_random_programs(examples: int, seed: int, ways: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()

    @hypothesis.seed(seed)
    @settings(max_examples=examples)
    @given(random_programs(), st.integers(0, 2**20))
    def check(drawn: RandomProgram, seed: int) -> None:
        case = drawn.case()
        with case.setting():
            program = case.program()
            chosen = mappings(program, random.Random(seed), ways)
            outcomes.update(prove_all(program, case.arguments(), chosen))

    check()
    jax.clear_caches()
    return outcomes


@pytest.mark.parametrize("chunk", range(4))
def test_random_programs_batch_as_in_jax(chunk):
    assert prove_random_programs(examples=10, seed=chunk, ways=1)["programs"] >= 10


@pytest.mark.sweep
@pytest.mark.parametrize("chunk", range(10))
def test_many_random_programs_batch_as_in_jax(chunk, record_property):
    outcomes = prove_random_programs(examples=250, seed=100 + chunk, ways=4)
    record_property("outcomes", dict(outcomes))


# --- named axes -------------------------------------------------------------------------------


def prove_collectives(examples: int, seed: int) -> Counter[str]:
    """Programs that talk over two axes, mapped over one and then over the other, and over both."""
    outcomes: Counter[str] = Counter()

    @hypothesis.seed(seed)
    @settings(max_examples=examples)
    @given(random_programs(collectives=True), st.sampled_from([AXES, AXES[::-1]]))
    def check(drawn: RandomProgram, axes: tuple[tuple[str, int], ...]) -> None:
        case = drawn.case()
        with case.setting():
            program, args = flat(trace(case.fun, *case.args, axis_env=AXES)), case.arguments()
            reference = program
            for name, size in axes:
                mapping = every(program, size, name)
                outcome = prove_mapped(program, mapping, args)
                assert_no_worse(outcome)
                outcomes.update(counted(outcome))
                if outcome.program is None:
                    return
                reference, _ = theirs(reference, mapping)
                program, args = outcome.program, mapping.stack(args)
            outcomes[f"over both axes: {same_programs(program, reference, args)}"] += 1

    check()
    jax.clear_caches()
    return outcomes


def every(program: Program, size: int, name: str | None = None) -> Mapping:
    """All arguments and all results mapped at their first axis."""
    return Mapping((0,) * len(program.in_avals), (0,) * len(program.out_avals), size, name)


def test_programs_with_collectives_batch_as_in_jax():
    assert prove_collectives(examples=15, seed=0)["programs"] >= 15


@pytest.mark.sweep
@pytest.mark.parametrize("chunk", range(10))
def test_many_programs_with_collectives_batch_as_in_jax(chunk, record_property):
    outcomes = prove_collectives(examples=200, seed=100 + chunk)
    record_property("outcomes", dict(outcomes))


# --- two axes ---------------------------------------------------------------------------------


def prove_two_axes(program: Program, args: list) -> Counter[str]:
    """A batched program batched once more: as in JAX, and the same in either order."""
    program = flat(program)
    inner, outer = every(program, 2), every(program, 3)
    try:
        reference = theirs(theirs(program, inner)[0], outer)[0]
    except Exception as error:  # so does ours: above
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


def prove_two_axes_of_random_programs(examples: int, seed: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()

    @hypothesis.seed(seed)
    @settings(max_examples=examples)
    @given(random_programs())
    def check(drawn: RandomProgram) -> None:
        case = drawn.case()
        with case.setting():
            outcomes.update(prove_two_axes(case.program(), case.arguments()))

    check()
    jax.clear_caches()
    return outcomes


def test_two_axes_at_once_are_two_nested_batches_in_either_order():
    assert prove_two_axes_of_random_programs(examples=10, seed=0).total() >= 10


@pytest.mark.sweep
@pytest.mark.parametrize("chunk", range(10))
def test_two_axes_of_many_random_programs(chunk, record_property):
    outcomes = prove_two_axes_of_random_programs(examples=100, seed=100 + chunk)
    record_property("outcomes", dict(outcomes))


# --- samples ----------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sample_files())
def test_a_program_of_each_sample_batches_as_in_jax(file):
    for case in sample_programs(file)[:1]:
        program = case.program()
        prove_all(program, case.arguments(), mappings(program, random.Random(case.name), 1))


@pytest.mark.sweep
@pytest.mark.parametrize("file", sample_files())
def test_samples_and_their_gradients_batch_as_in_jax(file):
    for case in sample_programs(file):
        program = case.program()
        prove_all(program, case.arguments(), mappings(program, random.Random(case.name), 6))
