"""Find the sources and uses of the values of a program, across the boundaries of bodies.

A value is a variable of a jaxpr. Its sources and its uses are found along the edges of
`ir.core.regions`, one step at a time. A body that several equations share counts for all of them.
The transitive closure in one direction is a slice: see `ir.dataflow.slicing`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from jaxprtool.ir.basics.caches import cached_method
from jaxprtool.ir.core.equations import bodies, is_flat
from jaxprtool.ir.core.regions import Region, Regions, regions
from jaxprtool.ir.dataflow.def_use import DefUse
from jaxprtool.jaxcompat import Atom, Jaxpr, JaxprEqn, Literal, Var

#: A variable, and its jaxpr.
Value: TypeAlias = tuple[Jaxpr, Var]


@dataclass(frozen=True, eq=False)
class Holder:
    """An equation that holds a body.

    Attributes:
        jaxpr: The jaxpr of the equation.
        index: The position of the equation there.
        number: The index of the body in `ir.core.equations.bodies` of the equation.
    """

    jaxpr: Jaxpr
    index: int
    number: int

    @property
    def eqn(self) -> JaxprEqn:
        return self.jaxpr.eqns[self.index]


class _Body(DefUse):
    """The arguments and results of a jaxpr, and the definitions and uses of its variables."""

    def __init__(self, jaxpr: Jaxpr):
        super().__init__(jaxpr.eqns)
        self.arguments = {var: i for i, var in enumerate(jaxpr.invars)}
        self.results: dict[Var, list[int]] = defaultdict(list)
        for i, atom in enumerate(jaxpr.outvars):
            if type(atom) is not Literal:
                self.results[atom].append(i)


class DataFlow:
    """The flow of values in a program, computed lazily.

    Args:
        top: The program's open jaxpr.
    """

    def __init__(self, top: Jaxpr):
        self.top = top

    def definition(self, jaxpr: Jaxpr, var: Var) -> int | None:
        """Return the position of the equation that binds a variable; None if it is an argument."""
        return self._body(jaxpr).position(var)

    def readers(self, jaxpr: Jaxpr, var: Var) -> Sequence[int]:
        """Return the positions of the equations of a jaxpr that read a variable."""
        return self._body(jaxpr).readers(var)

    def argument(self, jaxpr: Jaxpr, var: Var) -> int | None:
        """Return the position of a variable among the arguments of a jaxpr, or None."""
        return self._body(jaxpr).arguments.get(var)

    def results(self, jaxpr: Jaxpr, var: Var) -> Sequence[int]:
        """Return the positions of a variable among the results of a jaxpr."""
        return self._body(jaxpr).results.get(var, ())

    def arguments(self, eqn: JaxprEqn, var: Var) -> list[Value]:
        """Return the arguments of an equation's bodies that have a variable as (initial) value."""
        if (inside := regions(eqn)) is None:
            return []
        positions = [i for i, atom in enumerate(eqn.invars) if atom is var]
        return [value for place in positions for value in _arguments(inside, place)]

    @cached_property
    def holders(self) -> dict[Jaxpr, list[Holder]]:
        """The equations that hold each body, callers before callees."""
        found: dict[Jaxpr, list[Holder]] = {self.top: []}
        todo = [self.top]
        for jaxpr in todo:
            for index, eqn in enumerate(() if is_flat(jaxpr) else jaxpr.eqns):
                if eqn.params:
                    for number, (_, body) in enumerate(bodies(eqn)):
                        if body not in found:
                            found[body] = []
                            todo.append(body)
                        found[body].append(Holder(jaxpr, index, number))
        return found

    def origins(self, holder: Holder, position: int) -> list[tuple[Jaxpr, Atom]]:
        """Return the sources of a body's argument: the operand, and results that are carried back.

        Returns [] if the primitive has no regions.
        """
        inside, region = _region(holder)
        if inside is None or region is None:
            return []
        operand = region.ins[position]
        found: list[tuple[Jaxpr, Atom]] = [(holder.jaxpr, holder.eqn.invars[operand])]
        for other, carrying in zip(inside.jaxprs, inside.regions, strict=True):
            pairs = zip(carrying.next_iteration, other.outvars, strict=True)
            found += [(other, atom) for place, atom in pairs if place == operand]
        return found

    def destinations(self, holder: Holder, position: int) -> list[Value]:
        """Return the destinations of a result of a body: results, or arguments of bodies."""
        found: list[Value] = []
        inside, region = _region(holder)
        if inside is not None and region is not None:
            if (out := region.outs[position]) is not None:
                found.append((holder.jaxpr, holder.eqn.outvars[out]))
            if (operand := region.next_iteration[position]) is not None:
                found += _arguments(inside, operand)
        return list(dict.fromkeys(found))

    def controlled_results(self, holder: Holder) -> list[Value]:
        """Return the results of a loop if the body computes its predicate, and else []."""
        _, region = _region(holder)
        if region is None or not region.is_predicate:
            return []
        return [(holder.jaxpr, var) for var in holder.eqn.outvars]

    @cached_method
    def _body(self, jaxpr: Jaxpr) -> _Body:
        return _Body(jaxpr)


def _region(holder: Holder) -> tuple[Regions | None, Region | None]:
    """Return the regions of an equation, and the region of the held body; None if unknown."""
    inside = regions(holder.eqn)
    body = bodies(holder.eqn)[holder.number][1]
    return inside, None if inside is None else inside.region_of(body)


def _arguments(inside: Regions, operand: int) -> list[Value]:
    """Return the arguments of bodies that have an operand as (initial) value."""
    return [(inside.jaxprs[number], var) for number, var in inside.arguments_by_operand[operand]]
