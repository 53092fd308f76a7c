"""The places of equations that a user can name: source lines and scopes.

A place is the text that reports show: `model.py:30`, or `GPT/Block_0/Attention_0`. An equation in a
body belongs to the line and the scope of its enclosing equations if it has none of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from jaxprtool import jaxcompat
from jaxprtool.errors import PipelineError, did_you_mean
from jaxprtool.ir.basics.quantities import some
from jaxprtool.ir.core.equations import all_jaxprs
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.source.frames import BEHIND, frames_now
from jaxprtool.ir.source.scopes import ScopePaths
from jaxprtool.jaxcompat import JaxprEqn

#: The kinds of places.
By: TypeAlias = Literal["line", "scope"]

#: An equation, preceded by those whose bodies contain it, the outermost first.
EquationPath: TypeAlias = tuple[JaxprEqn, ...]

#: Whether a name, split at slashes, stands for a place.
_Matches: TypeAlias = Callable[[Sequence[str], Sequence[str]], bool]

#: The number of places to list if none matches.
_SHOWN = 8


def places_of(program: Program, by: By) -> Callable[[EquationPath], str]:
    """Return a function from an equation to its place; "" if that is unknown."""
    if by == "line":
        frames = frames_now(program.roots, chosen=False)
        return lambda path: frames.line_of(path).partition(BEHIND)[0]
    scopes = ScopePaths(all_jaxprs(jaxcompat.open_jaxpr(program.jaxpr)), program.roots)
    return lambda path: "/".join(scopes.of(path))


class KeptPlaces:
    """Decides which equations are at one of the places that a user names.

    Args:
        program: The program.
        names: Lines, with as many folders as the user likes (`model.py:30`), and scopes, by the end
            of their path (`Block_0/Attention_0`). The scopes in a named scope belong to it.
    """

    def __init__(self, program: Program, names: Sequence[str]) -> None:
        lines = [name for name in names if re.search(r":\d+$", name)]
        scopes = [name for name in names if name not in lines]
        self._program = program
        kinds: list[tuple[By, list[str], _Matches]] = [
            ("line", lines, _is_end),
            ("scope", scopes, _holds),
        ]
        self._readers = [
            (places_of(program, by), [name.split("/") for name in named], matches)
            for by, named, matches in kinds
            if named
        ]
        self._unmatched = dict.fromkeys(names)
        self._seen: dict[str, bool] = {}

    def __call__(self, path: EquationPath) -> bool:
        """Return True if an equation is at one of the places."""
        kept = False
        for read, names, matches in self._readers:
            place = read(path)
            if place not in self._seen:
                found = [name for name in names if matches(name, place.split("/"))]
                for name in found:
                    self._unmatched.pop("/".join(name), None)
                self._seen[place] = bool(found)
            kept |= self._seen[place]
        return kept

    def require_matches(self) -> None:
        """Raise PipelineError if no equation was at one of the places."""
        if not self._unmatched:
            return
        name, known = next(iter(self._unmatched)), [place for place in self._seen if place]
        there = f"it computes floats in: {some(known, _SHOWN)}" if known else None
        raise PipelineError(
            f"mixed_precision: {self._program.name} computes no floats in '{name}'",
            did_you_mean(name, known) or there,
        )


def _is_end(name: Sequence[str], place: Sequence[str]) -> bool:
    return list(place[-len(name) :]) == list(name)


def _holds(name: Sequence[str], place: Sequence[str]) -> bool:
    """Return True if a scope ends a path of scopes, or one around it."""
    count = len(name)
    return any(list(place[i : i + count]) == list(name) for i in range(len(place) - count + 1))
