"""Keys of equations and jaxprs by structure: equal for those that are the same but for names.

`structure(jaxpr)` gives one object for all jaxprs that are equal, so that two bodies are compared
by a look at two references; `parameters_key(eqn)` is the same for what an equation does, its
operands left out. Both are exact: numbers are told apart by type and to the bit (0.0 is not -0.0,
1 is not True), arrays by content and place; only long arrays go by a digest, of 256 bits. Jaxprs of
one structure are equivalent (`ir.equivalence`). They may be so and have different structures:
functions are compared by identity here, where `equivalent` follows the rules of custom derivatives
into their jaxprs.

A structure is found once for each jaxpr object, and lives as long as one of its jaxprs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import jax
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.ir.caches import process_cache
from jaxprtool.ir.custom_rules import rule_key
from jaxprtool.ir.dtypes import physical
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import AnyJaxpr, Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var


@dataclass(eq=False, slots=True, weakref_slot=True)
class Structure:
    """What jaxprs that are equal but for names have in common; compared by identity.

    `repeatable` says whether two calls of such a jaxpr on the same operands may be made one.
    """

    key: Hashable
    repeatable: bool


class Keyless(Exception):
    """A parameter of a kind that has no key: what holds it equals only itself."""


_structures: WeakKeyDictionary[AnyJaxpr, Structure] = process_cache(WeakKeyDictionary())
_by_key: WeakValueDictionary[Hashable, Structure] = WeakValueDictionary()


def structure(jaxpr: AnyJaxpr) -> Structure:
    """The structure of a jaxpr, closed or open. Raises Keyless if it has none."""
    known = _structures.get(jaxpr)
    if known is None:
        found = _jaxpr_key(jaxpr)
        known = _by_key.setdefault(found, Structure(*found))
        _structures[jaxpr] = known
    return known


def repeatable(eqn: JaxprEqn) -> bool:
    """Whether two such equations on the same operands may be made one, its bodies not looked at."""
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
        effects = tuple(sorted(type(e).__name__ for e in eqn.effects)) if eqn.effects else ()
        operands = atoms(eqn.invars)
        equations.append(
            (eqn.primitive, params, operands, bound(eqn.outvars), effects, id(eqn.ctx))
        )
    return (borders, consts, tuple(equations), atoms(body.outvars)), may_repeat


def parameters_key(eqn: JaxprEqn) -> tuple[Hashable, Sequence[Structure]]:
    """A key for an equation's parameters, and the structures of the jaxprs among them.

    Raises Keyless for parameters that have none.
    """
    params = eqn.params
    if not params:
        return (), ()
    held: list[Structure] = []
    if special := _SPECIAL.get(eqn.primitive.name):
        return _key(special(eqn), held), held
    # JAX's rules take a parameter that is None for one that is not there.
    key: list[Hashable] = []
    for name in sorted(params):
        value = params[name]
        if value is not None:
            key += name, value if type(value) in _PLAIN else _key(value, held)
    return tuple(key), held


def _custom(eqn: JaxprEqn) -> Any:
    """A custom call's parameters, with what its live rules close over in their place."""
    plain = {k: eqn.params[k] for k in ("call_jaxpr", "num_consts", "symbolic_zeros")}
    return tuple(plain.items()), rule_key(eqn)


def _reduce(eqn: JaxprEqn) -> Any:
    """A reduction's parameters, without the function that its jaxpr was traced from."""
    return tuple(eqn.params[name] for name in sorted(eqn.params) if name != "computation")


#: What stands for the parameters of primitives that hold live functions.
_SPECIAL: dict[str, Callable[[JaxprEqn], Any]] = {
    "custom_jvp_call": _custom,
    "custom_vjp_call": _custom,
    "reduce": _reduce,
}


# --- values -----------------------------------------------------------------------------------


def value_key(value: object) -> Hashable:
    """A key for a parameter or a constant. Raises Keyless if it has none."""
    return _key(value, [])


#: Values that are their own keys; no key of another type is one of these.
_PLAIN: frozenset[type] = frozenset({type(None), str, bytes, int})
_INTEGERS: frozenset[type] = frozenset({int})


def _key(value: Any, held: list[Structure]) -> Hashable:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple and _INTEGERS.issuperset(map(type, value)):
        return value
    if isinstance(value, tuple | list):
        return kind, *[_key(item, held) for item in value]
    if isinstance(value, np.dtype):
        return np.dtype, value
    if isinstance(value, Jaxpr | ClosedJaxpr):
        inner = structure(value)
        held.append(inner)
        return inner
    if isinstance(value, dict):
        return kind, frozenset((name, _key(item, held)) for name, item in value.items())
    if isinstance(value, bool | int | float | complex | np.generic):
        return kind, getattr(value, "dtype", None), np.asarray(value).tobytes()
    if isinstance(value, np.ndarray | jax.Array):
        return _array_key(value)
    # References to objects that compare by identity would keep alive what these close over. No
    # other object gets their number while a jaxpr with this key lives, since it holds them.
    if kind.__hash__ is object.__hash__:
        return "object", id(value)
    try:
        hash(value)
    except TypeError:
        raise Keyless from None
    return kind, value


def literal_key(literal: Literal) -> Hashable:
    """A key for a literal, of a Python number what its type can hold of it."""
    aval, value = literal.aval, literal.val
    if getattr(value, "dtype", None) != aval.dtype or isinstance(value, int | float | complex):
        value = np.asarray(value).astype(aval.dtype, copy=False)
    return aval.dtype, aval.weak_type, aval.shape, value.tobytes()


def _array_key(array: np.ndarray | jax.Array) -> Hashable:
    """A key for an array by its content; for a tracer, and for a mutable one, by identity."""
    if isinstance(array, np.ndarray):
        if array.dtype.hasobject:
            raise Keyless
        return "array", None, array.dtype, array.shape, _digest(array)
    if isinstance(array, jax.core.Tracer) or not array.is_fully_addressable:
        return "object", id(array)
    place = array.sharding if array.committed else None
    weak = getattr(array, "weak_type", False)
    return "array", (place, weak), array.dtype, array.shape, _device_digest(array)


def array_digest(array: np.ndarray | jax.Array) -> tuple[Hashable, ...] | None:
    """A key for an array by dtype, shape and content, wherever it is; None if that is unknown."""
    if isinstance(array, np.ndarray):
        return None if array.dtype.hasobject else (array.dtype, array.shape, _digest(array))
    if isinstance(array, jax.core.Tracer) or not array.is_fully_addressable:
        return None
    return array.dtype, array.shape, _device_digest(array)


#: Longer arrays are known by a digest of as many bytes; shorter ones by their content.
_DIGEST = 32


def _digest(array: np.ndarray) -> bytes:
    if array.nbytes <= _DIGEST:
        return array.tobytes()
    data = np.ascontiguousarray(array).view(np.uint8)
    return hashlib.blake2b(data.data, digest_size=_DIGEST).digest()


# Digests of JAX's arrays, which do not change, by identity, with what tells whether they live.
_digests: dict[int, tuple[Any, bytes]] = process_cache({})


def _forget(digests: dict[int, Any], number: int, _: Any) -> None:
    """Drop the digest of an array that is gone, after this module when the process ends."""
    digests.pop(number, None)


def _device_digest(array: Any) -> bytes:
    known = _digests.get(id(array))
    if known is not None and known[0]() is array:
        return known[1]
    number = id(array)
    with jax.ensure_compile_time_eval():  # also while JAX traces what is around
        digest = _digest(np.asarray(physical(array)))
    _digests[number] = ref(array, partial(_forget, _digests, number)), digest
    return digest
