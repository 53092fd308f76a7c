"""What a run gave, for the terminal and as JSON: results, and how long each step took."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import indent
from typing import TYPE_CHECKING, Any

from jaxprtool.cli import output

if TYPE_CHECKING:
    from jaxprtool.execute.run import Output, RunReport


def some(names: Sequence[str]) -> str:
    """Arguments by name, or how many there are, if they are many."""
    return f"{len(names)} arguments" if len(names) > 4 else ", ".join(names)


def write_outputs(report: RunReport) -> None:
    """The results of a run: small ones whole, others as statistics."""
    for out in report.outputs:
        head, text = f"{out.name}: {out.type}", _described(out)
        fits = "\n" not in text and len(head) + 1 + len(text) <= output.width()
        output.write(f"{head} {text}".rstrip() if fits else f"{head}\n{indent(text, '  ')}")
    if not report.outputs:
        output.write("no results")


def steps(report: RunReport, trace_time: float | None = None) -> dict[str, str]:
    """Where a program ran, and how long each step took."""
    times = report.times
    rows = {"device": _few(report.devices)}
    rows |= {} if trace_time is None else {"trace": _duration(trace_time)}
    if times.lower is not None and times.compile is not None:
        rows |= {"lower": _duration(times.lower), "compile": _duration(times.compile)}
    rows["first call"] = _duration(times.first_call)
    if times.repeat is not None:
        rows["later calls"] = f"{_duration(times.repeat)} (median of {times.repeats})"
    return rows


def _few(devices: tuple[Any, ...]) -> str:
    if len(devices) <= 4:
        return ", ".join(map(str, devices))
    return f"{len(devices)} devices, {devices[0]} to {devices[-1]}"


def _described(out: Output) -> str:
    """A result's value when it is small, else its statistics."""
    import numpy as np

    from jaxprtool.execute.summary import summarize

    summary = summarize(out.value)
    if summary.value is not None:
        columns = output.width() - 2
        return np.array2string(summary.value, separator=", ", max_line_width=columns)
    # Where nothing is finite, or there is nothing, there is no least, greatest or mean.
    known = {k: v for k, v in summary.statistics.items() if v is not None}
    return ", ".join(f"{k} {_number(v)}" for k, v in known.items())


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def document(report: RunReport, trace_time: float, random: tuple[str, ...]) -> dict[str, Any]:
    """A run for `--json`, as `output` describes it."""
    from jaxprtool.execute.summary import summarize

    outputs: list[dict[str, Any]] = []
    for out in report.outputs:
        summary = summarize(out.value)
        described = (
            {"statistics": summary.statistics}
            if summary.value is None
            else {"value": summary.value.tolist()}
        )
        outputs.append({"name": out.name, "type": out.type, **described})
    times = report.times
    return {
        "name": report.name,
        "devices": [str(d) for d in report.devices],
        "random": list(random),
        "times": {
            "trace": trace_time,
            "lower": times.lower,
            "compile": times.compile,
            "first_call": times.first_call,
            "repeat": times.repeat,
            "repeats": times.repeats,
        },
        "outputs": outputs,
    }
