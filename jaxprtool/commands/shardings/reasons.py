"""Find why the partitioner added a collective: an operation needs an operand in another sharding.

A collective has the name and the frames of an operation of the module before the partitioner.
Depending on the release of JAX, that operation computes the value that moves, or reads it, so both
its operands and its readers are candidates. The sharding in which an operation needs an operand
follows from that of its result, dimension by dimension (`ir.hlo.partitions`). Along a dimension
that it mixes, as a sum or a sort does, it needs values of other devices in any case.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from jaxprtool.ir.backends import cached_method
from jaxprtool.ir.frames import Frames
from jaxprtool.ir.hlo.module import HloModule, HloShape, Instruction
from jaxprtool.ir.hlo.partitions import (
    REDUCTIONS,
    DeviceTiles,
    MeshAxes,
    Reading,
    Spec,
    contracted,
    device_tiles,
    reading,
    spec_text,
)
from jaxprtool.ir.source_text import Place
from jaxprtool.jaxcompat.source_locations import UserFrame

#: Collectives that exchange parts of the same size. They neither gather nor reduce.
_MOVES = frozenset({"all-to-all", "ragged-all-to-all", "collective-permute"})

#: The position of an operation's own result, if it is a result of the program.
RESULT = -1

#: The maximum number of operations before a constraint that get its spec.
_MOST_CONSTRAINT_STEPS = 8


@dataclass(frozen=True, eq=False)
class Edge:
    """An operand and an operation that reads it.

    Attributes:
        operand: The operand.
        consumer: The operation.
        position: The position of the operand.
    """

    operand: Instruction
    consumer: Instruction
    position: int = 0

    def key(self, kind: str) -> tuple[int, int]:
        """Return a key, equal for edges that the same collective of a kind explains.

        A reduction combines all operands of the consumer.
        """
        return 0 if kind in REDUCTIONS else self.operand.id, self.consumer.id


@dataclass(frozen=True)
class Moved:
    """What a collective moves.

    Attributes:
        kind: The kind of the collective.
        axes: The axes along which devices exchange values.
        place: The path that JAX gave its operation, and its call stack.
        shape: The shape of its result on one device.
        dimension: The dimension along which parts are concatenated; None if there is none.
        readers: The places of the operations that read the result.
        makers: The operations of the module before the partitioner that may compute the value that
            moves, by number; empty if they are unknown.
        made: The shape of that value on one device; None if it is unknown.
        gathered: The axes along which earlier collectives have gathered the value.
    """

    kind: str
    axes: tuple[str, ...]
    place: OperationPlace
    shape: HloShape
    dimension: int | None = None
    readers: frozenset[OperationPlace] = frozenset()
    makers: frozenset[int] = frozenset()
    made: HloShape | None = None
    gathered: frozenset[str] = frozenset()


class ExplainedEdge(NamedTuple):
    """An edge that explains a collective.

    Attributes:
        edge: The edge.
        needed: The spec in which the consumer needs the operand; for a reduction, the spec of the
            result. If the consumer mixes the parts where they are, it is the operand's own spec.
        mixes: Whether the consumer mixes values of several devices.
        misfit: How badly it fits: 0 if its sizes are those that move, more if they differ.
        way: The spec after a gather, if devices then hold more than the consumer needs.
        before: The spec in which the operand moves; None if it is the operand's own.
    """

    edge: Edge
    needed: Spec
    mixes: bool = False
    misfit: int = 0
    way: Spec | None = None
    before: Spec | None = None


class Reasons:
    """Finds why collectives are in the partitioned module.

    Args:
        whole: The module before the partitioner.
    """

    def __init__(self, whole: ShardedModule):
        self._whole = whole
        self._given: set[tuple[int, int]] = set()

    def of(self, moved: Moved) -> ExplainedEdge | None:
        """Return the edge that explains a collective; None if none is found.

        If several edges fit equally, each is returned once: unrolled layers have equal names and
        frames.
        """
        fitting = self._fitting(moved)
        if not fitting:
            return None
        while len(fitting) > 1 and fitting[0].edge.key(moved.kind) in self._given:
            fitting.popleft()
        best = fitting[0]
        self._given.add(best.edge.key(moved.kind))
        return self._named(self._constrained(moved, self._with_way(moved, best)))

    @cached_method
    def _fitting(self, moved: Moved) -> deque[ExplainedEdge]:
        """Return the edges that may explain a collective, the best first."""
        consumers = self._at[moved.place] if moved.place.path else ()
        near = [edge for consumer in consumers for edge in self._around(consumer, moved)]
        fits = self._best(moved, near) or self._in_steps(moved, near)
        if not near and moved.kind == "all-gather":
            everywhere = [fit for fit in self._best(moved, self._edges) if not fit.misfit]
            root = self._whole.module.entry.root
            returned = [fit for fit in everywhere if fit.edge.consumer is root]
            # Without a name, the value that moves is known only if no other has its size, or if all
            # that have are results of the program: then each of them moves.
            if len({self._whole.maker(fit.edge.operand).id for fit in everywhere}) == 1:
                fits = everywhere
            elif len(returned) == len(everywhere):
                fits = returned
        return deque(self._of_makers(moved, fits))

    def _of_makers(self, moved: Moved, fits: Sequence[ExplainedEdge]) -> Sequence[ExplainedEdge]:
        """Return, of edges that fit, those of the value that moves; else the edge of that value.

        The partitioner may compute an operation where its operands are, and move the result: then
        the operands fit as well as the result does.
        """
        if not moved.makers:
            return fits
        matching = [f for f in fits if self._ids(f.edge.operand) & moved.makers]
        if matching or moved.kind in REDUCTIONS or any(f.mixes for f in fits):
            return matching or fits
        makers = [self._whole.module.instructions[number] for number in sorted(moved.makers)]
        results = [self._result(moved, maker) for maker in makers]
        return [fit for fit in results if fit is not None] or fits

    def _ids(self, value: Instruction) -> set[int]:
        return {value.id, self._whole.maker(value).id}

    def _result(self, moved: Moved, maker: Instruction) -> ExplainedEdge | None:
        """Return the edge of a result that moves after it is computed; None if it has no spec."""
        before, needed = self._computed(maker, moved.made), self._whole.spec(maker)
        if before is None or needed is None:
            return None
        before = _stripped(before, moved.gathered)
        edges = self._readers[maker.id]
        read = [e for e in edges if moved.readers.intersection(self._whole.places(e.consumer))]
        edge = next(iter(read or edges), Edge(maker, maker, RESULT))
        if self._whole.spec(maker) == self._computed(maker, moved.made):
            needed = self._needed(edge, before) or needed
        if before == needed:  # its reader needs all of it, and computes it as a whole
            needed = _stripped(before, moved.axes)
            return ExplainedEdge(edge, needed, moved.kind != "all-gather", before=before)
        return ExplainedEdge(edge, needed, before=before)

    def _needed(self, edge: Edge, before: Spec) -> Spec | None:
        """Return the spec in which the consumer needs an operand, if it does not mix elements."""
        after = self._whole.spec_for(edge.consumer, max(edge.position, 0))
        how = reading(edge.consumer, max(edge.position, 0), edge.operand.shape)
        if after is None or how is None or how.crossing:
            return None
        return _EdgeSpecs(before, after, how, frozenset()).needed()

    def _computed(self, maker: Instruction, shape: HloShape | None) -> Spec | None:
        """Return the spec in which an operation is computed; None if it is unknown.

        It is the operation's own spec, or that which follows from those of its operands, if it fits
        the shape of its result on a device.
        """
        maker_spec = self._whole.spec(maker)
        if (
            shape is None
            or maker_spec is None
            or shape.sizes == self._local(maker.shape, maker_spec).sizes
        ):
            return maker_spec
        entries: list[tuple[str, ...]] = [()] * len(maker.shape.sizes)
        for edge in self._into(maker):
            how = reading(maker, edge.position, edge.operand.shape)
            spec = self._whole.spec(edge.operand)
            for target, entry in zip(how.dimensions, spec, strict=True) if how and spec else ():
                if target is not None and not entries[target]:
                    entries[target] = entry
        computed = tuple(entries)
        return computed if self._local(maker.shape, computed).sizes == shape.sizes else None

    def _preferred(self, moved: Moved, fits: Sequence[ExplainedEdge]) -> list[ExplainedEdge]:
        """Return, of edges that fit equally, those with the collective's name or readers.

        If an operation reads a value across devices, XLA moves the value and moves the result back,
        both under the name of that operation. Any other move is for an operation that reads it.
        """
        is_back = moved.kind in _MOVES
        named = [f for f in fits if is_back and f.mixes and moved.place in self._places(f)]
        read = [f for f in fits if moved.readers.intersection(self._places(f))]
        return named or read or list(fits)

    def _places(self, fit: ExplainedEdge) -> tuple[OperationPlace, ...]:
        return self._whole.places(fit.edge.consumer)

    def _in_steps(self, moved: Moved, near: Sequence[Edge]) -> list[ExplainedEdge]:
        """Return the edge whose operand XLA moves in several steps, some along other axes.

        It counts only if the size fits a step of its operand, and of no other value.
        """
        if moved.kind in REDUCTIONS:
            return []
        fits = []
        for edge in near:
            spec = self._whole.spec(edge.operand)
            if not spec or not (axes := tuple(_axes(spec))):
                continue
            least = self._local(edge.operand.shape, spec).bytes
            most = edge.operand.shape.bytes if moved.kind == "all-gather" else least
            gathered = Moved("all-gather", axes, moved.place, moved.shape)
            fit = self._found(edge, gathered)
            if fit and not fit.mixes and least <= moved.shape.bytes <= most:
                fits.append(fit)
        values = {self._whole.maker(fit.edge.operand).id for fit in fits}
        return fits if len(values) == 1 else []

    @cached_property
    def _at(self) -> dict[OperationPlace, list[Instruction]]:
        """The operations of each path and call stack."""
        by_place = defaultdict[OperationPlace, list[Instruction]](list)
        for instruction in self._whole.module.instructions.values():
            for place in self._whole.places(instruction):
                by_place[place].append(instruction)
        return by_place

    @cached_property
    def _edges(self) -> list[Edge]:
        instructions = self._whole.module.instructions.values()
        return [edge for instruction in instructions for edge in self._into(instruction)]

    @cached_property
    def _readers(self) -> dict[int, list[Edge]]:
        """The edges from each value, also those behind tuples and calls, by its number."""
        readers = defaultdict[int, list[Edge]](list)
        for edge in self._edges:
            for value in self._same(edge.operand):
                readers[value.id].append(edge)
        return readers

    def _same(self, value: Instruction) -> Iterator[Instruction]:
        """Yield a value, and the values of the same sharding that are passed on to it unchanged."""
        for _ in range(_MOST_CONSTRAINT_STEPS):
            yield value
            source = self._whole.passed(value)
            if source is None or self._whole.spec(source) != self._whole.spec(value):
                return
            value = source

    def _into(self, consumer: Instruction) -> Iterator[Edge]:
        """Yield the edges into an operation; for an element of a tuple, from its value."""
        if consumer.opcode in ("get-tuple-element", "parameter"):
            source = self._whole.passed(consumer)
            if source is not None:
                yield Edge(source, consumer)
            return
        for position, operand in enumerate(self._whole.operands(consumer)):
            yield Edge(operand, consumer, position)

    def _around(self, instruction: Instruction, moved: Moved) -> Iterator[Edge]:
        """Yield the edges of an operation: into it and, unless it is reduced, out of it."""
        yield from self._into(instruction)
        if moved.kind not in REDUCTIONS:
            yield from self._readers[instruction.id]

    def _best(self, moved: Moved, edges: Sequence[Edge]) -> list[ExplainedEdge]:
        """Return the edges that fit best."""
        fits = [fit for edge in edges if (fit := self._found(edge, moved)) is not None]
        least = min((fit.misfit for fit in fits), default=0)
        fits = self._preferred(moved, [fit for fit in fits if fit.misfit == least])
        mixes = all(fit.mixes for fit in fits)
        return [fit for fit in fits if fit.mixes == mixes]

    def _found(self, edge: Edge, moved: Moved) -> ExplainedEdge | None:
        """Return an edge with its fit to a collective; None if it cannot explain it."""
        before = self._whole.spec(edge.operand)
        after = self._whole.spec_for(edge.consumer, edge.position)
        if after is None:
            return None
        is_part = before and moved.gathered and self._ids(edge.operand) & moved.makers
        if before and is_part:
            before = _stripped(before, moved.gathered)
        if self._whole.is_on_one_device(edge.operand):
            is_spread = moved.kind == "all-reduce" and edge.consumer.opcode != "get-tuple-element"
            return ExplainedEdge(edge, after) if is_spread else None
        how = reading(edge.consumer, edge.position, edge.operand.shape)
        if not before or how is None or not _is_of_type(edge.operand.shape, moved.shape):
            return None
        specs = _EdgeSpecs(before, after, how, frozenset(map(_axis, moved.axes)))
        if moved.kind in REDUCTIONS:
            return self._reduced(edge, moved, specs)
        find = self._shifted if moved.kind in _MOVES else self._gathered
        fit = find(edge, moved, specs)
        return fit._replace(before=before) if fit and is_part else fit

    def _reduced(self, edge: Edge, moved: Moved, specs: _EdgeSpecs) -> ExplainedEdge | None:
        """Return the edge if the consumer sums over a dimension sharded along the axes."""
        summed = specs.axes_of(specs.mixed)
        if not summed & specs.axes:
            return None
        shape = self._whole.result_for(edge.consumer, edge.position)
        # The sum may be sharded as the result is, or not yet.
        whole = tuple(specs.axes & _axes(specs.after))
        shapes = [self._local(shape, specs.after, along) for along in ((), whole)]
        misfit = 0 if moved.shape.sizes in [local.sizes for local in shapes] else 1
        misfit += 0 if moved.shape.bytes in [local.bytes for local in shapes] else 2
        misfit += 0 if specs.axes <= summed else 4
        if contracted(edge.consumer) and not specs.mixed <= self._summed(edge, specs):
            misfit += 1  # if a product adds up parts, both its operands are sharded alike
        return ExplainedEdge(edge, specs.after, False, misfit)

    def _gathered(self, edge: Edge, moved: Moved, specs: _EdgeSpecs) -> ExplainedEdge | None:
        """Return the edge if the consumer needs all of a dimension sharded along the axes."""
        lost = specs.cut - specs.kept
        if not specs.axes <= specs.axes_of(lost | specs.mixed):
            return None
        local = self._local(edge.operand.shape, specs.before, moved.axes)
        misfit = 2 if local.bytes != moved.shape.bytes else 0
        if not misfit and (local.sizes != moved.shape.sizes or moved.dimension not in specs.cut):
            misfit = 1
        if lost and lost <= self._summed(edge, specs):
            misfit += 3  # each device adds up its part: nothing needs to be gathered
        if misfit < 2 or lost - specs.mixed:
            return ExplainedEdge(edge, specs.needed(without_cut=True), not lost, misfit)
        return ExplainedEdge(
            edge, specs.before, True, misfit
        )  # a value computed from each part moves

    def _summed(self, edge: Edge, specs: _EdgeSpecs) -> frozenset[int]:
        """Return the dimensions along which each device can add up its part.

        They are the dimensions that a reduction to one result sums over, or those that a product
        sums over if both operands are sharded along them.
        """
        if edge.consumer.opcode == "reduce" and not edge.consumer.shape.parts:
            return specs.mixed
        dimensions = set()
        for pair in contracted(edge.consumer):
            other = self._whole.module.instructions[edge.consumer.operands[1 - edge.position]]
            spec = self._whole.spec(other)
            if spec and spec[pair[1 - edge.position]] == specs.before[pair[edge.position]]:
                dimensions.add(pair[edge.position])
        return frozenset(dimensions)

    def _shifted(self, edge: Edge, moved: Moved, specs: _EdgeSpecs) -> ExplainedEdge | None:
        """Return the edge if the consumer shards other dimensions along the axes, or shifts one."""
        local = self._local(edge.operand.shape, specs.before)
        misfit = 0 if local.bytes == moved.shape.bytes else 1
        needed = specs.needed()
        ends = _axes(specs.before), _axes(needed)
        along = ends[0] | ends[1] if moved.kind == "collective-permute" else ends[0] & ends[1]
        if needed != specs.before and specs.axes <= along:
            return ExplainedEdge(edge, needed, False, misfit)
        if specs.axes <= specs.axes_of(specs.mixed) and not contracted(edge.consumer):
            shape = self._whole.result_for(edge.consumer, edge.position)
            back = self._local(shape, specs.after).bytes  # the result is moved back
            return ExplainedEdge(
                edge, specs.before, True, 0 if back == moved.shape.bytes else misfit
            )
        if specs.axes <= specs.axes_of(specs.cut - specs.kept) & _axes(specs.after):
            return ExplainedEdge(edge, specs.needed(without_cut=True), False, misfit + 2)
        return None

    def _local(self, shape: HloShape, spec: Spec, gathered: Sequence[str] = ()) -> HloShape:
        """Return the shape of an array on one device, gathered along some axes."""
        sizes = []
        for size, entry in zip(shape.sizes, spec, strict=True):
            parts = prod(map(self._whole.axes.size, entry))
            taken = prod(self._whole.axes.size(axis) for axis in entry if axis in gathered)
            sizes.append(-(-size // parts) * taken)
        return HloShape(shape.dtype, tuple(sizes))

    def _constrained(self, moved: Moved, fit: ExplainedEdge) -> ExplainedEdge:
        """Return the edge into the constraint that determines the consumer's spec, if there is one.

        The partitioner propagates the spec of a constraint to the elementwise operations and
        reshapes before it; the constraint is what the user wrote.
        """
        operand, consumer = fit.edge.operand, fit.edge.consumer
        is_alike = consumer.opcode in LAYOUT or consumer.shape.sizes == operand.shape.sizes
        if moved.kind in REDUCTIONS or fit.mixes or not is_alike:
            return fit
        for _ in range(_MOST_CONSTRAINT_STEPS):
            if is_constraint(consumer):
                before = self._whole.spec(operand) if fit.before is None else fit.before
                after, axes = self._whole.spec(consumer), set(map(_axis, moved.axes))
                if before is None or after is None:
                    return fit
                if axes <= _axes(after) and after != fit.needed:
                    return fit
                return fit._replace(edge=Edge(operand, consumer), needed=after)
            users = self._whole.users[consumer.id]
            constraints = [user for user in users if is_constraint(user)]
            alike = (user for user in users if self._is_alike(consumer, user))
            following = next(iter(constraints), None) or next(alike, None)
            if following is None:
                return fit
            consumer = following
        return fit

    def _with_way(self, moved: Moved, fit: ExplainedEdge) -> ExplainedEdge:
        """Return the edge of a gather, with the spec after it if that is more than needed."""
        operand = fit.edge.operand
        before = self._whole.spec(operand) if fit.before is None else fit.before
        if moved.kind != "all-gather" or fit.mixes or fit.misfit or before is None:
            return fit
        way = _stripped(before, moved.axes)
        needed, reached = (self._local(operand.shape, spec) for spec in (fit.needed, way))
        return fit._replace(way=way) if needed.bytes < reached.bytes else fit

    def _named(self, fit: ExplainedEdge) -> ExplainedEdge:
        """Return an edge into the reader if the consumer is a copy that the partitioner added."""
        consumer = fit.edge.consumer
        users = self._whole.users[consumer.id]
        if consumer.opcode != "copy" or self._whole.frames(consumer) or not users:
            return fit
        return fit._replace(edge=Edge(fit.edge.operand, users[0]))

    def _is_alike(self, operand: Instruction, consumer: Instruction) -> bool:
        """Return True for an operation whose result has the spec of its operand."""
        if consumer.opcode in LAYOUT:
            return True
        is_elementwise = consumer.shape.sizes == operand.shape.sizes
        return is_elementwise and self._whole.spec(operand) == self._whole.spec(consumer)


def unreduced_sum(whole: ShardedModule, collective: Instruction) -> ExplainedEdge | None:
    """Return the edge of an unreduced value to the operation that needs its sum.

    Shardy writes the sum as a function over all devices, with the path of the operation that
    computes the value. In a `shard_map`, a collective has a path of its own.

    Args:
        whole: The module before the partitioner.
        collective: A collective in it.

    Returns:
        The edge; None if the program asked for the collective.
    """
    caller = whole.caller(collective)
    if caller is None or caller.path != collective.path:
        return None
    value = caller
    while (user := next(iter(whole.users[value.id]), None)) and user.path == caller.path:
        value = user
    position = RESULT if user is None else user.operands.index(value.id)
    operand, needed = whole.maker(next(whole.operands(collective))), whole.spec(value)
    if needed is None:
        return None
    return ExplainedEdge(Edge(operand, value if user is None else user, position), needed)


@dataclass(frozen=True)
class _EdgeSpecs:
    """The specs of an edge, and the axes of a collective.

    Attributes:
        before: The spec of the operand.
        after: The spec of the result.
        how: How the operation reads the operand.
        axes: The axes.
    """

    before: Spec
    after: Spec
    how: Reading
    axes: frozenset[str]

    @cached_property
    def cut(self) -> frozenset[int]:
        """The dimensions of the operand that are sharded along the axes."""
        return frozenset(i for i, entry in enumerate(self.before) if self.axes & _axes([entry]))

    @cached_property
    def mixed(self) -> frozenset[int]:
        """The dimensions in `cut` along which the operation mixes elements."""
        return self.cut & self.how.crossing

    @cached_property
    def kept(self) -> frozenset[int]:
        """The dimensions in `cut` that are sharded along the same axes in the result."""
        return frozenset(i for i in self.cut if self._moving(i) <= set(self._target(i)))

    def axes_of(self, dimensions: Iterable[int]) -> set[str]:
        """Return the axes along which dimensions of the operand are sharded."""
        return _axes([self.before[i] for i in dimensions])

    def needed(self, without_cut: bool = False) -> Spec:
        """Return the spec of the operand that follows from the spec of the result.

        Args:
            without_cut: Whether dimensions along which the operation mixes are not sharded along
                the axes of the collective.
        """
        told = {
            i: self._target(i)
            for i, target in enumerate(self.how.dimensions)
            if target is not None and i not in self.how.crossing
        }
        free = {i: entry for i, entry in enumerate(self.before) if i not in told}
        if without_cut:  # each device keeps its part along other axes, and reduces or slices later
            free = {i: self._without(entry, self.axes) for i, entry in free.items()}
            told = {i: self._without(entry, _axes(free.values())) for i, entry in told.items()}
        else:
            free = {i: self._without(entry, _axes(told.values())) for i, entry in free.items()}
        told |= free
        return tuple(told[i] for i in range(len(told)))

    @staticmethod
    def _without(entry: Sequence[str], axes: Collection[str]) -> tuple[str, ...]:
        """Return an entry of a spec without axes: an axis shards one dimension only."""
        return tuple(axis for axis in entry if _axis(axis) not in axes)

    def _moving(self, dimension: int) -> set[str]:
        return {axis for axis in self.before[dimension] if _axis(axis) in self.axes}

    def _target(self, dimension: int) -> tuple[str, ...]:
        target = self.how.dimensions[dimension]
        return () if target is None else self.after[target]


def _stripped(spec: Spec, axes: Collection[str]) -> Spec:
    """Return a spec without axes; for an axis that it has in parts, without these."""
    exact = {a for entry in spec for a in entry} & set(axes)
    gone = exact or {a for entry in spec for a in entry if _axis(a) in map(_axis, axes)}
    return tuple(tuple(a for a in entry if a not in gone) for entry in spec)


def _is_of_type(operand: HloShape, moved: HloShape) -> bool:
    """Return True if a moved value may be converted from an operand: XLA converts only floats."""
    types = [(shape.parts[0] if shape.parts else shape).dtype for shape in (operand, moved)]
    return types[0] == types[1] or all(dtype.startswith(("f", "bf")) for dtype in types)


def is_constraint(instruction: Instruction) -> bool:
    """Return True for a constraint of the source."""
    return instruction.path.rpartition("/")[2] in ("sharding_constraint", "reshard")


def _axis(text: str) -> str:
    return text.partition(":")[0]


def _axes(spec: Iterable[Sequence[str]]) -> set[str]:
    return {_axis(axis) for axes in spec for axis in axes}


# --- sharded module -------------------------------------------------------------------------------
# A module before XLA's partitioner: its values with their specs, lines and names.
#
# In this module arrays have their global shapes. Values pass through tuples, calls and loops;
# `maker` finds the operation that computes a value.

#: Operations that pass on an operand, or lay it out anew.
LAYOUT = frozenset({"bitcast", "copy", "reshape", "transpose", "convert"})

#: Custom calls that pass a value into a `shard_map`, and out of it.
MAPPED = frozenset({"SPMDFullToShardShape", "SPMDShardToFullShape"})

#: The maximum number of instructions through which a value is followed.
_MOST_VALUE_STEPS = 64


class OperationPlace(NamedTuple):
    """The path and call stack that JAX gave an operation.

    Attributes:
        path: The path that JAX gave it.
        frames: Its call stack, the innermost frame first.
    """

    path: str
    frames: tuple[UserFrame, ...]

    def inside(self, call: OperationPlace) -> OperationPlace:
        """Return the place of the operation after a call of its function is inlined."""
        path = "/".join(filter(None, (call.path, self.path)))
        return OperationPlace(path, tuple(dict.fromkeys((*self.frames, *call.frames))))


_NOWHERE = OperationPlace("", ())


class ShardedModule:
    """The values of a module before the partitioner.

    Args:
        module: The module.
        axes: The axes of the user's mesh.
        frames: Reads frames, and decides which are the user's.
        result_names: The names of the results of the program.
    """

    def __init__(
        self, module: HloModule, axes: MeshAxes, frames: Frames, result_names: Sequence[str] = ()
    ):
        self.module, self.axes, self._frames = module, axes, frames
        self._result_names = result_names
        self._known: dict[tuple[bytes, int], DeviceTiles | None] = {}

    @cached_property
    def users(self) -> dict[int, list[Instruction]]:
        """The instructions that read each instruction, by number."""
        users = defaultdict[int, list[Instruction]](list)
        for user in self.module.instructions.values():
            for operand in dict.fromkeys(user.operands):
                users[operand].append(user)
        return users

    @cached_property
    def results(self) -> dict[str, Instruction]:
        """The instruction that returns each result, by name."""
        root = self.module.entry.root
        returned = list(self.operands(root)) if root.opcode == "tuple" else [root]
        # The tokens of effects come before the results of the program.
        return dict(zip(self._result_names[::-1], returned[::-1], strict=False))

    @cached_property
    def result_tiles(self) -> dict[str, DeviceTiles | None]:
        """The tiles of each result, by name. XLA may move a value before it returns it."""
        root = self.module.entry.root
        if root.opcode != "tuple" or 40 not in root.fields:  # then results do not move
            return {name: self.tiles(value) for name, value in self.results.items()}
        tiles = device_tiles(root, self.axes.devices)
        return dict(zip(self._result_names[::-1], tiles[::-1], strict=False))

    @cached_property
    def _names_of_results(self) -> dict[int, str]:
        return {value.id: name for name, value in self.results.items()}

    @cached_property
    def _callers(self) -> dict[int, list[Instruction]]:
        """The instructions that call each computation, by number."""
        callers = defaultdict[int, list[Instruction]](list)
        for caller in self.module.instructions.values():
            for number in caller.calls:
                callers[number].append(caller)
        return callers

    @cached_property
    def _computation_of(self) -> dict[int, int]:
        computations = self.module.computations.values()
        return {
            i.id: computation.id for computation in computations for i in computation.instructions
        }

    @cached_method
    def tiles(self, instruction: Instruction) -> DeviceTiles | None:
        """Return the tiles of an array; None for a tuple, or an array on one device."""
        if instruction.shape.dtype == "tuple":
            return None
        key = bytes(instruction.fields.get(40, [b""])[-1]), len(instruction.shape.sizes)
        if key not in self._known:  # many instructions share a sharding
            self._known[key] = device_tiles(instruction, self.axes.devices)[0]
        return self._known[key]

    @cached_method
    def spec(self, instruction: Instruction) -> Spec | None:
        """Return the spec of an array; None if it has none."""
        tiles = self.tiles(instruction)
        return None if tiles is None else self._spec_of(tiles)

    def is_on_one_device(self, instruction: Instruction) -> bool:
        """Return True for an array that only one device has, as the result of a callback."""
        is_array = instruction.shape.dtype not in ("tuple", "token")
        return is_array and self.tiles(instruction) is None

    def result_for(self, consumer: Instruction, position: int) -> HloShape:
        """Return the shape of the result; of several results, that of the one for an operand."""
        parts = consumer.shape.parts
        return parts[min(position, len(parts) - 1)] if parts else consumer.shape

    @cached_method
    def spec_for(self, consumer: Instruction, position: int) -> Spec | None:
        """Return the spec of the result; of several results, that of the one for an operand.

        For a result on one device it is a spec without axes.
        """
        shape, parts = self.result_for(consumer, position), consumer.shape.parts
        all_tiles = device_tiles(consumer, self.axes.devices) if parts else (self.tiles(consumer),)
        if shape.dtype in ("tuple", "token") or len(all_tiles) != max(len(parts), 1):
            return None
        tiles = all_tiles[min(position, len(all_tiles) - 1)]
        return ((),) * len(shape.sizes) if tiles is None else self._spec_of(tiles)

    @cached_method
    def _spec_of(self, tiles: DeviceTiles) -> Spec | None:
        return self.axes.spec(tiles)

    def spec_text(self, instruction: Instruction) -> str:
        """Return the spec of an array as text, "" if it has none."""
        tiles = None if instruction.shape.dtype == "tuple" else self.tiles(instruction)
        if tiles is None:
            return "one device" if self.is_on_one_device(instruction) else ""
        return self.text_of(tiles)

    def text_of(self, tiles: DeviceTiles, reduced: Sequence[str] = ()) -> str:
        """Return the spec of tiles as text, "" if axes cannot describe them.

        Args:
            tiles: The tiles.
            reduced: The axes that a type names as reduced, which have no effect on tiles.
        """
        spec = self._spec_of(tiles)
        unreduced = self.axes.unreduced(tiles)
        return "" if spec is None else spec_text(spec, unreduced=unreduced, reduced=reduced)

    def frames(self, instruction: Instruction) -> tuple[UserFrame, ...]:
        """Return the call stack of an instruction, the innermost frame first."""
        return own_frames(self.module, instruction)

    @cached_method
    def places(self, instruction: Instruction) -> tuple[OperationPlace, ...]:
        """Return the path and the call stack of an instruction after XLA inlined its function.

        There is one place for each call of the function.
        """
        place = OperationPlace(instruction.path, self.frames(instruction))
        return tuple(map(place.inside, self._around(self._computation_of[instruction.id])))

    @cached_method
    def _around(self, computation: int) -> tuple[OperationPlace, ...]:
        """Return the places of the calls, or of the loop, that run a computation."""
        places: dict[OperationPlace, None] = {}
        for caller in self._callers[computation]:
            is_call = caller.opcode == "call"
            outer = self._around(self._computation_of[caller.id])
            places |= dict.fromkeys(self.places(caller) if is_call else outer)
        return tuple(places)[:_MOST_VALUE_STEPS] or (_NOWHERE,)

    def line(self, instruction: Instruction) -> Place:
        """Return the user's line of an instruction, followed by the library's; "" if unknown."""
        return self.line_of(self.frames(instruction))

    def line_of(self, frames: Sequence[UserFrame]) -> Place:
        """Return the user's line of a call stack, followed by the library's; "" if unknown."""
        return self._frames.place(self._frames.location_in(frames))

    def name(self, instruction: Instruction) -> str:
        """Return the path of an argument, or an operation and its line: `tanh at model.py:9`."""
        if self.is_argument(instruction):
            return instruction.op_name or instruction.name
        if not instruction.op_name and instruction.id in self._names_of_results:
            return self._names_of_results[instruction.id]
        if instruction.opcode == "get-tuple-element":
            caller = self._caller(self.module.instructions[instruction.operands[0]])
            if caller is not None and caller.opcode == "while":
                return f"carry of {self.name(caller)}"
        line = self.line(instruction).user
        scope, _, primitive = instruction.path.rpartition("/")
        if not (primitive and (scope or line)):  # XLA's own, which it numbers
            primitive = instruction.opcode
        return " at ".join(filter(None, (primitive, line)))

    def value_name(self, instruction: Instruction) -> str:
        """Return the name of a value's operation; for a slice of a `scan`, `slice of params`."""
        maker = source = self.maker(instruction)
        is_slice = False
        while source.opcode in ("reshape", "dynamic-slice"):
            is_slice |= source.opcode == "dynamic-slice"
            source = self.maker(next(self.operands(source)))
        is_inside = self._computation_of[maker.id] != self.module.entry.id
        if is_slice and is_inside and self.is_argument(source) and source.op_name:
            return f"slice of {source.op_name}"
        return self.name(maker)

    def reader_name(self, consumer: Instruction, position: int) -> str:
        """Return the name of an operation; for a tuple, that of the result or loop that it is for.

        Args:
            consumer: The operation.
            position: The position of the operand that it reads; negative for the operation's own
                result.
        """
        if position < 0:
            return self._names_of_results.get(consumer.id, self.name(consumer))
        if consumer.opcode != "tuple":
            return self.name(consumer)
        if consumer is self.module.entry.root:
            first = len(consumer.operands) - len(self._result_names)  # tokens come before
            return self._result_names[position - first] if position >= first else "token"
        computation = self.module.computations[self._computation_of[consumer.id]]
        readers = self.users[consumer.id]
        if consumer is computation.root:
            readers = self._callers[computation.id]
        return self.name(readers[0] if readers else consumer)

    def is_argument(self, instruction: Instruction) -> bool:
        """Return True for an argument of the program."""
        is_entry = self._computation_of.get(instruction.id) == self.module.entry.id
        return instruction.opcode == "parameter" and is_entry

    def maker(self, instruction: Instruction) -> Instruction:
        """Return the operation that computes a value, or the argument that it is.

        Copies, tuples, branches, and loops that only read the value are passed through.
        """
        value = instruction
        for _ in range(_MOST_VALUE_STEPS):
            source = self.passed(value)
            if source is None:
                return value
            value = source
        return value

    def passed(self, instruction: Instruction) -> Instruction | None:
        """Return the value that an instruction passes on unchanged; None if it computes one."""
        is_mapped = instruction.custom_call_target in MAPPED
        if instruction.opcode in ("copy", "bitcast", "opt-barrier") or is_mapped:
            return self._operand(instruction, 0)
        if instruction.opcode == "get-tuple-element":
            operand = self._operand(instruction, 0)
            return None if operand is None else self._element(operand, instruction.tuple_index)
        if instruction.opcode == "call":
            return self.module.computations[instruction.calls[0]].root
        return self._given_to(instruction)

    def _given_to(self, parameter: Instruction) -> Instruction | None:
        """Return the operand that a call or a branch passes to a parameter."""
        caller = self._caller(parameter)
        if caller is not None and caller.opcode == "call":
            return self._operand(caller, parameter.parameter_number)
        if caller is not None and caller.opcode == "conditional":
            branch = caller.calls.index(self._computation_of[parameter.id])
            return self._operand(caller, 1 + branch)
        return None

    def _element(self, value: Instruction, index: int) -> Instruction | None:
        """Return an element of a tuple; for a loop-invariant element, the operand of the loop."""
        for _ in range(_MOST_VALUE_STEPS):
            if value.opcode == "tuple":
                return self._operand(value, index)
            caller = self._caller(value)
            if caller is not None and caller.opcode == "while":
                if not self._is_kept(value, index):
                    return None
                value = self.module.instructions[caller.operands[0]]
            elif value.opcode == "call":
                value = self.module.computations[value.calls[0]].root
            elif (operand := self._given_to(value)) is not None:
                value = operand
            elif value.opcode in ("copy", "opt-barrier"):
                value = self.module.instructions[value.operands[0]]
            else:
                return None
        return None

    def _is_kept(self, carry: Instruction, index: int) -> bool:
        """Return True if the body of a loop returns an element of its carry unchanged."""
        root = self.module.computations[self._computation_of[carry.id]].root
        returned = self._operand(root, index) if root.opcode == "tuple" else None
        while returned is not None and returned.opcode == "copy":
            returned = self._operand(returned, 0)
        return (
            returned is not None
            and returned.opcode == "get-tuple-element"
            and returned.operands == (carry.id,)
            and returned.tuple_index == index
        )

    def _caller(self, instruction: Instruction) -> Instruction | None:
        """Return the instruction that calls the computation of a parameter."""
        return self.caller(instruction) if instruction.opcode == "parameter" else None

    def caller(self, instruction: Instruction) -> Instruction | None:
        """Return the instruction that calls the computation of an instruction; None if none."""
        return next(iter(self._callers[self._computation_of[instruction.id]]), None)

    def _operand(self, instruction: Instruction, position: int) -> Instruction | None:
        if position >= len(instruction.operands):
            return None
        return self.module.instructions.get(instruction.operands[position])

    def operands(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yield the operands of an instruction."""
        return (self.module.instructions[number] for number in instruction.operands)


def own_frames(module: HloModule, instruction: Instruction) -> tuple[UserFrame, ...]:
    """Return the call stack of an instruction, each frame once, the innermost first.

    The body of a loop has the stack of the loop behind its own.
    """
    return tuple(dict.fromkeys(module.frames(instruction)))


# --- constraint specs -----------------------------------------------------------------------------
# The specs that the operands and the readers of each sharding constraint suggest for it.
#
# A constraint determines the specs of the operations around it. What they would be without it
# follows from the arguments and the other constraints, dimension by dimension
# (`ir.hlo.partitions`).

#: The maximum number of operations through which a spec is derived.
_MOST_SPEC_STEPS = 24


class ConstraintSpecs(NamedTuple):
    """A constraint of the source, and the specs that its surroundings suggest.

    It may apply to several values, as in a gradient or for a tree.

    Attributes:
        line: Its line.
        bytes: The bytes of its largest value.
        spec: Its spec.
        suggested: Other specs: first that of its operand, then those of its readers.
    """

    line: str
    bytes: int
    spec: str
    suggested: tuple[str, ...]


def constraint_specs(whole: ShardedModule) -> list[ConstraintSpecs]:
    """Return the constraints of a program; first those with suggestions, the largest of them first.

    Args:
        whole: The module before the partitioner.
    """
    specs = _DerivedSpecs(whole)
    by_text: dict[tuple[str, str], ConstraintSpecs] = {}
    for instruction in whole.module.instructions.values():
        is_one = is_constraint(instruction) and len(instruction.operands) == 1
        tiles = whole.tiles(instruction) if is_one else None
        written = None if tiles is None or tiles.is_local else whole.spec(instruction)
        if written is None:
            continue
        line, text = whole.line(instruction).user, spec_text(written)
        texts = [spec_text(spec) for spec in specs.around(instruction) if spec != written]
        earlier = by_text.get((line, text), ConstraintSpecs(line, 0, text, ()))
        suggested = tuple(dict.fromkeys((*earlier.suggested, *texts)))
        largest = max(earlier.bytes, instruction.shape.bytes)
        by_text[line, text] = ConstraintSpecs(line, largest, text, suggested)
    return sorted(by_text.values(), key=lambda row: (not row.suggested, -row.bytes))


class _DerivedSpecs:
    """Derives the specs that values would have without some constraint."""

    def __init__(self, whole: ShardedModule):
        self._whole = whole

    def around(self, constraint: Instruction) -> Iterator[Spec]:
        """Yield the specs that the operand of a constraint, and its readers, suggest for it."""
        (operand,) = self._whole.operands(constraint)
        yield self._natural(operand, _MOST_SPEC_STEPS)
        values = [constraint]
        for value in values[:_MOST_SPEC_STEPS]:
            for user in self._whole.users[value.id]:
                if user.shape.sizes == constraint.shape.sizes and user.opcode in LAYOUT:
                    values.append(user)
                    if is_constraint(user) and (spec := self._whole.spec(user)):
                        yield spec
                yield from self._of_reader(user, value)

    def _of_reader(self, reader: Instruction, value: Instruction) -> Iterator[Spec]:
        """Yield the spec of an operand that the other operands of its reader suggest."""
        operands = list(self._whole.operands(reader))
        for position, operand in enumerate(operands):
            how = reading(reader, position, operand.shape) if operand is value else None
            if how is None:
                continue
            entries: dict[int, tuple[str, ...]] = {}
            for other, sibling in enumerate(operands):
                their = reading(reader, other, sibling.shape)
                if other == position or their is None:
                    continue
                spec = self._natural(sibling, _MOST_SPEC_STEPS)
                pairs = zip(their.dimensions, spec, strict=True)
                targets = {target: entry for target, entry in pairs if target is not None}
                for i, target in enumerate(how.dimensions):
                    if target is not None and not entries.get(i):
                        entries[i] = targets.get(target, ())
                for pair in contracted(reader):
                    entries[pair[position]] = spec[pair[other]]
            if any(entries.values()):
                rank = len(operand.shape.sizes)
                yield _without_twice(entries.get(i, ()) for i in range(rank))

    @cached_method
    def _natural(self, value: Instruction, steps: int) -> Spec:
        """Return the spec that follows from the operands of a value, and from theirs."""
        maker = self._whole.maker(value)
        spec = self._whole.spec(maker) or ((),) * len(value.shape.sizes)
        operands = list(self._whole.operands(maker))
        if not (steps and operands) or is_constraint(maker) or maker.opcode == "get-tuple-element":
            return spec
        entries: list[tuple[str, ...]] = [()] * len(maker.shape.sizes)
        for position, operand in enumerate(operands):
            how = reading(maker, position, operand.shape)
            if how is None:
                return spec
            pairs = zip(how.dimensions, self._natural(operand, steps - 1), strict=True)
            for target, entry in pairs:
                if target is not None and target < len(entries) and not entries[target]:
                    entries[target] = entry
        return _without_twice(entries)


def _without_twice(entries: Iterable[tuple[str, ...]]) -> Spec:
    """Return a spec in which each axis cuts only the first dimension that has it."""
    seen: set[str] = set()
    spec = []
    for entry in entries:
        spec.append(tuple(axis for axis in entry if axis not in seen))
        seen.update(entry)
    return tuple(spec)
