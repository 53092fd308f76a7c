"""A recorded run as a summary of one screen: compilations, their times and their reasons."""

from __future__ import annotations

import os
import shlex
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from jaxprtool.ir.documents import duration, in_bytes, listed, plural, shell_word
from jaxprtool.ir.frames import short_paths
from jaxprtool.ir.notation import BinderToken, Comment
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.lines import printable
from jaxprtool.render.terminal.tables import ALL, Rendering, drawn, more, share_text
from jaxprtool.render.views import Cell, Column, Table, number_column

if TYPE_CHECKING:
    from jaxprtool.recording.recorded_run import (
        Compilation,
        Function,
        NextStep,
        OutsideJit,
        Reason,
        Run,
        Transfer,
        Unfinished,
    )

#: The number of lines of a summary, unless a number of rows is asked for.
SCREEN = 24


class _RowLimits(NamedTuple):
    """The maximum numbers of functions, recompiled functions, reasons of each, lines of a note."""

    functions: int
    again: int
    reasons: int = 2
    lines: int = 2


#: The sizes to try until the summary fits.
_ROWS = (
    *(_RowLimits(*sizes) for sizes in ((10, 5), (8, 5), (6, 5), (6, 4), (6, 3))),
    *(_RowLimits(*sizes, 1) for sizes in ((6, 4), (5, 4), (5, 3), (4, 3), (4, 2), (3, 2))),
    *(_RowLimits(*sizes, 1, 1) for sizes in ((4, 2), (3, 2), (3, 1), (1, 1))),
)

#: The maximum number of lines of what to do, and the length at which a finding is cut.
_MOST_LINES, _LONGEST_STEP = 10, 200

#: The maximum number of lines and names in a sentence.
_MOST = 4

#: The length at which a value or a command is cut, and the minimum width of reasons.
_LONGEST, _LEAST = 60, 30

#: Columns of times are left out to show this much of the names of functions.
_WIDEST = 40

#: A line with less room than this is left out.
_LEAST_LINE = 8

#: The label before the path of a reason, by kind.
_LABELS = {"static": "static", "context": "setting", "closure": "closed-over"}

#: The description of a reason without a path, by kind.
_WITHOUT_PATH = {
    "shape": "shapes",
    "dtype": "dtypes",
    "weak_type": "weak types",
    "sharding": "shardings",
    "static": "static arguments",
    "structure": "arguments",
    "function": "function object",
    "context": "settings",
    "closure": "closed-over values",
    "cache": "cache",
}


def run_summary(run: Run, width: int, page: str = "", top: int | None = None) -> Rendering:
    """Return the summary of a run.

    Args:
        run: The run.
        width: The width in characters.
        page: The path of the run's page, shown last.
        top: The number of rows of each part; None for those that fit a screen of 80 columns.
    """
    if top is not None:
        return _summary(run, width, page, _RowLimits(top, top, top))
    for rows in _ROWS:
        if len(run.functions) == rows.functions + 1:  # the row is no longer than `… 1 more`
            rows = rows._replace(functions=rows.functions + 1)
        rendering = _summary(run, width, page, rows)
        if len(rendering.plain().splitlines()) <= SCREEN:
            break
    return rendering


def count_rows(run: Run) -> int:
    """Return a number of rows that is enough for every part of the summary of a run."""
    reasons = sum(len(compilation.reasons) for compilation in run.compilations)
    return len(run.functions) + len(run.outside_jit) + reasons


def _summary(run: Run, width: int, page: str, rows: _RowLimits) -> Rendering:
    parts: list[RenderableType] = [Text(heading(run), style=tables.HEADING)]
    if run.functions:
        parts += [Text(), _functions_table(run, rows.functions, width)]
    if recompilations := recompiled(run.functions):
        parts += [Text(), _reasons_table(recompilations, rows, width)]
    # Lines are broken between words: a sentence of twice the width may take three.
    longest = rows.lines * (width - 8 * (rows.lines - 1))
    sentences = [_cut_list(sentence, longest) for sentence in run_notes(run)]
    if len(run.functions) > rows.functions or _is_cut(recompilations, rows):
        # It does not run the script again, as this option of `record` would.
        sentences.append(f"all rows: jaxprtool show {one_line(run.folder, 1000)}/ {ALL}")
    sentences += [f"page: {one_line(page, 1000)}"] if page else []
    if sentences:
        parts += [Text(), *map(Text, sentences)]
    if run.next_steps:
        parts += [Text(), _next_steps(run.next_steps, width)]
    return Rendering(Group(*parts), width)


# --- the whole --------------------------------------------------------------------------------


def heading(run: Run) -> str:
    """Return the first line: `python train.py: 41.2 s, 70.2% of it compiling 18 programs`."""
    return f"{command_text(run.command)}: {', '.join(run_facts(run))}"


def command_text(command: Sequence[str], longest: int = _LONGEST) -> str:
    """Return a command in one line: `python train.py`, wherever Python is."""
    words = [" ".join(word.split()) for word in command]
    words[:1] = map(os.path.basename, words[:1])
    return one_line(shlex.join(words), longest) or "a run"


def run_facts(run: Run) -> Iterator[str]:
    """Yield the time of a run, the share of compiling, and how it ended."""
    yield duration(run.seconds)
    count, small = len(run.compilations), sum(computation.count for computation in run.outside_jit)
    if count or small:
        programs = plural(count, "program") if count else plural(small, "small program")
        if count and small:
            programs += f" and {small:,} small {'one' if small == 1 else 'ones'}"
        if run.compile_seconds <= run.seconds:
            share = share_text(run.compile_seconds, run.seconds)
            yield f"{duration(run.compile_seconds)} ({share}) of it compiling {programs}"
        else:  # in several processes or threads at a time
            yield f"{duration(run.compile_seconds)} of compiling {programs}"
        if cached := sum(compilation.cached for compilation in run.compilations):
            yield f"{cached:,} from the persistent cache"
    yield from map(unfinished_text, run.unfinished[:1])
    if len(run.processes) > 1:
        yield f"{len(run.processes):,} processes"
    if run.exit_code is None:
        yield "its end is unknown"
    elif run.command:
        yield f"exit code {run.exit_code}"


def unfinished_text(unfinished: Unfinished) -> str:
    """Return `compiling step for 395 s, not finished`."""
    time = "" if unfinished.seconds is None else f" for {duration(unfinished.seconds)}"
    return f"{unfinished.phase} {one_line(unfinished.name)}{time}, not finished"


def run_notes(run: Run) -> Iterator[str]:
    """Yield a sentence for each kind of finding besides the functions."""
    if run.outside_jit:
        yield outside_text(run.outside_jit)
    yield from transfer_texts(run.transfers)
    yield from warnings(run)


def warnings(run: Run) -> Iterator[str]:
    """Yield a sentence for what failed, differs between processes, or was kept."""
    if not (run.functions or run.outside_jit or run.unfinished):
        used = any(process.jax for process in run.processes)
        yield "Nothing was compiled." if used else "JAX was not imported: nothing was recorded."
    failed = [compilation for compilation in run.compilations if has_failed(compilation)]
    unwritten = [
        compilation
        for compilation in run.compilations
        if compilation.error and not has_failed(compilation)
    ]
    for what, compilations in (("failed", failed), ("not written", unwritten)):
        if compilations:
            first = f"{compilations[0].name}: {compilations[0].error}"
            more = f", and {len(compilations) - 1:,} more" if compilations[1:] else ""
            yield f"{what}: {one_line(first, 2 * _LONGEST)}{more}"
    for unfinished in run.unfinished:
        at = f" at {one_line(unfinished.line)}" if unfinished.line else ""
        yield f"not finished: {unfinished_text(unfinished).removesuffix(', not finished')}{at}"
    if ended := [process for process in run.processes if process.ending]:
        first = f"process {ended[0].number}: {ended[0].ending}"
        more = f", and {len(ended) - 1:,} more" if ended[1:] else ""
        yield one_line(first, 2 * _LONGEST) + more
    if run.differing:
        names = listed(map(one_line, run.differing), _MOST)
        yield f"programs that differ between processes: {names}{_diff_command(run)}"
    if kept := [
        f"{one_line(function.name)} ({function.kept:,})"
        for function in run.functions
        if function.kept
    ]:
        yield f"kept calls, for nans, run, compare and reduce: {listed(kept, _MOST)}"


def has_failed(compilation: Compilation) -> bool:
    """Return True if a program was not compiled, and not only not written."""
    return bool(compilation.error) and compilation.compile_seconds is None


def _diff_command(run: Run) -> str:
    """Return the command that shows the diff of the first differing program; "" without one."""
    name = run.differing[0]
    files = [
        compilation.file
        for compilation in run.compilations
        if compilation.name == name and compilation.file
    ]
    if len(files) < 2:
        return ""
    programs = (one_line(f"{run.folder}/{file.removesuffix('.jaxpr')}") for file in files[:2])
    return f"; jaxprtool diff {' '.join(programs)}"


def outside_text(computations: Sequence[OutsideJit]) -> str:
    """Return `61 small computations compiled outside of jit, 3.1 s: train.py:24 (38), …`."""
    count = sum(computation.count for computation in computations)
    time = duration(sum(computation.seconds for computation in computations))
    lines = (
        f"{one_line(computation.line) or 'unknown line'} ({computation.count:,})"
        for computation in computations
    )
    said = plural(count, "small computation")
    return f"{said} compiled outside of jit, {time}: {listed(lines, _MOST)}"


def transfer_texts(transfers: Sequence[Transfer]) -> Iterator[str]:
    """Yield a sentence about values copied to the host, and one about those to the device."""
    to_host = [transfer for transfer in transfers if transfer.kind == "to_host"]
    if to_host:
        count, time = (
            sum(getattr(transfer, name) for transfer in to_host) for name in ("count", "seconds")
        )
        lines = listed(
            (f"{one_line(transfer.line)} ({transfer.count:,})" for transfer in to_host), _MOST
        )
        said = "once" if count == 1 else f"{count:,} times"
        said = f"Python waited {said} for values from the device"
        yield f"{said}, {duration(time)}: {lines}" if time else f"{said}: {lines}"
    to_device = [transfer for transfer in transfers if transfer.kind == "to_device"]
    if to_device:
        values = (
            f"{one_line(copy.path or copy.line)} ({in_bytes(copy.bytes // (copy.count or 1))})"
            for copy in to_device
        )
        yield f"copied to the device at each call: {listed(values, _MOST)}"


def one_line(text: str, longest: int = _LONGEST) -> str:
    """Return a text in one line, cut at a length, with control characters escaped."""
    return _cut("".join(printable([" ".join(text.split())])), longest)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _cut_list(text: str, longest: int) -> str:
    """Return a sentence that ends in a list, without the last items if it is too long."""
    if len(text) <= longest:
        return text
    end = text.rfind(", ", 0, longest - len("…"))
    return f"{text[:end]}, …" if end > 0 else _cut(text, longest)


# --- what to do -------------------------------------------------------------------------------


def step_text(step: NextStep, longest: int = 1000) -> str:
    """Return a finding with its line first, unless the text has it: `train.py:31: …`."""
    has_line = not step.line or step.line in step.text
    return one_line(step.text if has_line else f"{step.line}: {step.text}", longest)


def _next_steps(steps: Sequence[NextStep], width: int) -> Group:
    """Return what to do, in at most `_MOST_LINES` lines: findings, and commands to paste."""
    lines = [Text("what to do", style=tables.HEADING)]
    for step in steps:
        text = textwrap.wrap(step_text(step, _LONGEST_STEP), width - 2, break_on_hyphens=False)
        added = [Text(f"  {line}") for line in text]
        added += [Text(line, tables.LITERAL) for line in _command_lines(step.command, width)]
        if len(lines) + len(added) > _MOST_LINES:
            break
        lines += added
    return Group(*lines)


def _command_lines(command: str, width: int) -> list[str]:
    """Return the lines of a command that can be pasted: those but the last end in a backslash."""
    lines: list[str] = []
    for word in map(shell_word, shlex.split("".join(printable([command])))):
        if lines and len(lines[-1]) + len(word) + 3 <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"{'      ' if lines else '    '}{word}")
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


# --- functions --------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompilationTimes:
    """The total times of compilations, in seconds, also of unfinished ones.

    `compile` is None if nothing was compiled.
    """

    trace: float
    lower: float
    compile: float | None


def times_of(compilations: Iterable[Compilation]) -> CompilationTimes:
    """Return the total times of compilations."""
    every = list(compilations)
    times = [
        compilation.unfinished_seconds
        if compilation.compile_seconds is None
        else compilation.compile_seconds
        for compilation in every
    ]
    compile_times = [seconds for seconds in times if seconds is not None]
    return CompilationTimes(
        sum(compilation.trace_seconds for compilation in every),
        sum(compilation.lower_seconds for compilation in every),
        sum(compile_times) if compile_times else None,
    )


def count_text(compilations: Sequence[Compilation]) -> str:
    """Return the number of compilations as text: `3 times in 2 processes`."""
    count, processes = len(compilations), len({compilation.process for compilation in compilations})
    said = "once" if count == 1 else f"{count:,} times"
    return f"{said} in {processes:,} processes" if processes > 1 else said


def _functions_table(run: Run, most: int, width: int) -> RenderableType:
    shown = run.functions[:most]
    times = [times_of(function.compilations) for function in shown]
    columns: dict[str, list[str]] = {
        "share": [share_text(function.seconds, run.compile_seconds) for function in shown],
        "total": [duration(function.seconds) for function in shown],
        "trace": [duration(total.trace) for total in times],
        "lower": [duration(total.lower) for total in times],
        "compile": ["" if total.compile is None else duration(total.compile) for total in times],
        "programs": [f"{len(function.compilations):,}" for function in shown],
    }
    if any(function.calls for function in shown):
        all_calls = [function.calls for function in shown]
        columns["calls"] = [f"{calls.count:,}" if calls else "" for calls in all_calls]
        columns["in calls"] = [duration(calls.seconds) if calls else "" for calls in all_calls]
    wanted = min(max(len(" ".join(texts)) + 1 for texts in _named(shown, 0)), _WIDEST)
    for name in ("lower", "trace"):
        if width - _taken(columns) < wanted:
            del columns[name]
    room = max(width - _taken(columns), len("… 1,000 more"))
    names = [_name(*texts, room) for texts in _named(shown, room)]
    headings = *map(number_column, columns), Column("function")
    rows = list(zip(*columns.values(), names, strict=True))
    return drawn(Table("", headings, rows, len(run.functions) - len(shown)), option="")


def _taken(columns: Mapping[str, Sequence[str]]) -> int:
    return sum(max(map(len, (name, *column))) + 3 for name, column in columns.items())


def _named(functions: Sequence[Function], width: int) -> list[tuple[str, str]]:
    """Return the names of functions and their lines, without folders if these are too long."""
    names = [one_line(function.name) for function in functions]
    lines = [one_line(function.line) for function in functions]
    if max(len(name) + 2 + len(line) for name, line in zip(names, lines, strict=True)) > width:
        lines = short_paths(lines)
    return list(zip(names, lines, strict=True))


def _name(name: str, line: str, width: int) -> Cell:
    if len(name) > width:  # keep the end, where names of methods and layers differ
        end = (width - 1) // 2
        name = f"{name[: width - 1 - end]}…{name[len(name) - end :]}"
    room = width - len(name)
    return Cell([BinderToken(name), Comment(_cut(f"  {line}", room) if room > _LEAST_LINE else "")])


# --- recompilations ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Again:
    """A function that was compiled more than once, and why.

    Attributes:
        function: The function.
        reasons: The first reason of each kind and path, with the advice of the last, and the number
            of such reasons. Those of the slowest compilations come first.
    """

    function: Function
    reasons: Sequence[tuple[Reason, int]]

    @property
    def seconds(self) -> float:
        """The time of all compilations that have a reason."""
        return sum(
            compilation.seconds for compilation in self.function.compilations if compilation.reasons
        )


def recompiled(functions: Iterable[Function]) -> list[Again]:
    """Return the functions compiled more than once, the slowest to compile first."""
    recompilations = []
    for function in functions:
        same: defaultdict[tuple[str, str], list[Reason]] = defaultdict(list)
        seconds: Counter[tuple[str, str]] = Counter()
        for compilation in function.compilations:
            for reason in compilation.reasons:
                same[reason.kind, reason.path].append(reason)
                seconds[reason.kind, reason.path] += round(1e6 * compilation.seconds)
        if same:
            # The last advice has the most facts, such as how often a loop has called `jit`.
            kinds = (same[key] for key, _ in seconds.most_common())
            reasons = [(replace(group[0], advice=group[-1].advice), len(group)) for group in kinds]
            recompilations.append(Again(function, reasons))
    return sorted(recompilations, key=lambda again: -again.seconds)


def reason_text(reason: Reason, longest: int = _LONGEST) -> str:
    """Return a reason: `batch: i32[4,17] → i32[4,13] at train.py:31`."""
    before, after = one_line(reason.before, longest), one_line(reason.after, longest)
    change = " → ".join(filter(None, dict.fromkeys((before, after))))
    change += " (~: weak type)" if reason.kind == "weak_type" else ""
    what = f"{_LABELS.get(reason.kind, '')} {one_line(reason.path, longest)}".strip()
    if not reason.path:
        what = _WITHOUT_PATH.get(reason.kind, reason.kind)
    said = f"{what}: {change}" if change else what
    if reason.kind == "function" and after:
        said = after
    line = one_line(reason.line)
    return f"{said} at {line}" if line and not said.endswith(line) else said


def _reasons_table(recompilations: Sequence[Again], rows: _RowLimits, width: int) -> Group:
    table = Grid.grid(padding=(0, 2))
    table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_column(overflow="fold")
    names = [
        (
            one_line(again.function.name, width // 4),
            f", compiled {count_text(again.function.compilations)}",
        )
        for again in recompilations[: rows.again]
    ]
    room = max(width - max(len(name) + len(count) for name, count in names) - 4, _LEAST)
    for (name, count), again in zip(names, recompilations, strict=False):
        left = Text(name, style=tables.BINDER).append(count, style="default")
        table.add_row(left, _reasons(again.reasons, rows.reasons, room))
    if others := more(len(recompilations[rows.again :]), option=""):
        table.add_row(Text(others, style=tables.COMMENT))
    title = Text("compiled more than once, and why", style=tables.HEADING)
    return Group(title, Padding(table, (0, 0, 0, 2)))


def _is_cut(recompilations: Sequence[Again], rows: _RowLimits) -> bool:
    return len(recompilations) > rows.again or any(
        len(again.reasons) > rows.reasons for again in recompilations
    )


def _reasons(reasons: Sequence[tuple[Reason, int]], most: int, width: int) -> Text:
    lines = []
    for reason, count in reasons[:most]:
        longest = _LONGEST if width > _LONGEST else width // 2
        line = Text(_cut(reason_text(reason, longest), 2 * width))
        if count > 1:
            line.append(f", in {count:,} of them", style=tables.COMMENT)
        lines.append(line)
    if others := more(max(len(reasons) - most, 0), option=""):
        lines[-1].append(f" {others}", style=tables.COMMENT)
    advice = dict.fromkeys(reason.advice for reason, _ in reasons[:most] if reason.advice)
    lines += [
        Text(f"advice: {one_line(sentence, 3 * width)}", style=tables.LITERAL)
        for sentence in advice
    ]
    return Text("\n").join(lines)
