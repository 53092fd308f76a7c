"""The header of a `.jaxpr` file as values: what a Program knows besides its jaxpr.

Argument and result structures are written with each value's name at its place, and read so:
`({'w': "params['w']"}, 'x')` is a tree with two leaves and their names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.errors import ProgramFileError, did_you_mean
from jaxprtool.formats.jaxpr import values
from jaxprtool.formats.jaxpr.jit_entry import jit_entry, read_jit_entry
from jaxprtool.formats.jaxpr.source import Expression, Source
from jaxprtool.formats.jaxpr.types import TypeWriter
from jaxprtool.ir.program import Program
from jaxprtool.ir.trees import Tree, describe

#: The entries that every file has, and the others.
REQUIRED = ("jax", "name", "arguments", "results")
OPTIONAL = ("constants", "files", "axis_env", "mesh", "meshes", "symbols", "jit")


#: Lines of a header are broken where they would be longer.
_WIDTH = 100


# --- writing --------------------------------------------------------------------------------------


def header_text(
    program: Program,
    constants: str | None,
    files: Mapping[str, str],
    types: TypeWriter,
    usual_mesh: Any,
) -> str:
    """The header of a program's file, after its first line. Raises values.Unwritable."""
    entries = {
        "jax": repr(jax.__version__),
        **({"constants": repr(constants)} if constants else {}),
        "name": repr(program.name),
        "arguments": structure_text(program.in_tree, program.arg_names),
        "results": structure_text(program.out_tree, program.out_names),
    }
    if program.axis_env:
        entries["axis_env"] = values.encode(tuple(program.axis_env))
    if program.jit is not None:
        entries["jit"] = _table(jit_entry(program, program.jit))
    if not usual_mesh.empty:
        entries["mesh"] = values.encode(usual_mesh)
    if types.meshes:
        meshes = {name: values.encode(mesh) for mesh, name in types.meshes.items()}
        entries["meshes"] = _table(meshes)
    if types.scope is not None:
        entries["symbols"] = values.encode(jaxcompat.symbolic_constraints(types.scope))
    if files:
        entries["files"] = _table({name: repr(path) for name, path in files.items()})
    return "".join(f"{name} = {text}\n" for name, text in entries.items())


def _table(entries: Mapping[str, str]) -> str:
    items = [f"{name!r}: {text}" for name, text in entries.items()]
    return _bracketed("{", items, "}", 0)


def structure_text(tree: Any, names: tuple[str, ...]) -> str:
    """A tree structure with a name at each leaf."""
    leaves = iter(map(repr, names))
    return _tree_text(describe(tree), leaves, 0)


def _tree_text(tree: Tree, leaves: Iterator[str], indent: int) -> str:
    if tree.kind == "leaf":
        return next(leaves)
    if tree.kind in ("none", "held"):
        return values.encode(tree.held)
    children = [_tree_text(child, leaves, indent + 4) for child in tree.children]
    if tree.kind in ("tuple", "list"):
        opening, closing = ("(", ")") if tree.kind == "tuple" else ("[", "]")
        alone = tree.kind == "tuple" and len(children) == 1
        return _bracketed(opening, children, f",{closing}" if alone else closing, indent)
    if tree.keys or tree.kind != "custom":
        items = [f"{key!r}: {child}" for key, child in zip(tree.keys, children, strict=True)]
        inside = _bracketed("{", items, "}", indent)
    else:
        inside = _bracketed("[", children, "]", indent)
    if tree.kind == "custom":
        return f"Node({tree.type_name!r}, {inside}" + (f", {tree.aux!r})" if tree.aux else ")")
    return inside if tree.kind == "dict" else f"{tree.kind}({inside})"


def _bracketed(opening: str, items: list[str], closing: str, indent: int) -> str:
    """Items in brackets: on one line if there is room, else each on a line of its own."""
    flat = f"{opening}{', '.join(items)}{closing}"
    if indent + len(flat) <= _WIDTH and "\n" not in flat:
        return flat
    lines = "".join(f"\n{' ' * (indent + 4)}{item}," for item in items)
    return f"{opening}{lines}\n{' ' * indent}{closing.removeprefix(',')}"


# --- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Header:
    """The entries of a header, checked; a structure is a tree and the names of its leaves."""

    name: str
    constants: str | None
    arguments: tuple[Any, tuple[str, ...]]
    results: tuple[Any, tuple[str, ...]]
    files: Mapping[str, str]
    axis_env: tuple[tuple[Any, int], ...]
    mesh: Any
    meshes: Mapping[str, Any]
    scope: Any
    jit: Mapping[str, Any] | None


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
        constants=read("constants", _file_name),
        arguments=read("arguments", _arguments),
        results=read("results", _structure),
        files=read("files", _files, {}),
        axis_env=read("axis_env", _axis_env, ()),
        mesh=read("mesh", _mesh, jaxcompat.CONTEXT_DEFAULTS["cur_abstract_mesh"]),
        meshes=read("meshes", _meshes, {}),
        scope=read("symbols", _scope),
        jit=read("jit", read_jit_entry) if "jit" in entries else None,
    )


def _entry(source: Source, entry: Expression, convert: Callable[[Any], Any]) -> Any:
    node = entry.parse(source)
    try:
        return convert(values.decode(node))
    except values.Unreadable as error:
        raise source.fail(entry.position_of(error.node), str(error)) from None
    except ProgramFileError:
        raise
    except Exception as error:  # of any class, from trees and scopes made of whatever was given
        raise source.fail(entry.position, str(error) or type(error).__name__) from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a text in quotes is needed here")
    return value


def _file_name(value: Any) -> str | None:
    if value is None:
        return None
    if "\0" in _text(value) or value in ("", ".", "..") or os.path.basename(value) != value:
        raise ValueError("the name of a file in the same folder is needed here, in quotes")
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


def _mesh(value: Any) -> Any:
    if not isinstance(value, jax.sharding.AbstractMesh):
        raise ValueError("a mesh is written AbstractMesh((2,), ('x',), axis_types=...)")
    return value


def _meshes(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not all(
        isinstance(mesh, jax.sharding.AbstractMesh) for mesh in value.values()
    ):
        raise ValueError("meshes are written {'name in types': AbstractMesh(...), ...}")
    return value


def _scope(value: Any) -> Any:
    return None if value is None else jax.export.SymbolicScope(value)
