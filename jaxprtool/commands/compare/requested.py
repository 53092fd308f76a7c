"""Variants of programs: pipelines, precisions, backends, and op by op; and their verification."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any

import jax

from jaxprtool.api.targets import RunInputs
from jaxprtool.commands.compare.variants import OnProgress, Variant
from jaxprtool.commands.compare.verify import Runs, random_runs
from jaxprtool.errors import ArgumentsError, CheckError, PipelineError, did_you_mean
from jaxprtool.execute.running import backends as devices
from jaxprtool.execute.running.arrays import refitted
from jaxprtool.execute.running.run import (
    at_one_size,
    flat_arguments,
    require_count,
    require_runnable,
)
from jaxprtool.ir.conversions import with_contents
from jaxprtool.ir.program import Program, Programs, require_program
from jaxprtool.ir.rewrite import map_equations
from jaxprtool.ir.symbols import Sizes
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes import Observer, Pass, Pipeline, Step

# --- variants -------------------------------------------------------------------------------------
# Variants of programs: pipelines, precisions, backends, and op by op.

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
    program_list: list[Any] = list(programs) if isinstance(programs, list | tuple) else [programs]
    for program in program_list:
        require_program(program)
    return program_list


def several(values: Any) -> Sequence[Any]:
    """Return a sequence of values; a string, or a pipeline, is a single value."""
    return [values] if isinstance(values, str | Pipeline) else values


def pipelines_of(passes: str | Pipeline | Sequence[str | Pipeline]) -> list[Pipeline]:
    """Return pipelines from their texts."""
    return [
        Pipeline.parse(pipeline) if isinstance(pipeline, str) else pipeline
        for pipeline in several(passes)
    ]


def inputs_from(programs: Sequence[Program], args: object) -> Callable[[Program], RunInputs]:
    """Return a function from a program to its inputs: the arguments of the first program.

    Args:
        programs: Programs as traced.
        args: The arguments, as a tuple, or as any pytree of the same leaves; None for none.

    Raises:
        ArgumentsError: If their number differs.
    """
    for program in programs:
        require_program(program)
    arguments: dict[str, Any] = {}
    if args is not None and programs:
        values = flat_arguments(programs[0], args)
        require_count(programs[0], values)
        arguments = dict(zip(programs[0].arg_names, values, strict=True))
    return lambda program: RunInputs(program, *refitted(program, arguments))


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
    plan: list[Planned] = []
    several = len(targets) > 1, len(axes.pipelines) > 1
    for (number, (name, traced)), pipeline in product(enumerate(targets), axes.pipelines):
        ran = _states(pipeline, traced, on_progress)
        like = with_contents(traced)
        states = [(text, with_contents(state, like)) for text, state in ran.found]
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
                plan.append(
                    Planned(
                        variant, number, tuple(states), precision, ran.seconds, ran.keeps_checks
                    )
                )
    return _with_unique_names(plan)


def _with_unique_names(plan: Sequence[Planned]) -> list[Planned]:
    """Return variants with unique names."""
    names = [entry.variant.name for entry in plan]
    if len(set(names)) == len(names):
        return list(plan)
    return [
        replace(entry, variant=replace(entry.variant, name=f"{entry.variant.name} ({i})"))
        for i, entry in enumerate(plan, 1)
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


# --- matmul precision -----------------------------------------------------------------------------
# Set the precision of matrix products and convolutions that have none.

#: The valid precisions, as in `jax.default_matmul_precision`.
PRECISIONS = ("default", "high", "highest", "bfloat16", "tensorfloat32", "float32")


def with_precision(program: Program, name: str) -> Program:
    """Return a program in which products and convolutions without a precision have this one.

    The result is that of tracing under `jax.default_matmul_precision(name)`. Raises ArgumentsError
    for a name that is not in `PRECISIONS`.
    """
    if name not in PRECISIONS:
        raise ArgumentsError(
            f"unknown precision '{name}'",
            did_you_mean(name, PRECISIONS) or f"available: {', '.join(PRECISIONS)}",
        )
    precision: Any = jax.lax.Precision(name)

    def rule(eqn: JaxprEqn) -> list[JaxprEqn] | None:
        if eqn.params.get("precision", eqn) is not None:
            return None
        return [eqn.replace(params={**eqn.params, "precision": (precision, precision)})]

    return program.replace(jaxpr=map_equations(program.jaxpr, rule))


# --- verification ---------------------------------------------------------------------------------
# Verification of a pipeline: compares the results of the programs before and after each pass.
#
# The programs are run after all passes are done, so that errors of passes are reported first.


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
        values: Mapping[str, object],
        sizes: Sizes = MappingProxyType({}),
        on_progress: Callable[[str], object] = lambda doing: None,
    ) -> Verified:
        """Compare the programs after the pipeline is done, and return the outcome.

        Args:
            values: Arguments by name. One that is only a type, was added by a pass, or whose shape
                a pass changed, is filled with random values.
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
                runs = random_runs(program, values)
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
        nonfinite, elements = (sum(count[i] for count in counts.values()) for i in (0, 1))
        return Verified(len(self._compared), len(self._made), tuple(unproven), nonfinite, elements)

    def _leave(self, step: Step, why: str) -> None:
        if id(step) not in self._left:
            self._left.add(id(step))
            self._note(f"pass '{step}' is not compared: {why}")
