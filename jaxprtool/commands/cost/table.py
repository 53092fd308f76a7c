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
from rich.text import Text

from jaxprtool.ir import source_text
from jaxprtool.ir.documents import document, duration, in_bytes, plural, with_prefix
from jaxprtool.ir.meshes import partitioner_notes
from jaxprtool.ir.notation import BinderToken, Comment
from jaxprtool.ir.source_text import BEHIND
from jaxprtool.ir.trees import alike
from jaxprtool.render import views
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.tables import Rendering, drawn, split_rows

if TYPE_CHECKING:
    from jaxprtool.analysis.devices import DeviceSpec
    from jaxprtool.commands.cost.estimate import Cost, FrameCost, Group
    from jaxprtool.commands.shardings.partitions import Shardings
    from jaxprtool.commands.source.lines import Source
    from jaxprtool.ir.hlo.origins import InsertedCopy

#: The label of groups without a name.
_UNNAMED = {
    "line": "unknown line",
    "scope": "outside all scopes",
    "primitive": "",
    "dtype": "",
    "argument": "reads no argument",
}

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
    caption = f"{cost.name}: {total_text(cost.total, whole_arrays)}"
    table = _groups_table(cost, shown)._replace(caption=caption, more=len(rest))
    parts: list[RenderableType] = [drawn(table)]
    lines = list(cost_notes(cost, device, whole_arrays))
    if lines:
        parts += [Text(), *map(Text, lines)]
    if (copies := copies_rendering(cost.copies or (), width, top)) is not None:
        parts += [Text(), copies.renderable]
    return Rendering(Parts(*parts), width)


def copies_rendering(
    copies: Sequence[InsertedCopy], width: int, top: int | None
) -> Rendering | None:
    """Return the table of the copies that XLA inserted; None if there are none to show."""
    if not copies:
        return None
    from jaxprtool.commands.memory.table import copies_table  # programs have no copies

    table = copies_table(copies, top)
    return None if table is None else Rendering(drawn(table, top), width)


def total_text(total: Group, whole_arrays: bool = False) -> str:
    """Return the total cost of a program: `108.6 MFLOP, 9.5 MiB`.

    Args:
        total: The cost.
        whole_arrays: Whether to say that arrays have their whole size, as on one device.
    """
    flops = number_text(total, "flops") or "0"
    unit = "FLOP" if re.search(r" [a-zA-Z]$", flops) else " FLOP"
    return f"{flops}{unit}, {bytes_text(total.work.bytes)}{WHOLE if whole_arrays else ''}"


def _groups_table(cost: Cost, groups: Sequence[Group], is_on_page: bool = False) -> views.Table:
    times = views.number_column("min time"), views.Column("limit", Comment)
    columns = (
        views.number_column("share"),
        *(times if cost.total.seconds is not None else ()),
        views.number_column("FLOPs"),
        *([views.number_column("share")] if is_on_page else ()),
        *map(views.number_column, ("bytes", "FLOPs/B")),
        views.Column(cost.by, BinderToken),
    )
    return views.Table("", columns, [[*_row(cost, group, is_on_page)] for group in groups])


def _row(cost: Cost, group: Group, is_on_page: bool) -> Iterator[views.Cell]:
    flops, size = (n if type(n) is int else None for n in (group.work.flops, group.work.bytes))
    intensity = flops / size if flops is not None and size else None
    yield views.share(weight_of(group), weight_of(cost.total))
    if group.seconds is not None:
        yield from (views.Cell(duration(group.seconds), group.seconds), views.Cell(group.limit))
    yield views.Cell(number_text(group, "flops") or "·", flops)
    if is_on_page:
        yield views.share(size, cost.total.work.bytes)
    yield views.Cell("·" if size == 0 else bytes_text(group.work.bytes), size)
    yield views.Cell("" if intensity is None else f"{intensity:.1f}", intensity)
    yield _name(cost, group)


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


def _name(cost: Cost, group: Group) -> views.Cell:
    if not group.name:
        return views.Cell(Comment(_UNNAMED[cost.by]))
    line = group.line
    places = [] if line is None else [(line.file, line.line), *line.behind]
    behind = f"{BEHIND}{group.behind}" if group.behind else ""
    return views.Cell(
        [group.path[-1] if group.path else group.name, Comment(behind)],
        link=None if line is None else group.name,
        indent=max(len(group.path) - 1, 0),
        code=source_text.line(*places[-1]) if places else "",
    )


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
    times: Mapping[str, Sequence[views.Cell]] | None = None,
    split: str | None = None,
) -> views.PageView:
    """Return the view of costs, each of a program by a grouping, with the measured time of lines.

    Args:
        costs: The costs.
        times: The cells of the measured time of each line, and of its share, if it was measured.
        split: The line about the devices of the only program; None if it was not compiled.
    """
    several = len({program_cost.name for program_cost in costs}) > 1
    tables = [
        _page_table(program_cost, several, times) for program_cost in costs if program_cost.groups
    ]
    facts = list(
        dict.fromkeys(_cost_fact(program_cost, split is not None) for program_cost in costs)
    )
    return views.PageView("cost", [*partitioner_notes(costs, split), *facts], tables)


def _cost_fact(program_cost: Cost, is_split: bool) -> str:
    total = total_text(program_cost.total, is_split and bool(program_cost.left_to_partitioner))
    return "; ".join((f"{program_cost.name}: {total}", *cost_notes(program_cost, None)))


def _page_table(
    program_cost: Cost,
    several: bool,
    times: Mapping[str, Sequence[views.Cell]] | None,
) -> views.Table:
    by = f"by {program_cost.by}"
    table = _groups_table(program_cost, program_cost.groups, is_on_page=True)
    if times is not None and program_cost.by == "line":
        table = _with_times(program_cost, table, times)
    caption = f"{program_cost.name}, {by}" if several else by
    return table._replace(caption=caption)


def _with_times(
    program_cost: Cost, table: views.Table, times: Mapping[str, Sequence[views.Cell]]
) -> views.Table:
    """Add the measured time to the rows of lines, and rows of lines without cost; sort by time."""
    left = dict(times)
    unknown = [views.Cell(""), views.Cell("")]
    timed = [
        [*left.pop(group.name, unknown), *_row(program_cost, group, is_on_page=True)]
        for group in program_cost.groups
    ]
    for name, cells in left.items():
        line = views.Cell(name or _UNNAMED["line"], link=name)
        timed.append([*cells, *[views.Cell("")] * (len(table.columns) - 1), line])
    timed.sort(key=lambda row: -(row[0].number or 0.0))
    columns = *map(views.number_column, ("share", "measured")), *table.columns
    return table._replace(columns=columns, rows=timed)


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
