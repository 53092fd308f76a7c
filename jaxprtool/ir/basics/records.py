"""Objects with named fields in the parameters of equations: a compiler's options, a kernel's grid.

Two are the same if they have the same class and fields, whatever `==` says: for it, two jaxprs in
them are different objects.
"""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any


class Record:
    """An object of a class that may be unknown here, with its fields as attributes.

    Args:
        class_name: The module and the name of the class.
        **fields: The fields.
    """

    def __init__(self, class_name: str, /, **fields: Any) -> None:
        if not isinstance(class_name, str):
            raise TypeError("a record begins with the name of its class")
        self.__dict__.update(fields)
        self._class_name = class_name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self)))

    def __repr__(self) -> str:
        name, fields = fields_of(self) or ("", {})
        parts = ", ".join(f"{field}={value!r}" for field, value in fields.items())
        return f"{name.rpartition('.')[2]}({parts})"


def fields_of(value: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the name of the class and the fields of a record or a dataclass; None for others."""
    if isinstance(value, Record):
        fields = {name: field for name, field in vars(value).items() if name != "_class_name"}
        return value._class_name, fields
    if not dataclasses.is_dataclass(value) or isinstance(value, type | Enum) or callable(value):
        return None
    cls = type(value)
    names = [field.name for field in dataclasses.fields(value)]
    return f"{cls.__module__}.{cls.__qualname__}", {
        name: getattr(value, name) for name in names if hasattr(value, name)
    }
