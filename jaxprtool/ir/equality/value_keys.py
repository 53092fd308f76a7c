"""Keys of types, literals, arrays and plain values, equal in any process for equal values.

Comparisons of programs are built on these: `ir.equality.equivalence` compares two step by step, and
`ir.equality.equation_keys` and `ir.equality.structural_key` make keys of equations and jaxprs.
Numbers are distinguished by type and to the bit (0.0 is not -0.0, 1 is not True), symbolic
dimensions by their texts. Only long arrays have a digest in their keys, of 256 bits.
"""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Hashable
from functools import partial
from typing import Any
from weakref import ref

import jax
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.caches import process_cache
from jaxprtool.ir.basics.dtypes import is_extended, physical
from jaxprtool.ir.equality.mapped_arrays import release_pages
from jaxprtool.jaxcompat import Atom, Aval, JaxprEqn, Literal


def type_key(aval: Aval) -> Hashable:
    """Return a key for a type. Symbolic dimensions of different scopes compare by their texts."""
    if isinstance(aval, jaxcompat.AbstractRef):
        # A kernel's memory space has only a name in a program from a file.
        return type_key(aval.inner_aval), str(aval.memory_space).lower(), aval.kind
    shape = getattr(aval, "shape", ())
    texts = tuple(map(str, shape))
    if any(map(jaxcompat.is_symbolic_dimension, shape)):
        return aval.update(shape=(0,) * len(shape)), texts
    return aval, texts


def plain_key(value: Any) -> Hashable:
    """Return a key for a value that holds no jaxprs, trees, functions or arrays, or None."""
    if isinstance(value, str | bytes):
        return value
    if isinstance(value, numbers.Integral) and not isinstance(value, bool | np.bool_):
        return int(value)
    if jaxcompat.is_symbolic_dimension(value):
        return "size", str(value)
    if isinstance(value, float | complex | np.generic):
        array = np.asarray(value)
        return "number", array.dtype, array.tobytes()
    if isinstance(value, jax.lax.Tolerance):  # JAX compares it by identity
        return "tolerance", *sorted(vars(value).items())
    try:
        hash(value)
    except TypeError:
        return None
    return np.dtype if isinstance(value, np.dtype) else type(value), value


def content_key(value: Any) -> Hashable:
    """Return a key for a number, a text or an array by its content; None for other values."""
    if isinstance(value, np.ndarray | jax.Array):
        return array_digest(value)
    plain = isinstance(value, str | bytes | numbers.Number | np.generic | np.dtype | type(None))
    return (type(value), plain_key(value)) if plain else None


def literal_key(literal: Literal) -> Hashable:
    """Return a key for a literal; a Python number counts as its type represents it."""
    aval, value = literal.aval, literal.val
    if getattr(value, "dtype", None) != aval.dtype or isinstance(value, int | float | complex):
        value = np.asarray(value).astype(aval.dtype, copy=False)
    return aval.dtype, aval.weak_type, aval.shape, value.tobytes()


def effect_kinds(eqn: JaxprEqn) -> tuple[str, ...]:
    """Return the kinds of an equation's effects, sorted."""
    return tuple(sorted(type(e).__name__ for e in eqn.effects)) if eqn.effects else ()


def atom_key(atom: Atom) -> Hashable:
    """Return a key that two atoms of one type share only if they are the same value, to the bit."""
    return literal_key(atom) if type(atom) is Literal else atom


# --- arrays -----------------------------------------------------------------------------------


#: The number of bytes that are compared at a time.
_BLOCK = 1 << 24


def same_array(p: object, q: object) -> bool:
    """Return True if two arrays, NumPy scalars or numbers are the same, bit by bit."""
    both = [getattr(value, "dtype", None) for value in (p, q)]
    if any(each and is_extended(each) for each in both) and both[0] != both[1]:
        return False
    a, b = (np.asarray(physical(value)) for value in (p, q))
    return a.dtype == b.dtype and a.shape == b.shape and _same_bytes(a, b)


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Return True if two arrays of one shape and dtype have equal bytes. Copy no large ones."""
    if a.nbytes <= _BLOCK:
        return a.tobytes() == b.tobytes()
    a, b = (np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (a, b))
    for start in range(0, a.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        if not np.array_equal(a[block], b[block]):
            return False
        release_pages(a)
        release_pages(b)
    return True


def array_digest(array: np.ndarray | jax.Array) -> tuple[Hashable, ...] | None:
    """Return a key for an array by dtype, shape and content, on any device; None if unknown."""
    if isinstance(array, np.ndarray):
        return None if array.dtype.hasobject else (array.dtype, array.shape, _digest(array))
    if isinstance(array, jax.core.Tracer) or not array.is_fully_addressable:
        return None
    return array.dtype, array.shape, _device_digest(array)


def constant_key(value: Any) -> Hashable:
    """Return a key that is equal for constants of equal dtype, shape and content, if known."""
    if isinstance(value, (np.ndarray, jax.Array)) and not is_extended(value.dtype):
        digest = array_digest(value)
        return id(value) if digest is None else digest
    return id(value)


#: Longer arrays are identified by a digest of this many bytes; shorter ones by their content.
_DIGEST = 32


def _digest(array: np.ndarray) -> bytes:
    if array.nbytes <= _DIGEST:
        return array.tobytes()
    data = np.ascontiguousarray(array).view(np.uint8)
    return hashlib.blake2b(data.data, digest_size=_DIGEST).digest()


# Digests of JAX's arrays, which are immutable, by identity, with a weak reference to each.
_digests: dict[int, tuple[Any, bytes]] = process_cache({})


def _forget(digests: dict[int, Any], number: int, _: Any) -> None:
    """Drop the digest of a deleted array, even after this module at the end of the process."""
    digests.pop(number, None)


def _device_digest(array: Any) -> bytes:
    known = _digests.get(id(array))
    if known is not None and known[0]() is array:
        return known[1]
    number = id(array)
    with jax.ensure_compile_time_eval():  # also while JAX traces a function around this
        digest = _digest(np.asarray(physical(array)))
    _digests[number] = ref(array, partial(_forget, _digests, number)), digest
    return digest
