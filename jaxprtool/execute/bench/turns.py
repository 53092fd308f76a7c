"""Variants of a program that take turns, each one compiled once.

    shared machine    A B | B A | A B | B A | …    rounds; the order in each is random

A turn begins with an untimed call, which brings the variant's data and code back into the caches.
Short calls are timed in batches, so that the resolution of the clock does not matter. The time of a
turn is the median of its batches.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol

from jaxprtool.execute.bench.statistics import LEAST, Interval, median_interval, paired_ratio
from jaxprtool.execute.compare.variants import OnProgress, Variant
from jaxprtool.execute.running.arguments import require_runnable
from jaxprtool.execute.running.run import (
    Compiled,
    CompiledMemory,
    choose_device,
    compiled,
    devices_of,
    failures_reported,
    has_effects,
    ready,
)
from jaxprtool.ir.basics.collector import without_collector
from jaxprtool.ir.basics.dtypes import as_array

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
class Start:
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

    def start(self) -> Start:
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

    def start(self) -> Start:
        program = self._variant.program
        with ready(program, self._arguments, self._device) as (there, device):
            self._arguments = there
            self._made: Compiled = compiled(program, there, self._on_progress)
            self._on_progress(f"running {self._variant.name}")
            with failures_reported(program):
                first, outs = self._made.first_call(there)
                if not self._once:
                    self._calibrate(self._fastest(there))
        devices, made = devices_of(outs, device), self._made
        return Start(
            devices=tuple(map(str, devices)),
            kinds=", ".join(dict.fromkeys(each.device_kind for each in devices)),
            lower=made.lower,
            compile=made.compile,
            first_call=first,
            memory=made.memory,
            calls=self._calls,
        )

    def _fastest(self, there: Sequence[Any]) -> float:
        """Return the seconds of the fastest of several calls, which nothing has interrupted."""
        found = [self._made.seconds(there)]
        while len(found) < _MOST_TRIED and sum(found) < _TRIED:
            found.append(self._made.seconds(there))
        return min(found)

    def _calibrate(self, seconds: float) -> None:
        self._calls = min(ceil(_AT_ONCE / seconds), self._made.form.most(self._arguments))
        self._times = max(1, int(_TURN / (self._calls * seconds)))

    def turn(self) -> float:
        program = self._variant.program
        with (
            ready(program, self._arguments, self._device) as (there, _),
            failures_reported(program),
            without_collector(),
        ):
            if not self._once:
                self._made.seconds(there)
            timed = [self._made.seconds(there, self._calls) for _ in range(self._times)]
        return statistics.median(timed) / self._calls


@dataclass(frozen=True)
class Limits:
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
        return all(each.precision <= self.precision for each in intervals(times))


def intervals(times: Sequence[Sequence[float]]) -> list[Interval]:
    """Return the ratios to the first variant; of a single one, its time."""
    first, *others = times
    return [paired_ratio(each, first) for each in others] or [median_interval(first)]


def rounds(
    variants: Sequence[Turns], limits: Limits, on_progress: Callable[[str], object]
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
