"""Programs as plain data for JSON (see `documents`), in one line, and their values as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from jaxprtool import jaxcompat
from jaxprtool.ir.documents import as_json, in_bytes, listed, plural, times
from jaxprtool.ir.equations import bodies
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.notation import BinderToken, Comment, Type
from jaxprtool.ir.notation.signatures import value_text
from jaxprtool.ir.program import (
    NamedValue,
    Program,
    ProgramSignature,
    ValueGroup,
    grouped_values,
    program_signature,
    size_of_values,
)
from jaxprtool.ir.trees import Alike, alike
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.render.documents import programs as documents
from jaxprtool.render.terminal.lines import printable
from jaxprtool.render.terminal.listing import DEFAULTS, ShowOptions
from jaxprtool.render.terminal.tables import drawn, split_rows
from jaxprtool.render.terminal.tree import Reader
from jaxprtool.render.views import Column, Table, number_column

if TYPE_CHECKING:
    from jaxprtool.analysis.stats import Stats

#: Documents include source locations by default.
_WITH_PLACES = replace(DEFAULTS, source=True, scopes=True)


def program_document(
    program: Program | AnyJaxpr, options: ShowOptions = _WITH_PLACES
) -> documents.Program:
    """Return the document of a program."""
    about = program_signature(program)
    builder = _Documents(about, options)
    jaxpr = about.jaxpr
    top = builder.equations(jaxpr, 0)
    return {
        "name": about.name,
        "arguments": builder.named(about.arguments, jaxpr.invars),
        "constants": builder.named(about.constants, jaxpr.constvars),
        "outputs": builder.named(about.outputs, jaxpr.outvars),
        "effects": sorted(map(str, jaxpr.effects)),
        "equations": top,
        "shared": builder.shared(),
    }


class _Documents:
    def __init__(self, about: ProgramSignature, options: ShowOptions):
        self.reader = Reader(about, ShowOptions(weak=options.weak))
        self.options = options
        self.selection = options.selection()
        self.frames = frames_now(about.roots)
        self._called: dict[Jaxpr, int] = {}

    def named(self, values: Sequence[NamedValue], atoms: Sequence[Atom]) -> Any:
        bound = map(documents.BoundValue, values, map(self._operand, atoms))
        return list(map(as_json, bound))

    def equations(self, jaxpr: Jaxpr, depth: int) -> list[documents.Equation | documents.Skipped]:
        rows = self.selection.rows(jaxpr)
        return [
            {"skipped": row} if isinstance(row, int) else self._equation(row[1], depth)
            for row in rows
        ]

    def shared(self) -> dict[str, documents.Body]:
        """Return the bodies of the shared jaxprs used in the document so far."""
        done: dict[Jaxpr, documents.Body] = {}
        while missing := [jaxpr for jaxpr in self._called if jaxpr not in done]:
            for jaxpr in missing:
                done[jaxpr] = self._body(jaxpr, self._called[jaxpr])
        return {name: done[jaxpr] for jaxpr, name in self.reader.shared.items() if jaxpr in done}

    def _equation(self, eqn: JaxprEqn, depth: int) -> documents.Equation:
        document: documents.Equation = {
            "primitive": eqn.primitive.name,
            "inputs": list(map(self._operand, eqn.invars)),
            "outputs": list(map(self._binder, eqn.outvars)),
            "parameters": self.reader.parameters(eqn),
            "bodies": [self._held(path, body, depth + 1) for path, body in bodies(eqn)],
        }
        if eqn.effects:
            document["effects"] = sorted(map(str, eqn.effects))
        if self.options.source and (place := self.frames.line_of([eqn])):
            document["place"] = as_json(place)
        if self.options.scopes and (scope := jaxcompat.name_stack(eqn)):
            document["scope"] = scope
        return document

    def _held(self, path: str, jaxpr: Jaxpr, depth: int) -> documents.HeldJaxpr:
        if self.selection.folds(depth):
            return {"parameter": path, "folded": self.selection.count(jaxpr)}
        if jaxpr in self.reader.shared:
            self._called.setdefault(jaxpr, depth)
            return {"parameter": path, "shared": self.reader.shared[jaxpr]}
        return {"parameter": path, "jaxpr": self._body(jaxpr, depth)}

    def _body(self, jaxpr: Jaxpr, depth: int) -> documents.Body:
        return {
            "constants": list(map(self._binder, jaxpr.constvars)),
            "arguments": list(map(self._binder, jaxpr.invars)),
            "equations": self.equations(jaxpr, depth),
            "outputs": list(map(self._operand, jaxpr.outvars)),
        }

    def _binder(self, var: Var) -> documents.Binder:
        name = self.reader.name(var)
        return (
            {"variable": name, "type": self.reader.type_of(var)[1:]}
            if self.options.types
            else {"variable": name}
        )

    def _operand(self, atom: Atom) -> documents.Operand:
        if isinstance(atom, Literal):
            return {"literal": value_text(atom), "type": self.reader.type_of(atom)[1:]}
        return {"variable": self.reader.name(atom)}


# --- lines and tables -----------------------------------------------------------------------------
# A program in one line, its size in words, and its arguments or results as a table.

#: The number of arguments or results that are named in a line.
_MOST_LISTED = 5

_some = partial(listed, most=_MOST_LISTED)


def program_line(program: Program, equations: int) -> str:
    """Return one line about a program: its name, its signature, its size."""
    about = program_signature(program)
    arguments = [
        f"{group.name}: {group_size_text(group)}" for group in grouped_values(about.arguments)
    ]
    results = [group_size_text(group) for group in grouped_values(about.outputs)]
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


def group_size_text(group: ValueGroup) -> str:
    """Return the type of a group of values, or their number and bytes."""
    if group.type is not None:
        return Type(group.type)
    size = "" if group.bytes is None else f" of {in_bytes(group.bytes)}"
    return plural(group.values, "array") + size


def values_table(
    what: str,
    values: Sequence[NamedValue],
    sources: Sequence[str] | None = None,
    top: int | None = None,
) -> RenderableType:
    """Return a row for each value: its name, type, bytes, and source location.

    If there are more than `top`, values whose names differ only in numbers share a row, with their
    total size, and values left out are counted. `top` is None for a row for each value.
    """
    columns = [Column(what, BinderToken), Column("type", Type), number_column("bytes")]
    if sources is not None:
        columns.append(Column("source", Comment))
    rows = list(zip(values, sources or [""] * len(values), strict=True))
    groups = [Alike(value.name, [(value, source)]) for value, source in rows]
    if split_rows(groups, top)[1]:
        groups = alike(rows, lambda row: row[0].name, lambda row: (row[0].described, row[1]))
    shown, others = split_rows(groups, top)
    cells = []
    for group in shown:
        value, source = group.items[0]
        count = len(group.items)
        sizes = [value.bytes for value, _ in group.items if value.bytes is not None]
        size = f"{sum(sizes):,}" if len(sizes) == count else "?"
        row = [group.path, times(count, value.described), size, source]
        cells.append(row[: len(columns)])
    more = sum(len(group.items) for group in others)
    return drawn(Table(size_of_values(what, values), columns, cells, more))
