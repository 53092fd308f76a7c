"""Verification of a pipeline: compares the results of the programs before and after each pass.

The programs are run after all passes are done, so that errors of passes are reported first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jaxprtool.errors import CheckError
from jaxprtool.execute.running.arguments import at_one_size, require_runnable
from jaxprtool.execute.verify import Runs, random_runs
from jaxprtool.ir.programs.program import Program, Programs
from jaxprtool.ir.shapes.symbols import Sizes
from jaxprtool.passes.framework.base import Pass
from jaxprtool.passes.framework.pipeline import Observer, Step


@dataclass(frozen=True)
class Verified:
    """The outcome of a verification.

    Attributes:
        passes: The number of passes that preserved the results.
        changed: The number of these that changed the program; the others were not run.
        unproven: A message for each result that is not finite in most elements, which proves
            little.
        nonfinite: The number of NaNs and infinities in the results.
        elements: The number of elements of the results.
    """

    passes: int
    changed: int
    unproven: tuple[str, ...]
    nonfinite: int
    elements: int


class Verifier(Observer):
    """Compares the programs before and after passes on the same inputs.

    Args:
        inner: Another observer, which is also notified of each pass.
        note: Called once for each pass that is not compared, with the reason.
    """

    def __init__(self, inner: Observer, note: Callable[[str], None]):
        self._inner, self._note = inner, note
        self._made: list[tuple[Step, Program, Program]] = []
        self._runs: dict[int, Runs] = {}
        self._compared: set[int] = set()
        self._left: set[int] = set()

    def before(self, step: Step, program: Program) -> None:
        self._inner.before(step, program)

    def after(
        self, step: Step, program: Program, result: Program | Programs, seconds: float
    ) -> None:
        self._inner.after(step, program, result, seconds)
        assert isinstance(step.transform, Pass)
        if isinstance(result, Programs) or not step.transform.preserves:
            self._leave(step, "it changes the computation")
        elif program.axis_env:
            self._leave(step, f"{program.name} has free named axes")
        else:
            self._compared.add(id(step))
            if result is not program:
                self._made.append((step, program, result))

    def verify(
        self,
        given: Mapping[str, object],
        sizes: Sizes = MappingProxyType({}),
        on_progress: Callable[[str], object] = lambda doing: None,
    ) -> Verified:
        """Compare the programs after the pipeline is done, and return the outcome.

        Args:
            given: Arguments by name. One that is only a type, was added by a pass, or whose shape a
                pass changed, is filled with random values.
            sizes: The sizes of symbols; other symbols get small sizes.
            on_progress: Called with progress messages.

        Raises:
            CheckError: For the first pass that changed the results of a program.
        """
        unproven: dict[str, None] = {}
        counts: dict[str, tuple[int, int]] = {}
        for i, (step, program, result) in enumerate(self._made, 1):
            if program.symbols and {*program.symbols, *result.symbols} <= sizes.keys():
                program, result = program.specialized(sizes), result.specialized(sizes)
            elif program.symbols:
                program, result = at_one_size(program, result)
            which = f"verify: {type(step.transform).name} {i}/{len(self._made)}"
            runs = self._runs.pop(id(program), None)
            if runs is None:
                require_runnable(program)
                on_progress(f"{which} · running the program before the pass")
                runs = random_runs(program, given)
            assert isinstance(step.transform, Pass)
            try:
                compared = runs.compare(
                    result,
                    step.transform.keeps_checks,
                    lambda doing, which=which: on_progress(f"{which} · {doing}"),  # type: ignore[misc]
                )
                self._runs[id(result)] = compared
                unproven |= dict.fromkeys(f"{what}, {runs.inputs}" for what in compared.unproven())
                counts[result.name] = compared.nonfinite()
            except CheckError as error:
                hint = (
                    "show the program after the pass with --print-after "
                    f"{type(step.transform).name}"
                )
                message = f"pass '{step}': {error.message}"
                raise CheckError(message, error.hint or hint, error.details) from error
        nonfinite, elements = (sum(each[i] for each in counts.values()) for i in (0, 1))
        return Verified(len(self._compared), len(self._made), tuple(unproven), nonfinite, elements)

    def _leave(self, step: Step, why: str) -> None:
        if id(step) not in self._left:
            self._left.add(id(step))
            self._note(f"pass '{step}' is not compared: {why}")
