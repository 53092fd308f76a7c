"""Find the nodes of a graph that can be reached from others."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def reachable(starts: Iterable[T], successors: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yield the nodes that can be reached from some nodes, including these, each once.

    Args:
        starts: The nodes to start from.
        successors: Returns the successors of a node.
    """
    todo = list(dict.fromkeys(starts))
    seen = set(todo)
    while todo:
        each = todo.pop()
        yield each
        new = [node for node in dict.fromkeys(successors(each)) if node not in seen]
        seen.update(new)
        todo += new
