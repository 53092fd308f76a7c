"""The results of `bench`: the times and the memory of variants, and their ratios."""

from __future__ import annotations

from dataclasses import dataclass

from jaxprtool.execute.bench.statistics import Interval
from jaxprtool.execute.running.run import CompiledMemory
from jaxprtool.ir.basics.documents import document
from jaxprtool.ir.basics.printed import Printed


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


@document(optional=("baseline",))
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
    baseline: BaselineRatios | None = None
