"""The order in which repetition is looked for: results are finished where their values are made.

An optimizer is written leaf by leaf or stage by stage: `jax.tree.map` makes one stage for all
parameters, then the next. A stage of a layer would be a segment that reads and writes all of the
layer's parameters, where XLA fuses all stages of a parameter into one loop. So the equations that
are computed element by element and lead to a few results of the body, and to nothing else, are
moved up to where the last value that they need is defined; those that only need arguments, to where
they are first read. What is computed of arguments alone for many results, such as the correction of
a bias, comes first. All other equations keep their order, and with them all effects.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxprtool.ir.equations import donations, fuses, is_scalar
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import Atom, JaxprEqn, Literal

#: Equations that lead to more results are nobody's finish.
MOST_RESULTS = 8


def finished_early(eqns: Sequence[JaxprEqn], outvars: Sequence[Atom]) -> list[JaxprEqn]:
    """Return equations in the order described, each after those that define its operands."""
    if donations(eqns):
        return list(eqns)  # what is donated has to be read before
    definition = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    operands = [
        [definition[v] for v in eqn.invars if type(v) is not Literal and v in definition]
        for eqn in eqns
    ]
    finish = _finishing(eqns, outvars, definition, operands)
    if not any(finish):
        return list(eqns)
    order = _Order(operands, finish)
    for i in _corrections(eqns, operands, finish):
        order.write(i)
    for i, finishes in enumerate(finish):
        if not finishes:
            order.write(i)
    for i in range(len(eqns)):
        order.write(i)
    return [eqns[i] for i in order.written]


class _Order:
    """Equations, by number, as they are written one after the other."""

    def __init__(self, operands: Sequence[Sequence[int]], finish: Sequence[bool]):
        #: In order. A dictionary is an ordered set.
        self.written: dict[int, None] = {}
        self._operands = operands
        free = [False] * len(operands)  # finishes a result, and needs arguments alone
        #: Those that are written as soon as all that they wait for is.
        self._readers: list[list[int]] = [[] for _ in operands]
        self._waiting = [0] * len(operands)
        for i, before in enumerate(operands):
            needed = {j for j in before if not free[j]}
            free[i] = finish[i] and not needed
            if finish[i] and needed:
                self._waiting[i] = len(needed)
                for j in needed:
                    self._readers[j].append(i)

    def write(self, number: int) -> None:
        """Write an equation, what it needs before it, and what has waited for it after it."""
        todo = [number]
        while todo:
            i = todo[-1]
            missing = [j for j in self._operands[i] if j not in self.written]
            if missing:
                todo += reversed(missing)
                continue
            todo.pop()
            if i in self.written:
                continue
            self.written[i] = None
            for reader in reversed(self._readers[i]):
                self._waiting[reader] -= 1
                if not self._waiting[reader]:
                    todo.append(reader)


def _corrections(
    eqns: Sequence[JaxprEqn], operands: Sequence[Sequence[int]], finish: Sequence[bool]
) -> list[int]:
    """Return the equations that make scalars of arguments alone, for those that finish results."""
    wanted = [False] * len(eqns)
    for i in range(len(eqns) - 1, -1, -1):
        if finish[i] or wanted[i]:
            for j in operands[i]:
                wanted[j] = not finish[j] and is_scalar(eqns[j]) and not eqns[j].effects
    first: list[int] = []
    known: set[int] = set()
    for i, before in enumerate(operands):
        if wanted[i] and known.issuperset(before):
            known.add(i)
            first.append(i)
    return first


def _finishing(
    eqns: Sequence[JaxprEqn],
    outvars: Sequence[Atom],
    definition: dict[Atom, int],
    operands: Sequence[Sequence[int]],
) -> list[bool]:
    """Return for each equation whether it only finishes a few of the results."""
    reached: list[set[int] | None] = [set() for _ in eqns]
    for number, atom in enumerate(outvars):
        if type(atom) is not Literal and atom in definition:
            _add(reached, definition[atom], {number})
    for i in range(len(eqns) - 1, -1, -1):
        found = reached[i]
        if not found or len(found) > MOST_RESULTS or not _may_move(eqns[i]):
            reached[i] = found = None
        for j in operands[i]:
            if found is None:
                reached[j] = None
            else:
                _add(reached, j, found)
    return [found is not None for found in reached]


def _add(reached: list[set[int] | None], i: int, results: set[int]) -> None:
    found = reached[i]
    if found is not None:
        found |= results


def _may_move(eqn: JaxprEqn) -> bool:
    return fuses(eqn) and traits(eqn).may_outline and not eqn.effects
