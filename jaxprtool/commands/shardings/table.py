"""How XLA partitions a program: collectives, shardings of values, and pictures of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import product
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from rich.box import Box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jaxprtool.ir.documents import duration, in_bytes, plural, times, with_prefix
from jaxprtool.ir.notation import BinderToken, Comment, ParameterToken, PrimitiveName, Type
from jaxprtool.ir.source_text import BEHIND
from jaxprtool.ir.trees import common_path, without_numbers
from jaxprtool.render import views
from jaxprtool.render.terminal import tables
from jaxprtool.render.terminal.tables import Rendering, drawn, share_text

if TYPE_CHECKING:
    from jaxprtool.commands.shardings.partitions import (
        Collective,
        RepeatedWork,
        ShardedValue,
        Shardings,
    )

# --- shardings ------------------------------------------------------------------------------------
# How XLA partitions a program, as tables: collectives by line, and shardings of values.

T = TypeVar("T")

#: The label of operations of XLA without a source line.
NO_LINE = "no line"

#: The note on compilers for other platforms: the partitioner is shared, but later passes differ.
_SHARED = "partitioned by Shardy, as for all platforms; merged and scheduled as for the {}"


#: XLA's words for a value of which each device holds all on the way to another spec.
_REMATERIALIZATION = "an involuntary full rematerialization"


def shardings_tables(
    shardings: Shardings, width: int, top: int | None = tables.TALL_ROWS, replicated: bool = False
) -> Rendering:
    """Return the collectives by line, and the sharding of arguments, results and large values.

    Args:
        shardings: The shardings of the program.
        width: The width in characters.
        top: The number of lines, and of values, that are shown; None for all.
        replicated: Whether to show only large values that each device holds whole.
    """
    parts: list[RenderableType] = [Text(heading(shardings), style=tables.HEADING)]
    parts += map(Text, sharding_facts(shardings))
    if replicated:
        parts += [
            Text(),
            drawn(_values(shardings, filter(shardings.is_large_copy, shardings.values)), top),
        ]
        return Rendering(Group(*parts), width)
    for table in _both_sources(shardings):
        parts += [Text(), drawn(table, top)]
    if shardings.repeated:
        parts += [Text(), drawn(_repeated(shardings), top)]
    if shardings.constraints is not None:
        parts += [Text(), _constraints(shardings)]
    parts += [Text(), drawn(_values(shardings, shardings.values), top)]
    return Rendering(Group(*parts), width)


def device_tables(shardings: Shardings, width: int, top: int | None) -> Rendering:
    """Return the work and the communication of each device, without the shardings of values."""
    parts: list[RenderableType] = [Text(heading(shardings), style=tables.HEADING)]
    parts += map(Text, sharding_facts(shardings))
    for table in _both_sources(shardings):
        parts += [Text(), drawn(table, top)]
    return Rendering(Group(*parts), width)


def pictures(values: Iterable[ShardedValue], width: int) -> Rendering:
    """Return a picture of which devices hold which parts of values."""
    parts: list[RenderableType] = []
    for value in values:
        title = Text(value.name, style=tables.BINDER).append(f" {value.type}", style=tables.TYPE)
        title.append(f" {value.spec}", style="default")
        parts += [title, sharding_picture(value.shape, value.ranges, width, value.terms)]
    return Rendering(Group(*parts), width)


def heading(shardings: Shardings) -> str:
    """Return the mesh and the traffic: `step: 8 devices (data=4, model=2), …`."""
    axes = ", ".join(f"{axis}={size}" for axis, size in shardings.mesh.items())
    moved = (
        f"each sends {in_bytes(shardings.sent_bytes)} a call"
        if shardings.collectives
        else "no collectives"
    )
    return f"{shardings.name}: {plural(shardings.devices, 'device')} ({axes}), {moved}"


def sharding_facts(shardings: Shardings) -> Iterator[str]:
    """Yield lines with the memory, the times, and the compiler of the program."""
    flops = with_prefix(sum(shardings.products.values()), "FLOP")
    memory = in_bytes(shardings.memory_bytes)
    share = (
        f", {_times(1 / shardings.products_share)} its share"
        if shardings.products_share < 0.95
        else ""
    )
    yield f"{memory} of memory and {flops} in matrix products on each device{share}"
    if text := times_text(shardings):
        yield text
    yield _SHARED.format(_PLATFORMS.get(shardings.platform, shardings.platform))


_PLATFORMS = {"cpu": "CPU", "gpu": "GPU", "cuda": "GPU", "rocm": "GPU", "tpu": "TPU"}


def times_text(shardings: Shardings) -> str:
    """Return the times of products and collectives; "" if they are not known."""
    seconds = [
        collective.seconds for collective in shardings.collectives if collective.seconds is not None
    ]
    parts = []
    if shardings.compute_seconds is not None:
        parts.append(f"products at least {duration(shardings.compute_seconds)}")
    if seconds:
        parts.append(f"collectives at least {duration(sum(seconds))}")
    hidden = [collective.overlap_seconds for collective in shardings.collectives]
    if seconds and None not in hidden:
        parts.append(
            f"{duration(sum(overlap or 0 for overlap in hidden))} of it could overlap products"
        )
    return ", ".join(parts)


def _both_sources(shardings: Shardings) -> Iterator[views.Table]:
    """Yield tables of avoidable collectives, of others of the partitioner, and of the program's."""
    avoidable = _by(shardings.collectives, lambda collective: collective.avoided_by)
    others = avoidable.pop("", [])
    groups = {f"avoidable: {change}, as compiled": here for change, here in avoidable.items()}
    groups |= {
        title: [collective for collective in others if collective.source == source]
        for source, title in (
            ("partitioner", "added by the partitioner"),
            ("program", "asked for by the program"),
        )
    }
    for title, listed in groups.items():
        if listed:
            yield _collectives(shardings, listed, title)


def _collectives(shardings: Shardings, listed: Sequence[Collective], title: str) -> views.Table:
    """Return a table with a row for each line, and its collectives below."""
    with_time = any(collective.seconds is not None for collective in listed)
    columns = (
        views.share_column(is_summed=True),
        views.number_column("sent", in_bytes),
        *([views.number_column("time", _time_text)] if with_time else ()),
        views.Column("line and values"),
    )

    def row(here: Sequence[Collective], name: views.Cell, role: type[str] = str) -> views.Row:
        sent = _bytes(here)
        seconds = sum(collective.seconds or 0 for collective in here)
        time = [views.Cell(_time_text(seconds), seconds)] if with_time else []
        size = views.Cell(role(in_bytes(sent)), sent)
        return [views.share(sent, shardings.sent_bytes), size, *time, name]

    lines = _by(listed, lambda collective: collective.line).values()
    rows = [
        views.RowGroup(
            row(here, _line_cell(here[0].line)),
            [row(alike, _described(alike), Comment) for alike in alike_collectives(here)],
        )
        for here in sorted(lines, key=lambda here: -_bytes(here))
    ]
    return views.Table(title, columns, rows)


def _time_text(seconds: float) -> str:
    return duration(seconds) if seconds >= 1e-9 else "< 1 ns"


def _line_cell(line: str, below: views.Cell | None = None) -> views.Cell:
    return views.Cell(BinderToken(line or NO_LINE), link=line, below=below)


def alike_collectives(listed: Iterable[Collective]) -> list[list[Collective]]:
    """Return collectives in groups whose names differ only in numbers, the largest first."""
    return sorted(_by(listed, _likeness).values(), key=_bytes, reverse=True)


def _likeness(collective: Collective) -> object:
    reason = collective.reason
    specs = reason and (
        reason.operand_spec,
        reason.consumer_spec,
        reason.way_spec,
        without_numbers(reason.consumer),
    )
    value = without_numbers(collective.value)
    return (
        collective.line,
        collective.kind,
        collective.axes,
        collective.bytes,
        collective.count,
        value,
        specs,
        collective.source,
    )


def collective_texts(alike: Sequence[Collective]) -> tuple[str, str]:
    """Return the description of a group of collectives on a line, and the reason for them."""
    first = alike[0]
    runs = sum(1 if collective.count is None else collective.count for collective in alike)
    what = f"{first.kind} {_along(first)}, {in_bytes(first.bytes)}"
    if first.count is None:
        what += f", {runs:,} in each iteration"
    elif runs > 1:
        what += f", {runs:,} times"
    value = common_path([collective.value for collective in alike])
    if not first.reason:
        return what, value
    consumer = common_path(
        [collective.reason.consumer for collective in alike if collective.reason]
    )
    consumer = consumer.removesuffix(f" at {first.line.partition(BEHIND)[0]}")
    before, after = first.reason.operand_spec, first.reason.consumer_spec
    if first.reduces and before != "one device":
        return what, f"{value}: {consumer} reduces it across devices, {before} → {after}"
    if first.reason.mixes:
        return what, f"{value}: {before}, read across devices by {consumer}"
    way = f", by way of {first.reason.way_spec}" if first.reason.way_spec else ""
    if first.reason.rematerializes:
        way += f": each device holds all {in_bytes(first.bytes)}, {_REMATERIALIZATION}"
    return what, f"{value}: {before} → {after} for {consumer}{way}"


def _described(alike: Sequence[Collective]) -> views.Cell:
    what, why = collective_texts(alike)
    kind, _, rest = what.partition(" ")
    text = [PrimitiveName(kind), ParameterToken(f" {rest}")]
    return views.Cell(text, indent=1, below=views.Cell(why))


def _along(collective: Collective) -> str:
    if collective.axes is None:
        return f"in groups of {collective.devices}"
    return f"along {', '.join(collective.axes)}" if collective.axes else "on one device"


def _repeated(shardings: Shardings) -> views.Table:
    """Return a table of the operations of which each device computes more than its share."""
    columns = (
        views.number_column("each device"),
        views.number_column("its share"),
        views.Column("line and operation"),
    )
    rows = []
    for work in shardings.repeated:
        count, unit = (work.flops, "FLOP") if work.flops else (work.elements, "elements")
        amounts = count, count / work.times
        below = views.Cell(repeated_text(work, shardings.devices), indent=1)
        cells = [views.Cell(with_prefix(amount, unit), amount) for amount in amounts]
        rows.append([*cells, _line_cell(work.line, below)])
    return views.Table("computed by several devices alike", columns, rows)


def repeated_text(work: RepeatedWork, devices: int) -> str:
    """Return how much of an operation each device computes: `fft: each of 8 devices computes …`."""
    whole = "all of it" if work.times == devices else f"{_times(work.times)} its share"
    name = times(work.count, work.operation.partition(" at ")[0])
    return f"{name}: each of {devices} devices computes {whole}"


def _times(factor: float) -> str:
    return f"{factor:.3g} times"


def _constraints(shardings: Shardings) -> RenderableType:
    """Return a table of the constraints that reduce communication, each by itself."""
    if not shardings.constraints:
        tried = plural(shardings.tried, "other constraint")
        return Text(f"no constraint was found that reduces communication: {tried} compiled")
    columns = *map(views.number_column, ("sent", "memory")), views.Column("line and constraint")
    title = f"with one of these constraints, as compiled ({shardings.tried} tried)"
    rows = []
    for constraint in shardings.constraints:
        below = [constraint.change, Comment(" in the source" if constraint.replaces else "")]
        sizes = map(views.bytes_cell, (constraint.sent_bytes, constraint.memory_bytes))
        rows.append([*sizes, _line_cell(constraint.line, views.Cell(below, indent=1))])
    return drawn(views.Table(title, columns, rows))


def _values(shardings: Shardings, listed: Iterable[ShardedValue]) -> views.Table:
    """Return a table of values; those whose names differ only in numbers share a row."""
    columns = (
        views.number_column("per device", in_bytes),
        views.number_column("whole", in_bytes),
        views.Column("spec"),
        views.Column("value"),
    )
    rows: list[views.Row] = []
    for group in alike_values(listed):
        first, count = group[0], sum(value.count for value in group)
        sizes = first.bytes_per_device * count, first.bytes * count
        is_named = first.kind == "value" or first.name.startswith(first.kind)
        local = f"[{','.join(map(str, first.shape_per_device))}]"
        part = "" if first.shape_per_device == first.shape else f" in {local}"
        name = [
            Comment("" if is_named else f"{first.kind} "),
            BinderToken(common_path([value.name for value in group])),
            Type(f" {times(count, first.type)}{part}"),
            *(Comment(f", {note}") for note in value_notes(first, shardings)),
        ]
        value = views.Cell(name, link=first.line)
        rows.append([*map(views.bytes_cell, sizes), first.spec or "no spec", value])
    return views.Table("arguments, results and large values", columns, rows)


def alike_values(listed: Iterable[ShardedValue]) -> list[list[ShardedValue]]:
    """Return values in groups whose names differ only in numbers, the largest first."""
    groups = list(_by(listed, _pattern).values())
    groups.sort(key=lambda group: -sum(v.bytes_per_device * v.count for v in group))
    return groups


def value_notes(value: ShardedValue, shardings: Shardings) -> Iterator[str]:
    """Yield notes on the sharding of a value: replication, terms of a sum, and padding."""
    if shardings.is_large_copy(value):
        yield "replicated"
    if value.terms is not None:
        along = f" along {', '.join(value.unreduced)}" if value.unreduced else ""
        yield f"unreduced: each device holds a term of the sum{along}"
    if value.padded_bytes:
        yield f"{share_text(value.padded_bytes, value.bytes + value.padded_bytes)} of it padding"


def _pattern(value: ShardedValue) -> object:
    return value.kind, value.spec, value.type, without_numbers(value.name), value.line


def _bytes(here: Iterable[Collective]) -> int:
    return sum(collective.sent_bytes for collective in here)


def _by(items: Iterable[T], key: Callable[[T], object]) -> dict[object, list[T]]:
    """Return items by a key, in the order of the first of each."""
    groups = defaultdict[object, list[T]](list)
    for item in items:
        groups[key(item)].append(item)
    return groups


# --- sharding picture -----------------------------------------------------------------------------
# A picture of which devices hold which parts of an array.
#
# Each block is a part of the array, with the numbers of the devices that hold it; the index ranges
# of the blocks are on the edges. `jax.debug.visualize_array_sharding` draws arrays of rank 1 and 2.

#: The first index of a dimension that a device holds, and the one after the last.
Range: TypeAlias = tuple[int, int]

#: The ranges of a row or column of blocks, one for each dimension that it represents.
_Part: TypeAlias = tuple[Range, ...]

#: The maximum numbers of rows and columns of blocks, and of runs of devices in a block.
_MOST_ROWS, _MOST_COLUMNS, _MOST_RUNS = 16, 8, 8

#: The width of a column besides its text: a space on both sides, and a line.
_FRAME = 3


def sharding_picture(
    shape: Sequence[int],
    ranges: Mapping[int, Sequence[Range]],
    width: int,
    terms: Mapping[int, int] | None = None,
) -> RenderableType:
    """Return a picture of the parts of an array that devices hold.

    The last split dimension is drawn across and the others down. If only one dimension is split, it
    is drawn down if it is not the last of the array, or has too many parts for a row.

    Args:
        shape: The shape of the array.
        ranges: The range of indices that each device holds, for each dimension. Ranges may differ
            in size; a device that holds nothing has an empty one.
        width: The width in characters.
        terms: The term of a sum that each device holds, if the array is unreduced.
    """
    regions = {device: _clipped(shape, ranges[device]) for device in sorted(ranges)}
    parts = [{region[d] for region in regions.values()} for d in range(len(shape))]
    split = [d for d, size in enumerate(shape) if parts[d] != {(0, size)}]
    is_row = split == [len(shape) - 1] and _fits_a_row(parts[-1], width)
    down = split[:-1] if len(split) > 1 or is_row else split
    across = split[len(down) :]
    blocks = defaultdict[tuple[_Part, _Part], list[int]](list)
    for device, region in regions.items():
        blocks[tuple(region[d] for d in down), tuple(region[d] for d in across)].append(device)
    terms = dict.fromkeys(regions, 0) if terms is None else terms
    caption = list(_caption(shape, down, across))
    if len(set(terms.values())) > 1:
        caption = caption if split else ["the array is not split"]
        caption.append("unreduced: the value is the sum of what the devices joined by + hold")
    return Group(*map(Text, caption), *_grid(blocks, terms, width))


def _clipped(shape: Sequence[int], ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Return ranges, with all empty ones equal and at the end."""
    both = zip(shape, ranges, strict=True)
    return tuple(bounds if bounds[0] < bounds[1] else (size, size) for size, bounds in both)


def _fits_a_row(parts: Set[Range], width: int) -> bool:
    """Return True if the parts of a dimension can be drawn side by side."""
    block_width = _longest(_part_text((part,)) for part in parts)
    return len(parts) <= _MOST_COLUMNS and len(parts) * (block_width + _FRAME) < width


def _caption(shape: Sequence[int], down: Sequence[int], across: Sequence[int]) -> Iterator[str]:
    """Yield lines that describe the rows and columns, and name the dimensions not split."""
    sides = {"down": down, "across": across}
    drawn = [
        f"{_dimensions_text(dimensions)} {side}" for side, dimensions in sides.items() if dimensions
    ]
    if not drawn:
        yield "the array is not split: each device holds all of it"
        return
    yield ", ".join(drawn)
    whole = [d for d in range(len(shape)) if d not in (*down, *across)]
    if whole:
        sizes = " x ".join(f"{shape[d]:,}" for d in whole)
        yield f"not split: {_dimensions_text(whole)} ({sizes})"


def _dimensions_text(dimensions: Sequence[int]) -> str:
    """Return the numbers of dimensions as text: `dimensions 0, 2`."""
    return f"dimension{'s' * (len(dimensions) > 1)} {', '.join(map(str, dimensions))}"


def _grid(
    blocks: Mapping[tuple[_Part, _Part], Sequence[int]], terms: Mapping[int, int], width: int
) -> Iterator[RenderableType]:
    """Yield a table of the blocks by row and column, and a line on what is left out."""
    rows, columns = (sorted(set(parts)) for parts in zip(*blocks, strict=True))
    drawn = product(rows[:_MOST_ROWS], columns[:_MOST_COLUMNS])
    texts = {at: _terms_text(blocks[at], terms) for at in drawn if at in blocks}
    labels = list(map(_part_text, rows[:_MOST_ROWS])) if rows != [()] else []
    label_width = min(_longest(labels), max(width // 3, _longest_word(labels)))
    room = width - 1 - (label_width + _FRAME if labels else 0)
    heads = list(map(_part_text, columns[:_MOST_COLUMNS]))
    # The range of a column may take two lines: its start with the colon, and its stop.
    least = max(_longest_word(texts.values()), _longest(heads) // 2 + 1)
    heads = heads[: max(room // (least + _FRAME), 1)]
    block_width = max(_longest([*texts.values(), *heads]), 1)
    block_width = min(block_width, max(room // len(heads) - _FRAME, 1))

    has_heads = columns != [()]
    table = Table(box=_frame(bool(labels), has_heads), show_lines=True, show_header=has_heads)
    if labels:
        table.add_column(width=label_width, justify="right", style=tables.COMMENT, overflow="fold")
    for head in heads:
        text = head if len(head) <= block_width else head.replace(":", ":\n")
        heading = Text(text, tables.COMMENT)
        table.add_column(heading, width=block_width, justify="center", overflow="fold")
    for position, row in enumerate(rows[:_MOST_ROWS]):
        cells = [texts.get((row, column), "") for column in columns[: len(heads)]]
        table.add_row(*map(Text, labels[position : position + 1] + cells))
    yield table
    counts = {"rows": (len(rows), _MOST_ROWS), "columns": (len(columns), len(heads))}
    out = [f"{n - m:,} of {n:,} {name}" for name, (n, m) in counts.items() if n > m]
    if out:
        yield Text(f"… {' and '.join(out)} are left out", tables.COMMENT)


def _frame(has_labels: bool, has_heads: bool) -> Box:
    """Return the lines around blocks. Labels and headings are outside, between marks of an edge."""
    (top, row, bottom), side = ("───", " ") if has_labels else ("┌├└", "│")
    above, inside, between, below = f"{top}─┬┐", f"{side} ││", f"{row}─┼┤", f"{bottom}─┴┘"
    head = ["    ", "    "] if has_heads else [above, inside]
    return Box("\n".join([*head, above, inside, between, between, inside, below]))


def _part_text(part: _Part) -> str:
    """Return ranges as text: `0:4, 8:16`."""
    return ", ".join("empty" if start == stop else f"{start}:{stop}" for start, stop in part)


def _terms_text(devices: Sequence[int], terms: Mapping[int, int]) -> str:
    """Return the numbers of devices as text, those with different terms of a sum joined by +."""
    by_term = defaultdict[int, list[int]](list)
    for device in devices:
        by_term[terms[device]].append(device)
    if len(by_term) == 1:
        return _devices_text(devices)
    groups = [by_term[term] for term in sorted(by_term)]
    texts = [f"({_devices_text(group)})" if len(group) > 1 else str(group[0]) for group in groups]
    more = len(texts) - _MOST_RUNS
    return " + ".join(texts[:_MOST_RUNS]) + (f" + … {more:,} more" if more > 0 else "")


def _devices_text(devices: Sequence[int]) -> str:
    """Return the numbers of devices as text, in their order: `0-3, 8, … 12 more`."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    # Two devices are shorter as `0, 1` than as a range.
    texts = [(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run))) for run in runs]
    more = sum(map(len, runs[_MOST_RUNS:]))
    return ", ".join(texts[:_MOST_RUNS]) + (f", … {more:,} more" if more else "")


def _longest(texts: Iterable[str]) -> int:
    return max(map(len, texts), default=0)


def _longest_word(texts: Iterable[str]) -> int:
    return _longest(word for text in texts for word in text.split(" "))


# --- page -----------------------------------------------------------------------------------------
# The view of a page: sortable tables, with the contents of those of the terminal.


def shardings_view(split: Shardings) -> views.PageView:
    """Return the view of the shardings of a program."""
    shown = [*_both_sources(split), _values(split, split.values)]
    if split.repeated:
        shown.insert(-1, _repeated(split))
    return views.PageView("devices", [heading(split), *sharding_facts(split)], shown)
