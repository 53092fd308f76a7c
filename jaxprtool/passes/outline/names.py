"""What shared bodies are called, and where they and their calls say that they come from.

A body bears the name of the scope that most of its equations are in, less the number that tells
copies apart (`layer` for `layer_3`); without one, that of the user's function that they were traced
in. The part of the name stack that a whole copy shares is the call's, the rest is the body's, as of
every call.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.outline.bodies import Item, Repeated

#: Of longer bodies only so many equations are asked for their scope and source.
_ASKED = 64

#: The share of a body that has to be in the scope, or function, which it is named after.
_MOST = 0.75


class Names:
    """The names that are taken in one program."""

    def __init__(self, taken: Iterable[str]):
        self._taken = set(taken)

    def name(self, copies: Sequence[Sequence[Item]]) -> str:
        """Return a name for the shared body of some copies which no other body has."""
        like = [item.like if isinstance(item, Repeated) else item for item in copies[0]]
        like = like[:: max(1, len(like) // _ASKED)]
        stacks = [jaxcompat.name_stack(eqn) for eqn in like]
        scope = _common([_scopes(stack) for stack in stacks])
        if scope is None:
            frames = (jaxcompat.user_frames(eqn) for eqn in like)
            scope = _common(
                [[f.function.rsplit(".", 1)[-1] for f in found[::-1]] for found in frames]
            )
        name = re.sub(r"\W+", "_", re.sub(r"[_\d]+$", "", scope or "")).strip("_") or "repeated"
        if sum("transpose(" in stack for stack in stacks) > len(stacks) / 2:
            name += "_transpose"
        return self._unique(name)

    def _unique(self, name: str) -> str:
        found, number = name, 1
        while found in self._taken:
            found, number = f"{name}_{number}", number + 1
        self._taken.add(found)
        return found

    def sources(self, copies: Sequence[Sequence[Item]]) -> tuple[list[Any], list[Any]]:
        """Return the source of each item of the body, and of the call of each copy."""
        infos = [[_source(item) for item in copy] for copy in copies]
        depths = [jaxcompat.common_scope(copy) for copy in infos]
        inside = [jaxcompat.in_scope(info, depths[0], None) for info in infos[0]]
        calls = [
            jaxcompat.in_scope(copy[0], 0, depth) for copy, depth in zip(infos, depths, strict=True)
        ]
        return inside, calls


def _source(item: Item) -> Any:
    return item.source if isinstance(item, Repeated) else item.source_info


def _functions(eqn: JaxprEqn) -> list[str]:
    """Return the user's functions that an equation was traced in, the outermost first."""
    return [frame.function.rsplit(".", 1)[-1] for frame in jaxcompat.user_frames(eqn)[::-1]]


def _scopes(stack: str) -> list[str]:
    """Return the names of a name stack, without the transformations around them."""
    return [part for part in re.split(r"[/()]", stack) if part not in _TRANSFORMATIONS]


_TRANSFORMATIONS = frozenset({"", "jvp", "transpose", "vmap", "jit", "rematted_computation"})


def _common(paths: Sequence[Sequence[str]]) -> str | None:
    """Return the end of the longest path that most paths begin with; None if there is none."""
    counts = Counter(tuple(path[:i]) for path in paths for i in range(1, len(path) + 1))
    most = [path for path, n in counts.items() if n >= _MOST * len(paths)]
    named = [path for path in most if re.search("[A-Za-z]", path[-1]) and path[-1][0] != "<"]
    return max(named, key=len)[-1] if named else None
