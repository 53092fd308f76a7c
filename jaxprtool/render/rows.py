"""The parts of an equation as the tree, the table and the JSON document need them.

A `Reader` names variables as the listing does, so that what one of them shows can be found in
another.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from jaxprtool.ir.equations import type_of
from jaxprtool.ir.notation.layout import Layout
from jaxprtool.ir.notation.selection import Selection
from jaxprtool.ir.notation.signatures import value_text
from jaxprtool.jaxcompat import Atom, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.render import theme


class Reader:
    """Names and texts of one program's variables, literals and parameters."""

    def __init__(self, root: Jaxpr):
        layout = Layout(root, 80, True, Selection(), None)
        layout.tokens()  # which names all that the listing shows, in its order
        self.shared = layout.shared
        self._names = layout.names
        self._notation = layout.notation

    def name(self, var: Var) -> str:
        """The name of a variable, as in the listing."""
        return self._names[var]

    def operand(self, atom: Atom) -> str:
        """A variable's name, or a literal with its type."""
        if not isinstance(atom, Literal):
            return self.name(atom)
        return f"{value_text(atom)}:{type_of(atom.aval)}"

    def parameters(self, eqn: JaxprEqn) -> dict[str, str]:
        """The parameters that the listing shows, but for jaxprs; all, where JAX has a rule."""
        signature = self._notation.signature(eqn)
        if signature.by_rule:
            return {k: self._notation.text(v) for k, v in sorted(eqn.params.items())}
        pairs = [(name.removesuffix("="), value) for name, value in signature.pairs]
        return {name: str(value) for name, value in pairs if isinstance(value, str) or not value}


def binders(reader: Reader, variables: Sequence[Var], types: bool) -> Text:
    """Return `a:f32[3] b:i32[]`, in colour; without types if these are not wanted."""
    parts = []
    for v in variables:
        parts.append(Text(reader.name(v), style=theme.BINDER))
        if types:
            parts[-1].append(f":{type_of(v.aval)}", theme.TYPE)
    return Text(" ").join(parts)


def operands(reader: Reader, atoms: Sequence[Atom]) -> Text:
    """The operands of an equation with spaces between them, in colour."""
    return Text(" ").join(
        Text(reader.operand(a), style=theme.LITERAL if isinstance(a, Literal) else "")
        for a in atoms
    )


def parameters(reader: Reader, eqn: JaxprEqn) -> Text:
    """The parameters of an equation with spaces between them, in colour."""
    pairs = reader.parameters(eqn).items()
    return Text(" ").join(Text(f"{k}=", style=theme.PARAMETER).append(v, "") for k, v in pairs)
