"""Compare two programs up to the names of their variables.

Two jaxprs are the same if they have the same equations in the same order, between variables that
correspond. Equations are the same if they have the same primitive, types, literals (to the bit),
parameters, effects and context: where they compute, and which mesh is set. Bodies of loops,
branches and calls are compared likewise, and so are the rules of custom derivatives, as the jaxprs
that they trace to. Names, source lines and scopes do not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.basics.records import fields_of
from jaxprtool.ir.basics.rules import RuleTable, rule
from jaxprtool.ir.core.equations import type_of
from jaxprtool.ir.core.structured import holds_jaxpr
from jaxprtool.ir.equality.function_keys import function_difference, parameter_key
from jaxprtool.ir.equality.value_keys import (
    effect_kinds,
    literal_key,
    same_array,
    type_key,
)
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.trees import same_tree
from jaxprtool.ir.rewriting.custom_rules import custom_rule, has_rule, rule_key, rules_followed
from jaxprtool.ir.rewriting.high import without_live_objects
from jaxprtool.jaxcompat import Atom, Aval, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Params, Var


def equivalent(p: object, q: object) -> bool:
    """Return True if two Programs, or two jaxprs, are the same up to the names of variables.

    For Programs, the structures of arguments and results and the axis environment count too; names
    do not.

    Args:
        p: A Program, or a jaxpr.
        q: Another one of the same kind.

    Raises:
        UnsupportedError: If the rule of a custom derivative cannot be traced, or the programs are
            too deeply nested.
    """
    return difference(p, q) is None


def difference(p: object, q: object) -> str | None:
    """Return the first difference between two Programs, or two jaxprs; None if there is none."""
    try:
        if isinstance(p, Program) and isinstance(q, Program):
            _same_signature(p, q)
            p, q = p.jaxpr, q.jaxpr
        with rules_followed():
            _Comparison().jaxprs(p, q)
    except _Different as found:
        return ", ".join(reversed(found.where)) + f": {found}"
    except RecursionError:
        raise UnsupportedError("the programs are too deeply nested to be compared") from None
    return None


def same_rules(p: JaxprEqn, q: JaxprEqn) -> bool:
    """Return True if two calls of one custom function, of the same kind, have equal rules.

    Rules are compared as jaxprs. Raises UnsupportedError if one of them cannot be traced.
    """
    try:
        with rules_followed():
            _Comparison().parameters(_rules(p), _rules(q))
    except _Different:
        return False
    return True


def same_operation(p: JaxprEqn, q: JaxprEqn) -> bool:
    """Return True if two equations compute the same from equal operands, whatever their context.

    Raises UnsupportedError if a custom rule in them cannot be traced.
    """
    try:
        with rules_followed():
            comparison = _Comparison()
            comparison.types(p.invars, q.invars)
            comparison.operation(p, q)
            comparison.types(p.outvars, q.outvars)
    except _Different:
        return False
    return True


def action_difference(p: JaxprEqn, q: JaxprEqn) -> str | None:
    """Return the first difference in what two equations with effects do, whatever their operands.

    The bodies of loops and calls are left out.
    """
    if p.primitive is not q.primitive:
        return f"{p.primitive.name} against {q.primitive.name}"
    try:
        with rules_followed():
            _Comparison().operation(*(_without_bodies(eqn) for eqn in (p, q)))
    except _Different as found:
        return ", ".join(reversed(found.where)) + f": {found}"
    return None


def _without_bodies(eqn: JaxprEqn) -> JaxprEqn:
    kept = {k: v for k, v in eqn.params.items() if not holds_jaxpr((v,))}
    return eqn if len(kept) == len(eqn.params) else eqn.replace(params=kept)


class _Different(Exception):
    """The difference found, and its location: the innermost part first."""

    def __init__(self, p: object, q: object):
        texts = function_difference(p, q) if callable(p) and callable(q) else None
        one, other = texts or _shown(p, q)
        super().__init__(f"{one} against {other}")
        self.where: list[str] = []


def _same_signature(p: Program, q: Program) -> None:
    for what in ("in_tree", "out_tree"):
        trees = getattr(p, what), getattr(q, what)
        _at(what, _check, same_tree(*trees), *trees)
    _at("axis_env", _check, p.axis_env == q.axis_env, p.axis_env, q.axis_env)


def _at(where: str, compare: Callable[..., None], *args: object) -> None:
    """Run a comparison, and add `where` to the location of a difference found."""
    try:
        compare(*args)
    except _Different as found:
        found.where.append(where)
        raise


def _check(same: bool, p: object, q: object) -> None:
    if not same:
        raise _Different(p, q)


class _Comparison:
    """One comparison, with the corresponding variables and the bodies found to be the same."""

    def __init__(self) -> None:
        self._partner: dict[Var, Var] = {}
        # Keep the bodies themselves, so that their ids are not reused.
        self._same: dict[tuple[int, int], tuple[object, object]] = {}
        # Pairs of rules of custom derivatives that are or have been compared. A rule may contain a
        # call with the same rule. Then the two rules are the same if nothing else differs.
        self._rules: set[tuple[Hashable, Hashable]] = set()

    def jaxprs(self, p: object, q: object) -> None:
        if p is q or (id(p), id(q)) in self._same:
            return
        # A rule may hold a call of its own function, whose body is then compared recursively.
        around, self._partner = self._partner, {}
        self._bodies(p, q)
        self._partner = around
        self._same[id(p), id(q)] = p, q

    def _bodies(self, p: object, q: object) -> None:
        a, b = jaxcompat.open_jaxpr(p), jaxcompat.open_jaxpr(q)
        _at("constants", self._bound, a.constvars, b.constvars)
        _at("constants", self._values, getattr(p, "consts", ()), getattr(q, "consts", ()))
        _at("arguments", self._bound, a.invars, b.invars)
        _at("the number of equations", _check, len(a.eqns) == len(b.eqns), len(a.eqns), len(b.eqns))
        for i, (e, f) in enumerate(zip(a.eqns, b.eqns, strict=True)):
            try:
                self._equations(e, f)
            except _Different as found:
                found.where.append(f"equation {i} ({e.primitive.name})")
                raise
        _at("results", self._atoms, a.outvars, b.outvars)

    def _bound(self, p: Sequence[Var], q: Sequence[Var]) -> None:
        self.types(p, q)
        self._partner.update(zip(p, q, strict=True))

    def types(self, p: Sequence[Atom], q: Sequence[Atom]) -> None:
        """Compare the types of atoms in order."""
        _check(len(p) == len(q), len(p), len(q))
        for a, b in zip(p, q, strict=True):
            _check(_same_type(a.aval, b.aval), repr(a.aval), repr(b.aval))

    def _atoms(self, p: Sequence[Atom], q: Sequence[Atom]) -> None:
        _check(len(p) == len(q), len(p), len(q))
        for i, (a, b) in enumerate(zip(p, q, strict=True)):
            if isinstance(a, Literal):
                same = isinstance(b, Literal) and literal_key(a) == literal_key(b)
            else:
                # An unbound variable corresponds to itself.
                same = not isinstance(b, Literal) and self._partner.get(a, a) is b
            _check(same, f"{_atom(a)} at {i}", _atom(b))

    def _equations(self, p: JaxprEqn, q: JaxprEqn) -> None:
        if p.primitive is not q.primitive:
            p, q = map(without_live_objects, (p, q))
        # Opaque equations have the lines of their source in their primitives.
        names, opaque = (p.primitive.name, q.primitive.name), map(jaxcompat.is_opaque, (p, q))
        alike = names[0] == names[1] if all(opaque) else p.primitive is q.primitive
        _check(alike, *names)
        _at("operands", self._atoms, p.invars, q.invars)
        self.operation(p, q)
        _at("context", _check, p.ctx is q.ctx, p.ctx, q.ctx)
        _at("results", self._bound, p.outvars, q.outvars)

    def operation(self, p: JaxprEqn, q: JaxprEqn) -> None:
        """Compare the parameters and effects of two equations of one primitive."""
        if p.params is not q.params:
            self._params(p, q)
        kinds = list(effect_kinds(p)), list(effect_kinds(q))
        _at("effects", _check, kinds[0] == kinds[1], *kinds)

    def _params(self, p: JaxprEqn, q: JaxprEqn) -> None:
        readable = readable_params.get(p.primitive.name, lambda eqn: eqn.params)
        self.parameters(readable(p), readable(q))
        if has_rule(p):
            keys = rule_key(p), rule_key(q)
            if keys[0] != keys[1] and keys not in self._rules:
                self._rules.add(keys)
                self.parameters(_rules(p), _rules(q))

    def parameters(self, p: Params, q: Params) -> None:
        """Compare parameters by name."""
        # JAX's rules treat a parameter that is None like one left out.
        for name in sorted(p.keys() | q.keys()):
            a, b = p.get(name), q.get(name)
            if a is not b:
                _at(f"parameter {name}", self._value, a, b)

    def _values(self, p: Sequence[object], q: Sequence[object]) -> None:
        _check(len(p) == len(q), p, q)
        for a, b in zip(p, q, strict=True):
            self._value(a, b)

    def _value(self, p: object, q: object) -> None:
        if p is q:
            return
        if isinstance(p, Jaxpr | ClosedJaxpr) and isinstance(q, Jaxpr | ClosedJaxpr):
            self.jaxprs(p, q)
        elif isinstance(p, tuple | list) and isinstance(q, tuple | list):
            self._values(p, q)
        elif isinstance(p, dict) and isinstance(q, dict):
            self._values(sorted(p), sorted(q))
            self._values([p[k] for k in sorted(p)], [q[k] for k in sorted(q)])
        elif isinstance(p, _TYPES) and isinstance(q, _TYPES):
            _check(_same_type(p, q), repr(p), repr(q))
        elif _is_array(p) or _is_array(q):
            _check(same_array(p, q), p, q)
        elif (record := fields_of(p)) and (other := fields_of(q)):
            _check(record[0] == other[0], p, q)
            self._value(record[1], other[1])
        else:
            _check(_same_plain(p, q), p, q)


#: For primitives that hold live Python objects, or differ between JAX releases: functions that
#: return an equation's parameters as plain data.
readable_params: RuleTable[Callable[[JaxprEqn], Params]] = RuleTable()


@rule(readable_params, "scan")
def _scan(eqn: JaxprEqn) -> Params:
    """Return a scan's parameters, with its counts of operands as numbers in every JAX release."""
    counts = jaxcompat.scan_counts(eqn.params)
    rest = {k: v for k, v in eqn.params.items() if k not in ("ft_in", "ft_out")}
    return {**rest, "num_consts": counts[0], "num_carry": counts[1]}


@rule(readable_params, "custom_jvp_call", "custom_vjp_call")
def _custom(eqn: JaxprEqn) -> Params:
    """Return a custom call's parameters, without the live rules."""
    return {k: eqn.params[k] for k in ("call_jaxpr", "num_consts", "symbolic_zeros")}


@rule(readable_params, "reduce")
def _reduce(eqn: JaxprEqn) -> Params:
    """Return a reduction's parameters, without the function that its jaxpr was traced from."""
    return {k: v for k, v in eqn.params.items() if k != "computation"}


@rule(readable_params, "remat_opt")
def _remat_opt(eqn: JaxprEqn) -> Params:
    """Return the parameters of an optimized forward rule, with the function itself as a jaxpr.

    A value of the enclosing trace that the function captures is only the same as itself.
    """
    rest = {k: v for k, v in eqn.params.items() if k != "fun_jaxpr_thunk"}
    jaxpr, consts = eqn.params["fun_jaxpr_thunk"]()
    values = [id(x) if isinstance(x, jax.core.Tracer) else x for x in consts]
    return {**rest, "fun_jaxpr": jaxpr, "fun_consts": values}


@rule(readable_params, "linear_call")
def _linear_call(eqn: JaxprEqn) -> Params:
    """Return a linear call's parameters, with its transpose as a jaxpr."""
    rest = {k: v for k, v in eqn.params.items() if k != "transpose_thunk"}
    return {**rest, "transpose": jaxcompat.linear_call_transpose(eqn)}


@rule(readable_params, "check")
def _check_params(eqn: JaxprEqn) -> Params:
    """Return a check's parameters, with its errors as texts, without numbers and call stacks."""
    errors = jaxcompat.checked_errors(eqn)
    return eqn.params if errors is None else {**eqn.params, "err_tree": errors}


def _rules(eqn: JaxprEqn) -> Params:
    """Return the rules of a custom call, as jaxprs and masks by field, without their names."""
    return vars(custom_rule(eqn)) | dict.fromkeys(("name", "fwd_name", "bwd_name"))


# --- values -----------------------------------------------------------------------------------


_TYPES = (jax.core.ShapedArray, jaxcompat.AbstractRef)


def _is_array(value: object) -> bool:
    is_other = isinstance(value, type | np.generic)
    return hasattr(value, "dtype") and hasattr(value, "shape") and not is_other


def _same_type(p: Aval, q: Aval) -> bool:
    return p == q or type_key(p) == type_key(q)


def _same_plain(p: object, q: object) -> bool:
    if isinstance(p, PyTreeDef) and isinstance(q, PyTreeDef):
        return same_tree(p, q)
    try:
        keys = parameter_key(p), parameter_key(q)
        return bool(type(p) is type(q) and p == q) if keys[0] is None else keys[0] == keys[1]
    except Exception:  # other packages' objects may raise in comparisons
        return False


# --- descriptions of differences ------------------------------------------------------------------


def _atom(atom: Atom) -> str:
    if isinstance(atom, Literal):
        return f"the literal {atom.val}:{type_of(atom.aval, weak=True)}"
    return f"a variable of type {type_of(atom.aval, weak=True)}"


def _shown(p: object, q: object) -> tuple[str, str]:
    """Return short texts of two values, from where these begin to differ."""
    one, other = (" ".join(str(value).split()) for value in (p, q))
    if one == other:
        return f"one {one[:_WIDTH]}", f"another {other[:_WIDTH]}"
    pairs = enumerate(zip(one, other, strict=False))
    start = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other))) - _WIDTH // 2
    return _cut(one, start), _cut(other, start)


#: The number of characters of a value that are shown.
_WIDTH = 120


def _cut(text: str, start: int) -> str:
    if len(text) <= _WIDTH or start < _WIDTH // 4:
        return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."
    return "..." + text[start : start + _WIDTH]
