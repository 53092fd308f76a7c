"""Name the flat arguments and results of a program by readable paths."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

import jax


def paths(root: str, value: object) -> tuple[str, ...]:
    """Return the path of each leaf of a pytree with the name `root`: `result[0]['w']`."""
    leaves = jax.tree_util.tree_flatten_with_path(value)[0]
    return unique([root + jax.tree_util.keystr(path) for path, _ in leaves])


def unique(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names, with a number appended to each that occurred before: `x`, `x_2`."""
    seen: set[str] = set()
    numbers: dict[str, int] = {}  # next by name; a search is slow for thousands of equal names
    result = []
    for name in names:
        chosen, number = name, numbers.get(name, 1)
        while chosen in seen:
            number += 1
            chosen = f"{name}_{number}"
        numbers[name] = number
        seen.add(chosen)
        result.append(chosen)
    return tuple(result)


def path_steps(path: str) -> list[str]:
    """Return the keys and attributes in a path: `first` and `w` for `params['first'].w`.

    The list is empty for a text that is not a path.
    """
    try:
        node = ast.parse(path, mode="eval").body
    except (SyntaxError, RecursionError, ValueError):
        return []
    steps: list[str] = []
    while True:
        match node:
            case ast.Attribute():
                steps.append(node.attr)
            case ast.Subscript(slice=ast.Constant(value=key)):
                steps.append(str(key))
            case ast.Name():
                return steps[::-1]
            case _:
                return []
        node = node.value


#: The numbers that distinguish the layers of a pytree.
_NUMBER = re.compile(r"(\d+)")


def without_numbers(path: str) -> str:
    """Return a path with `*` for each number, as it is for all layers: `params['Block_*']['w']`."""
    return _NUMBER.sub("*", path)


def common_path(names: Sequence[str]) -> str:
    """Return paths that differ only in numbers as one, with `*` for the numbers that differ."""
    parts = zip(*map(_NUMBER.split, names), strict=True)
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in parts)
