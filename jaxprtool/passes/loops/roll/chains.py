"""Find chains of calls of one body, and which of the calls one loop can replace.

This module only analyses. A *chain* is a sequence of calls of the same body, in which each call may
read results of the previous call. These results are *forwarded*: from each call to the next, the
result at a position becomes the operand at a position.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.caches import anchor
from jaxprtool.ir.basics.dtypes import is_float0
from jaxprtool.ir.core.equations import is_array
from jaxprtool.ir.dataflow.def_use import DefUse
from jaxprtool.ir.equality.value_keys import atom_key
from jaxprtool.jaxcompat import Atom, Aval, ClosedJaxpr, JaxprEqn, Literal, Var

#: A shorter chain stays as it is.
FEWEST = 3


@dataclass(frozen=True, eq=False)
class Chain:
    """Calls of one body.

    Attributes:
        calls: The calls, first to last.
        forwarded: For each position of an operand that is a result of the previous call, the
            position of the result. It is empty if the calls do not depend on one another.
    """

    calls: Sequence[JaxprEqn]
    forwarded: Mapping[int, int]

    @property
    def body(self) -> ClosedJaxpr:
        """The body that all of them call."""
        return jaxcompat.close_jaxpr(self.calls[0].params["jaxpr"])

    @cached_property
    def consts(self) -> list[int]:
        """The positions of the operands that are the same for all calls."""
        first = self.calls[0].invars
        return [
            i
            for i, atom in enumerate(first)
            if i not in self.forwarded
            and all(atom_key(atom) == atom_key(call.invars[i]) for call in self.calls)
        ]

    @cached_property
    def carry(self) -> list[int]:
        """The positions of the operands that are results of the previous call."""
        return sorted(self.forwarded)

    @cached_property
    def xs(self) -> list[int]:
        """The positions of the operands that differ between calls and are not carried."""
        taken = {*self.consts, *self.forwarded}
        return [i for i in range(len(self.calls[0].invars)) if i not in taken]

    def column(self, position: int) -> list[Atom]:
        """Return the operands of all calls at a position."""
        return [call.invars[position] for call in self.calls]

    def first(self, count: int) -> Chain:
        """Return the chain of the first `count` calls."""
        return self if count == len(self.calls) else Chain(self.calls[:count], self.forwarded)


def calls_by_body(
    eqns: Iterable[JaxprEqn], usable: Callable[[JaxprEqn], bool]
) -> list[list[JaxprEqn]]:
    """Return the calls among equations that `usable` accepts, by body and context, in order."""
    groups: dict[object, list[JaxprEqn]] = defaultdict(list)
    for eqn in eqns:
        if usable(eqn):
            groups[anchor(eqn.params["jaxpr"]), eqn.ctx].append(eqn)
    return [calls for calls in groups.values() if len(calls) >= FEWEST]


def chains(calls: Sequence[JaxprEqn]) -> list[Chain]:
    """Return the chains among calls of one body that pass results on.

    Each call follows at most one other: among those it reads, the one with most results read.
    """
    definitions = DefUse(calls).definitions
    body = jaxcompat.open_jaxpr(calls[0].params["jaxpr"])
    followed: set[int] = set()
    links: dict[int, tuple[int, dict[int, int]]] = {}
    for j, call in enumerate(calls):
        read: dict[int, dict[int, int]] = defaultdict(dict)
        for position, atom in enumerate(call.invars):
            if type(atom) is not Literal and atom in definitions:
                i, out = definitions[atom]
                read[i][position] = out
        free = [i for i in read if i not in followed and _can_be_carried(body, read[i])]
        if free:
            best = max(free, key=lambda i: (len(read[i]), i))
            followed.add(best)
            links[j] = best, read[best]
    found: list[Chain] = []
    for last in range(len(calls)):
        if last in followed:
            continue
        path = [last]
        while path[-1] in links:
            path.append(links[path[-1]][0])
        path.reverse()
        found += _alike([calls[i] for i in path], [links[i][1] for i in path[1:]])
    return [chain for chain in found if len(chain.calls) >= FEWEST]


def _alike(calls: Sequence[JaxprEqn], forwarded: Sequence[Mapping[int, int]]) -> list[Chain]:
    """Cut a sequence of calls where the passed results change, or values cannot be stacked."""
    found: list[Chain] = []
    start = 0
    for i, call in enumerate(calls[1:], 1):
        if forwarded[i - 1] != forwarded[start] or not fits(calls[start], call, forwarded[start]):
            found.append(Chain(calls[start:i], forwarded[start]))
            start = i
    if start < len(forwarded):
        found.append(Chain(calls[start:], forwarded[start]))
    return found


def fits(first: JaxprEqn, other: JaxprEqn, forwarded: Mapping[int, int]) -> bool:
    """Return True if the operands in which two calls differ can be stacked."""
    pairs = enumerate(zip(first.invars, other.invars, strict=True))
    return all(
        i in forwarded or _is_stackable(a.aval) or atom_key(a) == atom_key(b) for i, (a, b) in pairs
    )


def _is_stackable(aval: Aval) -> bool:
    """Return True if values of a type can be carried by a loop, and be stacked."""
    return is_array(aval) and not is_float0(aval)


def _can_be_carried(body: jaxcompat.Jaxpr, forwarded: Mapping[int, int]) -> bool:
    """Return True if results have the types of the operands they become, up to weak types."""
    return all(
        _is_stackable(body.invars[i].aval)
        and body.invars[i].aval.strip_weak_type() == body.outvars[out].aval.strip_weak_type()
        for i, out in forwarded.items()
    )


@dataclass(frozen=True, eq=False)
class Placement:
    """The equations around a loop that replaces calls.

    Attributes:
        calls: The replaced calls.
        before: The equations that come before it.
        after: Those that come after it, which are all that depend on one of the calls.
    """

    calls: list[JaxprEqn]
    before: list[JaxprEqn]
    after: list[JaxprEqn]


def placement(chain: Chain, window: Sequence[JaxprEqn], pinned: Sequence[bool]) -> Placement:
    """Return which calls of a chain one loop can replace, from the first on.

    A call cannot be in the loop if it reads a value that depends on another call of the loop and is
    not passed on, or if an equation with a fixed order would have to stay between the two. The
    chain ends before such a call; if calls do not pass results on, only that call stays outside.

    Args:
        chain: The chain.
        window: All equations from the first call of the chain to the last.
        pinned: For each of these, whether it must keep its order among pinned equations.
    """
    number = {id(call): i for i, call in enumerate(chain.calls)}
    found = Placement([], [], [])
    dependent: set[Var] = set()
    called = behind = False  # is a pinned call in the loop; is a pinned equation after it
    for eqn, keeps_order in zip(window, pinned, strict=True):
        i = number.get(id(eqn))
        forwarded = chain.forwarded if i else {}
        reads = any(
            type(v) is not Literal and v in dependent and position not in forwarded
            for position, v in enumerate(eqn.invars)
        )
        if i is not None and not reads and not (keeps_order and behind):
            found.calls.append(eqn)
            called |= keeps_order
        elif i is not None and chain.forwarded:
            break
        elif reads or (keeps_order and (behind or called)):
            found.after.append(eqn)
            behind |= keeps_order
        else:
            found.before.append(eqn)
            continue
        dependent.update(eqn.outvars)
    return found
