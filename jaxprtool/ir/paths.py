"""Name the flat arguments and results of a program by readable paths."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import jax

T = TypeVar("T")


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


#: A step of a path, however it is written: `qkv` in `['qkv']`, `.qkv` and `[qkv]`.
_STEP = re.compile(r"[^\[\]'\".]+")


def named_by_end(names: Iterable[str], end: str) -> list[str]:
    """Return the names that a user may mean by the end of a path.

    `qkv.kernel`, or `['qkv']['kernel']`, is the end of `params['blocks'][0]['qkv']['kernel']`.

    Args:
        names: Paths.
        end: One or more steps of a path.

    Returns:
        The paths that end so; if there are none, the parts of paths that do: `params['blocks']`.
    """
    names, steps = list(names), _STEP.findall(end)
    if all(map(str.isdigit, steps)):
        return []
    for candidates in (names, parts_of_paths(names)):
        each_once = dict.fromkeys(candidates)
        matches = [path for path in each_once if _STEP.findall(path)[-len(steps) :] == steps]
        if matches:
            return matches
    return []


def parts_of_paths(names: Iterable[str]) -> Iterator[str]:
    """Yield names, each followed by what precedes each of its steps."""
    for name in names:
        yield name
        for mark in re.finditer(r"[\[.]", name):
            yield name[: mark.start()]


#: The numbers that distinguish the layers of a pytree.
_NUMBER = re.compile(r"\d+")

#: The most numbers that are listed one by one.
_FEW_NUMBERS = 8


def without_numbers(path: str) -> str:
    """Return a path with `*` for each number, as it is for all layers: `params['Block_*']['w']`."""
    return _NUMBER.sub("*", path)


def common_path(names: Sequence[str]) -> str:
    """Return paths that differ only in numbers as one: `blocks[0..5].kernel`, `blocks[0,3].bias`.

    If some combinations of the numbers are missing, `*` replaces each number that differs.
    """
    numbers = [tuple(_NUMBER.findall(name)) for name in names]
    axes = [sorted(set(axis), key=int) for axis in zip(*numbers, strict=True)]
    is_whole = len(set(numbers)) == math.prod(map(len, axes))
    texts = iter([_numbers_text(axis) if is_whole or len(axis) == 1 else "*" for axis in axes])
    return _NUMBER.sub(lambda number: next(texts), names[0])


def _numbers_text(axis: Sequence[str]) -> str:
    """Return sorted numbers as text: `3`, `0..5`, `0,2,4`."""
    if len(axis) > 1 and int(axis[-1]) - int(axis[0]) + 1 == len(axis):
        return f"{axis[0]}..{axis[-1]}"
    return ",".join(axis) if len(axis) <= _FEW_NUMBERS else "*"


class Alike(NamedTuple, Generic[T]):
    """Items whose paths differ only in numbers.

    Attributes:
        path: The common path.
        items: The items, in their order.
    """

    path: str
    items: Sequence[T]


def alike(
    items: Iterable[T], path: Callable[[T], str], kind: Callable[[T], Hashable]
) -> list[Alike[T]]:
    """Group items whose paths differ only in numbers, ordered by the first item of each group.

    Args:
        items: The items.
        path: Returns the path of an item.
        kind: Returns what the items of a group have in common, such as their type.
    """
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault((without_numbers(path(item)), kind(item)), []).append(item)
    return [Alike(common_path(list(map(path, members))), members) for members in groups.values()]
