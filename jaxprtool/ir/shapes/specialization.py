"""Replace symbols in a jaxpr by sizes. The result is that of tracing at these sizes.

Everything that mentions a symbol is rewritten, at every depth: the types of variables, parameters
and bodies of equations, and the rules of custom derivatives. All else stays the same object, and a
body that several equations share stays shared. The value of a size (`dim_as_value`) becomes a
literal. So does arithmetic on sizes that Python computes when JAX traces at known sizes, such as
`x.shape[0] / 2`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.core.equations import named, type_of, variables
from jaxprtool.ir.rewriting.custom_rules import CustomRule
from jaxprtool.ir.rewriting.substitution import Body, SubstitutedRule, Substitution
from jaxprtool.ir.shapes.static_indices import with_slices
from jaxprtool.ir.shapes.symbols import Sizes, value_of
from jaxprtool.jaxcompat import (
    AnyJaxpr,
    Atom,
    Aval,
    JaxprEqn,
    Literal,
    Var,
)

#: Primitives that represent Python's arithmetic on sizes, and the conversions before it.
_OPERATORS: dict[str, Callable[..., Any]] = {
    "convert_element_type": operator.pos,
    "copy": operator.pos,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
}


def specialized(jaxpr: AnyJaxpr, sizes: Sizes) -> AnyJaxpr:
    """Replace symbols in a jaxpr by sizes.

    Args:
        jaxpr: A closed or open jaxpr.
        sizes: The size of each symbol to replace, an integer or a symbolic dimension.

    Returns:
        The new jaxpr; the same object if it mentions none of the symbols.

    Raises:
        UnsupportedError: If an equation has a negative size, or divides by zero, at these sizes.
    """
    return _Substitution(sizes).jaxpr(jaxpr)


class _Substitution(Substitution):
    """A substitution of sizes for symbols."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self._sizes = sizes
        self._avals: dict[Aval, Aval] = {}

    def leaf(self, value: Any) -> Any:
        return value_of(value, self._sizes) if jaxcompat.is_symbolic_dimension(value) else value

    def array_type(self, aval: Aval) -> Aval:
        shape = aval.shape
        if not any(map(jaxcompat.is_symbolic_dimension, shape)):
            return aval
        if aval not in self._avals:
            new = self.value(tuple(shape))
            self._avals[aval] = aval if new is shape else aval.update(shape=new)
        return self._avals[aval]

    def rewrites_rule(self, eqn: JaxprEqn) -> bool:
        return self.changes(eqn) or jaxcompat.closes_over_sizes(eqn.params)

    def rewritten(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        return _Body(self, jaxpr).made()

    # --- rules of custom derivatives ------------------------------------------------------------

    def rule(self, eqn: JaxprEqn) -> _SizedRule:
        return _SizedRule(self, eqn)

    def retyped(self, eqn: JaxprEqn) -> JaxprEqn:
        """Return a custom call with new types, whose rule JAX will trace at these types."""

        def again(value: Any) -> Any:
            return value.then(self) if isinstance(value, _SizedRule) else self.value(value)

        params = {name: self.value(value) for name, value in eqn.params.items()}
        return eqn.replace(
            invars=[v if type(v) is Literal else Var(self.aval(v.aval)) for v in eqn.invars],
            outvars=[Var(self.aval(v.aval)) for v in eqn.outvars],
            params=params | jaxcompat.retyped_rules(eqn.params, again),
        )

    @property
    def is_idempotent(self) -> bool:
        """True if applying it twice is the same as once, which it is not for `n='2*n'`."""
        return all(self.value(size) == size for size in self._sizes.values())

    def then(self, after: _Substitution) -> _Substitution:
        """Return the composition of this substitution and the one after it."""
        sizes = {symbol: after.value(size) for symbol, size in self._sizes.items()}
        return _Substitution({**after._sizes, **sizes})


class _SizedRule(SubstitutedRule):
    """The derivative rule of a custom call after substitution.

    The user's rule is traced with symbols, which are then replaced by sizes. If JAX cannot trace it
    with symbols, it is traced at the new sizes, and the symbols that it closes over are replaced
    afterwards. The sizes in its types are then substituted in twice, so the substitution must be
    idempotent.
    """

    def then(self, after: _Substitution) -> _SizedRule:
        """Return the rule after another substitution."""
        return _SizedRule(self.owner.then(after), self.eqn)

    def found(self) -> CustomRule:
        try:
            found: CustomRule = self.owner.with_rule(self.eqn)
        except UnsupportedError:
            if not self.owner.is_idempotent:
                raise
        else:
            if getattr(found, "raises", None) is None or not self.owner.is_idempotent:
                return found
        again: CustomRule = self.owner.with_rule(self.owner.retyped(self.eqn))
        return again


class _Body(Body):
    """One body while sizes are substituted in."""

    def __init__(self, owner: _Substitution, jaxpr: AnyJaxpr) -> None:
        super().__init__(owner, jaxpr)
        self._before = set(map(id, jaxcompat.open_jaxpr(jaxpr).eqns))
        #: The variables whose values Python would have computed from sizes.
        self._numbers: dict[Var, int | float] = {}

    def finished(
        self, eqns: list[JaxprEqn], outvars: list[Atom]
    ) -> tuple[list[JaxprEqn], list[Atom]]:
        if not self.env:
            return eqns, outvars
        return with_slices(eqns, outvars, lambda eqn: id(eqn) not in self._before)

    def equation(self, eqn: JaxprEqn) -> JaxprEqn | None:
        """Return the rewritten equation, or None if its result becomes a literal."""
        if self._numbers or eqn.primitive.name == jaxcompat.DIM_AS_VALUE:
            number = self._number(eqn)
            if number is not None:
                return None
        try:
            new = super().equation(eqn)
        except ZeroDivisionError:
            raise UnsupportedError(f"a size in the {named(eqn)} would divide by zero") from None
        assert new is not None
        for var in new.outvars:
            if any(isinstance(n, int) and n < 0 for n in getattr(var.aval, "shape", ())):
                raise UnsupportedError(
                    f"the result of the {named(eqn)} would be {type_of(var.aval)}, which has a "
                    "negative size"
                )
        return new

    # --- numbers --------------------------------------------------------------------------------

    def _number(self, eqn: JaxprEqn) -> int | float | None:
        """Return the value of an equation if it is known, and replace its result by a literal."""
        if eqn.primitive.name == jaxcompat.DIM_AS_VALUE:
            number = self.owner.value(eqn.params["dim"])
            if jaxcompat.is_symbolic_dimension(number):
                return None
        else:
            known = [self._known(atom) for atom in eqn.invars]
            if None in known or self._numbers.keys().isdisjoint(variables(eqn.invars)):
                return None
            number = _computed(eqn, known)
            if number is None:
                return None
        (var,) = eqn.outvars
        literal = jaxcompat.as_literal(number, var.aval)
        assert literal is not None
        self.env[var] = literal
        if var.aval.weak_type:  # otherwise it is an array, with which JAX computes at run time
            self._numbers[var] = number
        return number

    def _known(self, atom: Atom) -> Any:
        if type(atom) is not Literal:
            return self._numbers.get(atom)
        return np.asarray(atom.val).item() if atom.aval.weak_type else None


def _computed(eqn: JaxprEqn, operands: Sequence[Any]) -> int | float | None:
    """Return the number that Python computes for an equation; None if JAX computes it."""
    compute = _OPERATORS.get(eqn.primitive.name)
    scalar_type = type(np.zeros((), eqn.outvars[0].aval.dtype).item())
    if compute is None or scalar_type not in (int, float):
        return None
    if compute is operator.truediv and scalar_type is int:  # Python's // of sizes is a size
        return None
    try:
        return scalar_type(compute(*operands))  # type: ignore[no-any-return]
    except ZeroDivisionError:  # JAX computes inf or NaN instead
        return None
