"""What each collective moves: read from the module after the partitioner.

In the module that runs, operations are fused, and some have lost their names. Right after the
partitioner each operation still has the path and the lines of the operation that it is a part of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from jaxprtool.analysis.shardings.reasons import Moved
from jaxprtool.analysis.shardings.sharded_module import LAYOUT, Place, ShardedModule
from jaxprtool.ir.hlo import collectives as hlo
from jaxprtool.ir.hlo.module import Instruction
from jaxprtool.ir.hlo.wire import integer

#: The operations that the partitioner adds around collectives.
_AROUND = LAYOUT | {"dynamic-slice", "slice", "get-tuple-element"}

#: The maximum number of operations through which a value is followed.
_STEPS = 32


class Moves:
    """Finds the operations that compute, and that read, what collectives move.

    Args:
        whole: The module before the partitioner.
        parts: The module after it.
    """

    def __init__(self, whole: ShardedModule, parts: ShardedModule):
        self._whole, self._parts = whole, parts
        self._at = defaultdict[tuple[str, Place], list[Instruction]](list)
        for each in hlo.collectives(parts.module):
            for place in parts.places(each.instruction):
                self._at[each.kind, place].append(each.instruction)
        self._originals = defaultdict[tuple[str, Place], set[int]](set)
        for instruction in whole.module.instructions.values():
            for place in whole.places(instruction):
                self._originals[instruction.opcode, place].add(instruction.id)

    def located(self, moved: Moved, collective: Instruction) -> Moved:
        """Return what a collective moves with its makers and readers, if they are found.

        Args:
            moved: What it moves.
            collective: The collective in the module that runs.
        """
        found = self._partitioned(moved, collective)
        if found is None:
            return moved
        moved = replace(moved, readers=moved.readers | set(self._readers(found)))
        return self._with_makers(moved, found)

    def _partitioned(self, moved: Moved, collective: Instruction) -> Instruction | None:
        """Return the collective right after the partitioner; of several, that of its channel."""
        listed = self._at[moved.kind, moved.place]
        alike = [each for each in listed if hlo.result_shape(each).bytes == moved.shape.bytes]
        own = (each for each in alike if _channel(each) == _channel(collective))
        found = next(own, None) or next(iter(alike), None)
        if found is not None and len(alike) > 1:
            listed.remove(found)
        return found

    def _with_makers(self, moved: Moved, collective: Instruction) -> Moved:
        """Return what moves with its makers, and the axes along which it was gathered before."""
        value, made, gathered = collective, None, set[str]()
        for _ in range(_STEPS):
            value = self._parts.maker(next(self._parts.operands(value)))
            if value.opcode == "all-gather":
                axes = self._parts.axes
                gathered |= set(axes.of_groups(hlo.device_groups(value, axes.devices)) or ())
            elif makers := self._original(value):
                made = made or value.shape
                return replace(
                    moved, makers=frozenset(makers), made=made, gathered=frozenset(gathered)
                )
            elif value.opcode == "dynamic-slice":  # a device's part of a value that all compute
                made = made or value.shape
            elif not (value.opcode in LAYOUT or value.opcode in hlo.KINDS):
                return moved
        return moved

    def _readers(self, collective: Instruction) -> Iterator[Place]:
        """Yield the places of the operations that read what was moved."""
        values, seen = [collective], {collective.id}
        while values:
            for user in self._parts.users[values.pop().id]:
                if user.id in seen:
                    continue
                seen.add(user.id)
                is_added = user.opcode in _AROUND or user.opcode in hlo.KINDS
                if is_added and not self._original(user):
                    values.append(user)
                else:
                    yield from self._parts.places(user)

    def _original(self, part: Instruction) -> set[int]:
        """Return the operations before the partitioner that an operation is a part of."""
        if self._parts.is_argument(part):
            entry = self._whole.module.entry.instructions
            number = part.parameter_number
            return {
                each.id
                for each in entry
                if each.opcode == "parameter" and each.parameter_number == number
            }
        places = self._parts.places(part)
        return {n for place in places if place.path for n in self._originals[part.opcode, place]}


def _channel(collective: Instruction) -> int:
    return integer(collective.fields, 26)
