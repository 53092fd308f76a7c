"""The random programs that every pass is proved on: drawn, traced and compiled once for all.

To draw, trace and compile a program takes longer than most proofs of it. So a proof takes its
programs from here in the suite, and draws others in the sweep.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import hypothesis
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.programs.case import Case
from tests.programs.random_programs import RandomProgram, random_programs, wasteful_programs
from tests.share import share

Programs = Callable[..., st.SearchStrategy[RandomProgram]]


def draws(count: int, seed: int = 0, programs: Programs = random_programs) -> list[RandomProgram]:
    """Return so many random programs."""
    found: list[RandomProgram] = []

    @hypothesis.seed(seed)
    @settings(max_examples=count, phases=[Phase.generate])
    @given(programs())
    def collect(drawn: RandomProgram) -> None:
        found.append(drawn)

    collect()
    return found


@cache
def corpus() -> tuple[tuple[RandomProgram, Case], ...]:
    """Return the programs, each with its case, which is traced once."""
    return _with_cases(draws(61)[1:])  # the first is the simplest that there is


@cache
def wasteful_corpus() -> tuple[tuple[RandomProgram, Case], ...]:
    """Return programs that have what rewriting passes look for."""
    return _with_cases(draws(21, programs=wasteful_programs)[1:])


def _with_cases(drawn: Iterable[RandomProgram]) -> tuple[tuple[RandomProgram, Case], ...]:
    return tuple((each, each.case()) for each in drawn)


def prove_corpus(
    count: int,
    prove: Callable[[int, Any], Any],
    programs: Callable[[], tuple[tuple[RandomProgram, Case], ...]] = corpus,
    *,
    start: int = 0,
    step: int = 1,
) -> Counter[str]:
    """Prove the first programs of this release's half of the corpus, numbered from 0.

    Args:
        count: How many programs there are to prove, before `step` takes its part.
        prove: Takes the number of a program and its case; says what came of it, if anything.
        programs: The corpus.
        start: The first program.
        step: Prove each `step`-th from there on.

    Returns:
        How often what came of a program.

    Raises:
        Exception: What the first proof that fails raises, noting the code that makes the program.
    """
    outcomes: Counter[str] = Counter()
    chosen = list(enumerate(share(programs())))[:count]
    assert len(chosen) == count
    for number, (drawn, case) in chosen[start::step]:
        try:
            outcome = prove(number, case)
        except Exception as error:
            error.add_note(f"{drawn}.case()")
            raise
        outcomes.update(outcome if isinstance(outcome, Counter) else [str(outcome)])
    return outcomes
