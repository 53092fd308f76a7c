"""A program as it runs, equation by equation, with the values of those that are watched.

The bodies of long loops run compiled, and give their values so many rounds at a time (`collected`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.execute.effects import Effects, leaves_the_program
from jaxprtool.execute.loops import BY_HAND, Frame, can_be_compiled
from jaxprtool.execute.nans.shards import can_be_checked
from jaxprtool.execute.watch.collected import (
    ScanRounds,
    Site,
    Wanted,
    WhileRounds,
    can_be_collected,
    shard_map_values,
)
from jaxprtool.execute.watch.numbers import has_numbers, is_on_host
from jaxprtool.execute.watch.selected import Rounds
from jaxprtool.ir.equations import Contains, equations, named
from jaxprtool.ir.interpret import Interpreter, bind
from jaxprtool.ir.structured import Call, Cond, CustomJVP, Scan, ShardMap, View, While, view
from jaxprtool.jaxcompat import ClosedJaxpr, JaxprEqn


@dataclass(frozen=True)
class Result:
    """A result of an equation.

    Attributes:
        eqn: The equation.
        number: Which of its results.
        around: The equations whose bodies it is in, the outermost first.
    """

    eqn: JaxprEqn
    number: int
    around: tuple[JaxprEqn, ...]


#: Takes the values of a result of some executions: the numbers of the rounds around each, a row for
#: each, and the values of all in one array.
Take = Callable[[Result, np.ndarray, Any], None]

#: Is called behind an equation at which to stop, with the values of what ran there since.
Stop = Callable[[tuple[int, ...], list[tuple[JaxprEqn, list[Any], Sequence[Any]]]], None]


class Stepping(Interpreter):
    """A run of a program that hands on the values of equations.

    Args:
        wanted: Which equations are watched.
        rounds: Which rounds of loops.
        take: Takes the values.
        stops: The equations, by `id`, whose operands and results are kept for `stop`.
        last: Those of them behind which it is called.
        stop: Is called there.
    """

    def __init__(
        self,
        wanted: Wanted,
        rounds: Rounds,
        take: Take,
        stops: Collection[int] = (),
        last: Collection[int] = (),
        stop: Stop | None = None,
    ):
        #: What is not watched inside, though it has equations.
        self.left_out: list[str] = []
        self._wanted, self._selected, self._take = wanted, rounds, take
        self._stops, self._last, self._stop = stops, last, stop
        self._kept: list[tuple[JaxprEqn, list[Any], Sequence[Any]]] = []
        self._has_stop = Contains(lambda eqn: id(eqn) in stops)
        self._effects = Effects()
        self._frames: list[Frame] = []
        self._lengths: list[int | None] = []
        self._on = True
        self._compiled: dict[int, Any] = {}

    # --- the interpreter's hooks ------------------------------------------------------------------

    def enter(self, body: ClosedJaxpr, operands: list[Any], decider: Any = None) -> list[Any]:
        self._frames[-1].entered += 1
        self._on = all(
            frame.round is None or self._selected.has(frame.round, length)
            for frame, length in zip(self._frames, self._lengths, strict=True)
        )
        return self.run(body, operands)

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        held = view(eqn)
        if isinstance(held, ShardMap) and can_be_checked(held):
            results: Sequence[Any] = self._sharded(held, operands)
        elif not isinstance(held, Scan | While | Cond | Call | CustomJVP):
            if held is not None and isinstance(held, ShardMap):
                self._leave_out(eqn)
            results = self.evaluate(eqn, operands)
        else:
            on = self._on
            with self._inside(eqn, held, operands):
                results = self._structured(held, eqn, operands)
            self._on = on
        self._note(eqn, results)
        if id(eqn) in self._stops and self._on and self._stop is not None:
            self._kept.append((eqn, operands, results))
            if id(eqn) in self._last:
                self._stop(self._rounds(), self._kept)
                self._kept = []
        return results

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        if leaves_the_program(eqn):
            return list(self._effects.call(eqn, operands))
        return bind(eqn, operands)

    @contextmanager
    def _inside(self, eqn: JaxprEqn, held: View, operands: list[Any]) -> Iterator[None]:
        length = held.length if isinstance(held, Scan) else None
        if isinstance(held, While) and self._on and self._selected.need_length:
            length = self._counted(held, operands)
        self._frames.append(Frame(eqn, held))
        self._lengths.append(length)
        yield
        self._frames.pop()
        self._lengths.pop()

    def _structured(self, held: View, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        if isinstance(held, Scan | While) and can_be_compiled(held) and can_be_collected(held):
            bodies = (held.body,) if isinstance(held, Scan) else (held.body, held.cond)
            if not any(map(self._has_stop, bodies)):
                number = sum(len(list(equations(jaxcompat.open_jaxpr(body)))) for body in bodies)
                if isinstance(held, While):
                    return self._looped(held, operands, BY_HAND // max(number, 1))
                if isinstance(held.length, int) and held.length * number > BY_HAND:
                    return self._scanned(held, operands)
        return super().equation(eqn, operands)

    def _counted(self, loop: While, operands: list[Any]) -> int:
        """Return how many rounds a loop has, which runs once for that."""
        if loop.eqn.effects:
            raise UnsupportedError(
                f"rounds cannot be counted from the last one of {named(loop.eqn)}, which has "
                "effects",
                "count them from the first: --rounds 0,10",
            )
        c, b = len(loop.cond_consts), len(loop.body_consts)
        key = ~id(loop.eqn)

        more, once = jaxcompat.jaxpr_as_fun(loop.cond), jaxcompat.jaxpr_as_fun(loop.body)

        def count(deciding: Any, consts: Any, carry: Any) -> Any:
            return jax.lax.while_loop(
                lambda state: more(*deciding, *state[1])[0],
                lambda state: (state[0] + 1, once(*consts, *state[1])),
                (jnp.int32(0), carry),
            )[0]

        run = self._compiled.setdefault(key, jax.jit(count))
        return int(run(operands[:c], operands[c : c + b], operands[c + b :]))

    # --- values -----------------------------------------------------------------------------------

    def _rounds(self) -> tuple[int, ...]:
        return tuple(n for frame in self._frames if (n := frame.round) is not None)

    def _around(self) -> tuple[JaxprEqn, ...]:
        return tuple(frame.eqn for frame in self._frames)

    def _note(self, eqn: JaxprEqn, results: Sequence[Any]) -> None:
        if self._on and self._wanted(eqn):
            for i, x in enumerate(results):
                if has_numbers(x):
                    rounds = np.array([self._rounds()], int)
                    self._take(Result(eqn, i, self._around()), rounds, x)

    def _leave_out(self, eqn: JaxprEqn) -> None:
        if (text := named(eqn)) not in self.left_out:
            self.left_out.append(text)

    def _sharded(self, held: ShardMap, operands: list[Any]) -> list[Any]:
        """Return the results of a `shard_map`, which is compiled as a whole."""
        outs, sites, values = shard_map_values(held, self._wanted, operands)
        for inner in equations(jaxcompat.open_jaxpr(held.body)):
            if isinstance(view(inner), While | ShardMap):
                self._leave_out(inner)
        if self._on:
            with self._inside(held.eqn, held, operands):
                for site in sites:
                    self._take_site(site, values, None)
        return outs

    def _take_site(
        self,
        site: Site,
        values: Sequence[Any],
        first: np.ndarray | None,
    ) -> None:
        """Hand on the values of a site in the equation that is running.

        Args:
            site: The site.
            values: What was collected.
            first: The number of the round of each index of the first axis; None if that axis is of
                devices.
        """
        outer = self._rounds()[: len(self._rounds()) - (first is not None)]
        loops = [held.length for eqn in site.around if isinstance(held := view(eqn), Scan)]
        # NumPy reads the memory of the CPU as it is, and compiles nothing.
        data = values[site.place]
        data = np.asarray(data) if is_on_host(data) else data
        numbers = [np.arange(data.shape[0]) if first is None else first + site.offset]
        numbers += map(np.arange, loops)
        lengths = [self._lengths[-1], *loops]
        shape = tuple(map(len, numbers))
        chosen = np.ones(shape, bool)
        for axis, (row, length) in enumerate(zip(numbers, lengths, strict=True)):
            if axis or first is not None:
                chosen &= _along(self._selected.among(row, length), axis, len(shape))
        for place, branch in site.taken:
            index = np.asarray(values[place])
            chosen &= _along(index == branch, 0, len(shape))
        rounds = np.stack(np.meshgrid(*numbers, indexing="ij"), -1)[chosen]
        if not len(rounds):
            return
        rounds = np.column_stack(
            [*(np.full(len(rounds), n) for n in outer), rounds[:, int(first is None) :]]
        )
        data = data.reshape(-1, *data.shape[len(shape) :])
        if not chosen.all():
            data = data[np.flatnonzero(chosen)]
        around = (*self._around(), *site.around)
        self._take(Result(site.eqn, site.result, around), rounds, data)

    # --- loops ------------------------------------------------------------------------------------

    def _scanned(self, scan: Scan, operands: list[Any]) -> list[Any]:
        """Return the results of a scan, whose rounds are compiled."""
        rounds = self._made(scan.eqn, lambda: ScanRounds(scan, self._wanted, operands))
        n, k = len(scan.consts), len(scan.carry)
        stacked: list[Any] = []
        for first in range(0, scan.length, rounds.at_a_time):
            number = min(rounds.at_a_time, scan.length - first)
            carry, ys, values = rounds(number, first, operands)
            operands = [*operands[:n], *carry, *operands[n + k :]]
            stacked.append(ys)
            self._frames[-1].entered = first + number
            if self._on:
                low = scan.length - first - number if scan.reverse else first
                for site in rounds.sites:
                    self._take_site(site, values, np.arange(low, low + number))
        stacked = stacked[::-1] if scan.reverse else stacked
        ys = [
            jnp.concatenate(parts) if len(parts) > 1 else parts[0]
            for parts in zip(*stacked, strict=True)
        ]
        return [*operands[n : n + k], *ys]

    def _looped(self, loop: While, operands: list[Any], first: int) -> list[Any]:
        """Return the results of a while loop, whose rounds after `first` are compiled."""
        c, b = len(loop.cond_consts), len(loop.body_consts)
        deciding, consts, carry = operands[:c], operands[c : c + b], operands[c + b :]
        frame, number, on = self._frames[-1], 0, self._on
        (more,) = self.enter(loop.cond, [*deciding, *carry])
        while bool(more):
            if number < first:
                carry = self.enter(loop.body, [*consts, *carry])
                (more,) = self.enter(loop.cond, [*deciding, *carry])
                number += 1
                continue
            rounds = self._made(loop.eqn, lambda: WhileRounds(loop, self._wanted))
            ran, carry, more, values = rounds([*deciding, *consts, *carry])
            ran = int(ran)
            frame.entered = 2 * (number + ran)
            if on:
                values = [x[:ran] for x in values]
                for site in rounds.sites:
                    self._take_site(site, values, np.arange(number, number + ran))
            number += ran
        return list(carry)

    def _made(self, eqn: JaxprEqn, make: Callable[[], Any]) -> Any:
        """Return the compiled rounds of a loop."""
        # Equations live as long as the program, so that an `id` stays theirs.
        if id(eqn) not in self._compiled:
            self._compiled[id(eqn)] = make()
        return self._compiled[id(eqn)]


def _along(values: Any, axis: int, rank: int) -> Any:
    """Return an array with axes of size 1 around its own, which begin at `axis`."""
    return values.reshape((1,) * axis + values.shape + (1,) * (rank - axis - values.ndim))
