"""A program, and its stats, as plain data for JSON.

A program's document, `"format": "jaxprtool.program"`, version 1:

    name        the function's name
    arguments   [{"name", "variable", "type", "bytes"}], in order; bytes null where unknown
    constants   likewise
    outputs     [{"name", "type", "bytes"} and what is returned: "variable" or "literal"]
    effects     [text]
    equations   [EQUATION], or {"skipped": n} for n equations that were not asked for
    shared      {name: BODY}: the jaxprs that several equations share, and long ones

An EQUATION is {"primitive", "inputs", "outputs", "parameters": {name: text}, "bodies"} and, where
there are any, "effects", "source": {"file", "line"} and "scope". Inputs are {"variable"} or
{"literal", "type"}; outputs {"variable", "type"}. Bodies are {"parameter"} with one of "shared",
the name of a shared BODY; "jaxpr", a BODY; or "folded", a count of equations. A BODY is
{"constants", "arguments", "equations", "outputs"}, its variables {"variable", "type"}.
Variables have the names of the listing, unique in the program but for `_`.

The document of a program's stats, `"format": "jaxprtool.stats"`, version 1:

    name, equations, by_depth          how many equations, in all and at each depth from 0
    primitives                         [{"name", "total", "by_depth"}], the most frequent first
    arguments, outputs, constants      [{"name", "type", "bytes"}]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxprtool import jaxcompat
from jaxprtool.ir.equations import bodies, type_of
from jaxprtool.ir.notation.selection import Selection
from jaxprtool.ir.notation.signatures import value_text
from jaxprtool.ir.outline import NamedValue, outline
from jaxprtool.jaxcompat import Atom, Jaxpr, JaxprEqn, Literal
from jaxprtool.render.rows import Reader

if TYPE_CHECKING:
    from jaxprtool.analysis.stats import Stats

VERSION = 1


def program_document(
    program: Any,
    *,
    source: bool = True,
    scopes: bool = True,
    types: bool = True,
    depth: int | None = None,
    only: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The document of a `Program` or a closed jaxpr; the options are those of `listing`.

    `types=False` leaves out the types of what equations and bodies bind.
    """
    shape = outline(program)
    maker = _Maker(Reader(shape.jaxpr), Selection(depth, only), source, scopes, types)
    jaxpr = shape.jaxpr
    top = maker.equations(jaxpr, 0)
    return {
        "format": "jaxprtool.program",
        "version": VERSION,
        "name": shape.name,
        "arguments": maker.named(shape.arguments, jaxpr.invars),
        "constants": maker.named(shape.constants, jaxpr.constvars),
        "outputs": maker.named(shape.outputs, jaxpr.outvars),
        "effects": sorted(map(str, jaxpr.effects)),
        "equations": top,
        "shared": maker.shared(),
    }


def stats_document(stats: Stats) -> dict[str, Any]:
    """The document of a program's stats."""
    return {"format": "jaxprtool.stats", "version": VERSION, **dataclasses.asdict(stats)}


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

    def named(self, values: Sequence[NamedValue], atoms: Sequence[Atom]) -> list[dict[str, Any]]:
        pairs = zip(values, atoms, strict=True)
        return [{**dataclasses.asdict(value), **self._operand(atom)} for value, atom in pairs]

    def equations(self, jaxpr: Jaxpr, depth: int) -> list[dict[str, Any]]:
        rows = self.selection.rows(jaxpr)
        return [
            {"skipped": row} if isinstance(row, int) else self._equation(row[1], depth)
            for row in rows
        ]

    def shared(self) -> dict[str, Any]:
        """The bodies of the shared jaxprs that what has been written mentions."""
        done: dict[Jaxpr, Any] = {}
        while missing := [jaxpr for jaxpr in self._called if jaxpr not in done]:
            for jaxpr in missing:
                done[jaxpr] = self._body(jaxpr, self._called[jaxpr])
        return {name: done[jaxpr] for jaxpr, name in self.reader.shared.items() if jaxpr in done}

    def _equation(self, eqn: JaxprEqn, depth: int) -> dict[str, Any]:
        document: dict[str, Any] = {
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

    def _held(self, path: str, jaxpr: Jaxpr, depth: int) -> dict[str, Any]:
        if self.selection.folds(depth):
            return {"parameter": path, "folded": self.selection.count(jaxpr)}
        if jaxpr in self.reader.shared:
            self._called.setdefault(jaxpr, depth)
            return {"parameter": path, "shared": self.reader.shared[jaxpr]}
        return {"parameter": path, "jaxpr": self._body(jaxpr, depth)}

    def _body(self, jaxpr: Jaxpr, depth: int) -> dict[str, Any]:
        return {
            "constants": list(map(self._binder, jaxpr.constvars)),
            "arguments": list(map(self._binder, jaxpr.invars)),
            "equations": self.equations(jaxpr, depth),
            "outputs": list(map(self._operand, jaxpr.outvars)),
        }

    def _binder(self, var: Any) -> dict[str, str]:
        name = {"variable": self.reader.name(var)}
        return {**name, "type": type_of(var.aval)} if self.types else name

    def _operand(self, atom: Atom) -> dict[str, str]:
        if isinstance(atom, Literal):
            return {"literal": value_text(atom), "type": type_of(atom.aval)}
        return {"variable": self.reader.name(atom)}
