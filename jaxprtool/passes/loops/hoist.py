"""Hoisting: compute loop-invariant values of a scan or a while loop once, before the loop.

An equation of a loop's body, or of a while's condition, is *invariant* if it only reads literals,
constants of the loop and results of invariant equations. Bodies are visited from the inside out, so
that an equation leaves as many loops as it is invariant in.

Which of the invariant equations are hoisted:

*   An equation that computes is hoisted, together with the equations that it needs, if its result
    has no more bytes than the largest constant that it is computed from, or no more than `SMALL`;
    or if it costs far more than reading its result (`Traits.expensive`, and equations that hold
    jaxprs).

*   An equation that only moves, repeats or generates values (`Traits.moves`: broadcasts, iotas,
    ...), or whose result is larger than everything it is computed from, is hoisted only if a
    hoisted equation needs it. By itself it would save little and occupy memory while the loop runs,
    whereas in the loop it is fused into its uses.

*   The same holds for an equation of literals alone: in the loop it is known to be constant.

These are never hoisted: equations with effects and those on refs; collectives and equations that
place values or keep computations apart (`Traits.may_hoist`); user code that runs outside of JAX. A
loop that may run no iteration is assumed to run: hoisted equations are pure, and at worst computed
unnecessarily. But a while loop, which may never end, is not moved out of such a loop.

Compare XLA's WhileLoopInvariantCodeMotion, which also skips values that are not worth their memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from jaxprtool.ir.equations import (
    Contains,
    free_variables,
    is_array,
    needed_equations,
    size_in_bytes,
    variables,
)
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import Regions, holds_jaxpr, keep, regions
from jaxprtool.ir.rewrite import Memo, RewriteRule, Writer, narrow, partition, rewrite
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var
from jaxprtool.passes.framework.base import Pass

#: Results of at most this many bytes may leave a loop whatever they are computed from.
SMALL = 65536


@dataclass(frozen=True)
class Hoist(Pass):
    """Move loop-invariant equations out of scans and while loops.

    An equation is moved before the loop if it reads only loop-invariant values, and if its result
    is small or costs far more to compute than to read.

    Note:
        Equations with effects, collectives and calls of Python functions stay in their loop. So do
        equations that only repeat or generate values, since computing these again is cheaper than
        storing them.

    Example:
        def f(x, c):
            return jax.lax.fori_loop(0, 2, lambda i, x: x * jnp.exp(c), x)

        $ jaxprtool opt f.py:f --args "f32[], f32[]" -p "hoist, unroll, dce"
        { lambda ; a:f32[] b:f32[]. let
            c:f32[] = exp b
            d:f32[] = mul a c
            e:f32[] = mul d c
          in (e,) }
    """

    name: ClassVar[str] = "hoist"
    group: ClassVar[str] = "schedule and compile"

    def __call__(self, program: Program) -> Program:
        return program.replace(jaxpr=rewrite(program.jaxpr, _Hoister().visit, flat=False))


@dataclass(frozen=True)
class _HoistedBody:
    """A body in two: the hoisted part, which only reads the loop's constants, and the rest.

    `used` marks the arguments that the rest still takes; it also takes the results of `left`.
    """

    left: ClosedJaxpr
    used: list[bool]
    rest: ClosedJaxpr


class _Hoister:
    """The state of one run: shared bodies are analysed once."""

    def __init__(self) -> None:
        self._taken = Memo()
        #: Equations that must not leave a loop, by whether the loop is known to run.
        self._staying = {True: Contains(_must_stay), False: Contains(_must_stay_if_idle)}

    def visit(self, writer: Writer) -> RewriteRule:
        def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
            inside = regions(eqn)
            return None if inside is None or not inside.repeats else self._loop(writer, inside)

        return rule

    def _loop(self, writer: Writer, inside: Regions) -> Sequence[Atom] | None:
        eqn, trips = inside.eqn, inside.view.trips
        if isinstance(trips, int) and trips == 0:
            return None
        bodies = list(inside.bodies)
        stay = [True] * len(eqn.invars)
        more: dict[str, list[Atom]] = {}
        for number, region in enumerate(inside.regions):
            if region.constants is None:
                continue
            # A condition is always evaluated once, whether another body runs or not.
            runs = region.is_predicate or isinstance(trips, int)
            taken = self._split_body(inside, number, writer.holds_constants, runs)
            if taken is None:
                continue
            bodies[number] = taken.rest
            for i, used in zip(region.ins, taken.used, strict=True):
                stay[i] &= used
            operands = [
                eqn.invars[i]
                for i, is_invariant in zip(region.ins, region.loop_invariant, strict=True)
                if is_invariant
            ]
            more.setdefault(region.constants, []).extend(writer.splice(taken.left, operands, eqn))
        if not more:
            return None
        writer.add(inside.rebuild(bodies, stay, more=more))
        return eqn.outvars

    def _split_body(
        self, inside: Regions, number: int, holds_constants: bool, runs: bool
    ) -> _HoistedBody | None:
        """Return a body in two; None if nothing is hoisted.

        `holds_constants` is True if constants may be used outside, and `runs` if the body is known
        to run at least once.
        """
        body, region = inside.bodies[number], inside.regions[number]

        def take() -> _HoistedBody | None:
            constants = keep(body.invars, region.loop_invariant)
            if holds_constants:
                constants = (*constants, *body.constvars)
            leaving = self._hoistable(body.eqns, constants, runs)
            return _split(inside, number, leaving) if leaving else None

        return self._taken(take, body, region, holds_constants, runs)

    def _hoistable(
        self, eqns: Sequence[JaxprEqn], constants: Sequence[Var], runs: bool
    ) -> list[JaxprEqn]:
        """Return the equations to hoist from a body, in order."""
        # For each invariant value, the bytes of the largest value outside the loop among itself and
        # the values that it is computed from.
        origin = {v: size_in_bytes(v.aval) for v in constants if is_array(v.aval)}
        invariant: list[JaxprEqn] = []
        paying: set[int] = set()
        for eqn in eqns:
            if eqn.effects or not all(type(v) is Literal or v in origin for v in eqn.invars):
                continue
            if self._staying[runs].at(eqn) or not all(is_array(v.aval) for v in eqn.outvars):
                continue
            source = 0
            for v in variables(eqn.invars):
                if _at_most(source, origin[v]):
                    source = origin[v]
            result = sum(size_in_bytes(v.aval) for v in eqn.outvars)
            pays = _is_worth_storing(eqn, result, source)
            grown = result if pays and _at_most(source, result) else source
            origin.update((v, grown) for v in eqn.outvars)
            invariant.append(eqn)
            if pays:
                paying.add(id(eqn))
        return needed_equations(invariant, (), lambda eqn: id(eqn) in paying)


def _must_stay(eqn: JaxprEqn) -> bool:
    return not traits(eqn).may_hoist


def _must_stay_if_idle(eqn: JaxprEqn) -> bool:
    """Return True if an equation must stay in a loop that may run no iteration: a `while`."""
    return _must_stay(eqn) or eqn.primitive.name == "while"


def _is_worth_storing(eqn: JaxprEqn, result: Any, source: Any) -> bool:
    """Return True if storing `result` bytes is cheaper than recomputing them in the loop.

    They are computed from values of at most `source` bytes.
    """
    like = traits(eqn)
    if like.moves:
        return False
    if source != 0 and (_at_most(result, SMALL) or _at_most(result, source)):
        return True
    return like.expensive or holds_jaxpr(eqn.params.values())


def _at_most(size: Any, limit: Any) -> bool:
    """Return True if one size is known to be no larger than another."""
    try:
        return bool(size <= limit)
    except jax.errors.InconclusiveDimensionOperation:
        return False


# --- the loop without the hoisted equations -------------------------------------------------------


def _split(inside: Regions, number: int, leaving: list[JaxprEqn]) -> _HoistedBody:
    """Split a body into the hoisted equations and the rest."""
    body, region = inside.bodies[number], inside.regions[number]
    assert region.constants is not None
    eqns, hoisted = partition(body, leaving)
    read = free_variables(eqns, body.outvars)
    # A constant that other bodies also take stays, whether it is read or not.
    constants = inside.operands[region.constants]
    used = [i not in constants or v in read for i, v in zip(region.ins, body.invars, strict=True)]
    stay = dict(zip(region.ins, used, strict=True))
    flags = [stay.get(i, True) for i in range(len(inside.eqn.invars))]
    invars = inside.arguments(region, body.invars, {region.constants: hoisted}, flags)
    rest = narrow(body, invars, body.outvars, eqns)
    return _HoistedBody(
        narrow(body, keep(body.invars, region.loop_invariant), hoisted, leaving), used, rest
    )
