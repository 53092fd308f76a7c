"""The search: a program is evaluated equation by equation, and each NaN and infinity followed.

An equation *makes* a NaN if a result has one and no operand has, and an infinity if a result has
one and all operands are finite. What it makes is an origin; values that are not finite, computed
from others that are not, have the origins of these. Each time that an equation makes something is
an origin of its own, until there are many; in the end, the first that reaches a result stands for
all of that equation.

A NaN that the program holds is made by the equation that reads it. Where none does, since it is
returned as it is or handed to a loop or a `shard_map` as a whole, it is an origin itself.

A loop of many rounds is compiled (`rounds`) and stops where something is made. That round is run
equation by equation, and the loop goes on behind it. It stops again where something gets out of a
round that equations made in earlier rounds, too, but that was dropped there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool.execute.effects import Effects, leaves_the_program
from jaxprtool.execute.loops import BY_HAND, Frame, can_be_compiled
from jaxprtool.execute.nans.followed import Followed
from jaxprtool.execute.nans.rounds import Known, Ran, body_equations, scan_rounds, while_rounds
from jaxprtool.execute.nans.shards import CheckedShards, can_be_checked
from jaxprtool.execute.nans.states import (
    FINITE,
    INF,
    NAN,
    has_state,
    is_moving,
    may_make,
    state_of,
)
from jaxprtool.execute.nans.steps import (
    Moved,
    Origin,
    Step,
    Value,
    Written,
    origins_of,
    standing_for,
    tainted,
    union,
)
from jaxprtool.execute.nans.ways import way_to
from jaxprtool.ir.interpret import Interpreter, bind, row_of
from jaxprtool.ir.structural_key import Keyless, structure
from jaxprtool.ir.structured import Call, Cond, CustomJVP, Scan, ShardMap, View, While, view
from jaxprtool.jaxcompat import AbstractRef, Aval, ClosedJaxpr, JaxprEqn, Var

#: Values that nothing reads any more are kept, for the ways that lead to what is found, as long as
#: they take no more bytes.
_REMEMBERED = 1 << 28

#: So many origins of one equation that are not dropped are told apart.
_APART = 16

#: So many rounds of each loop run equation by equation before others are compiled, which takes as
#: long as some hundred rounds.
_ROUNDS_BY_HAND = 32

#: A loop that is compiled stops so often for what its equations are known to make.
_STOPS = 64


class Search(Interpreter):
    """A run of a program that finds all origins.

    Args:
        closed: The program's jaxpr.
        arguments: Its flat arguments.
        names: The names of the arguments.
        clean: Loops, by `id`, that make nothing of operands without origins.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        arguments: Sequence[Any],
        names: Sequence[str],
        clean: Collection[int] = (),
    ):
        self._clean = clean
        self._arguments: list[Origin] = []
        self._held: dict[int, Origin] = {}
        self._by_equation: dict[tuple[int, int], list[Origin]] = {}
        # Those that a value which is still read may have, in the order in which they were made.
        self._open: list[Origin] = []
        self._number = 0
        self._effects = Effects()
        self._frames: list[Frame] = []
        self._refs: dict[int, tuple[Origin, ...]] = {}
        self._remembered: deque[tuple[Step | Moved, int]] = deque()
        self._bytes = 0
        self._compiled: dict[Any, Any] = {}
        # How many rounds of each loop have run equation by equation.
        self._by_hand: Counter[int] = Counter()
        given = [self._argument(*each) for each in zip(arguments, names, strict=True)]
        self.results: list[Value] = list(map(self._result, self.run(closed, given)))
        for position, value in enumerate(self.results):
            for origin in value.origins:
                origin.reached.append(position)
        #: Those found, of each equation and state one, in the order in which they were made.
        found = map(standing_for, self._by_equation.values())
        made = sorted(found, key=lambda origin: origin.number)
        self.origins = [*self._arguments, *made, *self._held.values()]

    def _argument(self, data: Any, name: str) -> Value:
        value = Value(data, name=name)
        if value.state & NAN:
            origin = Origin(NAN, None, name, [value])
            self._arguments.append(origin)
            value.origins = (origin,)
        return value

    def _result(self, value: Value) -> Value:
        """Return a result; a NaN in it that comes from nowhere else is held by the program."""
        if value.origins or not state_of(value.data) & NAN:
            return value
        return self._holding(value.data)

    def _operand(self, value: Value) -> Value:
        """Return a value as a loop or a `shard_map` takes it, where a constant is no longer one."""
        return self._holding(value.data) if _holds_nan(value) else value

    def _holding(self, data: Any) -> Value:
        """Return a value whose NaN the program holds."""
        value = Value(data)
        origin = self._held.setdefault(id(data), Origin(NAN, None, "", [value]))
        value.origins = (origin,)
        return value

    # --- the interpreter's hooks ------------------------------------------------------------------

    def constant(self, value: object, aval: Aval) -> Value:
        return Written(value)

    def concrete(self, value: Value) -> Any:
        return value.data

    def row(self, value: Value, i: int) -> Value:
        moved = Moved([value], i)
        row = Value(row_of(value.data, i), value.step, (), value.name, value.position, moved)
        self._remember(moved, 0)
        return tainted(row, value.origins)

    def stack(self, rows: Sequence[Value], var: Var) -> Value:
        data = super().stack([row.data for row in rows], var)
        if not rows:
            return Value(data)
        moved, last = Moved(rows), rows[-1]
        self._remember(moved, getattr(data, "nbytes", 0))
        return Value(data, last.step, origins_of(rows), last.name, last.position, moved)

    def enter(self, body: ClosedJaxpr, operands: list[Any], decider: Any = None) -> list[Any]:
        self._frames[-1].entered += 1
        first = len(self._open)
        results = self.run(body, operands)
        self.close(first, results)
        return results

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Value]:
        held = view(eqn)
        if isinstance(held, Scan | While | ShardMap):
            operands = list(map(self._operand, operands))
        if isinstance(held, ShardMap) and can_be_checked(held):
            return self._sharded(held, operands)
        if not isinstance(held, Scan | While | Cond | Call | CustomJVP):
            return self.evaluate(eqn, operands)
        if id(eqn) in self._clean and not any(x.origins for x in operands) and not eqn.effects:
            given = list(bind(eqn, _data(operands)))
            return self.step(eqn, operands, given)[1]
        with self._inside(eqn, held):
            if isinstance(held, Scan) and self._is_long(held) and can_be_compiled(held):
                return self._scanned(held, operands)
            if isinstance(held, While) and can_be_compiled(held):
                return self._looped(held, operands)
            return super().equation(eqn, operands)

    def _is_long(self, scan: Scan) -> bool:
        """Return True if the rounds of a scan are too many to run by hand, and count them."""
        if not isinstance(scan.length, int):
            return False
        self._by_hand[id(scan.eqn)] += scan.length
        equations = scan.length * len(body_equations(scan))
        return equations > BY_HAND and self._by_hand[id(scan.eqn)] > _ROUNDS_BY_HAND

    @contextmanager
    def _inside(self, eqn: JaxprEqn, held: View) -> Iterator[None]:
        self._frames.append(Frame(eqn, held))
        yield
        self._frames.pop()

    # --- one equation -----------------------------------------------------------------------------

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> list[Value]:
        data = [x.data for x in operands]
        if leaves_the_program(eqn):
            given = list(self._effects.call(eqn, data))
        else:
            given = list(bind(eqn, data))
        step, results = self.step(eqn, operands, given)
        refs = [x for x in (*data, *given) if isinstance(jax.typeof(x), AbstractRef)]
        before = tuple(dict.fromkeys(o for ref in refs for o in self._refs.get(id(ref), ())))
        origins = union([*origins_of(operands), *before])
        contents = [Value(ref[...]) for ref in refs]
        if not before and (may_make(eqn) or any(map(_holds_nan, operands))):
            made = self._made(step, operands, [*results, *contents])
            if made is not None:
                for origin in origins:
                    origin.led_to.setdefault((id(eqn), made.state), made)
                origins = union([*origins, made])
        if origins:
            for x in (*results, *contents):
                tainted(x, origins)
            if not any(x.origins for x in (*results, *contents)):
                for origin in origins:
                    origin.dropped = step
        for ref, x in zip(refs, contents, strict=True):
            self._refs[id(ref)] = x.origins
        return results

    def step(
        self, eqn: JaxprEqn, operands: Sequence[Value], given: Sequence[Any]
    ) -> tuple[Step, list[Value]]:
        """Return the step of an equation, and its results."""
        rounds = tuple(frame.round for frame in self._frames)
        step = Step(
            eqn,
            tuple(frame.eqn for frame in self._frames),
            tuple(number for number in rounds if number is not None),
            operands,
            held=_is_held(eqn, operands),
        )
        self._remember(step, sum(getattr(x, "nbytes", 0) for x in given))
        return step, [Value(x, step, position=i) for i, x in enumerate(given)]

    def _remember(self, step: Step | Moved, size: int) -> None:
        """Keep the operands of a step, and forget those of old ones."""
        self._remembered.append((step, size))
        self._bytes += size
        while self._bytes > _REMEMBERED and len(self._remembered) > 1:
            old, size = self._remembered.popleft()
            old.operands = ()
            self._bytes -= size

    def _made(
        self, step: Step, operands: Sequence[Value], results: Sequence[Value]
    ) -> Origin | None:
        """Return the origin of what an equation made, if it made something."""
        given, new = FINITE, FINITE
        for x in results:
            new |= x.state
        if new == FINITE:
            return None
        for x in operands:
            given |= x.state
        if new & NAN and not given & NAN:
            state = NAN
        elif new & INF and given == FINITE:
            state = INF
        else:
            return None
        return self._found(state, step, operands, results)

    def _found(
        self, state: int, step: Step, operands: Sequence[Value], results: Sequence[Value]
    ) -> Origin:
        """Return the origin of what an equation made."""
        known = self._by_equation.setdefault((id(step.eqn), state), [])
        if sum(not each.closed for each in known) >= _APART:
            known[-1].times += 1
            return known[-1]
        # Now, before what led to it is forgotten.
        way = way_to(step, results) if results else ()
        origin = Origin(state, step, "", results, tuple(operands), way, number=self._number)
        self._number += 1
        known.append(origin)
        self._open.append(origin)
        return origin

    @property
    def open_count(self) -> int:
        """How many origins a value may have that is still read."""
        return len(self._open)

    def close(self, first: int, values: Sequence[Value]) -> None:
        """Note which origins are dropped: those open from the `first` on that no value has.

        Of those of one equation that are dropped, the first is kept.
        """
        if len(self._open) == first:
            return
        in_refs = (origin for origins in self._refs.values() for origin in origins)
        alive = {*origins_of(values), *in_refs}
        for origin in self._open[first:]:
            if origin not in alive:
                origin.closed = True
                known = self._by_equation[id(origin.step.eqn), origin.state]  # type: ignore[union-attr]
                before = next(each for each in known if each.closed)
                if before is not origin:
                    before.times += origin.times
                    known.remove(origin)
        self._open[first:] = [each for each in self._open[first:] if each in alive]

    def _sharded(self, held: ShardMap, operands: list[Value]) -> list[Value]:
        """Return the results of a `shard_map`, which is compiled as a whole."""
        checked = CheckedShards(held, _data(operands))
        step, outs = self.step(held.eqn, operands, checked.results)
        for made in checked.made():
            around = (*step.around, held.eqn)
            sources = checked.sources(made.eqn)
            given = [
                _shard(*each, operands, around, step.rounds)
                for each in zip(made.operands, sources, strict=False)
            ]
            inner = Step(made.eqn, around, step.rounds, given)
            results = [Value(x, inner, position=i) for i, x in enumerate(made.results)]
            origin = self._found(made.state, inner, inner.operands, results)
            origin.devices = tuple(dict.fromkeys([*origin.devices, *made.devices]))
        followed = Followed(self.last_made_by(checked.equations), operands)
        if followed and any(x.state for x in outs):
            masks = checked.masks(followed.table(checked.equations), followed.masks(operands))
            for x, origins in zip(outs, followed.all_of(masks), strict=True):
                tainted(x, origins)
        return outs

    # --- loops ------------------------------------------------------------------------------------

    def _scanned(self, scan: Scan, operands: list[Value]) -> list[Value]:
        """Return the results of a scan, whose rounds are compiled."""
        n, k = len(scan.consts), len(scan.carry)
        consts, carry, xs = operands[:n], operands[n : n + k], operands[n + k :]
        ys = [Value(jnp.zeros(var.aval.shape, var.aval.dtype)) for var in scan.ys]
        rounds = _Rounds(self, scan, scan_rounds, operands, (consts, xs))
        number = 0
        while True:
            number, carry, ys, _ = rounds.run(number, carry, ys)
            if number == scan.length:
                break
            self._frames[-1].entered = number
            place = scan.length - 1 - number if scan.reverse else number
            outs = self.enter(scan.body, [*consts, *carry, *(self.row(x, place) for x in xs)])
            carry = outs[:k]
            ys = [
                Value(y.data.at[place].set(out.data), None, union([*y.origins, *out.origins]))
                for y, out in zip(ys, outs[k:], strict=True)
            ]
            number += 1
        _, outs = self.step(scan.eqn, operands, _data([*carry, *ys]))
        return [*carry, *map(tainted, outs[k:], (y.origins for y in ys))]

    def _looped(self, loop: While, operands: list[Value]) -> list[Value]:
        """Return the results of a while loop, whose rounds are compiled if there are many."""
        c, b = len(loop.cond_consts), len(loop.body_consts)
        deciding, consts, carry = operands[:c], operands[c : c + b], operands[c + b :]
        rounds = _Rounds(self, loop, while_rounds, operands, (deciding, consts))
        first, number = BY_HAND // max(len(body_equations(loop)), 1), 0
        (more,) = self.enter(loop.cond, [*deciding, *carry])
        while bool(more.data):
            self._by_hand[id(loop.eqn)] += 1
            if number >= first and self._by_hand[id(loop.eqn)] > _ROUNDS_BY_HAND:
                number, carry, _, going = rounds.run(number, carry, [])
                if not going:
                    break
            self._frames[-1].entered = 2 * number + 1
            carry = self.enter(loop.body, [*consts, *carry])
            (more,) = self.enter(loop.cond, [*deciding, *carry])
            number += 1
        return carry

    def last_made_by(self, eqns: Iterable[JaxprEqn]) -> dict[tuple[int, int], Origin]:
        """Return the last origins of equations, by `id` and state."""
        keys = [(id(eqn), state) for eqn in eqns for state in (NAN, INF)]
        return {key: self._by_equation[key][-1] for key in keys if key in self._by_equation}

    def compiled(self, loop: Scan | While, make: Any) -> Any:
        """Return the compiled rounds of a loop, which those of the same structure share."""
        try:
            bodies = [loop.body] if isinstance(loop, Scan) else [loop.body, loop.cond]
            length = (loop.length, loop.reverse) if isinstance(loop, Scan) else None
            counts = len(loop.body.invars), len(loop.eqn.invars), len(loop.eqn.outvars)
            key: Any = (length, counts, *map(structure, bodies))
        except Keyless:
            key = id(loop.eqn)
        if key not in self._compiled:
            self._compiled[key] = make(loop)
        return self._compiled[key]


def _shard(
    data: Any,
    source: JaxprEqn | int | None,
    operands: Sequence[Value],
    around: tuple[JaxprEqn, ...],
    rounds: tuple[int, ...],
) -> Value:
    """Return a value on one device, given what computes it, or which operand it is a shard of."""
    if source is None:
        return Written(data)
    if isinstance(source, int):
        return Value(data, operands[source].step, name=operands[source].name)
    return Value(data, Step(source, around, rounds, ()))


class _Rounds:
    """Runs rounds of a loop that are compiled.

    Args:
        search: The search.
        loop: The loop.
        make: What makes the function that runs them.
        operands: The loop's operands.
        given: Those of them that each round is given, in the groups that the function takes.
    """

    def __init__(
        self,
        search: Search,
        loop: Scan | While,
        make: Callable[[Any], Callable[..., Ran]],
        operands: Sequence[Value],
        given: tuple[Sequence[Value], Sequence[Value]],
    ):
        self._search, self._operands, self._given = search, operands, given
        self._eqn, self._equations = loop.eqn, body_equations(loop)
        self._run = search.compiled(loop, make)
        self._first = search.open_count
        self._stops = 0

    def run(
        self, number: int, carry: list[Value], ys: list[Value]
    ) -> tuple[int, list[Value], list[Value], bool]:
        """Run rounds from one on, until one is to be run by hand.

        Returns the number of that round, or of all rounds, the carry and the stacked results before
        it, and whether there is another.
        """
        made = self._search.last_made_by(self._equations)
        values = [*carry, *ys, *self._given[0], *self._given[1]]
        followed = Followed(made, values)
        ignored = [[(id(e), state) in made for state in (NAN, INF)] for e in self._equations]
        known = Known(
            jnp.array(ignored, bool).reshape(-1, 2),
            followed.table(self._equations) if followed else None,
            jnp.array(self._stops < _STOPS),
        )
        start = Ran(
            jnp.int32(number),
            _data(carry),
            followed.masks(carry),
            jnp.zeros((len(self._equations), 2), jnp.int32),
            _data(ys),
            followed.masks(ys),
            jnp.array(True),
        )
        masks = tuple(map(followed.masks, self._given))
        ran: Ran = self._run(known, start, *map(_data, self._given), masks)
        self._stops += 1
        self._count(made, np.asarray(ran.counts))
        origins = followed.all_of(ran.ys_masks)
        ys = [Value(y, None, each) for y, each in zip(ran.ys, origins, strict=True)]
        if int(ran.number) > number:
            _, outs = self._search.step(self._eqn, self._operands, ran.carry)
            carry = list(map(tainted, outs, followed.all_of(ran.carry_masks)))
        self._search.close(self._first, [*carry, *ys])
        return int(ran.number), carry, ys, bool(ran.more)

    def _count(self, made: Mapping[tuple[int, int], Origin], counts: np.ndarray) -> None:
        """Add how often what is known was made again."""
        for number, column in np.argwhere(counts):
            key = id(self._equations[number]), (NAN, INF)[column]
            made[key].times += int(counts[number, column])


def _is_held(eqn: JaxprEqn, operands: Sequence[Value]) -> bool:
    """Return True if what an equation gives does not depend on an argument, but for indices."""
    if is_moving(eqn):
        operands = [x for x in operands if has_state(x.data)] or operands
    return not eqn.effects and all(x.held for x in operands)


def _holds_nan(value: Value) -> bool:
    return isinstance(value, Written) and value.has_nan


def _data(values: Sequence[Value]) -> list[Any]:
    return [value.data for value in values]
