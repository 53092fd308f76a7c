"""Results for people and programs: JSON of dataclasses, printed results, counts and sizes.

The fields of a dataclass are the keys, unless `document` says otherwise. Documents may gain keys;
existing keys keep their names, types and meaning. Numbers that JSON cannot represent are the
strings "NaN", "Infinity" and "-Infinity"; a complex number is `[real, imaginary]`.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
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
    if isinstance(value, Place):
        return _object(value) if value else None
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, _OBJECTS):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list) or type(value) is tuple:
        return list(map(as_json, value))
    if isinstance(value, float):
        return value if math.isfinite(value) else _NONFINITE[str(value)]
    if is_dataclass(value) or hasattr(value, "_fields"):
        return _object(value)
    if isinstance(value, complex):
        return [as_json(value.real), as_json(value.imag)]
    from jaxprtool import jaxcompat  # imports JAX

    if jaxcompat.is_symbolic_dimension(value):
        return str(value)
    raise TypeError(f"cannot convert a {type(value).__name__} to JSON: {value!r}")


#: A tuple of types is checked faster than a union, and a program has many values.
_PLAIN, _OBJECTS = (str, int, type(None)), (dict, Mapping)

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


#: The version of the documents: another number if a key of before has gone or has changed.
SCHEMA = 2


def document_text(document: Any, most: int | None = None) -> str:
    """Return the JSON of a command's result, which has its version as `schema`.

    Args:
        document: A dataclass or a NamedTuple.
        most: The most bytes that the text and a line break may take, without spaces. If they do not
            suffice, every list of objects keeps as many of its first entries as fit, the same
            number for all, and `left_out` has the number of the others by the path of the list.

    Raises:
        ArgumentsError: If the document is longer even without any of these entries.
    """
    whole = {"schema": SCHEMA, **as_json(document)}
    if most is None:
        return json.dumps(whole, indent=2, allow_nan=False)
    text = json.dumps(whole, separators=(",", ":"), allow_nan=False)
    if len(text) < most:
        return text
    longest = max(_lengths(whole), default=0)
    fits = bisect(range(longest), most, key=lambda count: len(_cut_text(whole, count)) + 1)
    if not fits:
        least = len(_cut_text(whole, 0)) + 1
        raise ArgumentsError(
            f"--max-bytes {most} is too small: without any entry of its lists, the document takes "
            f"{least:,} bytes"
        )
    return _cut_text(whole, fits - 1)


def _lengths(value: Any) -> Iterator[int]:
    """Yield the length of each list of objects."""
    if isinstance(value, dict):
        for item in value.values():
            yield from _lengths(item)
    elif _is_list_of_objects(value):
        yield len(value)
        for item in value:
            yield from _lengths(item)


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _cut_text(whole: dict[str, Any], count: int) -> str:
    """Return the text of a document whose lists of objects keep `count` entries."""
    left_out: Counter[str] = Counter()

    def cut(value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return {key: cut(item, f"{path}.{key}") for key, item in value.items()}
        if not _is_list_of_objects(value):
            return value
        if len(value) > count:
            left_out[path[1:]] += len(value) - count
        return [cut(item, path) for item in value[:count]]

    return json.dumps(
        {**cut(whole, ""), "left_out": left_out}, separators=(",", ":"), allow_nan=False
    )


# --- places ---------------------------------------------------------------------------------------
# Lines of source files, the same in all documents.

#: The separator between the user's own line and those of libraries behind it.
BEHIND = " ← "


@document(optional=("library",))
@dataclass(frozen=True, eq=False, repr=False)
class Place(str):
    """A line of a source file.

    In Python it is also the text that the terminal shows: `model.py:9 ← flax/linen/linear.py:199`,
    or "" if the line is unknown.

    Attributes:
        path: The file, with its absolute path if that is known.
        line: The line, from 1.
        function: The function that has the line, as Python qualifies it: `Model.loss`; "" if it is
            unknown.
        display: The path as the terminal shows it: from the current folder, or a library's package.
        library: The lines of libraries that it calls, the outermost first; None if there are none.
    """

    path: str = ""
    line: int = 0
    function: str = ""
    display: str = ""
    library: tuple[Place, ...] | None = None

    def __new__(
        cls,
        path: str = "",
        line: int = 0,
        function: str = "",
        display: str = "",
        library: tuple[Place, ...] | None = None,
    ) -> Place:
        texts = (f"{display}:{line}", *(library or ())) if display else ()
        return super().__new__(cls, BEHIND.join(texts))

    @classmethod
    def from_json(cls, document: Mapping[str, Any] | None) -> Place:
        """Return the place that a document has."""
        if document is None:
            return cls()
        library = tuple(map(cls.from_json, document.get("library", ())))
        return cls(**{**document, "library": library or None})

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def user(self) -> Place:
        """The place without the lines of libraries."""
        return replace(self, library=None) if self.library else self

    @property
    def behind(self) -> str:
        """The lines of libraries: `flax/linen/linear.py:199`, or ""."""
        return BEHIND.join(self.library or ())

    def calling(self, library: Place) -> Place:
        """Return the place with a line of a library behind it, unless that is unknown."""
        return replace(self, library=(library,)) if library else self


#: The place of what has no known line.
UNKNOWN = Place()


def place_in(name: str) -> Place | None:
    """Return the name of a group if it is a place, or else None."""
    return name if isinstance(name, Place) and name else None


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
