"""Find the smallest prefix of a program that two variants compute differently, compiled whole.

Values in the middle of a program become results of the prefix only where the rest of the program
reads them, so that the compiler may fuse all equations before, as in the whole program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.execute.compare.body_runs import BodyRun, Executor
from jaxprtool.execute.compare.comparator import Comparator, comparable
from jaxprtool.execute.compare.measures import Measure, Tolerance, measured
from jaxprtool.ir.core.equations import variables
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.source.frames import frames_now
from jaxprtool.jaxcompat import Var

_EXACT = Comparator(Tolerance(0, 0), exact=True)


@dataclass(frozen=True)
class Prefix:
    """The shortest prefix of a program for which a search has found different values.

    The prefix without its last equation gave equal values.

    Attributes:
        count: The number of equations of the prefix.
        total: The number of equations of the program, at its outer level.
        primitive: The primitive of its last equation.
        source: The user's line of that equation, followed by the library's.
        code: The source text of that line, if its file exists.
        results: The values that differ, of those that the rest of the program reads.
    """

    count: int
    total: int
    primitive: str
    source: str
    code: str
    results: tuple[Measure, ...]


def differing_prefix(
    program: Program,
    executors: tuple[Executor, Executor],
    on_progress: Callable[[str], object] = lambda doing: None,
) -> Prefix | None:
    """Return a prefix whose values differ, while those of one equation fewer are bitwise equal.

    Args:
        program: The program that both run.
        executors: The executor of each variant.
        on_progress: Called with progress messages.

    Returns:
        None if the values of the whole program are equal.
    """
    search = _Search(program, executors)
    eqns = jaxcompat.open_jaxpr(program.jaxpr).eqns
    low, high = 0, len(eqns)
    wrong = search.wrong(high)
    while wrong and high - low > 1:
        middle = (low + high) // 2
        on_progress(f"comparing the first {middle:,} of {len(eqns):,} equations")
        found = search.wrong(middle)
        if found:
            high, wrong = middle, found
        else:
            low = middle
    if not wrong:
        return None
    eqn, frames = eqns[high - 1], frames_now(program.roots)
    return Prefix(
        high,
        len(eqns),
        str(eqn.primitive.name),
        frames.line_of((eqn,)),
        frames.code_of((eqn,)),
        tuple(wrong),
    )


class _Search:
    def __init__(self, program: Program, executors: tuple[Executor, Executor]):
        self._program, self._executors = program, executors
        self._jaxpr = jaxcompat.open_jaxpr(program.jaxpr)
        self._frames = frames_now(program.roots)
        self._definitions = {v: eqn for eqn in self._jaxpr.eqns for v in eqn.outvars}

    def wrong(self, count: int) -> list[Measure]:
        """Return the values that differ after the first `count` equations."""
        live = self._live(count)
        old, new = (self._values(executor, live) for executor in self._executors)
        return [
            measured(self._frames.named([self._definitions[var]]), a, b, Tolerance(0, 0))
            for var, a, b in zip(live, old, new, strict=True)
            if _EXACT.differ(a, b)
        ]

    def _values(self, executor: Executor, live: Sequence[Var]) -> list[Any]:
        return BodyRun(executor, self._program.jaxpr, executor.arguments).values(live)

    def _live(self, count: int) -> list[Var]:
        """Return the values of the first `count` equations that are read later, or are results."""
        made = {v for eqn in self._jaxpr.eqns[:count] for v in eqn.outvars}
        later = [atom for eqn in self._jaxpr.eqns[count:] for atom in eqn.invars]
        read = dict.fromkeys(variables([*later, *self._jaxpr.outvars]))
        return [v for v in read if v in made and comparable(v)]
