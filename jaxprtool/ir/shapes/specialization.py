"""Replace symbols in a jaxpr by sizes. The result is that of tracing at these sizes.

Everything that mentions a symbol is rewritten, at every depth: the types of variables, parameters
and bodies of equations, and the rules of custom derivatives. All else stays the same object, and a
body that several equations share stays shared. The value of a size (`dim_as_value`) becomes a
literal. So does arithmetic on sizes that Python computes when JAX traces at known sizes, such as
`x.shape[0] / 2`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import jax
import jax.export
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.core.equations import named, type_of, variables
from jaxprtool.ir.core.structured import sub_jaxprs
from jaxprtool.ir.rewriting.custom_rules import (
    CustomRule,
    custom_rule,
    following,
    has_rule,
    map_rule,
    rule_key,
)
from jaxprtool.ir.rewriting.high import lower_hijax
from jaxprtool.ir.rewriting.rewrite import Memo
from jaxprtool.ir.shapes.static_indices import with_slices
from jaxprtool.ir.shapes.symbols import Sizes, value_of
from jaxprtool.jaxcompat import (
    AnyJaxpr,
    Atom,
    Aval,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Params,
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


class _Substitution:
    """A substitution of sizes for symbols, with caches of rewritten bodies, types and rules."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._bodies = Memo()
        self._avals: dict[Aval, Aval] = {}
        self._rules: dict[Hashable, Callable[[], Any]] = {}

    def jaxpr(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        return self._bodies(lambda: _Body(self, jaxpr).made(), jaxpr)

    # --- types and parameters -------------------------------------------------------------------

    def aval(self, aval: Aval) -> Aval:
        """Substitute in a type; return the same object if nothing changes."""
        if isinstance(aval, jaxcompat.AbstractRef):
            inner = self.aval(aval.inner_aval)
            return aval if inner is aval.inner_aval else aval.update(inner_aval=inner)
        shape = getattr(aval, "shape", ())
        if not any(map(jaxcompat.is_symbolic_dimension, shape)):
            return aval
        if aval not in self._avals:
            new = self.value(tuple(shape))
            self._avals[aval] = aval if new is shape else aval.update(shape=new)
        return self._avals[aval]

    def value(self, value: Any) -> Any:
        """Substitute in a parameter; return the same object if nothing changes."""
        if jaxcompat.is_symbolic_dimension(value):
            return value_of(value, self._sizes)
        if isinstance(value, Jaxpr | jaxcompat.ClosedJaxpr):
            return self.jaxpr(value)
        if isinstance(value, jax.core.AbstractValue):
            return self.aval(value)
        if isinstance(value, jax.ShapeDtypeStruct):
            shape = self.value(value.shape)
            return value if shape is value.shape else value.update(shape=shape)
        if isinstance(value, dict):
            items = {name: self.value(item) for name, item in value.items()}
            return value if all(items[k] is value[k] for k in items) else type(value)(items)
        # An `Exported` is lowered with its symbols, and solves for their sizes when it is called.
        if is_dataclass(value) and not isinstance(value, type | jax.export.Exported):
            held = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
            items = self.value(held)
            return value if items is held else replace(value, **items)
        if not isinstance(value, tuple | list):
            return value
        found = [self.value(item) for item in value]
        if all(map(operator.is_, found, value)):
            return value
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)

    def changes(self, eqn: JaxprEqn) -> bool:
        """Return True if the substitution changes a type or a body of an equation."""
        types = any(self.aval(v.aval) is not v.aval for v in (*eqn.invars, *eqn.outvars))
        return types or any(self.jaxpr(body) is not body for _, body in sub_jaxprs(eqn))

    def params(self, eqn: JaxprEqn) -> Params:
        """Substitute in the parameters of an equation."""
        params = {name: self.value(value) for name, value in eqn.params.items()}
        if all(map(operator.is_, params.values(), eqn.params.values())):
            params = eqn.params
        # The derivative rules of a call are functions that JAX has bound to its types.
        if has_rule(eqn) and (self.changes(eqn) or jaxcompat.closes_over_sizes(eqn.params)):
            return params | self._custom(eqn, params)
        if "transpose_thunk" in params and self.changes(eqn):
            transpose = jaxcompat.linear_call_transpose(eqn)
            return params | jaxcompat.linear_call_transpose_param(self.jaxpr(transpose))
        return params

    # --- rules of custom derivatives ------------------------------------------------------------

    def _custom(self, eqn: JaxprEqn, params: Params) -> Params:
        """Return the parameters of a custom call whose derivative rule is substituted in."""
        rule = self._rules.setdefault(rule_key(eqn), _SizedRule(self, eqn))
        kept = params["num_consts"], params["symbolic_zeros"]
        return following(eqn, params["call_jaxpr"], rule, *kept)

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


class _SizedRule:
    """The derivative rule of a custom call after substitution, built when JAX first requests it.

    The user's rule is traced with symbols, which are then replaced by sizes. If JAX cannot trace it
    with symbols, it is traced at the new sizes, and the symbols that it closes over are replaced
    afterwards. The sizes in its types are then substituted in twice, so the substitution must be
    idempotent.
    """

    def __init__(self, owner: _Substitution, eqn: JaxprEqn) -> None:
        self._owner = owner
        self._eqn = eqn
        self._made: CustomRule | None = None

    def __call__(self) -> Any:
        if self._made is None:
            self._made = self._found()
        return self._made

    def then(self, after: _Substitution) -> _SizedRule:
        """Return the rule after another substitution."""
        return _SizedRule(self._owner.then(after), self._eqn)

    def _found(self) -> CustomRule:
        try:
            found = self._with_sizes(self._eqn)
        except UnsupportedError:
            if not self._owner.is_idempotent:
                raise
        else:
            if getattr(found, "raises", None) is None or not self._owner.is_idempotent:
                return found
        return self._with_sizes(self._owner.retyped(self._eqn))

    def _with_sizes(self, eqn: JaxprEqn) -> CustomRule:
        return map_rule(self._owner.jaxpr, custom_rule(eqn))


class _Body:
    """One body while it is rewritten."""

    def __init__(self, owner: _Substitution, jaxpr: AnyJaxpr) -> None:
        self._owner = owner
        self._jaxpr = jaxpr
        #: The atoms that replace variables.
        self._env: dict[Var, Atom] = {}
        #: The variables whose values Python would have computed from sizes.
        self._numbers: dict[Var, int | float] = {}

    def made(self) -> AnyJaxpr:
        """Return the rewritten body; the same object if nothing changes."""
        old = jaxcompat.open_jaxpr(self._jaxpr)
        invars = self._bound(old.invars)
        constvars = self._bound(old.constvars)
        eqns = [new for eqn in old.eqns if (new := self._equation(eqn)) is not None]
        outvars = [self._atom(atom) for atom in old.outvars]
        if self._env:
            before = set(map(id, old.eqns))
            eqns, outvars = with_slices(eqns, outvars, lambda eqn: id(eqn) not in before)
        olds = old.invars, old.constvars, old.eqns, old.outvars
        parts = zip((invars, constvars, eqns, outvars), olds, strict=True)
        if all(len(new) == len(was) and all(map(operator.is_, new, was)) for new, was in parts):
            return self._jaxpr
        return jaxcompat.replace_jaxpr(
            self._jaxpr,
            constvars=constvars,
            invars=invars,
            outvars=outvars,
            eqns=eqns,
            debug_info=old.debug_info,
        )

    def _bound(self, variables: Sequence[Var]) -> list[Var]:
        return [self._variable(var) for var in variables]

    def _variable(self, var: Var) -> Var:
        aval = self._owner.aval(var.aval)
        if aval is var.aval:
            return var
        new = DropVar(aval) if type(var) is DropVar else Var(aval)
        self._env[var] = new
        return new

    def _atom(self, atom: Atom) -> Atom:
        return atom if type(atom) is Literal else self._env.get(atom, atom)

    def _equation(self, eqn: JaxprEqn) -> JaxprEqn | None:
        """Return the rewritten equation, or None if its result becomes a literal."""
        if self._numbers or eqn.primitive.name == jaxcompat.DIM_AS_VALUE:
            number = self._number(eqn)
            if number is not None:
                return None
        if eqn.primitive.name == jaxcompat.CALL_HIGH and self._owner.changes(eqn):
            eqn = lower_hijax(eqn)  # the object in the equation is bound to its old types
        operands = [self._atom(atom) for atom in eqn.invars]
        try:
            params = self._owner.params(eqn)
            outvars = self._bound(eqn.outvars)
        except ZeroDivisionError:
            raise UnsupportedError(f"the {named(eqn)} has a size that divides by zero") from None
        for var in outvars:
            if any(isinstance(n, int) and n < 0 for n in getattr(var.aval, "shape", ())):
                raise UnsupportedError(
                    f"the result of the {named(eqn)} would be {type_of(var.aval)}, which has a "
                    "negative size"
                )
        same = params is eqn.params and all(
            map(operator.is_, (*operands, *outvars), (*eqn.invars, *eqn.outvars))
        )
        if same:
            return eqn
        effects = eqn.effects and jaxcompat.renamed_effects(eqn.effects, self._env)
        return eqn.replace(invars=operands, outvars=outvars, params=params, effects=effects)

    # --- numbers --------------------------------------------------------------------------------

    def _number(self, eqn: JaxprEqn) -> int | float | None:
        """Return the value of an equation if it is known, and replace its result by a literal."""
        if eqn.primitive.name == jaxcompat.DIM_AS_VALUE:
            number = self._owner.value(eqn.params["dim"])
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
        self._env[var] = literal
        if var.aval.weak_type:  # otherwise it is an array, with which JAX computes at run time
            self._numbers[var] = number
        return number

    def _known(self, atom: Atom) -> Any:
        if type(atom) is not Literal:
            return self._numbers.get(atom)
        return np.asarray(atom.val).item() if atom.aval.weak_type else None


def _computed(eqn: JaxprEqn, operands: Sequence[Any]) -> int | float | None:
    """Return what Python computes for an equation of numbers; None if JAX computes it."""
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
