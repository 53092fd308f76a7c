"""The details of a row in the pane below the source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jaxprtool.browse.document import Document
from jaxprtool.browse.navigation import Navigator
from jaxprtool.browse.outline import Kind, Node
from jaxprtool.extend import Atom, JaxprEqn, Literal, type_of
from jaxprtool.extend.listing import (
    STYLES,
    BinderToken,
    ParameterToken,
    Type,
    printable,
    summary,
    with_roles,
)
from jaxprtool.extend.sources import BEHIND

#: The maximum number of operands, and results, listed.
_MOST_LISTED = 40


def styled(tokens: Sequence[str]) -> Text:
    """Return tokens as text in their styles."""
    text = Text(end="")
    for piece, role in with_roles(tokens):
        text.append(piece, STYLES.get(role))
    return text


def info(document: Document, navigator: Navigator, node: Node) -> RenderableType:
    """Return the details of a row."""
    eqn = node.eqn
    if eqn is None:
        title, rows = styled(document.row(node)), _of_value(document, node)
    else:
        title = Text.assemble((eqn.primitive.name, "bold"))
        if doc := summary(eqn.primitive.name):
            title.append(f"  {_plain(doc)}", "dim")
        rows = _of_equation(document, navigator, node, eqn)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(label, value)
    return Group(title, table)


def _of_equation(
    document: Document, navigator: Navigator, node: Node, eqn: JaxprEqn
) -> Iterator[tuple[str, Text]]:
    frames = document.frames
    if (location := frames.location(eqn)) is not None:
        behind = "".join(BEHIND + frames.text(frame) for frame in location.behind)
        yield "line", Text.assemble(_plain(frames.text(location.frame)), (_plain(behind), "dim"))
    if scope := "/".join(_scopes(document, node)):
        yield "scope", Text(_plain(scope))
    yield from _values(document, "gives", eqn.outvars)
    sources = navigator.sources(node) if document.is_complete else ()  # which indexes its values
    yield from _values(document, "reads", eqn.invars, sources)
    pairs = document.parameters(eqn).items()
    for number, (name, value) in enumerate(pairs):
        yield (
            "" if number else "with",
            Text.assemble((name, STYLES[ParameterToken]), "=", _plain(value)),
        )
    yield "path", Text(_plain(node.path), "dim")


def _scopes(document: Document, node: Node) -> tuple[str, ...]:
    """Return the scopes around an equation, preceded by those whose bodies contain it."""
    path: tuple[str, ...] = ()
    above: Node | None = node
    while above is not None:
        if above.kind is Kind.equation:
            path = (*document.scopes(above.jaxpr)[above.index], *path)
        above = above.parent
    return path


def _values(
    document: Document, label: str, atoms: Sequence[Atom], notes: Sequence[str] = ()
) -> Iterator[tuple[str, Text]]:
    for number, atom in enumerate(atoms[:_MOST_LISTED]):
        name = document.name(atom)
        typed = "" if isinstance(atom, Literal) else f":{type_of(atom.aval)}"
        source = f"  {notes[number]}" if number < len(notes) and notes[number] else ""
        text = Text.assemble(
            (name, STYLES[BinderToken]), (typed, STYLES[Type]), (_plain(source), "dim")
        )
        yield "" if number else label, text
    if len(atoms) > _MOST_LISTED:
        yield "", Text(f"… {len(atoms) - _MOST_LISTED} more", "dim")


def _of_value(document: Document, node: Node) -> Iterator[tuple[str, Text]]:
    if node.kind in (Kind.argument, Kind.result):
        size = document.ends(node.kind)[node.index].bytes
        if size is not None:
            yield "size", Text(f"{size:,} bytes")
        yield "path", Text(_plain(node.path), "dim")


def _plain(text: str) -> str:
    return "".join(printable([text]))
