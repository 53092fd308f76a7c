"""Find chains of calls of one body, joined to rounds, which one loop can replace.

This module only analyses. A *chain* is a sequence of calls of the same body, in which each call may
read results of the previous call. These results are *forwarded*: from each call to the next, the
result at a position becomes the operand at a position.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.backends import anchor
from jaxprtool.ir.dataflow import DefUse
from jaxprtool.ir.dtypes import is_float0
from jaxprtool.ir.equations import all_jaxprs, equations, is_array, size_of
from jaxprtool.ir.keys import atom_key
from jaxprtool.ir.program import Program, top_jaxpr
from jaxprtool.ir.regions import Scan, call
from jaxprtool.ir.rewrite import RewriteRule, Writer, rewrite
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import (
    AnyJaxpr,
    Atom,
    Aval,
    ClosedJaxpr,
    DebugInfo,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
)

# --- chains ---------------------------------------------------------------------------------------
# Find chains of calls of one body, and which of the calls one loop can replace.

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
    for j, called in enumerate(calls):
        read: dict[int, dict[int, int]] = defaultdict(dict)
        for position, atom in enumerate(called.invars):
            if type(atom) is not Literal and atom in definitions:
                i, out = definitions[atom]
                read[i][position] = out
        free = [i for i in read if i not in followed and _can_be_carried(body, read[i])]
        if free:
            best = max(free, key=lambda i: (len(read[i]), i))
            followed.add(best)
            links[j] = best, read[best]
    candidates: list[Chain] = []
    for last in range(len(calls)):
        if last in followed:
            continue
        path = [last]
        while path[-1] in links:
            path.append(links[path[-1]][0])
        path.reverse()
        candidates += _alike([calls[i] for i in path], [links[i][1] for i in path[1:]])
    return [chain for chain in candidates if len(chain.calls) >= FEWEST]


def _alike(calls: Sequence[JaxprEqn], forwarded: Sequence[Mapping[int, int]]) -> list[Chain]:
    """Cut a sequence of calls where the passed results change, or values cannot be stacked."""
    pieces: list[Chain] = []
    start = 0
    for i, called in enumerate(calls[1:], 1):
        if forwarded[i - 1] != forwarded[start] or not can_stack(
            calls[start], called, forwarded[start]
        ):
            pieces.append(Chain(calls[start:i], forwarded[start]))
            start = i
    if start < len(forwarded):
        pieces.append(Chain(calls[start:], forwarded[start]))
    return pieces


def can_stack(first: JaxprEqn, other: JaxprEqn, forwarded: Mapping[int, int]) -> bool:
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
class LoopPlacement:
    """The equations around a loop that replaces calls.

    Attributes:
        calls: The replaced calls.
        before: The equations that come before it.
        after: Those that come after it, which are all that depend on one of the calls.
    """

    calls: list[JaxprEqn]
    before: list[JaxprEqn]
    after: list[JaxprEqn]


def placement(chain: Chain, window: Sequence[JaxprEqn], pinned: Sequence[bool]) -> LoopPlacement:
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
    result = LoopPlacement([], [], [])
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
            result.calls.append(eqn)
            called |= keeps_order
        elif i is not None and chain.forwarded:
            break
        elif reads or (keeps_order and (behind or called)):
            result.after.append(eqn)
            behind |= keeps_order
        else:
            result.before.append(eqn)
            continue
        dependent.update(eqn.outvars)
    return result


# --- rounds ---------------------------------------------------------------------------------------
# Join consecutive calls of one body into rounds that form a chain.
#
# A chain passes results from each call to the next one (see `chains`). In some loops an iteration
# is several calls of the same body, because its parts look alike: `a, b = f(a, b), f(b, a)`. In
# others a call reads results of the call before the previous one, as in `a, b = b, f(a, b)`. Here
# such calls become calls of a *round*: a body that makes several calls, and passes on older results
# that later rounds read. These calls form a chain.

#: The maximum number of calls in a round.
_LONGEST = 8

#: For each operand of a call that is a result of another: the distance to that call in the sequence
#: of calls, and the position of the result.
_References: TypeAlias = tuple[tuple[int, int] | None, ...]


class _Past(NamedTuple):
    """A value from an earlier round; from the round itself if `rounds` is 0.

    Attributes:
        rounds: The number of rounds back.
        call: The number of the call in that round.
        result: The position of the result.
    """

    rounds: int
    call: int
    result: int


class _Given(NamedTuple):
    """An operand that is no result of a call: the number of its reader, and the position."""

    call: int
    position: int


def with_rounds(jaxpr: AnyJaxpr, usable: Callable[[JaxprEqn], bool]) -> AnyJaxpr:
    """Join the calls that are parts of rounds.

    Args:
        jaxpr: A body.
        usable: Whether an equation is a call that may become an iteration of a loop.

    Returns:
        The body with rounds as plain calls; the same object if there are none.
    """
    eqns = jaxcompat.open_jaxpr(jaxpr).eqns
    replaced: dict[int, list[JaxprEqn]] = {}
    for calls in calls_by_body(eqns, lambda eqn: not eqn.effects and usable(eqn)):
        for rounds in _found(calls):
            if rounds.adjoin(eqns):
                replaced |= rounds.joined()
    if not replaced:
        return jaxpr
    new = [replacement for eqn in eqns for replacement in replaced.get(id(eqn), [eqn])]
    return jaxcompat.replace_jaxpr(jaxpr, eqns=new)


# --- rounds among calls -----------------------------------------------------------------------


def _found(calls: Sequence[JaxprEqn]) -> list[_Rounds]:
    """Return the rounds among calls of one body, with as few calls each as possible."""
    definitions = DefUse(calls).definitions
    references = [_references(i, eqn, definitions) for i, eqn in enumerate(calls)]
    for period in range(1, min(_LONGEST, len(calls) // FEWEST) + 1):
        all_rounds = []
        for first, last in _periodic(references, period):
            last -= (last - first) % period  # only whole rounds
            pattern = references[last - period : last]
            distances = {at[0] for at in chain.from_iterable(pattern) if at is not None}
            if distances <= {1} or (period > 1 and all(d % period == 0 for d in distances)):
                continue  # independent calls, or chains already
            starts = range(first, last, period)
            rounds = _Rounds([calls[i : i + period] for i in starts], pattern).consistent()
            if rounds is not None:
                all_rounds.append(rounds)
        if all_rounds:
            return all_rounds
    return []


def _references(
    number: int, eqn: JaxprEqn, definitions: Mapping[Var, tuple[int, int]]
) -> _References:
    sources = (None if type(v) is Literal else definitions.get(v) for v in eqn.invars)
    return tuple(at and (number - at[0], at[1]) for at in sources)


def _periodic(references: Sequence[_References], period: int) -> Iterator[tuple[int, int]]:
    """Yield the first call, and the one after the last, where references have a period."""
    start, n = 0, len(references)
    while start + period < n:
        end = start + period
        while end < n and references[end] == references[end - period]:
            end += 1
        if end - start < (FEWEST - 1) * period:
            start += 1
            continue
        first = start
        while first >= period and _begins(references, first - period, start, period):
            first -= period
        if end - first >= FEWEST * period:
            yield first, end
        start = end


def _begins(references: Sequence[_References], first: int, steady: int, period: int) -> bool:
    """Return True if the calls from `first` on may begin the rounds that follow at `steady`.

    They read initial values where later rounds read results of rounds before.
    """
    for i in range(first, steady):
        pattern = references[steady + (i - steady) % period]
        for at, wanted in zip(references[i], pattern, strict=True):
            inside = at is not None and i - at[0] >= first
            inside |= wanted is not None and i - wanted[0] >= first
            if inside and at != wanted:
                return False
    return True


@dataclass(frozen=True, eq=False)
class _Rounds:
    """Calls of one body that are rounds.

    Attributes:
        calls: The calls of each round.
        references: The references of each call of a round. Where they lead to calls before the
            first round, there are initial values.
    """

    calls: Sequence[Sequence[JaxprEqn]]
    references: Sequence[_References]

    def consistent(self) -> _Rounds | None:
        """Return the rounds from which on each value has one source; None if they are too few."""
        operands = [self._operands(calls) for calls in self.calls]
        first = 0
        for i, current in enumerate(operands):
            if current is None or not all(_older(key) in current for key in self._passed):
                first = i + 1
            elif i > first:
                previous = operands[i - 1]
                assert previous is not None
                if any(not _same(current[key], previous[_older(key)]) for key in self._passed):
                    first = i
        if len(self.calls) - first < FEWEST:
            return None
        return _Rounds(self.calls[first:], self.references)

    def adjoin(self, eqns: Sequence[JaxprEqn]) -> bool:
        """Return True if no equation between the calls of a round depends on one of them."""
        number = {id(eqn): i for i, eqn in enumerate(eqns)}
        for calls in self.calls:
            call_ids, results = set(map(id, calls)), {v for eqn in calls for v in eqn.outvars}
            window = eqns[number[id(calls[0])] : number[id(calls[-1])]]
            between = [eqn for eqn in window if id(eqn) not in call_ids]
            if any(type(v) is not Literal and v in results for e in between for v in e.invars):
                return False
        return True

    def joined(self) -> dict[int, list[JaxprEqn]]:
        """Return the equations in place of each call, by its id: a round in place of its last."""
        body = self._body()
        replaced: dict[int, list[JaxprEqn]] = {}
        passed: list[Var] = []
        for calls in self.calls:
            operands = self._operands(calls)
            assert operands is not None
            operands.update(zip(self._passed, passed, strict=False))
            passed = [Var(body.invars[self._keys.index(key)].aval) for key in self._passed]
            outs = [v for eqn in calls for v in eqn.outvars]
            read = [operands[key] for key in self._keys]
            replaced |= {id(eqn): [] for eqn in calls}
            replaced[id(calls[-1])] = [call(body, read, [*outs, *passed], calls[0])]
        return replaced

    # --- the values of a round -----------------------------------------------------------------

    def _key(self, number: int, position: int) -> _Past | _Given:
        """Return the key of an operand of a call in a round."""
        reference = self.references[number][position]
        if reference is None:
            return _Given(number, position)
        back, which = divmod(number - reference[0], len(self.references))
        return _Past(-back, which, reference[1])

    @cached_property
    def _keys(self) -> list[_Past | _Given]:
        """The operands of a round, without duplicates."""
        keys = (
            self._key(i, position)
            for i, references in enumerate(self.references)
            for position in range(len(references))
        )
        return list(dict.fromkeys(key for key in keys if not _is_inside(key)))

    @cached_property
    def _passed(self) -> list[_Past]:
        """The operands from more than one round back, which each round passes on to the next."""
        return [key for key in self._keys if isinstance(key, _Past) and key.rounds > 1]

    def _operands(self, calls: Sequence[JaxprEqn]) -> dict[_Past | _Given, Atom] | None:
        """Return the operands of a round; None if one of them has two values."""
        operands: dict[_Past | _Given, Atom] = {}
        for i, eqn in enumerate(calls):
            for position, atom in enumerate(eqn.invars):
                key = self._key(i, position)
                if not _is_inside(key) and not _same(operands.setdefault(key, atom), atom):
                    return None
        return operands

    def _body(self) -> ClosedJaxpr:
        """Return the body of a round: its calls, on variables of its own."""
        like = self.calls[-1]
        arguments = jaxcompat.open_jaxpr(like[0].params["jaxpr"]).invars
        values: dict[_Past | _Given, Var] = {}
        eqns: list[JaxprEqn] = []
        for i, eqn in enumerate(like):
            read = [
                values.setdefault(self._key(i, position), Var(v.aval))
                for position, v in enumerate(arguments)
            ]
            eqns.append(eqn.replace(invars=read, outvars=[Var(v.aval) for v in eqn.outvars]))
            values |= {_Past(0, i, k): v for k, v in enumerate(eqns[-1].outvars)}
        outs = [v for eqn in eqns for v in eqn.outvars]
        results = [*outs, *(values[_older(key)] for key in self._passed)]
        invars = [values[key] for key in self._keys]
        debug = DebugInfo("jit", like[0].params["name"], ("",) * len(invars), None)
        return jaxcompat.new_jaxpr((), (), invars, results, eqns, debug)


def _is_inside(key: _Past | _Given) -> bool:
    """Return True for a value that the round itself computes."""
    return isinstance(key, _Past) and key.rounds == 0


def _older(key: _Past) -> _Past:
    """Return the key of the value in the previous round."""
    return key._replace(rounds=key.rounds - 1)


def _same(a: Atom, b: Atom) -> bool:
    return a is b or atom_key(a) == atom_key(b)


# --- rows -----------------------------------------------------------------------------------------
# The known rows of arrays along the leading axis: which variable is which row.


@dataclass(frozen=True)
class Range:
    """The rows from `start` to `stop` of an array."""

    array: Var
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        """True if these are all the rows."""
        return self.start == 0 and self.array.aval.shape[0] == self.stop


class KnownRows:
    """The known rows, with the arrays that they belong to."""

    def __init__(self) -> None:
        self._of: dict[Var, dict[Var, int]] = defaultdict(dict)
        self._slices: dict[Var, tuple[Var, int]] = {}
        #: Arrays whose rows are one-row slices of other arrays; written when they are read.
        self.of_slices: dict[Var, Var] = {}
        self._expanded: dict[Var, Var] = {}

    def of(self, atom: Atom) -> Mapping[Var, int]:
        """Return the arrays that an atom is a row of, each with the number of the row."""
        return {} if type(atom) is Literal else self._of.get(atom, {})

    def add(self, atom: Atom, array: Var, number: int) -> None:
        """Record that an atom is a row of an array."""
        if type(atom) is not Literal:
            self._of[atom][array] = number

    def record(self, eqn: JaxprEqn) -> None:
        """Record the rows that an equation takes from an array."""
        name = eqn.primitive.name
        if name == "unstack" and eqn.params["axis"] == 0:
            for i, var in enumerate(eqn.outvars):
                self.add(var, eqn.invars[0], i)
        elif name == "slice" and (number := _one_row(eqn)) is not None:
            self._record_slice(eqn, number)
        elif (
            name == "squeeze" and eqn.params["dimensions"] == (0,) and eqn.invars[0] in self._slices
        ):
            self.add(eqn.outvars[0], *self._slices[eqn.invars[0]])

    def _record_slice(self, eqn: JaxprEqn, number: int) -> None:
        (array,), (var,) = eqn.invars, eqn.outvars
        self._slices[var] = array, number
        if array not in self._expanded:
            shape = array.aval.shape
            self._expanded[array] = Var(jaxcompat.stacked_aval(shape[0], var.aval))
            self.of_slices[self._expanded[array]] = array
        self.add(var, self._expanded[array], number)

    def parts(self, values: Sequence[Atom], usable: Callable[[Var], bool]) -> list[Atom | Range]:
        """Return the parts of an array with these rows.

        Args:
            values: The rows.
            usable: Whether an array may be read.

        Returns:
            Ranges of arrays, as long as possible, and single rows.
        """
        parts: list[Atom | Range] = []
        while values:
            best, longest = values[0], 1
            for array, start in self.of(values[0]).items():
                count = 1
                while (
                    count < len(values) and self.of(values[count]).get(array, -1) == start + count
                ):
                    count += 1
                if count > longest and usable(array):
                    best, longest = Range(array, start, start + count), count
            parts.append(best)
            values = values[longest:]
        return parts


def _one_row(eqn: JaxprEqn) -> int | None:
    """Return the number of the row that a slice takes, if it takes exactly one whole row."""
    if type(eqn.invars[0]) is Literal:
        return None
    shape, starts = eqn.invars[0].aval.shape, eqn.params["start_indices"]
    whole = eqn.outvars[0].aval.shape == (1, *shape[1:])
    return starts[0] if whole and isinstance(shape[0], int) else None


# --- moving slices --------------------------------------------------------------------------------
# Slices of an array that is updated in a loop, as `x = x.at[i].set(f(x[i - 1]))`.
#
# JAX traces `x[3]` to a `slice`, whose position is a parameter, so that the iterations of an
# unrolled loop differ. As a `dynamic_slice` its position is an operand, which can be stacked like
# any other. A slice that does not become a part of a loop, or whose position is the same in all
# iterations, is written as a `slice` again.


class MovingSlices:
    """The slices of a program that are temporarily dynamic."""

    def __init__(self) -> None:
        #: The literals that are positions of these slices, by their ids.
        self._positions: dict[int, Literal] = {}

    def made_dynamic(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        """Return a jaxpr whose slices of updated arrays are dynamic."""
        updated = {
            eqn.invars[0]
            for eqn in equations(jaxcompat.open_jaxpr(jaxpr))
            if traits(eqn).updates and type(eqn.invars[0]) is not Literal
        }

        def visitor(writer: Writer) -> RewriteRule:
            def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
                if eqn.primitive.name != "slice" or not _is_block(eqn):
                    return None
                (x,), shape = eqn.invars, eqn.outvars[0].aval.shape
                if type(x) is Literal or x not in updated:
                    return None
                starts = [np.int32(start) for start in eqn.params["start_indices"]]
                outs = writer.trace(lambda x: [lax.dynamic_slice(x, starts, shape)], [x], eqn)
                self._positions.update((id(v), v) for v in writer.eqns[-1].invars[1:])
                return outs

            return rule

        return rewrite(jaxpr, visitor) if updated else jaxpr

    def made_static(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        """Return a jaxpr in which these slices are static again if their positions are known."""

        def visitor(writer: Writer) -> RewriteRule:
            def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
                starts = eqn.invars[1:]
                if eqn.primitive.name != "dynamic_slice" or not all(map(self._is_own, starts)):
                    return None
                first = [int(v.val) for v in starts]
                last = [i + n for i, n in zip(first, eqn.params["slice_sizes"], strict=True)]
                return writer.trace(lambda x: [lax.slice(x, first, last)], eqn.invars[:1], eqn)

            return rule

        return rewrite(jaxpr, visitor) if self._positions else jaxpr

    def _is_own(self, atom: Atom) -> bool:
        return id(atom) in self._positions


def _is_block(eqn: JaxprEqn) -> bool:
    """Return True if a slice has known positions, of 32 bits, and no strides."""
    numbers = (*eqn.params["start_indices"], *eqn.outvars[0].aval.shape)
    strides = eqn.params["strides"] or ()
    return all(type(n) is int and n < 1 << 31 for n in numbers) and all(n == 1 for n in strides)


# --- stacking -------------------------------------------------------------------------------------
# The memory cost of scans: arrays that are stacked for them, and those that they stack.


@dataclass(frozen=True)
class Stacking:
    """The additional memory of all scans of a program; scans of a shared body count once.

    Attributes:
        scans: The number of scans.
        copied: The bytes of the arrays that are stacked from others as inputs of a scan.
        results: The bytes of the results that scans stack.
    """

    scans: int
    copied: int
    results: int


def stacking(program: Program) -> Stacking:
    """Return the additional memory of the scans of a program; symbolic sizes count as 0."""
    top = top_jaxpr(program)
    scans: list[Scan] = []
    stacks: set[Var] = set()
    for body in all_jaxprs(top):
        stacks |= _stacks(body)
        scans += [Scan.of(eqn) for eqn in body.eqns if eqn.primitive.name == "scan"]
    gone_over = {x for scan in scans for x in scan.xs if type(x) is not Literal}
    return Stacking(
        len(scans),
        sum(size_of(array.aval, 0) for array in stacks & gone_over),
        sum(size_of(array.aval, 0) for scan in scans for array in scan.ys),
    )


def _stacks(body: Jaxpr) -> set[Var]:
    """Return the arrays that a body stacks or concatenates along the first axis."""
    return {
        eqn.outvars[0]
        for eqn in body.eqns
        if eqn.primitive.name == "stack"
        or (eqn.primitive.name == "concatenate" and eqn.params["dimension"] == 0)
    }
