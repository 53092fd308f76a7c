"""One of two bodies that are matched: who makes and reads each value, and keys of its equations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from functools import cached_property
from types import MappingProxyType

from jaxprtool import jaxcompat
from jaxprtool.ir.equation_keys import EquationKeys, Likeness, Origins
from jaxprtool.ir.regions import regions
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import AnyJaxpr, JaxprEqn, Literal, Var

#: How many values without counterpart are followed up to those that have one.
_MOST_FOLLOWED = 256


class Side:
    """One of two bodies that are matched.

    Args:
        keys: What numbers its equations.
        held: The body, as its equation holds it.
        arguments: The numbers of the arguments that have a counterpart, by position.
        results: Likewise of the results.
        literals: Of the arguments and constants of a call, those that are literals, by `id`.
    """

    def __init__(
        self,
        keys: EquationKeys,
        held: AnyJaxpr,
        arguments: dict[int, int],
        results: dict[int, int],
        literals: Mapping[int, Literal] = MappingProxyType({}),
    ):
        self._keys = keys
        self.held = held
        self.jaxpr = jaxcompat.open_jaxpr(held)
        self.eqns = self.jaxpr.eqns
        if literals:
            self.eqns = [_with_literals(eqn, literals) for eqn in self.eqns]
            keys.keep(self.eqns)
        self._arguments: list[Hashable] = [
            ("argument", arguments[i]) if i in arguments else ("argument", id(var))
            for i, var in enumerate(self.jaxpr.invars)
        ]
        self._results = results
        self._own: dict[Likeness, list[int]] = {}
        self._origins: dict[Likeness, Origins] = {}

    @cached_property
    def makers(self) -> dict[int, tuple[int, int]]:
        """The equation that binds each variable, and which of its results that is."""
        return {
            id(var): (i, k) for i, eqn in enumerate(self.eqns) for k, var in enumerate(eqn.outvars)
        }

    @cached_property
    def readers(self) -> dict[int, list[tuple[int, int]]]:
        """The equations that read each variable, with the position of the operand."""
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for i, eqn in enumerate(self.eqns):
            for place, atom in enumerate(eqn.invars):
                if type(atom) is not Literal:
                    found[id(atom)].append((i, place))
        return found

    @cached_property
    def calls(self) -> list[tuple[int, AnyJaxpr]]:
        """The calls among the equations, with their bodies."""
        return [(i, body) for i, eqn in enumerate(self.eqns) if (body := _called(eqn)) is not None]

    def own(self, likeness: Likeness) -> list[int]:
        """Return the keys of the equations, operands left out."""
        if likeness not in self._own:
            self._own[likeness] = [self._keys.equation(eqn, likeness) for eqn in self.eqns]
        return self._own[likeness]

    def origins(self, likeness: Likeness) -> Origins:
        """Return numbers of all values by what they are computed from."""
        if likeness not in self._origins:
            self._origins[likeness] = Origins(self._keys, self.held, self._arguments, likeness)
        return self._origins[likeness]

    def uses(self, likeness: Likeness) -> list[int]:
        """Return a number for each equation by all that is computed from it."""
        number = self._keys.number
        uses: dict[int, list[int]] = defaultdict(list)
        for i, atom in enumerate(self.jaxpr.outvars):
            if i in self._results:
                uses[id(atom)].append(number(("result", self._results[i])))
        found: list[int] = []
        for own, eqn in zip(reversed(self.own(likeness)), reversed(self.eqns), strict=True):
            results = [tuple(sorted(uses.pop(id(var), ()))) for var in eqn.outvars]
            key = number((own, "used", *results))
            for i, atom in enumerate(eqn.invars):
                if type(atom) is not Literal:
                    uses[id(atom)].append(number((key, "operand", i)))
            found.append(key)
        return found[::-1]

    def front(self, var: Var, known: dict[int, Var]) -> list[Var] | None:
        """Return the nearest `known` variables that one is computed from; None if that is far."""
        found: list[Var] = []
        todo, seen = [var], {id(var)}
        while todo:
            each = todo.pop()
            if id(each) in known:
                found.append(each)
            elif id(each) in self.makers:
                for atom in self.eqns[self.makers[id(each)][0]].invars:
                    if type(atom) is not Literal and id(atom) not in seen:
                        seen.add(id(atom))
                        todo.append(atom)
            if len(seen) > _MOST_FOLLOWED:
                return None
        return found


def _called(eqn: JaxprEqn) -> AnyJaxpr | None:
    """Return the body of a call; None for what is none."""
    if not traits(eqn).call or (inside := regions(eqn)) is None or len(inside.bodies) != 1:
        return None
    return inside.bodies[0]


def _with_literals(eqn: JaxprEqn, literals: Mapping[int, Literal]) -> JaxprEqn:
    """Return an equation that reads literals in the place of variables."""
    if not any(id(atom) in literals for atom in eqn.invars):
        return eqn
    return eqn.replace(invars=[literals.get(id(atom), atom) for atom in eqn.invars])
