"""A program as one sequence of tokens, in which repetition is searched for.

Each equation of each body is a position of the sequence, and equations with the same operation on
operands of the same types have the same token. A token does not depend on which operands these are,
on the values and weak types of literals, or on name scopes and source locations. Unique tokens
separate bodies. Equations that may not be moved into a call have a unique token too: those with
effects, and those whose meaning would change in a call.

Arrays beside the tokens state where values are defined and last read, so that segments are
compared, and the values that cross a boundary counted, without visiting the equations.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.caches import cached_method
from jaxprtool.ir.core.equations import Contains, fuses
from jaxprtool.ir.core.structured import holds_jaxpr, sub_jaxprs
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.equality.structural_key import Unkeyable, parameters_key
from jaxprtool.jaxcompat import Atom, Aval, Jaxpr, JaxprEqn, Literal
from jaxprtool.passes.loops.outline.bodies import Item, OutlineBody, Repeated
from jaxprtool.primitives import scope_of, sow_p

#: Positions in a text, or numbers of its operands or values.
Positions = NDArray[np.int64]

#: The last use of a value that is a result of its body.
NEVER_DEAD = np.iinfo(np.int64).max

#: The weight of an equation that only moves elements: it costs a compiler next to nothing.
MOVE_WEIGHT = 0.25

#: The weight of a reduction: XLA fuses it with everything around it, in superlinear time.
REDUCTION_WEIGHT = 12.0


@dataclass(frozen=True, eq=False)
class Text:
    """The sequence, with facts about each position, each operand and each value.

    Attributes:
        items: The item at each position; None between two bodies.
        starts: The position at which each body begins.
        tokens: The token of each position.
        weights: The cumulative cost of compilation, in equations: that of the first i positions.
        sizes: The cumulative number of equations, including those in bodies.
        values: The number of the first value that each position defines.
        slots: The number of the first operand of each position.
        read: The value of each operand, or -1 if no item of the body defines it.
        readers: The position of the item of each operand.
        definitions: The position that defines each value.
        last: The last position that reads each value; NEVER_DEAD if it is a result of the body.
        fusible: True if a compiler fuses the item with those that read it or that it reads.
    """

    items: Sequence[Item | None]
    starts: Sequence[int]
    tokens: Positions
    weights: NDArray[np.float64]
    sizes: Positions
    values: Positions
    slots: Positions
    read: Positions
    readers: Positions
    definitions: Positions
    last: Positions
    fusible: NDArray[np.bool_]

    def copy(self, start: int, length: int) -> list[Item]:
        """Return the items of a segment."""
        return [item for item in self.items[start : start + length] if item is not None]

    def fuses(self, start: int, length: int) -> bool:
        """Return True if a compiler fuses all of a segment."""
        return bool(self.fusible[start : start + length].all())

    def links(self, starts: Positions, length: int) -> Positions:
        """Return the number of the segment's value that each operand is; -1 for outside values.

        There is a row for each segment. All rows have the same length, since the segments have the
        same tokens.
        """
        first = int(starts[0])
        operands = np.arange(int(self.slots[first + length] - self.slots[first]))
        found = self.read[self.slots[starts][:, None] + operands] - self.values[starts][:, None]
        return np.where(found >= 0, found, -1)

    def results(self, starts: Positions, length: int) -> NDArray[np.bool_]:
        """Return True for each value of each segment that is read outside of the segment."""
        first = int(starts[0])
        values = np.arange(int(self.values[first + length] - self.values[first]))
        read: NDArray[np.bool_] = (
            self.last[self.values[starts][:, None] + values] >= starts[:, None] + length
        )
        return read

    def weight(self, start: int, length: int) -> float:
        """Return the compilation cost of a segment, in equations."""
        return float(self.weights[start + length] - self.weights[start])


class Token(NamedTuple):
    """The token of an item, its weight, and its total number of equations."""

    number: int
    weight: float
    size: int


class Tokens:
    """The tokens of one run of the pass: equal for items with the same operation."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        self._types: dict[int, tuple[Aval, int]] = {}
        self._unique_tokens = count(-1, -1)
        self._sows = Contains(lambda eqn: eqn.primitive is sow_p or scope_of(eqn) is not None)
        #: By the id of the item, which is kept alive here too.
        self._items: dict[int, tuple[Item, Token]] = {}

    def of(self, item: Item) -> Token:
        """Return the token, weight and size of an item."""
        known = self._items.get(id(item))
        if known is None:
            known = self._items[id(item)] = item, self._new(item)
        return known[1]

    def unique_token(self) -> int:
        """Return a new, unique token."""
        return next(self._unique_tokens)

    def _new(self, item: Item) -> Token:
        if isinstance(item, Repeated):
            return Token(self._known.setdefault((item.body,), len(self._known)), 1.0, 1)
        stays = not traits(item).may_outline
        if item.effects and not jaxcompat.only_names_axes(item.effects):
            stays = True
        if item.params and holds_jaxpr(item.params.values()):
            weight, size = self._costs(item)
            stays = stays or any(item.params.get("donated_invars", ())) or self._sows.at(item)
        else:
            weight, size = _weight(item), 1
        return Token(self.unique_token() if stays else self._number(item), weight, size)

    def _number(self, eqn: JaxprEqn) -> int:
        try:
            key, _ = parameters_key(eqn)
        except Unkeyable:
            return self.unique_token()
        types = [self._type(v.aval) for v in eqn.invars]
        # A gradient is weakly typed if the variable it is taken by is, which a literal never is.
        weak = [
            type(v) is not Literal and getattr(v.aval, "weak_type", False)
            for v in (*eqn.invars, *eqn.outvars)
        ]
        results = [self._type(v.aval) for v in eqn.outvars]
        whole = eqn.primitive, key, *types, None, *results, *weak, id(eqn.ctx)
        return self._known.setdefault(whole, len(self._known))

    def _type(self, aval: Aval) -> int:
        """Return a number for a type that does not depend on whether it is weak."""
        known = self._types.get(id(aval))
        if known is None:
            strong = aval.strip_weak_type() if hasattr(aval, "strip_weak_type") else aval
            known = aval, self._known.setdefault(strong, len(self._known))
            self._types[id(aval)] = known
        return known[1]

    def _costs(self, eqn: JaxprEqn) -> tuple[float, int]:
        """Return the weight of an equation with bodies, and its total number of equations."""
        if jaxcompat.mark_of(eqn) != "plain":
            return 1.0, 1  # its body is shared already
        bodies = [self._costs_of(jaxcompat.open_jaxpr(body)) for _, body in sub_jaxprs(eqn)]
        return 1 + sum(weight for weight, _ in bodies), 1 + sum(size for _, size in bodies)

    @cached_method
    def _costs_of(self, body: Jaxpr) -> tuple[float, int]:
        found = [
            self._costs(eqn) if holds_jaxpr(eqn.params.values()) else (_weight(eqn), 1)
            for eqn in body.eqns
        ]
        return sum(weight for weight, _ in found), sum(size for _, size in found)


def _weight(eqn: JaxprEqn) -> float:
    """Return the weight of an equation without bodies."""
    like = traits(eqn)
    if like.reduces:
        return REDUCTION_WEIGHT
    return MOVE_WEIGHT if like.moves else 1.0


def rough_tokens(jaxprs: Iterable[Jaxpr]) -> Positions:
    """Return cheap tokens of jaxprs, which are equal at least where those of `Tokens` are."""
    known: dict[Hashable, int] = {}
    found: list[int] = []
    for jaxpr in jaxprs:
        for eqn in jaxpr.eqns:
            outs = eqn.outvars
            key = eqn.primitive, outs[0].aval if outs else None
            found.append(known.setdefault(key, len(known)))
        found.append(-1 - len(found))
    return np.array(found)


def text_of(bodies: Sequence[OutlineBody], tokens: Tokens) -> Text:
    """Return the sequence of all items of some bodies."""
    items: list[Item | None] = []
    starts: list[int] = []
    found: list[int] = []
    weights: list[float] = [0.0]
    sizes: list[int] = [0]
    values: list[int] = [0]
    slots: list[int] = [0]
    read: list[int] = []
    last: list[int] = []
    fusible: list[bool] = []
    for body in bodies:
        starts.append(len(items))
        numbers: dict[Atom, int] = {}
        for item in body.items:
            position = len(items)
            token = tokens.of(item)
            items.append(item)
            found.append(token.number)
            weights.append(token.weight)
            sizes.append(token.size)
            fusible.append(not isinstance(item, Repeated) and fuses(item))
            for atom in item.invars:
                value = -1 if type(atom) is Literal else numbers.get(atom, -1)
                read.append(value)
                if value >= 0:
                    last[value] = position
            for var in item.outvars:
                numbers[var] = len(last)
                last.append(-1)
            slots.append(len(read))
            values.append(len(last))
        for atom in body.outvars:
            if type(atom) is not Literal and atom in numbers:
                last[numbers[atom]] = NEVER_DEAD
        items.append(None)
        found.append(tokens.unique_token())
        weights.append(0.0)
        sizes.append(0)
        fusible.append(False)
        slots.append(len(read))
        values.append(len(last))
    starts.append(len(items))
    positions = np.arange(len(items))
    return Text(
        items,
        starts,
        np.array(found),
        np.cumsum(weights),
        np.cumsum(sizes),
        np.array(values),
        np.array(slots),
        np.array(read, np.int64),
        np.repeat(positions, np.diff(slots)),
        np.repeat(positions, np.diff(values)),
        np.array(last, np.int64),
        np.array(fusible),
    )
