"""The JSON of dataclasses, which commands print with `--json`.

The fields of a dataclass are the keys, unless `document` says otherwise. Documents may gain keys;
existing keys keep their names, types and meaning. Numbers that JSON cannot represent are the
strings "NaN", "Infinity" and "-Infinity"; a complex number is `[real, imaginary]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")

#: A number, or a text if sizes are symbolic: `2*n**2*d`.
Number: TypeAlias = Annotated[Any, int | str]

#: A float that may be NaN or infinite.
AnyFloat: TypeAlias = Annotated[float, float | str]


class _Layout(NamedTuple):
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
    layout = _Layout(without, names, also, flat, optional)

    def declare(cls: type[T]) -> type[T]:
        cls.__document__ = layout  # type: ignore[attr-defined]
        return cls

    return declare


class Key(NamedTuple):
    """A key of a document, and the attribute that it shows."""

    name: str
    attribute: str
    is_flat: bool
    is_optional: bool


@cache
def keys(cls: type) -> tuple[Key, ...]:
    """Return the keys of the JSON of a dataclass or a NamedTuple."""
    layout: _Layout = getattr(cls, "__document__", _Layout())
    own = [each.name for each in fields(cls)] if is_dataclass(cls) else cls._fields  # type: ignore[attr-defined]
    return tuple(
        Key(layout.names.get(each, each), each, each in layout.flat, each in layout.optional)
        for each in (*own, *layout.also)
        if each not in layout.without
    )


def as_json(value: Any) -> Any:
    """Convert dataclasses, mappings and sequences to values that the module `json` can write.

    Raises:
        TypeError: If a value has no JSON.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, _OBJECTS):
        return {str(key): as_json(each) for key, each in value.items()}
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
    found: dict[str, Any] = {}
    for key in keys(value.__class__):
        each = getattr(value, key.attribute)
        if key.is_flat:
            found |= as_json(each)
        elif not (key.is_optional and (each is None or each == "")):
            found[key.name] = as_json(each)
    return found
