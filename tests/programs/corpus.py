"""The random programs that every pass is tested on, drawn, traced and compiled once.

Drawing, tracing and compiling a program takes longer than most tests of it. So tests of the suite
share this corpus. The sweep draws other programs.
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
    """Return `count` random programs."""
    found: list[RandomProgram] = []

    @hypothesis.seed(seed)
    @settings(max_examples=count, phases=[Phase.generate])
    @given(programs())
    def collect(drawn: RandomProgram) -> None:
        found.append(drawn)

    collect()
    return found


@cache
def corpus(count: int = 60) -> tuple[tuple[RandomProgram, Case], ...]:
    """Return the first programs, each with its case, which is traced once."""
    return _with_cases(draws(count + 1)[1:])  # the first draw is the simplest program


@cache
def wasteful_corpus() -> tuple[tuple[RandomProgram, Case], ...]:
    """Return programs with code that rewriting passes can improve."""
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
        count: The number of programs to prove, before `step` selects among them.
        prove: Takes the number of a program and its case, and returns an outcome or None.
        programs: The corpus.
        start: The first program.
        step: Prove each `step`-th from there on.

    Returns:
        The number of programs by outcome.

    Raises:
        Exception: The first failure, with a note of the code that makes the program.
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
