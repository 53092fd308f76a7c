"""Find where a pattern fits in a body, searching from its root against the flow of data.

Each step matches a value of the pattern with one of the body's. An argument matches any value, the
same at each use; a literal or a constant matches one of the same value; a result of an equation
matches the same result of a similar one, whose operands then must match likewise. At a choice
(operands that may be swapped, several equations that use a value), the alternatives are tried in
program order, with backtracking.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.core.equations import is_array
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.equality.equivalence import same_operation
from jaxprtool.ir.equality.value_keys import same_array
from jaxprtool.jaxcompat import Atom, DropVar, JaxprEqn, Literal, Var
from jaxprtool.passes.patterns.graphs import DataflowGraph, Pattern, same_number

#: The maximum number of steps of one search; a pattern of a hundred equations takes a few hundred
#: if it fits.
_MOST_STEPS = 20_000
#: The maximum number of fits at one position that are tried: operands that may be swapped yield
#: very many.
_MOST_FITS = 64


@dataclass(frozen=True)
class Fit:
    """The atoms and positions in the body of the pattern's variables and equations."""

    atoms: dict[Var, Atom]
    positions: dict[int, int]


@dataclass(frozen=True)
class _AsNumber:
    """A variable of the pattern filled with one number, to be matched as such."""

    var: Var


#: Two equations by their positions, or two atoms, of the pattern and of the body.
Goal = tuple[Any, Any]
#: The remaining goals, as a linked list: the first goal, and the rest.
Goals = tuple[Goal, "Goals"] | None


class PatternSearch:
    """One search, from one equation of a body.

    `exact` requires the same parameters, literals and constants; otherwise, equations match if they
    have the same primitive. Those that are `taken` never match.
    """

    def __init__(self, pattern: Pattern, body: DataflowGraph, taken: set[int], *, exact: bool):
        self.pattern, self.body, self.taken, self.exact = pattern, body, taken, exact
        self.atoms: dict[Var, Atom] = {}
        self.positions: dict[int, int] = {}
        self._done: list[tuple[dict[Any, Any], Any]] = []

    def fits(self, root: int) -> Iterator[Fit]:
        """Return the first matches of the pattern with its root at this position."""
        return islice(self._fits(root), _MOST_FITS)

    def _fits(self, root: int) -> Iterator[Fit]:
        choices: list[tuple[Goals, int]] = [(((self.pattern.root, root), None), 0)]
        for _ in range(_MOST_STEPS):
            if not choices:
                return
            goals, mark = choices.pop()
            self._undo(mark)
            if goals is not None:
                (p, q), rest = goals
                if type(p) is int:
                    alternatives = self._equation(p, q)
                else:
                    alternatives = (
                        self._bind(p.var, q) if type(p) is _AsNumber else self._atom(p, q)
                    )
            else:
                rest = None
                missing = self._missing()
                if missing is None:
                    yield Fit(dict(self.atoms), dict(self.positions))
                    continue
                alternatives = self._users(missing)
            mark = len(self._done)
            choices += [(_chain(alternative, rest), mark) for alternative in reversed(alternatives)]

    # --- one step: the alternatives, each as goals; none if it does not match --------------------

    def _atom(self, p: Atom, q: Atom) -> list[list[Goal]]:
        if type(p) is Literal:
            return self._number(p, q)
        if p in self.atoms:
            return [[]] if self._same(self.atoms[p], q) else []
        position = self.pattern.position(p)
        if position is None:
            if p in self.pattern.constants:
                return self._constant(p, q)
            return self._bind(p, q) if is_array(q.aval) else []
        alternatives: list[list[Goal]] = []
        made_by = self.body.position(q)
        if made_by is not None:
            alternatives = [[(position, made_by), (p, q)]]
        if self.pattern.number(p) is not None and self._number(p, q):
            alternatives.append([(_AsNumber(p), q)])
        return alternatives

    def _same(self, a: Atom, b: Atom) -> bool:
        """Return True if two atoms of the body are one variable, or literals of the same bits."""
        if type(a) is not Literal or type(b) is not Literal:
            return a is b
        return a.aval == b.aval and same_number(self.body.number(a), self.body.number(b))

    def _bind(self, p: Var, q: Atom) -> list[list[Goal]]:
        self.atoms[p] = q
        self._done.append((self.atoms, p))
        return [[]]

    def _number(self, p: Atom, q: Atom) -> list[list[Goal]]:
        """Match a value filled with one number; its type may be weak in either graph."""
        number = self.body.number(q)
        if number is None:
            return []
        if not self.exact:
            return [[]]
        same = p.aval.shape == q.aval.shape and same_number(number, self.pattern.number(p))
        return [[]] if same else []

    def _constant(self, p: Var, q: Atom) -> list[list[Goal]]:
        """Match a constant of the pattern: an array of the same bits, or the same scalar."""
        if not self.exact:
            return self._bind(p, q)
        if self.pattern.number(p) is not None:
            return self._bind(p, q) if self._number(p, q) else []
        if type(q) is Literal or q not in self.body.constants or p.aval != q.aval:
            return []
        same = same_array(self.pattern.constants[p], self.body.constants[q])
        return self._bind(p, q) if same else []

    def _equation(self, i: int, j: int) -> list[list[Goal]]:
        if i in self.positions:
            return [[]] if self.positions[i] == j else []
        p, q = self.pattern.eqns[i], self.body.eqns[j]
        if p.primitive is not q.primitive or j in self.taken or q.effects:
            return []
        if len(p.invars) != len(q.invars) or len(p.outvars) != len(q.outvars):
            return []
        if self.exact and not same_parameters(p, q):
            return []
        self.positions[i] = j
        self._done.append((self.positions, i))
        for a, b in zip(p.outvars, q.outvars, strict=True):
            if type(a) is DropVar:
                continue
            if a in self.atoms and self.atoms[a] is not b:
                return []
            self._bind(a, b)
        operands = list(zip(p.invars, q.invars, strict=True))
        if len(operands) != 2 or not traits(p).commutes(p.invars[0].aval.dtype):
            return [operands]
        return [operands, list(zip(p.invars, reversed(q.invars), strict=True))]

    # --- the pattern's other roots --------------------------------------------------------------

    def _missing(self) -> int | None:
        """Return an equation of the pattern without a position that uses a value that has one."""
        if len(self.positions) == len(self.pattern.eqns):
            return None
        results = zip(self.pattern.outputs, self.pattern.computed, strict=True)
        wanted = [v for v, flag in results if flag]
        found: set[int] = set()
        while wanted:
            position = self.pattern.position(wanted.pop())
            if position is None or position in found or position in self.positions:
                continue
            found.add(position)
            wanted += [v for v in self.pattern.eqns[position].invars if type(v) is not Literal]
        for i in sorted(found):
            if any(type(v) is not Literal and v in self.atoms for v in self.pattern.eqns[i].invars):
                return i
        return min(found, default=None)

    def _users(self, i: int) -> list[list[Goal]]:
        """Return the equations of the body that may match the pattern's `i`."""
        operands = (self.atoms.get(v) for v in self.pattern.eqns[i].invars if type(v) is Var)
        readers = [self.body.readers(v) for v in operands if type(v) is Var]
        return [[(i, j)] for j in min(readers, key=len, default=())]

    def _undo(self, mark: int) -> None:
        while len(self._done) > mark:
            where, key = self._done.pop()
            del where[key]


def _chain(goals: list[Goal], rest: Goals) -> Goals:
    for goal in reversed(goals):
        rest = goal, rest
    return rest


# --- matching equations ---------------------------------------------------------------------------

_PLAIN = (bool, int, str, type(None), np.dtype)


def same_parameters(p: JaxprEqn, q: JaxprEqn) -> bool:
    """Return True if two equations of one primitive compute the same from operands of equal types.

    Jaxprs in their parameters are compared up to names. Their contexts must be equal.
    """
    settings = jaxcompat.context_settings
    if p.ctx is not q.ctx and settings(p.ctx) != settings(q.ctx):
        return False
    if p.params.keys() != q.params.keys():
        return False
    different = [(a, q.params[name]) for name, a in p.params.items() if a is not q.params[name]]
    plain = [(a, b) for a, b in different if _is_plain(a) and _is_plain(b)]
    if any(a != b for a, b in plain):
        return False
    unsure = len(plain) < len(different)
    try:
        return not unsure or same_operation(p, q)
    except UnsupportedError:  # a custom rule cannot be traced
        return False


def _is_plain(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
