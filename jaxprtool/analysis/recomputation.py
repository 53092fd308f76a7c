"""Count the operations that recompute a residual from the other residuals and the arguments.

The backward slices of values overlap. A slice is a bit set in one integer, so one walk over a jaxpr
finds the slices of all equations, and counting bits gives their costs. A value in the body of a
loop is recomputed from the values at the start of its iteration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import Any, NamedTuple, TypeAlias

from jaxprtool.analysis.cost.by_equation import Operations
from jaxprtool.analysis.cost.trip_counts import runs_of
from jaxprtool.ir.basics.caches import cached_method
from jaxprtool.ir.core.regions import Regions, regions
from jaxprtool.ir.dataflow.def_use import DefUse
from jaxprtool.ir.dataflow.defining_equations import DefiningEquation
from jaxprtool.jaxcompat import Atom, Jaxpr, JaxprEqn, Literal

#: The position of a jaxpr in a program: the `id` of each equation around it, and the number of its
#: body.
_Key: TypeAlias = tuple[tuple[int, int], ...]


class Recomputation:
    """The cost of recomputing values of a program.

    Args:
        jaxpr: The program's open jaxpr.
        kept: The variables of the top level that are kept, and so cost nothing.
        asked: The equations that `operations` will be called with.
    """

    def __init__(
        self, jaxpr: Jaxpr, kept: Collection[Atom], asked: Iterable[DefiningEquation]
    ) -> None:
        self._top = _Level(None, jaxpr, 0, frozenset(kept))
        self._held: dict[int, tuple[Regions, dict[int, int]]] = {}
        self._levels: dict[_Key, _Level] = {(): self._top}
        self._operations = Operations()
        #: By jaxpr: the requested equations, and those whose bodies have such equations.
        self._definitions = defaultdict[_Key, set[int]](set)
        self._holders = defaultdict[_Key, set[int]](set)
        for definition in asked:
            *outer, key = self._keys((*definition.around, definition.eqn))
            self._definitions[key].add(id(definition.eqn))
            for around, holder in zip(outer, definition.around, strict=True):
                self._holders[around].add(id(holder))

    def operations(self, definition: DefiningEquation) -> Any:
        """Return the FLOPs and transcendentals that recompute the results of an equation.

        None if the cost of an equation that runs again is unknown.
        """
        path = (*definition.around, definition.eqn)
        keys = self._keys(path)
        levels = [self._top, *map(self._level, definition.around, keys[1:])]
        runs = [1]
        for level in levels[1:]:
            runs.append(runs[-1] * (runs_of(level.held) or 1))
        slices = list(map(self._slices_of, keys, levels))
        found = slices[-1].of_results(definition.eqn)
        works = [(found.work, runs[-1])]
        for depth in range(len(path) - 2, -1, -1):
            operands = _begins_with(levels[depth + 1], found.arguments)
            found = slices[depth].of_operands(operands)
            works.append((found.work, runs[depth]))
        if any(work is None for work, _ in works):
            return None
        return sum(work * times for work, times in works)

    def _keys(self, path: Sequence[JaxprEqn]) -> list[_Key]:
        """Return the key of the jaxpr that each equation of a path is in."""
        steps = [(id(eqn), self._regions(eqn)[1][id(inner)]) for eqn, inner in pairwise(path)]
        return [tuple(steps[:depth]) for depth in range(len(path))]

    @cached_method
    def _slices_of(self, key: _Key, level: _Level) -> _Slices:
        asked = self._definitions[key], self._holders[key]
        return _Slices(level.jaxpr, level.kept, *asked, self._operations)

    def _level(self, eqn: JaxprEqn, key: _Key) -> _Level:
        """Return a body of an equation."""
        if key not in self._levels:
            held, number = self._regions(eqn)[0], key[-1][1]
            body = held.jaxprs[number]
            around = self._levels[key[:-1]].kept
            given = zip(held.regions[number].outs, body.outvars, strict=True)
            kept = {
                atom
                for out, atom in given
                if type(atom) is not Literal and out is not None and eqn.outvars[out] in around
            }
            self._levels[key] = _Level(held, body, number, frozenset(kept - set(body.invars)))
        return self._levels[key]

    def _regions(self, eqn: JaxprEqn) -> tuple[Regions, dict[int, int]]:
        """Return the regions of an equation, and by `id` the region of each equation in them."""
        if id(eqn) not in self._held:
            held = regions(eqn)
            assert held is not None
            bodies = list(enumerate(held.jaxprs))[::-1]
            self._held[id(eqn)] = held, {id(e): number for number, b in bodies for e in b.eqns}
        return self._held[id(eqn)]


class _Level(NamedTuple):
    """A jaxpr on the path to a value.

    Attributes:
        held: The regions of the equation that holds it; None for the program itself.
        jaxpr: The open jaxpr.
        number: The number of the body in that equation.
        kept: The variables that are kept.
    """

    held: Regions | None
    jaxpr: Jaxpr
    number: int
    kept: frozenset[Atom]


def _begins_with(level: _Level, arguments: Sequence[int]) -> list[Atom]:
    """Return the operands of the equation that arguments of its body read, without carries."""
    held = level.held
    assert held is not None
    region = held.regions[level.number]
    carried = {operand for each in held.regions for operand in each.next_iteration}
    places = (region.ins[i] for i in arguments)
    return [held.eqn.invars[place] for place in places if place not in carried]


class _Slice(NamedTuple):
    """The backward slice of some values within a jaxpr.

    Attributes:
        work: The operations of its equations; None if that of one is unknown.
        arguments: The positions of the jaxpr's arguments in it.
    """

    work: Any
    arguments: list[int]


class _Slices:
    """The backward slices of values of a jaxpr, as bit sets: first its arguments, then equations.

    Args:
        jaxpr: The jaxpr.
        kept: The variables that are kept; slices end there.
        definitions: The `id`s of the equations that `of_results` will be called with.
        holders: The `id`s of the equations whose operands `of_operands` will be called with.
        operations: The costs of equations.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        kept: frozenset[Atom],
        definitions: Collection[int],
        holders: Collection[int],
        operations: Operations,
    ) -> None:
        self._count = first = len(jaxpr.invars)
        self._weights = list(_weights(jaxpr, first, operations))
        unknown = [i for i, e in enumerate(jaxpr.eqns, first) if not operations.is_known(e)]
        self._unknown = _bits(unknown) if unknown else 0
        self._definitions: dict[int, _Slice] = {}
        self._values = {v: 1 << i for i, v in enumerate(jaxpr.invars) if v not in kept}
        # Drop a slice after its last reader: together they would take quadratic memory.
        last = {v: uses[-1][0] for v, uses in DefUse(jaxpr.eqns).uses.items()}
        held = (v for e in jaxpr.eqns if id(e) in holders for v in e.invars)
        always = {v for v in held if type(v) is not Literal}
        for i, eqn in enumerate(jaxpr.eqns):
            whole = 1 << first + i
            for v in eqn.invars:
                if type(v) is not Literal and v in self._values:
                    whole |= self._values[v]
                    if last[v] == i and v not in always:
                        del self._values[v]
            if id(eqn) in definitions:
                self._definitions[id(eqn)] = self._slice(whole)
            for v in eqn.outvars:
                if v in last and v not in kept:
                    self._values[v] = whole

    def of_results(self, eqn: JaxprEqn) -> _Slice:
        """Return the slice of an equation's results."""
        return self._definitions[id(eqn)]

    def of_operands(self, operands: Iterable[Atom]) -> _Slice:
        """Return the slice of some operands of an equation with a body."""
        masks = (self._values.get(v, 0) for v in operands if type(v) is not Literal)
        return self._slice(reduce(or_, masks, 0))

    def _slice(self, found: int) -> _Slice:
        work = None
        if not found & self._unknown:
            work = sum(amount * (found & same).bit_count() for amount, same in self._weights)
        return _Slice(work, [i for i in range(self._count) if found >> i & 1])


def _weights(jaxpr: Jaxpr, first: int, operations: Operations) -> Iterator[tuple[Any, int]]:
    """Yield each cost other than 0, with the bit set of the equations that have it."""
    same: dict[Any, list[int]] = {}
    for place, eqn in enumerate(jaxpr.eqns, first):
        if not _is_zero(amount := operations.of(eqn)):
            same.setdefault(amount, []).append(place)
    for amount, places in same.items():
        yield amount, _bits(places)


def _is_zero(amount: Any) -> bool:
    return type(amount) is int and amount == 0


def _bits(places: Sequence[int]) -> int:
    """Return the integer with these bits set. The places are in ascending order."""
    whole = bytearray(places[-1] // 8 + 1)
    for place in places:
        whole[place // 8] |= 1 << place % 8
    return int.from_bytes(whole, "little")
