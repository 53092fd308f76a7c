"""Variants of programs: pipelines, precisions, backends, and op by op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from jaxprtool.api.investigate.matmul_precision import with_precision
from jaxprtool.api.targets import RunInputs
from jaxprtool.errors import PipelineError
from jaxprtool.execute.compare.variants import OnProgress, Variant
from jaxprtool.execute.running import backends as devices
from jaxprtool.execute.running.arguments import flat_arguments, require_count, require_program
from jaxprtool.execute.running.fill import refitted
from jaxprtool.ir.programs.program import Program, Programs
from jaxprtool.ir.programs.ref_contents import with_contents
from jaxprtool.passes.framework.pipeline import Observer, Pipeline, Step

#: The name of the variant without passes.
AS_TRACED = "as traced"


@dataclass(frozen=True)
class Axes:
    """The options that variants combine; the first of each is the reference's.

    Attributes:
        pipelines: Pipelines.
        backends: The names of backends; None for the placement by JAX and the arguments.
        precisions: Default precisions of products; None to leave them unchanged.
        op_by_op: Whether each variant also runs op by op.
    """

    pipelines: Sequence[Pipeline] = (Pipeline(),)
    backends: Sequence[str | None] = (None,)
    precisions: Sequence[str | None] = (None,)
    op_by_op: bool = False

    def require_backends(self) -> None:
        """Raise BackendError for a missing backend."""
        for name in self.backends:
            if name is not None:
                devices.device(name)


@dataclass(frozen=True, eq=False)
class Planned:
    """A variant and its derivation.

    Attributes:
        variant: The variant.
        target: The index of its original program.
        states: The program as traced, and after each pass that changed it, with the text of the
            pass.
        precision: The default precision of its products.
        seconds: The time that the passes took.
        keeps_checks: Whether no pass drops debug checks and prints.
    """

    variant: Variant
    target: int
    states: tuple[tuple[str, Program], ...]
    precision: str | None
    seconds: float = 0.0
    keeps_checks: bool = True

    def at_state(self, program: Program) -> Variant:
        """Return the variant with another program, with the precision applied."""
        return replace(self.variant, program=at_precision(program, self.precision))

    def at(self, shapes: Sequence[Sequence[Any]]) -> Planned:
        """Return the variant at the sizes of its arguments, if its program has symbols."""
        if not self.variant.program.symbols:
            return self
        program = self.variant.program.at(shapes)
        return replace(self, variant=replace(self.variant, program=program))


def programs_of(programs: Program | Sequence[Program]) -> list[Program]:
    """Return one or several programs as a list. Raises ArgumentsError for anything else."""
    found: list[Any] = list(programs) if isinstance(programs, list | tuple) else [programs]
    for each in found:
        require_program(each)
    return found


def several(values: Any) -> Sequence[Any]:
    """Return a sequence of values; a string, or a pipeline, is a single value."""
    return [values] if isinstance(values, str | Pipeline) else values


def pipelines_of(passes: str | Pipeline | Sequence[str | Pipeline]) -> list[Pipeline]:
    """Return pipelines from their texts."""
    return [Pipeline.parse(each) if isinstance(each, str) else each for each in several(passes)]


def inputs_from(programs: Sequence[Program], args: object) -> Callable[[Program], RunInputs]:
    """Return a function from a program to its inputs: the arguments of the first program.

    Args:
        programs: Programs as traced.
        args: The arguments, as a tuple, or as any pytree of the same leaves; None for none.

    Raises:
        ArgumentsError: If their number differs.
    """
    given: dict[str, Any] = {}
    if args is not None and programs:
        values = flat_arguments(programs[0], args)
        require_count(programs[0], values)
        given = dict(zip(programs[0].arg_names, values, strict=True))
    return lambda program: RunInputs(program, *refitted(program, given))


def planned(
    targets: Sequence[tuple[str, Program]], axes: Axes, on_progress: OnProgress = lambda doing: None
) -> list[Planned]:
    """Return all variants of some programs, the first one first.

    Args:
        targets: The programs with their names.
        axes: The options to combine.
        on_progress: Called with progress messages.

    Raises:
        PipelineError: If a pipeline returns several programs.
    """
    found: list[Planned] = []
    several = len(targets) > 1, len(axes.pipelines) > 1
    for (number, (name, traced)), pipeline in product(enumerate(targets), axes.pipelines):
        ran = _states(pipeline, traced, on_progress)
        like = with_contents(traced)
        states = [(text, with_contents(each, like)) for text, each in ran.found]
        parts = [name] if several[0] else []
        parts += [str(pipeline) or AS_TRACED] if several[1] else []
        for precision, platform in product(axes.precisions, axes.backends):
            for steps in (False, True) if axes.op_by_op else (False,):
                said = list(parts)
                said += [precision or "traced precision"] if len(axes.precisions) > 1 else []
                said += [platform or "default device"] if len(axes.backends) > 1 else []
                said += [("op by op" if steps else "compiled")] if axes.op_by_op else []
                program = at_precision(states[-1][1], precision)
                variant = Variant(
                    ", ".join(said) or str(pipeline) or name, program, platform, steps
                )
                found.append(
                    Planned(
                        variant, number, tuple(states), precision, ran.seconds, ran.keeps_checks
                    )
                )
    return _with_unique_names(found)


def _with_unique_names(found: Sequence[Planned]) -> list[Planned]:
    """Return variants with unique names."""
    names = [each.variant.name for each in found]
    if len(set(names)) == len(names):
        return list(found)
    return [
        replace(each, variant=replace(each.variant, name=f"{each.variant.name} ({i})"))
        for i, each in enumerate(found, 1)
    ]


def at_precision(program: Program, precision: str | None) -> Program:
    """Return a program with a default precision of products, if one is given."""
    return program if precision is None else with_precision(program, precision)


def _states(pipeline: Pipeline, traced: Program, on_progress: OnProgress) -> _States:
    """Run a pipeline, and return the program before it and after each pass that changed it."""
    states = _States(traced, on_progress)
    result = pipeline.run(traced, states)
    if isinstance(result, Programs):
        names = ", ".join(result)
        raise PipelineError(f"a variant is one program, but '{pipeline}' returns {names}")
    return states


class _States(Observer):
    """Records the program after each pass, and the time of all passes."""

    def __init__(self, traced: Program, on_progress: OnProgress):
        self.found, self.seconds, self.keeps_checks = [(AS_TRACED, traced)], 0.0, True
        self._on_progress = on_progress

    def before(self, step: Step, program: Program) -> None:
        self._on_progress(f"{step} on {program.name}")

    def after(
        self, step: Step, program: Program, result: Program | Programs, seconds: float
    ) -> None:
        self.seconds += seconds
        self.keeps_checks &= getattr(step.transform, "keeps_checks", True)
        if isinstance(result, Program) and result is not program:
            self.found.append((str(step), result))
