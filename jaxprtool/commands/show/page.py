"""The page of an HLO module: its kernels in order, their cost, memory and copies, and the source.

    module_page(stored_module("dump/jit_step"))

The tables are those of `show`, `cost` and `memory` in the terminal, and sort. A line of a table
leads to the line of the source, whose heat is its share of the bytes that kernels move.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxprtool.commands.cost.estimate import Cost
from jaxprtool.commands.cost.modules import ModuleWork, kernel_runs, module_cost
from jaxprtool.commands.cost.table import cost_view
from jaxprtool.commands.memory.compiled import module_peak
from jaxprtool.commands.memory.table import (
    buffers_table,
    copies_table,
    heading_text,
    peak_facts,
)
from jaxprtool.commands.show.modules import ModuleRow, module_rows, module_summary
from jaxprtool.formats.hlo import StoredModule
from jaxprtool.ir import source_text
from jaxprtool.ir.documents import in_bytes, with_prefix
from jaxprtool.ir.hlo.module import HloModule
from jaxprtool.ir.notation import BinderToken, Comment, PrimitiveName, Type
from jaxprtool.render import views
from jaxprtool.render.page import PageSources, environment, hash_of, page_table, static_files
from jaxprtool.render.terminal.listing import ShowOptions


class _HeatOfLine(NamedTuple):
    """The share of a line in the bytes that a module moves, and the text that says so."""

    share: float
    text: str


def module_page(stored: StoredModule) -> str:
    """Return a page of a module: tables beside the user's files."""
    module = stored.module
    costs = [module_cost(module, by, stored.assignment) for by in ("line", "scope", "kernel")]
    view = cost_view(costs)
    facts, tables = [*view.facts], [_kernels_table(module), *view.tables]
    if module.schedule:
        peak = module_peak(stored)
        facts += [f"memory {heading_text(peak)}", *peak_facts(peak)]
        tables.append(buffers_table(peak)._replace(caption="memory at the peak"))
        if (copies := copies_table(peak.copies, None)) is not None:
            tables.append(copies._replace(caption="copies"))
    texts, notes = _source_files(costs[0])
    sources = PageSources(ShowOptions(), True, (), texts)
    script = static_files("shared.js", "icicle.js")
    return (
        environment()
        .get_template("profile.html")
        .render(
            title=f"{module.name}: {module_summary(module)}",
            kind="module",
            notes=[*facts, *notes],
            icicles=[],
            tables=[page_table(table, sources.line_of) for table in tables],
            files=sources.files(),
            times=_heat(costs[0]),
            css=static_files("listing.css", "page.css", "icicle.css"),
            script=script,
            script_hash=hash_of(script),
        )
    )


def _source_files(cost: Cost) -> tuple[dict[str, str], list[str]]:
    """Return the texts of the user's files of a cost by line, and notes on those that changed."""
    files: dict[str, str] = {}
    for group in cost.groups:
        if group.line is not None and group.line.own:
            files.setdefault(group.name.rpartition(":")[0], group.line.file)
    texts = {path: text for path, file in files.items() if (text := source_text.file_text(file))}
    changed = (path for path, file in files.items() if source_text.reason(file))
    return texts, list(map(source_text.citation_note, changed))


def _heat(cost: Cost) -> dict[str, _HeatOfLine]:
    total = max(cost.total.work.bytes, 1)
    return {
        group.name: _HeatOfLine(group.work.bytes / total, in_bytes(group.work.bytes))
        for group in cost.groups
        if group.name
    }


def _kernels_table(module: HloModule) -> views.Table:
    """Return a row for each kernel, in the order in which they run."""
    columns = (
        *map(views.number_column, ("order", "runs", "bytes", "FLOPs")),
        views.Column("kernel", BinderToken),
    )
    runs, work = kernel_runs(module), ModuleWork(module)
    rows = []
    for number, row in enumerate(module_rows(module), 1):
        times = runs.get(row.op, 0)
        parts = [part.work.times(times) for part in work.parts(row.op)] if times else []
        size = sum(part.bytes for part in parts)
        flops = sum(part.flops + part.transcendentals for part in parts)
        rows.append(
            [
                views.Cell(str(number), number),
                views.Cell(f"{times:,}" if times else "", times),
                views.Cell(in_bytes(size) if size else "·", size),
                views.Cell(with_prefix(flops) if flops else "·", flops),
                _kernel_cell(row),
            ]
        )
    return views.Table("kernels in the order in which they run", columns, rows)


def _kernel_cell(row: ModuleRow) -> views.Cell:
    text = [row.op.name, Type(f" {row.op.shape} "), PrimitiveName(row.what)]
    reads: Sequence[str] = list(_reads(row))
    below = views.Cell(Comment(", ".join(reads))) if reads else None
    return views.Cell(text, link=row.place or None, indent=row.depth, below=below)


def _reads(row: ModuleRow) -> Iterator[str]:
    """Yield what a kernel reads, and its line."""
    if row.reads:
        yield f"of {', '.join(row.reads)}"
    if row.place:
        yield str(row.place)
