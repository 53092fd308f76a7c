"""Moves: equations that only lay a value out anew, by a transpose or a broadcast.

Batching makes many, to bring mapped dimensions together. Each is made once for a value, however
many equations ask for it, and one that follows another is merged with it: two transposes are one
or none, a broadcast of a broadcast is a broadcast. A move that only led to merged ones goes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxprtool.jaxcompat import Atom, JaxprEqn, Literal, Var

Params = dict[str, Any]


def move_key(eqn: JaxprEqn) -> Hashable:
    """A key that equations share if they are the same move; None for what is none."""
    if eqn.primitive.name not in MOVES or len(eqn.invars) != 1:
        return None
    return eqn.primitive, tuple(eqn.params.items()), eqn.ctx


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

#: The primitives that are moves.
MOVES = frozenset({"transpose", "broadcast_in_dim", "reshape", "squeeze"})


@dataclass(eq=False)
class Moves:
    """The moves of one new jaxpr.

    `made` has what moves have made, by key and operand, `origins` the move that made a value, and
    `passed` the values that a merged move has gone past.
    """

    made: dict[Hashable, Atom] = field(default_factory=dict)
    origins: dict[Var, JaxprEqn] = field(default_factory=dict)
    passed: set[Var] = field(default_factory=set)

    def found(self, eqn: JaxprEqn) -> None:
        """Take note of a move that is in the jaxpr already."""
        self.origins[eqn.outvars[0]] = eqn
        if type(eqn.invars[0]) is not Literal:
            self.made.setdefault((move_key(eqn), eqn.invars[0]), eqn.outvars[0])

    def moved(self, key: Hashable, eqn: JaxprEqn) -> tuple[Atom, JaxprEqn | None]:
        """The result of a move whose operand is a variable, and the equation that it needs yet."""
        given = eqn.invars[0]
        if (known := self.made.get((key, given))) is not None:
            return known, None
        merged = self._merged(eqn)
        needed = None
        if type(merged) is JaxprEqn:
            source = merged.invars[0]
            known = None if type(source) is Literal else self.made.get((move_key(merged), source))
            if known is None:
                self.found(merged)
                needed, known = merged, merged.outvars[0]
            merged = known
        self.made[key, given] = merged
        return merged, needed

    def _merged(self, eqn: JaxprEqn) -> JaxprEqn | Atom:
        """A move merged with the one before it, if there is one; a value if nothing is left."""
        first = self.origins.get(eqn.invars[0])
        merge = first and _MERGES.get((first.primitive.name, eqn.primitive.name))
        if first is None or not merge:
            return eqn
        params = merge[1](first, eqn)
        if params is None:
            return eqn
        self.passed.add(eqn.invars[0])
        source, out = first.invars[0], eqn.outvars[0]
        dims = params.get("permutation", params.get("broadcast_dimensions"))
        if dims == tuple(range(len(out.aval.shape))) and source.aval.shape == out.aval.shape:
            return source
        primitive = (first, eqn)[merge[0]].primitive
        return eqn.replace(primitive=primitive, params=params, invars=[source])

    def needed(self, eqns: list[JaxprEqn], results: Sequence[Atom]) -> list[JaxprEqn]:
        """The equations without the moves that nothing needs since later ones were merged."""
        if not self.passed:
            return eqns
        read = {atom for atom in results if type(atom) is not Literal}
        idle = self.passed - read
        for eqn in eqns:
            for atom in eqn.invars:
                if type(atom) is not Literal and atom in idle:
                    idle.discard(atom)
        return [eqn for eqn in eqns if idle.isdisjoint(eqn.outvars)]
