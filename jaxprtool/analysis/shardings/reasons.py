"""Why the partitioner added a collective: an operand and its consumer whose specs do not fit.

A collective has the name and the frames of an operation before the partitioner: of the value that
moves, or of the operation that needs it elsewhere, depending on the release of JAX. So the reason
is looked for on both sides of that operation. It is an operand that is cut along the axes of the
collective, and a consumer that is not.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from jaxprtool.analysis.shardings.sharded_module import LAYOUT, Place, ShardedModule
from jaxprtool.ir.basics.caches import cached_method
from jaxprtool.ir.hlo.collectives import REDUCTIONS
from jaxprtool.ir.hlo.module import Instruction, Shape

#: Collectives that leave values cut along the same axes, but elsewhere.
_MOVES = frozenset({"all-to-all", "ragged-all-to-all", "collective-permute"})

#: How many operations before a constraint take over its spec, at most.
_STEPS = 8


@dataclass(frozen=True, eq=False)
class Edge:
    """An operand and an operation that reads it.

    Attributes:
        operand: The operand.
        consumer: The operation.
    """

    operand: Instruction
    consumer: Instruction

    @property
    def numbers(self) -> tuple[int, int]:
        """The numbers of both in the module."""
        return self.operand.id, self.consumer.id


@dataclass(frozen=True)
class Moved:
    """What a collective moves.

    Attributes:
        kind: The kind of the collective.
        axes: The axes along which devices exchange values.
        place: The path that JAX gave its operation, and its call stack.
        shape: Its result on one device.
    """

    kind: str
    axes: tuple[str, ...]
    place: Place
    shape: Shape


class Reasons:
    """Finds why collectives are in the partitioned module.

    Args:
        whole: The module before the partitioner.
    """

    def __init__(self, whole: ShardedModule):
        self._whole = whole
        self._given: set[tuple[int, int]] = set()

    def of(self, moved: Moved) -> Edge | None:
        """Return the edge that a collective is for; None if none is found.

        Each is returned once, if there are others: unrolled layers have equal names and frames.
        """
        fitting = self._fitting(moved)
        if not fitting:
            return None
        while len(fitting) > 1 and fitting[0].numbers in self._given:
            fitting.popleft()
        found = fitting[0]
        self._given.add(found.numbers)
        return self._constrained(moved, found)

    @cached_method
    def _fitting(self, moved: Moved) -> deque[Edge]:
        """Return the edges that a collective may be for, the best first."""
        known = self._at[moved.place] if moved.place.path else ()
        near = [edge for each in known for edge in self._around(each, moved)]
        found = deque(self._best(moved, near, True) or self._best(moved, near, False))
        if not found and moved.kind == "all-gather":
            found.extend(self._best(moved, self._edges, True))
        return found

    @cached_property
    def _at(self) -> dict[Place, list[Instruction]]:
        """The operations of each path and call stack."""
        found = defaultdict[Place, list[Instruction]](list)
        for each in self._whole.module.instructions.values():
            for place in self._whole.places(each):
                found[place].append(each)
        return found

    @cached_property
    def _edges(self) -> list[Edge]:
        instructions = self._whole.module.instructions.values()
        return [edge for each in instructions for edge in self._into(each)]

    def _into(self, consumer: Instruction) -> Iterator[Edge]:
        """Yield the edges into an operation; an element of a tuple is an edge from what it is."""
        if consumer.opcode == "get-tuple-element":
            made = self._whole.passed(consumer)
            operands: Iterable[Instruction] = () if made is None else (made,)
        else:
            operands = self._whole.operands(consumer)
        return (Edge(each, consumer) for each in operands)

    def _around(self, instruction: Instruction, moved: Moved) -> Iterator[Edge]:
        """Yield the edges that an operation may be on; one that adds up is the consumer."""
        yield from self._into(instruction)
        if moved.kind not in REDUCTIONS:
            yield from (Edge(instruction, each) for each in self._whole.users[instruction.id])

    def _best(self, moved: Moved, edges: Sequence[Edge], of_size: bool) -> list[Edge]:
        """Return the edges that fit best.

        Args:
            moved: What the collective moves.
            edges: The edges.
            of_size: Whether only those count whose bytes are those that move.
        """
        if of_size:
            edges = [each for each in edges if self._bytes(each, moved) == moved.shape.bytes]
        for accepted in (self._keeps_no_axis, self._differs):
            if fitting := [each for each in edges if accepted(each, moved)]:
                return fitting
        return []

    def _keeps_no_axis(self, edge: Edge, moved: Moved) -> bool:
        """Return True if the operand is cut along the axes moved along, and its consumer is not."""
        before, after = self._whole.spec(edge.operand), self._whole.spec(edge.consumer)
        if before is None or after is None or moved.kind in _MOVES:
            return False
        axes = set(map(_axis, moved.axes))
        return bool(axes & _axes(before)) and not axes <= _axes(after)

    def _differs(self, edge: Edge, moved: Moved) -> bool:
        """Return True if an edge has different specs, and they have the axes moved along."""
        before, after = self._whole.spec(edge.operand), self._whole.spec(edge.consumer)
        if before is None or after is None or moved.kind in REDUCTIONS:
            return False
        axes = set(map(_axis, moved.axes))
        both = _axes(before) | _axes(after) if moved.kind in _MOVES else _axes(before)
        return before != after and axes <= both

    def _bytes(self, edge: Edge, moved: Moved) -> int:
        """Return the bytes that a collective for an edge has as its result on one device."""
        whole = edge.consumer if moved.kind in REDUCTIONS else edge.operand
        tiles, spec = self._whole.tiles(whole), self._whole.spec(whole)
        if tiles is None or spec is None:
            return 0
        gathered = moved.axes if moved.kind == "all-gather" else ()
        sizes = []
        for size, axes, parts in zip(whole.shape.sizes, spec, tiles.parts, strict=True):
            taken = prod(self._whole.axes.shape.get(each, 1) for each in axes if each in gathered)
            sizes.append(-(-size // parts) * taken)
        return Shape(whole.shape.dtype, tuple(sizes)).bytes

    def _constrained(self, moved: Moved, edge: Edge) -> Edge:
        """Return the edge into the constraint that the consumer has its spec from, if any.

        The partitioner takes over the spec of a constraint for the elementwise operations and
        reshapes before it: the constraint is what the user wrote.
        """
        if moved.kind in REDUCTIONS:
            return edge
        consumer = edge.consumer
        if not (consumer.opcode in LAYOUT or consumer.shape.sizes == edge.operand.shape.sizes):
            return edge
        for _ in range(_STEPS):
            longer = Edge(edge.operand, consumer)
            if _is_constraint(consumer):
                return longer if self._keeps_no_axis(longer, moved) else edge
            users = self._whole.users[consumer.id]
            constraints = [each for each in users if _is_constraint(each)]
            alike = (each for each in users if self._is_alike(consumer, each))
            following = next(iter(constraints), None) or next(alike, None)
            if following is None:
                return edge
            consumer = following
        return edge

    def _is_alike(self, operand: Instruction, consumer: Instruction) -> bool:
        """Return True for an operation whose result has the spec of its operand."""
        if consumer.opcode in LAYOUT:
            return True
        is_elementwise = consumer.shape.sizes == operand.shape.sizes
        return is_elementwise and self._whole.spec(operand) == self._whole.spec(consumer)


def _is_constraint(instruction: Instruction) -> bool:
    return instruction.path.rpartition("/")[2] in ("sharding_constraint", "reshard")


def _axis(text: str) -> str:
    return text.partition(":")[0]


def _axes(spec: Sequence[Sequence[str]]) -> set[str]:
    return {_axis(each) for axes in spec for each in axes}
