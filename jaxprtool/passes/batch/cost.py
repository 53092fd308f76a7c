"""What a mapped body costs, to decide where the values of a loop or a branch are best mapped.

Two figures are counted, and kept for each body: its equations, at all depths, and the bytes that
are written by equations which move data and compute nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from jaxprtool import jaxcompat
from jaxprtool.ir.dtypes import itemsize
from jaxprtool.ir.structured import Cond, Scan, holds_jaxpr, sub_jaxprs
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.batch.axis import Axis, Dim

T = TypeVar("T")

_MOVES = frozenset({"transpose", "broadcast_in_dim", "copy", "copy_p"})


@dataclass(frozen=True)
class Cost:
    """Bytes moved, and equations."""

    moved: int = 0
    equations: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.moved + other.moved, self.equations + other.equations)

    def times(self, trips: Any) -> Cost:
        """The cost of a body that is written once and runs so many times; see `_size`."""
        return Cost(self.moved * _size(trips), self.equations)

    def within(self, other: Cost) -> bool:
        """Whether it is no more, in either figure."""
        return self.moved <= other.moved and self.equations <= other.equations

    def rank(self) -> tuple[int, int]:
        """The lesser, the better."""
        return self.moved, self.equations


_known: WeakKeyDictionary[Any, Cost] = WeakKeyDictionary()


def cost_of(body: Any) -> Cost:
    """The cost of a jaxpr: a scan's body moves as often as it runs, a cond what one branch may."""
    body = jaxcompat.open_jaxpr(body)
    known = _known.get(body)
    if known is None:
        known = _known[body] = sum(map(_cost_of_equation, body.eqns), Cost())
    return known


def _cost_of_equation(eqn: JaxprEqn) -> Cost:
    if eqn.primitive.name in _MOVES:
        return Cost(sum(_bytes(v.aval) for v in eqn.outvars), 1)
    if not holds_jaxpr(eqn.params.values()):
        return Cost(0, 1)
    bodies = [cost_of(body) for _, body in sub_jaxprs(eqn)]
    if eqn.primitive.name in Cond.primitives:
        return Cost(0, 1) + either(bodies)
    trips = eqn.params["length"] if eqn.primitive.name in Scan.primitives else 1
    return sum((body.times(trips) for body in bodies), Cost(0, 1))


def either(branches: Iterable[Cost]) -> Cost:
    """The cost of branches of which one runs."""
    branches = list(branches)
    return Cost(max(b.moved for b in branches), sum(b.equations for b in branches))


def cheapest(choices: Sequence[T], theirs: T, costs: Callable[[T], Sequence[Cost]]) -> T:
    """The cheapest of some choices that cost no more than `theirs`, which is one of them.

    `costs` of a choice are by weight. Of those that cost the same it is the first.
    """
    limits = costs(theirs)
    fit = [
        (cost, choice)
        for cost, choice in ((costs(choice), choice) for choice in choices)
        if all(c.within(limit) for c, limit in zip(cost, limits, strict=True))
    ]
    return min(fit, key=lambda pair: [c.rank() for c in pair[0]])[1]


def cost_of_moves(avals: Sequence[Any], dims: Sequence[Dim], to: Sequence[Dim], axis: Axis) -> Cost:
    """What it costs to have values, whose lanes are of these types, mapped at `to`."""
    return sum(
        (
            Cost(_bytes(aval) * _size(axis.size), 1)
            for aval, dim, target in zip(avals, dims, to, strict=True)
            if target is not None and target != dim
        ),
        Cost(),
    )


def _bytes(aval: Any) -> int:
    """The bytes of a value; symbolic dimensions count as 1."""
    shape = getattr(aval, "shape", ())
    dtype = getattr(aval, "dtype", None)
    return math.prod(map(_size, shape)) * (0 if dtype is None else itemsize(dtype))


def _size(size: Any) -> int:
    """A size, or number of trips; a symbolic one counts as 1, since it cannot be compared."""
    return size if isinstance(size, int) else 1
