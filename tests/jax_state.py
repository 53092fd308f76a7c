"""The state of JAX's modules, including tables, config and caches, for comparisons."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax

#: A value, and its comparison key, by location: module, name, and key of a table.
State = dict[tuple[Any, ...], tuple[Any, Any]]


def jax_state() -> State:
    """Return the state of the imported modules of JAX, and JAX's configuration."""
    found: State = {}
    for module_name, module in list(sys.modules.items()):
        # This flag changes at JAX's first compilation.
        if module_name.partition(".")[0] == "jax" and "compilation_cache" not in module_name:
            for name, value in list(vars(module).items()):
                if not isinstance(value, ModuleType) and not name.startswith("__"):
                    found.update(_entries((module_name, name), value))
    for name, value in jax.config.values.items():
        found["configuration", name] = value, value
    return found


def caches() -> State:
    """Return the number of entries in the caches of JAX's modules, except that of dtype names."""
    return {
        (module, name): (value, value.cache_info().currsize)
        for (module, name, *rest), (value, _) in jax_state().items()
        if not rest and hasattr(value, "cache_info") and not isinstance(value, type)
        if name != "short_dtype_name"
    }


def _entries(where: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    plain = isinstance(value, bool | int | float | str)
    yield where, (value, repr(value) if plain else id(value))
    if isinstance(value, dict):
        for key, row in list(value.items()):
            yield from _entries((*where, _Key(key)), row)
    elif isinstance(value, list | set):
        yield from (((*where, _Key(member)), (member, None)) for member in list(value))


class _Key:
    """A table key that is equal to the same object or the same plain value."""

    def __init__(self, key: Any):
        self.key = key
        self._plain = (type(key), key) if isinstance(key, bool | int | float | str) else id(key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._plain == other._plain

    def __hash__(self) -> int:
        return hash(self._plain)

    def __repr__(self) -> str:
        return repr(self.key)


def changed(before: State, after: State) -> list[str]:
    """Return the entries that were changed, removed, or added with a key of JAX's own.

    Rows with other keys, such as our own primitives and classes, may be added, and so may those
    that JAX's own modules add on import.
    """
    keys = {key for key in before if len(key) > 2}
    jaxs = {part for key in keys for part in key[2:]}
    found = []
    for where, (value, compared) in before.items():
        if where not in after:
            found.append(f"{_text(where)} is gone")
        elif after[where][1] != compared:
            found.append(f"{_text(where)} was {value!r:.80} and is {after[where][0]!r:.80}")
    for where, (value, _) in after.items():
        by_jax = str(getattr(value, "__module__", "")).startswith("jax.")
        in_table = len(where) > 2 and where[:2] in before and where not in before
        if in_table and where[-1] in jaxs and not by_jax:
            found.append(f"{_text(where)} has become {value!r:.80}")
    return found


def _text(where: tuple[Any, ...]) -> str:
    return ".".join(map(str, where[:2])) + "".join(f"[{key!r}]" for key in where[2:])
