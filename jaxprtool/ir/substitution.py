"""Substitute in all parts of a jaxpr, and find the meshes that it mentions.

A subclass of `Substitution` changes single types, parameter values and contexts; this module
applies it at every depth. All else stays the same object, and a body that several equations share
stays shared.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any

import jax
import jax.export
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.custom_rules import (
    CustomRule,
    custom_rule,
    following,
    has_rule,
    map_rule,
    rule_key,
    rules_followed,
)
from jaxprtool.ir.equations import (
    LIVE,
)
from jaxprtool.ir.regions import sub_jaxprs
from jaxprtool.ir.rewrite import Memo
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Aval, DropVar, Jaxpr, JaxprEqn, Literal, Params, Var


class SubstitutedBody:
    """One body while it is rewritten by the substitution `owner`.

    Subclasses override `equation` and `finished`.
    """

    def __init__(self, owner: Any, jaxpr: AnyJaxpr) -> None:
        self.owner = owner
        self._jaxpr = jaxpr
        #: The atoms that replace variables.
        self.env: dict[Var, Atom] = {}

    def made(self) -> AnyJaxpr:
        """Return the rewritten body; the same object if nothing changes."""
        old = jaxcompat.open_jaxpr(self._jaxpr)
        invars = self.bound(old.invars)
        constvars = self.bound(old.constvars)
        eqns = [new for eqn in old.eqns if (new := self.equation(eqn)) is not None]
        outvars = [self.atom(atom) for atom in old.outvars]
        eqns, outvars = self.finished(eqns, outvars)
        consts = getattr(self._jaxpr, "consts", ())
        types = [var.aval for var in constvars]
        new_consts = self.owner.constants(consts, types) if consts else consts
        parts = zip(
            (invars, constvars, eqns, outvars, new_consts),
            (old.invars, old.constvars, old.eqns, old.outvars, consts),
            strict=True,
        )
        if all(len(new) == len(was) and all(map(operator.is_, new, was)) for new, was in parts):
            return self._jaxpr
        return jaxcompat.replace_jaxpr(
            self._jaxpr,
            constvars=constvars,
            consts=new_consts,
            invars=invars,
            outvars=outvars,
            eqns=eqns,
            debug_info=old.debug_info,
        )

    def finished(
        self, eqns: list[JaxprEqn], outvars: list[Atom]
    ) -> tuple[list[JaxprEqn], list[Atom]]:
        """Return the final equations and results, once all have been rewritten."""
        return eqns, outvars

    def bound(self, variables: Sequence[Var]) -> list[Var]:
        """Replace the variables whose types change by new ones."""
        return [self._variable(var) for var in variables]

    def _variable(self, var: Var) -> Var:
        aval = self.owner.aval(var.aval)
        if aval is var.aval:
            return var
        new = DropVar(aval) if type(var) is DropVar else Var(aval)
        self.env[var] = new
        return new

    def atom(self, atom: Atom) -> Atom:
        """Return the atom that replaces an atom."""
        return self.owner.literal(atom) if type(atom) is Literal else self.env.get(atom, atom)

    def equation(self, eqn: JaxprEqn) -> JaxprEqn | None:
        """Return the rewritten equation, or None to remove it."""
        if eqn.primitive.name in LIVE and self.owner.changes(eqn):
            from jaxprtool.ir.expansions import without_live_objects  # few programs have any

            eqn = without_live_objects(eqn)  # the object in the equation is bound to its old types
        operands = [self.atom(atom) for atom in eqn.invars]
        params = self.owner.params(eqn)
        context = self.owner.context(eqn.ctx)
        outvars = self.bound(eqn.outvars)
        same = (
            params is eqn.params
            and context is eqn.ctx
            and all(map(operator.is_, (*operands, *outvars), (*eqn.invars, *eqn.outvars)))
        )
        if same:
            return eqn
        effects = eqn.effects and jaxcompat.renamed_effects(eqn.effects, self.env)
        return eqn.replace(
            invars=operands, outvars=outvars, params=params, effects=effects, ctx=context
        )


class Substitution:
    """A substitution, with caches of the bodies, types and rules that it has rewritten.

    Subclasses override `leaf` and `array_type`, and also `context` or `constants` if these change.
    """

    def __init__(self) -> None:
        self._bodies = Memo()
        self._rules: dict[Hashable, Callable[[], Any]] = {}

    # --- for subclasses ---------------------------------------------------------------------------

    def leaf(self, value: Any) -> Any:
        """Substitute in a parameter value that is not a container; return the same if it stays."""
        return value

    def array_type(self, aval: Aval) -> Aval:
        """Substitute in the type of an array; return the same object if it stays."""
        return aval

    def context(self, context: Any) -> Any:
        """Substitute in the context of an equation (`eqn.ctx`)."""
        return context

    def constants(self, values: Sequence[Any], types: Sequence[Aval]) -> Sequence[Any]:
        """Substitute in the constants of a jaxpr, which have these new types."""
        return values

    def rewrites_rule(self, eqn: JaxprEqn) -> bool:
        """Return True if the rule of a call (a derivative or a transpose) is substituted in."""
        return self.changes(eqn)

    def rule(self, eqn: JaxprEqn) -> Callable[[], CustomRule]:
        """Return a function that makes the derivative rule of a custom call on JAX's request."""
        return SubstitutedRule(self, eqn)

    def rewritten(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        """Substitute in a jaxpr that was not rewritten before."""
        return SubstitutedBody(self, jaxpr).made()

    # --- at every depth ---------------------------------------------------------------------------

    def jaxpr(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        """Substitute in a jaxpr, closed or open; return the same object if nothing changes."""
        return self._bodies(lambda: self.rewritten(jaxpr), jaxpr)

    def aval(self, aval: Aval) -> Aval:
        """Substitute in a type; return the same object if nothing changes."""
        if isinstance(aval, jaxcompat.AbstractRef):
            inner = self.aval(aval.inner_aval)
            return aval if inner is aval.inner_aval else aval.update(inner_aval=inner)
        return self.array_type(aval) if hasattr(aval, "shape") else aval

    def value(self, value: Any) -> Any:
        """Substitute in a parameter; return the same object if nothing changes."""
        new = self.leaf(value)
        if new is not value:
            return new
        if isinstance(value, Jaxpr | jaxcompat.ClosedJaxpr):
            return self.jaxpr(value)
        if isinstance(value, jax.core.AbstractValue):
            return self.aval(value)
        if isinstance(value, jax.ShapeDtypeStruct):
            return self._described(value)
        if isinstance(value, dict):
            items = {name: self.value(item) for name, item in value.items()}
            return value if all(items[k] is value[k] for k in items) else type(value)(items)
        # An `Exported` is lowered as it is, and solves for its sizes when it is called.
        if is_dataclass(value) and not isinstance(value, type | jax.export.Exported):
            attributes = {
                field.name: getattr(value, field.name) for field in fields(value) if field.init
            }
            items = self.value(attributes)
            return value if items is attributes else replace(value, **items)
        if not isinstance(value, tuple | list):
            return value
        elements = [self.value(item) for item in value]
        if all(map(operator.is_, elements, value)):
            return value
        return type(value)(*elements) if hasattr(value, "_fields") else type(value)(elements)

    def _described(self, value: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        parts = {"shape": value.shape, "sharding": value.sharding}
        new = {name: self.value(part) for name, part in parts.items()}
        return value if all(new[k] is parts[k] for k in parts) else value.update(**new)

    def literal(self, literal: Literal) -> Literal:
        """Substitute in the type of a literal, which is a scalar."""
        aval = self.aval(literal.aval)
        if aval is literal.aval:
            return literal
        result = jaxcompat.as_literal(literal.val, aval)
        assert result is not None
        return result

    def changes(self, eqn: JaxprEqn) -> bool:
        """Return True if the substitution changes a type or a body of an equation."""
        types = any(self.aval(v.aval) is not v.aval for v in (*eqn.invars, *eqn.outvars))
        return types or any(self.jaxpr(body) is not body for _, body in sub_jaxprs(eqn))

    def params(self, eqn: JaxprEqn) -> Params:
        """Substitute in the parameters of an equation; return the same dict if nothing changes."""
        params = {name: self.value(value) for name, value in eqn.params.items()}
        if all(map(operator.is_, params.values(), eqn.params.values())):
            params = eqn.params
        # The derivative rules of a call are functions that JAX has bound to its types.
        if has_rule(eqn) and self.rewrites_rule(eqn):
            return params | self._custom(eqn, params)
        if "transpose_thunk" in params and self.rewrites_rule(eqn):
            transpose = jaxcompat.linear_call_transpose(eqn)
            return params | jaxcompat.linear_call_transpose_param(self.jaxpr(transpose))
        return params

    def _custom(self, eqn: JaxprEqn, params: Params) -> Params:
        """Return the parameters of a custom call whose derivative rule is substituted in."""
        rule = self._rules.setdefault(rule_key(eqn), self.rule(eqn))
        kept = params["num_consts"], params["symbolic_zeros"]
        return following(eqn, params["call_jaxpr"], rule, *kept)

    def with_rule(self, eqn: JaxprEqn) -> CustomRule:
        """Return the derivative rule of a custom call, traced as it is, and substituted in."""
        return map_rule(self.jaxpr, custom_rule(eqn))


class SubstitutedRule:
    """The derivative rule of a custom call after substitution, built when JAX first requests it."""

    def __init__(self, owner: Any, eqn: JaxprEqn) -> None:
        self.owner = owner
        self.eqn = eqn
        self._made: CustomRule | None = None

    def __call__(self) -> CustomRule:
        if self._made is None:
            self._made = self.found()
        return self._made

    def found(self) -> CustomRule:
        rule: CustomRule = self.owner.with_rule(self.eqn)
        return rule


# --- mesh sizes -----------------------------------------------------------------------------------
# Put a jaxpr on a mesh that has the same axes with other sizes.
#
# A mesh occurs in types (`f32[8@data]`), in shardings and other parameters, in the contexts of
# equations, and in the rules of custom derivatives. All of them are rewritten. Arrays are whole in
# these types, so no shape changes. This is not so in the body of a `shard_map`, whose shapes are
# those of one shard: its axes must keep their sizes.


def meshes_in(
    jaxpr: AnyJaxpr, options: Any = None, rules: bool = False
) -> list[Mesh | AbstractMesh]:
    """Return the meshes that a jaxpr mentions, at every depth, without empty ones.

    Args:
        jaxpr: The jaxpr.
        options: The options of `jax.jit`, which are searched too.
        rules: Whether the rules of custom derivatives are traced and searched.
    """
    search = _MeshSearch(rules)
    search.value(options)
    with rules_followed():
        search.jaxpr(jaxpr)
    return list(search.found)


#: The types of most parameters, which mention no mesh.
_WITHOUT_MESH: frozenset[type] = frozenset({type(None), bool, int, float, str})


class _MeshSearch(Substitution):
    """A substitution that changes nothing, and collects all meshes."""

    def __init__(self, rules: bool) -> None:
        super().__init__()
        self.found: dict[Mesh | AbstractMesh, None] = {}
        self._searches_rules = rules
        self._searched: set[Hashable] = set()
        # The types and parameters that have been searched, by identity: most are shared.
        self._known: dict[int, Any] = {}

    def rewritten(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        # Every command searches its program: this visits all that `SubstitutedBody` does.
        body = jaxcompat.open_jaxpr(jaxpr)
        for var in (*body.invars, *body.constvars):
            self.aval(var.aval)
        for eqn in body.eqns:
            if eqn.primitive.name in LIVE:
                self.changes(eqn)
            for atom in eqn.invars:
                if type(atom) is Literal:
                    self.aval(atom.aval)
            if has_rule(eqn) or "transpose_thunk" in eqn.params:
                self.params(eqn)
            else:
                for value in eqn.params.values():
                    self.value(value)
            self.context(eqn.ctx)
            for var in eqn.outvars:
                self.aval(var.aval)
        for atom in body.outvars:
            self.aval(atom.aval)
        return jaxpr

    def aval(self, aval: Aval) -> Aval:
        if id(aval) not in self._known:
            self._known[id(aval)] = aval
            super().aval(aval)
        return aval

    def value(self, value: Any) -> Any:
        cls = type(value)
        if cls in _WITHOUT_MESH or (cls is tuple and jaxcompat.holds_integers(value)):
            return value
        if id(value) not in self._known:
            self._known[id(value)] = value
            super().value(value)
        return value

    def leaf(self, value: Any) -> Any:
        if isinstance(value, Mesh | AbstractMesh):
            if not value.empty:
                self.found[value] = None
        elif isinstance(value, Format):
            self.leaf(value.sharding)
        elif isinstance(value, NamedSharding):
            self.leaf(value.mesh)
        return value

    def array_type(self, aval: Aval) -> Aval:
        self.leaf(getattr(aval, "sharding", None))
        return aval

    def context(self, context: Any) -> Any:
        if id(context) not in self._known:
            self._known[id(context)] = context
            self.leaf(jaxcompat.context_settings(context)["cur_abstract_mesh"])
        return context

    def rewrites_rule(self, eqn: JaxprEqn) -> bool:
        if self._searches_rules and has_rule(eqn) and (key := rule_key(eqn)) not in self._searched:
            self._searched.add(key)  # a rule may contain its own call
            with suppress(UnsupportedError):  # the derivative raises it
                self.with_rule(eqn)
        return False
