"""Rules on `select_n`."""

from __future__ import annotations

import numpy as np

from jaxprtool.jaxcompat import Atom
from jaxprtool.passes.simplify.conditions import booleans
from jaxprtool.passes.simplify.pattern import Match, scalar_value
from jaxprtool.passes.simplify.row import Outcome, Row


def _constant_case(match: Match) -> Outcome:
    """C says which"""
    index = int(match.value("C"))
    cases = match["xs"]
    return cases[index] if 0 <= index < len(cases) else None


def _equal_cases(match: Match) -> Outcome:
    """all cases are one value"""
    first, *others = match["xs"]
    return first if all(_is_same(match, first, x) for x in others) else None


def _is_same(match: Match, a: Atom, b: Atom) -> bool:
    if a is b:
        return True
    x, y = (_filling(match, atom) for atom in (a, b))
    return x is not None and y is not None and x.tobytes() == y.tobytes()


def _filling(match: Match, atom: Atom) -> np.ndarray | None:
    """The scalar that a value is everywhere; None if that is not known."""
    eqn = match.writer.defined_by(atom, "broadcast_in_dim")
    return scalar_value(atom if eqn is None else eqn.invars[0], match.writer)


def _same_predicate_type(match: Match) -> bool:
    """p has the type of the result, boolean"""
    return booleans(match) and bool(match.aval("p").shape == match.out.shape)


ROWS = [
    Row("select_n(C, *xs)", "the case of xs", build=_constant_case),
    Row("select_n(p, *xs)", "the case of xs", build=_equal_cases),
    Row("select_n(not(p), x, y)", "select_n(p, y, x)"),
    Row("select_n(p, select_n(p, x, y), z)", "select_n(p, x, z)"),
    Row("select_n(p, x, select_n(p, y, z))", "select_n(p, x, z)"),
    Row("select_n(p, 0, 1)", "p", (_same_predicate_type,)),
    Row("select_n(p, 1, 0)", "not(p)", (_same_predicate_type,)),
]
