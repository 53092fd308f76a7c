"""The results of `determinism`: the differences between runs of a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from jaxprtool.execute.compare.bisection import Divergence
from jaxprtool.execute.compare.measures import Measure
from jaxprtool.execute.compare.prefixes import Prefix
from jaxprtool.execute.compare.risks import Risk
from jaxprtool.ir.basics.documents import document
from jaxprtool.ir.basics.printed import Printed

#: The change for a run: none, a new compilation, a new trace, another process, ….
Kind: TypeAlias = Literal["run", "compile", "trace", "process", "device", "threads", "option"]


@document(also=("equal", "differing"))
@dataclass(frozen=True)
class Repetition:
    """A run compared with the first one, bit for bit.

    Attributes:
        name: The change: `compiled again`, `8 threads (NPROC=8)`.
        kind: The kind of this change.
        results: The difference of each result; empty if the results cannot be compared.
        other_program: How its traced program differs from that of the first run, or "".
        error: Why the run has no results, in one line, or "".
    """

    name: str
    kind: Kind
    results: tuple[Measure, ...] = ()
    other_program: str = ""
    error: str = ""

    @property
    def equal(self) -> bool:
        """Whether it ran, and the program and all bits are the same. All NaNs count as equal."""
        return not (self.error or self.other_program) and self.differing == 0

    @property
    def differing(self) -> int:
        """The number of results that differ."""
        return sum(not each.equal for each in self.results)


@dataclass(frozen=True)
class Cause:
    """Where a run begins to differ from the first one.

    Attributes:
        name: The name of the run.
        divergence: The first equation whose results differ for equal operands, with intermediate
            values as results; or why none was found.
        prefix: If no equation was found, the smallest prefix of the program that differs when
            compiled as a whole; null if there is none.
    """

    name: str
    divergence: Divergence
    prefix: Prefix | None = None


@document(also=("equal",))
@dataclass(frozen=True)
class Determinism(Printed):
    """A program run again in several ways, compared bit for bit with its first run.

    Attributes:
        name: The name of the program.
        inputs: A description of the inputs.
        random: The names of the arguments that are random.
        reference: The device of the first run.
        repetitions: The other runs.
        causes: Where runs begin to differ, one for each kind of change and each option.
        risks: Equations that may differ in other runs, or on other devices.
        not_tried: The kinds of runs that were not tried, each with the reason.
    """

    name: str
    inputs: str
    random: tuple[str, ...]
    reference: str
    repetitions: tuple[Repetition, ...]
    causes: tuple[Cause, ...] = ()
    risks: tuple[Risk, ...] = ()
    not_tried: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether all runs gave the same bits, and all traces the same program."""
        return all(each.equal for each in self.repetitions)

    @property
    def unproven(self) -> tuple[Measure, ...]:
        """The results with mostly non-finite elements, whose equal bits prove nothing."""
        results = {m.name: m for each in self.repetitions for m in each.results if not m.is_proof}
        return tuple(results.values())


@dataclass(frozen=True)
class FreshRun:
    """The program and the results of the same function in another process.

    Attributes:
        program: The text of its program, with stubs for callbacks.
        results: Its results by name.
    """

    program: str
    results: dict[str, Any]
