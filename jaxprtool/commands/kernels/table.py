"""The Pallas kernels of a program as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from jaxprtool.commands.kernels.fit import MOST_SHOWN
from jaxprtool.ir.documents import duration, in_bytes, plural, with_prefix
from jaxprtool.ir.notation.tokens import BinderToken, Comment
from jaxprtool.render import views
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.tables import Rendering, drawn, split_rows

if TYPE_CHECKING:
    from jaxprtool.commands.kernels.fit import CompiledKernel, KernelFit
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
