"""Runs as text and as JSON: the results, and the time of each step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np

from jaxprtool.ir.documents import document, duration, plural
from jaxprtool.ir.notation import BinderToken, Comment, Type
from jaxprtool.ir.trees import Alike, alike
from jaxprtool.render.terminal.lines import Cell, Listing, grid, printable
from jaxprtool.render.terminal.tables import more, split_rows

if TYPE_CHECKING:
    from jaxprtool.commands.run.checked import Finding
    from jaxprtool.errors import Details
    from jaxprtool.execute.running.run import RunOutput, RunReport, RunTimes


#: The width from which a table of many results has means.
_WIDE = 110


def outputs(report: RunReport, width: int, top: int | None) -> str:
    """Return the results of a run as text: small ones in full, others as statistics.

    Args:
        report: The run.
        width: The width in characters.
        top: The number of results shown; None for all.
    """
    shown, rest = split_rows(report.outputs, top)
    lines = [_result(out, width) for out in shown]
    lines += [_more(rest)] if rest else []
    return "\n".join(lines) or "no results"


def _result(out: RunOutput, width: int) -> str:
    head, text = f"{out.name}: {out.type}", _described(out, width - 2)
    fits = "\n" not in text and len(head) + 1 + len(text) <= width
    return f"{head} {text}".rstrip() if fits else f"{head}\n{indent(text, '  ')}"


def results_table(report: RunReport, width: int, top: int | None) -> Listing:
    """Return a row for each result, those with NaN or inf first.

    If there are more than `top`, results whose names differ only in numbers share a row. Scalars,
    such as the loss of a training step, come before arrays, and the new state of arguments last.
    The number of results left out is shown below.

    Args:
        report: The run.
        width: The width in characters.
        top: The number of rows; None for a row for each result.
    """
    if split_rows(report.outputs, top)[1]:
        groups = alike(report.outputs, lambda out: out.name, _kind)
        groups.sort(
            key=lambda group: (group.path.startswith("updated."), group.items[0].value.ndim > 0)
        )
    else:
        groups = [Alike(out.name, [out]) for out in report.outputs]
    shown, others = split_rows(sorted(groups, key=lambda group: _is_finite(group.items[0])), top)
    narrow = bool(others) and width < _WIDE
    rows: list[list[Cell]] = [
        [
            [BinderToken(group.path)],
            [*_count(group), Type(group.items[0].type)],
            [_in_short(group, narrow)],
        ]
        for group in shown
    ]
    tokens = grid(("result", "type", "value"), rows, width)
    if rest := [out for group in others for out in group.items]:
        tokens += "\n", Comment(_more(rest))
    return Listing(printable(tokens))


def _more(rest: Sequence[RunOutput]) -> str:
    """Return the number of results that are not shown, and how many of them are not finite."""
    bad = sum(not _is_finite(out) for out in rest)
    return more(len(rest), f", {bad:,} of them with NaN or inf" if bad else "")


def _kind(out: RunOutput) -> tuple[str, bool]:
    return out.type, _is_finite(out)


def _is_finite(out: RunOutput) -> bool:
    return out.summary.is_finite


def _count(group: Alike[RunOutput]) -> list[str]:
    return [f"{len(group.items)} x "] if group.items[1:] else []


def _in_short(group: Alike[RunOutput], narrow: bool) -> str:
    """Return the value of one small result, or the range, mean and non-finite counts of several.

    In a `narrow` table, the mean and the values of vectors are left out.
    """
    first, digits = group.items[0], 3 if narrow else 4
    joint = {} if first.type.startswith("key<") else _of_all(group)
    in_full = "min" not in joint or not (narrow and first.value.ndim)
    is_described = first.summary.value is not None or "true" in first.summary.statistics
    if not group.items[1:] and in_full and is_described:
        return " ".join(_described(first, 1000).split())
    parts = []
    if joint.get("min") is not None:
        low, high = f"{joint['min']:.{digits}g}", f"{joint['max']:.{digits}g}"
        parts.append(low if low == high else f"{low} to {high}")
    if joint.get("mean") is not None and not narrow:
        parts.append(f"mean {joint['mean']:.3g}")
    parts += [f"{joint[name]:,} {name}" for name in ("nan", "inf") if joint.get(name)]
    return ", ".join(parts)


def _of_all(group: Alike[RunOutput]) -> dict[str, Any]:
    """Return joint statistics of results of one type; none if one of them has none."""
    statistics = [out.summary.numbers for out in group.items]
    if "min" not in statistics[0]:
        return {}
    finite = [numbers for numbers in statistics if numbers["min"] is not None]
    joined = {name: sum(numbers.get(name, 0) for numbers in statistics) for name in ("nan", "inf")}
    if finite:
        joined["min"] = min(numbers["min"] for numbers in finite)
        joined["max"] = max(numbers["max"] for numbers in finite)
    means = [numbers["mean"] for numbers in statistics if numbers.get("mean") is not None]
    return joined | ({"mean": sum(means) / len(means)} if means else {})


def steps(
    report: RunReport, trace_time: float | None = None, pass_time: float | None = None
) -> dict[str, str]:
    """Return the devices of a run, and the time of each step by name."""
    times, devices = report.times, report.devices
    where = ", ".join(map(str, devices))
    if len(devices) > 4:
        where = f"{len(devices)} devices, {devices[0]} to {devices[-1]}"
    rows = {"device": where}
    rows |= {} if trace_time is None else {"trace": duration(trace_time)}
    rows |= {} if pass_time is None else {"passes": duration(pass_time)}
    if times.lower is not None and times.compile is not None:
        cached = " (from the cache)" if times.cached else ""
        rows |= {"lower": duration(times.lower), "compile": duration(times.compile) + cached}
    rows["first call"] = duration(times.first_call)
    if times.repeat is not None:
        rows["later calls"] = f"{duration(times.repeat)} (median of {times.repeats})"
    return rows


def _described(out: RunOutput, width: int) -> str:
    """Return a result's value if it is small, else its statistics."""
    summary = out.summary
    if summary.value is not None:
        return np.array2string(summary.value, separator=", ", max_line_width=width)
    # Minimum, maximum and mean are missing without finite elements.
    shown = {k: v for k, v in summary.statistics.items() if v is not None}
    return ", ".join(f"{k} {_number(v)}" for k, v in shown.items())


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def run_document(
    report: RunReport, trace_time: float, random: Sequence[str], pass_time: float | None = None
) -> RunDocument:
    """Return the document of a run; the arguments `random` had random values."""
    times = StepTimes(trace_time, pass_time, report.times)
    devices, outputs = map(str, report.devices), map(_output_document, report.outputs)
    return RunDocument(report.name, list(devices), random, times, list(outputs))


#: The maximum number of findings named per check.
_FEW = 4


def finding_lines(findings: Sequence[Finding]) -> Details:
    """Return the findings of checks, one line for each of the first ones per check."""
    lines = []
    for check, of_check in groupby(findings, key=lambda finding: finding.check):
        several = list(of_check)
        lines += [(check, _finding(finding)) for finding in several[:_FEW]]
        if len(several) > _FEW:
            lines.append((check, f"and in {len(several) - _FEW:,} more places"))
    return lines


def _finding(finding: Finding) -> str:
    place = finding.source + (" backward" if finding.backward else "")
    primitives = ", ".join(finding.primitives[:_FEW]) + (", …" if finding.primitives[_FEW:] else "")
    parts = [" ".join(filter(None, (place, primitives)))]
    if finding.iteration:
        parts.append(f"iteration {', '.join(map(str, finding.iteration))}")
    if finding.count:
        parts.append(f"{finding.count:,} of {plural(finding.size, 'element')}")
    if finding.reaches:
        parts.append(f"reaches {', '.join(finding.reaches[:_FEW])}")
    return ": ".join((parts[0], ", ".join(parts[1:])))


def _output_document(out: RunOutput) -> Output:
    summary = out.summary
    if summary.value is None:
        return Output(out.name, out.type, statistics=summary.statistics)
    return Output(out.name, out.type, summary.value.tolist())


@document(flat=("times",))
class StepTimes(NamedTuple):
    """The time of each step of a run, in seconds."""

    trace: Annotated[float, "Tracing."]
    passes: Annotated[float | None, "All passes; null if included in the time of tracing."]
    times: RunTimes


@document(optional=("value", "statistics"))
class Output(NamedTuple):
    """A result of a run: its value if it is small, or else statistics."""

    name: Annotated[str, "Its readable path."]
    type: Annotated[str, "Its type, as a jaxpr prints it."]
    value: Annotated[object, "The numbers, as nested lists."] = None
    statistics: Annotated[
        dict[str, object] | None,
        "By name: `min`, `max`, `mean`, `nan`, `inf`, or `true` and `false`.",
    ] = None


@document(optional=("found",))
class RunDocument(NamedTuple):
    """`run`."""

    name: Annotated[str, "The name of the program."]
    devices: Annotated[list[str], "The devices that it ran on: `cpu:0`."]
    random: Annotated[Sequence[str], "The arguments that were filled with random values."]
    times: Annotated[StepTimes, "The time of each step."]
    outputs: Annotated[list[Output], "The results, in order."]
    found: Annotated[Sequence[Finding] | None, "With `--check`: the values that fail a check."] = (
        None
    )
