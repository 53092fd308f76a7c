"""Which expression stands for an equation: the first proposal that passes its trial.

A program has few distinct kinds of equation, and each kind is tried once: same primitive, same
parameters, operands of the same types, in the same context.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxprtool.formats.python import trial
from jaxprtool.formats.python.expressions import (
    Attribute,
    Call,
    Expression,
    Function,
    Giving,
    Slot,
    Structure,
    spelled,
    spelling_of_kind,
    spellings,
)
from jaxprtool.formats.python.layout import Hole, Piece, holes_of
from jaxprtool.formats.python.rules.table import proposals, unsupported
from jaxprtool.formats.python.values import literal, primitive
from jaxprtool.jaxcompat import JaxprEqn, Literal


@dataclass(frozen=True)
class Template:
    """The text of an equation with holes for its operands.

    `results` is the structure in which it gives the results, `typed` says that literal operands
    are written with their types, `defines` that functions were defined for it alone.
    """

    holes: tuple[Hole, ...]
    pieces: tuple[Piece, ...]
    level: int
    results: Structure
    typed: bool
    defines: bool = False

    @classmethod
    def of(
        cls, expression: Expression, scope: Any, results: Structure = 0, typed: bool = True
    ) -> Template:
        """The template of an expression; `scope` defines the functions that it mentions."""
        what: Any = expression
        if isinstance(what, Giving):
            what, results = what.of, what.results
        pieces = tuple(what.pieces(scope))
        return cls(tuple(holes_of(pieces)), pieces, what.level, results, typed)


class Spellings:
    """The chosen spelling of each kind of equation of a module."""

    def __init__(self, scope: Any):
        self._scope = scope
        self._by_identity: dict[Any, Template] = {}
        self._by_content: dict[Any, Template] = {}
        # Identities are keys: what they are of must stay.
        self._alive: list[Any] = []

    def of(self, eqn: JaxprEqn, scope: Any) -> Template:
        """The template of an equation; `scope` is where functions that it needs are defined.

        Raises UnsupportedError if the equation cannot be written.
        """
        params = eqn.params
        operands = [literal(v).kind if isinstance(v, Literal) else id(v.aval) for v in eqn.invars]
        outs = [(id(v.aval), type(v)) for v in eqn.outvars]
        ids = map(id, params.values())
        key = (id(eqn.primitive), id(eqn.ctx), *params, *ids, *operands, *outs)
        found = self._by_identity.get(key)
        if found is None:
            self._alive.append(eqn)
            found = self._made(eqn, scope)
            if not found.defines:
                self._by_identity[key] = found
        return found

    def _made(self, eqn: JaxprEqn, scope: Any) -> Template:
        """The template that equations of the same content share, unless it defines functions."""
        key = _content(eqn)
        if key in self._by_content:
            return self._by_content[key]
        chosen, results, typed = self._choice(eqn)
        defines = _defines(chosen)
        try:
            found = Template.of(chosen, scope if defines else self._scope, results, typed)
        except TypeError as error:
            raise unsupported(eqn, str(error)) from error
        if defines:
            return replace(found, defines=True)
        self._by_content[key] = found
        return found

    def _has_text(self, expression: Expression) -> bool:
        """Whether all values in an expression have a spelling."""
        try:
            return _defines(expression) or bool(expression.pieces(self._scope))
        except TypeError:
            return False

    def _choice(self, eqn: JaxprEqn) -> tuple[Expression, Structure, bool]:
        slots = [Slot(i) for i in range(len(eqn.invars))]
        has_literals = any(isinstance(v, Literal) for v in eqn.invars)
        for expression in proposals(eqn, *slots):
            if isinstance(expression, Giving):
                return expression.of, expression.results, True
            for typed in (False, True) if has_literals else (False,):
                found = trial.gives(expression, eqn, typed)
                if found and self._has_text(expression):
                    return expression, found[0], typed
        return _bind(eqn, slots), _results(eqn), True


def _results(eqn: JaxprEqn) -> Structure:
    return tuple(range(len(eqn.outvars))) if eqn.primitive.multiple_results else 0


def _defines(expression: Any) -> bool:
    """Whether a function is among the parts of an expression."""
    if isinstance(expression, Function):
        return True
    if isinstance(expression, Call):
        parts = expression.function, *expression.args, *expression.kwargs.values()
        return any(map(_defines, parts))
    if isinstance(expression, Attribute):
        return _defines(expression.of)
    return isinstance(expression, tuple | list) and any(map(_defines, expression))


def _content(eqn: JaxprEqn) -> Any:
    operands = tuple(literal(v).kind if isinstance(v, Literal) else v.aval for v in eqn.invars)
    params = tuple((k, _hashable(v)) for k, v in sorted(eqn.params.items()))
    outs = tuple((v.aval, type(v)) for v in eqn.outvars)
    return eqn.primitive, id(eqn.ctx), operands, params, outs


def _hashable(value: Any) -> Any:
    """A parameter as part of a key: by content if it is plain data, else by identity."""
    if type(value) is tuple:
        return tuple(map(_hashable, value))
    if type(value) in (bool, int, float, str, type(None)):
        return type(value), repr(value)
    if type(value) in spellings or spelling_of_kind(value):
        try:
            hash(value)
        except TypeError:
            return id(value)
        return value
    return id(value)


def _bind(eqn: JaxprEqn, slots: list[Slot]) -> Expression:
    """The primitive's `bind` with its parameters spelled out.

    Raises UnsupportedError if the primitive is not public or a parameter is no plain data.
    """
    try:
        bind = Attribute(primitive(eqn.primitive), "bind")
    except TypeError as error:
        raise unsupported(eqn, f"no public function gives it, and {error}") from error
    params = {}
    for name, value in sorted(eqn.params.items()):
        try:
            params[name] = spelled(value)
        except TypeError as error:
            raise unsupported(eqn, f"its parameter {name} cannot be spelled: {error}") from error
    return Call(bind, tuple(slots), params)
