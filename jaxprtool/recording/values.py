"""Describe static values, closed-over variables and fields by short texts, for comparison.

Values that differ have different texts. This runs in the user's script: it calls only `__repr__` of
the user's code, does not wait for arrays, and keeps no reference to a value.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import re
import sys
import types
import weakref
import zlib
from collections import Counter
from collections.abc import Hashable, Mapping
from pathlib import PurePath
from typing import Any

import jax
import numpy as np

from jaxprtool.jaxcompat import short_dtype_name

#: The maximum length of the text of a value, and of a value that JAX compares.
LIMIT, COMPARED_LIMIT = 80, 1000

#: The maximum number of nested values, and of levels, in the text of a value.
_MOST, _DEEPEST = 1000, 8

#: NumPy arrays in static values are compared by their elements up to this number of bytes.
_MOST_BYTES = 1 << 16

#: A container of more numbers is described by a checksum.
_MANY = 200

_SMALL = 1 << 63
_PLAIN = frozenset({int, float, complex, bool, type(None), type(...)})
_BRACKETS: dict[type, tuple[str, str]] = {
    tuple: ("(", ")"),
    list: ("[", "]"),
    set: ("{", "}"),
    frozenset: ("{", "}"),
}
_NUMPY = (np.ndarray, np.generic)
_BUILTINS = (types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType)
_JITTED = type(jax.jit(lambda: ()))
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class ObjectNumbers:
    """Numbers of objects, by identity.

    An object that cannot be weakly referenced may get the number of one that is gone.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[weakref.ref | None, int]] = {}
        self._counts: Counter[str] = Counter()

    def __call__(self, value: object, group: str = "") -> int:
        """Return the number of an object, counted from 1 in its group."""
        key: Hashable = id(value)
        if type(value) is types.MethodType:  # a new object at each access, but equal
            key, value = (id(value.__self__), id(value.__func__)), value.__self__
        reference, number = self._known.get((key, group), (None, 0))
        if number and (reference is None or reference() is value):
            return number
        try:
            reference = weakref.ref(value)
        except TypeError:
            reference = None
        self._counts[group] += 1
        self._known[key, group] = reference, self._counts[group]
        return self._counts[group]


@dataclasses.dataclass
class ValueTexts:
    """Texts of values.

    Attributes:
        numbers: The numbers of objects.
        compared: Whether JAX compares the value with `==`. Then objects without `__eq__`, such as
            functions, have numbers in the text.
    """

    numbers: ObjectNumbers
    compared: bool = True

    def __call__(self, value: object) -> str:
        """Return the text of a value. A long text is cut, and ends in a checksum of the whole."""
        kind = type(value)
        if kind is bool or value is None or (kind is int and abs(value) < _SMALL):  # type: ignore
            return repr(value)
        text = _ValueWriter(self).write(value, 0)
        return shortened(text, COMPARED_LIMIT if self.compared else LIMIT)

    def number(self, value: object, name: str) -> str:
        """Return ` #2` for the second object of a class or function, if they are compared."""
        return f" #{self.numbers(value, name)}" if self.compared else ""


def shortened(text: str, limit: int = LIMIT) -> str:
    """Return a text cut to a length, with a checksum of the whole; a shorter one unchanged."""
    if len(text) <= limit:
        return text
    checksum = f"… ({_checksum(text)})"
    return text[: limit - len(checksum)] + checksum


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode(errors='replace')):08x}"


class _ValueWriter:
    """One text."""

    def __init__(self, values: ValueTexts):
        self.values = values
        self.left = _MOST

    def write(self, value: Any, depth: int) -> str:
        kind = type(value)
        self.left -= 1
        if self.left < 0 or depth > _DEEPEST:
            return "…"
        if kind in _PLAIN:
            return _plain(value)
        if kind is str or kind is bytes:
            return repr(value) if len(value) < 1000 else shortened(_head(value))
        try:
            return self._of_kind(value, kind, depth)
        except Exception:
            return kind.__name__  # the user's property or `__repr__` raised

    def _of_kind(self, value: Any, kind: type, depth: int) -> str:
        if issubclass(kind, tuple | list | dict | set | frozenset):
            return self._container(value, kind, depth)
        # `isinstance` would ask the value for its class, which may run the user's code.
        if issubclass(kind, type):
            return str(value.__qualname__)
        if issubclass(kind, enum.Enum):
            return f"{kind.__name__}.{value._name_}"
        if issubclass(kind, _NUMPY) or (_is_jaxs(kind) and isinstance(value, jax.Array)):
            return self._array(value)
        if (text := self.function(value, kind, depth)) is not None:
            return text
        if kind is types.MappingProxyType or _is_jaxs(kind):
            return " ".join(_ADDRESS.sub("", repr(value)).split())
        if kind is types.CellType:
            return self.write(value.cell_contents, depth)
        return self._object(value, kind, depth)

    def _container(self, value: Any, kind: type, depth: int) -> str:
        """Return the text of a container, without calling methods of its class."""
        base = next(
            builtin for builtin in (tuple, list, dict, set, frozenset) if issubclass(kind, builtin)
        )
        prefix = "" if kind is base else kind.__name__
        count = base.__len__(value)
        if count > _MANY and base is not dict and set(map(type, base.__iter__(value))) <= _PLAIN:
            return f"{kind.__name__} of {count} ({_checksum(repr(list(base.__iter__(value))))})"
        if base is dict:
            pairs = itertools.islice(dict.items(value), _MOST)
            texts = [f"{self.write(k, depth + 1)}: {self.write(v, depth + 1)}" for k, v in pairs]
            return f"{prefix}{{{', '.join(texts)}}}"
        texts = [
            self.write(item, depth + 1) for item in itertools.islice(base.__iter__(value), _MOST)
        ]
        names = getattr(kind, "_fields", ())
        if base is tuple and names and len(names) == len(texts):
            shown = (f"{name}={text}" for name, text in zip(names, texts, strict=True))
            return f"{prefix}({', '.join(shown)})"
        if base in (set, frozenset):
            texts.sort()
        start, end = _BRACKETS[base]
        comma = "," if base is tuple and len(texts) == 1 else ""
        return f"{prefix}{start}{', '.join(texts)}{comma}{end}"

    def _array(self, value: Any) -> str:
        """Return the type of an array. A compared NumPy array also has a checksum."""
        if isinstance(value, np.generic):
            return repr(value)
        text = array_type_text(value)
        if self.values.compared and isinstance(value, np.ndarray) and value.nbytes <= _MOST_BYTES:
            return f"{text} ({zlib.crc32(value.tobytes()):08x})"
        return text

    def function(self, value: Any, kind: type, depth: int) -> str | None:
        """Return the text of a function, with its line and closed-over variables, or None."""
        if kind is types.FunctionType:
            name = short_name(value.__qualname__)
            number = self.values.number(value, name)
            bound = self._bound(value, depth) if depth < _DEEPEST - 2 else ""
            return f"{name}{bound} {_place(value.__code__)}{number}"
        if kind is types.MethodType:
            return f"{value.__func__.__qualname__} of {self.write(value.__self__, depth + 1)}"
        if issubclass(kind, functools.partial):
            texts = [self.write(item, depth + 1) for item in (value.func, *value.args)]
            texts += [f"{k}={self.write(v, depth + 1)}" for k, v in value.keywords.items()]
            return f"partial({', '.join(texts)}){self.values.number(value, 'partial')}"
        if kind in _BUILTINS:
            return value.__qualname__
        if kind is _JITTED or _is_jaxs(kind):
            inner = value.__wrapped__ if kind is _JITTED else attributes(value).get("__wrapped__")
            if callable(inner):
                name = short_name(getattr(inner, "__qualname__", kind.__name__))
                place = f" {_place(inner.__code__)}" if type(inner) is types.FunctionType else ""
                shown = "" if _is_jaxs(kind) and kind is not _JITTED else place
                return f"{name}{shown}{self.values.number(value, name)}"
        return None

    def _bound(self, function: types.FunctionType, depth: int) -> str:
        """Return the variables that a function closes over: `(lr=0.1)`."""
        shown = []
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            content = cell_content(cell)
            if content is not function and content is not _EMPTY:
                shown.append(f"{name}={self.write(content, depth + 1)}")
        return f"({', '.join(shown)})" if shown else ""

    def _object(self, value: Any, kind: type, depth: int) -> str:
        own_identity = kind.__eq__ is object.__eq__  # equal only to itself
        number = self.values.number(value, kind.__name__) if own_identity else ""
        if dataclasses.is_dataclass(kind):
            pairs = _dataclass_items(value)
        elif _is_frozen_dict(kind):
            return f"{kind.__name__}({self.write(attributes(value)['_dict'], depth + 1)})"
        elif not self.values.compared and _package(kind) not in sys.stdlib_module_names:
            return f"{kind.__name__} #{self.values.numbers(value, kind.__name__)}"
        elif kind.__repr__ is not object.__repr__:
            return " ".join(_ADDRESS.sub("", repr(value)).split()) + number
        elif own_identity:
            return f"{kind.__name__} #{self.values.numbers(value, kind.__name__)}"
        else:
            pairs = list(attributes(value).items())
        shown = (f"{name}={self.write(item, depth + 1)}" for name, item in pairs)
        return f"{kind.__name__}({', '.join(shown)}){number}"


_EMPTY = object()


def cell_content(cell: types.CellType) -> object:
    """Return the content of a closure cell, or a marker if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def is_empty(content: object) -> bool:
    """Return True for the marker of an empty cell."""
    return content is _EMPTY


def attributes(value: object) -> Mapping[str, Any]:
    """Return the attributes of an object, without calling its class's code."""
    try:
        return object.__getattribute__(value, "__dict__")  # type: ignore[no-any-return]
    except AttributeError:
        return {}


def array_type_text(value: Any) -> str:
    """Return the type of an array in the notation of listings: `f32[4,17]`."""
    return f"{short_dtype_name(value.dtype)}[{','.join(map(str, value.shape))}]"


def short_name(qualname: str) -> str:
    """Return the part of a qualified name after `<locals>`: `init` for `adam.<locals>.init`."""
    return qualname.rpartition("<locals>.")[2]


def _dataclass_items(value: Any) -> list[tuple[str, Any]]:
    """Return the fields of a dataclass that are compared and differ from their defaults."""
    attrs = attributes(value)
    items = []
    for field in dataclasses.fields(value):
        if field.compare:
            name = field.name
            field_value = attrs[name] if name in attrs else object.__getattribute__(value, name)
            if field_value is not field.default and (field.repr or field_value is not None):
                items.append((name, field_value))
    return items


def _place(code: types.CodeType) -> str:
    return f"{PurePath(code.co_filename).name}:{code.co_firstlineno}"


def _plain(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # an integer of too many digits
        return f"int of {value.bit_length()} bits"  # type: ignore[attr-defined]


def _head(value: str | bytes) -> str:
    """Return the start of a long text, with a checksum of the whole."""
    data = value if isinstance(value, bytes) else value.encode(errors="replace")
    return f"{value[:LIMIT]!r}{zlib.crc32(data):08x}"


def _package(kind: type) -> str:
    module = kind.__module__
    return module.partition(".")[0] if isinstance(module, str) else ""


def _is_jaxs(kind: type) -> bool:
    return _package(kind) in ("jax", "jaxlib")


def _is_frozen_dict(kind: type) -> bool:
    """Return True for Flax's immutable dictionary, whose `__repr__` prints arrays."""
    return kind.__name__ == "FrozenDict" and _package(kind) == "flax"
