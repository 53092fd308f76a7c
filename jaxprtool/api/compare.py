"""`compare`: variants of a program on the same inputs.

    found = jaxprtool.compare(program, (params, batch), passes=["", "-O2"])
    found.within, found.variants[1].results[0].absolute

Variants are programs x pipelines x precisions x backends x compiled or op by op. The first is the
reference that the others are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from jaxprtool.api.bisect import Bisection
from jaxprtool.api.isolated import IsolatedRunner
from jaxprtool.api.targets import Given
from jaxprtool.errors import ArgumentsError, JaxprToolError, PipelineError
from jaxprtool.execute import backends as devices
from jaxprtool.execute.compare.bisection import Parting
from jaxprtool.execute.compare.measures import Tolerance
from jaxprtool.execute.compare.trials import described, scaled, shrunk
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
from jaxprtool.ir.quantities import plural
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
        arguments: The flat arguments that the results are for.
        smallest: Of trials that have failed, the arguments that were made smaller, in words.
    """

    name: str
    reference: str
    inputs: str
    random: tuple[str, ...]
    variants: tuple[Compared, ...]
    error: str = ""
    partings: tuple[Parting, ...] = ()
    arguments: tuple[Any, ...] = field(default=(), repr=False, compare=False)
    smallest: tuple[tuple[str, str], ...] = ()

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
    isolate: bool = False,
    trials: int = 1,
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
        isolate: Whether each variant runs in a process of its own, so that a compiler that crashes
            takes no more than that with it. What is searched with `bisect` runs in this one.
        trials: How many random inputs to try. The first for which a variant is not within tolerance
            is made as small as it can be, and what is returned is for that one.

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
    return comparison(plan, inputs, Tolerance(rtol, atol), Checks(seed, trials, bisect, isolate))


@dataclass(frozen=True)
class Checks:
    """What is done with variants.

    Attributes:
        seed: Of random inputs.
        trials: How many of them are tried.
        bisect: Whether it is searched where variants part.
        isolate: Whether each runs in a process of its own.
    """

    seed: int = 0
    trials: int = 1
    bisect: bool = False
    isolate: bool = False


def comparison(
    plan: Sequence[Planned],
    inputs: Callable[[Program], Given],
    tolerance: Tolerance,
    checks: Checks,
    told: Told = lambda doing: None,
) -> Comparison:
    """Return what the variants of a plan give; `inputs` says what a program is run on."""
    given = inputs(plan[0].variant.program)
    filled = fill(given.program, given.values, checks.seed)
    shapes = [getattr(value, "shape", ()) for value in filled.arguments]
    several = _Variants([_at(each, shapes) for each in plan], tolerance, checks, told)
    several.require_same_types(filled.arguments)
    count = len(filled.arguments)
    text = _inputs(count, filled.random, checks.seed)
    found = Comparison(given.program.name, plan[0].variant.name, text, filled.random, ())
    if checks.trials == 1:
        return several.completed(found, filled.arguments)
    if not filled.random:
        message = f"no argument of {given.program.name} is random, so that there is but one trial"
        raise ArgumentsError(message, "give some by type alone: f32[8,3]")
    free = [name in filled.random for name in given.program.arg_names]
    for trial in range(checks.trials):
        told(f"trial {trial + 1} of {checks.trials}")
        values = fill(given.program, given.values, checks.seed + trial).arguments
        arguments = scaled(values, free, trial)
        tried = several.completed(found, arguments, bisect=False)
        if not tried.within:
            return several.smallest(tried, arguments, free, trial)
    return replace(tried, inputs=f"{checks.trials} random inputs; shown is the last")


class _Variants:
    """Variants that run on any inputs, each compiled once."""

    def __init__(
        self, plan: Sequence[Planned], tolerance: Tolerance, checks: Checks, told: Told
    ) -> None:
        self._reference, *self._others = plan
        self._tolerance, self._checks, self._told = tolerance, checks, told
        if checks.isolate and checks.trials > 1:
            raise ArgumentsError("several trials run in one process, and so none is isolated")
        runner = IsolatedRunner if checks.isolate else Runner
        self._runners = {each.variant.name: runner(each.variant, told) for each in plan}

    def require_same_types(self, arguments: Sequence[Any]) -> None:
        """Raise ArgumentsError if a variant takes or gives something else than the reference."""
        for each in self._others:
            arguments_of(each.variant, self._reference.variant.program, arguments)

    def completed(
        self, found: Comparison, arguments: Sequence[Any], bisect: bool = True
    ) -> Comparison:
        """Return a comparison with what the variants give, and where they part if asked for."""
        first = self._reference.variant
        found = replace(found, arguments=tuple(arguments))
        try:
            results = self._runners[first.name](arguments)
        except JaxprToolError as error:
            return replace(found, error=error.message)
        variants = tuple(self._compared(each, results, arguments) for each in self._others)
        partings: tuple[Parting, ...] = ()
        if bisect and self._checks.bisect:
            search = Bisection(self._reference, arguments, results, self._tolerance, self._told)
            partings = tuple(
                search.of(each, done.values)
                for each, done in zip(self._others, variants, strict=True)
                if not (done.within or done.error)
            )
        return replace(found, variants=variants, partings=partings)

    def _compared(
        self, planned: Planned, results: Sequence[Any], arguments: Sequence[Any]
    ) -> Compared:
        variant = planned.variant
        values = arguments_of(variant, self._reference.variant.program, arguments)
        run = partial(self._runners[variant.name], values)
        return compared(variant, results, run, self._tolerance)

    def smallest(
        self, tried: Comparison, arguments: Sequence[Any], free: Sequence[bool], trial: int
    ) -> Comparison:
        """Return the comparison on a smaller input, for which the same variant fails."""
        bad = next((i for i, each in enumerate(tried.variants) if not each.within), None)

        def fails(values: Sequence[Any]) -> bool:
            if bad is None:
                return bool(self.completed(tried, values, bisect=False).error)
            try:
                results = self._runners[self._reference.variant.name](values)
            except JaxprToolError:
                return False
            return not self._compared(self._others[bad], results, values).within

        self._told("looking for a smaller input")
        values, count = shrunk(arguments, free, fails)
        names = self._reference.variant.program.arg_names
        text = (
            f"the input of trial {trial + 1} of {self._checks.trials}, "
            f"made smaller by {plural(count, 'run')}"
        )
        said = [
            (name, described(value))
            for name, value, is_free in zip(names, values, free, strict=True)
            if is_free
        ]
        found = replace(tried, inputs=text, smallest=tuple(said))
        return self.completed(found, values)


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
