"""Join consecutive calls of one body into rounds that form a chain.

A chain passes results from each call to the next one (see `chains`). In some loops an iteration is
several calls of the same body, because its parts look alike: `a, b = f(a, b), f(b, a)`. In others a
call reads results of the call before the previous one, as in `a, b = b, f(a, b)`. Here such calls
become calls of a *round*: a body that makes several calls, and passes on older results that later
rounds read. These calls form a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple, TypeAlias

from jaxprtool import jaxcompat
from jaxprtool.ir.core.structured import call
from jaxprtool.ir.dataflow.def_use import DefUse
from jaxprtool.ir.equality.value_keys import atom_key
from jaxprtool.jaxcompat import AnyJaxpr, Atom, ClosedJaxpr, DebugInfo, JaxprEqn, Literal, Var
from jaxprtool.passes.loops.roll.chains import FEWEST, calls_by_body

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
    new = [each for eqn in eqns for each in replaced.get(id(eqn), [eqn])]
    return jaxcompat.replace_jaxpr(jaxpr, eqns=new)


# --- rounds among calls -----------------------------------------------------------------------


def _found(calls: Sequence[JaxprEqn]) -> list[_Rounds]:
    """Return the rounds among calls of one body, with as few calls each as possible."""
    definitions = DefUse(calls).definitions
    references = [_references(i, eqn, definitions) for i, eqn in enumerate(calls)]
    for period in range(1, min(_LONGEST, len(calls) // FEWEST) + 1):
        found = []
        for first, last in _periodic(references, period):
            last -= (last - first) % period  # only whole rounds
            pattern = references[last - period : last]
            distances = {at[0] for at in chain.from_iterable(pattern) if at is not None}
            if distances <= {1} or (period > 1 and all(d % period == 0 for d in distances)):
                continue  # independent calls, or chains already
            starts = range(first, last, period)
            rounds = _Rounds([calls[i : i + period] for i in starts], pattern).consistent()
            if rounds is not None:
                found.append(rounds)
        if found:
            return found
    return []


def _references(
    number: int, eqn: JaxprEqn, definitions: Mapping[Var, tuple[int, int]]
) -> _References:
    found = (None if type(v) is Literal else definitions.get(v) for v in eqn.invars)
    return tuple(at and (number - at[0], at[1]) for at in found)


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
        for i, found in enumerate(operands):
            if found is None or not all(_older(key) in found for key in self._passed):
                first = i + 1
            elif i > first:
                before = operands[i - 1]
                assert before is not None
                if any(not _same(found[key], before[_older(key)]) for key in self._passed):
                    first = i
        if len(self.calls) - first < FEWEST:
            return None
        return _Rounds(self.calls[first:], self.references)

    def adjoin(self, eqns: Sequence[JaxprEqn]) -> bool:
        """Return True if no equation between the calls of a round depends on one of them."""
        number = {id(eqn): i for i, eqn in enumerate(eqns)}
        for calls in self.calls:
            own, made = set(map(id, calls)), {v for eqn in calls for v in eqn.outvars}
            window = eqns[number[id(calls[0])] : number[id(calls[-1])]]
            between = [eqn for eqn in window if id(eqn) not in own]
            if any(type(v) is not Literal and v in made for e in between for v in e.invars):
                return False
        return True

    def joined(self) -> dict[int, list[JaxprEqn]]:
        """Return the equations in place of each call, by its id: a round in place of its last."""
        body = self._body()
        found: dict[int, list[JaxprEqn]] = {}
        passed: list[Var] = []
        for calls in self.calls:
            operands = self._operands(calls)
            assert operands is not None
            operands.update(zip(self._passed, passed, strict=False))
            passed = [Var(body.invars[self._keys.index(key)].aval) for key in self._passed]
            outs = [v for eqn in calls for v in eqn.outvars]
            read = [operands[key] for key in self._keys]
            found |= {id(eqn): [] for eqn in calls}
            found[id(calls[-1])] = [call(body, read, [*outs, *passed], calls[0])]
        return found

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
        found: dict[_Past | _Given, Atom] = {}
        for i, eqn in enumerate(calls):
            for position, atom in enumerate(eqn.invars):
                key = self._key(i, position)
                if not _is_inside(key) and not _same(found.setdefault(key, atom), atom):
                    return None
        return found

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
        made = [v for eqn in eqns for v in eqn.outvars]
        results = [*made, *(values[_older(key)] for key in self._passed)]
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
