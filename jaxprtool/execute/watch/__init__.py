"""Values as a program computes them, in a few numbers.

    watched = jaxprtool.watch(program, (params, batch), by="line")
    watched.rows[0].numbers.high

The program runs compiled, with the values of its equations at every depth and in every iteration as
further results (`watched_run`). They may round otherwise than those of each equation by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import jax
import numpy as np

from jaxprtool.errors import ArgumentsError
from jaxprtool.execute.running.run import ready_to_step
from jaxprtool.execute.watch.numbers import Lost, Numbers
from jaxprtool.execute.watch.recorder import By, Recorder, WatchedRow
from jaxprtool.execute.watch.selected import IterationChoice
from jaxprtool.execute.watch.stops import Stopped, runs_of, stopping
from jaxprtool.execute.watch.watched_run import WatchedRun
from jaxprtool.ir.basics.documents import document
from jaxprtool.ir.core.structured import Call, Cond, CustomJVP, Scan, ShardMap, While, view
from jaxprtool.ir.notation.selection import Selection
from jaxprtool.ir.programs.program import Program
from jaxprtool.jaxcompat import JaxprEqn

__all__ = ["Lost", "Numbers", "Stopped", "Watched", "WatchedRow", "watch"]


@document(without=("values",))
@dataclass(frozen=True)
class Watched:
    """What was watched.

    Attributes:
        name: The program.
        by: What values are grouped by.
        rows: The groups, in the order of the program.
        values: If they were asked for, the values of each result of an equation, by the name that
            its row has if they are grouped by equation. In a loop there is an axis in front, of all
            its executions in the order of iterations.
        left_out: The loops in a `shard_map` whose insides are not watched.
    """

    name: str
    by: By
    rows: tuple[WatchedRow, ...]
    values: Mapping[str, np.ndarray]
    left_out: tuple[str, ...]


def watch(
    program: Program,
    args: object,
    *,
    by: By = "line",
    only: str | Sequence[str] | None = None,
    rounds: int | slice | Sequence[int | slice] | None = None,
    values: bool = False,
    device: jax.Device | None = None,
    stops: Collection[int] = (),
    stop: Callable[[Stopped], None] | None = None,
) -> Watched:
    """Run a program and summarise the values that its equations compute.

    By line and by scope, floats are summarised, and not what only moves them. Prints and other
    calls that give nothing are not made.

    Args:
        program: A `Program`.
        args: Its arguments, as a tuple, or as any pytree of the same leaves.
        by: What a row is of: `"line"`, `"scope"` or `"equation"`.
        only: Patterns of primitives, as `"dot_general"` or `"conv*"`; all if None.
        rounds: The rounds of loops to watch, each in a row of its own: numbers, from the end if
            they are negative, and slices. None stands for all, in one row.
        values: Whether the values themselves are kept, too.
        device: Where to run it; if not given, where JAX and its arguments have it.
        stops: Equations by `id`; `stop` is called behind each run of them.
        stop: Takes the values of these equations.

    Raises:
        ArgumentsError: If the arguments do not fit, or a round is neither a number nor a slice.
        UnsupportedError: If the program has free named axes.
    """
    if by not in get_args(By):
        raise ArgumentsError(f"values are watched by line, scope or equation, not by {by!r}")
    chosen = IterationChoice([rounds] if isinstance(rounds, int | slice) else rounds)
    selection = None if only is None else Selection(only=[only] if isinstance(only, str) else only)
    with ready_to_step(program, args, device) as (program, arguments):
        recorder = Recorder(program, by, chosen, values, selection is None)

        def wanted(eqn: JaxprEqn, result: int) -> bool:
            asked = selection.fits(eqn) if selection is not None else not _has_steps(eqn)
            return asked and recorder.wants(eqn, result)

        kept, last = runs_of(program, stops)
        run = WatchedRun(wanted, chosen, recorder.take, kept, last, stopping(program, stop))
        run.run(program.jaxpr, arguments)
        return Watched(program.name, by, recorder.rows(), recorder.values(), tuple(run.left_out))


def _has_steps(eqn: JaxprEqn) -> bool:
    """Return True if equations inside an equation are watched, and not the equation."""
    return isinstance(view(eqn), Scan | While | Cond | Call | CustomJVP | ShardMap)
