"""Statistics of the values that a program computes.

    watched = jaxprtool.watch(program, (params, batch), by="line")
    watched.rows[0].numbers.high

The program runs compiled, with the values of its equations at every depth and in every iteration as
further results (`watched_run`). Rounding may differ from running each equation separately.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import jax
import numpy as np

from jaxprtool.errors import ArgumentsError
from jaxprtool.execute.running.run import ready_to_step
from jaxprtool.execute.watch.numbers import FormatLoss, Numbers
from jaxprtool.execute.watch.recorder import By, Recorder, WatchedRow
from jaxprtool.execute.watch.selected import IterationChoice
from jaxprtool.execute.watch.stops import Stopped, runs_of, stopping
from jaxprtool.execute.watch.watched_run import WatchedRun
from jaxprtool.ir.basics.documents import document
from jaxprtool.ir.basics.printed import Printed
from jaxprtool.ir.core.structured import Call, Cond, CustomJVP, Scan, ShardMap, While, view
from jaxprtool.ir.notation.selection import Selection
from jaxprtool.ir.programs.program import Program
from jaxprtool.jaxcompat import JaxprEqn

__all__ = ["FormatLoss", "Numbers", "Stopped", "Watched", "WatchedRow", "watch"]


@document(without=("values",))
@dataclass(frozen=True)
class Watched(Printed):
    """The statistics of watched values.

    Attributes:
        name: The name of the program.
        by: The grouping of values.
        rows: The groups, in program order.
        values: The values of each result of an equation, if requested, by the name of its row when
            grouped by equation. In a loop they have a leading axis for the executions, in the order
            of iterations.
        left_out: The loops in a `shard_map` whose bodies are not watched.
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
    """Run a program and summarize the values that its equations compute.

    By line and by scope, only floats are summarized, without results of equations that only move
    values. Prints and other calls without results are skipped.

    Args:
        program: A `Program`.
        args: Its arguments, as a tuple, or as any pytree of the same leaves.
        by: The grouping of values into rows: `"line"`, `"scope"` or `"equation"`.
        only: Patterns of primitives, such as `"dot_general"` or `"conv*"`; None for all.
        rounds: The iterations of loops to watch, each in a separate row: numbers, counted from the
            end if negative, and slices. None for all, in one row.
        values: Whether to also keep the values themselves.
        device: The device to run on; by default placed by JAX and the arguments.
        stops: Equations by `id`; `stop` is called after each consecutive run of them.
        stop: Called with the values of these equations.

    Raises:
        ArgumentsError: If the arguments do not fit, or an iteration is neither a number nor a
            slice.
        UnsupportedError: If the program has free named axes.
    """
    if by not in get_args(By):
        raise ArgumentsError(f"values are grouped by line, scope or equation, not by {by!r}")
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
    """Return True if the equations inside an equation are watched instead of the equation."""
    return isinstance(view(eqn), Scan | While | Cond | Call | CustomJVP | ShardMap)
