"""Programs as tables: one row for each equation in any body."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from jaxprtool import jaxcompat
from jaxprtool.ir.core.equations import bodies
from jaxprtool.ir.notation.selection import Selection, equations
from jaxprtool.ir.notation.tokens import Comment, ParameterToken, PrimitiveName, SharedName
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.program_signature import program_signature
from jaxprtool.jaxcompat import AnyJaxpr, Jaxpr, JaxprEqn
from jaxprtool.render.terminal.comments import OPAQUE, SourceComments
from jaxprtool.render.terminal.grid import Cell, fits, grid
from jaxprtool.render.terminal.lines import printable
from jaxprtool.render.terminal.listing import Listing
from jaxprtool.render.terminal.rendering import DEFAULTS, MOST_IN_A_ROW, ShowOptions
from jaxprtool.render.terminal.rows import Reader

T = TypeVar("T")

#: The number of values shown of an equation with many, if folded.
_FEW = 4


def table(program: Program | AnyJaxpr, options: ShowOptions = DEFAULTS) -> Listing:
    """Return the table of a program.

    A row's place, such as `3.0` or `3[1].0`, is its path: equation 3, its body (or body 1 of
    several), and equation 0 in the body. The rows of a shared body are at its first use. Parameters
    that do not fit their column are below their equations.
    """
    about = program_signature(program)
    reader, comments = Reader(about, options), SourceComments(options, about.roots)
    selection = options.selection()
    headings = ["#", "outputs", "primitive", "inputs", "parameters"]
    headings += ["source"] if options.source else []
    headings += ["scope"] if options.scopes else []
    rows: list[list[Cell]] = []
    for place, row in _rows(about.jaxpr, selection):
        cells: list[Cell] = [[Comment(place)]]
        if isinstance(row, int):
            cells.append([Comment(equations(row))])
            rows.append(cells + [[]] * (len(headings) - len(cells)))
            continue
        outs, ins = (_some(atoms, options) for atoms in (row.outvars, row.invars))
        cells += [
            [*reader.binder_tokens(outs, options.types), *_rest(row.outvars, outs)],
            [PrimitiveName(row.primitive.name)],
            [*reader.operand_tokens(ins), *_rest(row.invars, ins)],
            _parameters(reader, row, selection),
        ]
        if options.source:
            cells.append(comments.location(row))
        if options.scopes:
            cells.append([Comment(jaxcompat.name_stack(row))])
        rows.append(cells)
    below = None
    if not fits(headings, rows, options.width):
        at = headings.index("parameters")
        del headings[at]
        below = [row.pop(at) for row in rows]
    return Listing(printable(grid(headings, rows, options.width, below)))


def _some(atoms: Sequence[T], options: ShowOptions) -> Sequence[T]:
    """Return the displayed values of an equation."""
    return atoms[:_FEW] if options.fold and len(atoms) > MOST_IN_A_ROW else atoms


def _rest(atoms: Sequence[object], shown: Sequence[object]) -> Cell:
    more = f" …\N{NO-BREAK SPACE}{len(atoms) - len(shown):,}\N{NO-BREAK SPACE}more"
    return [Comment(more)] if len(atoms) > len(shown) else []


def _parameters(reader: Reader, eqn: JaxprEqn, selection: Selection) -> Cell:
    tokens = reader.parameter_tokens(eqn)
    if jaxcompat.is_opaque(eqn):
        tokens = [Comment(f"# {OPAQUE} "), *tokens]
    for path, body in bodies(eqn):
        space = [" "] if tokens else []
        shared = reader.shared.get(body)
        shown = (
            [Comment(f"{{{equations(selection.count(body))}}}")]
            if shared is None
            else [SharedName(shared)]
        )
        tokens = [*tokens, *space, ParameterToken(f"{path}="), *shown]
    return tokens


def _rows(root: Jaxpr, selection: Selection) -> Iterator[tuple[str, JaxprEqn | int]]:
    """Yield each equation to show with its place, and counts of those skipped in between."""
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
