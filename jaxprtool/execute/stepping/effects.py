"""External calls of a program, recorded while it is stepped through.

A call without results (a print, a debug callback, a check) is recorded but not executed. A call
with results is executed, or replaced by its results in an earlier run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.execute.running.arrays import (
    Comparison,
    Difference,
    value_difference,
    values_agree,
)
from jaxprtool.ir.core.equations import bodies, equations, named
from jaxprtool.ir.core.structured import holds_jaxpr
from jaxprtool.ir.equality.equivalence import action_difference
from jaxprtool.ir.evaluation.interpret import bind
from jaxprtool.jaxcompat import JaxprEqn


@dataclass(eq=False)
class Event:
    """One call: the equation, its operands and its results."""

    eqn: JaxprEqn
    operands: list[Any]
    results: Sequence[object] = ()

    def difference(
        self, other: Event, agree: Callable[[int], Comparison] = lambda i: values_agree
    ) -> Difference | None:
        """Return the difference from another call, or None; `agree(i)` compares operand `i`."""
        if self.eqn.primitive.name != other.eqn.primitive.name:
            return Difference(f"is {named(self.eqn)} before, {named(other.eqn)} after")
        other_action = _action_difference(self.eqn, other.eqn)
        if other_action is not None:
            return Difference(f"({named(other.eqn)}) does something else: {other_action}")
        operands, others = (jaxcompat.numbered_errors(e.eqn, e.operands) for e in (self, other))
        different = f"({named(other.eqn)}) receives different values: "
        if len(operands) != len(others):
            return Difference(f"{different}{len(operands)} values before, {len(others)} after")
        for i, (a, b) in enumerate(zip(operands, others, strict=True)):
            fault = value_difference(f"value {i}", a, b, agree(i))
            if fault is not None:
                details = [("operand" if k == "result" else k, v) for k, v in fault.details]
                return Difference(f"{different}{fault}", details)
        return None


def _action_difference(before: JaxprEqn, after: JaxprEqn) -> str | None:
    """Return how two calls differ in what they do; those in bodies are compared in order."""
    found = action_difference(before, after)
    if found is not None:
        return found
    inside = (
        [eqn for _, body in bodies(e) for eqn in equations(body) if has_external_effect(eqn)]
        for e in (before, after)
    )
    for old, new in zip_longest(*inside):
        if old is None or new is None:
            return f"{named(old or new)} in it is {'removed' if new is None else 'added'}"
        found = action_difference(old, new)
        if found is not None:
            return f"{named(new)} in it, {found}"
    return None


@dataclass
class Effects:
    """The calls of one run, in order; `earlier` are those of a previous run."""

    earlier: Sequence[Event] = ()
    events: list[Event] = field(default_factory=list)

    def results(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """Return the results of an equation that may have an external effect."""
        run = self.call if has_external_effect(eqn) else bind
        return list(run(eqn, operands))

    def call(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[object]:
        """Return the results of an equation for which `has_external_effect` holds."""
        number, event = len(self.events), Event(eqn, operands)
        self.events.append(event)
        whole = holds_jaxpr(eqn.params.values())
        if not eqn.outvars and not whole:
            return []
        known = self.earlier[number] if number < len(self.earlier) else None
        if known is not None and not whole and known.difference(event) is None:
            event.results = known.results
        else:
            event.results = bind(eqn, operands)
        return event.results


def has_external_effect(eqn: JaxprEqn) -> bool:
    """Return True if an equation has external effects; writing to a ref is not one."""
    if all(map(jaxcompat.is_removable_effect, eqn.effects)):
        return False
    atoms = (*eqn.invars, *eqn.outvars)
    return not any(isinstance(atom.aval, jaxcompat.AbstractRef) for atom in atoms)


def effects_differ(
    before: Sequence[Event],
    after: Sequence[Event],
    agree: Callable[[int, int], Comparison],
) -> Difference | None:
    """Return the first call in which two runs differ; None if there is none.

    Args:
        before: The calls of the first run.
        after: Those of the second run.
        agree: Returns the comparison of an operand, by the position of its call and its own.
    """
    for number, (old, new) in enumerate(zip_longest(before, after), 1):
        if new is None:
            of = f"effect {number} of {len(before)}"
            return Difference(f"{named(old.eqn)} is no longer called ({of})")
        if old is None:
            message = f"{named(new.eqn)} is called, but was not before (effect {number})"
            return Difference(message)
        fault = old.difference(new, partial(agree, number - 1))
        if fault is not None:
            return Difference(f"effect {number} {fault}", fault.details)
    return None
