"""Whether two programs are the same up to the names of their variables.

Two jaxprs are the same if they have the same equations in the same order, between variables that
correspond: the same primitives, types, literals to the bit, parameters, effects, and the same
context (where it computes, which mesh is set). Bodies of loops, branches and calls are compared
likewise, and so are the rules of custom derivatives, as the jaxprs that they trace to. Names,
source lines and scopes do not matter.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.custom_rules import custom_rule, has_rule, rule_key, rules_followed
from jaxprtool.ir.dtypes import is_extended, physical
from jaxprtool.ir.equations import type_of
from jaxprtool.ir.high import classic
from jaxprtool.ir.mapped_arrays import give_back
from jaxprtool.ir.program import Program
from jaxprtool.ir.rules import RuleTable, rule
from jaxprtool.ir.trees import same_tree
from jaxprtool.jaxcompat import Atom, Aval, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Params, Var


def equivalent(p: object, q: object) -> bool:
    """Whether two Programs, or two jaxprs, are the same up to the names of variables.

    Of Programs, the structures of arguments and results and the axis environment count too; names
    do not. Raises UnsupportedError if a custom rule in them cannot be traced.
    """
    return difference(p, q) is None


def difference(p: object, q: object) -> str | None:
    """The first thing in which two Programs, or two jaxprs, differ; None if nothing is."""
    try:
        if isinstance(p, Program) and isinstance(q, Program):
            _same_border(p, q)
            p, q = p.jaxpr, q.jaxpr
        with rules_followed():
            _Comparison().jaxprs(p, q)
    except _Different as found:
        return ", ".join(reversed(found.where)) + f": {found}"
    except RecursionError:
        raise UnsupportedError(
            "the programs hold more within each other than can be compared"
        ) from None
    return None


def same_rules(p: JaxprEqn, q: JaxprEqn) -> bool:
    """Whether two calls of one custom function, of one kind, have the same rules, as jaxprs.

    Raises UnsupportedError if one of these cannot be traced.
    """
    try:
        with rules_followed():
            _Comparison().parameters(_rules(p), _rules(q))
    except _Different:
        return False
    return True


class _Different(Exception):
    """The difference found, and where: innermost place first."""

    def __init__(self, p: object, q: object):
        super().__init__(f"{_shown(p)} against {_shown(q)}")
        self.where: list[str] = []


def _same_border(p: Program, q: Program) -> None:
    for what in ("in_tree", "out_tree"):
        trees = getattr(p, what), getattr(q, what)
        _at(what, _check, same_tree(*trees), *trees)
    _at("axis_env", _check, p.axis_env == q.axis_env, p.axis_env, q.axis_env)


def _at(where: str, compare: Callable[..., None], *args: object) -> None:
    """Compare; a difference is found at this place."""
    try:
        compare(*args)
    except _Different as found:
        found.where.append(where)
        raise


def _check(same: bool, p: object, q: object) -> None:
    if not same:
        raise _Different(p, q)


class _Comparison:
    """One comparison; it knows which variables correspond, and which bodies are the same."""

    def __init__(self) -> None:
        self._partner: dict[Var, Var] = {}
        # The bodies themselves, so that their identities stay theirs.
        self._same: dict[tuple[int, int], tuple[object, object]] = {}
        # The rules of custom derivatives that are being compared, or have been. A rule may hold
        # calls that follow it: these are the same if nothing else is found to differ.
        self._rules: set[tuple[Hashable, Hashable]] = set()

    def jaxprs(self, p: object, q: object) -> None:
        if p is q or (id(p), id(q)) in self._same:
            return
        # A rule may hold a call of its own function: its body is then compared within itself.
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
        _check(len(p) == len(q), len(p), len(q))
        for a, b in zip(p, q, strict=True):
            _check(_same_type(a.aval, b.aval), repr(a.aval), repr(b.aval))
            self._partner[a] = b

    def _atoms(self, p: Sequence[Atom], q: Sequence[Atom]) -> None:
        _check(len(p) == len(q), len(p), len(q))
        for i, (a, b) in enumerate(zip(p, q, strict=True)):
            if isinstance(a, Literal):
                same = isinstance(b, Literal) and _same_literal(a, b)
            else:
                # A variable that is not bound stands for itself.
                same = not isinstance(b, Literal) and self._partner.get(a, a) is b
            _check(same, f"{_atom(a)} at {i}", _atom(b))

    def _equations(self, p: JaxprEqn, q: JaxprEqn) -> None:
        if p.primitive is not q.primitive:
            p, q = map(as_classic, (p, q))
        _check(p.primitive is q.primitive, p.primitive.name, q.primitive.name)
        _at("operands", self._atoms, p.invars, q.invars)
        if p.params is not q.params:
            self._params(p, q)
        kinds = [sorted(type(e).__name__ for e in eqn.effects) for eqn in (p, q)]
        _at("effects", _check, kinds[0] == kinds[1], *kinds)
        _at("context", _check, p.ctx is q.ctx, p.ctx, q.ctx)
        _at("results", self._bound, p.outvars, q.outvars)

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
        # JAX's rules take a parameter that is None for one that is not there.
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
        elif hasattr(p, "dtype") and hasattr(p, "shape") and not isinstance(p, type):
            _check(_same_array(p, q), p, q)
        else:
            _check(_same_plain(p, q), p, q)


def as_classic(eqn: JaxprEqn) -> JaxprEqn:
    """An equation as a file has it, in which there are no objects with rules of their own."""
    return classic(eqn) if eqn.primitive.name == jaxcompat.CALL_HIGH else eqn


#: For primitives that hold live Python objects, or differ by JAX: functions that return an
#: equation's parameters as plain data.
readable_params: RuleTable[Callable[[JaxprEqn], Params]] = RuleTable()


@rule(readable_params, "scan")
def _scan(eqn: JaxprEqn) -> Params:
    """A scan's parameters, its counts of operands as numbers on every JAX."""
    counts = jaxcompat.scan_counts(eqn.params)
    rest = {k: v for k, v in eqn.params.items() if k not in ("ft_in", "ft_out")}
    return {**rest, "num_consts": counts[0], "num_carry": counts[1]}


@rule(readable_params, "custom_jvp_call", "custom_vjp_call")
def _custom(eqn: JaxprEqn) -> Params:
    """A custom call's parameters, without the live rules."""
    return {k: eqn.params[k] for k in ("call_jaxpr", "num_consts", "symbolic_zeros")}


@rule(readable_params, "reduce")
def _reduce(eqn: JaxprEqn) -> Params:
    """A reduction's parameters, without the function that its jaxpr was traced from."""
    return {k: v for k, v in eqn.params.items() if k != "computation"}


@rule(readable_params, "linear_call")
def _linear_call(eqn: JaxprEqn) -> Params:
    """A linear call's parameters, its transpose as a jaxpr."""
    rest = {k: v for k, v in eqn.params.items() if k != "transpose_thunk"}
    return {**rest, "transpose": jaxcompat.linear_call_transpose(eqn)}


def _rules(eqn: JaxprEqn) -> Params:
    """The rules of a custom call, as jaxprs and masks by field, without their names."""
    return vars(custom_rule(eqn)) | dict.fromkeys(("name", "fwd_name", "bwd_name"))


# --- values -----------------------------------------------------------------------------------


#: Bytes that are compared at a time.
_BLOCK = 1 << 24


def _same_array(p: object, q: object) -> bool:
    """Whether two arrays, numpy scalars or numbers are the same, bit by bit."""
    kinds = [getattr(value, "dtype", None) for value in (p, q)]
    if any(kind and is_extended(kind) for kind in kinds) and kinds[0] != kinds[1]:
        return False
    a, b = (np.asarray(physical(value)) for value in (p, q))
    return a.dtype == b.dtype and a.shape == b.shape and _same_bytes(a, b)


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of one shape and dtype have the same bytes, without copying large ones."""
    if a.nbytes <= _BLOCK:
        return a.tobytes() == b.tobytes()
    a, b = (np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (a, b))
    for start in range(0, a.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        if not np.array_equal(a[block], b[block]):
            return False
        give_back(a)
        give_back(b)
    return True


def _same_literal(p: Literal, q: Literal) -> bool:
    """Whether two literals are the same, of Python numbers what their type can hold of them."""
    # A literal is a scalar: JAX gives it the mesh around it, or none, as its own caches have it.
    kinds = [(x.aval.shape, x.aval.dtype, x.aval.weak_type) for x in (p, q)]
    if kinds[0] != kinds[1]:
        return False
    plain = (np.asarray(x.val).astype(x.aval.dtype, copy=False) for x in (p, q))
    return _same_array(*plain)


def _same_type(p: Aval, q: Aval) -> bool:
    """Whether two types are the same, symbolic dimensions of different scopes by their texts."""
    if p == q:
        return True
    if type(p) is not type(q):
        return False
    if isinstance(p, jaxcompat.AbstractRef):
        inner = q.inner_aval
        return _same_type(p.inner_aval, inner) and p.update(inner_aval=inner) == q
    if not any(map(jaxcompat.is_symbolic_dimension, getattr(p, "shape", ()))):
        return False
    shapes = [[*map(str, aval.shape)] for aval in (p, q)]
    return shapes[0] == shapes[1] and p.update(shape=(0,) * p.ndim) == q.update(shape=(0,) * q.ndim)


def _same_plain(p: object, q: object) -> bool:
    if jaxcompat.is_symbolic_dimension(p) and jaxcompat.is_symbolic_dimension(q):
        return str(p) == str(q)
    if isinstance(p, jax.lax.Tolerance) and isinstance(q, jax.lax.Tolerance):
        return vars(p) == vars(q)  # which JAX compares by identity
    if isinstance(p, PyTreeDef) and isinstance(q, PyTreeDef):
        return same_tree(p, q)
    if isinstance(p, float) and isinstance(q, float):
        return _same_array(np.float64(p), np.float64(q))
    if isinstance(p, FunctionType) and isinstance(q, FunctionType):
        return bool(jaxcompat.live_key(p) == jaxcompat.live_key(q))
    if type(p) is not type(q) and not (_is_integer(p) and _is_integer(q)):
        return False
    try:
        return bool(p == q)
    except Exception:  # objects of others, which may compare as they like
        return False


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


# --- what a difference is shown as ------------------------------------------------------------


def _atom(atom: Atom) -> str:
    if isinstance(atom, Literal):
        return f"the literal {atom.val}:{type_of(atom.aval, weak=True)}"
    return f"a variable of type {type_of(atom.aval, weak=True)}"


def _shown(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 120 else text[:117] + "..."
