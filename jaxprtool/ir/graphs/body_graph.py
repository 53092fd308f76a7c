"""One of two bodies that are matched: definitions and uses of its values, and keys."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from functools import cached_property
from types import MappingProxyType

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.caches import cached_method
from jaxprtool.ir.core.equations import with_operands
from jaxprtool.ir.core.regions import regions
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.dataflow.def_use import DefUse
from jaxprtool.ir.equality.equation_keys import EquationKeys, MatchLevel, Origins
from jaxprtool.jaxcompat import AnyJaxpr, JaxprEqn, Literal, Var

#: The maximum number of variables that `BodyGraph.nearest_known` visits.
_MOST_FOLLOWED = 256


class BodyGraph(DefUse):
    """One of two bodies that are matched.

    Args:
        keys: The numbering of equations, shared by both bodies.
        held: The body as its equation holds it, open or closed.
        arguments: A number for each argument that has a counterpart, by position. Counterparts have
            the same number.
        results: The same for the results.
        literals: Literals to read instead of arguments and constants of a call.
    """

    def __init__(
        self,
        keys: EquationKeys,
        held: AnyJaxpr,
        arguments: dict[int, int],
        results: dict[int, int],
        literals: Mapping[Var, Literal] = MappingProxyType({}),
    ):
        self._keys = keys
        self.held = held
        self.jaxpr = jaxcompat.open_jaxpr(held)
        super().__init__(self.jaxpr.eqns)
        if literals:
            self.eqns = [with_operands(eqn, literals) for eqn in self.eqns]
            keys.keep(self.eqns)
        self._arguments: list[Hashable] = [
            ("argument", arguments[i]) if i in arguments else ("argument", id(var))
            for i, var in enumerate(self.jaxpr.invars)
        ]
        self._results = results

    @cached_property
    def calls(self) -> list[tuple[int, AnyJaxpr]]:
        """The positions of the calls, each with its body."""
        return [(i, body) for i, eqn in enumerate(self.eqns) if (body := _called(eqn)) is not None]

    @cached_method
    def own(self, level: MatchLevel) -> list[int]:
        """Return a key for each equation by itself, whatever its operands are computed from."""
        return [self._keys.equation(eqn, level) for eqn in self.eqns]

    @cached_method
    def origins(self, level: MatchLevel) -> Origins:
        """Return the value numbering of the body."""
        return Origins(self._keys, self.held, self._arguments, level)

    def use_numbers(self, level: MatchLevel) -> list[int]:
        """Return a number for each equation by the values that are computed from its results.

        This is value numbering backwards, from the results of the body that have a counterpart.
        """
        number = self._keys.number
        uses: dict[int, list[int]] = defaultdict(list)
        for i, atom in enumerate(self.jaxpr.outvars):
            if i in self._results:
                uses[id(atom)].append(number(("result", self._results[i])))
        found: list[int] = []
        for own, eqn in zip(reversed(self.own(level)), reversed(self.eqns), strict=True):
            results = [tuple(sorted(uses.pop(id(var), ()))) for var in eqn.outvars]
            key = number((own, "used", *results))
            for i, atom in enumerate(eqn.invars):
                if type(atom) is not Literal:
                    uses[id(atom)].append(number((key, "operand", i)))
            found.append(key)
        return found[::-1]

    def nearest_known(self, var: Var, known: dict[int, Var]) -> list[Var] | None:
        """Return the nearest `known` variables that `var` is computed from.

        Returns None if too many variables lie between them.
        """
        found: list[Var] = []
        todo, seen = [var], {id(var)}
        while todo:
            each = todo.pop()
            if id(each) in known:
                found.append(each)
            elif (eqn := self.equation(each)) is not None:
                for atom in eqn.invars:
                    if type(atom) is not Literal and id(atom) not in seen:
                        seen.add(id(atom))
                        todo.append(atom)
            if len(seen) > _MOST_FOLLOWED:
                return None
        return found


def _called(eqn: JaxprEqn) -> AnyJaxpr | None:
    """Return the body of a call, or None if the equation is not a call."""
    if not traits(eqn).call or (inside := regions(eqn)) is None or len(inside.bodies) != 1:
        return None
    return inside.bodies[0]
