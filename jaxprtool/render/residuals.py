"""What a backward pass keeps, as tables and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxprtool.ir.quantities import in_bytes, plural, with_prefix
from jaxprtool.render import documents, theme
from jaxprtool.render.rendering import Rendering
from jaxprtool.render.stats import new_table

if TYPE_CHECKING:
    from jaxprtool.analysis.residuals import Residual
    from jaxprtool.api.residuals import Residuals


def residuals_table(found: Residuals, width: int, top: int) -> Rendering:
    """Return a row for each of the `top` largest residuals, and the bytes under each policy."""
    size = _size(found.total_bytes)
    heading = f"{found.name} keeps {plural(len(found.residuals), 'residual')}, {size}"
    table = new_table(heading)
    for column in ("share", "bytes"):
        table.add_column(column, justify="right")
    table.add_column("type", style=theme.TYPE, overflow="fold")
    table.add_column("again", justify="right")
    table.add_column("what it is, and what reads it", overflow="fold")
    for residual in found.residuals[:top]:
        table.add_row(*_cells(residual, found.total_bytes))
    if len(found.residuals) > top:
        more = Text(f"… {len(found.residuals) - top:,} more", style=theme.COMMENT)
        table.add_row("", "", "", "", more)
    parts = [table, Text()] if found.residuals else [Text(heading), Text()]
    return Rendering(Group(*parts, _policies(found)), width)


def _cells(residual: Residual, total: int | None) -> list[str | Text]:
    share = f"{residual.bytes / total:.1%}" if total and residual.bytes is not None else ""
    again = "" if residual.argument else _operations(residual)
    return [share, _size(residual.bytes), residual.type, again, _what(residual)]


def _operations(residual: Residual) -> str:
    number = residual.recompute
    return with_prefix(number) if type(number) is int else str(number)


def _what(residual: Residual) -> Text:
    if residual.argument:
        what = Text(residual.argument, style=theme.BINDER)
    else:
        what = Text(residual.source or "no line known", style=theme.BINDER)
        what.append(f" {residual.name or residual.primitive}", style=theme.PRIMITIVE)
    for reader in residual.readers[:1]:
        where = f" at {reader.source}" if reader.source not in ("", residual.source) else ""
        more = len(residual.readers) - 1
        others = f" and {more} more" if more else ""
        what.append(f"\nfor {reader.primitive}{where}{others}", style=theme.COMMENT)
    return what


def _policies(found: Residuals) -> Table:
    table = new_table("under each policy of jax.checkpoint")
    table.add_column("policy", overflow="fold")
    table.add_column("bytes", justify="right")
    table.add_column("largest that it drops", style=theme.COMMENT, overflow="fold")
    for name, size in found.policies.items():
        dropped = next((each for each in found.residuals if name in each.policies), None)
        what = "" if dropped is None else f"{dropped.type} {dropped.name or dropped.primitive}"
        table.add_row(name, _size(size), what)
    return table


def _size(number: int | None) -> str:
    return "?" if number is None else in_bytes(number)


# --- as JSON ----------------------------------------------------------------------------------


def residuals_document(found: Residuals) -> documents.ResidualsDocument:
    """Return the document of what a backward pass keeps."""
    return {
        "name": found.name,
        "total_bytes": found.total_bytes,
        "residuals": list(map(_document, found.residuals)),
        "policies": dict(found.policies),
    }


def _document(residual: Residual) -> documents.Residual:
    number = residual.recompute
    return {
        "type": residual.type,
        "bytes": residual.bytes,
        "source": residual.source,
        "name": residual.name,
        "argument": residual.argument,
        "primitive": residual.primitive,
        "readers": [{"primitive": r.primitive, "source": r.source} for r in residual.readers],
        "recompute": number if type(number) is int else str(number),
        "policies": list(residual.policies),
    }
