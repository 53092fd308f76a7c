"""Every small program over primitives that rules combine is bitwise equal after the passes.

A program of few equations can fail where random ones do not, when a rule is applied to the result
of another. Results keep the bits of NaN, infinities and signed zeros, the dtypes and weak types.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, ClassVar

import pytest

import jaxprtool
from jaxprtool.ir.program import Program
from jaxprtool.passes import Pipeline
from tests.programs.enumerated.bodies import Bodies
from tests.programs.enumerated.evaluation import Values
from tests.programs.enumerated.families import FAMILIES
from tests.programs.enumerated.graphs import Family
from tests.share import HALF
from tests.sweep.corpora import Visit, Wants
from tests.sweep.parts import Part

#: The number of programs of each family proved in CI; each JAX release proves other ones.
SAMPLED = 8

ANY = "f32[...]"
PATTERNS = [
    jaxprtool.rewrite(lambda x, y: -x * y, lambda x, y: -(x * y), ANY, ANY),
    jaxprtool.rewrite(lambda x, y: (x - y) * y, lambda x, y: (x + -y) * y, ANY, ANY),
]


def rewritten(text: str, program: Program, check: bool) -> Program:
    """Return the result of a pipeline. `patterns` applies the rewrites above, one after another."""
    if text != "patterns":
        return PIPELINES[text].run(program, check=check)
    for pattern in PATTERNS:
        program = pattern(program)
    return program


PIPELINES = {
    text: Pipeline.parse(text)
    for text in dict.fromkeys(text for family in FAMILIES for text in family.pipelines)
    if text != "patterns"
}


def prove(
    family: Family | Bodies, programs: Iterable[tuple[Any, Program]], check: bool = True
) -> Counter[str]:
    """Compare the results of each pipeline with the original programs. Raise all failures."""
    values = Values(family.inputs(), family.lanes)
    outcomes: Counter[str] = Counter()
    errors: list[Exception] = []
    for graph, program in programs:
        outcomes["programs"] += 1
        expected = values.run(program.jaxpr)
        for text in family.pipelines:
            try:
                after = rewritten(text, program, check)
                if after.jaxpr is not program.jaxpr:
                    require_same(values, expected, program, after)
                    outcomes[f"rewritten by {text}"] += 1
            except Exception as error:
                error.add_note(f"{family.text(graph)} by {text}")
                errors.append(error)
    if errors:
        count = outcomes["programs"]
        raise ExceptionGroup(f"{len(errors)} faults of {count} programs", errors[:20])
    return outcomes


def require_same(values: Values, expected: list[int], before: Program, after: Program) -> None:
    """Raise unless a program has the expected types and values."""
    found = values.run(after.jaxpr)
    types = [[(v.shape, v.dtype, v.weak_type) for v in p.out_avals] for p in (before, after)]
    assert types[0] == types[1], after.jaxpr
    for old, new in zip(expected, found, strict=True):
        assert old == new or values.bits(old) == values.bits(new), after.jaxpr


@dataclass(frozen=True)
class Enumerated:
    """The programs of a family, by unit."""

    whole: ClassVar[bool] = True
    family: Family | Bodies

    def units(self) -> list[str]:
        return self.family.units()

    def visit(self, unit: str, wants: Wants, visit: Visit) -> None:
        if wants(unit):
            visit(unit, 0, unit)


def prover(family: Family | Bodies) -> Callable[[int, str], Counter[str]]:
    """Return the proof of a unit of a family. Types of flat programs are checked with values."""
    check = isinstance(family, Bodies)
    return lambda number, unit: prove(family, family.programs(unit), check)


SWEEP = [Part(f"enumerated: {each.name}", Enumerated(each), prover(each)) for each in FAMILIES]


def sampled(family: Family | Bodies) -> Iterator[tuple[Any, Program]]:
    """Yield some programs of a family."""
    draw = random.Random(HALF)
    if isinstance(family, Bodies):
        for unit in family.units():
            yield from islice(family.programs(unit), draw.randrange(50), 100, 50)
        return
    drawn = chain.from_iterable(family.drawn(draw) for _ in range(10 * SAMPLED))
    for graph in islice(drawn, SAMPLED):
        yield graph, family.program(graph)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_small_programs_compute_the_same(family):
    if family.in_ci:
        outcomes = sum((prove(family, family.programs(u)) for u in family.units()), Counter())
    else:
        outcomes = prove(family, sampled(family))
    assert outcomes["programs"] > SAMPLED / 2


@pytest.mark.sweep
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_operation_is_in_some_program(family):
    family = getattr(family, "family", family)
    units = family.units()
    equations = (graph.equations for graph in family.graphs(units[-1]))
    assert {number for each in equations for number, _ in each} == set(
        range(len(family.operations))
    )
