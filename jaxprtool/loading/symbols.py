"""Symbolic dimensions that a text of arguments names."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any


class Symbols(Mapping[str, Any]):
    """Symbolic dimensions by name, all of one scope so that they can meet in one function."""

    def __init__(self, known: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._scope: object = next((size.scope for size in known.values()), None)
        self._found = dict(known)
        self._constraints: dict[str, None] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._found:
            from jax import export  # seldom needed, and slow to import

            self._scope = self._scope or export.SymbolicScope(tuple(self._constraints))
            try:
                (self._found[name],) = export.symbolic_shape(name, scope=self._scope)
            except ValueError:  # min, max and the like, which have a meaning there
                raise ValueError(f"'{name}' cannot name one") from None
        return self._found[name]

    def constrain(self, constraints: Iterable[str]) -> None:
        """Take what is known of dimensions, `n <= 64`.

        A scope has to know it from the beginning: it raises ValueError once there is a symbol.
        """
        new = dict.fromkeys(text for text in constraints if text not in self._constraints)
        if new and self._scope:
            raise ValueError(f"{next(iter(new))} is to be said of arguments")
        self._constraints |= new

    def unnamed(self) -> Any:
        """A symbolic dimension of its own, for a size that is written `_`."""
        numbers = itertools.count(1)
        return self[next(name for i in numbers if (name := f"_{i}") not in self._found)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)
