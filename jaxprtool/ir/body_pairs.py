"""What is known so far of two bodies that are matched: which equations and values correspond."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from jaxprtool import jaxcompat
from jaxprtool.ir.body_graph import Side
from jaxprtool.ir.equation_keys import EquationKeys, Likeness
from jaxprtool.ir.regions import regions
from jaxprtool.jaxcompat import Atom, JaxprEqn, Literal, Var

#: Of equations that are alike, so many are looked at for the one that fits best.
MOST_ALIKE = 16


@dataclass(frozen=True, eq=False)
class Opened:
    """A call in one of two bodies, the equations of which are in the other itself.

    Attributes:
        which: Which of the bodies has the call.
        position: Its position there.
        inside: The pairs of the call's body and the other one.
    """

    which: int
    position: int
    inside: BodyPairs


class BodyPairs:
    """The pairs of two bodies, while they are found.

    Attributes:
        sides: The two bodies.
        pairs: The positions of the equations that correspond.
        paired: The same, from the second body to the first.
        order: The same in the order in which that was found.
        partner: The variable of the second body that corresponds to one of the first, by `id`.
        back: The same, the other way round.
        taken: The equations of each body that have a counterpart, here or in an opened call.
        literals: Of the arguments and constants of a call, and of the results of calls in it, those
            that are literals, by `id`.
        opened: The calls of one body whose equations are in the other itself.
        values: The variables that correspond, in the order in which that was found.
        results: The results of the bodies that correspond.
        read: Operands of opened calls, and what the other body reads in their place.
    """

    def __init__(self, keys: EquationKeys, sides: tuple[Side, Side]):
        self.sides = sides
        self._keys = keys
        self.pairs: dict[int, int] = {}
        self.paired: dict[int, int] = {}
        self.order: list[tuple[int, int]] = []
        self.partner: dict[int, Var] = {}
        self.back: dict[int, Var] = {}
        self.taken: tuple[set[int], set[int]] = set(), set()
        self.literals: dict[int, Literal] = {}
        self.opened: list[Opened] = []
        self.values: list[tuple[Var, Var]] = []
        self.results: list[tuple[Atom, Atom]] = []
        self.read: list[tuple[Atom, Atom]] = []

    # --- pairing ----------------------------------------------------------------------------------

    def pair(self, i: int, j: int) -> None:
        """Pair two equations, and their results."""
        self.pairs[i], self.paired[j] = j, i
        self.order.append((i, j))
        self.taken[0].add(i)
        self.taken[1].add(j)
        old, new = self.sides[0].eqns[i], self.sides[1].eqns[j]
        for k, m in self.result_pairs(old, new):
            self.correspond(old.outvars[k], new.outvars[m])

    def correspond(self, v: Var, w: Var) -> None:
        """Note that two variables correspond, unless one of them has a counterpart."""
        if id(v) not in self.partner and id(w) not in self.back:
            self.partner[id(v)], self.back[id(w)] = w, v
            self.values.append((v, w))

    def give_back(self, which: int) -> None:
        """Take back what a call's body has taken of the other one."""
        self.taken[which].difference_update(pair[which] for pair in self.order)
        for each in self.opened:
            each.inside.give_back(which)

    # --- what is known ----------------------------------------------------------------------------

    def unpaired(self) -> tuple[list[int], list[int]]:
        """Return the equations that have no counterpart, by their positions."""
        a, b = (range(len(side.eqns)) for side in self.sides)
        return [i for i in a if i not in self.taken[0]], [j for j in b if j not in self.taken[1]]

    def is_free(self, i: int, j: int) -> bool:
        """Return True if neither of two equations has a counterpart."""
        return i not in self.taken[0] and j not in self.taken[1]

    def agree(self, old: Atom, new: Atom) -> bool:
        """Return True if two variables correspond, or one has the value of the other's partner."""
        partner = self.partner.get(id(old))
        return partner is not None and (partner is new or self.is_equal(partner, new))

    def knows(self, which: int, var: Var) -> bool:
        """Return True if a variable of one of the bodies has a counterpart, in a call perhaps."""
        return id(var) in (self.partner, self.back)[which] or any(
            each.which != which and each.inside.knows(which, var) for each in self.opened
        )

    def is_equal(self, a: Atom, b: Atom) -> bool:
        """Return True if two variables of the second body have one value."""
        return a is b or self._value(a) == self._value(b)

    def _value(self, atom: Atom) -> int:
        """Return a number of a variable of the second body, the same for those of one value."""
        return self.sides[1].origins(Likeness.SAME).values.get(id(atom), id(atom))

    def conflict(self, i: int, j: int) -> bool:
        """Return True if two equations read values that have counterparts, but other ones."""
        old, new = self.sides[0].eqns[i], self.sides[1].eqns[j]
        if len(old.invars) != len(new.invars):  # which of them correspond is not known yet
            return False
        return any(
            id(x) in self.partner and id(y) in self.back and not self.agree(x, y)
            for x, y in zip(old.invars, new.invars, strict=True)
        )

    # --- operands and results of counterparts -----------------------------------------------------

    def result_pairs(self, old: JaxprEqn, new: JaxprEqn) -> list[tuple[int, int]]:
        """Return which results of two counterparts correspond, by their positions.

        If their numbers differ, those do that are known to; those of a loop that are carried from
        operands that do; those that equations which correspond read; and the others by their types,
        in order.
        """
        if len(old.outvars) == len(new.outvars):
            return [(k, k) for k in range(len(old.outvars))]
        eqns = old, new
        known = [
            [id(self.partner.get(id(v), v)) for v in old.outvars],
            [id(w) for w in new.outvars],
        ]
        begun = [self._begun(which, eqn) for which, eqn in enumerate(eqns)]
        uses = [self._uses(which, eqn) for which, eqn in enumerate(eqns)]
        types = [[str(var.aval) for var in eqn.outvars] for eqn in eqns]
        both = [list(zip(*each, strict=True)) for each in zip(begun, uses, types, strict=True)]
        return _paired_by(known, both, uses, begun, types)

    def operand_pairs(self, old: JaxprEqn, new: JaxprEqn) -> list[tuple[int, int]]:
        """Return which operands of two counterparts correspond, by their positions.

        If their numbers differ, those do that are carried to results which do; those in one role
        that have one value; and the others by their roles and types, in order.
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
        gone = [set(each.values()) for each in carried]  # carried to results that only one has
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
        taken = {i for i, _ in pairs} | gone[0], {j for _, j in pairs} | gone[1]
        return sorted(pairs + _paired_by(values, types, taken=taken))

    def _identity(self, which: int, atom: Atom) -> Hashable:
        """Return a key for an operand, one for what corresponds; for the unknown one of its own."""
        if type(atom) is Literal:
            return "literal", self._keys.literal(atom)
        if which == 1:
            return self._value(atom) if id(atom) in self.back else ("new", id(atom))
        partner = self.partner.get(id(atom))
        return ("old", id(atom)) if partner is None else self._value(partner)

    def _begun(self, which: int, eqn: JaxprEqn) -> list[Hashable]:
        """Return for each result of an equation what it is in a loop that runs no round."""
        begun = {result: eqn.invars[i] for i, result in _carried(eqn)}
        return [
            self._identity(which, begun[k]) if k in begun else (which, k)
            for k in range(len(eqn.outvars))
        ]

    def _uses(self, which: int, eqn: JaxprEqn) -> list[Hashable]:
        """Return for each result of an equation where it is read by what has a counterpart."""
        returned = {id(pair[which]): n for n, pair in enumerate(self.results)}
        found: list[Hashable] = []
        for k, var in enumerate(eqn.outvars):
            uses = set(self._readings(which, var))
            if id(var) in returned:
                uses.add((-1, returned[id(var)]))
            found.append(frozenset(uses) or (which, k))
        return found

    def _readings(self, which: int, var: Var) -> Iterator[tuple[int, int]]:
        """Yield where a variable is read by equations that have a counterpart.

        These are known by their position in the second body.
        """
        for i, place in islice(self.sides[which].readers.get(id(var), ()), MOST_ALIKE):
            if which == 1 and i in self.paired:
                yield i, place
            elif which == 0 and i in self.pairs:
                yield self.pairs[i], place

    # --- what fits best ---------------------------------------------------------------------------

    def best(self, i: int, free: deque[int], likeness: Likeness, least: int = 1) -> int | None:
        """Take from those alike the one that fits best; None if none fits at all."""
        best, most = None, 2 * least - 1
        while free and free[0] in self.taken[1]:
            free.popleft()
        for place, j in enumerate(islice(free, MOST_ALIKE)):
            if j not in self.taken[1] and (fit := self.fit(i, j, likeness)) > most:
                best, most = place, fit
        if best is None:
            return None
        found = free[best]
        del free[best]
        return found

    def fit(self, i: int, j: int, likeness: Likeness) -> int:
        """Return how well two equations fit; at most 1 if they have nothing in common."""
        old, new = self.sides[0].eqns[i], self.sides[1].eqns[j]
        same_scope = jaxcompat.name_stack(old) == jaxcompat.name_stack(new)
        if likeness is Likeness.KIND:
            reads = Counter(id(self.partner[id(x)]) for x in old.invars if id(x) in self.partner)
            common = (reads & Counter(map(id, new.invars))).total()
        elif self.conflict(i, j):
            return 0
        else:
            common = sum(map(self.agree, old.invars, new.invars))
        if not any(type(x) is not Literal for x in (*old.invars, *new.invars)):
            common += 1
        for v, w in zip(old.outvars, new.outvars, strict=False):
            common += not set(self._readings(0, v)).isdisjoint(self._readings(1, w))
        return 2 * common + same_scope


def in_order(
    old: Iterable[tuple[int, Hashable]],
    new: Iterable[tuple[int, Hashable]],
    taken: tuple[set[int], set[int]],
) -> Iterator[tuple[int, int]]:
    """Yield pairs of one key that are not taken yet, and take them."""
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
    """Return pairs of one key, those of the first kind of keys before those of the next."""
    taken = (set(), set()) if taken is None else taken
    return [pair for old, new in keys for pair in in_order(enumerate(old), enumerate(new), taken)]


def _carried(eqn: JaxprEqn) -> Sequence[tuple[int, int]]:
    """Return the operands that a loop carries, each with the result that is its last value."""
    inside = regions(eqn)
    return () if inside is None else inside.carried


def _roles(eqn: JaxprEqn) -> list[str]:
    """Return the field of the view that each operand belongs to; "" for what has none."""
    inside = regions(eqn)
    if inside is None:
        return [""] * len(eqn.invars)
    fields = {i: field for field, places in inside.operands.items() for i in places}
    return [fields.get(i, "") for i in range(len(eqn.invars))]
