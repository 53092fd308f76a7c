"""A baseline: the JSON document of an earlier `bench`, with which a new one is compared."""

from __future__ import annotations

import json
import os
import platform
from contextlib import suppress
from dataclasses import dataclass, fields, replace

import jax

from jaxprtool.errors import ArgumentsError
from jaxprtool.execute.bench.measured import BaselineRatios, Bench, Machine, Ratio
from jaxprtool.execute.bench.statistics import LEAST, unpaired_ratio
from jaxprtool.files import opened_plain

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
            found = json.load(file)
    except OSError as error:
        raise ArgumentsError(f"cannot read '{path}': {error.strerror or error}", _HINT) from None
    except ValueError:
        raise ArgumentsError(f"'{path}' is not a baseline: it is not JSON", _HINT) from None
    try:
        machine = Machine(**found["machine"])
        seconds = {each["name"]: list(map(float, each["seconds"])) for each in found["variants"]}
        if any(len(each) < LEAST for each in seconds.values()):
            raise ArgumentsError(f"'{path}' has fewer than {LEAST} rounds", _HINT)
        return Baseline(path, found["name"], tuple(found["arguments"]), machine, seconds)
    except (KeyError, TypeError, ValueError):
        raise ArgumentsError(f"'{path}' is not a baseline of bench", _HINT) from None


def with_baseline(found: Bench, baseline: Baseline) -> Bench:
    """Return measured times with their ratios to an earlier run.

    Raises:
        ArgumentsError: If the earlier run had another program, other arguments or other variants.
    """
    _require_same_program(found, baseline)
    known = [each for each in found.variants if each.name in baseline.seconds]
    if not known:
        names = ", ".join(baseline.seconds)
        ours = ", ".join(each.name for each in found.variants)
        raise ArgumentsError(f"'{baseline.file}' has no variant {ours}; it has {names}", _HINT)
    ratios = []
    for each in known:
        ratio = unpaired_ratio(each.seconds, baseline.seconds[each.name])
        ratios.append(Ratio(each.name, each.name, ratio.median, ratio.low, ratio.high))
    missing = tuple(each.name for each in found.variants if each not in known)
    mismatches = tuple(_mismatches(found.machine, baseline.machine))
    return replace(
        found, baseline=BaselineRatios(baseline.file, mismatches, missing, tuple(ratios))
    )


def _require_same_program(found: Bench, baseline: Baseline) -> None:
    fault = None
    if found.name != baseline.name:
        fault = f"the program {baseline.name}, not {found.name}"
    elif found.arguments != baseline.arguments:
        longest = max(len(found.arguments), len(baseline.arguments))
        then, now = (
            [*each, *["nothing"] * (longest - len(each))]
            for each in (baseline.arguments, found.arguments)
        )
        old, new = next((a, b) for a, b in zip(then, now, strict=True) if a != b)
        fault = f"other arguments: {old}, where {found.name} now takes {new}"
    if fault:
        raise ArgumentsError(f"'{baseline.file}' is a baseline of {fault}", _HINT)


def _mismatches(now: Machine, then: Machine) -> list[str]:
    found = []
    for each in fields(Machine):
        old, new = getattr(then, each.name), getattr(now, each.name)
        if old != new:
            found.append(f"{_SAID[each.name]} was {old}, and is {new}")
    return found


_SAID = {"processor": "the processor", "devices": "the device", "jax": "the release of JAX"}


def this_machine(devices: str) -> Machine:
    """Return a description of this machine; `devices` are the models of the devices in use."""
    model = platform.processor() or platform.machine()
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(": ")[2].strip() for line in file if line.startswith("model name")]
        model = next(iter(names), model)
    return Machine(f"{model}, {os.cpu_count()} cores", devices, jax.__version__)
