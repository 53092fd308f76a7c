"""A program as a table: one row for each equation, whatever body it stands in."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from jaxprtool import jaxcompat
from jaxprtool.ir.border import border
from jaxprtool.ir.equations import bodies
from jaxprtool.ir.notation.selection import Selection, equations
from jaxprtool.ir.program import Program
from jaxprtool.jaxcompat import AnyJaxpr, Jaxpr, JaxprEqn
from jaxprtool.render import theme
from jaxprtool.render.comments import SourceComments
from jaxprtool.render.rendering import DEFAULTS, Rendering, ShowOptions
from jaxprtool.render.rows import Reader, binders, operands, parameters


def table(program: Program | AnyJaxpr, options: ShowOptions = DEFAULTS) -> Rendering:
    """Return the table of a program.

    A row's place, as in `3.0` or `3[1].0`, is the way to it: equation 3, in that its body, or the
    body 1 of several, and in that equation 0. A body that several equations share has its rows
    where it comes first. Source files are named without their folders.
    """
    about = border(program)
    reader, comments = Reader(about.jaxpr), SourceComments(options)
    selection = options.selection()
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    grid.add_column("#", style=theme.COMMENT, overflow="fold", max_width=16)
    for heading in ("outputs", "primitive", "parameters", "inputs"):
        least = 16 if heading == "parameters" and not options.source else None
        grid.add_column(heading, overflow="fold", min_width=least)
    if options.source:
        grid.add_column("source", style=theme.COMMENT, no_wrap=True)
    if options.scopes:
        grid.add_column("scope", style=theme.COMMENT, overflow="fold")
    for place, row in _rows(about.jaxpr, selection):
        if isinstance(row, int):
            grid.add_row(place, Text(equations(row), style=theme.COMMENT))
            continue
        cells: list[Text | str] = [
            place,
            binders(reader, row.outvars, options.types),
            Text(row.primitive.name, style=theme.PRIMITIVE),
            _parameters(reader, row, selection),
            operands(reader, row.invars),
        ]
        cells += [os.path.basename(comments.line(row) or "")] if options.source else []
        cells += [jaxcompat.name_stack(row)] if options.scopes else []
        grid.add_row(*cells)
    return Rendering(grid, options.width)


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
