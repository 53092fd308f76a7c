"""Every small program over primitives that rules name computes the same bits behind the passes.

A program of few equations can fail where random ones do not: a rule meets what another has left.
Bits stay of NaN, infinities and the signs of zeros; dtypes and weak types do, too.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
import pytest

from jaxprtool import trace
from jaxprtool.ir.program import Program, type_check
from jaxprtool.passes.pipeline import Pipeline
from tests.programs.enumerated import FAMILIES, Family, Graph
from tests.sweep.corpora import Visit, Wants
from tests.sweep.parts import Part

PIPELINES = tuple(map(Pipeline.parse, ("simplify", "-O1")))
UNIT = 200


def evaluated(program: Program, args: list[Any]) -> list[Any]:
    """Run a program equation by equation, so that XLA fuses nothing."""
    return jax.core.eval_jaxpr(program.jaxpr.jaxpr, program.jaxpr.consts, *args)


def bits(value: Any) -> tuple[Any, ...]:
    """Return what must stay of a value.

    Every NaN is alike, and a subnormal number a zero: `x * -1` flushes it, and `-x` does not.
    """
    array = np.array(value)
    if array.dtype.kind == "f":
        array[np.isnan(array)] = np.nan
        array[np.abs(array) < np.finfo(array.dtype).tiny] *= 0
    return array.shape, array.dtype, jax.typeof(value).weak_type, array.tobytes()


def prove_graph(family: Family, graph: Graph) -> Counter[str]:
    """Hold what each pipeline makes of a graph against the graph itself."""
    args = family.values()[: graph.arity]
    before = trace(graph, *args)
    expected = [bits(value) for value in evaluated(before, args)]
    outcomes = Counter(programs=1)
    for pipeline in PIPELINES:
        after = pipeline(before)
        if after.jaxpr is before.jaxpr:
            continue
        type_check(after, before)
        found = [bits(value) for value in evaluated(after, args)]
        assert found == expected, f"{graph} by {pipeline}: {after.jaxpr}"
        outcomes["rewritten"] += 1
    return outcomes


def prove_batch(number: int, batch: tuple[Family, list[Graph]]) -> Counter[str]:
    """Prove the graphs of a batch; all that fail are named."""
    family, graphs = batch
    outcomes: Counter[str] = Counter()
    errors: list[Exception] = []
    for graph in graphs:
        try:
            outcomes += prove_graph(family, graph)
        except Exception as error:
            error.add_note(str(graph))
            errors.append(error)
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {len(graphs)} programs", errors)
    return outcomes


@dataclass(frozen=True)
class Enumerated:
    """The programs of a family, in units of some hundred."""

    whole: ClassVar[bool] = True
    family: Family

    def units(self) -> list[str]:
        count = sum(1 for _ in self.family.graphs())
        return [str(first) for first in range(0, count, UNIT)]

    def visit(self, unit: str, wants: Wants, visit: Visit) -> None:
        if wants(unit):
            first = int(unit)
            graphs = list(itertools.islice(self.family.graphs(), first, first + UNIT))
            visit(unit, first, (self.family, graphs))


SWEEP = [Part(f"enumerated: {family.name}", Enumerated(family), prove_batch) for family in FAMILIES]


def sampled(family: Family, count: int) -> Iterator[Graph]:
    """Give about so many of the graphs of a family, evenly spread."""
    graphs = list(family.graphs())
    step = max(len(graphs) // count, 1) | 1
    yield from graphs[::step]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_some_small_programs_compute_the_same(family):
    outcomes = prove_batch(0, (family, list(sampled(family, 50))))
    assert outcomes["programs"] >= 40
    assert outcomes["rewritten"]
