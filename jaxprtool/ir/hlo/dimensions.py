"""Relate the dimensions of an operation's operands to those of its result.

    found = reading(dot, 0, lhs.shape)
    found.dimensions   # (0, None): rows stay rows, columns are summed over
    found.crossing     # {1}

The sharding that an operation needs of an operand follows from this and the sharding of its result.
Field numbers are those of XLA's `xla/service/hlo.proto` and `xla/xla_data.proto`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jaxprtool.ir.hlo.module import Instruction, Shape
from jaxprtool.ir.hlo.wire import Message, integer, integers, submessage, submessages


@dataclass(frozen=True)
class Reading:
    """How an operation reads an operand.

    Attributes:
        dimensions: For each dimension of the operand, the dimension of the result with the same
            indices, or None.
        crossing: The dimensions of the operand along which an element of the result needs elements
            at other indices: those that are summed over, sorted, or shifted.
    """

    dimensions: tuple[int | None, ...]
    crossing: frozenset[int]


def reading(consumer: Instruction, position: int, operand: Shape) -> Reading | None:
    """Return how an operation reads an operand.

    Args:
        consumer: The operation.
        position: The position of the operand.
        operand: The shape of the operand.

    Returns:
        The reading; None for an operand that is a tuple, and for operations that call others, such
        as loops. A tuple reads each element as it is.
    """
    if consumer.opcode in _WITHOUT or operand.dtype == "tuple":
        return None
    rule = _RULES.get(consumer.opcode, _elementwise)
    return rule(consumer, position, operand)


def contracted(consumer: Instruction) -> list[tuple[int, int]]:
    """Return the dimensions of both operands that a matrix product sums over together."""
    if consumer.opcode != "dot":
        return []
    numbers = submessage(consumer.fields, 30)
    return list(zip(integers(numbers, 1), integers(numbers, 2), strict=True))


_WITHOUT = frozenset({"while", "call", "conditional", "opt-barrier", "fusion", "parameter"})


def _alike(rank: int, crossing: Iterable[int] = ()) -> Reading:
    return Reading(tuple(range(rank)), frozenset(crossing))


def _elementwise(consumer: Instruction, position: int, operand: Shape) -> Reading:
    """Return the reading of an elementwise operation. An unknown operation mixes all dimensions."""
    if _shape(consumer, position).sizes == operand.sizes:
        return _alike(len(operand.sizes))
    return _unknown(consumer, position, operand)


def _unknown(consumer: Instruction, position: int, operand: Shape) -> Reading:
    rank = len(operand.sizes)
    is_alike = _shape(consumer, position).sizes == operand.sizes
    return Reading(tuple(range(rank)) if is_alike else (None,) * rank, frozenset(range(rank)))


def _shape(consumer: Instruction, position: int) -> Shape:
    """Return the shape of the result; if there are several, of the one for the operand."""
    parts = consumer.shape.parts
    return parts[min(position, len(parts) - 1)] if parts else consumer.shape


def _broadcast(consumer: Instruction, position: int, operand: Shape) -> Reading:
    return Reading(tuple(integers(consumer.fields, 14)), frozenset())


def _transpose(consumer: Instruction, position: int, operand: Shape) -> Reading:
    places = integers(consumer.fields, 14)
    return Reading(tuple(map(places.index, range(len(places)))), frozenset())


def _reshape(consumer: Instruction, position: int, operand: Shape) -> Reading:
    """Return the reading of a reshape: of dimensions that merge or split, the major one stays."""
    result = consumer.shape.sizes
    found: list[int | None] = [None] * len(operand.sizes)
    sources = [i for i, size in enumerate(operand.sizes) if size > 1]
    targets = [i for i, size in enumerate(result) if size > 1]
    while sources and targets:
        source, target = sources.pop(0), targets.pop(0)
        found[source] = target
        left, right = operand.sizes[source], result[target]
        while left != right:
            if left < right:
                left *= operand.sizes[sources.pop(0)]
            else:
                right *= result[targets.pop(0)]
    return Reading(tuple(found), frozenset(i for i, each in enumerate(found) if each is None))


def _reduce(consumer: Instruction, position: int, operand: Shape) -> Reading:
    gone = integers(consumer.fields, 14)
    if not operand.sizes:  # the value to start from
        return _alike(0)
    return _numbered(len(operand.sizes), [i for i in range(len(operand.sizes)) if i not in gone])


def _numbered(rank: int, kept: Sequence[int], crossing: Iterable[int] = ()) -> Reading:
    """Return the reading of an operand whose kept dimensions are those of the result in order."""
    found = tuple(kept.index(i) if i in kept else None for i in range(rank))
    return Reading(found, frozenset(crossing) | {i for i in range(rank) if i not in kept})


def _dot(consumer: Instruction, position: int, operand: Shape) -> Reading:
    numbers, rank = submessage(consumer.fields, 30), len(operand.sizes)
    contracted, batch = (integers(numbers, each + position) for each in (1, 3))
    free = [i for i in range(rank) if i not in contracted and i not in batch]
    start = len(consumer.shape.sizes) - len(free) if position else len(batch)
    found: list[int | None] = [None] * rank
    for place, i in enumerate(batch):
        found[i] = place
    for place, i in enumerate(free):
        found[i] = start + place
    return Reading(tuple(found), frozenset(contracted))


def _convolution(consumer: Instruction, position: int, operand: Shape) -> Reading:
    numbers = submessage(consumer.fields, 16)
    found: list[int | None] = [None] * len(operand.sizes)
    if position:  # the kernel
        found[integer(numbers, 4)] = integer(numbers, 10)
        return Reading(tuple(found), frozenset(range(len(found))) - {integer(numbers, 4)})
    found[integer(numbers, 7)] = integer(numbers, 9)
    for source, target in zip(integers(numbers, 11), integers(numbers, 12), strict=True):
        found[source] = target
    return Reading(tuple(found), frozenset(range(len(found))) - {integer(numbers, 7)})


def _window(consumer: Instruction, position: int, operand: Shape) -> Reading:
    sizes = [integer(each, 1) for each in submessages(submessage(consumer.fields, 15), 1)]
    if len(operand.sizes) != len(sizes):  # the value to start from
        return _alike(len(operand.sizes))
    return _alike(len(sizes), (i for i, size in enumerate(sizes) if size > 1))


def _along(consumer: Instruction, position: int, operand: Shape) -> Reading:
    """Return the reading of an operation that mixes along the dimensions that it names."""
    return _alike(len(operand.sizes), integers(consumer.fields, 14))


def _pad(consumer: Instruction, position: int, operand: Shape) -> Reading:
    if position:  # the value to pad with
        return _alike(0)
    edges = submessages(submessage(consumer.fields, 21), 1)
    return _alike(len(operand.sizes), (i for i, each in enumerate(edges) if any(_values(each))))


def _values(fields: Message) -> list[int]:
    return [integer(fields, number) for number in (1, 2, 3)]


def _slice(consumer: Instruction, position: int, operand: Shape) -> Reading:
    """Return the reading of a slice, or of an update of a slice."""
    rank = len(operand.sizes)
    if rank != len(consumer.shape.sizes):  # an index
        return _alike(0)
    sizes = zip(operand.sizes, consumer.shape.sizes, strict=True)
    return _alike(rank, (i for i, (size, other) in enumerate(sizes) if size != other))


def _fourier(consumer: Instruction, position: int, operand: Shape) -> Reading:
    rank = len(operand.sizes)
    return _alike(rank, range(rank - len(integers(consumer.fields, 32)), rank))


def _matrices(consumer: Instruction, position: int, operand: Shape) -> Reading:
    rank = len(operand.sizes)
    return _alike(rank, range(rank - 2, rank))


def _gather(consumer: Instruction, position: int, operand: Shape) -> Reading:
    numbers, rank = submessage(consumer.fields, 33), len(operand.sizes)
    offsets, collapsed = integers(numbers, 1), integers(numbers, 2)
    batch = [i for i in range(len(consumer.shape.sizes)) if i not in offsets]
    vector = integer(numbers, 4)
    found: list[int | None] = [None] * rank
    if position:
        for source, target in zip((i for i in range(rank) if i != vector), batch, strict=True):
            found[source] = target
        return Reading(tuple(found), frozenset())
    slices = integers(consumer.fields, 34)
    batching = dict(zip(integers(numbers, 5), integers(numbers, 6), strict=True))
    for source, index in batching.items():
        found[source] = batch[index - (index > vector)]
    kept = (i for i in range(rank) if i not in collapsed and i not in batching)
    for source, target in zip(kept, offsets, strict=True):
        found[source] = target
    crossing = (i for i in range(rank) if i not in batching and slices[i] != operand.sizes[i])
    return Reading(tuple(found), frozenset(crossing))


def _scatter(consumer: Instruction, position: int, operand: Shape) -> Reading:
    """Return the reading of a scatter. It sums over updates and indices, except along windows."""
    numbers, rank = submessage(consumer.fields, 48), len(operand.sizes)
    inserted, batching = integers(numbers, 2), integers(numbers, 5)
    count = (len(consumer.operands) - 1) // 2
    if position < count:
        return _alike(rank, integers(numbers, 3))
    found: list[int | None] = [None] * rank
    if position > count:
        whole = len(_shape(consumer, position - count - 1).sizes)
        kept = (i for i in range(whole) if i not in inserted and i not in batching)
        for source, target in zip(integers(numbers, 1), kept, strict=True):
            found[source] = target
    return Reading(tuple(found), frozenset(i for i, each in enumerate(found) if each is None))


_Rule = Callable[[Instruction, int, Shape], Reading]

_RULES: dict[str, _Rule] = {
    "broadcast": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "bitcast": _reshape,
    "reduce": _reduce,
    "dot": _dot,
    "convolution": _convolution,
    "reduce-window": _window,
    "select-and-scatter": _window,
    "sort": _along,
    "concatenate": _along,
    "reverse": _along,
    "pad": _pad,
    "slice": _slice,
    "dynamic-slice": _slice,
    "dynamic-update-slice": _slice,
    "fft": _fourier,
    "cholesky": _matrices,
    "triangular-solve": _matrices,
    "gather": _gather,
    "scatter": _scatter,
    "custom-call": _unknown,
    "topk": _unknown,
    "rng-bit-generator": _unknown,
}
