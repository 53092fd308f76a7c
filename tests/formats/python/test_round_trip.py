"""The proof of emission: a module's function traces to the program it was written from.

What JAX's functions cannot say, a loop's constants in another order above all, must at least
compute the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from jaxprtool.errors import UnsupportedError
from jaxprtool.formats.python.emit import to_python
from jaxprtool.ir.equivalence import difference
from jaxprtool.ir.program import Program
from jaxprtool.ir.structured import sub_jaxprs
from tests.formats.python.emitting import defined, traced_again
from tests.programs import harness_programs, random_programs, same, sample_programs
from tests.programs.samples import sample_files
from tests.sweep.corpora import Harnesses, RandomPrograms
from tests.sweep.parts import Part

#: Primitives without which JAX's test programs cannot be written, as they are not public.
NOT_PUBLIC = {"iota_2x32_shape"}

#: Samples that compute the same by other equations: loops whose constants are in another order
#: than that in which their bodies mention them, and an index that two branches share.
OTHER_EQUATIONS = {
    "branches.huber gradient",
    "rnn.grad_loss",
    "rnn.loss gradient",
    "solver.largest_singular_value gradient",
}


def primitives(jaxpr: Any) -> Iterator[str]:
    """The names of all primitives of a jaxpr, at every depth."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for _, body in sub_jaxprs(eqn):
            yield from primitives(body)


def outcome(program: Program, arguments: list[Any], gradients: bool = False) -> str:
    """ "equivalent", "identical" in results, or "refused"; AssertionError if none of these."""
    try:
        source = to_python(program)
    except UnsupportedError:
        return "refused"
    again = traced_again(defined(source), program)
    if difference(program, again) is None:
        return "equivalent"
    same(program, again, arguments, gradients=gradients)
    return "identical"


def prove(number: int, case: Any) -> str:
    """Write a program and trace it again; says what came of it."""
    with case.setting():
        program = case.program()
        found = outcome(program, case.arguments())
    assert found != "refused" or set(primitives(program.jaxpr)) & NOT_PUBLIC, case.name
    return found


def test_a_tenth_of_jaxs_test_programs_come_back_equivalent() -> None:
    total = Counter(prove(*numbered) for numbered in enumerate(harness_programs(10)))
    assert total["identical"] == 0
    assert total["equivalent"] > 500


@pytest.mark.parametrize("file", sample_files())
def test_samples_and_their_gradients_come_back(file: str) -> None:
    for case in sample_programs(file):
        with case.setting():
            program = case.program()
            found = outcome(program, case.arguments())
        names = set(primitives(program.jaxpr))
        # Operations with rules of their own come back as calls of library functions, or with rules.
        if "call_hi_primitive" in names:
            assert (case.name, found) in [(case.name, "identical"), (case.name, "equivalent")]
        else:
            expected = "identical" if case.name in OTHER_EQUATIONS else "equivalent"
            assert (case.name, found) == (case.name, expected)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(random_programs())
def test_random_programs_come_back(drawn: Any) -> None:
    check_random(drawn)


def check_random(drawn: Any) -> None:
    prove_random(0, drawn.case())


def prove_random(number: int, case: Any) -> str:
    with case.setting():
        return outcome(case.program(), case.arguments(), gradients=True)


SWEEP = [
    Part(
        "python: harnesses",
        Harnesses(),
        prove,
        expected=lambda n: (n["identical"], n["refused"]) == (0, 3) and n["equivalent"] > 5400,
    ),
    Part("python: random programs", RandomPrograms(500), prove_random),
]
