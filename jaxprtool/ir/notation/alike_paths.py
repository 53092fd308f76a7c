"""Paths of pytrees that differ in indices alone, as one: `blocks[0..5].attn.kernel`."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise, product
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

#: An index in a path: of a list, `[3]`, or in the name of a submodule, `Dense_3`.
_INDEX = re.compile(r"(?<=\[)\d+(?=\])|(?<=_)\d+(?![\w])")

#: The most indices that are listed one by one.
_LISTED = 4


class Alike(NamedTuple, Generic[T]):
    """Items whose paths differ in indices alone.

    Attributes:
        path: The path with the indices of all items.
        items: The items, in their order.
    """

    path: str
    items: Sequence[T]


def alike(
    items: Iterable[T], path: Callable[[T], str], kind: Callable[[T], Hashable]
) -> list[Alike[T]]:
    """Group items whose paths differ in indices alone, and which are of one kind.

    A group has all combinations of its indices, so that its path says exactly which items it has.

    Args:
        items: The items.
        path: Returns the path of an item, such as `blocks[3].attn.kernel`.
        kind: Returns what items of a group have in common, such as their type.

    Returns:
        The groups, in the order of their first items. An item without a like is a group of its own.
    """
    found: dict[Hashable, list[T]] = {}
    for item in items:
        found.setdefault((_INDEX.sub("#", path(item)), kind(item)), []).append(item)
    return [group for members in found.values() for group in _groups(members, path)]


def _groups(members: list[T], path: Callable[[T], str]) -> list[Alike[T]]:
    if len(members) == 1:
        return [Alike(path(members[0]), members)]
    indices = [tuple(map(int, _INDEX.findall(path(item)))) for item in members]
    axes = [sorted(set(axis)) for axis in zip(*indices, strict=True)]
    if sorted(indices) != list(product(*axes)):
        return [Alike(path(item), [item]) for item in members]
    texts = iter(map(_text, axes))
    return [Alike(_INDEX.sub(lambda _: next(texts), path(members[0])), members)]


def _text(axis: list[int]) -> str:
    """Return indices as text: `3`, `0..5`, `0,2,4`."""
    first, last = axis[0], axis[-1]
    if len(axis) == 1:
        return str(first)
    if last - first + 1 == len(axis):
        return f"{first}..{last}"
    steps = {second - first for first, second in pairwise(axis)}
    if len(axis) > _LISTED and len(steps) == 1:
        return f"{first}..{last}:{steps.pop()}"
    return ",".join(map(str, axis))
