"""A program as a table: one row for each equation, whatever body it stands in."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from jaxprtool.ir.equations import bodies
from jaxprtool.ir.notation.selection import Selection, equations
from jaxprtool.ir.outline import outline
from jaxprtool.jaxcompat import Jaxpr, JaxprEqn
from jaxprtool.render import theme
from jaxprtool.render.comments import Places
from jaxprtool.render.rendering import Rendering
from jaxprtool.render.rows import Reader, binder, operands, parameters


def table(
    program: Any,
    *,
    width: int = 80,
    source: bool = False,
    scopes: bool = False,
    types: bool = True,
    depth: int | None = None,
    only: Sequence[str] | None = None,
) -> Rendering:
    """The table of a `Program` or a closed jaxpr; the options are those of `listing`.

    A row's place, as in `3.0` or `3[1].0`, is the way to it: equation 3, in that its body, or the
    body 1 of several, and in that equation 0. A body that several equations share has its rows
    where it comes first. Source files are named without their folders.
    """
    shape = outline(program)
    reader, places, selection = Reader(shape.jaxpr), Places(source, scopes), Selection(depth, only)
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    grid.add_column("#", style=theme.COMMENT, overflow="fold", max_width=16)
    for heading in ("outputs", "primitive", "parameters", "inputs"):
        least = 16 if heading == "parameters" and not source else None
        grid.add_column(heading, overflow="fold", min_width=least)
    if source:
        grid.add_column("source", style=theme.COMMENT, no_wrap=True)
    if scopes:
        grid.add_column("scope", style=theme.COMMENT, overflow="fold")
    for place, row in _rows(shape.jaxpr, selection):
        if isinstance(row, int):
            grid.add_row(place, Text(equations(row), style=theme.COMMENT))
            continue
        names = [binder(reader.name(v), v.aval, types) for v in row.outvars]
        cells: list[Text | str] = [
            place,
            Text(" ").join(names),
            Text(row.primitive.name, style=theme.PRIMITIVE),
            _parameters(reader, row, selection),
            operands(reader, row.invars),
        ]
        cells += [os.path.basename(places.line(row) or "")] if source else []
        cells += [places.scope(row) or ""] if scopes else []
        grid.add_row(*cells)
    return Rendering(grid, width)


def _parameters(reader: Reader, eqn: JaxprEqn, selection: Selection) -> Text:
    text = parameters(reader, eqn)
    for path, body in bodies(eqn):
        if text.plain:
            text.append(" ")
        text.append(f"{path}=", theme.PARAMETER)
        if body in reader.shared:
            text.append(reader.shared[body], theme.SHARED_NAME)
        else:
            text.append(f"{{{equations(selection.count(body))}}}", theme.COMMENT)
    return text


def _rows(root: Jaxpr, selection: Selection) -> Iterator[tuple[str, JaxprEqn | int]]:
    """Each equation to show with its place, and counts of those left out between them."""
    seen: set[Jaxpr] = set()

    def below(jaxpr: Jaxpr, before: str, depth: int) -> Iterator[tuple[str, JaxprEqn | int]]:
        seen.add(jaxpr)
        for row in selection.rows(jaxpr):
            if isinstance(row, int):
                yield f"{before}…", row
                continue
            index, eqn = row
            yield f"{before}{index}", eqn
            inside = bodies(eqn)
            for number, (_, body) in enumerate(inside):
                if body not in seen and not selection.folds(depth + 1):
                    which = f"[{number}]" if len(inside) > 1 else ""
                    yield from below(body, f"{before}{index}{which}.", depth + 1)

    return below(root, "", 0)
