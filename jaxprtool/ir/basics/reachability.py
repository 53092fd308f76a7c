"""What can be reached in a graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def reachable(starts: Iterable[T], successors: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yield what can be reached from some nodes, these included, each once.

    Args:
        starts: The nodes to start from.
        successors: Returns the nodes that edges lead to from one.
    """
    todo = list(dict.fromkeys(starts))
    seen = set(todo)
    while todo:
        each = todo.pop()
        yield each
        new = [node for node in dict.fromkeys(successors(each)) if node not in seen]
        seen.update(new)
        todo += new
