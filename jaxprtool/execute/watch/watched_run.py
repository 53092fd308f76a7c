"""A run of a program, piece by piece, that reports the values of watched equations.

Pieces are compiled with the values as further results (`collected`). Between pieces are loops
without a known number of iterations, external calls, and equations at which it stops.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.execute.stepping.interpreter import Frame, SteppingInterpreter
from jaxprtool.execute.stepping.iterations import advanced, bodies_of, started
from jaxprtool.execute.watch.collected import (
    BodyValues,
    CompiledScan,
    CompiledWhile,
    Site,
    Wanted,
    shard_map_values,
)
from jaxprtool.execute.watch.numbers import on_host
from jaxprtool.execute.watch.pieces import Piece, Pieces
from jaxprtool.execute.watch.selected import IterationChoice
from jaxprtool.ir.core.equations import equations, named
from jaxprtool.ir.core.structured import Scan, ShardMap, View, While, view
from jaxprtool.ir.evaluation.interpret import LoopOperands, slice_number
from jaxprtool.jaxcompat import ClosedJaxpr, JaxprEqn, Literal, Var


@dataclass(frozen=True)
class Result:
    """A result of an equation.

    Attributes:
        eqn: The equation.
        number: The index of the result.
        around: The equations whose bodies it is in, the outermost first.
    """

    eqn: JaxprEqn
    number: int
    around: tuple[JaxprEqn, ...]


#: Receives a result's values in some executions: the enclosing iteration numbers, one row per
#: execution, and all values in one array.
Take = Callable[[Result, np.ndarray, Any], None]

#: An equation that has run, with its operands and results.
Ran = tuple[JaxprEqn, list[Any], Sequence[Any]]

#: Called after an equation at which to stop, with the values of the equations run since.
Stop = Callable[[tuple[int, ...], list[Ran]], None]


class WatchedRun(SteppingInterpreter):
    """A run of a program that reports the values of equations.

    Args:
        wanted: Which results of equations are watched.
        iterations: The iterations of loops to watch.
        take: Receives the values.
        stops: The equations, by `id`, whose operands and results are passed to `stop`.
        last: Those of them after which `stop` is called.
        stop: Called with the values.
    """

    def __init__(
        self,
        wanted: Wanted,
        iterations: IterationChoice,
        take: Take,
        stops: Collection[int] = (),
        last: Collection[int] = (),
        stop: Stop | None = None,
    ):
        super().__init__()
        #: Equations whose inner equations are not watched.
        self.left_out: list[str] = []
        self._wanted, self._selected, self._take = wanted, iterations, take
        self._stops, self._last, self._stop = stops, last, stop
        self._kept: list[Ran] = []
        self._pieces = Pieces(wanted, lambda eqn: id(eqn) in stops)
        self._on = True
        self._compiled: dict[tuple[str, int], Any] = {}

    # --- the interpreter's hooks ------------------------------------------------------------------

    def run(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        self._on = all(
            frame.iteration is None or self._selected.has(frame.iteration, frame.length)
            for frame in self.frames
        )
        env: dict[Var, Any] = dict(zip(closed.invars, args, strict=True))
        env.update(zip(closed.constvars, closed.consts, strict=True))
        for piece in self._pieces.of(closed):
            operands = [env[v] for v in piece.body.invars]
            run = self._run_together if piece.together else self._run_by_step
            env.update(zip(piece.body.outvars, run(piece, operands), strict=True))
            env = {v: env[v] for v in piece.live}
        return [v.val if isinstance(v, Literal) else env[v] for v in closed.outvars]

    def _run_by_step(self, piece: Piece, operands: list[Any]) -> list[Any]:
        return super().run(piece.body, operands)

    def _run_together(self, piece: Piece, operands: list[Any]) -> list[Any]:
        run = self._made(("run", piece), lambda: BodyValues(piece.body, self._wanted, operands))
        results, values = run(operands)
        if self._on:
            self._take_sites(run.sites, values)
        return results

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        on = self._on
        results = super().equation(eqn, operands)
        self._on = on
        self._note(eqn, results)
        if id(eqn) in self._stops and self._on and self._stop is not None:
            self._kept.append((eqn, operands, results))
            if id(eqn) in self._last:
                self._stop(self.iterations, self._kept)
                self._kept = []
        return results

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        if isinstance(view(eqn), ShardMap):
            self._leave_out(eqn)
        return super().evaluate(eqn, operands)

    def frame(self, held: View, operands: list[Any]) -> Frame:
        frame = super().frame(held, operands)
        if isinstance(held, While) and self._on and self._selected.need_length:
            frame.length = self._counted(held, operands)
        return frame

    def is_compiled(self, loop: Scan | While) -> bool:
        if isinstance(loop, Scan) and not loop.length:
            return False
        return not any(map(self._pieces.steps, bodies_of(loop)))

    def _counted(self, loop: While, operands: list[Any]) -> int:
        """Return the number of iterations of a loop, which is run once to count them."""
        if loop.eqn.effects:
            raise UnsupportedError(
                f"iterations of {named(loop.eqn)} cannot be counted from the last one, because "
                "it has effects",
                "count them from the first: --rounds 0,10",
            )

        def count(given: LoopOperands) -> Any:
            return jax.lax.while_loop(
                lambda progress: progress.more,
                lambda progress: advanced(loop, given, progress),
                started(loop, given, jnp.int32(0), given.carry),
            ).number

        run = self._made(("count", loop.eqn), lambda: jax.jit(count))
        return int(run(LoopOperands.of(loop, operands)))

    # --- values -----------------------------------------------------------------------------------

    def _note(self, eqn: JaxprEqn, results: Sequence[Any]) -> None:
        for i, x in enumerate(results if self._on else ()):
            if self._wanted(eqn, i):
                iterations = np.array([self.iterations], int)
                self._take(Result(eqn, i, self.around), iterations, on_host(x))

    def _leave_out(self, eqn: JaxprEqn) -> None:
        if (text := named(eqn)) not in self.left_out:
            self.left_out.append(text)

    def shards(self, held: ShardMap, operands: list[Any]) -> list[Any]:
        outs, sites, values = shard_map_values(held, self._wanted, operands)
        for inner in equations(jaxcompat.open_jaxpr(held.body)):
            if isinstance(view(inner), While | ShardMap):
                self._leave_out(inner)
        if self._on:
            values = [np.asarray(x) for x in values]
            self.frames.append(self.frame(held, operands))
            for device in range(held.mesh.size):
                self._take_sites(sites, [x[device] for x in values])
            self.frames.pop()
        return outs

    def _take_sites(
        self, sites: Sequence[Site], values: Sequence[Any], first: np.ndarray | None = None
    ) -> None:
        """Report the values of the running body.

        Args:
            sites: The sites.
            values: The collected values.
            first: The iteration number of each index of the first axis; None if there is no such
                axis.
        """
        values = list(map(on_host, values))
        known: dict[Any, tuple[np.ndarray, np.ndarray]] = {}
        around = self.around
        for site in sites:
            # Sites in the same bodies run together.
            key = (*map(id, site.around), site.taken, site.offset)
            if key not in known:
                known[key] = self._executions(site, values, first)
            chosen, iterations = known[key]
            if not len(iterations):
                continue
            data = values[site.place]
            data = data.reshape(chosen.size, *data.shape[chosen.ndim :])
            if len(iterations) < chosen.size:
                data = data[np.flatnonzero(chosen)]
            self._take(Result(site.eqn, site.result, (*around, *site.around)), iterations, data)

    def _executions(
        self, site: Site, values: Sequence[Any], first: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the watched executions of a site, along the axes of its values.

        Also returns the enclosing iteration numbers of each.
        """
        outer = list(self.iterations)
        scans = (held for eqn in site.around if isinstance(held := view(eqn), Scan))
        lengths: list[Any] = [scan.length for scan in scans]
        numbers: list[np.ndarray] = [np.arange(length) for length in lengths]
        if first is not None:
            outer.pop()
            lengths.insert(0, self.frames[-1].length)
            numbers.insert(0, first + site.offset)
        chosen = np.ones(tuple(map(len, numbers)), bool)
        for axis, (row, length) in enumerate(zip(numbers, lengths, strict=True)):
            chosen &= _along(self._selected.among(row, length), axis, chosen.ndim)
        for place, branch in site.taken:
            chosen &= _along(np.asarray(values[place]) == branch, 0, chosen.ndim)
        indices = np.argwhere(chosen)
        iterations = np.empty((len(indices), len(outer) + len(numbers)), int)
        iterations[:, : len(outer)] = outer
        for axis, row in enumerate(numbers):
            iterations[:, len(outer) + axis] = row[indices[:, axis]]
        return chosen, iterations

    # --- loops ------------------------------------------------------------------------------------

    def compiled_loop(self, loop: Scan | While, operands: list[Any]) -> list[Any]:
        given, on = LoopOperands.of(loop, operands), self._on
        number, carry, more = 0, given.carry, True
        if isinstance(loop, While):
            (more,) = self.enter(loop.cond, [*given.cond_consts, *carry])
        stacked: list[Any] = []
        while more:
            make: Any = CompiledScan if isinstance(loop, Scan) else CompiledWhile
            run: Any = self._made(("run", loop.eqn), partial(make, loop, self._wanted, given))
            ran, carry, more, ys, values = run(number, given._replace(carry=carry))
            stacked.append(ys)
            if on:
                numbers = slice_number(loop, np.arange(number, number + ran))
                self._take_sites(run.sites, [on_host(x)[:ran] for x in values], np.sort(numbers))
            number += ran
        stacked = stacked[::-1] if isinstance(loop, Scan) and loop.reverse else stacked
        ys = [
            jnp.concatenate(parts) if len(parts) > 1 else parts[0]
            for parts in zip(*stacked, strict=True)
        ]
        return [*carry, *ys]

    def _made(self, key: tuple[str, object], make: Callable[[], Any]) -> Any:
        """Return the compiled form of a piece or a loop, which the cache keeps alive."""
        known = key[0], id(key[1])
        if known not in self._compiled:
            self._compiled[known] = make()
        return self._compiled[known]


def _along(values: Any, axis: int, rank: int) -> Any:
    """Return an array with axes of size 1 added around its own, which begin at `axis`."""
    return values.reshape((1,) * axis + values.shape + (1,) * (rank - axis - values.ndim))
