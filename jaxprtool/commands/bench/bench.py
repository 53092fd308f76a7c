"""`bench`: measured times of variants of a program on the same inputs.

    found = jaxprtool.bench(program, (params, batch), passes=["", "-O2"], precision=0.02)
    found.variants[1].median_seconds, found.ratios[0].ratio, found.ratios[0].differs

Variants are all combinations of programs and pipelines. They take turns, and each is compared with
the first one, round by round.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from math import ceil
from typing import Any, Protocol

import jax
import numpy as np

from jaxprtool.api.targets import RunInputs
from jaxprtool.commands.compare.requested import (
    Axes,
    Planned,
    inputs_from,
    pipelines_of,
    planned,
    programs_of,
)
from jaxprtool.commands.compare.variants import OnProgress, Variant, received, sent, taken_by
from jaxprtool.commands.memory.estimate import memory
from jaxprtool.errors import ArgumentsError, UnsupportedError
from jaxprtool.execute.calls import PythonProcess, python_process
from jaxprtool.execute.running.arrays import fill_arguments
from jaxprtool.execute.running.backends import compiled_afresh
from jaxprtool.execute.running.run import (
    Compiled,
    CompiledMemory,
    arguments_placed,
    choose_device,
    compiled_program,
    devices_of,
    failures_reported,
    has_effects,
    require_runnable,
)
from jaxprtool.files import opened_plain
from jaxprtool.ir.documents import Printed, document
from jaxprtool.ir.dtypes import as_array
from jaxprtool.ir.equations import type_of
from jaxprtool.ir.process import OtherPrograms, without_collector
from jaxprtool.ir.program import Program
from jaxprtool.passes import Pipeline


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
    with compiled_afresh(), _in_turns(variants, arguments, options.isolate, on_progress) as turns:
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
def _in_turns(
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


# --- turns ----------------------------------------------------------------------------------------
# Variants of a program that take turns, each one compiled once.
#
#     shared machine    A B | B A | A B | B A | …    rounds; the order in each is random
#
# A turn begins with an untimed call, which brings the variant's data and code back into the caches.
# Short calls are timed in batches, so that the resolution of the clock does not matter. The time of
# a turn is the median of its batches.

#: The duration of a batch of calls, and of a turn, in seconds. A single call may take longer.
_AT_ONCE, _TURN = 2e-4, 5e-3

#: The maximum seconds and number of calls to find the size of a batch.
_TRIED, _MOST_TRIED = 5e-2, 100

#: The default number of rounds, and the default maximum with a precision.
ROUNDS, MOST_ROUNDS = 50, 2000

#: The seconds after which no further round begins, unless the number of rounds is given.
MOST_SECONDS = 60.0

#: The number of rounds between checks of the precision.
_LOOK = 10


@dataclass(frozen=True)
class VariantStart:
    """The compilation and the first call of a variant.

    Attributes:
        devices: The devices that it ran on.
        kinds: Their models.
        lower: The seconds of lowering; None under `jax_disable_jit`.
        compile: The seconds of compiling; None under `jax_disable_jit`.
        first_call: The seconds of the first call.
        memory: Its memory; None if the backend does not report it.
        calls: The number of calls in a batch.
    """

    devices: tuple[str, ...]
    kinds: str
    lower: float | None
    compile: float | None
    first_call: float
    memory: CompiledMemory | None
    calls: int


class Turns(Protocol):
    """A variant that takes turns, in this process or in another."""

    def start(self) -> VariantStart:
        """Compile it, and call it for the first time."""
        ...

    def turn(self) -> float:
        """Return the seconds of a call."""
        ...


class TurnsHere:
    """A variant that takes turns in this process. With effects, a turn is a single call."""

    def __init__(
        self,
        variant: Variant,
        arguments: Sequence[Any],
        on_progress: OnProgress = lambda doing: None,
    ):
        require_runnable(variant.program)
        self._variant, self._on_progress = variant, on_progress
        self._once = has_effects(variant.program)
        self._arguments: Sequence[Any] = list(map(as_array, arguments))
        self._device = choose_device(variant.program, variant.platform, None)
        self._calls = self._times = 1

    def start(self) -> VariantStart:
        program = self._variant.program
        with arguments_placed(program, self._arguments, self._device) as (there, device):
            self._arguments = there
            self._made: Compiled = compiled_program(program, there, self._on_progress)
            self._on_progress(f"running {self._variant.name}")
            with failures_reported(program):
                first, outs = self._made.first_call(there)
                if not self._once:
                    self._calibrate(self._fastest(there))
        devices, compilation = devices_of(outs, device), self._made
        return VariantStart(
            devices=tuple(map(str, devices)),
            kinds=", ".join(dict.fromkeys(device.device_kind for device in devices)),
            lower=compilation.lower,
            compile=compilation.compile,
            first_call=first,
            memory=compilation.memory,
            calls=self._calls,
        )

    def _fastest(self, there: Sequence[Any]) -> float:
        """Return the seconds of the fastest of several calls, which nothing has interrupted."""
        seconds = [self._made.seconds(there)]
        while len(seconds) < _MOST_TRIED and sum(seconds) < _TRIED:
            seconds.append(self._made.seconds(there))
        return min(seconds)

    def _calibrate(self, seconds: float) -> None:
        self._calls = min(ceil(_AT_ONCE / seconds), self._made.form.most(self._arguments))
        self._times = max(1, int(_TURN / (self._calls * seconds)))

    def turn(self) -> float:
        program = self._variant.program
        with (
            arguments_placed(program, self._arguments, self._device) as (there, _),
            failures_reported(program),
            without_collector(),
        ):
            if not self._once:
                self._made.seconds(there)
            timed = [self._made.seconds(there, self._calls) for _ in range(self._times)]
        return statistics.median(timed) / self._calls


#: The first process would take most of a GPU's memory, which all of them use.
_SHARED_MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


@contextmanager
def isolated_turns(
    variant: Variant, arguments: Sequence[Any], on_progress: OnProgress = lambda doing: None
) -> Iterator[IsolatedTurns]:
    """Start to compile a variant in a process, which ends with the `with` block.

    Raises UnsupportedError if the program cannot be written to a file.
    """
    environment = {**_SHARED_MEMORY, **os.environ}
    with python_process(f"{variant.name} crashed", environment) as process:
        process.begin(_turns, *sent(process, variant, arguments))
        yield IsolatedTurns(variant.name, process, on_progress)


class IsolatedTurns:
    """A variant in another process, which may crash."""

    def __init__(self, name: str, process: PythonProcess, on_progress: OnProgress):
        self._name, self._process, self._on_progress = name, process, on_progress

    def start(self) -> VariantStart:
        """Wait until it is compiled.

        Raises the errors of `run`, and UnsupportedError if the process crashes.
        """
        self._on_progress(f"compiling {self._name} in its own process")
        start: VariantStart = self._process.result()
        return start

    def turn(self) -> float:
        return float(self._process.next())


def _turns(*request: Any) -> Iterator[VariantStart | float]:
    """Yield the compilation of a variant, and then the seconds of each call."""
    turns = TurnsHere(*received(*request))
    with compiled_afresh():
        start = turns.start()
    yield start
    while True:
        yield turns.turn()


@dataclass(frozen=True)
class RoundLimits:
    """The limits of the number of rounds.

    Attributes:
        rounds: The number of rounds, or with a precision the maximum; None for the default.
        precision: The relative half width of all intervals to reach, or None.
    """

    rounds: int | None = None
    precision: float | None = None

    @property
    def most(self) -> int:
        """The maximum number of rounds."""
        return self.rounds or (ROUNDS if self.precision is None else MOST_ROUNDS)

    def reached(self, times: Sequence[Sequence[float]]) -> bool:
        """Return True if a precision is set, and all intervals have it."""
        if self.precision is None or len(times[0]) % _LOOK:
            return False
        return all(interval.precision <= self.precision for interval in intervals(times))


def intervals(times: Sequence[Sequence[float]]) -> list[Interval]:
    """Return the ratios to the first variant; of a single one, its time."""
    first, *others = times
    return [paired_ratio(other, first) for other in others] or [median_interval(first)]


def rounds(
    variants: Sequence[Turns], limits: RoundLimits, on_progress: Callable[[str], object]
) -> list[list[float]]:
    """Return the seconds of a call of each variant in each round."""
    order, shuffled = list(range(len(variants))), random.Random(0)
    times: list[list[float]] = [[] for _ in variants]
    begin = time.monotonic()
    for number in range(limits.most):
        late = limits.rounds is None and time.monotonic() - begin > MOST_SECONDS
        if number >= LEAST and (late or limits.reached(times)):
            break
        on_progress(f"round {number + 1} of {limits.most}")
        shuffled.shuffle(order)
        for i in order:
            times[i].append(variants[i].turn())
    return times


# --- measured -------------------------------------------------------------------------------------
# The results of `bench`: the times and the memory of variants, and their ratios.


@document(optional=("memory",))
@dataclass(frozen=True)
class BenchedVariant:
    """The times and the memory of a variant.

    Attributes:
        name: Its name: `-O2`.
        median_seconds: The median time of a call, until its results are ready.
        low_seconds: The low end of its confidence interval.
        high_seconds: The high end.
        trace_seconds: The time of tracing; None if it was traced elsewhere.
        passes_seconds: The time of the passes.
        lower_seconds: The time of lowering; None under `jax_disable_jit`.
        compile_seconds: The time of compiling, without a cache; None under `jax_disable_jit`.
        first_call_seconds: The time of the first call.
        memory: The memory of the compiled program; None if the backend does not report it.
        estimated_temporary_bytes: The estimate of its temporary memory, as by `memory`.
        calls: The number of calls in a timed batch.
        seconds: The time of a call in each round.
    """

    name: str
    median_seconds: float
    low_seconds: float
    high_seconds: float
    trace_seconds: float | None
    passes_seconds: float
    lower_seconds: float | None
    compile_seconds: float | None
    first_call_seconds: float
    memory: CompiledMemory | None
    estimated_temporary_bytes: int
    calls: int
    seconds: tuple[float, ...]

    @property
    def interval(self) -> Interval:
        """The time of a call, with its interval."""
        return Interval(self.median_seconds, self.low_seconds, self.high_seconds)


@document(also=("differs",))
@dataclass(frozen=True)
class Ratio:
    """The time of a call of a variant, divided by that of another.

    Attributes:
        of: The name of the variant.
        to: The name of the other: the first variant, or the same variant in a baseline.
        ratio: The ratio; below 1 if the variant is faster.
        low: The low end of its 95% confidence interval.
        high: The high end.
    """

    of: str
    to: str
    ratio: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """Whether a difference is seen: the interval does not contain 1."""
        return not self.low <= 1 <= self.high

    @property
    def interval(self) -> Interval:
        """The ratio, with its interval."""
        return Interval(self.ratio, self.low, self.high)


@dataclass(frozen=True)
class Machine:
    """Where times were measured.

    Attributes:
        processor: The model of the processor, and the number of its cores.
        devices: The models of the devices that the variants ran on.
        jax: The release of JAX.
    """

    processor: str
    devices: str
    jax: str


@dataclass(frozen=True)
class BaselineRatios:
    """Times divided by those of an earlier run.

    Attributes:
        file: The file of the earlier run.
        mismatches: The differences in the machine and the release of JAX, one line each.
        missing: The variants that the earlier run does not have.
        ratios: The ratio of each other variant to its time in the earlier run.
    """

    file: str
    mismatches: tuple[str, ...]
    missing: tuple[str, ...]
    ratios: tuple[Ratio, ...]


@document(optional=("other_cpus", "baseline"))
@dataclass(frozen=True)
class Bench(Printed):
    """The times of variants of a program on the same inputs.

    Attributes:
        name: The name of the program.
        arguments: The name and type of each argument.
        inputs: A description of the inputs.
        random: The names of the arguments that are random.
        devices: The devices that the variants ran on.
        machine: The machine, and the release of JAX.
        isolated: Whether each variant had its own process.
        rounds: The number of rounds; in each, every variant took a turn.
        precision: The largest relative half width of a ratio's interval, or of a single time's.
        wanted_precision: The requested precision, or None.
        variants: The variants.
        ratios: The ratio of each variant after the first to the first.
        other_cpus: The mean number of CPUs that other programs kept busy during the rounds; None if
            the system does not say, or the rounds were too short.
        baseline: The ratios to an earlier run, if one was given.
    """

    name: str
    arguments: tuple[str, ...]
    inputs: str
    random: tuple[str, ...]
    devices: tuple[str, ...]
    machine: Machine
    isolated: bool
    rounds: int
    precision: float
    wanted_precision: float | None
    variants: tuple[BenchedVariant, ...]
    ratios: tuple[Ratio, ...]
    other_cpus: float | None = None
    baseline: BaselineRatios | None = None


# --- statistics -----------------------------------------------------------------------------------
# Intervals of medians and of ratios, from SciPy.
#
# Times of calls are skewed and have outliers, so they are summarized by medians. The interval of a
# median is that of the sign test (`scipy.stats.quantile_test`): two of the sorted values, whatever
# their distribution. It depends only on the order of the values, so ratios need no logarithm.

#: The probability with which an interval contains the true median.
CONFIDENCE = 0.95

#: The minimum number of values: fewer cannot reach the confidence that `unpaired_ratio` needs.
LEAST = 7


@dataclass(frozen=True)
class Interval:
    """A median, and the confidence interval that contains it."""

    median: float
    low: float
    high: float

    @property
    def precision(self) -> float:
        """Half of the width of the interval, relative to the median."""
        return (self.high - self.low) / 2 / self.median


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return the median of at least `LEAST` values, and its exact interval of the sign test."""
    from scipy.stats import quantile_test

    interval = quantile_test(values, p=0.5).confidence_interval(confidence)
    return Interval(float(np.median(values)), float(interval.low), float(interval.high))


def paired_ratio(times: Sequence[float], reference: Sequence[float]) -> Interval:
    """Return the median of the ratios of times that were measured in the same rounds.

    A slowdown of the machine that lasts longer than a round affects both times, and cancels.
    """
    return median_interval([a / b for a, b in zip(times, reference, strict=True)])


def unpaired_ratio(times: Sequence[float], reference: Sequence[float]) -> Interval:
    """Return the ratio of the medians of times that were measured separately.

    The interval is that of two medians at once, by Bonferroni: each is in its own interval of half
    the error, so the ratio is between the quotients of their ends. This is conservative.
    """
    apart = (1 + CONFIDENCE) / 2
    a, b = (median_interval(values, apart) for values in (times, reference))
    return Interval(a.median / b.median, a.low / b.high, a.high / b.low)


# --- baseline -------------------------------------------------------------------------------------
# A baseline: the JSON document of an earlier `bench`, with which a new one is compared.

_HINT = "write one with --save-baseline"


@dataclass(frozen=True)
class Baseline:
    """The measurements of an earlier run.

    Attributes:
        file: Its file.
        name: The name of the program.
        arguments: The name and type of each argument.
        machine: The machine, and the release of JAX.
        seconds: The time of a call in each round, by variant.
    """

    file: str
    name: str
    arguments: tuple[str, ...]
    machine: Machine
    seconds: dict[str, list[float]]


def read_baseline(path: str) -> Baseline:
    """Return the baseline in a file.

    Raises:
        ArgumentsError: If it cannot be read, or is not a document of `bench`.
    """
    try:
        with opened_plain(path) as file:
            contents = json.load(file)
    except OSError as error:
        raise ArgumentsError(f"cannot read '{path}': {error.strerror or error}", _HINT) from None
    except ValueError:
        raise ArgumentsError(f"'{path}' is not a baseline: it is not JSON", _HINT) from None
    try:
        machine = Machine(**contents["machine"])
        seconds = {
            entry["name"]: list(map(float, entry["seconds"])) for entry in contents["variants"]
        }
        if any(len(times) < LEAST for times in seconds.values()):
            raise ArgumentsError(f"'{path}' has fewer than {LEAST} rounds", _HINT)
        return Baseline(path, contents["name"], tuple(contents["arguments"]), machine, seconds)
    except (KeyError, TypeError, ValueError):
        raise ArgumentsError(f"'{path}' is not a baseline of bench", _HINT) from None


def with_baseline(bench: Bench, baseline: Baseline) -> Bench:
    """Return measured times with their ratios to an earlier run.

    Raises:
        ArgumentsError: If the earlier run had another program, other arguments or other variants.
    """
    _require_same_program(bench, baseline)
    common = [variant for variant in bench.variants if variant.name in baseline.seconds]
    if not common:
        names = ", ".join(baseline.seconds)
        ours = ", ".join(variant.name for variant in bench.variants)
        raise ArgumentsError(f"'{baseline.file}' has no variant {ours}; it has {names}", _HINT)
    ratios = []
    for variant in common:
        ratio = unpaired_ratio(variant.seconds, baseline.seconds[variant.name])
        ratios.append(Ratio(variant.name, variant.name, ratio.median, ratio.low, ratio.high))
    missing = tuple(variant.name for variant in bench.variants if variant not in common)
    mismatches = tuple(_mismatches(bench.machine, baseline.machine))
    return replace(
        bench, baseline=BaselineRatios(baseline.file, mismatches, missing, tuple(ratios))
    )


def _require_same_program(bench: Bench, baseline: Baseline) -> None:
    fault = None
    if bench.name != baseline.name:
        fault = f"the program {baseline.name}, not {bench.name}"
    elif bench.arguments != baseline.arguments:
        longest = max(len(bench.arguments), len(baseline.arguments))
        then, now = (
            [*arguments, *["nothing"] * (longest - len(arguments))]
            for arguments in (baseline.arguments, bench.arguments)
        )
        old, new = next((a, b) for a, b in zip(then, now, strict=True) if a != b)
        fault = f"other arguments: {old}, where {bench.name} now takes {new}"
    if fault:
        raise ArgumentsError(f"'{baseline.file}' is a baseline of {fault}", _HINT)


def _mismatches(now: Machine, then: Machine) -> list[str]:
    mismatches = []
    for field in fields(Machine):
        old, new = getattr(then, field.name), getattr(now, field.name)
        if old != new:
            mismatches.append(f"{_SAID[field.name]} was {old}, and is {new}")
    return mismatches


_SAID = {"processor": "the processor", "devices": "the device", "jax": "the release of JAX"}


def this_machine(devices: str) -> Machine:
    """Return a description of this machine; `devices` are the models of the devices in use."""
    model = platform.processor() or platform.machine()
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(": ")[2].strip() for line in file if line.startswith("model name")]
        model = next(iter(names), model)
    return Machine(f"{model}, {os.cpu_count()} cores", devices, jax.__version__)
