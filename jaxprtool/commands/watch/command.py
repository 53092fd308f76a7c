"""`jaxprtool watch`: statistics of the intermediate values of a function."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from math import isfinite
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Group
from rich.text import Text

from jaxprtool.cli import options, output
from jaxprtool.cli.options import OUTPUT, RUN, Panel
from jaxprtool.cli.session import (
    Session,
    command,
    file_to_save,
    printed_by_functions,
    ready,
    require_device,
    save_arrays,
)
from jaxprtool.errors import OutputError
from jaxprtool.ir.source_text import BEHIND
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.tables import Rendering, more, split_rows

if TYPE_CHECKING:
    from jaxprtool.commands.watch.watch import Numbers, Stopped, Watched, WatchedRow
    from jaxprtool.ir.program import Program

# --- table ----------------------------------------------------------------------------------------
# Watched values, as a table.

_BARS = "▁▂▃▄▅▆▇█"

#: The minimum share of elements for which losses are shown, and for separate powers of two.
_LEAST = 0.001

#: The width of a number, and the minimal and maximal width of the histogram.
_NUMBER, _NARROW, _WIDE = 10, 16, 40

_INDENT = "  "


def watched_text(watched: Watched, width: int, top: int | None = tables.ROWS) -> Rendering:
    """Return a row for each line, scope or equation: the source, then statistics.

    Args:
        watched: The values.
        width: The width in characters.
        top: The number of rows; None for all.
    """
    if not watched.rows:
        return Rendering(Text(f"{watched.name}: no selected value is computed"), width)
    low, high = _range(watched.rows)
    bars = max(_NARROW, min(_WIDE, width // 5))
    rows, rest = split_rows(watched.rows, top)
    numbered = max(len(_label(row)) for row in rows)
    lines = [
        Text(f"{watched.name}: values by {watched.by}", style=tables.HEADING),
        Text(
            _INDENT
            + "".join([" " * numbered, *(f"{name:>{_NUMBER}}" for name in _NUMBERS)])
            + (f"  2^{low} … 2^{high}" if low <= high else ""),
            style=tables.COMMENT,
        ),
    ]
    previous: tuple[str, bool] | None = None
    for row in rows:
        if (row.name, row.backward) != previous:
            lines.append(_name(watched, row, width))
        previous = row.name, row.backward
        numbers = Text(_INDENT + f"{_label(row):<{numbered}}", style=tables.COMMENT)
        numbers.append("".join(f"{_number(x):>{_NUMBER}}" for x in _four(row.numbers)), "default")
        histogram = f"  {_histogram(row.numbers, low, high, bars)}".rstrip()
        numbers.append(histogram, style=tables.PARAMETER)
        remarks = ", ".join(_remarks(row.numbers))
        room = width - len(numbers) - 2
        if remarks and len(remarks) <= room:
            numbers.append(f"  {remarks}", style=tables.LITERAL)
            remarks = ""
        lines.append(numbers)
        indent = _INDENT + " " * numbered
        for line in wrap(remarks, width, initial_indent=indent, subsequent_indent=indent):
            lines.append(Text(line, style=tables.LITERAL))
    lines += [Text(_more(rest), style=tables.COMMENT)] if rest else []
    return Rendering(Group(*lines), width)


def _more(rest: Sequence[WatchedRow]) -> str:
    """Return the number of rows that are not shown, and how many of them are not finite."""
    bad = sum(bool(row.numbers.nans or row.numbers.infs) for row in rest)
    return more(len(rest), f", {bad:,} of them with NaN or inf" if bad else "")


_NUMBERS = "minimum", "maximum", "mean", "std"


def _four(numbers: Numbers) -> Iterator[float | None]:
    yield from (numbers.low, numbers.high, numbers.mean, numbers.deviation)


def _range(rows: Sequence[WatchedRow]) -> tuple[int, int]:
    """Return the least and greatest power of two of a histogram, without rare smallest ones."""
    counts: Counter[int] = Counter()
    for row in rows:
        counts.update(row.numbers.exponents)
    powers, below, total = sorted(counts), 0, counts.total()
    for low in powers:
        below += counts[low]
        if below >= _LEAST * total:
            return low, powers[-1]
    return 0, -1


def _label(row: WatchedRow) -> str:
    """Return the iteration of a row, and whether it has the intermediates of a line."""
    label = f"iteration {', '.join(map(str, row.iteration))} " if row.iteration else ""
    return f"{label}inside " if row.intermediate else label


def _name(watched: Watched, row: WatchedRow, width: int) -> Text:
    name, behind, library = row.name.partition(BEHIND)
    text = Text(name, style=tables.BINDER).append(behind + library, style=tables.COMMENT)
    if watched.by == "equation":
        (primitive,), (type_text,) = row.primitives, row.types
        if primitive != row.name:
            text.append(f" {primitive}", style=tables.PRIMITIVE)
        text.append(f" {type_text}", style=tables.TYPE)
        text.append(f" {row.source.partition(BEHIND)[0]}", style=tables.COMMENT)
    if row.backward and watched.by != "scope":
        text.append(" backward", style=tables.KEYWORD)
    if row.code:
        text.append(f"  {row.code}", style="default")
    text.truncate(width, overflow="ellipsis")
    return text


def _remarks(numbers: Numbers) -> Iterator[str]:
    for count, what in ((numbers.nans, "NaN"), (numbers.infs, "infinite"), (numbers.zeros, "zero")):
        if count:
            yield f"{_share(count / numbers.size)} {what}"
    for name, lost in numbers.lost.items():
        over = f"{_share(lost.overflow)} over" if lost.overflow >= _LEAST else ""
        under = f"{_share(lost.underflow)} under" if lost.underflow >= _LEAST else ""
        if over or under:
            yield f"{name} {' '.join(filter(None, (over, under)))}"


def _share(part: float) -> str:
    return "all" if part == 1 else f"{part:.1%}" if part >= _LEAST else "< 0.1%"


def _histogram(numbers: Numbers, low: int, high: int, bars: int) -> str:
    """Return a histogram of the powers of two from `low` to `high` in at most `bars` bars."""
    if not numbers.exponents:
        return ""
    step = -(-(high - low + 1) // bars)
    counts = [0] * -(-(high - low + 1) // step)
    for power, count in numbers.exponents.items():
        counts[max(power - low, 0) // step] += count
    most = max(counts)
    return "".join(_BARS[(len(_BARS) * n - 1) // most] if n else " " for n in counts)


def _number(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:.3g}" if abs(number) < 1e5 or not isfinite(number) else f"{number:.2e}"


# --- command --------------------------------------------------------------------------------------
# `jaxprtool watch`: statistics of the intermediate values of a function.

_WATCHED = Panel("Values")


#: The groupings of values.
By = Literal["line", "scope", "equation"]


def parsed_rounds(text: str) -> tuple[int | slice, ...]:
    """Return the numbers and slices of a list such as `0,10,-1` or `::100`."""
    iterations: list[int | slice] = []
    for part in text.split(","):
        if re.fullmatch(r"\s*-?\d+\s*", part):
            iterations.append(int(part))
            continue
        ends = part.split(":")
        if len(ends) not in (2, 3) or not all(re.fullmatch(r"\s*(-?\d+)?\s*", e) for e in ends):
            raise typer.BadParameter(
                f"'{text}' is not a list of iterations such as 0,10,-1 or ::100"
            )
        numbers = [int(end) if end.strip() else None for end in ends]
        if numbers[2:] == [0]:
            raise typer.BadParameter(f"'{part}' has a step of 0")
        iterations.append(slice(*numbers))
    return tuple(iterations)


_By = Annotated[
    By,
    _WATCHED.choice(
        "--by",
        By,
        "Show one row per source line, module scope, or equation.",
    ),
]
_Only = Annotated[
    Any,
    _WATCHED.option(
        "--only",
        "NAME,…",
        "Show only the results of these primitives: dot_general,conv*",
        parser=options.names,
    ),
]
_Rounds = Annotated[
    Any,
    _WATCHED.option(
        "--rounds",
        "N,…",
        "Show these loop iterations, each in its own row: 0,10,-1 or ::100. Default: all in one "
        "row.",
        parser=parsed_rounds,
    ),
]
_Break = Annotated[
    str | None,
    RUN.option(
        "--break",
        "LINE",
        "Open a prompt with the values of this line (model.py:12, or 12 in TARGET's file).",
    ),
]
_Save = Annotated[
    str | None,
    OUTPUT.option(
        "--save",
        "FILE.npz",
        "Write the values, with the names of --by equation. bfloat16 is stored as float32.",
    ),
]


@command
def watch_command(
    session: Session,
    types: options.Types = None,
    by: _By = "line",
    only: _Only = None,
    rounds: _Rounds = None,
    backend: options.Backend = None,
    device: options.Device = None,
    seed: options.Seed = 0,
    stop: _Break = None,
    save: _Save = None,
    top: options.Top = None,
    all: options.All = False,
    json: options.Json = False,
    pager: options.Pager = False,
) -> None:
    """Run a function and summarize its intermediate values.

    Show the range, mean, deviation, zeros, NaNs, infinities, a histogram of exponents, and the loss
    in bf16, f16 and fp8. Values inside calls, branches, loop iterations and backward passes are
    included.

    [bold]Examples[/]

      jaxprtool watch samples/rnn.py:loss -p grad
      jaxprtool watch samples/rnn.py:loss --by equation --only dot_general
      jaxprtool watch samples/rnn.py:loss --rounds 0,-1 --save values.npz
    """
    shown = options.row_limit(top, all, None if pager else options.ROWS)
    output.refuse_stdout("--save", save, "watch")
    session.start(cache=True)
    from jaxprtool.commands.watch.watch import watch
    from jaxprtool.ir.conversions import with_scalar_predicates

    require_device(session.function, backend, device)
    with file_to_save(save) as file:
        prepared = ready(session.given("watch takes", types), seed, backend, device)
        # Stop at equations of the program that is actually run.
        program = with_scalar_predicates(prepared.program)
        stops = _equations_of(program, stop, session.target) if stop else frozenset[int]()
        session.on_progress("" if stop else f"running {program.name}")
        with printed_by_functions(json):
            watched = watch(
                program,
                prepared.filled.arguments,
                by=by,
                only=only,
                rounds=rounds,
                values=save is not None,
                device=prepared.device,
                stops=stops,
                stop=_prompt,
            )
        if file:
            save_arrays(watched.values, file)
    prepared.note_random(session.target)
    for loop in watched.left_out:
        output.note(f"values inside {loop}, in a shard_map, are not watched")
    if json:
        output.write_json(watched)
        return
    with output.paged(pager):
        output.write_rendered(watched_text(watched, output.width(), shown))


def _equations_of(program: Program, line: str, target: str) -> frozenset[int]:
    """Return the equations of a source line, by `id`."""
    from jaxprtool.analysis.points import point
    from jaxprtool.loading.target import split_target

    file = split_target(target).place
    if line.isdigit():
        if not file.endswith(".py"):
            raise OutputError(
                f"TARGET is not a file, so '{line}' is not a line of it",
                f"write --break FILE.py:{line}",
            )
        line = f"{file}:{line}"
    ids = point(program, f"line:{line}").start.equations.values()
    return frozenset(eqn_id for of_body in ids for eqn_id in of_body)


def _prompt(stopped: Stopped) -> None:
    """Open a prompt with the values of a line; Ctrl-D continues the run, exit() ends it."""
    import jax.numpy as jnp
    import numpy as np

    iterations = ", ".join(map(str, stopped.iteration))
    about = stopped.source + (f", iteration {iterations}" if iterations else "")
    named = {name: value for name, value in stopped.values.items() if name.isidentifier()}
    local = {"np": np, "jnp": jnp, **named, "values": dict(stopped.values)}
    lines = [f"{name}: {getattr(x, 'aval', x)}" for name, x in stopped.values.items()]
    banner = "\n".join(
        [about, *(f"  {line}" for line in lines), "values is a dict of all; Ctrl-D continues, "]
    )
    try:
        from IPython.terminal import embed  # type: ignore[import-not-found]
    except ImportError:
        import code

        try:
            code.interact(f"{banner}exit() ends the run", local=local, exitmsg="")
        except SystemExit:
            raise typer.Exit from None
        return
    banner += "%exit_raise ends the run\n"
    try:
        embed.embed(user_ns=local, banner1=banner, confirm_exit=False, colors="neutral")
    except embed.KillEmbedded:
        raise typer.Exit from None
