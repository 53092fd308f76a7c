"""The cost of a program as a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from rich.console import Group as Parts
from rich.console import RenderableType
from rich.table import Column
from rich.text import Text

from jaxprtool.ir import source_text
from jaxprtool.ir.documents import document, duration, in_bytes, plural, with_prefix
from jaxprtool.ir.frames import BEHIND
from jaxprtool.ir.paths import alike
from jaxprtool.render import views
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.tables import (
    Rendering,
    add_more,
    new_table,
    number_column,
    share_text,
    split_rows,
    text_column,
)

if TYPE_CHECKING:
    from jaxprtool.analysis.devices import DeviceSpec
    from jaxprtool.commands.cost.estimate import Cost, FrameCost, Group
    from jaxprtool.commands.shardings.partitions import Shardings
    from jaxprtool.commands.source.lines import Source

#: The label of groups without a name.
_UNNAMED = {
    "line": "unknown line",
    "scope": "outside all scopes",
    "primitive": "",
    "dtype": "",
    "argument": "reads no argument",
}

#: The minimal width of the names of groups.
_LEAST = 20

#: The minimum share of dead FLOPs or bytes for a note.
_LEAST_DEAD = 0.01

#: The marks of a number that is a range, and of one that is counted for one iteration.
RANGE, _PER_ITERATION = " to ", "*"

#: The remark on numbers of whole arrays, next to those of each device.
WHOLE = " with whole arrays"


def cost_table(
    cost: Cost,
    width: int,
    top: int | None = tables.ROWS,
    device: DeviceSpec | None = None,
    beside_devices: bool = False,
) -> Rendering:
    """Return the cost of a program, with a row for each of the `top` most expensive groups.

    Args:
        cost: The cost.
        width: The width in characters.
        top: The number of groups shown; None for all.
        device: The device of the estimated times, if the groups have times.
        beside_devices: Whether it is shown next to the work of each device.
    """
    whole_arrays = beside_devices and bool(cost.left_to_partitioner)
    groups = cost.groups
    if cost.by == "scope" and split_rows(groups, top)[1]:
        groups = _merged_scopes(groups)
    shown, rest = split_rows(groups, top)
    if cost.by == "scope":
        shown = sorted(shown, key=_in_tree(shown))
    times = number_column("min time"), Column("limit", style=tables.COMMENT)
    table = new_table(
        f"{cost.name}: {total_text(cost.total, whole_arrays)}",
        number_column("share"),
        *(times if cost.total.seconds is not None else ()),
        *map(number_column, ("FLOPs", "bytes", "FLOPs/B")),
        text_column(cost.by, tables.BINDER),
    )
    whole = weight_of(cost.total)
    rows = [[*_cells(group, whole)] for group in shown]
    headings = [str(column.header) for column in table.columns[:-1]]
    taken = sum(max(map(len, column)) + 3 for column in zip(headings, *rows, strict=True))
    for group, cells in zip(shown, rows, strict=True):
        table.add_row(*cells, _name(cost, group, max(width - taken, _LEAST)))
    add_more(table, len(rest), *[""] * (len(table.columns) - 1))
    parts: list[RenderableType] = [table]
    lines = list(cost_notes(cost, device, whole_arrays))
    if lines:
        parts += [Text(), *map(Text, lines)]
    return Rendering(Parts(*parts), width)


def total_text(total: Group, whole_arrays: bool = False) -> str:
    """Return the total cost of a program: `108.6 MFLOP, 9.5 MiB`.

    Args:
        total: The cost.
        whole_arrays: Whether to say that arrays have their whole size, as on one device.
    """
    flops = number_text(total, "flops") or "0"
    unit = "FLOP" if re.search(r" [a-zA-Z]$", flops) else " FLOP"
    return f"{flops}{unit}, {bytes_text(total.work.bytes)}{WHOLE if whole_arrays else ''}"


def _cells(group: Group, whole: float | None) -> Iterator[str]:
    yield share_text(weight_of(group), whole)
    if group.seconds is not None:
        yield from (duration(group.seconds), group.limit)
    work = group.work
    yield number_text(group, "flops") or "·"
    yield bytes_text(work.bytes) if type(work.bytes) is not int or work.bytes else "·"
    is_known = type(work.flops) is int and type(work.bytes) is int and work.bytes
    yield f"{work.flops / work.bytes:.1f}" if is_known else ""


def weight_of(group: Group) -> float | None:
    """Return the quantity for a group's share: its time, or FLOPs; None if symbolic."""
    if group.seconds is not None:
        return group.seconds
    work = group.work
    number = work.flops + work.transcendentals
    return number if type(number) is int else None


def number_text(group: Group, field: str) -> str:
    """Return a number of a group's work, or its range, as text; empty for 0."""
    least, most = getattr(group.least, field), getattr(group.work, field)
    if type(most) is int and most == 0:
        return ""
    mark = _PER_ITERATION if group.per_round else ""
    if type(most) is not int:
        return f"{most}{mark}"
    bounds = [with_prefix(bound) for bound in (least, most) if type(bound) is int]
    return f"{RANGE.join(dict.fromkeys(bounds))}{mark}"


def bytes_text(number: Any) -> str:
    """Return a number of bytes, possibly symbolic, as text."""
    return in_bytes(number) if type(number) is int else f"{number} bytes"


def _merged_scopes(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Merge scopes whose names differ only in numbers, such as layers: `Block_0..5`."""
    merged = [
        replace(
            same[0],
            name="/".join(path := tuple(joined.split("\n"))),
            path=path,
            work=reduce(add, [group.work for group in same]),
            least=reduce(add, [group.least for group in same]),
            per_round=any(group.per_round for group in same),
            seconds=None if same[0].seconds is None else sum(group.seconds or 0 for group in same),
        )
        for joined, same in alike(groups, lambda group: "\n".join(group.path), lambda group: None)
    ]
    return tuple(sorted(merged, key=lambda group: -(weight_of(group) or 0)))


def _in_tree(groups: Sequence[Group]) -> Callable[[Group], Any]:
    """Return a key that sorts scopes as a tree, with the most expensive first in each."""
    places = {group.path: i for i, group in enumerate(groups)}

    def key(group: Group) -> list[int]:
        ends = range(1, len(group.path) + 1)
        return [places.get(group.path[:end], len(groups)) for end in ends]

    return key


def _name(cost: Cost, group: Group, width: int) -> Text:
    called, behind = name_texts(cost, group)
    if not group.name:
        return Text(called, style=tables.COMMENT)
    name = Text("  " * (len(group.path) - 1) + called).append(behind, style=tables.COMMENT)
    line = group.line
    places = [] if line is None else [(line.file, line.line), *line.behind]
    if places and (code := source_text.line(*places[-1])):
        innermost = Text("\n" + code, style=tables.COMMENT)
        innermost.truncate(width, overflow="ellipsis")
        name.append(innermost)
    return name


def name_texts(cost: Cost, group: Group) -> tuple[str, str]:
    """Return the name of a group and its library frame: `model.py:9`, ` ← flax/core.py:3`.

    The name of a scope is its last part.
    """
    if not group.name:
        return _UNNAMED[cost.by], ""
    behind = f"{BEHIND}{group.behind}" if group.behind else ""
    return (group.path[-1] if group.path else group.name), behind


def cost_notes(cost: Cost, device: DeviceSpec | None, whole_arrays: bool = False) -> Iterator[str]:
    """Yield the notes below the table; see `total_text`."""
    for field, noun in (("transcendentals", "transcendental"), ("random_numbers", "random number")):
        if number := number_text(cost.total, field):
            yield f"{number} {noun}s"
    if cost.per_device is not None:
        yield f"on each device: {total_text(cost.per_device)}"
    for collective in cost.collectives:
        yield f"{collective.name}: {bytes_text(collective.work.bytes_communicated)}"
    if device is not None:
        yield bound_note(cost.total, device, whole_arrays)
    if cost.seconds is not None and type(flops := cost.total.work.flops) is int:
        rate = with_prefix(round(flops / cost.seconds), "FLOP/s")
        rate = f"in {duration(cost.seconds)}: {rate}"
        if device is not None:
            rate += f", {cost.utilization:.1%} of the peak of {device.name}"
        yield rate
    if cost.dead is not None:
        yield from _dead_notes(cost.dead, cost.total)
    yield from unknown_notes(cost)


def _dead_notes(dead: Group, total: Group) -> Iterator[str]:
    """Yield the shares of the cost that are dead, unless they are small."""
    pairs = (dead.work.flops, total.work.flops), (dead.work.bytes, total.work.bytes)
    if all(type(number) is int for pair in pairs for number in pair):
        shares = [part / whole if whole else 0 for part, whole in pairs]
        if max(shares) >= _LEAST_DEAD:
            flops, size = shares
            yield f"dead: {flops:.1%} of the FLOPs and {size:.1%} of the bytes; XLA leaves them out"


def bound_note(total: Group, device: DeviceSpec, whole_arrays: bool = False) -> str:
    """Return the minimal time of a program on a device, and the limiting factor."""
    assert total.seconds is not None
    on = f"on one {device.name}{WHOLE}" if whole_arrays else f"on {device.name}"
    bound = f"{on}: at least {duration(total.seconds)}, limited by {total.limit}"
    if not total.any_unit:
        return bound
    flops, rate = with_prefix(total.any_unit, "FLOP"), with_prefix(round(device.highest), "FLOP/s")
    return f"{bound}; {flops} run on unknown units, at up to {rate}"


def unknown_notes(cost: Cost | Source) -> Iterator[str]:
    """Yield the unknowns of a cost: iterations of loops, and costs of primitives."""
    if cost.total.per_round:
        yield (
            f"{_PER_ITERATION} counts one iteration of each loop "
            "whose number of iterations is unknown"
        )
    if cost.unknown:
        names = (f"{name} ({plural(n, 'equation')})" for name, n in cost.unknown.items())
        yield f"not counted, because the cost is unknown: {', '.join(names)}"


def symbols_in(cost: Cost) -> bool:
    """Return True if any number in a program's cost is symbolic."""
    return is_symbolic(cost.total)


def is_symbolic(group: Group) -> bool:
    """Return True if any number in a group's cost is symbolic."""
    numbers: Sequence[Any] = group.work
    return any(type(number) is not int for number in numbers)


# --- page -----------------------------------------------------------------------------------------
# The view of a page: sortable tables, with the contents of those of the terminal.


def cost_view(
    costs: Sequence[Cost],
    line_of: views.Lines,
    times: Mapping[str, Sequence[views.Cell]] | None = None,
    split: str | None = None,
) -> views.PageView:
    """Return the view of costs, each of a program by a grouping, with the measured time of lines.

    Args:
        costs: The costs.
        line_of: Returns a line of a displayed file by name.
        times: The cells of the measured time of each line, and of its share, if it was measured.
        split: The line about the devices of the only program; None if it was not compiled.
    """
    several = len({program_cost.name for program_cost in costs}) > 1
    tables = [
        _cost_table(program_cost, line_of, several, times)
        for program_cost in costs
        if program_cost.groups
    ]
    facts = list(
        dict.fromkeys(_cost_fact(program_cost, split is not None) for program_cost in costs)
    )
    return views.PageView("cost", [*views.partitioner_notes(costs, split), *facts], tables)


#: The columns of the measured time.
_MEASURED = ("measured", True), ("share", True)


def _cost_fact(program_cost: Cost, is_split: bool) -> str:
    total = total_text(program_cost.total, is_split and bool(program_cost.left_to_partitioner))
    return "; ".join((f"{program_cost.name}: {total}", *cost_notes(program_cost, None)))


def _cost_table(
    program_cost: Cost,
    line_of: views.Lines,
    several: bool,
    times: Mapping[str, Sequence[views.Cell]] | None,
) -> views.Table:
    measured = times if program_cost.by == "line" else None
    columns = (
        *(_MEASURED if measured is not None else ()),
        ("FLOPs", True),
        ("share", True),
        ("bytes", True),
        ("share", True),
        ("FLOPs/B", True),
        (program_cost.by, False),
    )
    rows = [_cost_row(program_cost, group, line_of) for group in program_cost.groups]
    if measured is not None:
        rows = _with_times(program_cost, rows, measured, line_of)
    return views.page_table(
        f"{program_cost.name}, by {program_cost.by}" if several else f"by {program_cost.by}",
        columns,
        rows,
    )


def _with_times(
    program_cost: Cost,
    rows: Sequence[list[views.Cell]],
    times: Mapping[str, Sequence[views.Cell]],
    line_of: views.Lines,
) -> list[list[views.Cell]]:
    """Add the measured time to the rows of lines, and rows of lines without cost; sort by time."""
    left = dict(times)
    unknown = [views.Cell(""), views.Cell("")]
    pairs = zip(program_cost.groups, rows, strict=True)
    timed = [[*left.pop(group.name, unknown), *row] for group, row in pairs]
    for name, cells in left.items():
        line = views.Cell(name or "unknown line", link=line_of(name))
        timed.append([*cells, *[views.Cell("")] * 5, line])
    return sorted(timed, key=lambda row: -(row[0].number or 0.0))


def _cost_row(program_cost: Cost, group: Group, line_of: views.Lines) -> list[views.Cell]:
    flops, size = (n if type(n) is int else None for n in (group.work.flops, group.work.bytes))
    intensity = flops / size if flops is not None and size else None
    return [
        views.Cell(number_text(group, "flops") or "0", flops),
        views.share(weight_of(group), weight_of(program_cost.total)),
        views.Cell(bytes_text(group.work.bytes), size),
        views.share(size, program_cost.total.work.bytes),
        views.Cell("" if intensity is None else f"{intensity:.1f}", intensity),
        views.Cell(
            "".join(name_texts(program_cost, group)),
            link=line_of(group.name) if group.line is not None else None,
            indent=max(len(group.path) - 1, 0),
        ),
    ]


def cost_icicles(
    program_cost: Cost, frames: Sequence[FrameCost], line_of: views.Lines
) -> list[views.Icicle]:
    """Return the flame graphs of the FLOPs and the bytes of a program; none of symbolic sizes."""
    if is_symbolic(program_cost.total):
        return []
    total = program_cost.total.work
    flops = {frame.path: frame.work.flops + frame.work.transcendentals for frame in frames}
    size = {frame.path: frame.work.bytes for frame in frames}
    most = total.flops + total.transcendentals
    special = "with transcendentals, as in the shares of the table" if total.transcendentals else ""
    pairs = (
        (flops, "FLOPs", partial(with_prefix, unit="FLOP"), most, special),
        (size, "bytes", in_bytes, total.bytes, ""),
    )
    graphs = []
    for amounts, quantity, text, whole, remark in pairs:
        notes = [remark]
        if sum(amounts.values()) != whole:
            notes.append(f"all branches of conditionals; a run takes at most {text(whole)}")
        if program_cost.total.per_round:
            notes.append("one iteration of each loop whose number of iterations is unknown")
        note = "; ".join(filter(None, notes))
        graphs.append(views.icicle(quantity, program_cost.name, amounts, text, line_of, note))
    return [graph for graph in graphs if graph is not None]


@document(optional=("compiled",))
class CostDocument(NamedTuple):
    """`cost`, of one program."""

    total: Annotated[Group, "The cost of the whole first program."]
    groups: Annotated[Sequence[Group], "The groups of the first program."]
    programs: Annotated[Sequence[Cost], "Each program."]
    compiled: Annotated[
        Shardings | None, "With `--compiled`: the shardings of the program, and its collectives."
    ] = None
