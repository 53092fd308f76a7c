"""Programs as plain data for JSON; see `documents`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.ir.documents import as_json
from jaxprtool.ir.equations import bodies
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.notation.signatures import value_text
from jaxprtool.ir.program import NamedValue, Program, ProgramSignature, program_signature
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.render.documents import programs as documents
from jaxprtool.render.terminal.listing import DEFAULTS, ShowOptions, source_line
from jaxprtool.render.terminal.tree import Reader

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
        "format": "jaxprtool.program",
        "version": 1,
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
        if self.options.source and (location := self.frames.location(eqn)):
            document["source"] = source_line(self.frames, location.frame)
            if location.library:
                document["library"] = source_line(self.frames, location.library)
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
