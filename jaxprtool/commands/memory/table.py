"""The memory of a program for the terminal: the estimate, XLA's buffers, and pictures."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from jaxprtool.ir.documents import document, in_bytes, plural, times
from jaxprtool.ir.frames import Root, frames_now
from jaxprtool.ir.meshes import partitioner_notes
from jaxprtool.ir.notation import BinderToken, Comment, PrimitiveName, Type
from jaxprtool.ir.scopes import function_levels
from jaxprtool.ir.source_text import BEHIND
from jaxprtool.render import views
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.tables import ALL, Rendering, drawn, share_text

if TYPE_CHECKING:
    from jaxprtool.commands.memory.compiled import CompiledPeak, LineBytes, PeakBuffer
    from jaxprtool.commands.memory.donatable import Donatable
    from jaxprtool.commands.memory.estimate import Live, Memory, Point
    from jaxprtool.ir.hlo.origins import InsertedCopy
    from jaxprtool.ir.repetition import TemporaryMemory

# --- memory ---------------------------------------------------------------------------------------
# The memory of a program as a curve and a table for the terminal.

#: The number of lines of a curve, and its maximum width in columns.
_HEIGHT, _WIDEST = 12, 120

#: The characters of the curve itself.
_BRAILLE = r"[\u2800-\u28ff]+"

#: The maximum number of marks of the curve's axis.
_MARKS = 4


def memory_table(
    memory: Memory,
    width: int,
    top: int | None = tables.ROWS,
    option: str = ALL,
    missing: Donatable | None = None,
) -> Rendering:
    """Return the curve of a program, and a row for each of the `top` largest groups at its peak.

    Args:
        memory: The memory of the program.
        width: The width in characters.
        top: The number of groups shown; None for all.
        option: The option that shows all; "" if none does.
        missing: The arguments that could be donated, said below the table.
    """
    parts: list[RenderableType] = [Text(peak_text(memory), style=tables.HEADING)]
    if kinds := kinds_text(memory):
        parts.append(Text(kinds))
    if memory.temporary_bytes:
        parts += [Text(), _curve(memory, min(width, _WIDEST))]
    if memory.live:
        parts += [Text(), drawn(_live_table(memory, ""), top, option)]
    if missing is not None:
        parts += [Text(), Text(donation_text(missing), style=tables.LITERAL)]
    return Rendering(Group(*parts), width)


def _live_table(memory: Memory, caption: str) -> views.Table:
    columns = (
        views.share_column(is_summed=True),
        views.number_column("bytes", in_bytes),
        views.Column("values", Type),
        views.Column("value and last reader"),
    )
    return views.Table(caption, columns, [_live_row(live, memory) for live in memory.live])


def _live_row(live: Live, memory: Memory) -> list[views.Cell]:
    until = live.source if live.kind == "room" else live.reader_source
    below = views.Cell(how_long_text(live), link=until)
    return [
        views.share(live.bytes, memory.peak_bytes),
        views.bytes_cell(live.bytes),
        views.Cell(times(live.count, live.type), live.count),
        views.value_cell(*live_texts(live))._replace(link=live.source, below=below),
    ]


# --- texts ------------------------------------------------------------------------------------


def donation_text(missing: Donatable) -> str:
    """Return the advice to donate: `donate_argnames="state" lowers the peak by up to 16.0 MiB`."""
    condition = "" if missing.is_dropped else ", if the caller does not use it again"
    return f"{missing.option} lowers the peak by up to {in_bytes(missing.saved_bytes)}{condition}"


def peak_text(memory: Memory) -> str:
    """Return the peak and its place: `loss: 1.5 MiB, peak at model.py:9 dot_general`."""
    where, left_out = point_text(memory.at), unknown_text(memory.unknown)
    if left_out:
        left_out = f", {left_out} (--compiled counts it)"
    place = f", peak at {where}" if where else ""
    kernels = f"; kernels take {in_bytes(memory.vmem_bytes)} of VMEM" if memory.vmem_bytes else ""
    return f"{memory.name}: {in_bytes(memory.peak_bytes)}{left_out}{place}{kernels}"


def unknown_text(unknown: Iterable[str]) -> str:
    """Return the primitives inside which nothing is counted: `not counted inside: eig`; or ""."""
    return f"not counted inside: {', '.join(unknown)}" if unknown else ""


def kinds_text(memory: Memory) -> str:
    """Return the parts of the peak: `arguments 1.0 MiB, temporaries 512 bytes`."""
    kinds = {
        "arguments": memory.argument_bytes,
        "results": memory.result_bytes,
        "constants": memory.constant_bytes,
        "temporaries": memory.temporary_bytes,
    }
    text = ", ".join(f"{name} {in_bytes(size)}" for name, size in kinds.items() if size)
    if memory.donated_bytes:
        text += f"; {in_bytes(memory.donated_bytes)} of the results reuse donated arguments"
    return text


def point_text(point: Point) -> str:
    """Return the line and the primitive at a point; empty before the first equation."""
    return " ".join(filter(None, (point.source, point.primitive)))


def live_texts(live: Live) -> tuple[str, str]:
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


def _curve(memory: Memory, width: int) -> Text:
    """Return the curve as Braille dots, from zero bytes to slightly above the peak."""
    import plotext

    plotext.terminal.limit(False, False)  # use our width instead of the terminal's
    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, _HEIGHT)
    signal = figure.signal(*zip(*_steps(memory, width), strict=True), marker="braille")
    figure.draw(signal.fillx())
    ticks = marks(memory.peak_bytes, _MARKS)
    figure.ruler("y").lim(0, memory.peak_bytes).ticks(ticks, list(map(in_bytes, ticks)))
    figure.ruler("x").ticks([memory.at.position], ["peak"])
    figure.label("equations in execution order", "x")
    text = figure.build().string(colorless=True)
    drawn = Text("\n".join(line.rstrip() for line in text.splitlines()), no_wrap=True)
    drawn.highlight_regex(_BRAILLE, tables.BINDER)
    return drawn


def marks(peak: int, most: int) -> list[int]:
    """Return at most `most` multiples of a power of two up to a number of bytes."""
    step = 1
    while peak > most * step:
        step *= 2
    return list(range(0, peak + 1, step))


def _steps(memory: Memory, width: int) -> Iterator[tuple[float, int]]:
    """Yield points dense enough to fill the area below them: two for each column of dots."""
    last, curve, number = memory.curve[-1].position, iter(memory.curve), 4 * width
    point = next(curve)
    following = next(curve, None)
    for i in range(number + 1):
        position, highest = i * last / number, 0
        while following is not None and following.position <= position:
            point, following = following, next(curve, None)
            highest = max(highest, point.bytes)
        yield position, max(highest, point.bytes)


# --- memory picture -------------------------------------------------------------------------------
# Pictures of the memory curve of a program, drawn by matplotlib.


def memory_picture(memory: Memory, file_format: str) -> bytes:
    """Return the curve of a program's memory as a picture, "svg" or "png"."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "1"}):
        figure = Figure(figsize=(8, 3.4), layout="constrained")
        axes = figure.add_subplot()
        positions = [point.position for point in memory.curve]
        axes.fill_between(
            positions, [point.bytes for point in memory.curve], step="post", alpha=0.4
        )
        axes.step(positions, [point.bytes for point in memory.curve], where="post")
        axes.plot([memory.at.position], [memory.at.bytes], "o", markersize=4)
        axes.set_title(
            f"{memory.name}: {in_bytes(memory.peak_bytes)}", loc="left", parse_math=False
        )
        axes.annotate(
            point_text(memory.at),
            (memory.at.position, memory.at.bytes),
            xytext=(0, 6),
            textcoords="offset points",
            ha="right" if memory.at.position > positions[-1] / 2 else "left",
            parse_math=False,
        )
        axes.set_xlim(0, max(positions[-1], 1))
        axes.set_ylim(0, 1.15 * max(memory.peak_bytes, 1))
        axes.set_xlabel("equations in execution order")
        ticks = marks(memory.peak_bytes, 8)
        axes.set_yticks(ticks, list(map(in_bytes, ticks)))
        axes.spines[["top", "right"]].set_visible(False)
        file = io.BytesIO()
        figure.savefig(
            file, format=file_format, metadata={"Date": None} if file_format == "svg" else None
        )
    return file.getvalue()


# --- compiled memory ------------------------------------------------------------------------------
# XLA's buffers at the peak of a compiled program, by line, as a table for the terminal.

#: The number of buffers shown for a line.
_BUFFERS = 4


def compiled_table(
    peak: CompiledPeak, width: int, top: int | None = tables.TALL_ROWS, option: str = ALL
) -> Rendering:
    """Return the memory of a compiled program, and a row for each of the `top` largest lines.

    Args:
        peak: XLA's buffers at the peak.
        width: The width in characters.
        top: The number of lines shown; None for all.
        option: The option that shows all; "" if none does.
    """
    table = drawn(buffers_table(peak), top, option)
    heading = Text(heading_text(peak), style=tables.HEADING)
    parts: list[RenderableType] = [heading, *map(Text, peak_facts(peak)), Text(), table]
    if (copies := copies_table(peak.copies, top)) is not None:
        parts += [Text(), drawn(copies, top, option)]
    return Rendering(Group(*parts), width)


def buffers_table(peak: CompiledPeak) -> views.Table:
    """Return a row for each line with memory at the peak, and its largest buffers."""
    is_estimated = peak.estimate_bytes is not None
    columns = (
        views.share_column(is_summed=True),
        views.number_column("bytes", in_bytes),
        *([views.number_column("estimate", in_bytes)] if is_estimated else ()),
        views.Column("line and its buffers"),
    )
    rows = []
    for line in peak.lines:
        sizes = (line.bytes, line.estimate_bytes) if is_estimated else (line.bytes,)
        cells = [
            views.share(line.bytes, peak.peak_bytes),
            *map(views.bytes_cell, sizes),
            views.Cell(BinderToken(line.line)),
        ]
        rows.append(views.RowGroup(cells, list(_buffers(line, len(sizes)))))
    return views.Table("", columns, rows)


def heading_text(peak: CompiledPeak) -> str:
    """Return the peak and the estimate: `loss: 1.5 MiB compiled, 1.4 MiB estimated`."""
    where = f" on each of {peak.devices} devices" if peak.devices > 1 else ""
    size = in_bytes(peak.peak_bytes)
    if peak.estimate_bytes is None:
        return f"{peak.name}: {'about ' if peak.by_schedule else ''}{size}{where}"
    size = f"about {size}" if peak.by_schedule else size
    estimate = in_bytes(peak.estimate_bytes)
    whole = " with whole arrays" if peak.estimate_is_whole else ""
    left_out = f", {more}" if (more := unknown_text(peak.unknown)) else ""
    return f"{peak.name}: {size} compiled{where}, {estimate} estimated{whole}{left_out}"


def peak_facts(peak: CompiledPeak) -> Iterator[str]:
    """Yield lines with the place and the parts of the peak, and how values share memory."""
    kinds = {
        "arguments": peak.argument_bytes,
        "results": peak.result_bytes,
        "constants": peak.constant_bytes,
        "temporaries": peak.temporary_bytes,
    }
    parts = ", ".join(f"{name} {in_bytes(size)}" for name, size in kinds.items() if size)
    if peak.donated_bytes:
        parts += f"; {in_bytes(peak.donated_bytes)} of the results reuse donated arguments"
    if peak.at:
        yield f"peak at {peak.at}"
    if parts:
        yield parts
    if peak.by_schedule:
        yield (
            "by the schedule: XLA's own assignment is not known; it may leave gaps, or use "
            "results' memory"
        )
    if peak.temporary_bytes and not peak.by_schedule:
        values, room = in_bytes(peak.unshared_bytes), in_bytes(peak.temporary_bytes)
        unused = share_text(peak.unused_bytes, peak.temporary_bytes)
        yield f"values of {values} share the {room} of temporaries; {unused} is unused at the peak"
    reported = in_bytes(peak.peak_bytes if peak.reported_bytes is None else peak.reported_bytes)
    if peak.reported_memory:
        yield (
            f"XLA's peak_memory_in_bytes is {reported}: instead of the temporaries, it counts the "
            f"values in memory {peak.reported_memory}, which are more but not in the main memory"
        )
    elif reported != in_bytes(peak.peak_bytes):
        yield f"XLA's peak_memory_in_bytes is {reported}: it does not count what is unused"


def _buffers(line: LineBytes, columns: int) -> Iterator[views.Row]:
    """Yield the sizes, in one of some columns, and descriptions of a line's largest buffers."""
    rest_of = [""] * (columns - 1)
    for buffer in line.buffers[:_BUFFERS]:
        type_ = f"{times(buffer.count, buffer.type)} " if buffer.type else ""
        note = _note(buffer, line.line)
        what = [Type(type_), PrimitiveName(buffer.what), Comment(f", {note}" if note else "")]
        yield ["", Comment(in_bytes(buffer.bytes)), *rest_of, views.Cell(what, indent=1)]
    if rest := line.buffers[_BUFFERS:]:
        what = [Comment(plural(len(rest), "other"))]
        size = in_bytes(sum(buffer.bytes for buffer in rest))
        yield ["", Comment(size), *rest_of, views.Cell(what, indent=1)]


def _note(buffer: PeakBuffer, line: str) -> str:
    """Return the end of the lifetime of buffers, and the other uses of their memory."""
    until = f"until {buffer.until.removesuffix(f' at {line}')}" if buffer.until else ""
    return ", ".join(filter(None, (until, buffer.shares)))


# --- copies ---------------------------------------------------------------------------------------
# The copies that XLA inserts, also in the tables of `cost` and `profile`.

#: Copies of fewer bytes, such as the counter of a loop, are only shown if all rows are.
_LEAST_COPY = 64

#: The heading of what is copied.
COPIED = "copied by XLA, and why"

#: Why a copy is made, in words about the operations that write and read the array.
_REASONS = {
    "overwritten": "{written} overwrites it, {read} needs the old elements",
    "not donated": "the argument is not donated, and {written} updates it",
    "constant": "{written} updates it",
    "returned": "a result needs memory of its own",
    "another carry": "it becomes another carry of the loop",
    "layout": "for another layout",
}


def copies_table(copies: Sequence[InsertedCopy], top: int | None) -> views.Table | None:
    """Return a table of the copies that XLA inserted; None if there are none to show.

    Args:
        copies: The copies.
        top: The number of rows that will be shown; None for all, also small copies.
    """
    shown = [copy for copy in copies if top is None or is_of_array(copy)]
    if not shown:
        return None
    columns = (
        views.number_column("bytes", in_bytes),
        views.number_column("copies"),
        views.Column(COPIED),
    )
    rows = [[views.bytes_cell(copy.bytes), *copy_cells(copy)] for copy in shown]
    return views.Table("", columns, rows)


def is_of_array(copy: InsertedCopy) -> bool:
    """Return True if each copy is of `_LEAST_COPY` bytes or more."""
    runs = copy.count if copy.runs is None else copy.runs
    return copy.bytes >= _LEAST_COPY * runs > 0


def copy_cells(copy: InsertedCopy) -> list[views.Cell]:
    """Return the cells of how often a call makes copies, and of what is copied, and why."""
    runs = f"{copy.count:,} x ?" if copy.runs is None else f"{copy.runs:,}"
    return [
        views.Cell(runs, copy.runs),
        views.Cell(
            [Type(f"{copy.type} "), PrimitiveName(copied_text(copy))],
            link=copy.place or None,
            below=views.Cell(copy_reason(copy)),
        ),
    ]


def copied_text(copy: InsertedCopy) -> str:
    """Return what is copied: `carry of the loop at model.py:20, at first params['w']`."""
    if copy.kind == "carry":
        return f"carry of the loop{_at(copy.loop)}, at first {copy.value}"
    return f"argument {copy.value}" if copy.kind == "argument" else copy.value


def copy_reason(copy: InsertedCopy) -> str:
    """Return why a copy is made: `add at model.py:9 overwrites it, …`; "" if it is unknown."""
    if copy.reason == "overwritten" and not copy.read:
        return f"{copy.written} overwrites it"
    reason = _REASONS.get(copy.reason, "")
    return reason.format(written=copy.written, read=copy.read)


# --- page -----------------------------------------------------------------------------------------
# The view of a page: sortable tables, with the contents of those of the terminal.


#: The width and height of a curve in units of its picture, and the number of values at its peak.
_SCALE, _AT_PEAK = 1000, 3


def memory_view(memories: Sequence[Memory | str], split: str | None = None) -> views.PageView:
    """Return the view of the memory of programs, or why it is unknown; see `cost_view`."""
    usages = [usage for usage in memories if not isinstance(usage, str)]
    return views.PageView(
        "memory",
        [
            *partitioner_notes(usages, split),
            *(
                usage if isinstance(usage, str) else _memory_fact(usage, split)
                for usage in memories
            ),
        ],
        [_live_table(usage, f"live at the peak of {usage.name}") for usage in usages],
        list(map(_page_curve, usages)),
    )


def _memory_fact(usage: Memory, split: str | None) -> str:
    is_whole = split is not None and usage.left_to_partitioner
    whole = "arrays have their whole size" if is_whole else ""
    return "; ".join(filter(None, (peak_text(usage), kinds_text(usage), whole)))


def _page_curve(usage: Memory) -> views.Curve:
    """Return the curve of bytes over the equations in execution order."""
    points, highest = usage.curve, max(usage.peak_bytes, 1)
    last = points[-1].position + 1
    ends = [*(point.position for point in points[1:]), last]
    steps = []
    for point, end in zip(points, ends, strict=True):
        left, right = (round(_SCALE * at / last, 1) for at in (point.position, end))
        top = round(_SCALE * (1 - point.bytes / highest), 1)
        text = f"{in_bytes(point.bytes)} {point_text(point)}"
        steps.append(views.CurveStep(left, right, top, text, point.source))
    label = f"{usage.name}: memory from the first equation to the last"
    axis = [(round(100 * size / highest, 1), in_bytes(size)) for size in marks(highest, 4)]
    largest = [
        views.Cell(
            f"{in_bytes(live.bytes)} {' '.join(filter(None, live_texts(live)))}", link=live.source
        )
        for live in usage.live[:_AT_PEAK]
    ]
    return views.Curve(label, steps, axis, steps[points.index(usage.at)], largest)


#: The top frame of a live value, by its kind.
_TOP_FRAMES = {
    "argument": "arguments",
    "constant": "constants",
    "result": "results",
    "room": "results",
}


def memory_icicle(
    usage: Memory, roots: Sequence[Root], line_of: views.Lines
) -> views.Icicle | None:
    """Return the flame graph of the values live at the peak: by kind, function, line, and type.

    Args:
        usage: The memory of a program.
        roots: The folders of the user's files, as the `Program` has them.
        line_of: Returns a line of a displayed file by name.
    """
    reader = frames_now(roots)
    amounts: defaultdict[views.FramePath, int] = defaultdict(int)
    for value in usage.peak_values:
        top = _TOP_FRAMES.get(value.kind, "temporaries")
        if value.name:
            path = re.findall(r"[^\[\]'\".]+", value.name)
        else:
            functions = (level.name for level in function_levels(value.frames[::-1], reader))
            path = [*functions, value.source.partition(BEHIND)[0]]
        amounts[top, *path, " ".join(filter(None, (value.primitive, value.type)))] += value.bytes
    note = "functions and lines that compute the values"
    return views.icicle("live at the peak", usage.name, amounts, in_bytes, line_of, note)


def memory_line(memory: TemporaryMemory) -> str:
    """Return the estimated memory of an outlined program, and its ratio to that as traced.

    It ends with a warning if the ratio is large.
    """
    line = f"about {in_bytes(memory.outlined)}"
    if memory.as_traced:
        line += f", {multiple_text(memory.outlined / memory.as_traced)} times as much as traced"
    return line + (" (a large increase)" if memory.needs_warning else "")


def multiple_text(number: float) -> str:
    """Return a ratio as a text, with a decimal if it is small."""
    return f"{number:.1f}" if number < 10 else f"{number:,.0f}"


class ModuleMemoryDocument(NamedTuple):
    """`memory`, of an HLO module."""

    peak_bytes: Annotated[int, "The bytes that the module needs on each device."]
    compiled: Annotated[CompiledPeak, "Its buffers at the peak."]


@document(optional=("compiled", "donatable"))
class MemoryDocument(NamedTuple):
    """`memory`, of one program."""

    peak_bytes: Annotated[int, "The bytes that the first program needs."]
    at: Annotated[Point, "The peak."]
    live: Annotated[Sequence[Live], "The values live at the peak, the largest first."]
    programs: Annotated[Sequence[Memory], "Each program."]
    compiled: Annotated[CompiledPeak | None, "With `--compiled`: XLA's buffers."] = None
    donatable: Annotated[
        Donatable | None, "The arguments that the first program could donate, if that saves 1 MiB."
    ] = None
