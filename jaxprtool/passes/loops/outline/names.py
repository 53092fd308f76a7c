"""The names of shared bodies, and the source locations of them and their calls.

A body has the name of the scope that most of its equations are in, without the number that
distinguishes copies (`layer` for `layer_3`); without a scope, the name of the user's function that
they were traced in, or of the called class. Backward equations decide if there are many of them,
and the name then has a suffix. The common part of the name stack of a copy goes to the call, the
rest to the body, as in every call.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.loops.outline.bodies import Item, Repeated, source_of_item
from jaxprtool.passes.loops.outline.origin import calls, scopes

#: The number of equations of a long body whose scope and source are considered.
_ASKED = 64

#: The share of the equations with a scope, or function, that must be in the one that names them.
_MOST = 0.75

#: The share of the equations that must have a scope, or function.
_ENOUGH = 0.5

#: The share of backward equations from which they decide.
_SOME = 0.25


class Names:
    """The names that are used in one program."""

    def __init__(self, taken: Iterable[str]):
        self._taken = set(taken)

    def name(self, copies: Sequence[Sequence[Item]]) -> str:
        """Return a unique name for the shared body of some copies."""
        like = [item.like if isinstance(item, Repeated) else item for item in copies[0]]
        like = like[:: max(1, len(like) // _ASKED)]
        backward = [eqn for eqn in like if "transpose(" in jaxcompat.name_stack(eqn)]
        if is_backward := len(backward) > _SOME * len(like):
            like = backward
        found = _common([*map(scopes, like)]) or _common([*map(_functions, like)]) or ""
        name = re.sub(r"\W+", "_", re.sub(r"[_\d]+$", "", found)).strip("_") or "repeated"
        return self.unique(name + "_transpose" * is_backward)

    def unique(self, name: str) -> str:
        """Return a name that is not in use yet, and reserve it."""
        found, number = name, 1
        while found in self._taken:
            found, number = f"{name}_{number}", number + 1
        self._taken.add(found)
        return found

    def sources(self, copies: Sequence[Sequence[Item]]) -> tuple[list[Any], list[Any]]:
        """Return the source of each item of the body, and of the call of each copy."""
        infos = [[source_of_item(item) for item in copy] for copy in copies]
        depths = [jaxcompat.common_scope(copy) for copy in infos]
        inside = [jaxcompat.in_scope(info, depths[0], None) for info in infos[0]]
        calls = [
            jaxcompat.in_scope(copy[0], 0, depth) for copy, depth in zip(infos, depths, strict=True)
        ]
        return inside, calls


def _functions(eqn: JaxprEqn) -> list[str]:
    """Return the names of the user's functions that an equation was traced in, outermost first."""
    return [name for name, _ in calls(eqn)]


def _common(paths: Sequence[Sequence[str]]) -> str | None:
    """Return the last element of the longest path that most paths begin with; None if none.

    Scopes of a few equations, such as those that `jnp.einsum` opens, name no body.
    """
    known = [path for path in paths if path]
    if len(known) < _ENOUGH * len(paths):
        return None
    counts = Counter(tuple(path[:i]) for path in known for i in range(1, len(path) + 1))
    most = [path for path, n in counts.items() if n >= _MOST * len(known)]
    named = [path for path in most if re.match("[A-Za-z]", path[-1])]
    return max(named, key=len)[-1] if named else None
