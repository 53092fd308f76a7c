"""The search: a program is evaluated equation by equation, and each NaN and infinity followed.

An equation *makes* a NaN if a result has one and no operand has, and an infinity if a result has
one and all operands are finite. What it makes is an origin; values that are not finite, computed
from others that are not, have the origins of these.

A loop of many rounds is compiled (`rounds`) and stops where something is made. That round is run
equation by equation, and the loop goes on behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from jaxprtool.execute.effects import Effects, leaves_the_program
from jaxprtool.execute.loops import BY_HAND, Frame, can_be_compiled
from jaxprtool.execute.nans.rounds import body_equations, scan_rounds, while_rounds
from jaxprtool.execute.nans.shards import can_be_checked, run_checked
from jaxprtool.execute.nans.states import FINITE, INF, NAN, may_make
from jaxprtool.execute.nans.steps import Origin, Step, Value, Written, origins_of, tainted, union
from jaxprtool.execute.nans.ways import way_to
from jaxprtool.ir.interpret import Interpreter, bind, row_of
from jaxprtool.ir.structural_key import Keyless, structure
from jaxprtool.ir.structured import Call, Cond, CustomJVP, Scan, ShardMap, View, While, view
from jaxprtool.jaxcompat import AbstractRef, Aval, ClosedJaxpr, JaxprEqn, Var

#: Values that nothing reads any more are kept, for the ways that lead to what is found, as long as
#: they take no more bytes.
_REMEMBERED = 1 << 28


class Search(Interpreter):
    """A run of a program that finds all origins.

    Args:
        closed: The program's jaxpr.
        arguments: Its flat arguments.
        names: The names of the arguments.
    """

    def __init__(self, closed: ClosedJaxpr, arguments: Sequence[Any], names: Sequence[str]):
        self.origins: list[Origin] = []
        self._by_equation: dict[tuple[int, int], Origin] = {}
        self._effects = Effects()
        self._frames: list[Frame] = []
        self._refs: dict[int, tuple[Origin, ...]] = {}
        self._remembered: deque[tuple[Step, int]] = deque()
        self._bytes = 0
        self._compiled: dict[Any, Any] = {}
        given = [self._argument(*each) for each in zip(arguments, names, strict=True)]
        self.results: list[Value] = self.run(closed, given)
        for position, value in enumerate(self.results):
            for origin in value.origins:
                origin.reached.append(position)

    def _argument(self, data: Any, name: str) -> Value:
        value = Value(data, name=name)
        if value.state & NAN:
            origin = Origin(NAN, None, name, [value])
            self.origins.append(origin)
            value.origins = (origin,)
        return value

    # --- the interpreter's hooks ------------------------------------------------------------------

    def constant(self, value: object, aval: Aval) -> Value:
        return Written(value)

    def concrete(self, value: Value) -> Any:
        return value.data

    def row(self, value: Value, i: int) -> Value:
        row = Value(row_of(value.data, i), value.step, (), value.name)
        return tainted(row, value.origins)

    def stack(self, rows: Sequence[Value], var: Var) -> Value:
        data = super().stack([row.data for row in rows], var)
        return Value(data, rows[-1].step if rows else None, origins_of(rows))

    def enter(self, body: ClosedJaxpr, operands: list[Any], decider: Any = None) -> list[Any]:
        self._frames[-1].entered += 1
        return self.run(body, operands)

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Value]:
        held = view(eqn)
        if isinstance(held, ShardMap) and can_be_checked(held):
            return self._sharded(held, operands)
        if not isinstance(held, Scan | While | Cond | Call | CustomJVP):
            return self.evaluate(eqn, operands)
        with self._inside(eqn, held):
            if isinstance(held, Scan) and isinstance(held.length, int):
                equations = held.length * len(body_equations(held))
                if equations > BY_HAND and can_be_compiled(held):
                    return self._scanned(held, operands)
            if isinstance(held, While) and can_be_compiled(held):
                return self._looped(held, operands)
            return super().equation(eqn, operands)

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
        step = self._step(eqn, operands, given)
        results = [Value(x, step) for x in given]
        refs = [x for x in (*data, *given) if isinstance(jax.typeof(x), AbstractRef)]
        before = tuple(dict.fromkeys(o for ref in refs for o in self._refs.get(id(ref), ())))
        origins = union([*origins_of(operands), *before])
        contents = [Value(ref[...]) for ref in refs]
        if may_make(eqn) and not before:
            made = self._made(step, operands, [*results, *contents])
            if made is not None:
                for origin in origins:
                    if made is not origin and made not in origin.led_to:
                        origin.led_to.append(made)
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

    def _step(self, eqn: JaxprEqn, operands: Sequence[Value], given: Sequence[Any]) -> Step:
        """Return the step of an equation, and forget the operands of old ones."""
        rounds = tuple(frame.round for frame in self._frames)
        step = Step(
            eqn,
            tuple(frame.eqn for frame in self._frames),
            tuple(number for number in rounds if number is not None),
            operands,
        )
        size = sum(getattr(x, "nbytes", 0) for x in given)
        self._remembered.append((step, size))
        self._bytes += size
        while self._bytes > _REMEMBERED and len(self._remembered) > 1:
            old, size = self._remembered.popleft()
            old.operands = ()
            self._bytes -= size
        return step

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
        """Return the origin of what an equation made: of all that it makes of a kind, one."""
        known = self._by_equation.get((id(step.eqn), state))
        if known is not None:
            known.times += 1
            return known
        # Now, before what led to it is forgotten.
        way = way_to(step, results) if results else ()
        origin = Origin(state, step, "", results, tuple(operands), way)
        self.origins.append(origin)
        self._by_equation[id(step.eqn), state] = origin
        return origin

    def _sharded(self, held: ShardMap, operands: list[Value]) -> list[Value]:
        """Return the results of a `shard_map`, which is compiled as a whole."""
        outs, found = run_checked(held, _data(operands))
        step = self._step(held.eqn, operands, outs)
        seen = len(self.origins)
        for made in found:
            around = (*step.around, held.eqn)
            inner = Step(made.eqn, around, step.rounds, list(map(Value, made.operands)))
            results = list(map(Value, made.results))
            origin = self._found(made.state, inner, inner.operands, results)
            origin.devices = tuple(dict.fromkeys([*origin.devices, *made.devices]))
        origins = union([*origins_of(operands), *self.origins[seen:]])
        return [tainted(Value(x, step), origins) for x in outs]

    # --- loops ------------------------------------------------------------------------------------

    def _scanned(self, scan: Scan, operands: list[Value]) -> list[Value]:
        """Return the results of a scan, whose rounds are compiled."""
        rounds = self._rounds(scan, scan_rounds)
        n, k = len(scan.consts), len(scan.carry)
        consts, carry, xs = operands[:n], operands[n : n + k], operands[n + k :]
        ys = [jnp.zeros(var.aval.shape, var.aval.dtype) for var in scan.ys]
        frame, number, seen = self._frames[-1], 0, len(self.origins)
        while True:
            found, data, ys, _ = rounds(
                self._known(scan), jnp.int32(number), _data(carry), ys, _data(consts), _data(xs)
            )
            carry = self._carried(carry, data, operands, seen, int(found) > number)
            number = int(found)
            if number == scan.length:
                break
            frame.entered = number
            place = scan.length - 1 - number if scan.reverse else number
            outs = self.enter(scan.body, [*consts, *carry, *(self.row(x, place) for x in xs)])
            carry = outs[:k]
            ys = [y.at[place].set(out.data) for y, out in zip(ys, outs[k:], strict=True)]
            number += 1
        step = self._step(scan.eqn, operands, ys)
        stacked = [Value(y, step) for y in ys]
        origins = union([*origins_of(operands), *self.origins[seen:]])
        return [*carry, *(tainted(y, origins) for y in stacked)]

    def _looped(self, loop: While, operands: list[Value]) -> list[Value]:
        """Return the results of a while loop, whose rounds are compiled if there are many."""
        c, b = len(loop.cond_consts), len(loop.body_consts)
        deciding, consts, carry = operands[:c], operands[c : c + b], operands[c + b :]
        frame, number, seen = self._frames[-1], 0, len(self.origins)
        first = BY_HAND // max(len(body_equations(loop)), 1)
        (more,) = self.enter(loop.cond, [*deciding, *carry])
        while bool(more.data):
            if number >= first:
                rounds = self._rounds(loop, while_rounds)
                found, data, going, _ = rounds(
                    self._known(loop),
                    jnp.int32(number),
                    _data(carry),
                    more.data,
                    _data(deciding),
                    _data(consts),
                )
                carry = self._carried(carry, data, operands, seen, int(found) > number)
                number = int(found)
                if not bool(going):
                    break
            frame.entered = 2 * number + 1
            carry = self.enter(loop.body, [*consts, *carry])
            (more,) = self.enter(loop.cond, [*deciding, *carry])
            number += 1
        return carry

    def _carried(
        self, old: list[Value], data: list[Any], operands: list[Value], seen: int, moved: bool
    ) -> list[Value]:
        """Return the carry of a loop after compiled rounds."""
        if not moved:
            return old
        step = self._step(self._frames[-1].eqn, operands, data)
        origins = union([*origins_of(operands), *self.origins[seen:]])
        return [tainted(Value(x, step), origins) for x in data]

    def _known(self, loop: Scan | While) -> Any:
        """Return the flags of a loop's equations that need not stop it: of what is found already.

        What is flagged in compiled rounds and not made by hand is not among them.
        """
        flags = []
        for eqn in body_equations(loop):
            nan, inf = ((id(eqn), state) in self._by_equation for state in (NAN, INF))
            flags.append(NAN | INF if nan else INF * inf)
        return jnp.array(flags, jnp.uint8)

    def _rounds(self, loop: Scan | While, make: Any) -> Any:
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


def _data(values: Sequence[Value]) -> list[Any]:
    return [value.data for value in values]
