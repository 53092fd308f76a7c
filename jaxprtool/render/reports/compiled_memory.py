"""XLA's buffers at the peak of a compiled program, by line, as a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from jaxprtool.ir.basics.quantities import in_bytes, plural, times
from jaxprtool.render.reports.memory import unknown_text
from jaxprtool.render.terminal import theme
from jaxprtool.render.terminal.rendering import Rendering
from jaxprtool.render.terminal.tables import add_more, new_table, number, share_text, text
from jaxprtool.render.terminal.top import ALL, split

if TYPE_CHECKING:
    from jaxprtool.analysis.memory.compiled import CompiledPeak, LineBytes, PeakBuffer

#: The number of buffers shown for a line.
_BUFFERS = 4


def compiled_table(
    found: CompiledPeak, width: int, top: int | None, option: str = ALL
) -> Rendering:
    """Return the memory of a compiled program, and a row for each of the `top` largest lines.

    Args:
        found: XLA's buffers at the peak.
        width: The width in characters.
        top: The number of lines shown; None for all.
        option: The option that shows all; "" if none does.
    """
    columns = number("share"), number("bytes"), number("estimate")
    table = new_table("", *columns, text("line and its buffers"))
    shown, rest = split(found.lines, top)
    for line in shown:
        share = share_text(line.bytes, found.peak_bytes)
        sizes = in_bytes(line.bytes), in_bytes(line.estimate_bytes)
        table.add_row(share, *sizes, Text(line.line, style=theme.BINDER))
        for bytes_text, what in _buffers(line):
            below = Padding(what, (0, 0, 0, 2))
            table.add_row("", Text(bytes_text, style=theme.COMMENT), "", below)
    size, estimate = sum(each.bytes for each in rest), sum(each.estimate_bytes for each in rest)
    cells = share_text(size, found.peak_bytes), in_bytes(size), in_bytes(estimate)
    add_more(table, len(rest), *cells, option=option)
    heading = Text(heading_text(found), style=theme.HEADING)
    return Rendering(Group(heading, *map(Text, facts(found)), Text(), table), width)


def heading_text(found: CompiledPeak) -> str:
    """Return the peak and the estimate: `loss: 1.5 MiB compiled, 1.4 MiB estimated`."""
    each = f" on each of {found.devices} devices" if found.devices > 1 else ""
    size, estimate = in_bytes(found.peak_bytes), in_bytes(found.estimate_bytes)
    whole = " with whole arrays" if found.estimate_is_whole else ""
    left_out = f", {more}" if (more := unknown_text(found.unknown)) else ""
    return f"{found.name}: {size} compiled{each}, {estimate} estimated{whole}{left_out}"


def facts(found: CompiledPeak) -> Iterator[str]:
    """Yield lines with the place and the parts of the peak, and how values share memory."""
    kinds = {
        "arguments": found.argument_bytes,
        "results": found.result_bytes,
        "constants": found.constant_bytes,
        "temporaries": found.temporary_bytes,
    }
    parts = ", ".join(f"{name} {in_bytes(size)}" for name, size in kinds.items() if size)
    if found.donated_bytes:
        parts += f"; {in_bytes(found.donated_bytes)} of the results reuse donated arguments"
    if found.at:
        yield f"peak at {found.at}"
    if parts:
        yield parts
    if found.temporary_bytes:
        values, held = in_bytes(found.unshared_bytes), in_bytes(found.temporary_bytes)
        unused = share_text(found.unused_bytes, found.temporary_bytes)
        yield f"values of {values} share the {held} of temporaries; {unused} is unused at the peak"


def _buffers(line: LineBytes) -> Iterator[tuple[str, Text]]:
    """Yield the size and a description of the largest buffers of a line."""
    for each in line.buffers[:_BUFFERS]:
        cell = Text()
        if each.type:
            cell.append(f"{times(each.count, each.type)} ", style=theme.TYPE)
        cell.append(each.what, style=theme.PRIMITIVE)
        if note := _note(each, line.line):
            cell.append(f", {note}", style=theme.COMMENT)
        yield in_bytes(each.bytes), cell
    if rest := line.buffers[_BUFFERS:]:
        size = sum(each.bytes for each in rest)
        yield in_bytes(size), Text(f"{plural(len(rest), 'other')}", style=theme.COMMENT)


def _note(buffer: PeakBuffer, line: str) -> str:
    """Return the end of the lifetime of buffers, and the other uses of their memory."""
    until = f"until {buffer.until.removesuffix(f' at {line}')}" if buffer.until else ""
    return ", ".join(filter(None, (until, buffer.shares)))
