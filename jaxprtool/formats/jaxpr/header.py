"""The header of a `.jaxpr` file as values: the parts of a Program besides its jaxpr.

Argument and result structures are written with the name of each leaf in its place: `({'w':
"params['w']"}, 'x')` is a tree with two leaves and their names. The entry `jit` has the options of
`jax.jit`, by the names of arguments and results; options with default values are left out, down to
`jit = {}`:

    jit = {
        'donated': ("params['b']", "params['w']"),
        'in': {'x': NamedSharding(mesh=..., spec=P('data',))},
        'compiler_options': {'xla_cpu_enable_fast_math': True},
    }
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Sharding
from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat
from jaxprtool.errors import ProgramFileError, did_you_mean
from jaxprtool.formats.jaxpr import values
from jaxprtool.formats.jaxpr.source import Expression, FileText
from jaxprtool.formats.jaxpr.types import NO_MESH, TypeReader, TypeWriter
from jaxprtool.ir.programs.jit_options import JitOptions
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.trees import Tree, describe
from jaxprtool.ir.shapes.bounds import Bound, LengthsBound, SizeBound

#: The maximal width of a header line.
_WIDTH = 100


# --- writing --------------------------------------------------------------------------------------


def header_text(
    program: Program,
    constants: str | None,
    tables: Mapping[str, Mapping[str, str]],
    types: TypeWriter,
    usual_mesh: AbstractMesh,
) -> str:
    """Return the header of a program's file, after its first line. Raises values.Unwritable.

    Args:
        program: The program.
        constants: The name of its constants file, if it has one.
        tables: The entries that are tables of texts, written if they are not empty.
        types: The writer of its types.
        usual_mesh: The abstract mesh of its equations.
    """
    entries = {
        "jax": repr(jax.__version__),
        **({"constants": repr(constants)} if constants else {}),
        "name": repr(program.name),
        "arguments": _structure_text(program.in_tree, program.arg_names),
        "results": _structure_text(program.out_tree, program.out_names),
    }
    if program.axis_env:
        entries["axis_env"] = values.encode(tuple(program.axis_env))
    if program.bounds:
        entries["bounds"] = _table({name: _bound(each, types) for name, each in program.bounds})
    if program.jit is not None:
        entries["jit"] = _table(_jit_parts(program, program.jit))
    if not usual_mesh.empty:
        entries["mesh"] = values.encode(usual_mesh)
    if types.meshes:
        entries["meshes"] = _table({name: mesh for mesh, name in types.meshes.items()})
    if types.scope is not None:
        entries["symbols"] = values.encode(
            tuple(c.text for c in jaxcompat.symbolic_constraints(types.scope))
        )
    entries |= {name: _table(table) for name, table in tables.items() if table}
    return "".join(f"{name} = {text}\n" for name, text in entries.items())


def _bound(bound: Bound, types: TypeWriter) -> Any:
    if isinstance(bound, SizeBound):
        least = {"at_least": bound.at_least, "at_most": bound.at_most}
        return least if bound.at_least else bound.at_most
    rows = bound.rows
    parts: dict[str, Any] = {
        "rows": types.dimension(rows) if jaxcompat.is_symbolic_dimension(rows) else str(rows)
    }
    if bound.longest is not None:
        parts["longest"] = bound.longest
    if bound.shortest:
        parts["shortest"] = bound.shortest
    return {**parts, "left_over": True} if bound.left_over else parts


def _jit_parts(program: Program, options: JitOptions) -> dict[str, Any]:
    arguments = options.of_arguments(program.arguments)
    results = options.of_results(program.results)
    parts = {
        "donated": tuple(a.name for a in arguments if a.donated),
        "in": {a.name: a.placement for a in arguments if a.placement is not None},
        "out": {r.name: r.placement for r in results if r.placement is not None},
        "compiler_options": dict(options.compiler_options),
        "keep_unused": options.keep_unused,
        "inline": jaxcompat.inline_as_word(options.inline),
    }
    return {name: value for name, value in parts.items() if value}


def _table(entries: Mapping[str, Any]) -> str:
    # In a tuple, since a single text may be a bare word.
    items = [f"{name!r}: {values.encode((value,))[1:-2]}" for name, value in entries.items()]
    return _bracketed("{", items, "}", 0)


def _structure_text(tree: PyTreeDef, names: tuple[str, ...]) -> str:
    """Return a tree structure with a name at each leaf."""
    return _tree_text(describe(tree), map(repr, names), 0)


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
    """Return items in brackets: on one line if they fit, else one item per line."""
    flat = f"{opening}{', '.join(items)}{closing}"
    if indent + len(flat) <= _WIDTH and "\n" not in flat:
        return flat
    lines = "".join(f"\n{' ' * (indent + 4)}{item}," for item in items)
    return f"{opening}{lines}\n{' ' * indent}{closing.removeprefix(',')}"


# --- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Header:
    """The checked entries of a header; a structure is a tree and the names of its leaves."""

    jax: str
    name: str
    arguments: tuple[PyTreeDef, tuple[str, ...]]
    results: tuple[PyTreeDef, tuple[str, ...]]
    constants: str | None = None
    foreign: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, str] = field(default_factory=dict)
    axis_env: tuple[tuple[Hashable, int], ...] = ()
    bounds: Mapping[str, Any] = field(default_factory=dict)
    mesh: AbstractMesh = NO_MESH
    meshes: Mapping[str, AbstractMesh] = field(default_factory=dict)
    symbols: Any = None
    jit: Mapping[str, Any] | None = None


def read_header(source: FileText, entries: Mapping[str, Expression]) -> Header:
    """Return the header of a file. Raises ProgramFileError."""
    for name, entry in entries.items():
        if name not in _READERS:
            hint = did_you_mean(name, _READERS)
            raise source.fail(entry.position, f"unknown header entry '{name}'", hint)
    for name in REQUIRED:
        if name not in entries:
            end = max((e.position + len(e.text) for e in entries.values()), default=0)
            raise source.fail(end, f"the header has no entry '{name}'")
    return Header(**{name: _read(source, entry, name) for name, entry in entries.items()})


def _read(source: FileText, entry: Expression, name: str) -> Any:
    node = entry.parse(source)
    try:
        return _READERS[name](values.decode(node))
    except values.Unreadable as error:
        raise source.fail(entry.position_of(error.node), str(error)) from None
    except ProgramFileError:
        raise
    except Exception as error:  # trees and scopes made of invalid data may raise any class
        raise source.fail(entry.position, str(error) or type(error).__name__) from None


def _checked(is_good: Callable[[Any], bool], message: str) -> Callable[[Any], Any]:
    """Return a function that returns its argument, or raises ValueError with the message."""

    def check(value: Any) -> Any:
        if not is_good(value):
            raise ValueError(message)
        return value

    return check


def _is_dict(value: object, *of: type) -> bool:
    """Return True if a value is a dict from texts to values of these classes, or any."""
    return isinstance(value, dict) and all(
        isinstance(k, str) and isinstance(v, of or object) for k, v in value.items()
    )


def _is_printable(value: Any) -> bool:
    """Return True if a value is a dict of printable texts."""
    return _is_dict(value, str) and all(map(str.isprintable, chain(*value.items())))


def _is_axes(value: object) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(axis, tuple) and len(axis) == 2 and type(axis[1]) is int and axis[1] > 0
        for axis in value
    )


def _is_bound(value: object) -> bool:
    """Return True if a value is the largest size, both bounds of a size, or bounds of lengths."""
    if not isinstance(value, dict):
        return type(value) is int and value >= 0
    if value.keys() == {"at_least", "at_most"}:
        return all(type(part) is int and part >= 0 for part in value.values())
    known = {"rows": str, "longest": int, "shortest": int, "left_over": bool}
    return "rows" in value and all(type(part) is known.get(k) for k, part in value.items())


def _is_file_name(value: str) -> bool:
    return "\0" not in value and value not in ("", ".", "..") and os.path.basename(value) == value


_text = _checked(lambda value: isinstance(value, str), "expected a string in quotes")
_file_name = _checked(
    lambda value: value is None or _is_file_name(_text(value)),
    "expected the name of a file in the same folder, in quotes",
)
_checked_arguments = _checked(
    lambda value: isinstance(value, tuple) and [*map(type, value)] == [tuple, dict],
    "write arguments as ((positional, ...), {'keyword': ..., ...})",
)
_checked_axes = _checked(_is_axes, "write an axis environment as (('name', size), ...)")


def _structure(value: Any) -> tuple[PyTreeDef, tuple[str, ...]]:
    names, tree = jax.tree.flatten(value)
    if not all(isinstance(name, str) for name in names):
        raise ValueError("each leaf of the structure must be the value's name, in quotes")
    return tree, tuple(names)


def _axis_env(value: Any) -> tuple[tuple[Hashable, int], ...]:
    with jaxcompat.axes_bound(_checked_axes(value)):
        return value


def _jit(value: Any) -> dict[str, Any]:
    for name, part in _checked_jit(value).items():
        if name not in _JIT_PARTS:
            raise ValueError(f"unknown entry '{name}' of jit; available: {', '.join(_JIT_PARTS)}")
        if not _JIT_PARTS[name](part):
            raise ValueError(f"'{name}' of jit is not valid")
    return {**value, "inline": jaxcompat.inline_of_word(value.get("inline", False))}


_checked_jit = _checked(_is_dict, "write jit as {'donated': ('x',), ...}")
_JIT_PARTS: dict[str, Callable[[Any], bool]] = {
    "donated": lambda part: isinstance(part, tuple) and all(isinstance(n, str) for n in part),
    "in": lambda part: _is_dict(part, Sharding, Format),
    "out": lambda part: _is_dict(part, Sharding, Format),
    "compiler_options": _is_dict,
    "keep_unused": lambda part: isinstance(part, bool),
    "inline": lambda part: isinstance(part, bool | str),
}

#: The reader of each entry; required entries come first.
_READERS: dict[str, Callable[[Any], Any]] = {
    "jax": _text,
    "name": _text,
    "arguments": lambda value: _structure(_checked_arguments(value)),
    "results": _structure,
    "constants": _file_name,
    "foreign": _checked(
        lambda value: _is_printable(value) and all(map(str.isidentifier, value)),
        "write foreign dtypes as {'name': 'i32[]', ...}, and memory spaces as {'name': ''}",
    ),
    "modules": _checked(_is_printable, "write modules as {'primitive': 'module', ...}"),
    "files": _checked(_is_printable, "write files as {'name in comments': 'path', ...}"),
    "digests": _checked(_is_printable, "write digests as {'name in comments': 'digest', ...}"),
    "stacks": _checked(
        _is_printable, "write stacks as {'2': 'model.py:12:9-12:20 (loss) from 1', ...}"
    ),
    "axis_env": _axis_env,
    "bounds": _checked(
        lambda value: _is_dict(value) and all(map(_is_bound, value.values())),
        "write bounds as {'n': 512, 'lengths': {'rows': 'N', 'longest': 512}, ...}",
    ),
    "mesh": _checked(
        lambda value: isinstance(value, AbstractMesh),
        "write a mesh as AbstractMesh((2,), ('x',), axis_types=...)",
    ),
    "meshes": _checked(
        lambda value: _is_dict(value, AbstractMesh),
        "write meshes as {'name in types': AbstractMesh(...), ...}",
    ),
    "symbols": lambda value: None if value is None else jax.export.SymbolicScope(value),
    "jit": _jit,
}
REQUIRED = [*_READERS][:4]


def bound_of(value: Any, types: TypeReader) -> Bound:
    """Return the bound in an entry of `bounds`. Raises ValueError for rows that are not sizes."""
    if isinstance(value, int):
        return SizeBound(value)
    if "at_most" in value:
        return SizeBound(**value)
    return LengthsBound(**{**value, "rows": types.dimension(value["rows"])})


def jit_options(program: Program, parts: Mapping[str, Any]) -> JitOptions:
    """Return the options in the entry `jit` of a program. Raises ValueError for unknown names."""
    donated, placed, given = (parts.get(name, {}) for name in ("donated", "in", "out"))
    pairs = ((*donated, *placed), program.arg_names), (tuple(given), program.out_names)
    for named, known in pairs:
        for name in named:
            if name not in known:
                raise ValueError(f"jit names '{name}', which the program does not have")
    options = jaxcompat.TracedOptions(
        donated=tuple(name in donated for name in program.arg_names),
        in_placements=tuple(placed.get(name) for name in program.arg_names),
        out_placements=tuple(given.get(name) for name in program.out_names),
        compiler_options=tuple(parts.get("compiler_options", {}).items()),
        keep_unused=parts.get("keep_unused", False),
        inline=parts["inline"],
    )
    return JitOptions.from_traced(program.arguments, program.results, options)
