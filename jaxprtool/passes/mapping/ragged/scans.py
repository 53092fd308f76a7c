"""Packed rule for a scan over the rows of an example, which scans all examples at once.

Padded, each example would take as many iterations as the longest one. Instead, the examples are
distributed over fewer *slots*, longest first. A slot scans the rows of its examples one after the
other, and restarts from the initial carry where the next example begins. Iterations are grouped
into blocks, and a block is skipped if no slot has rows left.

A slot without rows left repeats the first iteration of the first example. So it computes no NaN
that a real iteration does not compute, and the body needs no masks to keep NaN out of derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.rules import rule
from jaxprtool.ir.core.structured import Scan
from jaxprtool.jaxcompat import Aval, JaxprEqn
from jaxprtool.passes.cleanup.cse import cse_body
from jaxprtool.passes.mapping.batch.axis import Axis
from jaxprtool.passes.mapping.batch.body import batch_body
from jaxprtool.passes.mapping.domains import Rewritten
from jaxprtool.passes.mapping.mask.body import MaskDomain
from jaxprtool.passes.mapping.mask.guards import guarded
from jaxprtool.passes.mapping.mask.scans import has_while
from jaxprtool.passes.mapping.mask.values import Facts, is_float, is_number
from jaxprtool.passes.mapping.ragged.table import RaggedContext, ragged_rules, taken
from jaxprtool.passes.mapping.ragged.values import Batched, Shared, Value

#: The number of blocks of iterations, and the minimum number of iterations in a block.
_BLOCKS, _SHORTEST = 16, 4

#: The maximum number of elements of carries and per-example operands to store for each row,
#: relative to its own.
_MAX_EXTRA = 8


@rule(ragged_rules, "scan")
def _scan(context: RaggedContext, eqn: JaxprEqn, *operands: Value) -> Any:
    scan = Scan.of(eqn)
    batch_size = context.sizes.batch_size
    if not (isinstance(batch_size, int) and batch_size > 0 and _fits(scan, operands)):
        return None
    return _by_slots(context, scan, operands)


def _fits(scan: Scan, operands: Sequence[Value]) -> bool:
    """Return True for a scan of numbers that does not need too much memory.

    Batched operands, and the carry, are stored for every row: see `_MAX_EXTRA`.
    """
    before = len(scan.consts) + len(scan.carry)
    rows = [v.aval for v in scan.body.invars[before:]]
    rows += [v.aval for v in scan.body.outvars[len(scan.carry) :]]
    if any(x.is_packed for x in operands[:before]) or has_while(scan.body):
        return False
    if not all(map(is_number, (*scan.body.in_avals, *scan.body.out_avals))):
        return False
    more = [v.aval for v, x in zip(scan.body.invars, operands, strict=True) if _is_batched(x)]
    more += [scan.body.outvars[i].aval for i in _stacked(scan)[0] if i < len(scan.carry)]
    extra, own = _elements(more), _elements(rows)
    return not more or (
        isinstance(extra, int) and isinstance(own, int) and extra <= _MAX_EXTRA * own
    )


def _is_batched(x: Value) -> bool:
    return isinstance(x.kind, Batched)


def _elements(avals: Sequence[Aval]) -> Any:
    return sum(math.prod(aval.shape) for aval in avals)


def _stacked(scan: Scan) -> tuple[list[int], list[int]]:
    """Return the results of the body to stack, and the position of each carry among them.

    A carry that is also stacked as a `y` is stacked once.
    """
    outs, count = scan.body.outvars, len(scan.carry)
    stacked, places = list(range(count, len(outs))), []
    for i in range(count):
        same = [k for k, j in enumerate(stacked) if outs[j] is outs[i]]
        places.append(same[0] if same else len(stacked))
        if not same:
            stacked.append(i)
    return stacked, places


class _SlotAssignment(NamedTuple):
    """The distribution of examples over slots.

    Attributes:
        slots: The slot of each example: `i32[B]`.
        starts: The iteration in which each example begins: `i32[B]`.
        iterations: The number of iterations in which some slot has a row: `i32[]`.
    """

    slots: Any
    starts: Any
    iterations: Any


def _slot_assignment(lengths: Any, width: int) -> _SlotAssignment:
    """Distribute examples over slots, longest first.

    In each turn, the half of the slots with the fewest rows so far gets one example each, and the
    slot with the fewest rows gets the longest. So two slots never differ by more rows than the
    longest example has.
    """
    half = max(1, width // 2)
    _, order = lax.sort_key_val(-lengths, lax.iota(np.dtype(np.int32), len(lengths)))
    longest_first = taken(lengths, order)
    counts, slots = jnp.zeros(width, lengths.dtype), lax.iota(np.dtype(np.int32), width)
    dealt = []
    for i in range(0, len(lengths), half):
        dealt_lengths = longest_first[i : i + half]
        counts, slots = lax.sort_key_val(counts, slots)
        dealt.append((slots[: len(dealt_lengths)], counts[: len(dealt_lengths)]))
        counts = counts.at[: len(dealt_lengths)].add(dealt_lengths)
    by_example = jnp.zeros((2, len(lengths)), lengths.dtype)
    found = jnp.stack([jnp.concatenate(each) for each in zip(*dealt, strict=True)])
    slots, starts = by_example.at[:, order].set(found)
    return _SlotAssignment(slots, starts, counts.max())


class _Shape(NamedTuple):
    """The shape of the scan over slots.

    Attributes:
        width: The number of slots.
        blocks: The number of blocks.
        block: The number of iterations in a block.
    """

    width: int
    blocks: Any
    block: Any


def _shape(context: RaggedContext, size: Any) -> _Shape:
    """Return the shape for examples of a size, with enough iterations for any lengths.

    By the bound in `_slot_assignment`, a slot has at most `rows / width + longest` rows.
    """
    sizes, batch_size = context.sizes, context.sizes.batch_size
    rows, longest = sizes.count(size), sizes.bounds.padded(size)
    width = -(-batch_size // 3)
    if isinstance(rows, int) and isinstance(longest, int):
        width = min(batch_size, max(width, 2 * rows // max(longest, 1)))
        most = min(rows, batch_size * longest)
        iterations = min(rows, longest + most // width if width < batch_size else longest)
        block = max(-(-iterations // _BLOCKS), _SHORTEST)
        return _Shape(width, -(-iterations // block), block)
    return _Shape(width, _BLOCKS, (longest + rows // width) // _BLOCKS + 1)


def _by_slots(context: RaggedContext, scan: Scan, operands: Sequence[Value]) -> list[Any]:
    """Return the results of a scan, computed by slots."""
    size, count = scan.length, len(scan.carry)
    lengths, position = context.lengths(size), context.positions(size)
    shape = _shape(context, size)
    assignment = _slot_assignment(lengths, shape.width)
    slot = context.at_rows(assignment.slots, size)
    time = context.at_rows(assignment.starts, size) + position
    first = context.at_rows(lengths, size) - 1 if scan.reverse else jnp.zeros_like(position)
    index = _rows_of_iterations(context, size, shape, time, slot, first[0])

    masked = _masked(context, scan)
    inner = operands if context.sizes.is_exact(size) else _guarded(lengths, operands)
    rows = [position == first]
    rows += [context.at_rows(context.symbol(name), size) for name in masked.extras]
    rows += [_at_rows(context, x, size) for x in inner if not isinstance(x.kind, Shared)]
    xs = [taken(each, index) for each in rows]
    stacked, places = _stacked(scan)
    shared = [x.array for x in inner if isinstance(x.kind, Shared)]
    body = _slot_body(scan, operands, masked, stacked, shape.width)
    evaluate = jaxcompat.jaxpr_as_fun(body)

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        outs = evaluate(*x, *shared, *carry)
        return outs[:count], outs[count:]

    init = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in body.outvars[:count]]
    ys = _scanned(scan, step, init, xs, shape, assignment.iterations)
    final = assignment.starts + (0 if scan.reverse else lengths - 1)
    carries = []
    for place, x in zip(places, operands[len(scan.consts) :], strict=False):
        found = ys[place].at[final, assignment.slots].get(mode="clip")
        given = x.array if _is_batched(x) else lax.broadcast(x.array, lengths.shape)
        none = lax.broadcast_in_dim(lengths == 0, found.shape, (0,))
        carries.append(lax.select(none, given, found))
    return [*carries, *(y.at[time, slot].get(mode="clip") for y in ys[: len(scan.ys)])]


def _rows_of_iterations(
    context: RaggedContext, size: Any, shape: _Shape, time: Any, slot: Any, first: Any
) -> Any:
    """Return the row of each slot in each iteration, `i32[iterations,width]`; `first` if none."""
    iterations = shape.blocks * shape.block
    if not context.sizes.is_exact(size):
        time = jnp.where(context.real(size), time, iterations)
    numbers = jnp.arange(context.sizes.count(size), dtype=jnp.int32)
    none = jnp.full((iterations, shape.width), first, jnp.int32)
    return none.at[time, slot].set(numbers, mode="drop")


def _at_rows(context: RaggedContext, x: Value, size: Any) -> Any:
    return context.at_rows(x.array, size) if _is_batched(x) else x.array


def _guarded(lengths: Any, operands: Sequence[Value]) -> Sequence[Value]:
    """Return operands whose derivatives are zero if no example has a row.

    Then there is no real iteration to repeat, and the slots compute on arbitrary values.
    """
    some = lengths.sum() > 0
    return [replace(x, array=guarded(some, x.array)) if is_float(x.array) else x for x in operands]


def _masked(context: RaggedContext, scan: Scan) -> Rewritten[Facts]:
    """Return the body of the scan for one slot, in which other ragged axes are padded."""
    facts = [Facts.of(var, active=True) for var in scan.body.invars]
    return MaskDomain(context.sizes.bounds).masked(scan.body, facts, in_scan=True)


def _slot_body(
    scan: Scan,
    operands: Sequence[Value],
    masked: Rewritten[Facts],
    stacked: Sequence[int],
    width: int,
) -> Any:
    """Return the jaxpr of one iteration of all slots.

    Its arguments are a flag for where an example begins, the symbols, the operands that are not
    shared, the shared ones, and the carry. Its results are the carry and the stacked results.
    """
    evaluate = jaxcompat.jaxpr_as_fun(masked.jaxpr)
    n, k, m = len(scan.consts), len(scan.consts) + len(scan.carry), len(masked.extras)
    by_row = [i for i, x in enumerate(operands) if not isinstance(x.kind, Shared)]
    shared = [i for i, x in enumerate(operands) if isinstance(x.kind, Shared)]

    def fun(begins: Any, *args: Any) -> list[Any]:
        given = dict(zip([*by_row, *shared], args[m:], strict=False))
        carried = enumerate(args[m + len(operands) :], n)
        carry = [lax.select(begins, given[i], x) for i, x in carried]
        consts, xs = ([given[i] for i in places] for places in (range(n), range(k, len(operands))))
        outs = evaluate(*args[:m], *consts, *carry, *xs)
        return [*outs[: k - n], *(outs[i] for i in stacked)]

    flag = jax.core.ShapedArray((), jnp.bool_)
    avals = [flag, *(v.aval for v in masked.jaxpr.invars[:m])]
    avals += [scan.body.in_avals[i] for i in (*by_row, *shared)]
    avals += scan.body.in_avals[n:k]
    one = jaxcompat.trace_in_setting(fun, avals, scan.eqn)
    dims: list[int | None] = [0] * (1 + m + len(by_row)) + [None] * len(shared) + [0] * (k - n)
    # Merge equal masks: JAX would store each of them in every iteration, for derivatives.
    return cse_body(batch_body(one, dims, Axis(None, width), [0] * len(one.outvars))[0])


def _scanned(
    scan: Scan,
    step: Callable[..., Any],
    init: Sequence[Any],
    xs: Sequence[Any],
    shape: _Shape,
    iterations: Any,
) -> list[Any]:
    """Scan the iterations of slots; return the stacked results, zeros for a skipped block."""
    if isinstance(shape.blocks, int) and shape.blocks == 1:
        return list(lax.scan(step, init, xs, reverse=scan.reverse)[1])
    types = jax.eval_shape(step, init, [x[0] for x in xs])[1]

    def run(carry: Any, xs: Any) -> tuple[Any, Any]:
        return lax.scan(step, carry, xs, reverse=scan.reverse)

    def skip(carry: Any, xs: Any) -> tuple[Any, Any]:
        return carry, [jnp.zeros((shape.block, *y.shape), y.dtype) for y in types]

    def block(carry: Any, x: Any) -> tuple[Any, Any]:
        first, *xs = x
        return lax.cond(first < iterations, run, skip, carry, xs)

    firsts = jnp.arange(shape.blocks, dtype=jnp.int32) * shape.block
    cut = [x.reshape(shape.blocks, shape.block, *x.shape[1:]) for x in xs]
    ys = lax.scan(block, init, [firsts, *cut], reverse=scan.reverse)[1]
    return [y.reshape(-1, *y.shape[2:]) for y in ys]
