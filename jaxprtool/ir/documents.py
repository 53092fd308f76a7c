"""Results for people and programs: JSON of dataclasses, printed results, counts and sizes.

The fields of a dataclass are the keys, unless `document` says otherwise. Documents may gain keys;
existing keys keep their names, types and meaning. Numbers that JSON cannot represent are the
strings "NaN", "Infinity" and "-Infinity"; a complex number is `[real, imaginary]`.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from decimal import Decimal
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

from jaxprtool.errors import ArgumentsError

# --- documents ------------------------------------------------------------------------------------
# The JSON of dataclasses, which commands print with `--json`.

T = TypeVar("T")

#: A number, or a text if sizes are symbolic: `2*n**2*d`.
Number: TypeAlias = Annotated[Any, int | str]

#: A float that may be NaN or infinite.
AnyFloat: TypeAlias = Annotated[float, float | str]


class _KeyLayout(NamedTuple):
    """How keys differ from fields: the arguments of `document`."""

    without: Sequence[str] = ()
    names: Mapping[str, str] = MappingProxyType({})
    also: Sequence[str] = ()
    flat: Sequence[str] = ()
    optional: Sequence[str] = ()


def document(
    *,
    without: Sequence[str] = (),
    names: Mapping[str, str] = MappingProxyType({}),
    also: Sequence[str] = (),
    flat: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> Callable[[type[T]], type[T]]:
    """Declare how the JSON of a dataclass or a NamedTuple differs from its fields.

    Args:
        without: Fields that are left out.
        names: The keys of fields and properties that have another name.
        also: Properties that are shown like fields.
        flat: Fields that are replaced by their own keys.
        optional: Fields and properties that are left out if they are None or "".
    """
    layout = _KeyLayout(without, names, also, flat, optional)

    def declare(cls: type[T]) -> type[T]:
        cls.__document__ = layout  # type: ignore[attr-defined]
        return cls

    return declare


class DocumentKey(NamedTuple):
    """A key of a document, and the attribute that it shows."""

    name: str
    attribute: str
    is_flat: bool
    is_optional: bool


@cache
def keys(cls: type) -> tuple[DocumentKey, ...]:
    """Return the keys of the JSON of a dataclass or a NamedTuple."""
    layout: _KeyLayout = getattr(cls, "__document__", _KeyLayout())
    attributes = [field.name for field in fields(cls)] if is_dataclass(cls) else cls._fields  # type: ignore[attr-defined]
    return tuple(
        DocumentKey(
            layout.names.get(name, name), name, name in layout.flat, name in layout.optional
        )
        for name in (*attributes, *layout.also)
        if name not in layout.without
    )


def as_json(value: Any) -> Any:
    """Convert dataclasses, mappings and sequences to values that the module `json` can write.

    Raises:
        TypeError: If a value has no JSON.
    """
    if value.__class__ in _PLAIN:
        return value
    if isinstance(value, _OBJECTS):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list) or type(value) is tuple:
        return list(map(as_json, value))
    if isinstance(value, float):
        return value if math.isfinite(value) else _NONFINITE[str(value)]
    if is_dataclass(value) or hasattr(value, "_fields"):
        return None if value == "" else _object(value)  # a `Place` that is unknown
    if isinstance(value, str | int):
        return value
    if isinstance(value, complex):
        return [as_json(value.real), as_json(value.imag)]
    from jaxprtool import jaxcompat  # imports JAX

    if jaxcompat.is_symbolic_dimension(value):
        return str(value)
    raise TypeError(f"cannot convert a {type(value).__name__} to JSON: {value!r}")


#: These are checked faster than a union, and a program has many values.
_PLAIN, _OBJECTS = frozenset({str, int, bool, type(None)}), (dict, Mapping)

_NONFINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def _object(value: Any) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key in keys(value.__class__):
        item = getattr(value, key.attribute)
        if key.is_flat:
            entries |= as_json(item)
        elif not (key.is_optional and (item is None or item == "")):
            entries[key.name] = as_json(item)
    return entries


# --- printed --------------------------------------------------------------------------------------
# Values that print as their command shows them, and the functions of higher rooms that do so.

#: The functions of higher rooms that methods of values call, by name. `jaxprtool` registers them,
#: so that they are imported when they are called.
METHODS: dict[str, Callable[..., Any]] = {}


class Printed:
    """A result that prints as its command does, `print(jaxprtool.cost(program))`.

    In a notebook, and at the prompt of IPython, it is a table.
    """

    def __init_subclass__(cls) -> None:
        # IPython asks class by class, and would find the `__repr__` of the dataclass first.
        cls._repr_pretty_ = Printed._repr_pretty_  # type: ignore[method-assign]

    def __str__(self) -> str:
        return str(METHODS["result_text"](self))

    def _repr_html_(self) -> str:
        return str(METHODS["result_html"](self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


# --- quantities -----------------------------------------------------------------------------------
# Counts and sizes as text.


def plural(count: int, noun: str) -> str:
    """Return a count as text: `1 equation`, `2 equations`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def times(count: int, type: str) -> str:
    """Return a type with the number of its values, if there are several: `3 x f32[8]`."""
    return f"{count:,} x {type}" if count > 1 else type


def some(names: Iterable[str], most: int, end: str = " and {:,} more") -> str:
    """Return names as text, shortened after `most`: `a, b and 3 more`."""
    names = list(names)
    more = len(names) - most
    return ", ".join(names[:most]) + (end.format(more) if more > 0 else "")


def listed(names: Iterable[str], most: int) -> str:
    """Return names as text, shortened after `most`: `a, b, … 3 more`."""
    return some(names, most, ", … {:,} more")


def shell_word(word: str) -> str:
    """Return a word as a shell reads it, in double quotes if it has single ones: `"p['w']"`."""
    plain = "'" in word and not set(word) & set('"$`\\!')
    return f'"{word}"' if plain else shlex.quote(word)


def in_bytes(count: float) -> str:
    """Return a number of bytes as text: `1.5 MiB`."""
    if count < 1024:
        return f"{count:,} byte{'' if count == 1 else 's'}"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def with_prefix(number: float, unit: str = "") -> str:
    """Return a number as text, with a prefix of the SI: `1.5 M`, `1.5 MB/s`."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(number) < 999.95:
            return f"{number:.1f} {prefix}{unit}" if prefix else f"{number:,} {unit}".rstrip()
        number /= 1000
    return f"{number:,.1f} E{unit}"


#: A number, and a prefix of the SI or of the IEC.
_AMOUNT = r"(\d+(?:\.\d*)?(?:e\+?\d\d?)?)\s*(?:([kmgtp])(i?))?"
_BYTES = re.compile(f"{_AMOUNT}b?", re.IGNORECASE)
_FLOPS = re.compile(f"{_AMOUNT}(?:flops?)?", re.IGNORECASE)


def bytes_of(text: str) -> int:
    """Return the number of bytes in a text: `8GiB`, `500 MB`, `2e9`.

    Raises:
        ArgumentsError: If the text is not a number of bytes.
    """
    return _amount(text, _BYTES, "bytes such as 8GiB, 500MB or 2e9")


def flops_of(text: str) -> int:
    """Return the number of FLOPs in a text: `3 GFLOP`, `1.5e9`.

    Raises:
        ArgumentsError: If the text is not a number of FLOPs.
    """
    return _amount(text, _FLOPS, "FLOPs such as 3 GFLOP, 500M or 2e9")


def _amount(text: str, pattern: re.Pattern[str], what: str) -> int:
    read = pattern.fullmatch(text.strip())
    if read is None:
        raise ArgumentsError(f"'{text}' is not a number of {what}")
    number, prefix, binary = read.groups()
    unit = (1024 if binary else 1000) ** (" kmgtp".index(prefix.lower()) if prefix else 0)
    return int(Decimal(number) * unit)


def duration(seconds: float) -> str:
    """Return a time as text: `26.5 s`, `1.2 ms`."""
    unit, size = "µs", 1e-6
    for larger, least in (("ms", 1e-3), ("s", 1.0)):
        if seconds >= 0.9995 * least:  # rounds up to it with three digits
            unit, size = larger, least
    number = seconds / size
    return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
