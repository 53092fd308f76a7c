"""The Pallas kernels of a program as tables, and as pictures of their blocks."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from jaxprtool.commands.kernels.block_sizes import MOST_SHOWN
from jaxprtool.errors import OutputError
from jaxprtool.ir.documents import duration, in_bytes, plural, with_prefix
from jaxprtool.ir.notation import BinderToken, Comment
from jaxprtool.render import views
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.tables import Rendering, drawn, split_rows

if TYPE_CHECKING:
    from jaxprtool.commands.kernels.block_sizes import CompiledKernel, KernelFit
    from jaxprtool.commands.kernels.kernels import (
        GridTable,
        KernelPart,
        KernelReport,
        KernelRow,
        UncountedKernel,
    )


def kernels_table(report: KernelReport, width: int, top: int | None = tables.ROWS) -> Rendering:
    """Return a row for each kernel, and a table of the blocks of each.

    Args:
        report: The kernels.
        width: The width in characters.
        top: The number of kernels shown; None for all.
    """
    count = plural(len(report.kernels), "Pallas kernel")
    caption = f"{report.name}: {count if report.kernels else 'no Pallas kernel'}"
    left_out = [Text(line) for line in _left_out(report)]
    if not report.kernels:
        return Rendering(Group(Text(caption, style=tables.HEADING), *left_out), width)
    shown, rest = split_rows(report.kernels, top)
    table = _summary(report, shown)._replace(caption=caption, more=len(rest))
    parts: list[RenderableType] = [drawn(table)]
    for row in shown:
        parts += [Text(), drawn(_blocks(row))]
        parts += [Text(note, style=tables.COMMENT) for note in kernel_notes(row)]
        if row.fit is not None:
            parts += _fit_parts(row, row.fit)
    for grid in report.steps:
        heading = f"{grid.name}, the first {plural(len(grid.steps), 'step')}"
        parts += [Text(), Text(heading, style=tables.HEADING), drawn(_steps(grid))]
        parts.append(Text("· is the block of the step before", style=tables.COMMENT))
    return Rendering(Group(*parts, *left_out), width)


def _left_out(report: KernelReport) -> Iterator[str]:
    """Yield what is not counted, and the shared memory of such kernels."""
    if report.uncounted:
        names = (f"{name} ({plural(n, 'equation')})" for name, n in report.uncounted.items())
        yield f"not counted: {', '.join(names)}"
    for other in report.others:
        if other.shared_bytes:
            yield f"{other.primitive} {other.place}: {_shared(other)}"


def _shared(kernel: UncountedKernel | KernelRow) -> str:
    size = f"at least {in_bytes(kernel.shared_bytes or 0)} of shared memory"
    if kernel.shared_limit is None:
        return size
    exceeds = (kernel.shared_bytes or 0) > kernel.shared_limit
    verb = "more than" if exceeds else "of"
    return f"{size}, {verb} the limit of {in_bytes(kernel.shared_limit)}"


def _summary(report: KernelReport, rows: Sequence[KernelRow]) -> views.Table:
    times = views.number_column("min time"), views.Column("limit", Comment)
    columns = (
        *(times if report.device is not None else ()),
        *map(views.number_column, ("calls", "FLOPs", "HBM", "VMEM")),
        views.Column("kernel", BinderToken),
    )
    return views.Table("", columns, [[*_row(row)] for row in rows])


def _row(row: KernelRow) -> Iterator[views.Cell | str]:
    if row.seconds is not None:
        yield from (views.Cell(duration(row.seconds), row.seconds), row.limit.removesuffix(" unit"))
    yield f"{row.calls}{'*' if row.per_round else ''}"
    yield _range(row.least_flops, row.work.flops, with_prefix)
    yield _bytes(row.work.bytes)
    yield "·" if row.vmem_bytes is None else _bytes(row.vmem_bytes)
    place = str(row.place)
    yield views.Cell(place or "unknown line", link=place or None, below=views.Cell(row.name))


def _range(least: Any, most: Any, text: Callable[[int], str]) -> str:
    """Return a number, or the range of two, which may be symbolic."""
    texts = [text(n) if _is_number(n) else str(n) for n in (least, most)]
    return " to ".join(dict.fromkeys(texts))


def _bytes(number: Any) -> str:
    return in_bytes(number) if _is_number(number) else f"{number} bytes"


def _blocks(row: KernelRow) -> views.Table:
    columns = (
        views.Column("Ref", BinderToken),
        views.Column("block"),
        *map(views.number_column, ("buffers", "VMEM", "copies", "HBM")),
    )
    grid = ", ".join("?" if size is None else str(size) for size in row.grid)
    caption = f"{row.name}, {f'grid ({grid})' if row.grid else 'one step'}"
    return views.Table(
        caption, columns, [[*_part(part, row.vmem_bytes is not None)] for part in row.parts]
    )


def _part(part: KernelPart, is_tpu: bool) -> Iterator[views.Cell | str]:
    yield part.name
    yield part.text
    has_buffers = part.vmem_bytes and is_tpu
    yield f"{part.buffers}" if has_buffers else "·"
    yield _bytes(part.vmem_bytes) if has_buffers else "·"
    if part.kind == "scratch":
        yield from ("·", "·")
        return
    fetches, size = part.fetches, part.bytes
    most, most_size = (
        n if m is None else m for n, m in ((fetches, part.most_fetches), (size, part.most_bytes))
    )
    yield _range(fetches, most, "{:,}".format)
    yield _range(size, most_size, in_bytes)


def kernel_notes(row: KernelRow) -> Iterator[str]:
    """Yield the notes on a kernel: its units, whether it fits, and what is not counted."""
    counts = [f"{with_prefix(flops, 'FLOP')} of {name} products" for name, flops in _known(row)]
    if _is_number(row.work.transcendentals) and row.work.transcendentals:
        counts.append(f"{with_prefix(row.work.transcendentals)} transcendentals")
    copies = [
        f"{verb} {_bytes(number)}"
        for verb, number in (("reads", row.work.bytes_read), ("writes", row.work.bytes_written))
    ]
    yield ", ".join([*counts, *copies])
    if row.vmem_limit is not None:
        limit, needs = in_bytes(row.vmem_limit), f"at least {_bytes(row.vmem_bytes)}"
        if row.fits:
            yield f"VMEM: {needs} of the limit of {limit}"
        else:
            yield f"does not fit: it needs {needs} of VMEM, and the limit is {limit}"
            if row.fit is None:
                yield "--fit lists block sizes that would fit"
    if row.compiled is not None:
        yield f"compiled alone: {_compiled_text(row.compiled)}"
        yield from (row.compiled.message or "").splitlines()
    if row.backend == "triton":
        yield "shared memory: not known, Triton's compiler assigns it"
    elif row.shared_bytes is not None:
        yield f"scratch: {_shared(row)}"
    if row.uncounted:
        names = (f"{name} ({n})" for name, n in row.uncounted.items())
        yield f"these figures are at least; not counted: {', '.join(names)}"
    if row.per_round:
        yield "* counts one iteration of each loop whose number of iterations is unknown"


def _compiled_text(compiled: CompiledKernel) -> str:
    if not compiled.fits:
        return "not compiled" if compiled.fits is None else "refused"
    return "fits" if compiled.bytes is None else f"fits, {in_bytes(compiled.bytes)}"


# --- other block sizes ----------------------------------------------------------------------------


def _fit_parts(row: KernelRow, fit: KernelFit) -> Iterator[RenderableType]:
    """Yield the table of other block sizes of a kernel, and what it says about its axes."""
    yield Text()
    if fit.axes:
        yield drawn(_choices(row, fit))
    else:
        yield Text(f"{row.name}, no other block sizes", style=tables.HEADING)
    yield from (Text(note, style=tables.COMMENT) for note in fit_notes(fit))


def _choices(row: KernelRow, fit: KernelFit) -> views.Table:
    is_compiled = any(choice.compiled for choice in fit.choices)
    columns = (
        views.Column(""),
        *(views.number_column(axis.name) for axis in fit.axes),
        views.Column("grid", Comment),
        *map(views.number_column, ("min time", "HBM", "VMEM")),
        *([views.Column("compiled")] if is_compiled else ()),
    )
    shown = [("now", replace(fit.now, compiled=row.compiled))]
    shown += [(str(i), choice) for i, choice in enumerate(fit.choices[:MOST_SHOWN], 1)]
    rows = []
    for label, choice in shown:
        cells: list[views.Cell | str] = [label, *map(str, choice.sizes)]
        cells += [",".join(map(str, choice.grid)), duration(choice.seconds)]
        cells += [_bytes(choice.bytes), in_bytes(choice.vmem_bytes)]
        if is_compiled:
            text = "·" if choice.compiled is None else _compiled_text(choice.compiled)
            cells.append(text.removeprefix("fits, "))
        rows.append(cells)
    fitting = f"{len(fit.choices):,} of {fit.tried:,} fit"
    return views.Table(f"{row.name}, other block sizes: {fitting}", columns, rows)


def fit_notes(fit: KernelFit) -> Iterator[str]:
    """Yield what the axes of other block sizes are, which are fixed, and what the compiler says."""
    for axis in fit.axes:
        what = "a new first axis of the grid" if axis.is_new else f"sizes along axis {axis.name}"
        rounding = "; the sum is rounded otherwise" if axis.sums else ""
        yield f"{axis.name}: {what}, of {', '.join(axis.dimensions)}{rounding}"
    for fixed in fit.fixed:
        line = f" ({fixed.place})" if fixed.place else ""
        which = f"axis {fixed.name} stays" if fixed.name else "all sizes stay"
        yield f"{which}: {fixed.reason}{line}"
    for number, choice in enumerate(fit.choices[:MOST_SHOWN], 1):
        if choice.compiled is not None and choice.compiled.message:
            yield f"{number}, {_compiled_text(choice.compiled)}: {choice.compiled.message}"
    if fit.choices:
        yield "the minimum time counts no step's start; measure before you choose"


def _known(row: KernelRow) -> Iterator[tuple[str, int]]:
    return ((name, flops) for name, flops in row.products.items() if _is_number(flops) and flops)


def _is_number(value: Any) -> bool:
    """Return False if a figure is symbolic."""
    return isinstance(value, int)


def kernels_view(reports: Sequence[KernelReport]) -> views.PageView:
    """Return the view of a page: a table of the kernels of each program, and of their blocks."""
    tables, facts = list[views.Table](), list[str]()
    for report in reports:
        tables.append(_summary(report, report.kernels)._replace(caption=report.name))
        for row in report.kernels:
            tables.append(_blocks(row))
            facts += [f"{row.name}: {note}" for note in kernel_notes(row)]
    return views.PageView("kernels", facts, tables)


class KernelsDocument(NamedTuple):
    """`kernels`, of one program or several."""

    programs: Annotated[Sequence[KernelReport], "Each program, with its kernels."]


def _steps(grid: GridTable) -> views.Table:
    columns = [views.number_column(name) for name in grid.axes]
    columns += [views.Column(name) for name in grid.blocks]
    rows = [
        [
            *map(str, step.position),
            *("·" if index is None else _index_text(index) for index in step.indices),
        ]
        for step in grid.steps
    ]
    return views.Table("", columns, rows)


def _index_text(index: Any) -> str:
    return f"({', '.join('?' if i is None else str(i) for i in index)})"


# --- pictures -------------------------------------------------------------------------------------
# Pictures of kernels: which block each step of the grid reads or writes, drawn by matplotlib.
#
# Each Ref has two panels: its array in blocks, coloured by the first step that has the block, and
# the number of the block in each step, with a mark where it is copied.


#: The number of steps that are drawn, if no other is requested.
MOST_DRAWN = 256

#: The most blocks of an array that are numbered.
_NUMBERED = 64


def kernels_picture(report: KernelReport, file_format: str) -> bytes:
    """Return a picture of the first steps of each kernel, "svg" or "png".

    Args:
        report: The kernels, with steps (`KernelReport.steps`).
        file_format: The format.

    Raises:
        OutputError: If no kernel has steps that are known.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    drawn = [(row, grid) for row, grid in zip(report.kernels, report.steps, strict=True)]
    drawn = [(row, grid) for row, grid in drawn if grid.steps and grid.blocks]
    if not drawn:
        raise OutputError(f"{report.name} has no Pallas kernel with steps that are known")
    count = sum(len(grid.blocks) for _, grid in drawn)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "1", "font.size": 8}):
        figure = Figure(figsize=(9, 0.5 + 1.7 * count), layout="constrained")
        title = f"{report.name}: blocks, each with the first step that has it"
        figure.suptitle(title, x=0.01, ha="left", fontsize=9, parse_math=False)
        panels = figure.subplots(count, 2, squeeze=False, width_ratios=(1, 2.2))
        line = 0
        for row, grid in drawn:
            parts = {part.name: part for part in row.parts}
            for number, name in enumerate(grid.blocks):
                indices = _indices(grid, number)
                title = f"{row.name}, " if not number and len(drawn) > 1 else ""
                _draw_array(panels[line, 0], parts[name], indices, title)
                _draw_steps(panels[line, 1], parts[name], grid, indices)
                line += 1
        file = io.BytesIO()
        figure.savefig(
            file, format=file_format, metadata={"Date": None} if file_format == "svg" else None
        )
    return file.getvalue()


def _indices(grid: GridTable, number: int) -> list[tuple[int, ...] | None]:
    """Return the index of a block in each step; None where it depends on data."""
    indices: list[tuple[int, ...] | None] = []
    for step in grid.steps:
        index = step.indices[number]
        if index is None:  # that of the step before
            indices.append(indices[-1])
        else:
            indices.append(None if None in index else index)  # type: ignore[arg-type]
    return indices


def _draw_array(
    axes: Any, part: KernelPart, indices: Sequence[tuple[int, ...] | None], title: str
) -> None:
    """Draw an array in blocks, each with the first step that has it."""
    axes.set_title(f"{title}{part.name}: {part.text}", loc="left", fontsize=8, parse_math=False)
    axes.set_xticks([])
    axes.set_yticks([])
    known = [(step, index) for step, index in enumerate(indices) if index is not None]
    if not known:
        axes.text(0.5, 0.5, "depends on data", ha="center", va="center")
        return
    first = _first_steps(known)
    axes.imshow(first, cmap="viridis", aspect="auto", interpolation="nearest")
    if first.size <= _NUMBERED:
        middle = np.nanmax(first) / 2
        for (i, j), step in np.ndenumerate(first):
            if not np.isnan(step):
                colour = "white" if step <= middle else "black"
                axes.text(j, i, f"{step:.0f}", ha="center", va="center", color=colour, fontsize=7)


def _first_steps(known: Sequence[tuple[int, tuple[int, ...]]]) -> np.ndarray:
    """Return the first step of each block, in rows and columns; NaN for a block of no step."""
    index = np.array([index or (0,) for _, index in known])
    index = index - np.minimum(index.min(0), 0)
    shape = index.max(0) + 1
    moving = [d for d, n in enumerate(shape) if n > 1]
    columns = moving[-1:] if len(moving) > 1 or moving == [len(shape) - 1] else []
    rows = [d for d in moving if d not in columns]
    first = np.full(tuple(shape), np.nan)
    for (step, _), where in zip(reversed(known), index[::-1], strict=True):
        first[tuple(where)] = step
    height = int(np.prod([shape[d] for d in rows], dtype=int))
    return first.reshape(height, -1)


def _draw_steps(
    axes: Any, part: KernelPart, grid: GridTable, indices: Sequence[tuple[int, ...] | None]
) -> None:
    """Draw the number of the block in each step, with a mark where it is copied."""
    numbers = {index: i for i, index in enumerate(sorted({i for i in indices if i is not None}))}
    steps = [(step, numbers[index]) for step, index in enumerate(indices) if index is not None]
    colour = "tab:orange" if part.kind == "output" else "tab:blue"
    if steps:
        xs, ys = zip(*steps, strict=True)
        copied = [(x, y) for i, (x, y) in enumerate(steps) if not i or indices[x] != indices[x - 1]]
        axes.plot(xs, ys, drawstyle="steps-post", color=colour, linewidth=0.8)
        axes.plot(*zip(*copied, strict=True), ".", color=colour, markersize=4)
    axes.set_xlim(-0.5, len(indices) - 0.5)
    axes.margins(y=0.15)
    axes.locator_params(axis="both", integer=True)
    verb = "written" if part.kind == "output" else "read"
    axes.set_ylabel(f"block {verb}")
    if part.name == grid.blocks[-1]:
        names = ", ".join(grid.axes)
        axes.set_xlabel(f"step ({names}; the last axis fastest)" if names else "step")
    axes.spines[["top", "right"]].set_visible(False)
