"""`bench`: measured times of variants of a program on the same inputs.

    found = jaxprtool.bench(program, (params, batch), passes=["", "-O2"], precision=0.02)
    found.variants[1].median_seconds, found.ratios[0].ratio, found.ratios[0].differs

Variants are all combinations of programs and pipelines. They take turns (`commands.bench.turns`),
and each is compared with the first one, round by round (`commands.bench.turns`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from jaxprtool.api.targets import RunInputs
from jaxprtool.commands.bench.turns import (
    LEAST,
    Bench,
    BenchedVariant,
    Ratio,
    RoundLimits,
    Turns,
    TurnsHere,
    VariantStart,
    intervals,
    isolated_turns,
    median_interval,
    rounds,
    this_machine,
)
from jaxprtool.commands.compare.requested import (
    Axes,
    Planned,
    inputs_from,
    pipelines_of,
    planned,
    programs_of,
)
from jaxprtool.commands.compare.variants import OnProgress, Variant, taken_by
from jaxprtool.commands.memory.estimate import memory
from jaxprtool.errors import ArgumentsError, UnsupportedError
from jaxprtool.execute.running.arrays import fill_arguments
from jaxprtool.execute.running.backends import compiled_afresh
from jaxprtool.execute.running.run import has_effects
from jaxprtool.ir.equations import type_of
from jaxprtool.ir.process import OtherPrograms
from jaxprtool.ir.program import Program
from jaxprtool.passes.framework import Pipeline


def bench(
    programs: Program | Sequence[Program],
    args: object = None,
    *,
    passes: str | Pipeline | Sequence[str | Pipeline] = ("",),
    backend: str | None = None,
    repeat: int | None = None,
    precision: float | None = None,
    isolate: bool = False,
    seed: int = 0,
) -> Bench:
    """Measure the time of a call of variants, and their ratios to the first one.

    In each round, every variant is called once, in random order. A time is the median over rounds.
    A ratio is the median of the ratios of each round, with the 95% confidence interval of the sign
    test, which is exact for any distribution, as in `scipy.stats.quantile_test`.

    Args:
        programs: A `Program`, or several that take the same arguments.
        args: The arguments of the first, as a tuple, or as any pytree of the same leaves; None for
            random values.
        passes: Pipelines: `["", "-O2"]`.
        backend: The backend to run on.
        repeat: The number of rounds, or with `precision` the maximum. By default 50, or with
            `precision` 2000, or as many as take a minute.
        precision: The half width of the intervals to reach, relative to the ratio: 0.02.
        isolate: Whether each variant takes its turns in its own process.
        seed: The seed of random values.

    Raises:
        ArgumentsError: If the arguments do not fit, the programs take different arguments, there
            are too few rounds, or the precision is not between 0 and 1.
        PipelineError: If a pipeline returns several programs.
        BackendError: If this machine lacks the backend, or cannot run a variant.
        UnsupportedError: If a variant cannot be compiled, crashes in its own process, or has
            effects and `repeat` is not given.
    """
    traced = programs_of(programs)
    axes = Axes(pipelines_of(passes), (backend,))
    axes.require_backends()
    limits = RoundLimits(repeat, precision)
    require_limits(limits)
    plan = planned([(program.name, program) for program in traced], axes)
    options = Options(limits, isolate, seed)
    return benched(plan, inputs_from(traced, args), [None] * len(traced), options)


def require_limits(limits: RoundLimits) -> None:
    """Raise ArgumentsError for invalid limits."""
    if limits.rounds is not None and limits.rounds < LEAST:
        raise ArgumentsError(
            f"{limits.rounds} rounds are too few for a 95% interval", f"at least {LEAST} are needed"
        )
    if limits.precision is not None and not 0 < limits.precision < 1:
        raise ArgumentsError(f"the precision must be between 0 and 1, not {limits.precision}")


@dataclass(frozen=True)
class Options:
    """Options of the measurement.

    Attributes:
        limits: The limits of the number of rounds.
        isolate: Whether each variant takes its turns in its own process.
        seed: The seed of random inputs.
    """

    limits: RoundLimits
    isolate: bool = False
    seed: int = 0


def benched(
    plan: Sequence[Planned],
    inputs: Callable[[Program], RunInputs],
    trace_seconds: Sequence[float | None],
    options: Options,
    on_progress: OnProgress = lambda doing: None,
) -> Bench:
    """Return the times of planned variants.

    Args:
        plan: The variants.
        inputs: Returns the inputs of the first one's program.
        trace_seconds: The time of tracing each target, if known.
        options: Options of the measurement.
        on_progress: Called with progress messages.

    Raises:
        ArgumentsError, PipelineError, BackendError, UnsupportedError: As `bench`.
    """
    run_inputs = inputs(plan[0].variant.program)
    filled = fill_arguments(run_inputs.program, run_inputs.values, options.seed)
    shapes = [getattr(value, "shape", ()) for value in filled.arguments]
    plan = [entry.at(shapes) for entry in plan]
    variants, reference = [entry.variant for entry in plan], plan[0].variant.program
    arguments = [taken_by(variant, reference, filled.arguments) for variant in variants]
    _require_effects_wanted(variants, options.limits)
    with compiled_afresh(), _turns(variants, arguments, options.isolate, on_progress) as turns:
        starts = [turn.start() for turn in turns]
        others = OtherPrograms()
        times = rounds(turns, options.limits, on_progress)
        other_cpus = others.cpus()
    parts = [
        _variant(entry, trace_seconds[entry.target], start, seconds)
        for entry, start, seconds in zip(plan, starts, times, strict=True)
    ]
    estimates = intervals(times)
    return Bench(
        name=run_inputs.program.name,
        arguments=tuple(f"{name}: {type_of(aval)}" for name, aval in reference.arguments),
        inputs=filled.described(options.seed),
        random=filled.random,
        devices=starts[0].devices,
        machine=this_machine(starts[0].kinds),
        isolated=options.isolate,
        rounds=len(times[0]),
        precision=max(estimate.precision for estimate in estimates),
        wanted_precision=options.limits.precision,
        variants=tuple(parts),
        ratios=tuple(
            Ratio(part.name, parts[0].name, ratio.median, ratio.low, ratio.high)
            for part, ratio in zip(parts[1:], estimates, strict=False)
        ),
        other_cpus=other_cpus,
    )


def _variant(
    planned: Planned, trace_seconds: float | None, start: VariantStart, seconds: Sequence[float]
) -> BenchedVariant:
    time = median_interval(seconds)
    return BenchedVariant(
        name=planned.variant.name,
        median_seconds=time.median,
        low_seconds=time.low,
        high_seconds=time.high,
        trace_seconds=trace_seconds,
        passes_seconds=planned.seconds,
        lower_seconds=start.lower,
        compile_seconds=start.compile,
        first_call_seconds=start.first_call,
        memory=start.memory,
        estimated_temporary_bytes=memory(planned.variant.program).temporary_bytes,
        calls=start.calls,
        seconds=tuple(seconds),
    )


def _require_effects_wanted(variants: Sequence[Variant], limits: RoundLimits) -> None:
    """Raise UnsupportedError if a variant has effects, and no number of rounds is given."""
    for variant in variants:
        if limits.rounds is None and has_effects(variant.program):
            raise UnsupportedError(
                f"{variant.name} has effects, which every call would repeat",
                "--repeat N calls it N times after the first call",
            )


@contextmanager
def _turns(
    variants: Sequence[Variant],
    arguments: Sequence[Sequence[object]],
    isolate: bool,
    on_progress: OnProgress,
) -> Iterator[list[Turns]]:
    """Yield variants that take turns, here or each in its own process."""
    pairs = list(zip(variants, arguments, strict=True))
    if not isolate:
        yield [TurnsHere(*pair, on_progress) for pair in pairs]
        return
    with ExitStack() as stack:
        yield [stack.enter_context(isolated_turns(*pair, on_progress)) for pair in pairs]
