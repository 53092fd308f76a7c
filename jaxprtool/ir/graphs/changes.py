"""Find the equations of a program that a rewrite removed, and those that it added.

An equation stays if its counterpart (`ir.graphs.counterparts`) does the same on values of the same
types. Its operands may have another name, or replace values that were removed. But if an operand's
old value still exists and the equation now reads another one, it is a different equation.

Bodies are compared with the bodies of the counterpart: a change inside a loop leaves the loop
itself unchanged, unless its operands or results are different.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxprtool import jaxcompat
from jaxprtool.ir.core.equations import equations
from jaxprtool.ir.graphs.counterparts import MatchedBody, counterparts
from jaxprtool.ir.graphs.differences import differences
from jaxprtool.jaxcompat import AnyJaxpr, JaxprEqn


@dataclass(frozen=True)
class Changes:
    """The equations, by `id`, of each program without a counterpart in the other.

    Attributes:
        removed: Those of the program before, in bodies too.
        added: Those of the program after.
    """

    removed: frozenset[int]
    added: frozenset[int]


def changes(before: AnyJaxpr, after: AnyJaxpr) -> Changes:
    """Return the equations of two programs that have no counterpart in the other.

    A body that several equations share is compared once with each body that replaced it. An
    equation in it has a counterpart if it has one in any of these bodies.
    """
    kept: tuple[set[int], set[int]] = set(), set()
    for matched in counterparts(before, after):
        for old, new in matched.equations:
            if _is_kept(matched, old, new):
                kept[0].add(id(old))
                kept[1].add(id(new))
    removed, added = (
        frozenset(id(eqn) for eqn in equations(jaxcompat.open_jaxpr(jaxpr))) - ids
        for jaxpr, ids in zip((before, after), kept, strict=True)
    )
    return Changes(removed, added)


def _is_kept(matched: MatchedBody, old: JaxprEqn, new: JaxprEqn) -> bool:
    if old is new:
        return True
    read = zip(old.invars, new.invars, strict=False)
    is_known = matched.counterpart
    if any(is_known(a) is not None and not matched.agree(a, b) for a, b in read):
        return False
    return not differences(matched, old, new)
