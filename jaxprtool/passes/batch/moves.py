"""Moves: equations that only lay a value out anew, by a transpose or a broadcast.

Batching makes many, to bring mapped dimensions together. Each is made once for a value, however
many equations ask for it, and one that follows another is merged with it: two transposes are one
or none, a broadcast of a broadcast is a broadcast. A move is written down when an equation needs
its result, so that one which only led to merged ones never is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import Atom, JaxprEqn, Literal, Var

Params = dict[str, Any]


def is_move(eqn: JaxprEqn) -> bool:
    """Whether an equation only lays a value out anew."""
    found = traits(eqn)
    return found.moves and found.gives == "layout" and len(eqn.invars) == 1


def _transposes(first: JaxprEqn, second: JaxprEqn) -> Params:
    before, after = first.params["permutation"], second.params["permutation"]
    return {"permutation": tuple(before[i] for i in after)}


def _broadcasts(first: JaxprEqn, second: JaxprEqn) -> Params | None:
    if first.params["sharding"] is not None or second.params["sharding"] is not None:
        return None
    before, after = (eqn.params["broadcast_dimensions"] for eqn in (first, second))
    return {**second.params, "broadcast_dimensions": tuple(after[i] for i in before)}


def _transpose_of_broadcast(first: JaxprEqn, second: JaxprEqn) -> Params | None:
    if first.params["sharding"] is not None:
        return None
    permutation = second.params["permutation"]
    dims = tuple(map(permutation.index, first.params["broadcast_dimensions"]))
    shape = second.outvars[0].aval.shape
    # A broadcast keeps the dimensions of its operand in order.
    if list(dims) != sorted(dims):
        return None
    return {**first.params, "shape": shape, "broadcast_dimensions": dims}


#: The moves that merge: the second's primitive, after the first's, to one of the primitive named.
_MERGES: dict[tuple[str, str], tuple[int, Callable[[JaxprEqn, JaxprEqn], Params | None]]] = {
    ("transpose", "transpose"): (1, _transposes),
    ("broadcast_in_dim", "broadcast_in_dim"): (1, _broadcasts),
    ("broadcast_in_dim", "transpose"): (0, _transpose_of_broadcast),
}


@dataclass(eq=False)
class Moves:
    """The moves of one new jaxpr.

    `made` has what moves have made, by number and operand, `origins` the move that made a value,
    and `waiting` those moves that are not written down yet, by what they make.
    """

    made: dict[Hashable, Atom] = field(default_factory=dict)
    origins: dict[Var, JaxprEqn] = field(default_factory=dict)
    waiting: dict[Any, JaxprEqn] = field(default_factory=dict)

    def found(self, eqn: JaxprEqn) -> None:
        """Take note of a move, which is to be written down when it is needed."""
        self.origins[eqn.outvars[0]] = self.waiting[eqn.outvars[0]] = eqn

    def moved(self, number: int, eqn: JaxprEqn) -> Atom:
        """The result of a move whose operand is a variable; moves of one number are the same."""
        asked = number, eqn.invars[0]
        if asked not in self.made:
            merged = self._merged(eqn)
            if type(merged) is JaxprEqn:
                self.found(merged)
                merged = merged.outvars[0]
            self.made[asked] = merged
        return self.made[asked]

    def _merged(self, eqn: JaxprEqn) -> JaxprEqn | Atom:
        """A move merged with the one before it, if there is one; a value if nothing is left."""
        first = self.origins.get(eqn.invars[0])
        merge = first and _MERGES.get((first.primitive.name, eqn.primitive.name))
        if first is None or not merge:
            return eqn
        params = merge[1](first, eqn)
        if params is None:
            return eqn
        source, out = first.invars[0], eqn.outvars[0]
        dims = params.get("permutation", params.get("broadcast_dimensions"))
        if dims == tuple(range(len(out.aval.shape))) and source.aval.shape == out.aval.shape:
            return source
        primitive = (first, eqn)[merge[0]].primitive
        return eqn.replace(primitive=primitive, params=params, invars=[source])

    def needed(self, atom: Var, written: list[JaxprEqn]) -> None:
        """Write down the move that makes a value, and those that it needs, before its first use."""
        eqn = self.waiting.pop(atom)
        source = eqn.invars[0]
        if type(source) is not Literal and source in self.waiting:
            self.needed(source, written)
        written.append(eqn)
