"""A program, and its stats, as plain data for JSON: see `documents`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from jaxprtool import jaxcompat
from jaxprtool.ir.equations import bodies, type_of
from jaxprtool.ir.notation.selection import Selection
from jaxprtool.ir.notation.signatures import value_text
from jaxprtool.ir.outline import NamedValue, outline
from jaxprtool.jaxcompat import Atom, Jaxpr, JaxprEqn, Literal
from jaxprtool.render import documents
from jaxprtool.render.rows import Reader

if TYPE_CHECKING:
    from jaxprtool.analysis.stats import Stats


def program_document(
    program: Any,
    *,
    source: bool = True,
    scopes: bool = True,
    types: bool = True,
    depth: int | None = None,
    only: Sequence[str] | None = None,
) -> documents.Program:
    """The document of a `Program` or a closed jaxpr; the options are those of `listing`.

    `types=False` leaves out the types of what equations and bodies bind.
    """
    shape = outline(program)
    maker = _Maker(Reader(shape.jaxpr), Selection(depth, only), source, scopes, types)
    jaxpr = shape.jaxpr
    top = maker.equations(jaxpr, 0)
    return {
        "format": "jaxprtool.program",
        "version": 1,
        "name": shape.name,
        "arguments": maker.named(shape.arguments, jaxpr.invars),
        "constants": maker.named(shape.constants, jaxpr.constvars),
        "outputs": maker.named(shape.outputs, jaxpr.outvars),
        "effects": sorted(map(str, jaxpr.effects)),
        "equations": top,
        "shared": maker.shared(),
    }


def stats_document(stats: Stats) -> documents.Stats:
    """The document of a program's stats."""
    document = {"format": "jaxprtool.stats", "version": 1, **dataclasses.asdict(stats)}
    return cast(documents.Stats, document)


class _Maker:
    def __init__(
        self, reader: Reader, selection: Selection, source: bool, scopes: bool, types: bool
    ):
        self.reader = reader
        self.selection = selection
        self.source = source
        self.scopes = scopes
        self.types = types
        self._called: dict[Jaxpr, int] = {}

    def named(
        self, values: Sequence[NamedValue], atoms: Sequence[Atom]
    ) -> list[documents.BoundValue]:
        return [
            cast(documents.BoundValue, {**dataclasses.asdict(value), **self._operand(atom)})
            for value, atom in zip(values, atoms, strict=True)
        ]

    def equations(self, jaxpr: Jaxpr, depth: int) -> list[documents.Equation | documents.Skipped]:
        rows = self.selection.rows(jaxpr)
        return [
            {"skipped": row} if isinstance(row, int) else self._equation(row[1], depth)
            for row in rows
        ]

    def shared(self) -> dict[str, documents.Body]:
        """The bodies of the shared jaxprs that what has been written mentions."""
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
        if self.source and (frame := jaxcompat.user_frame(eqn)):
            document["source"] = {"file": frame[0], "line": frame[1]}
        if self.scopes and (scope := jaxcompat.name_stack(eqn)):
            document["scope"] = scope
        return document

    def _held(self, path: str, jaxpr: Jaxpr, depth: int) -> documents.Held:
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

    def _binder(self, var: Any) -> documents.Binder:
        name = self.reader.name(var)
        return {"variable": name, "type": type_of(var.aval)} if self.types else {"variable": name}

    def _operand(self, atom: Atom) -> documents.Operand:
        if isinstance(atom, Literal):
            return {"literal": value_text(atom), "type": type_of(atom.aval)}
        return {"variable": self.reader.name(atom)}
