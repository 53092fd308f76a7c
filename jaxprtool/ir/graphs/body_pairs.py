"""Two bodies that are matched: which equations and variables correspond."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from jaxprtool import jaxcompat
from jaxprtool.ir.core.equations import substitute
from jaxprtool.ir.core.regions import regions
from jaxprtool.ir.equality.equation_keys import EquationKeys, MatchLevel
from jaxprtool.ir.graphs.body_graph import BodyGraph
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Jaxpr, JaxprEqn, Literal, Var

#: The number of candidates among which the best fit is searched; it keeps the matching linear.
MOST_ALIKE = 16


@dataclass(frozen=True, eq=False)
class InlinedCall:
    """A call in one body whose equations are inlined in the other body.

    Attributes:
        which: The body that has the call, 0 or 1.
        position: The position of the call in that body.
        inside: The pairs of the call's body and the other body.
    """

    which: int
    position: int
    inside: MatchedBody


class MatchedBody:
    """Two bodies that correspond, with the pairs of equations and variables found so far.

    Attributes:
        graphs: The graphs of the two bodies.
        keys: The numbering of equations and types, for comparisons.
        path: The pairs of equations around the bodies, the outermost first.
        call: If one of the bodies is that of a call that the other program has inlined: the program
            with the call, 0 or 1, and the call. Otherwise None.
        pairs: The position in the second body of each paired equation of the first.
        paired: The inverse of `pairs`.
        order: The pairs of positions, in the order in which they were found.
        partner: The variable of the second body for each paired variable of the first, by `id`.
        inverse: The inverse of `partner`.
        taken: For each body, the positions of the equations that have a counterpart, here or in an
            opened call.
        literals: The literals that variables of an opened call represent: its arguments, its
            constants, and the results of calls in it.
        opened_calls: The calls in one body whose equations are inlined in the other.
        values: The pairs of variables, in the order in which they were found.
        results: The pairs of results of the two bodies.
        read: The operands of opened calls, each with the atom that the other body reads in its
            place.
    """

    def __init__(self, keys: EquationKeys, graphs: tuple[BodyGraph, BodyGraph]):
        self.graphs = graphs
        self.keys = keys
        self.path: tuple[tuple[JaxprEqn, JaxprEqn], ...] = ()
        self.call: tuple[int, JaxprEqn] | None = None
        self.pairs: dict[int, int] = {}
        self.paired: dict[int, int] = {}
        self.order: list[tuple[int, int]] = []
        self.partner: dict[int, Var] = {}
        self.inverse: dict[int, Var] = {}
        self.taken: tuple[set[int], set[int]] = set(), set()
        self.literals: dict[Var, Literal] = {}
        self.opened_calls: list[InlinedCall] = []
        self.values: list[tuple[Var, Var]] = []
        self.results: list[tuple[Atom, Atom]] = []
        self.read: list[tuple[Atom, Atom]] = []

    # --- pairing ----------------------------------------------------------------------------------

    def pair(self, i: int, j: int) -> None:
        """Pair two equations and their results."""
        self.pairs[i], self.paired[j] = j, i
        self.order.append((i, j))
        self.taken[0].add(i)
        self.taken[1].add(j)
        old, new = self.graphs[0].eqns[i], self.graphs[1].eqns[j]
        for k, m in self.result_pairs(old, new):
            self.correspond(old.outvars[k], new.outvars[m])

    def correspond(self, v: Var, w: Var) -> None:
        """Pair two variables, unless one of them already has a counterpart."""
        if id(v) not in self.partner and id(w) not in self.inverse:
            self.partner[id(v)], self.inverse[id(w)] = w, v
            self.values.append((v, w))

    def rollback(self, which: int) -> None:
        """Free the equations of a body that were paired with those of an opened call."""
        self.taken[which].difference_update(pair[which] for pair in self.order)
        for each in self.opened_calls:
            each.inside.rollback(which)

    # --- properties of the matching ---------------------------------------------------------------

    def unpaired(self) -> tuple[list[int], list[int]]:
        """Return, for each body, the positions of the equations without a counterpart."""
        a, b = (range(len(graph.eqns)) for graph in self.graphs)
        return [i for i in a if i not in self.taken[0]], [j for j in b if j not in self.taken[1]]

    def is_free(self, i: int, j: int) -> bool:
        """Return True if neither of two equations has a counterpart."""
        return i not in self.taken[0] and j not in self.taken[1]

    def corresponds(self, old: Atom, new: Atom) -> bool:
        """Return True if `new` is the partner of `old`, or computes the same value as it."""
        partner = self.partner.get(id(old))
        return partner is not None and (partner is new or self.is_equal(partner, new))

    def is_matched(self, which: int, var: Var) -> bool:
        """Return True if a variable of one of the bodies is paired, here or in an opened call."""
        return id(var) in (self.partner, self.inverse)[which] or any(
            each.which != which and each.inside.is_matched(which, var) for each in self.opened_calls
        )

    def is_equal(self, a: Atom, b: Atom) -> bool:
        """Return True if two variables of the second body have the same value number."""
        return a is b or self._value(a) == self._value(b)

    def _value(self, atom: Atom) -> int:
        """Return the value number of a variable of the second body."""
        return self.graphs[1].origins(MatchLevel.SAME).values.get(id(atom), id(atom))

    def conflict(self, i: int, j: int) -> bool:
        """Return True if two operands at the same place are paired, but not with each other.

        Equations with different numbers of operands conflict if none of their operands agree.
        """
        old, new = self.graphs[0].eqns[i], self.graphs[1].eqns[j]
        if len(old.invars) != len(new.invars):
            olds = {self._value(self.partner[id(x)]) for x in old.invars if id(x) in self.partner}
            news = {self._value(y) for y in new.invars if id(y) in self.inverse}
            return bool(olds and news) and olds.isdisjoint(news)
        return any(
            id(x) in self.partner and id(y) in self.inverse and not self.corresponds(x, y)
            for x, y in zip(old.invars, new.invars, strict=True)
        )

    # --- results ----------------------------------------------------------------------------------

    @property
    def before(self) -> AnyJaxpr:
        """The body in the first program, as its equation holds it."""
        return self.graphs[0].held

    @property
    def after(self) -> AnyJaxpr:
        """The body in the second program, as its equation holds it."""
        return self.graphs[1].held

    @property
    def bodies(self) -> tuple[Jaxpr, Jaxpr]:
        """The two bodies, open."""
        return self.graphs[0].jaxpr, self.graphs[1].jaxpr

    @cached_property
    def equations(self) -> list[tuple[JaxprEqn, JaxprEqn]]:
        """The pairs of equations, in order of the first body."""
        before, after = (body.eqns for body in self.bodies)
        return [(before[i], after[j]) for i, j in sorted(self.pairs.items())]

    @cached_property
    def opened(self) -> tuple[set[int], set[int]]:
        """For each body, the positions of the calls that the other body has inlined."""
        found: tuple[set[int], set[int]] = set(), set()
        for each in self.opened_calls:
            found[each.which].add(each.position)
        return found

    def is_alone(self, which: int, position: int) -> bool:
        """Return True if an equation has no counterpart, here or in an opened call."""
        return position not in self.taken[which]

    def counterpart(self, var: Atom) -> Var | None:
        """Return the variable of the second body that corresponds to an atom of the first."""
        return self.partner.get(id(var))

    def agree(self, old: Atom, new: Atom) -> bool:
        """Return True if two operands correspond, or are the same literal."""
        if self.literals:
            old, new = substitute((old, new), self.literals)
        if type(old) is Literal and type(new) is Literal:
            return self.keys.literal(old) == self.keys.literal(new)
        return self.corresponds(old, new)

    def is_rewired(self, old: Atom, new: Atom) -> bool:
        """Return True if two operands differ only because another value is read.

        An operand is not rewired if an inserted equation now computes it from the value that was
        read before, or if the removed equation that computed it read the value that is read now.
        """
        if self.agree(old, new):
            return False
        if type(old) is Literal or type(new) is Literal:
            return True
        if id(old) in self.partner and id(new) in self.inverse:
            return True
        a, b = self.graphs
        olds, news = a.nearest_known(old, self.partner), b.nearest_known(new, self.inverse)
        if not olds or not news:
            return False
        partners = [self.partner[id(var)] for var in olds]
        return not any(self.is_equal(x, y) for x in partners for y in news)

    # --- operands and results of counterparts -----------------------------------------------------

    def result_pairs(self, old: JaxprEqn, new: JaxprEqn) -> list[tuple[int, int]]:
        """Return the positions of the corresponding results of two counterparts.

        If the equations have different numbers of results, results are paired in this order: by
        known partners; by initial values and readers; by readers; by initial values; by types, in
        order. The initial value is the operand that a loop carries to the result.
        """
        if len(old.outvars) == len(new.outvars):
            return [(k, k) for k in range(len(old.outvars))]
        eqns = old, new
        known = [
            [id(self.partner.get(id(v), v)) for v in old.outvars],
            [id(w) for w in new.outvars],
        ]
        begun = [self._initial_values(which, eqn) for which, eqn in enumerate(eqns)]
        uses = [self._uses(which, eqn) for which, eqn in enumerate(eqns)]
        types = [[str(var.aval) for var in eqn.outvars] for eqn in eqns]
        both = [list(zip(*each, strict=True)) for each in zip(begun, uses, types, strict=True)]
        return _paired_by(known, both, uses, begun, types)

    def operand_pairs(self, old: JaxprEqn, new: JaxprEqn) -> list[tuple[int, int]]:
        """Return the positions of the corresponding operands of two counterparts.

        If the equations have different numbers of operands, the initial values of corresponding
        carries are paired first, then operands with the same role and value, and then operands with
        the same role and type, in order. The role is a field of the loop's view, such as `consts`.
        """
        if len(old.invars) == len(new.invars):
            return [(i, i) for i in range(len(old.invars))]
        eqns = old, new
        carried = [{result: i for i, result in _carried(eqn)} for eqn in eqns]
        pairs = [
            (carried[0].pop(k), carried[1].pop(m))
            for k, m in self.result_pairs(old, new)
            if k in carried[0] and m in carried[1]
        ]
        unpaired = [set(each.values()) for each in carried]  # their results have no counterpart
        roles = [_roles(eqn) for eqn in eqns]
        values = [
            [
                (role, self._identity(which, atom))
                for role, atom in zip(each, eqn.invars, strict=True)
            ]
            for which, (each, eqn) in enumerate(zip(roles, eqns, strict=True))
        ]
        types = [
            [(role, str(atom.aval)) for role, atom in zip(each, eqn.invars, strict=True)]
            for each, eqn in zip(roles, eqns, strict=True)
        ]
        taken = {i for i, _ in pairs} | unpaired[0], {j for _, j in pairs} | unpaired[1]
        return sorted(pairs + _paired_by(values, types, taken=taken))

    def _identity(self, which: int, atom: Atom) -> Hashable:
        """Return a key for an operand, equal for counterparts and unique if it has none."""
        if type(atom) is Literal:
            return "literal", self.keys.literal(atom)
        if which == 1:
            return self._value(atom) if id(atom) in self.inverse else ("new", id(atom))
        partner = self.partner.get(id(atom))
        return ("old", id(atom)) if partner is None else self._value(partner)

    def _initial_values(self, which: int, eqn: JaxprEqn) -> list[Hashable]:
        """Return a key for the initial value of each result that a loop carries.

        Other results have unique keys.
        """
        begun = {result: eqn.invars[i] for i, result in _carried(eqn)}
        return [
            self._identity(which, begun[k]) if k in begun else (which, k)
            for k in range(len(eqn.outvars))
        ]

    def _uses(self, which: int, eqn: JaxprEqn) -> list[Hashable]:
        """Return, for each result, a key of the paired equations and body results that read it."""
        returned = {id(pair[which]): n for n, pair in enumerate(self.results)}
        found: list[Hashable] = []
        for k, var in enumerate(eqn.outvars):
            uses = set(self._paired_readers(which, var))
            if id(var) in returned:
                uses.add((-1, returned[id(var)]))
            found.append(frozenset(uses) or (which, k))
        return found

    def _paired_readers(self, which: int, var: Var) -> Iterator[tuple[int, int]]:
        """Yield the paired equations that read a variable, and the place of the operand.

        The equations are given by their positions in the second body, for both bodies.
        """
        for i, place in islice(self.graphs[which].uses.get(var, ()), MOST_ALIKE):
            if which == 1 and i in self.paired:
                yield i, place
            elif which == 0 and i in self.pairs:
                yield self.pairs[i], place

    # --- the best fit -----------------------------------------------------------------------------

    def best(self, i: int, free: deque[int], level: MatchLevel) -> int | None:
        """Remove the candidate that fits equation `i` best from `free`, and return it.

        Returns None if none of the candidates has anything in common with the equation.
        """
        best, most = None, 1
        while free and free[0] in self.taken[1]:
            free.popleft()
        for place, j in enumerate(islice(free, MOST_ALIKE)):
            if j not in self.taken[1] and (fit := self.fit(i, j, level)) > most:
                best, most = place, fit
        if best is None:
            return None
        found = free[best]
        del free[best]
        return found

    def fit(self, i: int, j: int, level: MatchLevel) -> int:
        """Score a pair of equations: 2 for each common operand or reader, and 1 for the scope.

        At most 1 means that the equations have nothing in common.
        """
        old, new = self.graphs[0].eqns[i], self.graphs[1].eqns[j]
        same_scope = jaxcompat.name_stack(old) == jaxcompat.name_stack(new)
        if level is MatchLevel.KIND:
            reads = Counter(id(self.partner[id(x)]) for x in old.invars if id(x) in self.partner)
            common = (reads & Counter(map(id, new.invars))).total()
        elif self.conflict(i, j):
            return 0
        else:
            common = sum(map(self.corresponds, old.invars, new.invars))
        if not any(type(x) is not Literal for x in (*old.invars, *new.invars)):
            common += 1
        for v, w in zip(old.outvars, new.outvars, strict=False):
            common += not set(self._paired_readers(0, v)).isdisjoint(self._paired_readers(1, w))
        return 2 * common + same_scope


def in_order(
    old: Iterable[tuple[int, Hashable]],
    new: Iterable[tuple[int, Hashable]],
    taken: tuple[set[int], set[int]],
) -> Iterator[tuple[int, int]]:
    """Yield the pairs of positions with the same key that are not taken yet, and take them."""
    waiting: dict[Hashable, deque[int]] = defaultdict(deque)
    for j, key in new:
        if j not in taken[1]:
            waiting[key].append(j)
    for i, key in old:
        if i not in taken[0] and (found := waiting.get(key)):
            j = found.popleft()
            taken[0].add(i)
            taken[1].add(j)
            yield i, j


def _paired_by(
    *keys: Sequence[Sequence[Hashable]], taken: tuple[set[int], set[int]] | None = None
) -> list[tuple[int, int]]:
    """Pair positions with equal keys, by the first two sequences of keys, then by the next two.

    `keys` are pairs of sequences, one for each body.
    """
    taken = (set(), set()) if taken is None else taken
    return [pair for old, new in keys for pair in in_order(enumerate(old), enumerate(new), taken)]


def _carried(eqn: JaxprEqn) -> Sequence[tuple[int, int]]:
    """Return the carries of a loop, as pairs of an operand's position and a result's."""
    inside = regions(eqn)
    return () if inside is None else inside.carried


def _roles(eqn: JaxprEqn) -> list[str]:
    """Return, for each operand, the field of the equation's view that it belongs to, or ""."""
    inside = regions(eqn)
    if inside is None:
        return [""] * len(eqn.invars)
    fields = {i: field for field, positions in inside.operands.items() for i in positions}
    return [fields.get(i, "") for i in range(len(eqn.invars))]
