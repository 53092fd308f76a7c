"""The corpora of programs for parts of the sweep, in units of work.

A corpus lists its units, and visits the programs of one. Names and numbers of programs depend only
on the corpus, so that a single program can be run again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import hypothesis
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.programs import harness_programs, random_programs, sample_programs
from tests.programs.random_programs import RandomProgram
from tests.programs.samples import sample_files
from tests.programs.symbolic_models import symbolic_model, symbolic_models

Wants = Callable[[str], bool]

#: `visit(name, number, case)`. A proof seeds its random choices with the number.
Visit = Callable[[str, int, Any], None]


class Corpus(Protocol):
    """A source of programs. With `whole`, a share is drawn of units, not of programs."""

    whole: ClassVar[bool]

    def units(self) -> list[str]:
        """Return the names of the units of work."""

    def visit(self, unit: str, wants: Wants, visit: Visit) -> None:
        """Call `visit` with each program of a unit whose name is wanted."""


@dataclass(frozen=True)
class Harnesses:
    """JAX's own test programs, each `every`-th of them."""

    whole: ClassVar[bool] = False
    every: int = 1
    count: int = 100

    def units(self) -> list[str]:
        return [str(i) for i in range(self.count)]

    def visit(self, unit: str, wants: Wants, visit: Visit) -> None:
        cases = list(enumerate(harness_programs(1)))[:: self.every]
        for number, case in cases[int(unit) :: self.count]:
            if wants(case.name):
                visit(case.name, number, case)


@dataclass(frozen=True)
class RandomPrograms:
    """`count` random programs, in units of at most `unit_size` with a hypothesis seed each.

    Drawing them takes time, even if they are not proven.
    """

    whole: ClassVar[bool] = True
    examples: int
    first_seed: int = 100
    programs: Callable[[], st.SearchStrategy[RandomProgram]] = random_programs
    unit_size: int = 25

    def units(self) -> list[str]:
        count = -(-self.examples // self.unit_size)
        return [str(self.first_seed + i) for i in range(count)]

    def visit(self, unit: str, wants: Wants, visit: Visit) -> None:
        count = 0

        # All failing programs are found, not only the smallest.
        @hypothesis.seed(int(unit))
        @settings(max_examples=min(self.unit_size, self.examples), phases=[Phase.generate])
        @given(self.programs(), st.integers(0, 2**20))
        def draw(drawn: RandomProgram, number: int) -> None:
            nonlocal count
            count += 1
            if wants(f"{unit}.{count}"):
                visit(f"{unit}.{count}", number, drawn.case())

        draw()


@dataclass(frozen=True)
class Samples:
    """The samples and their gradients, one unit per file."""

    whole: ClassVar[bool] = False

    def units(self) -> list[str]:
        return sample_files()

    def visit(self, unit: str, wants: Wants, visit: Visit) -> None:
        for number, case in enumerate(sample_programs(unit)):
            if wants(case.name):
                visit(case.name, number, case)


@dataclass(frozen=True)
class SymbolicModels:
    """The models among the samples with symbolic sizes, one unit per model."""

    whole: ClassVar[bool] = False

    def units(self) -> list[str]:
        return symbolic_models()

    def visit(self, unit: str, wants: Wants, visit: Visit) -> None:
        for number, found in enumerate(symbolic_model(unit)):
            if wants(found.name):
                visit(found.name, number, found)
