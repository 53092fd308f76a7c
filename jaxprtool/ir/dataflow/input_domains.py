"""Find the interval of each argument for which the program gives finite results.

A square root needs an operand that is not negative, a logarithm a positive one, an arc sine one
between -1 and 1. `input_domains` propagates these intervals back to the arguments, through
arithmetic with numbers, changes of layout, calls, branches and loops. The second moment of an
optimizer, for example, is known to be positive since the step takes its square root.

The result is a guide for choosing example values, not a proof: both factors of a product of two
variables are assumed to be positive, and so is the first operand of a difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal as OneOf
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.caches import JaxprCache
from jaxprtool.ir.core.regions import Regions, regions
from jaxprtool.ir.core.traits import traits
from jaxprtool.jaxcompat import AnyJaxpr, Atom, JaxprEqn, Literal, Var

#: The ends of an open interval.
Interval: TypeAlias = tuple[float, float]

#: The values that an argument is drawn from. Matrices are along the last two axes.
Domain: TypeAlias = Interval | OneOf["positive definite"]

POSITIVE: Interval = (0.0, math.inf)

#: The number of times that the body of a loop is visited to propagate intervals between iterations.
_ITERATIONS = 3

_cache = JaxprCache()


def input_domains(jaxpr: AnyJaxpr) -> list[Interval | None]:
    """Return the open interval that each argument must be in; None if any number is valid."""
    opened = jaxcompat.open_jaxpr(jaxpr)
    found = _domains(opened, (None,) * len(opened.outvars))
    return [POSITIVE if each is not None and _is_nearly_positive(each) else each for each in found]


def _is_nearly_positive(interval: Interval) -> bool:
    """Return True if an interval begins just below zero, as when an epsilon is added."""
    low, high = interval
    return -0.1 < low <= 0 and math.isinf(high)


def shown(interval: Domain) -> str:
    """Describe a domain in words: `positive`, `above -1`, `between -1 and 1`."""
    if interval == "positive definite":
        return interval
    low, high = interval
    if interval == POSITIVE:
        return "positive"
    if math.isinf(low) and high == 0:
        return "negative"
    if math.isinf(high):
        return f"above {low:g}"
    return f"below {high:g}" if math.isinf(low) else f"between {low:g} and {high:g}"


def _domains(jaxpr: AnyJaxpr, wanted: tuple[Interval | None, ...]) -> tuple[Interval | None, ...]:
    """Return the intervals of a body's arguments, given those of its results."""
    known = _cache.of(jaxpr)
    if wanted not in known:
        known[wanted] = (None,) * len(jaxpr.invars)  # in case the body contains itself
        known[wanted] = _IntervalPropagator(jaxpr).arguments(wanted)
    found: tuple[Interval | None, ...] = known[wanted]
    return found


class _IntervalPropagator:
    """Propagates intervals through one body, from its results back to its arguments."""

    def __init__(self, jaxpr: AnyJaxpr):
        self._jaxpr = jaxpr
        self._intervals: dict[Var, Interval] = {}
        #: The numbers that variables are known to be, such as a broadcast literal.
        self._numbers: dict[Var, float] = {}

    def arguments(self, wanted: Sequence[Interval | None]) -> tuple[Interval | None, ...]:
        for eqn in self._jaxpr.eqns:
            if traits(eqn).gives and len(eqn.invars) == 1:
                number = self._number(eqn.invars[0])
                if number is not None:
                    self._numbers[eqn.outvars[0]] = number
        for atom, interval in zip(self._jaxpr.outvars, wanted, strict=True):
            self._restrict(atom, interval)
        for eqn in reversed(self._jaxpr.eqns):
            inside = regions(eqn)
            if inside is not None:
                self._bodies(eqn, inside)
                continue
            if (domain := traits(eqn).finite_between) is not None:
                self._restrict(eqn.invars[0], domain)
            if eqn.outvars and (interval := self._intervals.get(eqn.outvars[0])) is not None:
                self._propagate_back(eqn, interval)
        return tuple(self._intervals.get(var) for var in self._jaxpr.invars)

    def _restrict(self, atom: Atom, interval: Interval | None) -> None:
        """Restrict a variable to an interval; keep the old interval if the two are disjoint."""
        if interval is None or type(atom) is Literal:
            return
        old = self._intervals.get(atom, interval)
        both = max(old[0], interval[0]), min(old[1], interval[1])
        self._intervals[atom] = both if both[0] < both[1] else old

    def _number(self, atom: Atom) -> float | None:
        """Return the number that all elements of an atom are equal to, or None if unknown."""
        if type(atom) is not Literal:
            return self._numbers.get(atom)
        value = np.asarray(atom.val)
        real = jnp.issubdtype(value.dtype, jnp.floating) or value.dtype.kind in "iu"
        return float(value) if value.ndim == 0 and real else None

    def _propagate_back(self, eqn: JaxprEqn, interval: Interval) -> None:
        """Restrict the operands of an equation, given the interval of a result."""
        rule = _BACK.get(eqn.primitive.name)
        if rule is not None:
            rule(self, eqn, interval)
        elif traits(eqn).gives or traits(eqn).reduces:
            self._restrict(eqn.invars[0], interval)

    def _every(self, eqn: JaxprEqn, interval: Interval) -> None:
        """Restrict all operands to the interval of the result."""
        for atom in eqn.invars:
            self._restrict(atom, interval)

    def _cases(self, eqn: JaxprEqn, interval: Interval) -> None:
        """Restrict all cases of a selection to the interval of the result."""
        for atom in eqn.invars[1:]:
            self._restrict(atom, interval)

    def _negation(self, eqn: JaxprEqn, interval: Interval) -> None:
        """Restrict the operand to the negated interval."""
        self._restrict(eqn.invars[0], (-interval[1], -interval[0]))

    def _arithmetic(self, eqn: JaxprEqn, interval: Interval) -> None:
        """Restrict the operands of a sum, difference, product or quotient."""
        name, (low, high) = eqn.primitive.name, interval
        a, b = eqn.invars
        first, second = self._number(a), self._number(b)
        if first is None and second is None:
            if low <= 0 and math.isinf(high) and a is not b:
                self._restrict(a, POSITIVE)
                if name != "sub":
                    self._restrict(b, POSITIVE)
        elif name == "sub":
            if second is not None:
                self._restrict(a, (low + second, high + second))
            elif first is not None:
                self._restrict(b, (first - high, first - low))
        elif name == "add":
            number, other = (first, b) if first is not None else (second, a)
            assert number is not None
            self._restrict(other, (low - number, high - number))
        else:
            number, other = (second, a) if second is not None else (first, b)
            if number is None or not number or (name == "div" and second is None):
                return
            ends = (low / number, high / number) if name == "mul" else (low * number, high * number)
            self._restrict(other, (min(ends), max(ends)))

    def _bodies(self, eqn: JaxprEqn, inside: Regions) -> None:
        """Propagate through the bodies of an equation, and through those of loops several times."""
        for _ in range(_ITERATIONS if inside.repeats else 1):
            before = [self._intervals.get(v) for v in eqn.invars if type(v) is not Literal]
            for body, region in zip(inside.bodies, inside.regions, strict=True):
                wanted: list[Interval | None] = []
                for out, carried in zip(region.outs, region.next_iteration, strict=True):
                    atoms = [eqn.outvars[out]] if out is not None else []
                    atoms += [eqn.invars[carried]] if carried is not None else []
                    known = [self._intervals[v] for v in atoms if _has(self._intervals, v)]
                    wanted.append(known[0] if known else None)
                found = _domains(jaxcompat.open_jaxpr(body), tuple(wanted))
                for operand, interval in zip(region.ins, found, strict=True):
                    self._restrict(eqn.invars[operand], interval)
            if before == [self._intervals.get(v) for v in eqn.invars if type(v) is not Literal]:
                return


#: How the interval of a result restricts operands. For other primitives that move or reduce
#: elements, the first operand is in the same interval.
_BACK: dict[str, Callable[[_IntervalPropagator, JaxprEqn, Interval], None]] = {
    "max": _IntervalPropagator._every,
    "min": _IntervalPropagator._every,
    "concatenate": _IntervalPropagator._every,
    "select_n": _IntervalPropagator._cases,
    "neg": _IntervalPropagator._negation,
    "add": _IntervalPropagator._arithmetic,
    "sub": _IntervalPropagator._arithmetic,
    "mul": _IntervalPropagator._arithmetic,
    "div": _IntervalPropagator._arithmetic,
}


def _has(intervals: dict[Var, Interval], atom: Atom) -> bool:
    return type(atom) is not Literal and atom in intervals
