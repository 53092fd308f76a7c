"""Measure the quantities of budgets by source line, and find lines that grew between programs.

    measure(program, ["flops", "peak_bytes"])["flops"].amount
    grown_lines(before, after, "flops")[0].where

`jaxprtool.testing` compares the amounts with those that a test allows.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from jaxprtool import jaxcompat
from jaxprtool.commands.cost.estimate import LineReader, cost
from jaxprtool.commands.diff.diff import Diff, diff
from jaxprtool.commands.kernels.kernels import kernels
from jaxprtool.commands.memory.estimate import memory
from jaxprtool.commands.record.record import recorded_compilations
from jaxprtool.commands.record.table import reason_text
from jaxprtool.commands.residuals.policies import residuals
from jaxprtool.commands.shardings.shardings import shardings
from jaxprtool.commands.why.slices import EquationsByLine
from jaxprtool.errors import ArgumentsError, did_you_mean
from jaxprtool.ir.dataflow import everything
from jaxprtool.ir.documents import bytes_of, flops_of, in_bytes, plural, with_prefix
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.places import BEHIND
from jaxprtool.ir.program import Program, program_signature
from jaxprtool.recording.recorded_run import Compilation

#: The quantities that a budget may limit.
Quantity: TypeAlias = Literal[
    "flops",
    "peak_bytes",
    "equations",
    "residual_bytes",
    "vmem_bytes",
    "hbm_bytes",
    "collectives_bytes",
    "compiles",
]

QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)


@dataclass(frozen=True)
class AmountPart:
    """The part of an amount that comes from one place.

    Attributes:
        where: The user's line, `model.py:9`, or the path of an argument; "" if it is unknown.
        amount: The part.
    """

    where: str
    amount: float


@dataclass(frozen=True)
class QuantityAmount:
    """The amount of a quantity that a program takes.

    Attributes:
        quantity: The quantity.
        amount: The amount.
        parts: The amount by place, the largest part first.
        notes: A sentence for each compilation with its reason, for "compiles"; what is not counted,
            for "peak_bytes".
    """

    quantity: Quantity
    amount: float
    parts: tuple[AmountPart, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Growth:
    """A place whose part of an amount grew from one program to another.

    Attributes:
        where: The place in the second program, as in `AmountPart`.
        before: Its part in the first program; 0 if it is new.
        after: Its part in the second program.
    """

    where: str
    before: float
    after: float


def measure(
    program: Program | None,
    quantities: Iterable[str],
    *,
    arguments: Sequence[object] = (),
    call: Callable[[], object] | None = None,
) -> dict[Quantity, QuantityAmount]:
    """Measure quantities of a program.

    Args:
        program: The program; None if only compilations are counted.
        quantities: Their names: "flops", "peak_bytes" and "equations" as `cost`, `memory` and
            `show --stats` state them, "residual_bytes" as `residuals` does, "vmem_bytes" and
            "hbm_bytes" as `kernels` does, "collectives_bytes" for the bytes that each device sends,
            as `shardings` does, and "compiles".
        arguments: The flat arguments, if they lie on several devices, for "collectives_bytes".
        call: Calls the function, for "compiles": the programs that JAX compiles in this call are
            counted, without single operations outside of `jit`.

    Returns:
        The measures by quantity, in the given order.

    Raises:
        ArgumentsError: If a name is unknown, sizes are symbolic, or a required argument is missing.
        UnsupportedError: As in `memory`, `residuals` and `shardings`.
    """
    measures: dict[Quantity, QuantityAmount] = {}
    for name in quantities:
        quantity = quantity_of(name)
        if quantity == "compiles":
            if call is None:
                raise ArgumentsError("compiles needs a function to call, not a program")
            measures[quantity] = _compiles(call)
        elif program is None:
            raise ArgumentsError(f"{quantity} needs a program")
        elif quantity == "collectives_bytes":
            measures[quantity] = _collectives(program, arguments)
        else:
            measures[quantity] = _MEASURES[quantity](program)
    return measures


def quantity_of(name: str) -> Quantity:
    """Return the quantity of a name. Raises ArgumentsError, with the nearest, if it is unknown."""
    for quantity in QUANTITIES:
        if name == quantity:
            return quantity
    hint = did_you_mean(name, QUANTITIES) or f"write one of {', '.join(QUANTITIES)}"
    raise ArgumentsError(f"there is no budget of '{name}'", hint)


def amount_of(quantity: Quantity, value: object) -> float:
    """Return the amount that a budget states: a number, `"16MiB"` or `"3 GFLOP"`.

    Raises:
        ArgumentsError: If the value is not an amount of this quantity.
    """
    if isinstance(value, str) and quantity == "flops":
        return flops_of(value)
    if isinstance(value, str) and quantity.endswith("bytes"):
        return bytes_of(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ArgumentsError(
            f"{value!r} is not a budget of {quantity}", "write a number, 0 or more"
        )
    return value


def amount_text(quantity: Quantity, amount: float) -> str:
    """Return an amount with its unit: `1.5 MiB`, `3.0 GFLOP`, `12 equations`."""
    if quantity.endswith("bytes"):
        return in_bytes(int(amount))
    if quantity == "flops":
        return with_prefix(amount, "FLOP") if amount >= 1000 else f"{amount:,} FLOP"
    noun = "program" if quantity == "compiles" else "equation"
    return plural(int(amount), noun)


# --- measures ---------------------------------------------------------------------------------


def _flops(program: Program) -> QuantityAmount:
    estimate = cost(program)
    by_line: Counter[str] = Counter()
    for group in estimate.groups:
        by_line[group.name] += _number("flops", group.work.flops)
    return _measure("flops", _number("flops", estimate.total.work.flops), by_line)


def _peak_bytes(program: Program) -> QuantityAmount:
    estimate = memory(program)
    by_place: Counter[str] = Counter()
    for live in estimate.live:
        by_place[_own(live.source) or live.name] += live.bytes
    measure = _measure("peak_bytes", estimate.peak_bytes, by_place)
    left_out = ", ".join(estimate.unknown)
    return replace(measure, notes=(f"not counted inside: {left_out}",)) if left_out else measure


def _equations(program: Program) -> QuantityAmount:
    about = program_signature(program)
    frames = frames_now(about.roots)
    counts = EquationsByLine(LineReader(frames)).of(everything(about.jaxpr))
    by_line: Counter[str] = Counter()
    for line, count in counts.items():
        by_line["" if line is None else f"{frames.path(line.file)}:{line.line}"] += count.total()
    return _measure("equations", by_line.total(), by_line)


def _residual_bytes(program: Program) -> QuantityAmount:
    kept = residuals(program)
    by_place: Counter[str] = Counter()
    for residual in kept.residuals:
        by_place[residual.argument or _own(residual.source)] += residual.bytes or 0
    return _measure("residual_bytes", _number("residual_bytes", kept.total_bytes), by_place)


def _vmem_bytes(program: Program) -> QuantityAmount:
    report = kernels(program)
    by_line: Counter[str] = Counter()
    for row in report.kernels:
        by_line[_own(row.place)] = max(by_line[_own(row.place)], row.vmem_bytes or 0)
    return _measure("vmem_bytes", report.vmem_bytes, by_line)


def _hbm_bytes(program: Program) -> QuantityAmount:
    report = kernels(program)
    by_line: Counter[str] = Counter()
    for row in report.kernels:
        by_line[_own(row.place)] += _number("hbm_bytes", row.work.bytes * row.calls)
    return _measure("hbm_bytes", by_line.total(), by_line)


_MEASURES: Mapping[str, Callable[[Program], QuantityAmount]] = {
    "flops": _flops,
    "peak_bytes": _peak_bytes,
    "equations": _equations,
    "residual_bytes": _residual_bytes,
    "vmem_bytes": _vmem_bytes,
    "hbm_bytes": _hbm_bytes,
}


def _collectives(program: Program, arguments: Sequence[object]) -> QuantityAmount:
    facts = shardings(program, arguments)
    by_line: Counter[str] = Counter()
    for collective in facts.collectives:
        by_line[_own(collective.line)] += collective.sent_bytes
    return _measure("collectives_bytes", facts.sent_bytes, by_line)


def _compiles(call: Callable[[], object]) -> QuantityAmount:
    with tempfile.TemporaryDirectory() as folder:
        with recorded_compilations(folder) as recording:
            call()
        return compile_measure(recording.compilations)


def compile_measure(compilations: Iterable[Compilation]) -> QuantityAmount:
    """Return recorded compilations as a measure, without what was lowered but not compiled."""
    compiled = [
        compilation for compilation in compilations if compilation.compile_seconds is not None
    ]
    by_line = Counter[str](compilation.line for compilation in compiled)
    return _measure("compiles", len(compiled), by_line, map(compilation_text, compiled))


def compilation_text(compilation: Compilation) -> str:
    """Return a line on a compilation, its reasons and remedies: `step@2 at train.py:9: x: …`."""
    at = f" at {compilation.line}" if compilation.line else ""
    why = "; ".join(map(reason_text, compilation.reasons)) or "the first one seen"
    advice = dict.fromkeys(reason.advice for reason in compilation.reasons if reason.advice)
    return "\n  advice: ".join([f"{compilation.name}{at}: {why}", *advice])


def _number(quantity: str, number: Any) -> int:
    if number is None or jaxcompat.is_symbolic_dimension(number):
        hint = "trace the function with sizes that are numbers, or specialize the program"
        raise ArgumentsError(f"a budget of {quantity} needs sizes that are numbers", hint)
    return int(number)


def _own(line: str) -> str:
    """Return the user's line, without the library's line behind it."""
    return line.partition(BEHIND)[0]


def _measure(
    quantity: Quantity, amount: float, by_place: Counter[str], notes: Iterable[str] = ()
) -> QuantityAmount:
    parts = (AmountPart(where, number) for where, number in by_place.most_common() if number)
    return QuantityAmount(quantity, amount, tuple(parts), tuple(notes))


# --- growth -----------------------------------------------------------------------------------


def grown_lines(
    before: Program, after: Program, quantity: Quantity, differences: Diff | None = None
) -> tuple[Growth, ...]:
    """Return the places whose part of a quantity grew, the one that grew most first.

    Lines correspond if most of their equations do, so that lines may have moved in the file.

    Args:
        before: The earlier program.
        after: The later program.
        quantity: The quantity to compare, except "compiles".
        differences: The diff of the two, if it is known.

    Raises:
        ArgumentsError: If sizes are symbolic.
        UnsupportedError: As in `measure` and `diff`.
    """
    lines = _moved_lines(before, after, diff(before, after) if differences is None else differences)
    old, new = (measure(program, [quantity])[quantity] for program in (before, after))
    was: Counter[str] = Counter()
    for part in old.parts:
        was[lines.get(part.where, part.where)] += part.amount  # type: ignore[assignment]
    grown = [Growth(p.where, was[p.where], p.amount) for p in new.parts if p.amount > was[p.where]]
    return tuple(sorted(grown, key=lambda growth: growth.before - growth.after))


def _moved_lines(before: Program, after: Program, differences: Diff) -> dict[str, str]:
    """Return the line in the second program of each line in the first that has one."""
    frames = frames_now(before.roots), frames_now(after.roots)
    votes: dict[str, Counter[str]] = {}
    for body in differences.bodies:
        around = tuple([pair[which] for pair in body.path] for which in (0, 1))
        for pair in body.equations:
            old, new = (
                _own(frames[which].line_of([*around[which], pair[which]])) for which in (0, 1)
            )
            votes.setdefault(old, Counter())[new] += 1
    moved = {old: counts.most_common(1)[0][0] for old, counts in votes.items() if old}
    # A line whose equations have no counterpart is gone: its number may be that of another line.
    return {old: f"{old} (before)" for old in _lines(before) - moved.keys()} | moved


def _lines(program: Program) -> set[str]:
    return {part.where for part in _equations(program).parts if part.where}
