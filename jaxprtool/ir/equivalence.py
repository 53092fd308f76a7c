"""Compare two programs up to names, and number equations and jaxprs by structure.

Two jaxprs are the same if they have the same equations in the same order, between variables that
correspond. Equations are the same if they have the same primitive, types, literals (to the bit),
parameters, effects and context: where they compute, and which mesh is set. Bodies of loops,
branches and calls are compared likewise, and so are the rules of custom derivatives, as the jaxprs
that they trace to. Names, source lines and scopes do not matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.backends import process_cache
from jaxprtool.ir.custom_rules import custom_rule, has_rule, rule_key, rules_followed
from jaxprtool.ir.equations import fields_of, type_of
from jaxprtool.ir.expansions import without_live_objects
from jaxprtool.ir.keys import (
    array_digest,
    effect_kinds,
    function_difference,
    literal_key,
    parameter_key,
    same_array,
    type_key,
)
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import holds_jaxpr
from jaxprtool.ir.rules import RuleTable, rule
from jaxprtool.ir.traits import traits
from jaxprtool.ir.trees import same_tree
from jaxprtool.jaxcompat import (
    AnyJaxpr,
    Atom,
    Aval,
    ClosedJaxpr,
    DebugInfo,
    Jaxpr,
    JaxprEqn,
    Literal,
    Params,
    Var,
)

# --- equivalence ----------------------------------------------------------------------------------
# Compare two programs up to the names of their variables.


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
    return structural_difference(p, q) is None


def structural_difference(p: object, q: object) -> str | None:
    """Return the first difference between two Programs, or two jaxprs; None if there is none."""
    try:
        if isinstance(p, Program) and isinstance(q, Program):
            _same_signature(p, q)
            p, q = p.jaxpr, q.jaxpr
        with rules_followed():
            _EquivalenceCheck().jaxprs(p, q)
    except _Different as error:
        return ", ".join(reversed(error.where)) + f": {error}"
    except RecursionError:
        raise UnsupportedError("the programs are too deeply nested to be compared") from None
    return None


def same_primitive(p: JaxprEqn, q: JaxprEqn) -> bool:
    """Return True if two equations have one primitive, whatever the lines of opaque ones."""
    if all(map(jaxcompat.is_opaque, (p, q))):
        return p.primitive.name == q.primitive.name
    return p.primitive is q.primitive


def same_rules(p: JaxprEqn, q: JaxprEqn) -> bool:
    """Return True if two calls of one custom function, of the same kind, have equal rules.

    Rules are compared as jaxprs. Raises UnsupportedError if one of them cannot be traced.
    """
    try:
        with rules_followed():
            _EquivalenceCheck().parameters(_rules(p), _rules(q))
    except _Different:
        return False
    return True


def same_rules_for_types(p: JaxprEqn, q: JaxprEqn) -> bool:
    """Return True if the rules of two custom calls do the same, each for its types of operands.

    Rules that call functions with rules without end, or cannot be traced, are not the same.
    """
    try:
        with rules_followed():
            _UntypedCheck().parameters(_rules(p), _rules(q))
    except (_Different, UnsupportedError):
        return False
    return True


def same_operation(p: JaxprEqn, q: JaxprEqn) -> bool:
    """Return True if two equations compute the same from equal operands, whatever their context.

    Raises UnsupportedError if a custom rule in them cannot be traced.
    """
    try:
        with rules_followed():
            comparison = _EquivalenceCheck()
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
    if not same_primitive(p, q):
        return f"{p.primitive.name} against {q.primitive.name}"
    try:
        with rules_followed():
            _EquivalenceCheck().operation(*(_without_bodies(eqn) for eqn in (p, q)))
    except _Different as error:
        return ", ".join(reversed(error.where)) + f": {error}"
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
    except _Different as error:
        error.where.append(where)
        raise


def _check(same: bool, p: object, q: object) -> None:
    if not same:
        raise _Different(p, q)


class _EquivalenceCheck:
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
        _at("constants", self._values, *map(_constant_values, (p, q)))
        _at("arguments", self._bound, a.invars, b.invars)
        _at("the number of equations", _check, len(a.eqns) == len(b.eqns), len(a.eqns), len(b.eqns))
        for i, (e, f) in enumerate(zip(a.eqns, b.eqns, strict=True)):
            try:
                self._equations(e, f)
            except _Different as error:
                error.where.append(f"equation {i} ({e.primitive.name})")
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
        _check(same_primitive(p, q), p.primitive.name, q.primitive.name)
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
        self.parameters(*self.compared(p, q))
        if has_rule(p):
            keys = rule_key(p), rule_key(q)
            if keys[0] != keys[1] and keys not in self._rules:
                self._rules.add(keys)
                self.parameters(_rules(p), _rules(q))

    def compared(self, p: JaxprEqn, q: JaxprEqn) -> tuple[Params, Params]:
        """Return the parameters of two equations that are compared."""
        return parameters(p), parameters(q)

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
        if p is q or (isinstance(p, DebugInfo) and isinstance(q, DebugInfo)):
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
            self._value(
                *({k: v for k, v in r[1].items() if k not in _NAMES} for r in (record, other))
            )
        else:
            _check(_same_plain(p, q), p, q)


class _UntypedCheck(_EquivalenceCheck):
    """A comparison without types, and parameters that are the shape or dtype of a result."""

    def types(self, p: Sequence[Atom], q: Sequence[Atom]) -> None:
        _check(len(p) == len(q), len(p), len(q))

    def compared(self, p: JaxprEqn, q: JaxprEqn) -> tuple[Params, Params]:
        both = parameters(p), parameters(q)
        said = [
            {name for name, value in params.items() if _is_of_result(value, eqn)}
            for params, eqn in zip(both, (p, q), strict=True)
        ]
        left_out = said[0] & said[1]
        old, new = ({k: v for k, v in params.items() if k not in left_out} for params in both)
        return old, new


def _is_of_result(value: object, eqn: JaxprEqn) -> bool:
    """Return True if the value of a parameter is the shape or the dtype of an equation's result."""
    aval = eqn.outvars[0].aval if len(eqn.outvars) == 1 else None
    if isinstance(value, tuple):
        return value == getattr(aval, "shape", None)
    return isinstance(value, np.dtype) and value == getattr(aval, "dtype", None)


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


def _constant_values(jaxpr: object) -> list[object]:
    """Return the constants of a jaxpr, without those that an equation passes as operands."""
    consts = getattr(jaxpr, "consts", ())
    return [v for v in consts if v is not None and not isinstance(v, jax.core.Tracer)]


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


# --- equation keys --------------------------------------------------------------------------------
# Number equations, values and jaxprs so that equal ones of two programs have equal numbers.
#
# The two programs may come from different processes, files or releases of JAX. Equations are equal
# as defined in `ir.equivalence`, whatever their calls are named. (`ir.equivalence` is for the
# bodies of one program; it is faster, and compares by identity where it must.) The keys are
# numbers, so that keys made of keys stay small.


class MatchLevel(IntEnum):
    """The degree of similarity of two equations.

    Attributes:
        SAME: They compute the same on operands of the same types, and so do their bodies.
        SIMILAR: They are the same except for dtypes, constants and the contents of their bodies.
        KIND: They have the same primitive.
    """

    SAME = 0
    SIMILAR = 1
    KIND = 2


_JAXPRS = (Jaxpr, ClosedJaxpr)

#: Fields of kernels that only name operands: in messages, and as arguments of Python functions.
_NAMES = frozenset({"origin", "index_map_tree"})

#: Parameters that only name the body of an equation, and do not affect its results.
_LABELS = frozenset({"name", "name_and_src_info", "debug_info"})


def is_label(eqn: JaxprEqn, parameter: str) -> bool:
    """Return True if a parameter of an equation with a body only names the body."""
    return parameter in _LABELS and holds_jaxpr(eqn.params.values())


def is_dtype(value: object) -> bool:
    """Return True if the value of a parameter is a dtype or None, which means the default."""
    return (
        value is None
        or isinstance(value, np.dtype)
        or (isinstance(value, type) and issubclass(value, np.generic))
    )


def is_cast(eqn: JaxprEqn) -> bool:
    """Return True if an equation casts its operand to another dtype or weak type."""
    if traits(eqn).gives != "cast" or len(eqn.invars) != 1:
        return False
    dtypes = [(v.aval.dtype, v.aval.weak_type) for v in (eqn.invars[0], eqn.outvars[0])]
    return dtypes[0] != dtypes[1]


def parameters(eqn: JaxprEqn) -> Params:
    """Return an equation's parameters as plain data; see `equivalence.readable_params`."""
    read = readable_params.get(eqn.primitive.name)
    return eqn.params if read is None or jaxcompat.is_opaque(eqn) else read(eqn)


class EquationKeys:
    """A numbering of types, values, equations and jaxprs: equal ones have the same number.

    Objects are cached by `id`, so they must outlive this, or be given to `keep`.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._types: dict[int, tuple[int, int]] = {}
        self._literals: dict[int, int] = {}
        self._values: dict[int, Hashable] = {}
        self._jaxprs: dict[int, int] = {}
        self._numberings: dict[Hashable, ValueNumbering] = {}
        self._own: list[dict[int, int]] = [{}, {}, {}]
        self._trees: list[PyTreeDef] = []
        self._rules: dict[Hashable, int] = {}
        self._with_rules: dict[Hashable, list[tuple[JaxprEqn, int]]] = {}
        self._kept: list[object] = []

    def keep(self, numbered: object) -> None:
        """Keep an object alive as long as its number, which is cached by `id`."""
        self._kept.append(numbered)

    def number(self, key: Hashable) -> int:
        """Return the number that represents a key."""
        return self._numbers.setdefault(key, len(self._numbers))

    # --- types and values -------------------------------------------------------------------------

    def type_number(self, aval: Aval, shape_only: bool = False) -> int:
        """Return the number of an aval, or of its shape. Symbolic dimensions compare by name."""
        numbers = self._types.get(id(aval))
        if numbers is None:
            shape = tuple(map(str, getattr(aval, "shape", ())))
            numbers = self.number(("type", type_key(aval))), self.number(("shape", shape))
            self._types[id(aval)] = numbers
        return numbers[shape_only]

    def literal(self, literal: Literal) -> int:
        """Return the number of a literal, by its type and value."""
        number = self._literals.get(id(literal))
        if number is None:
            number = self._literals[id(literal)] = self.number(("literal", literal_key(literal)))
        return number

    def value(self, value: Any) -> Hashable:
        """Return a key for the value of a parameter or constant, the same in every process.

        The few values that have no such key are compared by identity.
        """
        cls = type(value)
        if value is None or cls is int or isinstance(value, str):
            return value
        if cls is bool:
            return cls, value
        if isinstance(value, _JAXPRS):
            return "jaxpr", self.jaxpr(value)
        if isinstance(value, PyTreeDef):
            return "tree", self._tree(value)
        if isinstance(value, tuple | list):
            return "sequence", *map(self.value, value)
        key = self._values.get(id(value))
        if key is None:
            self.keep(value)
            key = self._values[id(value)] = self._object(value)
        return key

    def _object(self, value: Any) -> Hashable:
        """Return the key of a value that is no sequence and holds no jaxprs."""
        if isinstance(value, Mapping):
            return "mapping", *sorted((str(k), self.value(v)) for k, v in value.items())
        if isinstance(value, np.ndarray | jax.Array):
            digest = array_digest(value)
            return ("object", id(value)) if digest is None else ("array", *digest)
        if isinstance(value, jaxcompat.AbstractRef):
            return "type", type_key(value)
        if (record := fields_of(value)) is not None:
            return "record", record[0], self.value(record[1])
        key = parameter_key(value)
        return ("object", id(value)) if key is None else key

    def value_or_bodies(self, value: Any) -> Hashable:
        """Return a key for the value of a parameter in which all jaxprs count as equal."""
        if isinstance(value, _JAXPRS):
            return "jaxpr"
        if isinstance(value, tuple | list):
            return "sequence", *map(self.value_or_bodies, value)
        return self.value(value)

    def _tree(self, tree: PyTreeDef) -> int:
        for i, other in enumerate(self._trees):
            if same_tree(other, tree):
                return i
        self._trees.append(tree)
        return len(self._trees) - 1

    # --- equations --------------------------------------------------------------------------------

    def equation(self, eqn: JaxprEqn, level: MatchLevel) -> int:
        """Return the number of an equation, equal for equations that have this much in common.

        Operands do not count, except that literals must be equal for equations to be the SAME.
        """
        numbers = self._own[level]
        number = numbers.get(id(eqn))
        if number is None:
            key = (self._same, self._similar, self._kind)[level](eqn)
            number = numbers[id(eqn)] = self.number((level, *key))
        return number

    def _kind(self, eqn: JaxprEqn) -> tuple[Hashable, ...]:
        return (eqn.primitive.name,)

    def _similar(self, eqn: JaxprEqn) -> tuple[Hashable, ...]:
        if is_cast(eqn):
            return "cast", self.type_number(eqn.outvars[0].aval, shape_only=True)
        params = [
            (name, self.value(value))
            for name, value in sorted(parameters(eqn).items())
            if not (is_label(eqn, name) or is_dtype(value) or holds_jaxpr((value,)))
        ]
        shapes = [self.type_number(v.aval, shape_only=True) for v in (*eqn.invars, *eqn.outvars)]
        return eqn.primitive.name, len(eqn.invars), *params, *shapes

    def _same(self, eqn: JaxprEqn) -> tuple[Hashable, ...]:
        eqn = without_live_objects(eqn)
        # To JAX, a parameter that is None is the same as one left out.
        params = [
            (name, value if type(value) is str else self.value(value))
            for name, value in sorted(parameters(eqn).items())
            if value is not None and not is_label(eqn, name)
        ]
        atoms = [
            self.literal(v) if type(v) is Literal else self.type_number(v.aval) for v in eqn.invars
        ]
        results = [self.type_number(v.aval) for v in eqn.outvars]
        return (
            eqn.primitive.name,
            tuple(params),
            tuple(atoms),
            tuple(results),
            effect_kinds(eqn),
            id(eqn.ctx),
            self._rule(eqn) if has_rule(eqn) else None,
        )

    def _rule(self, eqn: JaxprEqn) -> int:
        """Return the number of the rules of a custom call. They are compared as jaxprs."""
        key = rule_key(eqn)
        if key not in self._rules:
            types = [self.type_number(v.aval) for v in (*eqn.invars, *eqn.outvars)]
            call = self.value(parameters(eqn)["call_jaxpr"])
            alike = self._with_rules.setdefault((eqn.primitive.name, call, *types), [])
            number = next((n for other, n in alike if same_rules(other, eqn)), None)
            if number is None:
                number = self.number(("rule", len(self._rules)))
                alike.append((eqn, number))
            self._rules[key] = number
        return self._rules[key]

    # --- jaxprs -----------------------------------------------------------------------------------

    def jaxpr(self, jaxpr: AnyJaxpr) -> int:
        """Return the number of a jaxpr, equal for jaxprs that differ only in names and order."""
        number = self._jaxprs.get(id(jaxpr))
        if number is None:
            body = jaxcompat.open_jaxpr(jaxpr)
            arguments = tuple([("argument", i) for i in range(len(body.invars))])
            origins = self.numbering(jaxpr, arguments, MatchLevel.SAME)
            types = tuple(self.type_number(v.aval) for v in (*body.constvars, *body.invars))
            results = tuple(map(origins.atom, body.outvars))
            counts = frozenset(Counter(origins.equations).items())
            number = self.number(("body", types, results, origins.effects, counts))
            self._jaxprs[id(jaxpr)] = number
        return number

    def numbering(
        self, jaxpr: AnyJaxpr, arguments: tuple[Hashable, ...], level: MatchLevel
    ) -> ValueNumbering:
        """Return the value numbering of a jaxpr with a key for each argument."""
        key = id(jaxpr), arguments, level
        numbering = self._numberings.get(key)
        if numbering is None:
            numbering = self._numberings[key] = ValueNumbering(self, jaxpr, arguments, level)
        return numbering

    def constants(self, jaxpr: AnyJaxpr) -> list[Hashable]:
        """Return a key for each constant of a jaxpr: its value, or its position if unknown."""
        body = jaxcompat.open_jaxpr(jaxpr)
        consts = tuple(getattr(jaxpr, "consts", ()))
        if len(consts) != len(body.constvars):
            return [("constant", i) for i in range(len(body.constvars))]
        return [
            ("value", self.type_number(var.aval), self.value(value))
            for var, value in zip(body.constvars, consts, strict=True)
        ]


class ValueNumbering:
    """Value numbering of a jaxpr: each value is numbered by how it is computed.

    With `MatchLevel.SAME`, values with the same number are equal.

    Args:
        keys: The numbering of equations.
        jaxpr: The jaxpr, open or closed.
        arguments: A key for each argument.
        level: Which equations have the same number if their operands do.

    Attributes:
        equations: The number of each equation.
        values: The numbers of variables, by `id`.
        effects: The number of the whole sequence of effects.
    """

    def __init__(
        self,
        keys: EquationKeys,
        jaxpr: AnyJaxpr,
        arguments: Sequence[Hashable],
        level: MatchLevel = MatchLevel.SAME,
    ):
        self._keys = keys
        number, body = keys.number, jaxcompat.open_jaxpr(jaxpr)
        same = level is MatchLevel.SAME
        names = keys.constants(jaxpr) if same else [("constant",)] * len(body.constvars)
        borders = [
            *zip(body.constvars, names, strict=True),
            *zip(body.invars, arguments, strict=True),
        ]
        self.values: dict[int, int] = {id(var): number(name) for var, name in borders}
        self.equations: list[int] = []
        self.effects = 0
        values = self.values
        for eqn in body.eqns:
            operands = [
                None if type(v) is Literal else values.get(id(v), id(v)) for v in eqn.invars
            ]
            parts: tuple[Any, ...] = (keys.equation(eqn, level), *operands)
            if same and eqn.effects and not jaxcompat.only_names_axes(eqn.effects):
                self.effects = number(("effect", self.effects, parts))
                parts = (*parts, "after", self.effects)
            key = number(parts)
            self.equations.append(key)
            if not same and operands and operands[0] is not None and is_cast(eqn):
                values[id(eqn.outvars[0])] = operands[0]  # a cast keeps the value
                continue
            for i, var in enumerate(eqn.outvars):
                values[id(var)] = number((key, "result", i)) if i else key

    def atom(self, atom: Var | Literal) -> int:
        """Return the number of a variable or literal."""
        if type(atom) is Literal:
            return self._keys.literal(atom)
        return self.values.get(id(atom), id(atom))


# --- structural key -------------------------------------------------------------------------------
# Keys of equations and jaxprs by structure: equal for those that differ only in names.
#
# `jaxpr_structure(jaxpr)` returns one object for all jaxprs that are equal, so that two bodies are
# compared by identity; `parameters_key(eqn)` is the key of an equation without its operands. Both
# are exact: numbers are distinguished by type and to the bit (0.0 is not -0.0, 1 is not True), and
# arrays by content and device. Only long arrays are compared by a digest, of 256 bits. Jaxprs of
# one structure are equivalent (`ir.equivalence`). The reverse does not hold: functions are compared
# by identity here, while `equivalent` follows the rules of custom derivatives into their jaxprs.
#
# A structure is computed once for each jaxpr object, and lives as long as one of its jaxprs.


@dataclass(eq=False, slots=True, weakref_slot=True)
class JaxprStructure:
    """The common structure of jaxprs that differ only in names; compared by identity.

    `repeatable` is True if two calls of such a jaxpr on the same operands may be merged.
    """

    key: Hashable
    repeatable: bool


class Unkeyable(Exception):
    """A parameter has no key: an equation or jaxpr with it equals only itself."""


_structures: WeakKeyDictionary[AnyJaxpr, JaxprStructure] = process_cache(WeakKeyDictionary())
_by_key: WeakValueDictionary[Hashable, JaxprStructure] = WeakValueDictionary()


def jaxpr_structure(jaxpr: AnyJaxpr) -> JaxprStructure:
    """Return the structure of a jaxpr, closed or open. Raises Unkeyable if it has none."""
    result = _structures.get(jaxpr)
    if result is None:
        key = _jaxpr_key(jaxpr)
        result = _by_key.setdefault(key, JaxprStructure(*key))
        _structures[jaxpr] = result
    return result


def repeatable(eqn: JaxprEqn) -> bool:
    """Return True if two equal equations of this kind may be merged. Their bodies do not count."""
    return traits(eqn).may_merge and jaxcompat.only_names_axes(eqn.effects)


def _jaxpr_key(jaxpr: AnyJaxpr) -> tuple[Hashable, bool]:
    body = jaxcompat.open_jaxpr(jaxpr)
    consts = tuple(map(value_key, getattr(jaxpr, "consts", ())))
    numbers: dict[Var, int] = {}

    def bound(variables: Sequence[Var]) -> tuple[Any, ...]:
        for var in variables:
            numbers[var] = len(numbers)
        return tuple([var.aval for var in variables])

    def atoms(operands: Sequence[Atom]) -> tuple[Any, ...]:
        return tuple([literal_key(v) if type(v) is Literal else numbers[v] for v in operands])

    borders = bound(body.constvars), bound(body.invars)
    may_repeat, equations = True, []
    for eqn in body.eqns:
        params, structures = parameters_key(eqn)
        may_repeat &= repeatable(eqn) and all(inner.repeatable for inner in structures)
        operands, effects = atoms(eqn.invars), effect_kinds(eqn)
        equations.append(
            (eqn.primitive, params, operands, bound(eqn.outvars), effects, id(eqn.ctx))
        )
    return (borders, consts, tuple(equations), atoms(body.outvars)), may_repeat


def parameters_key(eqn: JaxprEqn) -> tuple[Hashable, Sequence[JaxprStructure]]:
    """Return a key for an equation's parameters, and the structures of the jaxprs among them.

    Raises Unkeyable if a parameter has no key.
    """
    params = eqn.params
    if not params:
        return (), ()
    structures: list[JaxprStructure] = []
    key: list[Hashable] = []
    if has_rule(eqn) or eqn.primitive.name == "reduce":  # live functions are not part of a key
        params = readable_params[eqn.primitive.name](eqn)
        key += [_key(rule_key(eqn), structures)] if has_rule(eqn) else []
    # JAX's rules treat a parameter that is None like one left out.
    for name in sorted(params):
        value = params[name]
        if value is not None:
            key += name, value if type(value) in _PLAIN else _key(value, structures)
    return tuple(key), structures


# --- values -----------------------------------------------------------------------------------


def value_key(value: object) -> Hashable:
    """Return a key for a parameter or a constant. Raises Unkeyable if it has no key."""
    return _key(value, [])


#: Values that are their own keys; no key of another type is one of these.
_PLAIN: frozenset[type] = frozenset({type(None), str, bytes, int})


def _key(value: Any, structures: list[JaxprStructure]) -> Hashable:
    cls = type(value)
    if cls in _PLAIN:
        return value
    if cls is tuple and jaxcompat.holds_integers(value):
        return value
    if isinstance(value, tuple | list):
        return cls, *[_key(item, structures) for item in value]
    if isinstance(value, np.dtype):
        return np.dtype, value
    if isinstance(value, Jaxpr | ClosedJaxpr):
        inner = jaxpr_structure(value)
        structures.append(inner)
        return inner
    if isinstance(value, dict):
        return cls, frozenset((name, _key(item, structures)) for name, item in value.items())
    if isinstance(value, bool | int | float | complex | np.generic):
        return cls, getattr(value, "dtype", None), np.asarray(value).tobytes()
    if isinstance(value, np.ndarray | jax.Array):
        return _array_key(value)
    # Use the id: a reference would keep alive what the object closes over. No other object gets
    # this id while a jaxpr with this key lives, since the jaxpr holds the object.
    if cls.__hash__ is object.__hash__:
        return "object", id(value)
    if (record := fields_of(value)) is not None:
        return record[0], *[(name, _key(field, structures)) for name, field in record[1].items()]
    try:
        hash(value)
    except TypeError:
        raise Unkeyable from None
    return cls, value


def _array_key(array: np.ndarray | jax.Array) -> Hashable:
    """Return a key for an array by its content; for a tracer or a mutable array, by identity."""
    digest = array_digest(array)
    if isinstance(array, np.ndarray):
        if digest is None:
            raise Unkeyable
        return "array", None, *digest
    if digest is None:
        return "object", id(array)
    place = array.sharding if array.committed else None
    return "array", (place, getattr(array, "weak_type", False)), *digest
