"""The page of an HLO module: its kernels in order, their cost, memory and copies, and the source.

    module_page(stored_module("dump/jit_step"))

The tables are those of `show`, `cost` and `memory` in the terminal, and sort. A line of a table
leads to the line of the source, whose heat is its share of the bytes that kernels move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Annotated, NamedTuple

from jaxprtool.commands.cost.estimate import Cost
from jaxprtool.commands.cost.modules import (
    ModuleWork,
    PartOrigins,
    kernel_runs,
    module_cost,
)
from jaxprtool.commands.cost.table import cost_view
from jaxprtool.commands.memory.compiled import module_peak
from jaxprtool.commands.memory.table import (
    buffers_table,
    copies_table,
    heading_text,
    peak_facts,
)
from jaxprtool.formats.hlo import StoredModule
from jaxprtool.ir import source_text
from jaxprtool.ir.documents import document, in_bytes, plural, with_prefix
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.hlo.module import CALLS, Computation, HloModule, Instruction
from jaxprtool.ir.notation import (
    BinderToken,
    Comment,
    Heading,
    PrimitiveName,
    Type,
)
from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.render import views
from jaxprtool.render.page import PageSources, environment, hash_of, page_table, static_files
from jaxprtool.render.terminal.lines import Listing, joined_lines, printable
from jaxprtool.render.terminal.listing import ShowOptions
from jaxprtool.render.terminal.tables import more, split_rows
from jaxprtool.render.terminal.tree import computes

#: The number of operands that a row lists.
_OPERANDS = 4

#: Instructions whose result is an operand, or a part of one.
_PASSED_ON = frozenset(("bitcast", "get-tuple-element", "optimization-barrier", "copy-done"))

#: Instructions without a row: values that come from elsewhere, and those that are passed on.
_NO_ROW = _PASSED_ON | {"parameter", "constant", "tuple", "after-all", "partition-id"}


class ModuleRow(NamedTuple):
    """A row of the listing.

    Attributes:
        depth: The number of loops and branches around it.
        op: The instruction.
        what: What it computes: `fusion[add, tanh]`, or `while[10 times]`.
        reads: The values that it reads.
        place: The user's line; "" if it has none.
    """

    depth: int
    op: Instruction
    what: str
    reads: tuple[str, ...]
    place: Place


@document(optional=("place",))
@dataclass(frozen=True)
class ShownKernel:
    """A kernel of a module, or a loop, branch or call around kernels.

    Attributes:
        name: Its name.
        type: The type of its result.
        what: What it computes: `fusion[add, tanh]`, or `while[10 times]`.
        depth: The number of loops and branches around it.
        reads: The values that it reads.
        place: The user's line; "" if it has none.
    """

    name: str
    type: str
    what: str
    depth: int
    reads: tuple[str, ...]
    place: Place


class ModuleListingDocument(NamedTuple):
    """`show`, of an HLO module."""

    name: Annotated[str, "The name of the module."]
    summary: Annotated[str, "Its size, in words."]
    kernels: Annotated[Sequence[ShownKernel], "Its kernels, in the order in which they run."]


def module_document(
    module: HloModule, depth: int | None = None, only: Collection[str] = ()
) -> ModuleListingDocument:
    """Return the document of a module; see `module_listing`."""
    rows = (row for row in module_rows(module, depth) if _is_shown(module, row, only))
    kernels = [
        ShownKernel(row.op.name, str(row.op.shape), row.what, row.depth, row.reads, row.place)
        for row in rows
    ]
    return ModuleListingDocument(module.name, module_summary(module), kernels)


def module_rows(module: HloModule, depth: int | None = None) -> Iterator[ModuleRow]:
    """Yield the rows of a module: all, or those in at most `depth` loops and branches."""
    yield from _Rows(module, depth).of(module.entry, 0)


class _Rows:
    """The rows of a module, with a function that several instructions call below the first."""

    def __init__(self, module: HloModule, depth: int | None) -> None:
        self._module, self._most = module, depth
        self._origins = PartOrigins(module, frames_now())
        self._listed = set[int]()

    def of(self, computation: Computation, depth: int) -> Iterator[ModuleRow]:
        """Yield the rows of a function, which has `depth` loops and branches around it."""
        module = self._module
        order = module.schedule.get(computation.id) or [op.id for op in computation.instructions]
        for op in (module.instructions[number] for number in order):
            if op.opcode in _NO_ROW:
                continue
            if op.opcode not in CALLS:
                reads = tuple(dict.fromkeys(_name(module, number) for number in op.operands))
                place = self._origins.of(op, op).place.user
                yield ModuleRow(depth, op, computes(module, op), reads, place)
                continue
            yield ModuleRow(depth, op, computes(module, op), (), UNKNOWN)
            if self._most is None or depth < self._most:
                for number in op.calls[:1] if op.opcode == "while" else op.calls:
                    if number not in self._listed:
                        self._listed.add(number)
                        yield from self.of(module.computations[number], depth + 1)


def _name(module: HloModule, number: int) -> str:
    """Return the name of a value: of the kernel that computes it, or of an argument."""
    op, index = module.instructions[number], ""
    while op.opcode in _PASSED_ON:
        if op.opcode == "get-tuple-element":
            index = f"[{op.tuple_index}]{index}"
        op = module.instructions[op.operands[0]]
    if op.opcode == "parameter":
        is_argument = op in module.entry.instructions
        return (op.op_name if is_argument and op.op_name else "carry" if index else op.name) + index
    return op.name + index


def module_listing(
    module: HloModule,
    depth: int | None = None,
    only: Collection[str] = (),
    most: int | None = None,
) -> Listing:
    """Return the listing of a module.

    Args:
        module: The module.
        depth: The number of nested loops and branches that are opened; None for all.
        only: Patterns of opcodes; other instructions are left out.
        most: The number of rows shown; None for all.
    """
    rows = [row for row in module_rows(module, depth) if _is_shown(module, row, only)]
    shown, rest = split_rows(rows, most)
    lines: list[list[str]] = [[Heading(f"{module.name}: {module_summary(module)}")], []]
    lines += map(_line, shown)
    if rest:
        lines.append([Comment(more(len(rest), option="--full"))])
    return Listing(printable(joined_lines(lines)))


def _is_shown(module: HloModule, row: ModuleRow, only: Collection[str]) -> bool:
    opcodes = {row.op.opcode, *(op.opcode for op in module.inside(row.op))}
    return not only or any(fnmatch(opcode, pattern) for opcode in opcodes for pattern in only)


def _line(row: ModuleRow) -> list[str]:
    """Return a row in the notation of jaxprs: `fusion.3:f32[8] = fusion[add, tanh] x copy.2`."""
    shape = row.op.shape
    type_ = _tuple_type(row.op) if shape.parts else str(shape)
    reads = [*row.reads[:_OPERANDS], *(["…"] if row.reads[_OPERANDS:] else [])]
    line = ["  " * row.depth, BinderToken(row.op.name), ":", Type(type_), " = "]
    line += [PrimitiveName(row.what), *(f" {value}" for value in reads)]
    return [*line, Comment(f"  # {row.place}")] if row.place else line


def _tuple_type(op: Instruction) -> str:
    shapes = list(map(str, op.shape.parts))
    return f"({', '.join(shapes[:2])}{', …' if shapes[2:] else ''})"


def module_summary(module: HloModule) -> str:
    """Return the number of kernels, and the bytes of the arguments and results."""
    opcodes = Counter(kernel.opcode for kernel in kernel_runs(module))
    counts = [plural(sum(opcodes.values()), "kernel")]
    counts += [plural(opcodes["fusion"], "fusion")] if opcodes["fusion"] else []
    counts += [f"{opcodes['copy']:,} copies"] if opcodes["copy"] else []
    arguments = sum(op.shape.bytes for op in module.entry.instructions if op.opcode == "parameter")
    counts.append(f"arguments {in_bytes(arguments)}")
    counts.append(f"results {in_bytes(module.entry.root.shape.bytes)}")
    if module.devices > 1:
        counts.append(f"on each of {module.devices} devices")
    if not module.schedule:
        counts.append("before XLA's optimizations")
    return ", ".join(counts)


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
