"""The memory of a program as a curve and a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from jaxprtool.ir.basics.quantities import in_bytes, times
from jaxprtool.render.terminal import theme
from jaxprtool.render.terminal.rendering import Rendering
from jaxprtool.render.terminal.tables import (
    add_more,
    described,
    new_table,
    number,
    share_text,
    text,
)
from jaxprtool.render.terminal.top import ALL, split

if TYPE_CHECKING:
    from jaxprtool.analysis.memory import Live, Memory, Point

#: The number of lines of a curve, and its maximum width in columns.
_HEIGHT, _WIDEST = 12, 120

#: The characters of the curve itself.
_BRAILLE = r"[\u2800-\u28ff]+"

#: The maximum number of marks of the curve's axis.
_MARKS = 4


def memory_table(found: Memory, width: int, top: int | None, option: str = ALL) -> Rendering:
    """Return the curve of a program, and a row for each of the `top` largest groups at its peak.

    Args:
        found: The memory of the program.
        width: The width in characters.
        top: The number of groups shown; None for all.
        option: The option that shows all; "" if none does.
    """
    parts: list[RenderableType] = [Text(peak_text(found), style=theme.HEADING)]
    if kinds := kinds_text(found):
        parts.append(Text(kinds))
    if found.temporary_bytes:
        parts += [Text(), _curve(found, min(width, _WIDEST))]
    if found.live:
        columns = number("share"), number("bytes"), text("values", theme.TYPE)
        table = new_table("", *columns, text("value and last reader"))
        shown, others = split(found.live, top)
        for each in shown:
            share = share_text(each.bytes, found.peak_bytes)
            what = described(*what_texts(each), how_long_text(each))
            table.add_row(share, in_bytes(each.bytes), times(each.count, each.type), what)
        rest = sum(each.bytes for each in others)
        cells = share_text(rest, found.peak_bytes), in_bytes(rest), ""
        add_more(table, len(others), *cells, option=option)
        parts += [Text(), table]
    return Rendering(Group(*parts), width)


# --- texts ------------------------------------------------------------------------------------


def peak_text(found: Memory) -> str:
    """Return the peak and its place: `loss: 1.5 MiB, peak at model.py:9 dot_general`."""
    where, left_out = place_text(found.at), unknown_text(found.unknown)
    if left_out:
        left_out = f", {left_out} (--compiled counts it)"
    place = f", peak at {where}" if where else ""
    return f"{found.name}: {in_bytes(found.peak_bytes)}{left_out}{place}"


def unknown_text(unknown: Iterable[str]) -> str:
    """Return the primitives inside which nothing is counted: `not counted inside: eig`; or ""."""
    return f"not counted inside: {', '.join(unknown)}" if unknown else ""


def kinds_text(found: Memory) -> str:
    """Return the parts of the peak: `arguments 1.0 MiB, temporaries 512 bytes`."""
    kinds = {
        "arguments": found.argument_bytes,
        "results": found.result_bytes,
        "constants": found.constant_bytes,
        "temporaries": found.temporary_bytes,
    }
    text = ", ".join(f"{name} {in_bytes(size)}" for name, size in kinds.items() if size)
    if found.donated_bytes:
        text += f"; {in_bytes(found.donated_bytes)} of the results reuse donated arguments"
    return text


def place_text(point: Point) -> str:
    """Return the line and the primitive at a point; empty before the first equation."""
    return " ".join(filter(None, (point.source, point.primitive)))


def what_texts(live: Live) -> tuple[str, str]:
    """Return the name or the line of values, and the primitive that computes them."""
    if live.kind in ("argument", "constant", "result"):
        return live.name, ""
    if live.kind == "room":
        return f"buffer for {live.name}", ""
    if live.kind == "workspace":
        return live.source or "unknown line", f"inside {live.primitive}"
    if live.kind == "row" and live.name:
        return f"a row of {live.name}", ""
    if live.name:
        return f"{live.name}, broadcast", ""
    note = ", a row of it" if live.kind == "row" else ""
    return live.source or "unknown line", live.primitive + note


def how_long_text(live: Live) -> str:
    """Return the end or the start of values' lifetime: `until add at model.py:9`."""
    if live.kind == "room":
        return f"written later by {live.primitive}{_at(live.source)}"
    where = _at("" if live.reader_source == live.source else live.reader_source)
    return f"until {live.reader}{where}" if live.reader else ""


def _at(source: str) -> str:
    return f" at {source}" if source else ""


# --- the curve --------------------------------------------------------------------------------


def _curve(found: Memory, width: int) -> Text:
    """Return the curve as Braille dots, from zero bytes to slightly above the peak."""
    import plotext

    plotext.terminal.limit(False, False)  # use our width instead of the terminal's
    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, _HEIGHT)
    signal = figure.signal(*zip(*_steps(found, width), strict=True), marker="braille")
    figure.draw(signal.fillx())
    ticks = marks(found.peak_bytes, _MARKS)
    figure.ruler("y").lim(0, found.peak_bytes).ticks(ticks, list(map(in_bytes, ticks)))
    figure.ruler("x").ticks([found.at.position], ["peak"])
    figure.label("equations in execution order", "x")
    text = figure.build().string(colorless=True)
    drawn = Text("\n".join(line.rstrip() for line in text.splitlines()), no_wrap=True)
    drawn.highlight_regex(_BRAILLE, theme.BINDER)
    return drawn


def marks(peak: int, most: int) -> list[int]:
    """Return at most `most` multiples of a power of two up to a number of bytes."""
    step = 1
    while peak > most * step:
        step *= 2
    return list(range(0, peak + 1, step))


def _steps(found: Memory, width: int) -> Iterator[tuple[float, int]]:
    """Yield points dense enough to fill the area below them: two for each column of dots."""
    last, curve, number = found.curve[-1].position, iter(found.curve), 4 * width
    point = next(curve)
    following = next(curve, None)
    for i in range(number + 1):
        position, highest = i * last / number, 0
        while following is not None and following.position <= position:
            point, following = following, next(curve, None)
            highest = max(highest, point.bytes)
        yield position, max(highest, point.bytes)
