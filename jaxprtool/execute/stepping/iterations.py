"""Iterations of a scan or a while loop, shared by all code that compiles them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.dtypes import is_extended
from jaxprtool.ir.core.structured import Scan, While
from jaxprtool.ir.evaluation.interpret import LoopOperands, slice_number
from jaxprtool.ir.programs.meshes import mesh_of
from jaxprtool.jaxcompat import ClosedJaxpr

#: Returns the results of a body for given arguments.
RunBody = Callable[[ClosedJaxpr, list[Any]], list[Any]]


class Progress(NamedTuple):
    """The progress of a loop.

    Attributes:
        number: The number of iterations run.
        carry: The carry after them.
        ys: The stacked results of a scan, if needed.
        more: Whether there is another iteration.
    """

    number: Any
    carry: list[Any]
    ys: list[Any]
    more: Any


def row_at(stack: Any, i: Any) -> Any:
    """Return the row at an index of the first axis, which may be traced."""
    return jax.lax.dynamic_index_in_dim(stack, i, keepdims=False)


def put_at(stack: Any, row: Any, i: Any) -> Any:
    """Return a stack with the row at an index replaced."""
    return jax.lax.dynamic_update_index_in_dim(stack, row, i, 0)


def run_whole(body: ClosedJaxpr, arguments: list[Any]) -> list[Any]:
    """Return the results of a body, with its loops and calls unchanged."""
    return list(jaxcompat.jaxpr_as_fun(body)(*arguments))


def started(
    loop: Scan | While,
    given: LoopOperands,
    number: Any,
    carry: Sequence[Any],
    run: RunBody = run_whole,
) -> Progress:
    """Return the progress of a loop that continues from an iteration, without stacked results."""
    return Progress(number, list(carry), [], _has_more(loop, given, number, carry, run))


def advanced(
    loop: Scan | While,
    given: LoopOperands,
    before: Progress,
    run: RunBody = run_whole,
    row: Callable[[Any, Any], Any] = row_at,
    put: Callable[[Any, Any, Any], Any] = put_at,
) -> Progress:
    """Return the progress of a loop after one more iteration.

    Args:
        loop: The loop.
        given: Its operands.
        before: Its progress before.
        run: Runs a body.
        row: Returns the slice of a scanned operand at an index.
        put: Returns a stacked result with a row at an index.
    """
    place, count = slice_number(loop, before.number), len(before.carry)
    rows = [row(x, place) for x in given.xs]
    outs = run(loop.body, [*given.consts, *before.carry, *rows])
    number, carry = before.number + 1, outs[:count]
    ys = [put(y, out, place) for y, out in zip(before.ys, outs[count:], strict=False)]
    return Progress(number, carry, ys, _has_more(loop, given, number, carry, run))


def _has_more(
    loop: Scan | While, given: LoopOperands, number: Any, carry: Sequence[Any], run: RunBody
) -> Any:
    if isinstance(loop, Scan):
        return number < loop.length
    # A value may be a pytree with additional data; a predicate is not.
    (more,) = jax.tree.leaves(run(loop.cond, [*given.cond_consts, *carry]))
    return more


def bodies_of(loop: Scan | While) -> tuple[ClosedJaxpr, ...]:
    """Return the body of a scan, or the body and the condition of a while loop."""
    return (loop.body,) if isinstance(loop, Scan) else (loop.body, loop.cond)


def can_be_compiled(loop: Scan | While) -> bool:
    """Return True if the iterations of a loop can be compiled and rerun."""
    if loop.eqn.effects:
        return False
    if any(mesh_of(atom.aval) is not None for atom in (*loop.eqn.invars, *loop.eqn.outvars)):
        return False
    stacked = loop.ys if isinstance(loop, Scan) else ()
    return not any(is_extended(var.aval.dtype) for var in stacked)
