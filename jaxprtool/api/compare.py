"""`compare`: variants of a program on the same inputs.

    found = jaxprtool.compare(program, (params, batch), passes=["", "-O2"])
    found.within, found.variants[1].results[0].absolute

Variants are programs x pipelines x precisions x backends x compiled or op by op. The first is the
reference that the others are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from jaxprtool.api.bisect import Bisection
from jaxprtool.api.targets import Given
from jaxprtool.errors import ArgumentsError, JaxprToolError, PipelineError
from jaxprtool.execute import backends as devices
from jaxprtool.execute.compare.bisection import Parting
from jaxprtool.execute.compare.measures import Tolerance
from jaxprtool.execute.compare.variants import (
    Compared,
    Runner,
    Told,
    Variant,
    arguments_of,
    compared,
)
from jaxprtool.execute.fill import fill, refitted
from jaxprtool.execute.verify import flat_arguments
from jaxprtool.ir.precision import with_precision
from jaxprtool.ir.program import Program, Programs
from jaxprtool.passes.pipeline import Observer, Pipeline, Step

#: What the variant is called that no pass has changed.
AS_TRACED = "as traced"


@dataclass(frozen=True)
class Comparison:
    """What variants of a program gave on the same inputs.

    Attributes:
        name: The program.
        reference: The variant that the others are compared with.
        inputs: What the inputs are, in words.
        random: The names of the arguments that are random.
        variants: The others, each with how its results differ.
        error: Why the reference has no results, and so nothing could be compared, or "".
        partings: Where those that are not within tolerance part from the reference, if asked for.
    """

    name: str
    reference: str
    inputs: str
    random: tuple[str, ...]
    variants: tuple[Compared, ...]
    error: str = ""
    partings: tuple[Parting, ...] = ()

    @property
    def within(self) -> bool:
        """Whether all ran, and all results are within tolerance."""
        return not self.error and all(each.within for each in self.variants)


@dataclass(frozen=True)
class Axes:
    """What variants are made of; of each the first is that of the reference.

    Attributes:
        pipelines: Pipelines.
        backends: The names of backends; None is where JAX and the arguments have it.
        precisions: What products are told that name no precision; None is nothing.
        op_by_op: Whether each variant runs op by op, too.
    """

    pipelines: Sequence[Pipeline] = (Pipeline(),)
    backends: Sequence[str | None] = (None,)
    precisions: Sequence[str | None] = (None,)
    op_by_op: bool = False

    def require_backends(self) -> None:
        """Raise BackendError for a backend that is not there."""
        for name in self.backends:
            if name is not None:
                devices.device(name)


@dataclass(frozen=True, eq=False)
class Planned:
    """A variant, and how it came to be.

    Attributes:
        variant: The variant.
        target: The number of the program that it is made of.
        states: The program as it was traced, and after each pass that has changed it, with what
            that is called.
        precision: What its products are told that name no precision.
    """

    variant: Variant
    target: int
    states: tuple[tuple[str, Program], ...]
    precision: str | None

    def at_state(self, program: Program) -> Variant:
        """Return the variant with another program, which is told of the precision too."""
        return replace(self.variant, program=told_precision(program, self.precision))


def compare(
    programs: Program | Sequence[Program],
    args: object = None,
    *,
    passes: Sequence[str | Pipeline] = ("",),
    backends: Sequence[str | None] = (None,),
    precisions: Sequence[str | None] = (None,),
    op_by_op: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    bisect: bool = False,
) -> Comparison:
    """Run variants on the same inputs, and return how their results differ from the first's.

    Args:
        programs: A `Program`, or several.
        args: The arguments of the first, as a tuple, or as any pytree of the same leaves; random
            values if None.
        passes: Pipelines: `["", "-O2"]`.
        backends: Backends: `["cpu", "gpu"]`.
        precisions: What matrix products and convolutions are told that name no precision, as
            `jax.default_matmul_precision` is.
        op_by_op: Whether each variant also runs op by op, so that nothing is fused.
        rtol: The relative error that is tolerated; if not given, what JAX's own tests tolerate of
            the dtype.
        atol: The absolute error; the same.
        seed: Of random values.
        bisect: Whether to search for the pass and the equation at which variants part.

    Raises:
        ArgumentsError: If the arguments do not fit, or two programs take or give others.
        PipelineError: If a pipeline gives several programs.
        BackendError: If this machine does not have a backend.
    """
    traced = [programs] if isinstance(programs, Program) else list(programs)
    pipelines = [Pipeline.parse(each) if isinstance(each, str) else each for each in passes]
    axes = Axes(pipelines, backends, precisions, op_by_op)
    axes.require_backends()
    given: dict[str, Any] = {}
    if args is not None and traced:
        given = dict(zip(traced[0].arg_names, flat_arguments(traced[0], args), strict=True))

    def inputs(program: Program) -> Given:
        return Given(program, *refitted(program, given))

    plan = planned([(each.name, each) for each in traced], axes)
    return comparison(plan, inputs, Tolerance(rtol, atol), seed, bisect)


def comparison(
    plan: Sequence[Planned],
    inputs: Callable[[Program], Given],
    tolerance: Tolerance,
    seed: int = 0,
    bisect: bool = False,
    told: Told = lambda doing: None,
) -> Comparison:
    """Return what the variants of a plan give; `inputs` says what a program is run on."""
    given = inputs(plan[0].variant.program)
    filled = fill(given.program, given.values, seed)
    shapes = [getattr(value, "shape", ()) for value in filled.arguments]
    reference, *others = (_at(each, shapes) for each in plan)
    first = reference.variant
    pairs = [(each, arguments_of(each.variant, first.program, filled.arguments)) for each in others]
    text = _inputs(len(filled.arguments), filled.random, seed)
    found = Comparison(first.program.name, first.name, text, filled.random, ())
    try:
        results = Runner(first, told)(filled.arguments)
    except JaxprToolError as error:
        return replace(found, error=error.message)
    variants = tuple(
        compared(each.variant, results, partial(Runner(each.variant, told), values), tolerance)
        for each, values in pairs
    )
    partings: tuple[Parting, ...] = ()
    if bisect:
        search = Bisection(reference, filled.arguments, results, tolerance, told)
        partings = tuple(
            search.of(each, done.values)
            for each, done in zip(others, variants, strict=True)
            if not (done.within or done.error)
        )
    return replace(found, variants=variants, partings=partings)


def _at(planned: Planned, shapes: Sequence[Sequence[Any]]) -> Planned:
    """Return a variant at the sizes of some arguments, if its program has symbols."""
    variant = planned.variant
    if not variant.program.symbols:
        return planned
    return replace(planned, variant=replace(variant, program=variant.program.at(shapes)))


def _inputs(count: int, random: Sequence[str], seed: int) -> str:
    if not random:
        return "the values given" if count else "no inputs"
    if len(random) == count:
        return f"random values, seed {seed}"
    return f"the values given, {len(random)} of {count} of them random, seed {seed}"


# --- which variants there are ---------------------------------------------------------------------


def planned(
    targets: Sequence[tuple[str, Program]], axes: Axes, told: Told = lambda doing: None
) -> list[Planned]:
    """Return all variants of some programs, the reference first.

    Args:
        targets: What each program is called, and the program.
        axes: What is done with each.
        told: Is told what is done.

    Raises:
        ArgumentsError: If there is but one.
        PipelineError: If a pipeline gives several programs.
    """
    found: list[Planned] = []
    several = len(targets) > 1, len(axes.pipelines) > 1
    for (number, (name, traced)), pipeline in product(enumerate(targets), axes.pipelines):
        states = _states(pipeline, traced, told)
        parts = [name] if several[0] else []
        parts += [str(pipeline) or AS_TRACED] if several[1] else []
        for precision, platform in product(axes.precisions, axes.backends):
            for steps in (False, True) if axes.op_by_op else (False,):
                said = list(parts)
                said += [precision or "its own precision"] if len(axes.precisions) > 1 else []
                said += [platform or "its own device"] if len(axes.backends) > 1 else []
                said += [("op by op" if steps else "compiled")] if axes.op_by_op else []
                program = told_precision(states[-1][1], precision)
                variant = Variant(", ".join(said), program, platform, steps)
                found.append(Planned(variant, number, tuple(states), precision))
    if len(found) < 2:
        raise ArgumentsError(
            "there is but one variant, and nothing to compare it with",
            'say what differs: -p "" -p "-O2", --backends cpu,gpu, --op-by-op, another TARGET',
        )
    return _named_apart(found)


def _named_apart(found: Sequence[Planned]) -> list[Planned]:
    """Return variants whose names are all different."""
    names = [each.variant.name for each in found]
    if len(set(names)) == len(names):
        return list(found)
    return [
        replace(each, variant=replace(each.variant, name=f"{each.variant.name} ({i})"))
        for i, each in enumerate(found, 1)
    ]


def told_precision(program: Program, precision: str | None) -> Program:
    """Return a program whose products are told a precision, if there is one to be told."""
    return program if precision is None else with_precision(program, precision)


def _states(pipeline: Pipeline, traced: Program, told: Told) -> list[tuple[str, Program]]:
    """Return a program, and what it is after each pass that has changed it."""
    states = _States(traced, told)
    result = pipeline.run(traced, states)
    if isinstance(result, Programs):
        names = ", ".join(result)
        raise PipelineError(f"compare takes one program, and '{pipeline}' gives {names}")
    return states.found


class _States(Observer):
    """Notes the programs that there are after each pass."""

    def __init__(self, traced: Program, told: Told):
        self.found = [(AS_TRACED, traced)]
        self._told = told

    def before(self, step: Step, program: Program) -> None:
        self._told(f"{step} on {program.name}")

    def after(
        self, step: Step, program: Program, result: Program | Programs, seconds: float
    ) -> None:
        if isinstance(result, Program) and result is not program:
            self.found.append((str(step), result))
