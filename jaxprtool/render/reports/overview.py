"""An overview page of a program: size, signature, contents, and as much of the listing as fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

from jaxprtool.ir.basics.quantities import in_bytes, listed, plural
from jaxprtool.ir.notation.layout import Layout
from jaxprtool.ir.notation.tokens import (
    BinderToken,
    Comment,
    Heading,
    PrimitiveName,
    SharedName,
    Type,
)
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.program_signature import (
    ValueGroup,
    grouped,
    program_signature,
    size_of_values,
)
from jaxprtool.ir.source import source_text
from jaxprtool.ir.source.frames import Frames, frames_now
from jaxprtool.jaxcompat import AnyJaxpr
from jaxprtool.render.terminal.comments import SourceComments
from jaxprtool.render.terminal.grid import GAP, columns
from jaxprtool.render.terminal.lines import Cell, cut, lines_of, printable
from jaxprtool.render.terminal.listing import Listing
from jaxprtool.render.terminal.rendering import MOST_IN_A_ROW, ShowOptions

if TYPE_CHECKING:
    from jaxprtool.analysis.overview import HeldBody, Overview
    from jaxprtool.analysis.stats import Stats

#: The maximum number of primitives named, and of items of any other kind.
_MOST_PRIMITIVES, _MOST = 12, 5

#: The height below which fewer items are shown, and their number.
_SMALL, _MOST_IN_SMALL = 30, 2

#: The minimum number of lines of the listing, also of a small page.
_LEAST, _LEAST_IN_SMALL = 10, 5

_some = partial(listed, most=_MOST)


def overview_page(program: Program | AnyJaxpr, found: Overview, width: int, height: int) -> Listing:
    """Return the overview of a program as a page.

    Args:
        program: The program.
        found: Its overview.
        width: The width of the terminal.
        height: The number of lines of the page; exceeded if very small.
    """
    small = height < _SMALL
    if small:
        found = replace(found, bodies=())  # their equations are counted above
    heading = [Heading(found.stats.name), ": ", "; ".join(map(_unbroken, facts(found.stats)))]
    tokens = [*columns([[heading]], width), "\n\n", *columns(_primitives(found), width)]
    frames = frames_now(program_signature(program).roots)
    shown = _facts(found, width, frames, _MOST_IN_SMALL if small else _MOST)
    tokens += "\n", *columns(shown, width), "\n\n"
    used = "".join(tokens).count("\n")
    listed = _listing(
        program, found, width, max(height - used, _LEAST_IN_SMALL if small else _LEAST)
    )
    return Listing(printable([*tokens, *listed]))


def _unbroken(text: str) -> str:
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def summary(program: Program, equations: int) -> str:
    """Return one line about a program: its name, its signature, its size."""
    about = program_signature(program)
    arguments = [f"{each.name}: {_size(each)}" for each in grouped(about.arguments)]
    results = [_size(each) for each in grouped(about.outputs)]
    signature = f"{about.name}({_some(arguments)}) -> {_some(results) or '()'}"
    return "".join(printable([f"Program {signature}, {plural(equations, 'equation')}"]))


def facts(counted: Stats) -> list[str]:
    """Return the size of a program: numbers of equations, arguments and results."""
    depth = len(counted.by_depth) - 1
    parts = [plural(counted.equations, "equation") + (f", nested {depth} deep" if depth else "")]
    signature = ("argument", counted.arguments), ("result", counted.outputs)
    for what, values in (*signature, ("constant", counted.constants)):
        parts += [size_of_values(what, values)] if values else []
    return parts


def _primitives(found: Overview) -> list[list[Cell]]:
    """Return a row of the most frequent primitives."""
    shown = found.stats.primitives[:_MOST_PRIMITIVES]
    cell: list[str] = []
    for primitive in shown:
        cell += PrimitiveName(primitive.name), f"\N{NO-BREAK SPACE}{primitive.total:,}, "
    if rest := found.stats.primitives[_MOST_PRIMITIVES:]:
        cell.append(Comment(f"…\N{NO-BREAK SPACE}{len(rest)}\N{NO-BREAK SPACE}more"))
    elif cell:
        cell[-1] = cell[-1].removesuffix(", ")
    return [[_label("primitives"), cell]] if shown else []


def _facts(found: Overview, width: int, frames: Frames, most: int) -> list[list[Cell]]:
    """Return rows of a label, a name and a description, one per line; at most `most` of a label."""
    arguments, outputs = (
        [(BinderToken(each.name), [_size(each)]) for each in group]
        for group in (found.arguments, found.outputs)
    )
    bodies = [(SharedName(each.name), [_held(each)]) for each in found.bodies]
    rows = [
        *_rows("arguments", arguments, most),
        *_rows("results", outputs, most),
        *_rows("bodies", bodies, most),
        *_rows("lines", _lines(found, frames), most),
    ]
    names = max((len("".join(name)) for _, name, _ in rows), default=0)
    room = max(width - len(_label("")[0]) - names - 2 * len(GAP), _LEAST)
    return [[label, name, cut(text, room)] for label, name, text in rows]


def _rows(
    label: str, found: Sequence[tuple[str, Cell]], most: int
) -> list[tuple[Cell, Cell, Cell]]:
    rows: list[tuple[Cell, Cell, Cell]] = [
        (_label("" if i else label), [name], text) for i, (name, text) in enumerate(found)
    ]
    if len(rows) > most + 1:
        rows[most:] = [(_label(""), [Comment(f"… {len(found) - most:,} more")], [])]
    return rows


def _lines(found: Overview, frames: Frames) -> list[tuple[str, Cell]]:
    """Return source locations with their numbers of equations and their code."""
    most = max((len(f"{number:,}") for _, number in found.lines), default=0)
    lines: list[tuple[str, Cell]] = []
    for frame, number in found.lines:
        code = Comment(" ".join(source_text.line(frame.file, frame.line).split()))
        lines.append((Comment(frames.text(frame)), [f"{number:{most},} equations  ", code]))
    return lines


def _label(text: str) -> Cell:
    return [Comment(f"{text:10}")]


def _size(group: ValueGroup) -> str:
    if group.type is not None:
        return Type(group.type)
    size = "" if group.bytes is None else f" of {in_bytes(group.bytes)}"
    return plural(group.values, "array") + size


def _held(body: HeldBody) -> str:
    times = "" if body.calls == 1 else f", {body.calls:,} times"
    return f"{plural(body.equations, 'equation')}{times}, of {body.kind}"


def _listing(
    program: Program | AnyJaxpr, found: Overview, width: int, height: int
) -> Sequence[str]:
    """Return the listing folded to fit, and the option that shows the rest."""
    about = program_signature(program)
    options = ShowOptions(depth=_depth(found, height), names=True, terse=True)
    notation = options.notation(about)
    many = len(about.arguments) > MOST_IN_A_ROW
    layout = Layout(
        about.jaxpr,
        width,
        True,
        options.selection(),
        SourceComments(options, about.roots).commenter(about.jaxpr),
        notation,
        cut=4,
        arguments=size_of_values("argument", about.arguments) if many else "",
    )
    lines = list(islice(lines_of(layout.tokens(height + 1)), height + 1))
    fits = len(lines) <= height
    shown = [["\n", *cut(line, width)] for line in (lines if fits else lines[: height - 1])]
    tokens = list(chain.from_iterable(shown))[1:]
    if not fits:
        more = f"… --full or --pager shows all {found.stats.equations:,} equations"
        tokens += "\n", *cut([Comment(more)], width)
    return tokens


def _depth(found: Overview, height: int) -> int:
    """Return the depth at which a listing of a program roughly fills `height` lines."""
    total = 0
    for depth, number in enumerate(found.stats.by_depth):
        if depth and total + number > height and total > height // 3:
            return depth - 1
        total += number
    return len(found.stats.by_depth)
