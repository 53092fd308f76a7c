"""Keys of functions, types, arrays and plain values: equal for those that are the same.

A program that is traced twice has another object for each local function that it calls back. So
functions are compared by name, code, default values and what they read from outside: the variables
that they close over, and the global variables that they name. Values from outside are compared by
content, the user's functions, classes and plain objects among them likewise; a module counts by its
name, and all else by identity.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import mmap
import numbers
import sys
import sysconfig
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias
from weakref import ref

import jax
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.ir.backends import process_cache
from jaxprtool.ir.dtypes import is_extended, physical
from jaxprtool.jaxcompat import Atom, Aval, JaxprEqn, Literal

# --- function keys --------------------------------------------------------------------------------
# Keys of the Python functions in a program, equal for functions that do the same.

#: A part of a function: its place in words, and the key of its value.
Part: TypeAlias = tuple[str, Hashable]

#: The number of objects that are compared by content; the rest of a large graph is by identity.
_OBJECTS = 500


def parameter_key(value: Any) -> Hashable:
    """Return a key for a parameter that holds no jaxprs, trees or arrays, or None."""
    if callable(value) and not isinstance(value, type):
        return "function", *_FunctionParts().parts("", value)
    return plain_key(value)


def function_difference(p: object, q: object) -> tuple[str, str] | None:
    """Return texts of the first part in which two callables differ; None if they are equal."""
    readers = _FunctionParts(), _FunctionParts()
    parts = [dict(reader.parts("", f)) for reader, f in zip(readers, (p, q), strict=True)]
    for place in dict.fromkeys([*parts[0], *parts[1]]):
        if parts[0].get(place, _NOTHING) != parts[1].get(place, _NOTHING):
            one, other = (reader.text(place) for reader in readers)
            if one == other:
                one, other = f"one {one}", f"another {other}"
            name = readers[0].text("name") if "name" in parts[0] else type(p).__qualname__
            called = "" if place == "name" else f"{name}: "
            return called + one, called + other
    return None


_NOTHING = object()


class _FunctionParts:
    """Lists the parts of one function, with their texts."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._texts: dict[str, Callable[[], str]] = {}
        self._kept: list[object] = []

    def text(self, name: str) -> str:
        """Return the text of a part."""
        return self._texts[name]() if name in self._texts else f"no {name}"

    def parts(self, place: str, value: Any) -> Iterator[Part]:
        """Yield the parts of a value, those of a container or a function one by one."""
        key = content_key(value)
        if key is not None:
            yield self._part(place, key, lambda: f"{place} = {_short(value)}")
        elif isinstance(value, jaxcompat.OF_ONE_CALL):
            return
        elif id(value) in self._seen:
            yield self._part(place, ("again", self._seen[id(value)]), lambda: f"{place} is shared")
        else:
            self._seen[id(value)] = len(self._seen)
            self._kept.append(value)  # so that no other object gets its id
            yield from self._of(place, value)

    def _of(self, place: str, value: Any) -> Iterator[Part]:
        match value:
            case jaxcompat.FlatCallback():
                yield from self.parts(place, value.callback_func)
                tree = value.in_tree
                yield self._part(f"{place} tree", tree, lambda: f"arguments {tree}")
            case functools.partial():
                yield from self.parts(place, value.func)
                yield from self._items(place, {**dict(enumerate(value.args)), **value.keywords})
            case MethodType():
                yield from self.parts(place, value.__func__)
                yield from self.parts(f"{place} self".strip(), value.__self__)
            case FunctionType() if not _is_library(value):
                yield from self._function(place, value)
            case tuple() | list():
                yield from self._items(place, dict(enumerate(value)))
            case Mapping():
                yield from self._items(place, value)
            case ModuleType():
                yield self._part(place, value.__name__, lambda: f"{place} = {value.__name__}")
            case type() if not _is_library(value):
                yield self._part(place, value.__qualname__, lambda: value.__qualname__)
                yield from self._items(place, _definitions(value))
            case _ if hasattr(value, "__wrapped__"):
                name = type(value).__qualname__
                yield self._part(f"{place} wrapper", name, lambda: name)
                yield from self.parts(place, value.__wrapped__)
            case _ if _is_plain(value) and len(self._seen) < _OBJECTS:
                yield from self.parts(f"{place} class".strip(), type(value))
                yield from self._items(place, vars(value))
            case _:
                key = jaxcompat.live_key(value)
                yield self._part(place, key, lambda: f"{place or 'object'} = {_short(value)}")

    def _function(self, place: str, function: FunctionType) -> Iterator[Part]:
        where, code = f"{place} " if place else "", function.__code__
        name = function.__qualname__.rpartition("<locals>.")[2]  # wherever it is defined
        yield self._part(f"{where}name", name, lambda: name)
        digest = hashlib.sha256(repr(_code_key(code)).encode()).hexdigest()[:12]
        yield self._part(f"{where}code", digest, lambda: f"{_source(function)} (code {digest})")
        defaults = dict(enumerate(function.__defaults__ or ()))
        yield from self._items(f"{where}default", defaults | (function.__kwdefaults__ or {}))
        yield from self._items(place, jaxcompat.cells_of(function))
        if not _is_wrapper(function):
            names = sorted({name for part in _codes(code) for name in part.co_names})
            read = {n: function.__globals__[n] for n in names if n in function.__globals__}
            yield from self._items(f"{where}global", read)

    def _items(self, place: str, values: Mapping[Any, Any]) -> Iterator[Part]:
        names = tuple(map(str, values))
        yield self._part(f"{place} names".strip(), names, lambda: f"{place} {', '.join(names)}")
        for name, value in values.items():
            yield from self.parts(f"{place}.{name}" if place else str(name), value)

    def _part(self, place: str, key: Hashable, text: Callable[[], str]) -> Part:
        self._texts[place] = text
        return place, key


def _is_library(value: Any) -> bool:
    """Return True for a function or a class of an installed package, which is one object.

    JAX's wrappers of a user's function are not: JAX makes one for each equation.
    """
    if isinstance(value, FunctionType) and _is_wrapper(value):
        return not value.__closure__
    module = sys.modules.get(value.__module__ or "")
    file = getattr(module, "__file__", None)
    if file is None:
        return module is not None and module.__name__ != "__main__"
    return any(file.startswith(folder) for folder in _LIBRARIES)


_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


def _is_wrapper(function: FunctionType) -> bool:
    return (function.__module__ or "").startswith(jaxcompat.WRAPPERS)


def _is_plain(value: Any) -> bool:
    """Return True for an object of a user's class that is all in its attributes.

    An object of a library, such as a function of NumPy, may have contents outside of Python.
    """
    cls = type(value)
    is_user = hasattr(value, "__dict__") and not _is_library(cls)
    return is_user and cls.__eq__ is object.__eq__


def _definitions(value: type) -> dict[str, Any]:
    """Return the functions and the plain attributes that a class defines."""
    return {
        name: attribute
        for name, attribute in vars(value).items()
        if name not in ("__module__", "__firstlineno__")
        and (isinstance(attribute, FunctionType) or content_key(attribute) is not None)
    }


def _code_key(code: CodeType) -> tuple[Any, ...]:
    """Return a key of a code object without its file and lines."""
    constants = tuple(
        _code_key(c) if isinstance(c, CodeType) else (type(c).__name__, repr(c))
        for c in code.co_consts
    )
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    return code.co_code, constants, names, counts, code.co_exceptiontable


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _source(function: FunctionType) -> str:
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        text = function.__qualname__
    return _short(" ".join(text.split()))


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


# --- value keys -----------------------------------------------------------------------------------
# Keys of types, literals, arrays and plain values, equal in any process for equal values.
#
# Comparisons of programs are built on these: `ir.equivalence` compares two step by step, and
# `ir.equivalence` and `ir.equivalence` make keys of equations and jaxprs.
# Numbers are distinguished by type and to the bit (0.0 is not -0.0, 1 is not True), symbolic
# dimensions by their texts. Only long arrays have a digest in their keys, of 256 bits.


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
    if any(dtype and is_extended(dtype) for dtype in both) and both[0] != both[1]:
        return False
    a, b = (np.asarray(physical(value)) for value in (p, q))
    return a.dtype == b.dtype and a.shape == b.shape and _same_bytes(a, b)


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Return True if two arrays of one shape and dtype have equal bytes. Copy no large ones."""
    if a.nbytes <= _BLOCK:
        return a.tobytes() == b.tobytes()
    a, b = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (a, b))
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
    cached = _digests.get(id(array))
    if cached is not None and cached[0]() is array:
        return cached[1]
    number = id(array)
    with jax.ensure_compile_time_eval():  # also while JAX traces a function around this
        digest = _digest(np.asarray(physical(array)))
    _digests[number] = ref(array, partial(_forget, _digests, number)), digest
    return digest


# --- mapped arrays --------------------------------------------------------------------------------
# Arrays that are parts of a file, which is mapped into memory and read on use.


class FileMap(mmap.mmap):
    """A map of a whole file that is never written through, so that its pages may be released."""

    @classmethod
    def of(cls, file: Any) -> FileMap:
        """Map an open file, which may be closed afterwards."""
        return cls(file.fileno(), 0, access=mmap.ACCESS_READ)


def release_pages(array: np.ndarray) -> None:
    """Release the memory of a mapped array; it is read again on its next use."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    if isinstance(base, FileMap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)
