"""Selection of an equation's expression, and fusion of equations that are one call.

The text of a proposal is evaluated under tracing and must produce exactly the equation. Thus a rule
need not handle type promotion, implicit conversions, or differences between JAX releases. Each
distinct kind of equation is checked once: same primitive, parameters, operand types and context.

Only text from rules is evaluated, whatever file a program comes from: data are plain literals, and
names outside of `ROOTS` are rejected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.formats.python.expressions import (
    ROOTS,
    Assignment,
    Attribute,
    CallExpression,
    Expression,
    Grouping,
    Helper,
    ModuleValue,
    MultiResult,
    NameScope,
    PythonFunction,
    Slot,
    as_expression,
    literal,
    pieces_of,
    primitive,
)
from jaxprtool.formats.python.layout import Hole, Piece, filled_holes, flat, holes_of
from jaxprtool.formats.python.rules_of_calls import (
    on_number,
    on_platform,
    on_predicate,
    proposals,
    unsupported,
)
from jaxprtool.ir.equivalence import Unkeyable, equivalent, parameters_key
from jaxprtool.ir.regions import Cond
from jaxprtool.jaxcompat import Atom, Jaxpr, JaxprEqn, Literal, Var, open_jaxpr

# --- selection ------------------------------------------------------------------------------------
# Selection of an equation's expression: the first proposal that passes the round-trip check.


@dataclass(frozen=True)
class TextTemplate:
    """The text of an equation with holes for its operands.

    `results` is the structure of its results. `typed` is True if literal operands are written with
    their types, `defines` if it has its own function definitions.
    """

    pieces: Sequence[Piece]
    level: int
    results: Grouping
    typed: bool = True
    defines: bool = False

    @cached_property
    def holes(self) -> tuple[Hole, ...]:
        """The holes in the order in which they are evaluated."""
        return tuple(holes_of(self.pieces))


class TextTemplates:
    """The chosen template of each kind of equation of a module.

    Args:
        scope: The module.
        symbols: The symbolic dimensions of its symbols, by name.
    """

    def __init__(self, scope: NameScope, symbols: Mapping[str, object]):
        self._scope = scope
        self._check = _RoundTrip(symbols)
        self._by_identity: dict[Hashable, TextTemplate] = {}
        self._by_content: dict[Hashable, TextTemplate] = {}
        # Keys use object identities, so the objects must be kept alive.
        self._alive: list[JaxprEqn] = []

    def of(self, eqn: JaxprEqn, scope: NameScope) -> TextTemplate:
        """Return the template of an equation.

        Args:
            eqn: The equation.
            scope: The scope in which its functions are defined.

        Raises:
            UnsupportedError: If the equation cannot be written.
        """
        params = eqn.params
        operands = [literal(v).key if isinstance(v, Literal) else id(v.aval) for v in eqn.invars]
        outs = [(id(v.aval), type(v)) for v in eqn.outvars]
        ids = map(id, params.values())
        key = (id(eqn.primitive), id(eqn.ctx), *params, *ids, *operands, *outs)
        template = self._by_identity.get(key)
        if template is None:
            self._alive.append(eqn)
            template = self._of_content(eqn, scope)
            if not template.defines:
                self._by_identity[key] = template
        return template

    def _of_content(self, eqn: JaxprEqn, scope: NameScope) -> TextTemplate:
        """Return the template for equations of equal content, cached if it defines nothing."""
        key = _content(eqn)
        if key in self._by_content:
            return self._by_content[key]
        chosen, results, typed = self._choice(eqn)
        defines = _defines(chosen)
        try:
            pieces = chosen.pieces(scope if defines else self._scope)
        except TypeError as error:
            raise unsupported(eqn, str(error)) from error
        template = TextTemplate(pieces, chosen.level, results, typed, defines)
        if not defines:
            self._by_content[key] = template
        return template

    def _choice(self, eqn: JaxprEqn) -> tuple[Expression, Grouping, bool]:
        slots = [Slot(i) for i in range(len(eqn.invars))]
        has_literals = any(isinstance(v, Literal) for v in eqn.invars)
        for expression in proposals(eqn, *slots):
            if isinstance(expression, MultiResult):
                return expression.of, expression.results, True
            for typed in (False, True) if has_literals else (False,):
                if results := self._check.results(expression, eqn, typed):
                    return expression, results[0], typed
        outs = tuple(range(len(eqn.outvars)))
        return _bind(eqn, slots), outs if eqn.primitive.multiple_results else 0, True


def _defines(expression: object) -> bool:
    """Return True if an expression contains a function."""
    if isinstance(expression, PythonFunction):
        return True
    if isinstance(expression, CallExpression):
        parts = expression.function, *expression.args, *expression.kwargs.values()
        return any(map(_defines, parts))
    if isinstance(expression, Attribute):
        return _defines(expression.of)
    return isinstance(expression, tuple | list) and any(map(_defines, expression))


def _content(eqn: JaxprEqn) -> Hashable:
    operands = tuple(literal(v).key if isinstance(v, Literal) else v.aval for v in eqn.invars)
    try:
        params, _ = parameters_key(eqn)
    except Unkeyable:
        params = id(eqn)
    outs = tuple((v.aval, type(v)) for v in eqn.outvars)
    return eqn.primitive, id(eqn.ctx), operands, params, outs


def _bind(eqn: JaxprEqn, slots: list[Slot]) -> Expression:
    """Return the primitive's `bind` with its parameters.

    Raises:
        UnsupportedError: If the primitive is not public or a parameter is not plain data.
    """
    try:
        bind = Attribute(primitive(eqn.primitive), "bind")
    except TypeError as error:
        raise unsupported(eqn, f"no public function creates it, and {error}") from error
    params = {}
    for name, value in sorted(eqn.params.items()):
        try:
            params[name] = as_expression(value)
        except TypeError as error:
            raise unsupported(eqn, f"its parameter {name} cannot be written: {error}") from error
    return CallExpression(bind, tuple(slots), params)


#: Cached, since the same few texts are checked for many operand types.
_compiled = lru_cache(maxsize=1024)(compile)


class _RoundTrip:
    """Evaluates the text of expressions: a scope for proposals that may be rejected."""

    def __init__(self, symbols: Mapping[str, object]):
        self._symbols = symbols
        self._namespace: dict[str, Any] = {}

    def results(self, expression: Expression, eqn: JaxprEqn, typed: bool) -> list[Grouping]:
        """Return the structure of an expression's results if it traces to the equation alone.

        Args:
            expression: The expression, on the equation's operands.
            eqn: The equation.
            typed: Whether literals are written with their types instead of as plain numbers.

        Returns:
            The structure in a list; an empty list if it traces to anything else, or raises.
        """
        structures: list[Grouping] = []
        variables = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal)))
        names = {v: f"_{i}" for i, v in enumerate(variables)}

        def evaluate(*values: object) -> list[Any]:
            result = eval(code, self._namespace, dict(zip(names.values(), values, strict=True)))
            if result is None:
                structures.append(None)
                return []
            several = isinstance(result, tuple | list)
            structures.append(tuple(range(len(result))) if several else 0)
            results = list(result) if several else [result]
            # Traced functions may not return a ref.
            return [r for r, v in zip(results, eqn.outvars, strict=True) if not _is_ref(v)]

        try:
            texts = {
                i: self._literal(v, typed) if isinstance(v, Literal) else names[v]
                for i, v in enumerate(eqn.invars)
            }
            text = flat(filled_holes(expression.pieces(self), texts))
            mode = "exec" if isinstance(expression, Assignment) else "eval"
            code = _compiled(text, "<proposal>", mode)
            traced = jaxcompat.traced_like(eqn, evaluate, variables)
            outs = [] if structures[0] is None else [v for v in eqn.outvars if not _is_ref(v)]
            parts = {"invars": variables, "outvars": outs, "eqns": [eqn]}
            wanted = jaxcompat.replace_jaxpr(traced, constvars=(), consts=(), **parts)
            same = len(traced.outvars) == len(outs) and equivalent(wanted, traced)
        except Exception:  # an unsuitable proposal may raise anything
            return []
        return structures if same else []

    def _literal(self, atom: Literal, typed: bool) -> str:
        return f"({flat(pieces_of(literal(atom).of(typed), self))})"

    def _named(self, value: object) -> str:
        name = f"_value_{len(self._namespace)}"
        self._namespace[name] = value
        return name

    # --- the scope ----------------------------------------------------------------------------

    def mention(self, path: str) -> None:
        root = path.partition(".")[0]
        if root not in self._namespace:
            exec(ROOTS[root], self._namespace)

    def symbol(self, name: str) -> str:
        return self._named(self._symbols[name])

    def module_value(self, value: ModuleValue) -> str:
        return f"({flat(value.of.pieces(self))})"

    def helper(self, helper: Helper) -> str:
        exec(helper.text, self._namespace)
        for root in helper.roots:
            self.mention(root)
        return helper.name

    def function(self, function: PythonFunction) -> str:
        return self._named(function.traceable())


def _is_ref(var: Atom | Var) -> bool:
    return isinstance(var.aval, jaxcompat.AbstractRef)


# --- fusion ---------------------------------------------------------------------------------------
# Fusion of equations that are one call in Python: a branch and the computation of its index.
#
# Before they bind `cond`, `lax.cond` converts its predicate to an index, `lax.switch` clamps its
# index, and `lax.platform_dependent` queries the platform index. Without fusion, these equations
# would be duplicated. A branch by any other index is written as `branch_at`.


@dataclass(frozen=True)
class SelectedEquation:
    """An equation to write, with its operands in Python.

    `expression` is its expression if it is fused with another equation.
    """

    eqn: JaxprEqn
    operands: tuple[Atom, ...]
    expression: MultiResult | None = None


def selected_equations(jaxpr: Jaxpr) -> list[SelectedEquation]:
    """Return the equations of a jaxpr, with conversions and clamps fused into branches."""
    uses = Counter(
        id(v) for atoms in (*(e.invars for e in jaxpr.eqns), jaxpr.outvars) for v in atoms
    )
    body_lines: list[SelectedEquation] = []
    for eqn in jaxpr.eqns:
        fused = None
        if eqn.primitive.name == "cond" and body_lines and uses[id(eqn.invars[0])] == 1:
            # JAX's functions bind the index directly before the branch and use it nowhere else.
            fused = _condition(eqn, body_lines[-1].eqn)
        if fused is None:
            body_lines.append(SelectedEquation(eqn, tuple(eqn.invars)))
        else:
            operands, expression = fused
            body_lines[-1] = SelectedEquation(eqn, (*operands, *eqn.invars[1:]), expression)
    return body_lines


def _condition(eqn: JaxprEqn, definition: JaxprEqn) -> tuple[tuple[Atom, ...], MultiResult] | None:
    """Return the operands that replace a branch's index, and the expression of the branch."""
    index = eqn.invars[0]
    if not any(v is index for v in definition.outvars) or _forwards_operand(eqn):
        return None
    branches = len(eqn.params["branches"])
    if definition.primitive.name == "convert_element_type":
        predicate = definition.invars[0]
        is_index = index.aval.dtype == np.int32 and not index.aval.shape
        if branches == 2 and predicate.aval.dtype == np.bool_ and is_index:
            return (predicate,), on_predicate(eqn)
    elif definition.primitive.name == "platform_index":
        if definition.params["platforms"] == eqn.params.get("branches_platforms"):
            return (), on_platform(eqn)
    elif definition.primitive.name == "clamp":
        low, number, high = definition.invars
        if _is_literal(low, 0) and _is_literal(high, branches - 1) and branches > 1:
            return (number,), on_number(eqn)
    return None


def _forwards_operand(eqn: JaxprEqn) -> bool:
    """Return True if a result is the same operand in all branches, which JAX would forward."""
    choice = Cond.of(eqn)
    bodies = list(map(open_jaxpr, choice.branches))
    places = [{v: i for i, v in enumerate(body.invars)} for body in bodies]
    for outs in zip(*(body.outvars for body in bodies), strict=True):
        positions = {
            None if isinstance(v, Literal) else at.get(v)
            for v, at in zip(outs, places, strict=True)
        }
        if len(positions) == 1 and positions != {None}:
            return True
    return False


def _is_literal(atom: Atom, value: int) -> bool:
    return isinstance(atom, Literal) and atom.val == value
