"""The expressions in the user's code whose values `checkpoint_name` can name.

    hidden = jnp.tanh(x @ w)        x @ w, and jnp.tanh(x @ w)

The values of an expression are those that equations of other expressions read. Values that a
library computes within one expression of the user's code cannot be named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxprtool.ir.basics.caches import cached_method
from jaxprtool.ir.core.equations import equations, is_inexact
from jaxprtool.ir.core.regions import Regions, regions
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.dataflow.dataflow import DataFlow
from jaxprtool.ir.source.frames import Frames
from jaxprtool.ir.source.source_names import SourceNames, range_of
from jaxprtool.jaxcompat import DropVar, Jaxpr, JaxprEqn, Var
from jaxprtool.jaxcompat.source_locations import UserFrame


def nameable_values(jaxpr: Jaxpr, frames: Frames) -> dict[UserFrame, list[Var]]:
    """Return the values of each expression of the user's code in a jaxpr, at every depth.

    Only computed values of inexact dtypes are returned, without values that are only moved, values
    inside a custom derivative, whose rule replaces them, values that `checkpoint_name` has named,
    and values that only such an equation reads.
    """
    return _ExpressionSearch(jaxpr, frames).found


class Named(NamedTuple):
    """The name for an expression's value.

    Attributes:
        name: The name.
        source: The location of the expression: `model.py:13`.
        code: The expression; "" if the file does not exist any more.
    """

    name: str
    source: str
    code: str


def named(
    found: Mapping[UserFrame, Sequence[Var]], primitives: Mapping[Var, str], frames: Frames
) -> list[Named]:
    """Return names for the values of expressions: from the source if possible, else the primitive.

    Several expressions may have the same name.

    Args:
        found: The values of each expression.
        primitives: The primitive that computes each value.
        frames: Returns the names of files.
    """
    names = SourceNames()
    places = set(map(range_of, found))
    called = []
    for frame, values in found.items():
        name = names.target(frame) or names.called(frame)
        if name is None and names.returned(frame, places - {range_of(frame)}):
            name = _function(frame)
        called.append(name or primitives[values[0]])
    texts = (names.text(frame) or "" for frame in found)
    sources = map(frames.text, found)
    return list(map(Named, called, sources, texts))


def _function(frame: UserFrame) -> str | None:
    """Return the function of a frame, or its class: `Block` for `Block.__call__`."""
    names = [name for name in frame.function.split(".") if name.isidentifier()]
    return next((name for name in reversed(names) if not name.startswith("__")), None)


class _ExpressionSearch:
    def __init__(self, jaxpr: Jaxpr, frames: Frames) -> None:
        self._frames = frames
        self._flow = DataFlow(jaxpr)
        self.found: dict[UserFrame, list[Var]] = {}
        todo, seen = [jaxpr], {jaxpr}
        for body in todo:
            for eqn in body.eqns:
                for inner in self._look_at(body, eqn):
                    if inner not in seen:
                        seen.add(inner)
                        todo.append(inner)

    def _look_at(self, jaxpr: Jaxpr, eqn: JaxprEqn) -> Sequence[Jaxpr]:
        """Add the values of an equation that can be named, and return the bodies to visit."""
        frame, like = self._frame(eqn), traits(eqn)
        if frame is not None and not like.moves and not like.names_value:
            for var in eqn.outvars:
                if type(var) is not DropVar and is_inexact(var) and self._leaves(jaxpr, var, frame):
                    self.found.setdefault(frame, []).append(var)
        held = None if like.custom_derivative else regions(eqn)
        return () if held is None or not self._opens(held) else held.jaxprs

    def _frame(self, eqn: JaxprEqn) -> UserFrame | None:
        location = self._frames.location(eqn)
        return (
            location.frame
            if location is not None and self._frames.is_users(location.frame.file)
            else None
        )

    def _leaves(self, jaxpr: Jaxpr, var: Var, frame: UserFrame) -> bool:
        """Return True if a value is a result, or another expression reads it, except to name it."""
        readers = (jaxpr.eqns[position] for position in self._flow.readers(jaxpr, var))
        return bool(self._flow.results(jaxpr, var)) or any(
            self._frame(eqn) != frame and not traits(eqn).names_value for eqn in readers
        )

    def _opens(self, held: Regions) -> bool:
        """Return False for a call whose equations all belong to one expression."""
        if held.kind != "call":
            return True
        (body,) = held.jaxprs
        return self._has_several(body)

    @cached_method
    def _has_several(self, body: Jaxpr) -> bool:
        """Return True if the equations of a body belong to several expressions."""
        return len(set(map(self._frame, equations(body)))) > 1
