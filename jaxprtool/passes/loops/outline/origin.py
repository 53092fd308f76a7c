"""The origin of an equation in the user's program: name scopes, and calls of functions.

Where copies of a segment are consecutive, they can be cut at any period. The period that begins
where a layer does is the clearest: there the scope changes, or the source location goes back from
the last line of a function to its first.
"""

from __future__ import annotations

import re

from jaxprtool import jaxcompat
from jaxprtool.jaxcompat import JaxprEqn

_TRANSFORMATIONS = frozenset({"", "jvp", "transpose", "vmap", "jit", "rematted_computation"})


def scopes(eqn: JaxprEqn) -> list[str]:
    """Return the name scopes of an equation, without the transformations around them."""
    parts = re.split(r"[/()]", jaxcompat.name_stack(eqn))
    return [part for part in parts if part not in _TRANSFORMATIONS]


def calls(eqn: JaxprEqn) -> list[tuple[str, int]]:
    """Return the user's functions that an equation was traced in, outermost first, with lines.

    A special method, as `__call__`, has the name of its class.
    """
    found = []
    for frame in reversed(jaxcompat.user_frames(eqn)):
        *outer, name = frame.function.split(".")
        found.append((outer[-1] if outer and name.startswith("__") else name, frame.line))
    return found


def nearness(before: JaxprEqn, after: JaxprEqn) -> tuple[int, int, int]:
    """Return how near two consecutive equations are to each other; the smallest is the best cut.

    Returns:
        The number of common scopes, the number of common calls, and the negated distance of their
        source lines.
    """
    path, other = calls(before), calls(after)
    depth = _shared(path, other)
    step = 0
    if depth < min(len(path), len(other)):
        step = abs(path[depth][1] - other[depth][1])
    return _shared(scopes(before), scopes(after)), depth, -step


def _shared(
    path: list[str] | list[tuple[str, int]], other: list[str] | list[tuple[str, int]]
) -> int:
    """Return the length of the common prefix of two paths."""
    depth = 0
    while depth < min(len(path), len(other)) and path[depth] == other[depth]:
        depth += 1
    return depth
