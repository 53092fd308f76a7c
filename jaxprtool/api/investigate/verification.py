"""Verify a pipeline: every pass's result is run beside the program that the pass was given.

The programs are run when all passes are done, so that what can be refused is refused before that.
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
    """What was compared.

    Attributes:
        passes: How many passes made no difference to the results.
        changed: How many of these gave another program; the others were not run.
        unproven: What to say of each result that is not finite in most elements, of which little
            is proved.
        nonfinite: How many elements of the results are a NaN or an infinity.
        elements: How many elements they have.
    """

    passes: int
    changed: int
    unproven: tuple[str, ...]
    nonfinite: int
    elements: int


class Verifier(Observer):
    """Compares what passes make with what they were given, on the same inputs.

    Args:
        inner: Another observer, which is told of each pass too.
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
            self._leave(step, "it changes what is computed")
        elif program.axis_env:
            self._leave(step, f"{program.name} has named axes that nothing binds yet")
        else:
            self._compared.add(id(step))
            if result is not program:
                self._made.append((step, program, result))

    def verify(
        self,
        given: Mapping[str, object],
        sizes: Sizes = MappingProxyType({}),
        told: Callable[[str], object] = lambda doing: None,
    ) -> Verified:
        """Return what was compared, once the pipeline is done.

        Args:
            given: Arguments by name. One that is a type alone, or whose shape a pass has changed,
                or that a pass has added, is filled with random values.
            sizes: The sizes of symbols; those of a program that has others are small.
            told: Is told which pass is compared, and how far that is.

        Raises:
            CheckError: For the first pass that has made something else of a program.
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
                told(f"{which} · running what it was given")
                runs = random_runs(program, given)
            assert isinstance(step.transform, Pass)
            try:
                compared = runs.compare(
                    result,
                    step.transform.keeps_checks,
                    lambda doing, which=which: told(f"{which} · {doing}"),  # type: ignore[misc]
                )
                self._runs[id(result)] = compared
                unproven |= dict.fromkeys(f"{what}, {runs.inputs}" for what in compared.unproven())
                counts[result.name] = compared.nonfinite()
            except CheckError as error:
                hint = f"--print-after {type(step.transform).name} shows what the pass has made"
                message = f"pass '{step}': {error.message}"
                raise CheckError(message, error.hint or hint, error.details) from error
        nonfinite, elements = (sum(each[i] for each in counts.values()) for i in (0, 1))
        return Verified(len(self._compared), len(self._made), tuple(unproven), nonfinite, elements)

    def _leave(self, step: Step, why: str) -> None:
        if id(step) not in self._left:
            self._left.add(id(step))
            self._note(f"pass '{step}' is not compared: {why}")
