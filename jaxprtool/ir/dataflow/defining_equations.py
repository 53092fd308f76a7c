"""Find the equation that computes a value, through calls, loops, branches and JAX's additions."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.caches import cached_method
from jaxprtool.ir.core.regions import Regions, regions
from jaxprtool.ir.dataflow.def_use import DefUse
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Jaxpr, JaxprEqn, Literal, Var


class DefiningEquation(NamedTuple):
    """The equation that computes a value.

    Attributes:
        eqn: The equation, at any depth.
        around: The equations whose bodies contain it, the outermost first.
        operand: The value outside the body, if the body only forwards it.
    """

    eqn: JaxprEqn
    around: tuple[JaxprEqn, ...]
    operand: Atom | None


class DefiningEquations:
    """Finds the equations that compute the values of a jaxpr; visits each body once.

    Args:
        jaxpr: The jaxpr.
    """

    def __init__(self, jaxpr: AnyJaxpr) -> None:
        self._top = DefUse(jaxpr.eqns)
        self._held: dict[int, tuple[Regions, list[list[tuple[int, Atom]]]] | None] = {}

    def __contains__(self, value: object) -> bool:
        """Return True if an equation of the jaxpr binds a value."""
        return value in self._top.definitions

    def of(self, value: Var) -> DefiningEquation:
        """Return the equation that computes a variable that an equation of the jaxpr binds.

        A result of a call, a loop or a branch is followed to the equation inside that computes it.
        It is also followed through the equations that JAX adds to a value that a policy of
        `jax.checkpoint` saves or offloads.
        """
        around: tuple[JaxprEqn, ...] = ()
        defined = self._top
        eqn = defined.equation(value)
        assert eqn is not None
        index = eqn.outvars.index(value)
        while True:
            if _is_added(eqn):
                operand = eqn.invars[index]
                definition = defined.equation(operand)
                if definition is not None:
                    eqn, index = definition, definition.outvars.index(operand)
                    continue
                if not around:
                    return DefiningEquation(eqn, around, operand)
            called = self._called(eqn)
            if called is None:
                return DefiningEquation(eqn, around, None)
            held, sources = called
            for number, atom in sources[index]:
                body, region = held.jaxprs[number], held.regions[number]
                within = self._within(body)
                inner = within.equation(atom)
                if inner is not None and not (held.predicates and _is_filler(inner, within)):
                    around, defined = (*around, eqn), within
                    eqn, index = inner, inner.outvars.index(atom)
                    break
                if not around and len(held.bodies) == 1 and atom in body.invars:
                    operand = region.ins[body.invars.index(atom)]
                    if operand not in region.next_iteration:
                        return DefiningEquation(eqn, around, eqn.invars[operand])
            else:
                return DefiningEquation(eqn, around, None)

    @cached_method
    def _within(self, body: Jaxpr) -> DefUse:
        return DefUse(body.eqns)

    def _called(self, eqn: JaxprEqn) -> tuple[Regions, list[list[tuple[int, Atom]]]] | None:
        if id(eqn) not in self._held:
            held = regions(eqn)
            self._held[id(eqn)] = None if held is None else (held, held.sources())
        return self._held[id(eqn)]


def _is_added(eqn: JaxprEqn) -> bool:
    """Return True if JAX added an equation to a residual: rounding to its own precision, or a move.

    See https://github.com/jax-ml/jax/pull/22244; moves that JAX adds have no line in the source.
    """
    if eqn.primitive.name == "device_put":
        return jaxcompat.user_frame(eqn) is None
    if eqn.primitive.name != "reduce_precision":
        return False
    own = jnp.finfo(eqn.outvars[0].aval.dtype)
    return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (own.nexp, own.nmant)


def _is_filler(eqn: JaxprEqn, defined: DefUse) -> bool:
    """Return True if an equation only fills an array, as in a branch that lacks this residual."""
    if eqn.primitive.name == "broadcast_in_dim":
        before = defined.equation(eqn.invars[0])
        return isinstance(eqn.invars[0], Literal) or (
            before is not None and _is_filler(before, defined)
        )
    return eqn.primitive.name == "empty2"
