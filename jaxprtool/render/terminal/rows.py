"""The parts of an equation for the tree, the table and the JSON document.

A `Reader` names variables like the listing, so that names agree between them. The parts are tokens
of a listing, except for JSON.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxprtool.ir.notation.names import VariableNames
from jaxprtool.ir.notation.naming import Naming
from jaxprtool.ir.notation.signatures import Signature, value_text
from jaxprtool.ir.notation.tokens import (
    BinderToken,
    Comment,
    LiteralToken,
    ParameterToken,
    PrimitiveName,
    SharedName,
    Type,
)
from jaxprtool.ir.programs.program_signature import ProgramSignature
from jaxprtool.jaxcompat import Atom, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.render.terminal.rendering import DEFAULTS, ShowOptions


class _Unnamed:
    """A placeholder for the names of variables that are not yet known."""

    def __getitem__(self, var: Var) -> str:
        return "·"


class Reader:
    """Names and texts of one program's variables, literals and parameters.

    Args:
        about: The program.
        options: The display options.
        named: Whether to compute the names of variables, which takes time for a large program.
    """

    def __init__(
        self, about: ProgramSignature, options: ShowOptions = DEFAULTS, named: bool = True
    ):
        self._notation = options.notation(about)
        self.shared: dict[Jaxpr, str] = {}
        self._names: VariableNames | _Unnamed = _Unnamed()
        if named:
            naming = Naming(about.jaxpr, self._notation)
            naming.name_all()
            self._variables = naming.variables
            self.shared = naming.shared
            self._names = naming.variables
        self._parameters: dict[Signature, list[str]] = {}

    def name(self, var: Var) -> str:
        """Return the name of a variable, as in the listing."""
        return self._names[var]

    def names(self) -> set[str]:
        """Return the names of all variables that have one."""
        return {name[1:] for name in self._variables.spaced.values()}

    def rename(self, var: Var, name: str) -> None:
        """Give a variable another name than in the listing."""
        self._variables[var] = name

    def value_text(self, eqn: JaxprEqn, parameter: str) -> str:
        """Return the text of a parameter that is not a jaxpr."""
        return self._notation.text(eqn.params.get(parameter))

    def type_of(self, atom: Atom) -> Type:
        """Return the type of a variable or literal in the form of a binder: `:f32[3]`."""
        return self._notation.type_of(atom.aval)

    def operand(self, atom: Atom) -> str:
        """Return a variable's name, or a literal with its type."""
        if not isinstance(atom, Literal):
            return self.name(atom)
        return LiteralToken(f"{value_text(atom)}{self.type_of(atom)}")

    def parameters(self, eqn: JaxprEqn) -> dict[str, str]:
        """Return the parameters shown in the listing, except jaxprs; all if JAX has a rule."""
        signature = self._notation.signature(eqn)
        if signature.by_rule:
            return {k: self._notation.text(v) for k, v in sorted(eqn.params.items())}
        pairs = [(name.removesuffix("="), value) for name, value in signature.pairs]
        return {name: str(value) for name, value in pairs if isinstance(value, str) or not value}

    # --- tokens -------------------------------------------------------------------------------

    def binder_tokens(self, variables: Sequence[Var], types: bool) -> list[str]:
        """Return `a:f32[3] b:i32[]`, without types if `types` is False."""
        tokens: list[str] = []
        for var in variables:
            tokens += " ", BinderToken(self.name(var))
            if types:
                tokens.append(self.type_of(var))
        return tokens[1:]

    def operand_tokens(self, atoms: Sequence[Atom]) -> list[str]:
        """Return the operands of an equation with spaces between them."""
        return [token for atom in atoms for token in (" ", self.operand(atom))][1:]

    def parameter_tokens(self, eqn: JaxprEqn) -> list[str]:
        """Return the parameters of an equation with spaces between them."""
        signature = self._notation.signature(eqn)
        tokens = self._parameters.get(signature)
        if tokens is None or signature.by_rule:
            pairs = self.parameters(eqn).items()
            tokens = [t for k, v in pairs for t in (" ", ParameterToken(f"{k}="), v)][1:]
            self._parameters[signature] = tokens
        return tokens

    def head(self, eqn: JaxprEqn) -> list[str]:
        """Return `jit log_softmax`: the primitive, and the name of the called function if any."""
        name = eqn.params.get("name")
        named = [" ", SharedName(name)] if isinstance(name, str) else []
        return [PrimitiveName(eqn.primitive.name), *named]

    def line(
        self, eqn: JaxprEqn, types: bool, most: int | None = None, parameters: bool = True
    ) -> list[str]:
        """Return `c:f32[3] = mul[…] a b`, an equation on one line without its bodies.

        Args:
            eqn: The equation.
            types: Whether to write the types of results.
            most: The maximum number of results, and operands, to name; None for all.
            parameters: Whether to write parameters instead of `…`.
        """
        shown = self.parameter_tokens(eqn)
        return [
            *self.results(eqn, types, most),
            PrimitiveName(eqn.primitive.name),
            *(["[", *(shown if parameters else [Comment("…")]), "]"] if shown else []),
            " ",
            *self.operands(eqn, most),
        ]

    def results(self, eqn: JaxprEqn, types: bool, most: int | None = None) -> list[str]:
        """Return `a:f32[3] b:i32[] = ` for the results of an equation, at most `most`."""
        names = self.binder_tokens(eqn.outvars[:most], types)
        return [*names, *_more(eqn.outvars, most), " = "] if names else []

    def operands(self, eqn: JaxprEqn, most: int | None = None) -> list[str]:
        """Return the operands of an equation, at most `most`."""
        return [*self.operand_tokens(eqn.invars[:most]), *_more(eqn.invars, most)]


def _more(values: Sequence[object], most: int | None) -> list[str]:
    left = 0 if most is None else len(values) - most
    return [Comment(f" … {left} more")] if left > 0 else []
