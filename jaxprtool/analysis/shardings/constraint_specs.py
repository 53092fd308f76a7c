"""The specs that the operands and the readers of each sharding constraint suggest for it.

A constraint determines the specs of the operations around it. What they would be without it follows
from the arguments and the other constraints, dimension by dimension (`ir.hlo.dimensions`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxprtool.analysis.shardings.reasons import is_constraint
from jaxprtool.analysis.shardings.sharded_module import LAYOUT, ShardedModule
from jaxprtool.ir.basics.caches import cached_method
from jaxprtool.ir.hlo.dimensions import contracted, reading
from jaxprtool.ir.hlo.mesh_axes import Spec, spec_text
from jaxprtool.ir.hlo.module import Instruction
from jaxprtool.ir.source.frames import BEHIND

#: The maximum number of operations through which a spec is derived.
_STEPS = 24


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
    specs = _Specs(whole)
    found: dict[tuple[str, str], ConstraintSpecs] = {}
    for each in whole.module.instructions.values():
        is_one = is_constraint(each) and len(each.operands) == 1
        tiles = whole.tiles(each) if is_one else None
        own = None if tiles is None or tiles.is_local else whole.spec(each)
        if own is None:
            continue
        line, text = whole.line(each).partition(BEHIND)[0], spec_text(own)
        texts = [spec_text(spec) for spec in specs.around(each) if spec != own]
        earlier = found.get((line, text), ConstraintSpecs(line, 0, text, ()))
        suggested = tuple(dict.fromkeys((*earlier.suggested, *texts)))
        largest = max(earlier.bytes, each.shape.bytes)
        found[line, text] = ConstraintSpecs(line, largest, text, suggested)
    return sorted(found.values(), key=lambda each: (not each.suggested, -each.bytes))


class _Specs:
    """Derives the specs that values would have without some constraint."""

    def __init__(self, whole: ShardedModule):
        self._whole = whole

    def around(self, constraint: Instruction) -> Iterator[Spec]:
        """Yield the specs that the operand of a constraint, and its readers, suggest for it."""
        (operand,) = self._whole.operands(constraint)
        yield self._natural(operand, _STEPS)
        values = [constraint]
        for value in values[:_STEPS]:
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
            for other, each in enumerate(operands):
                their = reading(reader, other, each.shape)
                if other == position or their is None:
                    continue
                spec = self._natural(each, _STEPS)
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
        own = self._whole.spec(maker) or ((),) * len(value.shape.sizes)
        operands = list(self._whole.operands(maker))
        if not (steps and operands) or is_constraint(maker) or maker.opcode == "get-tuple-element":
            return own
        entries: list[tuple[str, ...]] = [()] * len(maker.shape.sizes)
        for position, operand in enumerate(operands):
            how = reading(maker, position, operand.shape)
            if how is None:
                return own
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
