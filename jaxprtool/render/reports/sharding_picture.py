"""A picture of which devices hold which parts of an array.

Each block is a part of the array, with the numbers of the devices that hold it; the index ranges
of the blocks are on the edges. `jax.debug.visualize_array_sharding` draws arrays of rank 1 and 2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import product
from typing import TypeAlias

from rich.box import Box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jaxprtool.render.terminal import theme

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
    held = {device: _clipped(shape, ranges[device]) for device in sorted(ranges)}
    parts = [{own[d] for own in held.values()} for d in range(len(shape))]
    split = [d for d, size in enumerate(shape) if parts[d] != {(0, size)}]
    is_row = split == [len(shape) - 1] and _fits_a_row(parts[-1], width)
    down = split[:-1] if len(split) > 1 or is_row else split
    across = split[len(down) :]
    blocks = defaultdict[tuple[_Part, _Part], list[int]](list)
    for device, own in held.items():
        blocks[tuple(own[d] for d in down), tuple(own[d] for d in across)].append(device)
    terms = dict.fromkeys(held, 0) if terms is None else terms
    caption = list(_caption(shape, down, across))
    if len(set(terms.values())) > 1:
        caption = caption if split else ["the array is not split"]
        caption.append("unreduced: the value is the sum of what the devices joined by + hold")
    return Group(*map(Text, caption), *_grid(blocks, terms, width))


def _clipped(shape: Sequence[int], own: Sequence[Range]) -> tuple[Range, ...]:
    """Return ranges, with all empty ones equal and at the end."""
    both = zip(shape, own, strict=True)
    return tuple(each if each[0] < each[1] else (size, size) for size, each in both)


def _fits_a_row(parts: Set[Range], width: int) -> bool:
    """Return True if the parts of a dimension can be drawn side by side."""
    block_width = _longest(_part_text((part,)) for part in parts)
    return len(parts) <= _MOST_COLUMNS and len(parts) * (block_width + _FRAME) < width


def _caption(shape: Sequence[int], down: Sequence[int], across: Sequence[int]) -> Iterator[str]:
    """Yield lines that describe the rows and columns, and name the dimensions not split."""
    sides = {"down": down, "across": across}
    drawn = [f"{_dimensions_text(each)} {side}" for side, each in sides.items() if each]
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
    rows, columns = (sorted(set(each)) for each in zip(*blocks, strict=True))
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
        table.add_column(width=label_width, justify="right", style=theme.COMMENT, overflow="fold")
    for head in heads:
        text = head if len(head) <= block_width else head.replace(":", ":\n")
        heading = Text(text, theme.COMMENT)
        table.add_column(heading, width=block_width, justify="center", overflow="fold")
    for position, row in enumerate(rows[:_MOST_ROWS]):
        cells = [texts.get((row, column), "") for column in columns[: len(heads)]]
        table.add_row(*map(Text, labels[position : position + 1] + cells))
    yield table
    counts = {"rows": (len(rows), _MOST_ROWS), "columns": (len(columns), len(heads))}
    out = [f"{n - m:,} of {n:,} {name}" for name, (n, m) in counts.items() if n > m]
    if out:
        yield Text(f"… {' and '.join(out)} are left out", theme.COMMENT)


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
    groups = [by_term[each] for each in sorted(by_term)]
    texts = [f"({_devices_text(each)})" if len(each) > 1 else str(each[0]) for each in groups]
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
