"""A rule of `simplify`: a row of text and conditions, and its outcome for a match."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeAlias

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.jaxcompat import Atom, Aval, JaxprEqn, Primitive, Var
from jaxprtool.passes.cleanup.simplify.pattern import (
    CLASSES,
    Matcher,
    Node,
    NumberPattern,
    OperandPattern,
    OperationPattern,
    RowMatch,
    matcher,
    parsed,
)

#: Returns True if a rule holds for a match; the first line of its docstring is shown to the user.
Condition: TypeAlias = Callable[[RowMatch], bool]
#: The parameters of an equation.
Params: TypeAlias = dict[str, Any]
#: The replacement of the equation: an atom for its result, another equation, or None for no change.
Outcome: TypeAlias = Atom | JaxprEqn | None


@dataclass(frozen=True, eq=False)
class Row:
    """One rule: an equation that matches `pattern` is replaced by `replacement` (see `pattern.py`).

    All conditions in `when` must hold. `params` returns the parameters of the new equation, or None
    if the rule does not apply; without it they are those of the first equation of the pattern with
    the same primitive. `build` returns the whole outcome instead, and the replacement is then only
    shown.

    `exact` states if every bit of the result is kept, including NaN, infinities and the sign of
    zero: always, never (only for `fast`), or on a condition. If the rule is `once`, the inner
    equations of the pattern must have no other use, and are removed; `build` may then write one
    equation fewer than these with `emit`.
    """

    pattern: str
    replacement: str
    when: tuple[Condition, ...] = ()
    params: Callable[[RowMatch], Params | None] | None = None
    build: Callable[[RowMatch], Outcome] | None = None
    exact: bool | Condition = True
    once: bool = False

    @property
    def name(self) -> str:
        return f"{self.pattern} → {self.replacement}"

    @cached_property
    def tree(self) -> OperationPattern:
        """The parsed pattern. Raises ValueError if it is malformed or not an equation."""
        tree = parsed(self.pattern)
        if not isinstance(tree, OperationPattern):
            raise ValueError(f"the pattern {self.pattern!r} is not an equation")
        return tree

    @cached_property
    def matches(self) -> Matcher:
        return matcher(self.tree)

    @cached_property
    def result(self) -> Node:
        return parsed(self.replacement)

    @property
    def condition(self) -> str:
        """All conditions on a match, in words."""
        functions = [*self.when, *(f for f in (self.params, self.build) if f is not None)]
        once = ["the inner equations have no other use"] if self.once else []
        return "; ".join([*filter(None, map(_description, functions)), *once])

    @property
    def exactness(self) -> str:
        if callable(self.exact):
            return f"exact if {_description(self.exact)}"
        return "exact" if self.exact else "fast"

    def outcome(self, match: RowMatch, fast: bool) -> Outcome:
        """Return the outcome of the rule for a match of its pattern; None if it does not apply."""
        for condition in self.when:
            if not condition(match):
                return None
        if not (fast or self.exact is True or (callable(self.exact) and self.exact(match))):
            return None
        if self.once and not all(map(match.uses.is_only, match.eqns[1:])):
            return None
        if self.build is not None:
            return self.build(match)
        node = self.result
        if isinstance(node, OperandPattern):
            return match[node.text]
        if isinstance(node, NumberPattern):
            return full(match, float(node.text))
        params = self._params(match, node) if self.params is None else self.params(match)
        if params is None:
            return None
        return equation(match, node.text, _operands(match, node.operands), params)

    def _params(self, match: RowMatch, node: OperationPattern) -> Params:
        for eqn in match.eqns:
            if eqn.primitive.name in node.primitives:
                return eqn.params
        return PARAMS.get(node.text, {})


#: The default parameters of a primitive, for those that have any.
PARAMS: dict[str, Params] = {"mul": {"out_dtype": None}}


def _description(function: Callable[..., object]) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0].removesuffix(".")


def _operands(match: RowMatch, nodes: Sequence[Node]) -> list[Atom]:
    atoms: list[Atom] = []
    for node in nodes:
        if isinstance(node, NumberPattern):
            raise ValueError("a number cannot be an operand in a replacement")
        if isinstance(node, OperationPattern):
            raise ValueError("a replacement must be one equation")
        if node.text.startswith("*"):
            atoms += match[node.text[1:]]
        elif node.text.startswith("-"):
            atom = match[node.text[1:]]
            atoms.append(match.writer.constant(-match.value(node.text[1:]), atom.aval))
        else:
            atoms.append(match[node.text])
    return atoms


def equation(
    match: RowMatch, name: str, operands: Sequence[Atom], params: Params | None = None
) -> JaxprEqn:
    """Return the equation to be replaced with another primitive, operands and parameters."""
    name = match.eqn.primitive.name if name in CLASSES else name
    if params is None:
        params = PARAMS.get(name, {})
    return match.eqn.replace(
        primitive=_primitive(match, name), invars=list(operands), params=params
    )


def emit(match: RowMatch, name: str, operands: Sequence[Atom], params: Params, aval: Aval) -> Var:
    """Write an equation with one result of this type before the one that is replaced."""
    primitive, out = _primitive(match, name), Var(aval)
    eqn = match.eqn.replace(
        primitive=primitive, invars=list(operands), outvars=[out], params=params
    )
    match.writer.add(eqn)
    return out


def _primitive(match: RowMatch, name: str) -> Primitive:
    for eqn in match.eqns:
        if eqn.primitive.name == name:
            return eqn.primitive
    return getattr(jax.extend.core.primitives, f"{name}_p")


def full(match: RowMatch, value: Any) -> Outcome:
    """Return the result as one constant: a literal for a scalar, else a broadcast literal."""
    aval = match.out
    if any(map(jaxcompat.is_symbolic_dimension, aval.shape)) or jaxcompat.varying_axes(aval):
        return None
    data = np.asarray(value).astype(aval.dtype)
    scalar = jax.core.ShapedArray((), aval.dtype, weak_type=aval.weak_type)
    literal = jaxcompat.as_literal(data, scalar)
    if literal is None or aval.shape == ():
        return literal
    params = {"shape": aval.shape, "broadcast_dimensions": (), "sharding": None}
    return equation(match, "broadcast_in_dim", [literal], params)


# --- conditions on the type that an equation computes in ----------------------------------------

_KINDS = (jnp.floating, jnp.complexfloating, jnp.integer, jnp.bool_)
#: The kind of floats that are powers of two, such as f8_e8m0fnu.
_POWERS = "powers of two"


@cache
def _kind_of(dtype: np.dtype | None) -> type | str | None:
    if jnp.issubdtype(dtype, jnp.floating) and float(jnp.finfo(dtype).min) > 0:
        return _POWERS
    return next((kind for kind in _KINDS if jnp.issubdtype(dtype, kind)), None)


def has_zero(dtype: np.dtype) -> bool:
    """Return False for a dtype without zero and negative numbers, which become NaN in it."""
    return _kind_of(dtype) is not _POWERS


def _computes_in(name: str, *kinds: type | str) -> Condition:
    def condition(match: RowMatch) -> bool:
        return _kind_of(match.eqn.invars[-1].aval.dtype) in kinds

    condition.__doc__ = name
    return condition


real = _computes_in("reals", jnp.floating, jnp.integer)
floats = _computes_in("floats", jnp.floating)
signed = _computes_in(
    "a type with negative numbers, or integers", jnp.floating, jnp.complexfloating, jnp.integer
)
discrete = _computes_in("integers or booleans", jnp.integer, jnp.bool_)
integers = _computes_in("integers", jnp.integer)
booleans = _computes_in("booleans", jnp.bool_)

#: These never hold for floating-point or complex numbers.
NEVER_INEXACT = frozenset({discrete, integers, booleans})


def is_inexact(eqn: JaxprEqn) -> bool:
    """Return True if an equation computes in floating-point or complex numbers."""
    dtype = getattr(eqn.invars[-1].aval, "dtype", None) if eqn.invars else None
    return _kind_of(dtype) in (jnp.floating, jnp.complexfloating, _POWERS)
