"""The text of equations in HTML, with links between definitions and uses of variables.

Each role of a token has its own element with a short name, since a page has many.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add

from markupsafe import Markup, escape

from jaxprtool import jaxcompat
from jaxprtool.ir.notation import tokens
from jaxprtool.jaxcompat import Atom, DropVar, JaxprEqn, Literal, Var
from jaxprtool.render.terminal.comments import OPAQUE
from jaxprtool.render.terminal.lines import printable
from jaxprtool.render.terminal.rows import Reader

#: The HTML element of each role of token.
_ELEMENTS: dict[type[str], str] = {
    tokens.Type: "i",
    tokens.PrimitiveName: "b",
    tokens.ParameterToken: "u",
    tokens.LiteralToken: "samp",
    tokens.SharedName: "em",
}


class Text:
    """Builds the text of a program's equations.

    Args:
        reader: The names of its variables.
        at: The prefix of element ids.
        titles: Whether operands have their type as a title.
    """

    def __init__(self, reader: Reader, at: str, titles: bool):
        self._reader = reader
        self._at = at
        self._titles = titles
        self._variables: dict[Var, int] = {}
        self._made: dict[tuple[type[str], str], str] = {}

    def equation(self, eqn: JaxprEqn, holds_jaxprs: bool, types: bool) -> Markup:
        """Return `c:f32[3] = mul[...] a b`, without jaxprs in parameters.

        An opaque equation has its mark behind it.
        """
        head, parameters = self._reader.head(eqn), self._reader.parameter_tokens(eqn)
        if not holds_jaxprs:
            head = head[:1]
        elif len(head) > 1 and parameters[:1] == ["name="]:
            parameters = parameters[3:]  # already in the head
        return Markup(
            (self._bound(eqn.outvars, types) + " = " if eqn.outvars else "")
            + "".join(map(self._token, head))
            + (f"[{''.join(map(self._token, parameters))}]" if parameters else "")
            + (" " + self._read(eqn.invars) if eqn.invars else "")
            + (f" <small>{OPAQUE}</small>" if jaxcompat.is_opaque(eqn) else "")
        )

    def bound(self, variables: Sequence[Var], types: bool) -> Markup:
        """Return binders with spaces between them."""
        return Markup(self._bound(variables, types))

    def read(self, atoms: Sequence[Atom]) -> Markup:
        """Return operands with spaces between them."""
        return Markup(self._read(atoms))

    def _bound(self, variables: Sequence[Var], types: bool) -> str:
        texts = map(self._binder, variables)
        if not types:
            return " ".join(texts)
        types_of = map(self._token, map(self._reader.type_of, variables))
        return " ".join(map(add, texts, types_of))

    def _read(self, atoms: Sequence[Atom]) -> str:
        return " ".join(map(self._operand, atoms))

    def _binder(self, var: Var) -> str:
        name = self._reader.name(var)
        if isinstance(var, DropVar) or name == "_":
            return "_"
        return f'<dfn id="{self._at}v{self._number(var)}">{_escaped(name)}</dfn>'

    def _operand(self, atom: Atom) -> str:
        text = self._reader.operand(atom)
        if isinstance(atom, Literal):
            return self._token(text)
        title = f' title="{_escaped(self._reader.type_of(atom)[1:])}"' if self._titles else ""
        return f'<a href="#{self._at}v{self._number(atom)}"{title}>{_escaped(text)}</a>'

    def _number(self, var: Var) -> int:
        return self._variables.setdefault(var, len(self._variables))

    def _token(self, token: str) -> str:
        key = type(token), token
        found = self._made.get(key)
        if found is None:
            element, found = _ELEMENTS.get(type(token)), _escaped(token)
            found = f"<{element}>{found}</{element}>" if element else found
            self._made[key] = found
        return found


def _escaped(text: str) -> str:
    """Return text escaped as HTML, with unprintable characters written out."""
    return str(escape(text if text.isprintable() else "".join(printable([text]))))
