"""The proof of emission: a module's function traces to the original program.

This holds for all programs except those with features that JAX's functions cannot express, which
are listed in docs/languages.md. Such a program must compute the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import pytest

from jaxprtool import Program
from jaxprtool.errors import JaxprToolError, UnsupportedError
from jaxprtool.execute.running.arrays import fill_arguments
from jaxprtool.formats.python.emit import to_python
from jaxprtool.ir.equivalence import structural_difference
from jaxprtool.ir.regions import sub_jaxprs
from tests.formats.python.emitting import defined, traced_again
from tests.formats.python.kinds import kinds
from tests.programs import harness_share, same, sample_programs
from tests.programs.corpus import prove_corpus
from tests.programs.samples import sample_files
from tests.share import first_and_proofs
from tests.sweep.corpora import Harnesses, RandomPrograms, Samples
from tests.sweep.parts import Part

#: Primitives that are not public, but necessary to write JAX's test programs.
NOT_PUBLIC = {"iota_2x32_shape"}

#: The passes before writing. In CI each program gets one of these, in the sweep all.
PASSES = ("jvp", "-O2", "vjp", "batch(axis_size=3)", "inline", "-O3", "linearize", "unroll")


def primitives(jaxpr: Any) -> Iterator[str]:
    """Return the names of all primitives of a jaxpr, at every depth."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for _, body in sub_jaxprs(eqn):
            yield from primitives(body)


def outcome(program: Program, arguments: Callable[[], list[Any]], gradients: bool = False) -> str:
    """Return "equivalent", "identical" in results, or "refused". Else AssertionError."""
    try:
        source = to_python(program)
    except UnsupportedError:
        return "refused"
    again = traced_again(defined(source), program)
    found = structural_difference(program, again)
    if found is None:
        return "equivalent"
    assert kinds(program), found
    same(program, again, arguments(), gradients=gradients)
    return "identical"


def prove(number: int, case: Any) -> str:
    """Write a program and trace it again. Return the outcome."""
    with case.setting():
        program = case.program()
        found = outcome(program, case.arguments)
    assert found != "refused" or set(primitives(program.jaxpr)) & NOT_PUBLIC, case.name
    return found


@pytest.mark.proof
def test_a_share_of_jaxs_test_programs_round_trips() -> None:
    total = Counter(prove(*numbered) for numbered in enumerate(harness_share()))
    assert total["identical"] == 0
    assert total["equivalent"] > 250


@pytest.mark.parametrize("file", first_and_proofs(sample_files()))
def test_samples_and_their_gradients_round_trip(file: str) -> None:
    for case in sample_programs(file):
        with case.setting():
            found = outcome(case.program(), case.arguments)
        assert (case.name, found) == (case.name, "equivalent")


@pytest.mark.proof
def test_samples_round_trip_after_passes() -> None:
    total: Counter[str] = Counter()
    cases = [case for file in sample_files() for case in sample_programs(file)[:1]]
    for number, case in enumerate(cases):
        total += after_passes(case, PASSES[number % 4 :][:1])
    assert total["equivalent"] > 8
    assert total["identical"] == 0


def after_passes(case: Any, passes: Sequence[str]) -> Counter[str]:
    """Return the outcome of a program after each of these passes; "refused" if one fails."""
    total: Counter[str] = Counter()
    with case.setting():
        program = case.program()
        for text in passes:
            try:
                made = program.apply(text)
            except JaxprToolError:
                total["refused"] += 1
                continue
            for part in [made] if isinstance(made, Program) else made.values():
                total[outcome(part, partial(random_arguments, part))] += 1
    return total


def random_arguments(program: Program) -> list[Any]:
    """Return random arguments."""
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.in_avals]
    given = dict(zip(program.arg_names, types, strict=True))
    return list(fill_arguments(program, given, seed=0).arguments)


def prove_after_passes(number: int, case: Any) -> Counter[str]:
    return after_passes(case, PASSES)


@pytest.mark.proof
def test_random_programs_round_trip() -> None:
    prove_corpus(12, prove_random)


def prove_random(number: int, case: Any) -> str:
    with case.setting():
        return outcome(case.program(), case.arguments, gradients=True)


SWEEP = [
    Part(
        "python: harnesses",
        Harnesses(),
        prove,
        expected=lambda n: (n["identical"], n["refused"]) == (0, 3) and n["equivalent"] > 5400,
    ),
    Part(
        "python: samples after passes",
        Samples(),
        prove_after_passes,
        refusals=(),
        expected=lambda n: n["equivalent"] > 600 and n["identical"] < 30,
    ),
    Part("python: random programs", RandomPrograms(500), prove_random),
]
