"""Keys of equations and jaxprs by structure: equal for those that differ only in names.

`structure(jaxpr)` returns one object for all jaxprs that are equal, so that two bodies are compared
by identity; `parameters_key(eqn)` is the key of an equation without its operands. Both are exact:
numbers are distinguished by type and to the bit (0.0 is not -0.0, 1 is not True), and arrays by
content and device. Only long arrays are compared by a digest, of 256 bits. Jaxprs of one structure
are equivalent (`ir.equality.equivalence`). The reverse does not hold: functions are compared by
identity here, while `equivalent` follows the rules of custom derivatives into their jaxprs.

A structure is computed once for each jaxpr object, and lives as long as one of its jaxprs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import jax
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.caches import process_cache
from jaxprtool.ir.basics.records import fields_of
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.equality.equivalence import readable_params
from jaxprtool.ir.equality.value_keys import array_digest, effect_kinds, literal_key
from jaxprtool.ir.rewriting.custom_rules import has_rule, rule_key
from jaxprtool.jaxcompat import AnyJaxpr, Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var


@dataclass(eq=False, slots=True, weakref_slot=True)
class Structure:
    """The common structure of jaxprs that differ only in names; compared by identity.

    `repeatable` is True if two calls of such a jaxpr on the same operands may be merged.
    """

    key: Hashable
    repeatable: bool


class Unkeyable(Exception):
    """A parameter has no key: an equation or jaxpr with it equals only itself."""


_structures: WeakKeyDictionary[AnyJaxpr, Structure] = process_cache(WeakKeyDictionary())
_by_key: WeakValueDictionary[Hashable, Structure] = WeakValueDictionary()


def structure(jaxpr: AnyJaxpr) -> Structure:
    """Return the structure of a jaxpr, closed or open. Raises Unkeyable if it has none."""
    known = _structures.get(jaxpr)
    if known is None:
        found = _jaxpr_key(jaxpr)
        known = _by_key.setdefault(found, Structure(*found))
        _structures[jaxpr] = known
    return known


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
        params, held = parameters_key(eqn)
        may_repeat &= repeatable(eqn) and all(inner.repeatable for inner in held)
        operands, effects = atoms(eqn.invars), effect_kinds(eqn)
        equations.append(
            (eqn.primitive, params, operands, bound(eqn.outvars), effects, id(eqn.ctx))
        )
    return (borders, consts, tuple(equations), atoms(body.outvars)), may_repeat


def parameters_key(eqn: JaxprEqn) -> tuple[Hashable, Sequence[Structure]]:
    """Return a key for an equation's parameters, and the structures of the jaxprs among them.

    Raises Unkeyable if a parameter has no key.
    """
    params = eqn.params
    if not params:
        return (), ()
    held: list[Structure] = []
    key: list[Hashable] = []
    if has_rule(eqn) or eqn.primitive.name == "reduce":  # live functions are not part of a key
        params = readable_params[eqn.primitive.name](eqn)
        key += [_key(rule_key(eqn), held)] if has_rule(eqn) else []
    # JAX's rules treat a parameter that is None like one left out.
    for name in sorted(params):
        value = params[name]
        if value is not None:
            key += name, value if type(value) in _PLAIN else _key(value, held)
    return tuple(key), held


# --- values -----------------------------------------------------------------------------------


def value_key(value: object) -> Hashable:
    """Return a key for a parameter or a constant. Raises Unkeyable if it has no key."""
    return _key(value, [])


#: Values that are their own keys; no key of another type is one of these.
_PLAIN: frozenset[type] = frozenset({type(None), str, bytes, int})
_INTEGERS: frozenset[type] = frozenset({int})


def _key(value: Any, held: list[Structure]) -> Hashable:
    cls = type(value)
    if cls in _PLAIN:
        return value
    if cls is tuple and _INTEGERS.issuperset(map(type, value)):
        return value
    if isinstance(value, tuple | list):
        return cls, *[_key(item, held) for item in value]
    if isinstance(value, np.dtype):
        return np.dtype, value
    if isinstance(value, Jaxpr | ClosedJaxpr):
        inner = structure(value)
        held.append(inner)
        return inner
    if isinstance(value, dict):
        return cls, frozenset((name, _key(item, held)) for name, item in value.items())
    if isinstance(value, bool | int | float | complex | np.generic):
        return cls, getattr(value, "dtype", None), np.asarray(value).tobytes()
    if isinstance(value, np.ndarray | jax.Array):
        return _array_key(value)
    # Use the id: a reference would keep alive what the object closes over. No other object gets
    # this id while a jaxpr with this key lives, since the jaxpr holds the object.
    if cls.__hash__ is object.__hash__:
        return "object", id(value)
    if (record := fields_of(value)) is not None:
        return record[0], *[(name, _key(field, held)) for name, field in record[1].items()]
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
