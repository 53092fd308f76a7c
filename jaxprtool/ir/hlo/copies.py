"""The copies that XLA inserts in a module: of which value, how often, and the lines that need them.

    for copy in inserted_copies(module, assignment, frames_now()):
        print(copy.bytes, copy.value, copy.written, copy.read)

XLA updates the carry of a loop in place, and writes slices into the array that they update. If the
old elements are still needed, it copies the array first: because a later operation reads them,
because the caller keeps an argument that is not donated, or because a constant may not change. A
copy in the body of a loop is made in each iteration. Copies that the program asks for, as
`jnp.copy` and `transpose` do, and moves to another memory, as into the VMEM of a TPU, are not
listed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

from jaxprtool.ir.documents import document
from jaxprtool.ir.frames import Frames
from jaxprtool.ir.hlo.buffers import (
    CALLS,
    Buffer,
    BufferAssignment,
    LiveRanges,
    Position,
    scheduled_assignment,
)
from jaxprtool.ir.hlo.module import HloModule, Instruction, executed
from jaxprtool.ir.hlo.origins import BufferOrigins, OperationOrigins
from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.ir.trees import common_path, without_numbers

#: Why a copy is made: its elements are overwritten while others read the old ones; an argument is
#: not donated; a constant may not change; a value is returned twice, or becomes another carry; the
#: layout of the elements changes; or "" if none of this is seen.
CopyReason: TypeAlias = Literal[
    "overwritten", "not donated", "constant", "returned", "another carry", "layout", ""
]

#: What is copied.
CopiedKind: TypeAlias = Literal["carry", "argument", "constant", "value"]

#: Instructions that hand on their first operand.
_HANDED_ON = frozenset(
    ("copy", "copy-start", "copy-done", "bitcast", "optimization-barrier", "add-dependency")
)

#: Instructions of a fusion that only copies.
_PASSIVE = frozenset(("parameter", "bitcast", "tuple", "get-tuple-element"))


@document(optional=("place", "loop", "runs"))
@dataclass(frozen=True)
class InsertedCopy:
    """Copies of a value that XLA inserted for the same reason.

    Attributes:
        place: The user's line that needs them; "" if it is unknown.
        kind: What is copied: a "carry" of a loop, an "argument", a "constant" or another "value".
        value: The value: the path of an argument, also of one that is the first value of a carry;
            otherwise the primitive that computes it, and its line.
        loop: The line of the loop that carries it; "" for no carry.
        type: Its type.
        reason: Why it is copied.
        written: The operation that overwrites the array, and its line; "" if there is none.
        read: The operation that reads the old elements; "" if there is none.
        count: The number of copies in the module.
        runs: How often a call makes them, all together. A copy in a loop of 1,000 iterations is
            made 1,000 times. None if that is known only at run time.
        bytes: The bytes that a call copies, with one iteration of loops of unknown length.
        operations: The names of the copies.
    """

    place: Place
    kind: CopiedKind
    value: str
    loop: Place
    type: str
    reason: CopyReason
    written: str
    read: str
    count: int
    runs: int | None
    bytes: int
    operations: tuple[str, ...]


def inserted_copies(
    module: HloModule, assignment: BufferAssignment | None, frames: Frames
) -> tuple[InsertedCopy, ...]:
    """Return the copies that XLA inserted in a scheduled module, those of most bytes first.

    Args:
        module: The module, after XLA's optimizations.
        assignment: The memory of the module; None to derive it from the schedule.
        frames: Reads frames, and decides which files are the user's.
    """
    if not any(_copies(module, op) for op in _scheduled(module)):
        return ()  # most modules of small programs
    known = scheduled_assignment(module, False) if assignment is None else assignment
    return _merged(_CopyReader(module, known, frames).copies())


def _scheduled(module: HloModule) -> Iterator[Instruction]:
    return (module.instructions[n] for order in module.schedule.values() for n in order)


def _copies(module: HloModule, op: Instruction) -> bool:
    """Return True if an instruction only copies its operand."""
    if op.opcode in ("copy", "copy-start"):
        return True
    opcodes = {inner.opcode for inner in module.inside(op)} if op.opcode == "fusion" else ()
    return "copy" in opcodes and set(opcodes) <= {"copy", *_PASSIVE}


def _merged(copies: Iterable[InsertedCopy]) -> tuple[InsertedCopy, ...]:
    """Merge copies of alike values for the same reason on the same lines."""
    groups = defaultdict[tuple[object, ...], list[InsertedCopy]](list)
    for copy in copies:
        why = copy.reason, copy.written, copy.read
        groups[copy.place, copy.kind, without_numbers(copy.value), copy.type, *why].append(copy)
    merged = []
    for group in groups.values():
        runs = [copy.runs for copy in group]
        merged.append(
            replace(
                group[0],
                value=common_path([copy.value for copy in group]),
                count=len(group),
                runs=None if None in runs else sum(n for n in runs if n is not None),
                bytes=sum(copy.bytes for copy in group),
                operations=tuple(name for copy in group for name in copy.operations),
            )
        )
    return tuple(sorted(merged, key=lambda copy: -copy.bytes))


def _runs(module: HloModule) -> dict[int, int | None]:
    """Return how often a call runs each instruction, by number; None if that is unknown."""
    runs: dict[int, int | None] = {}
    for op, count in executed(module):
        before = runs.get(op.id, 0)
        runs[op.id] = None if before is None or count is None else before + count
    return runs


class _Copied(NamedTuple):
    """The value that is copied.

    Attributes:
        kind: What computes it.
        name: Its name.
        loop: The loop that carries it, and the number of the carry; None if none does.
    """

    kind: Literal["argument", "constant", "value"]
    name: str
    loop: tuple[Instruction, int] | None


class _Uses(NamedTuple):
    """The instructions that read and that write a place, other than copies, in order."""

    reads: list[Instruction]
    writes: list[Instruction]


class _CopyReader:
    """Finds the copies of a module, and why they are made."""

    def __init__(self, module: HloModule, assignment: BufferAssignment, frames: Frames) -> None:
        self._module = module
        self._groups = assignment.groups
        self._ranges = LiveRanges(module, assignment)
        self._buffers = BufferOrigins(module, assignment, self._ranges, frames)
        self._operations = OperationOrigins(module, frames, frozenset(module.by_name))
        self._runs = _runs(module)

    def copies(self) -> Iterator[InsertedCopy]:
        """Yield each copy."""
        for number in self._ranges.time:
            op = self._module.instructions[number]
            if _copies(self._module, op) and self._operations.own(op.name):
                found = self._copy(op)
                if found is not None:
                    yield found

    def _copy(self, op: Instruction) -> InsertedCopy | None:
        """Return a copy with its reason; None if it moves the value to another memory."""
        is_started = op.opcode == "copy-start"
        position: Position = (op.operands[0], ())
        source = self._module.instructions[op.operands[0]].shape
        result = op.shape.at((0,)) if is_started else op.shape
        if source.space != result.space or source.parts or result.parts:
            return None
        old = self._ranges.buffer_at(position)
        new = self._ranges.buffer_at((op.id, (0,) if is_started else ()))
        copied = self._copied(position)
        reason, written, read = self._reason(op, copied, old, new)
        if source.layout != result.layout:
            reason = "layout"
        needed = next((other for other in (written, read) if other is not None), None)
        place = UNKNOWN if needed is None else self._buffers.made(needed).line.user
        if not place and new is not None:
            place = self._buffers.of(new).line.user
        runs = self._runs[op.id]
        return InsertedCopy(
            place,
            copied.kind if copied.loop is None else "carry",
            copied.name,
            UNKNOWN if copied.loop is None else self._buffers.made(copied.loop[0]).line.user,
            str(result),
            reason,
            "" if written is None else self._buffers.made(written).text,
            "" if read is None else self._buffers.made(read).text,
            1,
            runs,
            result.bytes * (1 if runs is None else runs),
            (op.name,),
        )

    def _reason(
        self, op: Instruction, copied: _Copied, old: Buffer | None, new: Buffer | None
    ) -> tuple[CopyReason, Instruction | None, Instruction | None]:
        """Return why a copy is made, and the operations that write and read the array."""
        if old is None or new is None:
            return "", None, None
        # Either the copy is overwritten while others read the array, or the other way round.
        for overwritten, kept in ((new, old), (old, new)):
            written = self._overwriting(op, overwritten)
            if written is None:
                continue
            reads = [r for r in self._uses(kept).reads if r is not written]
            read = max(reads, key=lambda r: self._ranges.time[r.id], default=None)
            if kept is old and copied.loop is None and copied.kind != "value":
                return ("not donated" if copied.kind == "argument" else "constant"), written, read
            return "overwritten", written, read
        if self._is_result(new):
            return "returned", None, None
        if copied.loop is not None and self._becomes_another(copied.loop, new):
            return "another carry", None, None
        return "", None, None

    def _overwriting(self, copy: Instruction, buffer: Buffer) -> Instruction | None:
        """Return the first operation after a copy that writes to a place, or the first before it.

        One before it writes in the next iteration of a loop.
        """
        home = self._ranges.caller(copy)
        writes = [op for op in self._uses(buffer).writes if op is not copy]
        after = [op for op in writes if self._ranges.time[op.id] > self._ranges.time[copy.id]]
        around = [op for op in writes if home is not None and self._ranges.caller(op) is home]
        return next(iter(after or around), None)

    # --- places

    def _uses(self, buffer: Buffer) -> _Uses:
        return self._uses_of[self._groups[buffer.id]]

    @cached_property
    def _uses_of(self) -> defaultdict[int, _Uses]:
        """The uses of the places of each group."""
        uses: defaultdict[int, _Uses] = defaultdict(lambda: _Uses([], []))
        for number in self._ranges.time:
            op = self._module.instructions[number]
            if op.opcode in _HANDED_ON | CALLS | _PASSIVE or _copies(self._module, op):
                continue
            for operand in dict.fromkeys(op.operands):
                if (buffer := self._ranges.buffer_at((operand, ()))) is not None:
                    uses[self._groups[buffer.id]].reads.append(op)
            for index in [()] if not op.shape.parts else [(i,) for i in range(len(op.shape.parts))]:
                if (buffer := self._ranges.buffer_at((op.id, index))) is not None:
                    uses[self._groups[buffer.id]].writes.append(op)
        return uses

    def _is_result(self, buffer: Buffer) -> bool:
        root = self._module.entry.root
        parts = range(len(root.shape.parts))
        positions: list[Position] = [(root.id, (i,)) for i in parts] or [(root.id, ())]
        results = filter(None, map(self._ranges.buffer_at, positions))
        return any(self._groups[r.id] == self._groups[buffer.id] for r in results)

    # --- values

    def _copied(self, position: Position) -> _Copied:
        """Return what a value is: where it is computed, and the innermost loop that carries it."""
        loop: tuple[Instruction, int] | None = None
        op = self._module.instructions[position[0]]
        while op.opcode != "while":
            if loop is None and (carrying := self._carrying(op, position[1])) is not None:
                loop = carrying, position[1][0]
            before = self._before(op, position)
            if before == position:
                break
            position = before
            op = self._module.instructions[position[0]]
        if op.opcode == "parameter":
            return _Copied("argument", op.op_name or op.name, loop)
        if op.opcode == "constant":
            return _Copied("constant", "constant", loop)
        return _Copied("value", self._buffers.made(op).text, loop)

    def _before(self, op: Instruction, position: Position) -> Position:
        if op.opcode == "copy" or (op.opcode == "fusion" and _copies(self._module, op)):
            return op.operands[0], position[1]
        if op.opcode == "copy-start":
            return op.operands[0], ()
        return self._ranges.forwarded(position)

    def _carrying(self, op: Instruction, index: tuple[int, ...]) -> Instruction | None:
        """Return the loop that carries a part of a parameter, and may change it."""
        loop = self._ranges.caller(op) if op.opcode == "parameter" and index else None
        if loop is None or loop.opcode != "while":
            return None
        position: Position = (self._module.computations[loop.calls[0]].root.id, index)
        while position != (op.id, index):
            before = self._before(self._module.instructions[position[0]], position)
            if before == position or self._ranges.caller(self._op(position)) is not loop:
                return loop
            position = before
        return None

    def _op(self, position: Position) -> Instruction:
        return self._module.instructions[position[0]]

    def _becomes_another(self, loop: tuple[Instruction, int], buffer: Buffer) -> bool:
        """Return True if a copied carry of a loop becomes another carry of it."""
        root, group = self._module.computations[loop[0].calls[0]].root, self._groups[buffer.id]
        for i in range(len(root.shape.parts)):
            result = self._ranges.buffer_at((root.id, (i,)))
            if i != loop[1] and result is not None and self._groups[result.id] == group:
                return True
        return False
