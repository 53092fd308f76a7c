"""The collectives of a partitioned program by source line, and the reason for each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from math import prod
from typing import NamedTuple

from jaxprtool.analysis.shardings import Collective, Reason
from jaxprtool.analysis.shardings.moves import Moves
from jaxprtool.analysis.shardings.overlap import independent_products
from jaxprtool.analysis.shardings.reasons import Found, Moved, Reasons, unreduced_sum
from jaxprtool.analysis.shardings.sharded_module import LAYOUT, Place, ShardedModule, own_frames
from jaxprtool.ir.hlo import collectives as hlo
from jaxprtool.ir.hlo.mesh_axes import spec_text
from jaxprtool.ir.hlo.module import Instruction, Module, Shape
from jaxprtool.ir.hlo.wire import integers
from jaxprtool.jaxcompat.source_locations import UserFrame

#: Operations that pass their operand on: their readers count as its readers.
_PASSED_ON = LAYOUT | {"get-tuple-element"}


class _Part(NamedTuple):
    """A value that a collective moves: its metadata, and its result on one device."""

    place: Place
    shape: Shape


def found_collectives(
    whole: ShardedModule, parts: ShardedModule, final: Module
) -> tuple[Collective, ...]:
    """Return the collectives of a partitioned module, the one that sends most first.

    Args:
        whole: The module before the partitioner.
        parts: The module after it.
        final: The module that runs.
    """
    reader = _Reader(whole, parts, final)
    found = [each for one in hlo.collectives(final) for each in reader.read(one)]
    return tuple(sorted(found, key=lambda each: -each.sent_bytes))


class _Reader:
    """Describes the collectives of a module."""

    def __init__(self, whole: ShardedModule, parts: ShardedModule, final: Module):
        self._whole, self._final = whole, final
        self._reasons = Reasons(whole)
        self._moves = Moves(whole, parts)
        self._independent = independent_products(final)
        # The values that the program moves, by place: `psum` of a tree moves many from one.
        self._asked = defaultdict[Place, list[tuple[Instruction, Shape]]](list)
        # The sums of unreduced values, by place.
        self._sums = defaultdict[Place, list[Found]](list)
        for each in hlo.collectives(whole.module):
            if why := unreduced_sum(whole, each.instruction):
                self._sums[_place(whole.module, each.instruction)].append(why)
                continue
            shape = each.instruction.shape
            results = shape.parts or (shape,)
            moved = list(zip(whole.operands(each.instruction), results, strict=False))
            for place in whole.places(each.instruction):
                self._asked[place] += moved

    def read(self, found: hlo.Collective) -> Iterator[Collective]:
        """Yield the values that a collective moves."""
        axes, devices = self._groups(found)
        parts = self._parts(found)
        for part in parts:
            asked = self._asked_value(part)
            why = None
            if (sums := self._sums.get(part.place)) and found.kind in hlo.REDUCTIONS:
                why = sums.pop(0) if len(sums) > 1 else sums[0]
            elif asked is None and axes:
                readers = self._readers(found) if len(parts) == 1 else frozenset()
                moved = Moved(found.kind, axes, *part, self._dimension(found), readers)
                why = self._reasons.of(self._moves.located(moved, found.instruction))
            frames = (self._frames(why) if why else ()) or part.place.frames
            yield Collective(
                found.kind,
                axes,
                devices,
                part.shape.bytes,
                found.count,
                self._whole.line_of(frames),
                self._value(why, asked, part),
                "partitioner" if asked is None else "program",
                None if why is None else self._reason(why),
                len(parts),
                found.instruction.name,
                self._independent.get(found.instruction.name, {}),
                frames,
            )

    def _asked_value(self, part: _Part) -> Instruction | None:
        """Return the next value that the program moves at a place; None if it moves none."""
        if part.place not in self._asked:
            return None
        moved = self._asked[part.place]
        alike = [each for each in moved if each[1].sizes == part.shape.sizes] or moved
        if len(alike) > 1:
            moved.remove(alike[0])
        return alike[0][0]

    def _dimension(self, found: hlo.Collective) -> int | None:
        """Return the dimension along which a collective concatenates parts."""
        if found.kind != "all-gather":
            return None
        return next(iter(integers(found.instruction.fields, 14)), None)

    def _readers(self, found: hlo.Collective) -> frozenset[Place]:
        """Return the places of the operations that read the result of a collective."""
        result = self._final.ends.get(found.instruction.id, found.instruction)
        values, places = [result], set[Place]()
        while values:
            for user in self._users[values.pop().id]:
                if user.opcode in _PASSED_ON:
                    values.append(user)
                    continue
                inside = (user, *self._final.inside(user))
                places |= {_place(self._final, each) for each in inside}
        return frozenset(places)

    @cached_property
    def _users(self) -> dict[int, list[Instruction]]:
        """The readers of each value in the module that runs, by the value's number."""
        users = defaultdict[int, list[Instruction]](list)
        for each in self._final.instructions.values():
            for operand in each.operands:
                users[operand].append(each)
        return users

    def _groups(self, found: hlo.Collective) -> tuple[tuple[str, ...] | None, int]:
        """Return the axes that a collective is along, and the number of devices in a group."""
        axes = self._whole.axes
        if found.kind == "collective-permute":
            along = axes.of_pairs(hlo.device_pairs(found.instruction))
            return along, prod(axes.shape[each] for each in along)
        groups = hlo.device_groups(found.instruction, axes.devices)
        return axes.of_groups(groups), max(map(len, groups))

    def _parts(self, found: hlo.Collective) -> list[_Part]:
        """Return the values that a collective moves: several, if XLA merged operations."""
        return [
            _Part(_place(self._final, each), shape)
            for each, shape in hlo.moved_values(self._final, found.instruction)
        ]

    def _value(self, why: Found | None, asked: Instruction | None, part: _Part) -> str:
        """Return the name of the value that moves."""
        if why is not None:
            return self._whole.value_name(why.edge.operand)
        if asked is not None:
            return self._whole.value_name(asked)
        return part.place.path.rpartition("/")[2]

    def _frames(self, why: Found) -> tuple[UserFrame, ...]:
        """Return the call stack of a consumer, or that of its operand if XLA added the consumer."""
        edge = why.edge
        stacks = (self._whole.places(each)[0].frames for each in (edge.consumer, edge.operand))
        return next(filter(None, stacks), ())

    def _reason(self, why: Found) -> Reason:
        whole, edge = self._whole, why.edge
        operand = whole.value_name(edge.operand)
        consumer = whole.reader_name(edge.consumer, edge.position)
        before = whole.spec_text(edge.operand) if why.before is None else spec_text(why.before)
        needed = spec_text(why.needed)
        way = "" if why.way is None else spec_text(why.way)
        return Reason(operand, before, consumer, needed, way)


def _place(module: Module, instruction: Instruction) -> Place:
    return Place(instruction.path, own_frames(module, instruction))
