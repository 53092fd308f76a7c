"""Find the names of `jax._src` that `jaxprtool.jaxcompat` uses, in its code."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOM = Path(__file__).parents[2] / "jaxprtool" / "jaxcompat"

_PRIVATE = "jax._src"


def used_names() -> dict[str, list[str]]:
    """Return the files that use each name of `jax._src`, by the name's path below it."""
    files: dict[str, set[str]] = defaultdict(set)
    for path in sorted(ROOM.glob("*.py")):
        for name in _names(ast.parse(path.read_text())):
            files[name].add(path.name)
    return {name: sorted(files[name]) for name in sorted(files)}


def _names(tree: ast.Module) -> Iterator[str]:
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _is_private(node.module):
            where = str(node.module).removeprefix(_PRIVATE).removeprefix(".")
            for alias in node.names:
                name = f"{where}.{alias.name}".removeprefix(".")
                if _is_module(name):
                    modules[alias.asname or alias.name] = name
                else:
                    yield name
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=base), attr=name) if base in modules:
                if not name.startswith("__"):
                    yield f"{modules[base]}.{name}"
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"),
                args=[ast.Name(id=base), ast.Constant(value=name), *_],
            ) if base in modules:
                yield f"{modules[base]}.{name}"


def _is_private(module: str | None) -> bool:
    return module is not None and f"{module}.".startswith(f"{_PRIVATE}.")


def _is_module(name: str) -> bool:
    """Return True if an imported name is a module. A module of jaxlib counts as one name."""
    last = name.rpartition(".")[2]
    return last.islower() and last[0] != "_" and not name.startswith("lib.") and last not in _LEAVES


#: Names in lower case that are imported on their own and are not modules.
_LEAVES = frozenset({"default_tolerance", "tracing_registry"})
