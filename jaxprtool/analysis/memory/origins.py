"""Find the user's lines that the buffers of a compiled module come from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jaxprtool.ir.hlo.buffers import Assignment, Buffer
from jaxprtool.ir.hlo.live_ranges import CALLS, LiveRanges
from jaxprtool.ir.hlo.module import Instruction, Module
from jaxprtool.ir.source.frames import BEHIND, Frames
from jaxprtool.jaxcompat.source_locations import UserFrame

#: Instructions that pass on the results of others.
_HANDED_ON = CALLS | {"parameter", "tuple"}

#: Instructions that copy an operand, or read or write rows: a prefix, and the position of the
#: operand after which the result is named. A loop that writes rows stacks what it writes.
_MOVES = {
    "copy": ("copy of ", 0),
    "dynamic-slice": ("a row of ", 0),
    "dynamic-update-slice": ("", 1),
}

#: Instructions that do not name the fusion they are in.
_LAID_OUT = frozenset({"bitcast", "tuple", "parameter", "constant"})


@dataclass(frozen=True)
class Origin:
    """The source of a value.

    Attributes:
        line: The user's line, followed by the library's; "" if it has none.
        what: The primitive, or XLA's own operation.
        frames: The call stack, the innermost frame first.
        is_reader: Whether the line is that of an operation that needs the value, since none of the
            user's computes it.
    """

    line: str = ""
    what: str = ""
    frames: tuple[UserFrame, ...] = ()
    is_reader: bool = False

    @property
    def text(self) -> str:
        """The primitive and the user's own line: `add at model.py:9`."""
        return " at ".join(filter(None, (self.what, self.line.partition(BEHIND)[0])))


class Origins:
    """Finds where the buffers of a module come from."""

    def __init__(
        self, module: Module, assignment: Assignment, ranges: LiveRanges, frames: Frames
    ) -> None:
        self._module, self._ranges, self._frames = module, ranges, frames
        self._numbers = assignment.groups
        self._known: dict[int, Origin] = {}
        self._groups = defaultdict[int, list[Buffer]](list)
        for each in assignment.buffers():
            self._groups[assignment.groups[each.id]].append(each)

    def until(self, buffer: Buffer) -> str:
        """Return the last operation that reads a buffer, or the carry that it becomes in a loop."""
        last = None
        for each in self._groups[self._numbers[buffer.id]]:
            reader = self._ranges.readers.get(each.id)
            if reader is not None and (
                last is None or self._ranges.time[reader.id] > self._ranges.time[last.id]
            ):
                last = reader
        return "" if last is None else self.made(last).text

    def of(self, buffer: Buffer) -> Origin:
        """Return the source of a buffer.

        XLA's own instructions have no line. A value of a loop's carry gets the line of another
        value in the same memory; a copy is named after its operand, and gets the line of its
        reader.
        """
        return self._of(buffer, frozenset())

    def made(self, instruction: Instruction) -> Origin:
        """Return the line and the primitive of an instruction."""
        op, stack = next(self._described(instruction), (instruction, ()))
        return self._origin(op, stack)

    def _of(self, buffer: Buffer, seen: frozenset[int]) -> Origin:
        """Return the source of a buffer, without following buffers of the groups in `seen`."""
        if buffer.id not in self._known:
            found = self._found(buffer, seen | {self._numbers[buffer.id]})
            if seen:  # the result may be incomplete, as buffers in `seen` were not followed
                return found
            self._known[buffer.id] = found
        return self._known[buffer.id]

    def _found(self, buffer: Buffer, seen: frozenset[int]) -> Origin:
        instruction, number = buffer.instruction, self._numbers[buffer.id]
        if instruction.opcode == "parameter" and self._ranges.caller(instruction) is None:
            return Origin("", instruction.op_name or instruction.name)
        around = list(dict.fromkeys(each.instruction for each in self._groups[number]))
        around.sort(key=lambda each: each is not instruction)
        computed = [each for each in around if each.opcode not in _HANDED_ON]
        for each in (*computed, *around):
            for op, stack in self._described(each):
                if not self._is_of_loop(op, each, around):
                    return self._origin(op, stack)
        for each in computed:
            for word, moved in self._moved(each):
                if self._numbers[moved.id] not in seen:
                    origin = self._of(moved, seen)
                    is_made = origin.line and not origin.is_reader
                    located = origin if is_made else self._needed_by(instruction)
                    what = origin.what.removeprefix(word)  # a copy of a copy is a copy
                    return replace(located, what=f"{word}{what}")
        for each in around:
            if (made := self.made(each)).frames:
                return made
        return replace(self._needed_by(instruction), what=_opcode(self._module, instruction))

    def _needed_by(self, instruction: Instruction) -> Origin:
        """Return the source of the first operation with a line that depends on an instruction."""
        seen, pending = {instruction.id}, [instruction]
        while pending:
            made = pending.pop()
            for buffer in self._written_by(made):
                reader = self._ranges.readers.get(buffer.id)
                if reader is None or reader.id in seen:
                    continue
                if (origin := self.made(reader)).frames:
                    return replace(origin, is_reader=True)
                seen.add(reader.id)
                pending.append(reader)
        return Origin()

    def _written_by(self, instruction: Instruction) -> Iterator[Buffer]:
        """Yield the buffers of an instruction's result, or of the parts of a tuple."""
        parts = range(len(instruction.shape.parts))
        for index in ((i,) for i in parts) if parts else [()]:
            if (buffer := self._ranges.buffer_at((instruction.id, index))) is not None:
                yield buffer

    def _moved(self, instruction: Instruction) -> Iterator[tuple[str, Buffer]]:
        """Yield the prefix and buffer of each operand that an instruction moves; see `_MOVES`."""
        for op in reversed(self._module.inside(instruction)):
            if op.opcode not in _MOVES:
                continue
            word, position = _MOVES[op.opcode]
            if (buffer := self._outside(instruction, op.operands[position])) is not None:
                yield word, buffer

    def _outside(self, instruction: Instruction, number: int) -> Buffer | None:
        """Return the buffer that an operand of an instruction in a fusion comes from."""
        if instruction.opcode == "fusion":
            op = self._module.instructions[number]
            while op.opcode != "parameter":
                if not op.operands:
                    return None
                op = self._module.instructions[op.operands[0]]
            number = instruction.operands[op.parameter_number]
        return self._ranges.buffer_at((number, ()))

    def _is_of_loop(
        self, op: Instruction, instruction: Instruction, around: Sequence[Instruction]
    ) -> bool:
        """Return True if an operation, such as the slice of a row, belongs to a loop itself.

        Args:
            op: The operation.
            instruction: The operation, or the fusion around it.
            around: The instructions that write to the same place.
        """
        loops = [self._ranges.caller(instruction), *around]
        frame = self._module.frames(op)[:1]
        return any(
            loop is not None and loop.opcode == "while" and self._module.frames(loop)[:1] == frame
            for loop in loops
        )

    def _origin(self, op: Instruction, stack: tuple[UserFrame, ...]) -> Origin:
        name = op.path.rpartition("/")[2]
        location = self._frames.location_in(stack)
        what = name or _opcode(self._module, op)
        return Origin(self._frames.location_text(location), what, stack)

    def _described(
        self, instruction: Instruction
    ) -> Iterator[tuple[Instruction, tuple[UserFrame, ...]]]:
        """Yield the instructions with lines: itself, and those in a fusion, the last first."""
        for op in (instruction, *reversed(self._module.inside(instruction))):
            if stack := self._module.frames(op):
                yield op, stack


def _opcode(module: Module, instruction: Instruction) -> str:
    """Return XLA's name of an operation; of a fusion, that of the last operation in it."""
    inside = [op.opcode for op in module.inside(instruction)]
    return next((each for each in reversed(inside) if each not in _LAID_OUT), instruction.opcode)
