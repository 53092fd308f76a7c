"""The header of a `.jaxpr` file as values: what a Program knows besides its jaxpr.

Argument and result structures are written with each value's name at its place, and read so:
`({'w': "params['w']"}, 'x')` is a tree with two leaves and their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.errors import ProgramFileError, did_you_mean
from jaxprtool.formats.jaxpr import values
from jaxprtool.formats.jaxpr.source import Expression, Source
from jaxprtool.ir.trees import Opaque

#: The entries that every file has, and the others.
REQUIRED = ("jax", "name", "arguments", "results")
OPTIONAL = ("files", "axis_env", "meshes", "symbols")


@dataclass(frozen=True)
class Header:
    """The entries of a header, checked; a structure is a tree and the names of its leaves."""

    name: str
    arguments: tuple[Any, tuple[str, ...]]
    results: tuple[Any, tuple[str, ...]]
    files: Mapping[str, str]
    axis_env: tuple[tuple[Any, int], ...]
    meshes: Mapping[str, Any]
    scope: Any


def read_header(source: Source, entries: Mapping[str, Expression]) -> Header:
    """The header of a file. Raises ProgramFileError."""
    for name, entry in entries.items():
        if name not in REQUIRED + OPTIONAL:
            hint = did_you_mean(name, REQUIRED + OPTIONAL)
            raise source.fail(entry.position, f"there is no header entry '{name}'", hint)
    for name in REQUIRED:
        if name not in entries:
            place = max((e.position + len(e.text) for e in entries.values()), default=0)
            raise source.fail(place, f"the header has no entry '{name}'")

    def read(name: str, convert: Callable[[Any], Any], default: Any = None) -> Any:
        return _entry(source, entries[name], convert) if name in entries else convert(default)

    read("jax", _text)
    return Header(
        name=read("name", _text),
        arguments=read("arguments", _arguments),
        results=read("results", _structure),
        files=read("files", _files, {}),
        axis_env=read("axis_env", _axis_env, ()),
        meshes=read("meshes", _meshes, {}),
        scope=read("symbols", _scope),
    )


def _entry(source: Source, entry: Expression, convert: Callable[[Any], Any]) -> Any:
    node = entry.parse(source)
    try:
        return convert(values.decode(node, _NAMES))
    except values.Unreadable as error:
        raise source.fail(entry.position_of(error.node), str(error)) from None
    except ProgramFileError:
        raise
    except Exception as error:  # of any class, from trees and scopes made of whatever was given
        raise source.fail(entry.position, str(error) or type(error).__name__) from None


def _node(type_name: str, children: list[Any], aux: str = "") -> Opaque:
    if not (isinstance(type_name, str) and isinstance(children, list) and isinstance(aux, str)):
        raise ValueError("a node is written Node('type', [children], 'what is its own')")
    return Opaque(type_name, aux, tuple(children))


_NAMES: dict[str, Any] = {"Node": _node}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a text in quotes is needed here")
    return value


def _structure(value: Any) -> tuple[Any, tuple[str, ...]]:
    names, tree = jax.tree.flatten(value)
    if not all(isinstance(name, str) for name in names):
        raise ValueError("at each value's place in its structure stands its name, in quotes")
    return tree, tuple(names)


def _arguments(value: Any) -> tuple[Any, tuple[str, ...]]:
    if not (isinstance(value, tuple) and [*map(type, value)] == [tuple, dict]):
        raise ValueError("arguments are written ((positional, ...), {'keyword': ..., ...})")
    return _structure(value)


def _files(value: Any) -> Mapping[str, str]:
    if not isinstance(value, dict) or not all(
        isinstance(text, str) and text.isprintable() for pair in value.items() for text in pair
    ):
        raise ValueError("files are written {'name in comments': 'path', ...}")
    return value


def _axis_env(value: Any) -> tuple[tuple[Any, int], ...]:
    if not isinstance(value, tuple) or not all(
        isinstance(axis, tuple) and len(axis) == 2 and type(axis[1]) is int and axis[1] > 0
        for axis in value
    ):
        raise ValueError("an axis environment is written (('name', size), ...)")
    with jaxcompat.axes_bound(value):
        return value


def _meshes(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not all(
        isinstance(mesh, jax.sharding.AbstractMesh) for mesh in value.values()
    ):
        raise ValueError("meshes are written {'name in types': AbstractMesh(...), ...}")
    return value


def _scope(value: Any) -> Any:
    return None if value is None else jax.export.SymbolicScope(value)
