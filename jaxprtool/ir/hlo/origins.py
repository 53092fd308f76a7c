"""Find the source lines that an operation or a buffer of a compiled module belongs to.

    origins = OperationOrigins(module, frames_now(()), frozenset())
    for origin, share in origins.of("fusion.3"):
        print(origin.line, share)

A fusion computes values of several lines. It is split by estimated work: the number of elements of
each operation in its body, times the work for an element. So is a collective that moves values of
several lines, by their elements. Copies that XLA adds have no line of their own and get the line of
the value that they copy. `BufferOrigins` finds the lines of buffers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log2, prod
from typing import NamedTuple

from jaxprtool.ir.backends import cached_method
from jaxprtool.ir.frames import Frames, Line
from jaxprtool.ir.hlo.buffers import CALLS, Buffer, BufferAssignment, LiveRanges
from jaxprtool.ir.hlo.module import HloModule, Instruction, while_trip_count
from jaxprtool.ir.hlo.partitions import moved_values, started_collective
from jaxprtool.ir.scopes import NameScopes, compiled_scopes, function_levels, name_scopes
from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.jaxcompat.source_locations import UserFrame

#: Operations that run those of their bodies. The rest of their time is overhead.
CONTAINERS = {"while": "loop overhead", "conditional": "branch overhead", "call": "call overhead"}

#: Operations whose work is that of the operations in their bodies.
_BODIES = frozenset((*CONTAINERS, "fusion"))

#: Operations that compute nothing.
_FREE = frozenset(
    (
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "broadcast",
        "iota",
        "reshape",
        "after-all",
    )
)

#: The work for an element where it is not 1: a rough ratio to an addition, on CPUs.
_WORK = {
    "exponential": 10,
    "exponential-minus-one": 10,
    "log": 10,
    "log-plus-one": 10,
    "tanh": 10,
    "logistic": 10,
    "sine": 10,
    "cosine": 10,
    "tan": 10,
    "power": 10,
    "atan2": 10,
    "erf": 10,
    "cbrt": 10,
    "divide": 4,
    "remainder": 4,
    "sqrt": 4,
    "rsqrt": 4,
}

#: Primitives that a copy may compute, rather than be XLA's own.
_COPYING = frozenset(("transpose", "copy", "copy_p", "reshape", "rev"))

#: Names that JAX gives to the bodies of its own operations.
_STRUCTURE = re.compile(
    r"(eval_jaxpr|while|scan|cond|body|closed_call|checkpoint|rematted_computation|remat|shmap_body"
    r"|branch_\d+_fun|p?jit\(.*|custom_[jv][jv]p_call.*)$"
)

#: The maximum number of instructions through which the line of a copied value is searched.
_STEPS = 16


class OperationOrigin(NamedTuple):
    """The source of an operation.

    Attributes:
        line: The user's nearest line; None if it is unknown.
        place: The line, followed by that of a library that it calls.
        function: The function that the line is in.
        scope: The name scopes, the outermost first.
        primitive: The name of the JAX primitive, or of XLA's operation.
        backward: Whether it is in the backward part of a gradient.
        frames: The call stack, the innermost frame first.
    """

    line: Line | None
    place: Place
    function: str
    scope: tuple[str, ...]
    primitive: str
    backward: bool
    frames: tuple[UserFrame, ...]


@dataclass(frozen=True)
class OperationOrigins:
    """The origins of the operations of a module.

    Args:
        module: The compiled module.
        frames: Reads frames, and decides which files are the user's.
        ran: The names of the operations that the trace has. A loop or a call whose body has none of
            them was compiled to one piece of code, and its time is that of its body.
    """

    module: HloModule
    frames: Frames
    ran: frozenset[str]
    _known: dict[tuple[int, str, str], OperationOrigin] = field(default_factory=dict, repr=False)

    @cached_method
    def of(self, name: str) -> tuple[tuple[OperationOrigin, float], ...]:
        """Return the origins of an operation, each with its share of the time."""
        op = self.module.by_name.get(name)
        if op is None:
            return ((self._unknown(name), 1.0),)
        weights: defaultdict[OperationOrigin, float] = defaultdict(float)
        loops = {_place(loop) for loop in self._loops(op)}
        for inner, times in self._inside(op):
            # XLA gives some operations that it rewrites in a body the line of the loop.
            if (inner.frame_id or inner.op_name) and _place(inner) not in loops:
                weights[self.origin(inner)] += times * self._work(inner)
        total = sum(weights.values())
        if not total:
            return ((self.origin(self._led_back(op)), 1.0),)
        return tuple((origin, weight / total) for origin, weight in weights.items())

    @cached_method
    def own(self, name: str) -> str:
        """Return the kind of an operation that XLA added; "" for one of the program."""
        op = self.module.by_name.get(name)
        if op is None:
            return ""
        if self.is_container(name):
            return CONTAINERS[op.opcode]
        if is_callback(op):
            return "Python callbacks"
        inside = [inner for inner, _ in self._inside(op)]
        if inside and all(self._is_own_copy(inner) for inner in inside):
            return "copies" if all(map(self._keeps_layout, inside)) else "layout changes"
        return ""

    @cached_method
    def is_container(self, name: str) -> bool:
        """Return True for a loop, branch or call whose body has operations in the trace."""
        op = self.module.by_name.get(name)
        if op is None or op.opcode not in CONTAINERS:
            return False
        return any(inner.name in self.ran for inner, _ in self._called(op))

    def _inside(self, op: Instruction) -> list[tuple[Instruction, int]]:
        """Return the operations among which an operation's time is split, and how often each runs.

        Not among them are fusions, calls and loops, whose time is that of the operations in them.
        """
        if (collective := started_collective(self.module, op)) is not None:
            return [(value, 1) for value, _ in moved_values(self.module, collective)]
        if op.opcode in CONTAINERS:
            inside = [] if self.is_container(op.name) else self._called(op)
        else:
            inside = [(inner, 1) for inner in self.module.inside(op)]
        return [
            (inner, times)
            for inner, times in inside
            if inner.opcode not in _FREE and inner.opcode not in _BODIES
        ]

    def _loops(self, op: Instruction) -> Iterator[Instruction]:
        """Return the loops that an operation is or has in its bodies."""
        ops = [op, *(inner for inner, _ in self._called(op))]
        return (inner for inner in ops if inner.opcode == "while")

    def _called(self, op: Instruction, times: int = 1) -> list[tuple[Instruction, int]]:
        """Return the operations in the bodies of an operation, and how often each runs in a call.

        A loop with an unknown number of iterations counts as one.
        """
        if op.opcode not in _BODIES:
            return []  # the function of a reduction has no time of its own
        called: list[tuple[Instruction, int]] = []
        inner_times = times
        if op.opcode == "while":
            inner_times *= while_trip_count(self.module, op) or 1
        for number in op.calls:
            for inner in self.module.computations[number].instructions:
                called += [(inner, inner_times), *self._called(inner, inner_times)]
        return called

    def _is_own_copy(self, op: Instruction) -> bool:
        if op.opcode not in ("copy", "copy-start", "copy-done", "transpose"):
            return False
        return op.path.rpartition("/")[2] not in _COPYING

    def _keeps_layout(self, op: Instruction) -> bool:
        operand = self.module.instructions.get(op.operands[0]) if op.operands else None
        return op.opcode != "transpose" and (
            operand is None or operand.shape.layout == op.shape.layout
        )

    def origin(self, op: Instruction) -> OperationOrigin:
        """Return the origin of an operation, by its own name and call stack."""
        # Many operations of a body have the same call stack and name.
        key = op.frame_id, op.op_name, op.opcode
        if key not in self._known:
            self._known[key] = self._read(op)
        return self._known[key]

    def _read(self, op: Instruction) -> OperationOrigin:
        frames = _one_stack(self.module.frames(op))
        location = self.frames.location_in(frames)
        scope = self._scopes.get((op.frame_id, op.op_name), ())
        transforms, scopes = _name_scopes(op)
        backward = "backward" in (*transforms, *scopes)
        primitive = _plain(op.path.rpartition("/")[2]) or op.opcode
        if location is None:
            return OperationOrigin(None, UNKNOWN, "", scope, primitive, backward, ())
        frame, library = location.frame, location.library
        line = Line(frame.file, frame.line, self.frames.is_users(frame.file))
        place = self.frames.text(frame, () if library is None else (library,))
        function = f"{self.frames.path(frame.file)}:{frame.function}"
        return OperationOrigin(line, place, function, scope, primitive, backward, frames)

    @cached_property
    def _scopes(self) -> dict[tuple[int, str], tuple[str, ...]]:
        """The scopes of all operations, by the place and the name of each."""
        rows, levels = {}, {}
        for op in self.module.instructions.values():
            key = op.frame_id, op.op_name
            if key not in rows and any(key):
                if op.frame_id not in levels:
                    frames = _one_stack(self.module.frames(op))[::-1]
                    levels[op.frame_id] = tuple(function_levels(frames, self.frames))
                rows[key] = _name_scopes(op), levels[op.frame_id]
        return compiled_scopes(rows, self.module.name.removeprefix("jit_"))

    def _unknown(self, name: str) -> OperationOrigin:
        return OperationOrigin(None, UNKNOWN, "", (), name.partition(".")[0], False, ())

    def _led_back(self, op: Instruction) -> Instruction:
        """Return the operation that computes the operand of an operation without a line."""
        current = op
        for _ in range(_STEPS):
            if current.frame_id:
                return current
            bodies = [inner for inner in self.module.inside(current) if inner.frame_id]
            if bodies:
                return bodies[-1]
            operand = self._operand(current)
            if operand is None:
                break
            current = operand
        readers = [op]
        for reader in readers:
            if reader.frame_id:
                return reader
            if len(readers) < _STEPS:
                readers += self._users.get(reader.id, ())
        return op

    def _operand(self, op: Instruction) -> Instruction | None:
        operands = [self.module.instructions.get(number) for number in op.operands]
        computed = [
            operand for operand in operands if operand is not None and operand.opcode != "constant"
        ]
        if not computed:
            return None
        operand = computed[0]
        if op.opcode == "get-tuple-element" and operand.opcode == "tuple":
            return self.module.instructions.get(operand.operands[op.tuple_index])
        return operand

    @cached_property
    def _users(self) -> dict[int, list[Instruction]]:
        users: dict[int, list[Instruction]] = {}
        for user in self.module.instructions.values():
            for operand in user.operands:
                users.setdefault(operand, []).append(user)
        return users

    def _work(self, op: Instruction) -> float:
        """Return the estimated work of an operation, in operations on elements."""
        elements = _elements(op.shape)
        operands = [self.module.instructions.get(number) for number in op.operands]
        read = [_elements(operand.shape) for operand in operands if operand is not None]
        if op.opcode == "dot" and len(read) == 2:
            # (m k) (k n) -> (m n): the root of the product of all three sizes, without batches.
            return 2.0 * (read[0] * read[1] * elements) ** 0.5
        if op.opcode == "convolution" and len(read) == 2 and operands[1] is not None:
            return 2.0 * elements * read[1] / max(operands[1].shape.sizes, default=1)
        if op.opcode == "dynamic-update-slice" and len(read) > 1:
            return float(read[1])  # in place, as the results of a scan are written
        if op.opcode == "sort":
            return float(elements * max(log2(max(elements, 2)), 1))
        if op.opcode in ("reduce", "reduce-window", "select-and-scatter", "scatter"):
            return float(max([elements, *read]))
        return float(elements * _WORK.get(op.opcode, 1))


def _place(op: Instruction) -> tuple[int, str]:
    """Return what says where in the source an operation is from."""
    return op.frame_id, op.op_name


def _name_scopes(op: Instruction) -> NameScopes:
    """Return the name scopes of an operation, without the names of JAX's own bodies."""
    names = op.path.split("/")
    transforms, scopes = name_scopes("/".join(names[names[0].startswith("jit(") : -1]))
    return NameScopes(transforms, tuple(scope for scope in scopes if not _STRUCTURE.match(scope)))


def is_callback(op: Instruction) -> bool:
    """Return True if an operation calls a Python function."""
    return op.opcode == "custom-call" and "python" in op.custom_call_target


def _one_stack(frames: tuple[UserFrame, ...]) -> tuple[UserFrame, ...]:
    """Return a call stack up to where its outermost frame first appears.

    The body of a loop has the stack of the loop behind its own, which begins in the same place.
    """
    return frames[: frames.index(frames[-1]) + 1] if frames else frames


def _elements(shape: object) -> int:
    parts = getattr(shape, "parts", ())
    if parts:
        return sum(map(_elements, parts))
    return prod(getattr(shape, "sizes", ()))


def _plain(name: str) -> str:
    """Return a primitive's name without the transformation or call around it."""
    outer, bracket, inner = name.partition("(")
    return inner.removesuffix(")") if bracket and outer in ("jit", "pjit", "jvp", "vmap") else name


# --- buffers --------------------------------------------------------------------------------------
# The user's lines that the buffers of a compiled module come from.

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
class BufferOrigin:
    """The source of a value.

    Attributes:
        line: The user's line, followed by the library's; "" if it has none.
        what: The primitive, or XLA's own operation.
        frames: The call stack, the innermost frame first.
        is_reader: Whether the line is that of an operation that needs the value, since none of the
            user's computes it.
    """

    line: Place = UNKNOWN
    what: str = ""
    frames: tuple[UserFrame, ...] = ()
    is_reader: bool = False

    @property
    def text(self) -> str:
        """The primitive and the user's own line: `add at model.py:9`."""
        return " at ".join(filter(None, (self.what, self.line.user)))


class BufferOrigins:
    """Finds where the buffers of a module come from."""

    def __init__(
        self, module: HloModule, assignment: BufferAssignment, ranges: LiveRanges, frames: Frames
    ) -> None:
        self._module, self._ranges, self._frames = module, ranges, frames
        self._numbers = assignment.groups
        self._known: dict[int, BufferOrigin] = {}
        self._groups = defaultdict[int, list[Buffer]](list)
        for buffer in assignment.buffers():
            self._groups[assignment.groups[buffer.id]].append(buffer)

    def until(self, buffer: Buffer) -> str:
        """Return the last operation that reads a buffer, or the carry that it becomes in a loop."""
        last = None
        for member in self._groups[self._numbers[buffer.id]]:
            reader = self._ranges.readers.get(member.id)
            if reader is not None and (
                last is None or self._ranges.time[reader.id] > self._ranges.time[last.id]
            ):
                last = reader
        return "" if last is None else self.made(last).text

    def of(self, buffer: Buffer) -> BufferOrigin:
        """Return the source of a buffer.

        XLA's own instructions have no line. A value of a loop's carry gets the line of another
        value in the same memory; a copy is named after its operand, and gets the line of its
        reader.
        """
        return self._of(buffer, frozenset())

    def made(self, instruction: Instruction) -> BufferOrigin:
        """Return the line and the primitive of an instruction."""
        op, stack = next(self._described(instruction), (instruction, ()))
        return self._origin(op, stack)

    def _of(self, buffer: Buffer, seen: frozenset[int]) -> BufferOrigin:
        """Return the source of a buffer, without following buffers of the groups in `seen`."""
        if buffer.id not in self._known:
            origin = self._found(buffer, seen | {self._numbers[buffer.id]})
            if seen:  # the result may be incomplete, as buffers in `seen` were not followed
                return origin
            self._known[buffer.id] = origin
        return self._known[buffer.id]

    def _found(self, buffer: Buffer, seen: frozenset[int]) -> BufferOrigin:
        instruction, number = buffer.instruction, self._numbers[buffer.id]
        if instruction.opcode == "parameter" and self._ranges.caller(instruction) is None:
            return BufferOrigin(UNKNOWN, instruction.op_name or instruction.name)
        around = list(dict.fromkeys(member.instruction for member in self._groups[number]))
        around.sort(key=lambda candidate: candidate is not instruction)
        computed = [candidate for candidate in around if candidate.opcode not in _HANDED_ON]
        for candidate in (*computed, *around):
            for op, stack in self._described(candidate):
                if not self._is_of_loop(op, candidate, around):
                    return self._origin(op, stack)
        for candidate in computed:
            for word, moved in self._moved(candidate):
                if self._numbers[moved.id] not in seen:
                    origin = self._of(moved, seen)
                    is_made = origin.line and not origin.is_reader
                    located = origin if is_made else self._needed_by(instruction)
                    what = origin.what.removeprefix(word)  # a copy of a copy is a copy
                    return replace(located, what=f"{word}{what}")
        for candidate in around:
            if (source := self.made(candidate)).frames:
                return source
        return replace(self._needed_by(instruction), what=_opcode(self._module, instruction))

    def _needed_by(self, instruction: Instruction) -> BufferOrigin:
        """Return the source of the first operation with a line that depends on an instruction."""
        seen, pending = {instruction.id}, [instruction]
        while pending:
            writer = pending.pop()
            for buffer in self._written_by(writer):
                reader = self._ranges.readers.get(buffer.id)
                if reader is None or reader.id in seen:
                    continue
                if (origin := self.made(reader)).frames:
                    return replace(origin, is_reader=True)
                seen.add(reader.id)
                pending.append(reader)
        return BufferOrigin()

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

    def _origin(self, op: Instruction, stack: tuple[UserFrame, ...]) -> BufferOrigin:
        name = op.path.rpartition("/")[2]
        location = self._frames.location_in(stack)
        what = name or _opcode(self._module, op)
        return BufferOrigin(self._frames.place(location), what, stack)

    def _described(
        self, instruction: Instruction
    ) -> Iterator[tuple[Instruction, tuple[UserFrame, ...]]]:
        """Yield the instructions with lines: itself, and those in a fusion, the last first."""
        for op in (instruction, *reversed(self._module.inside(instruction))):
            if stack := self._module.frames(op):
                yield op, stack


def _opcode(module: HloModule, instruction: Instruction) -> str:
    """Return XLA's name of an operation; of a fusion, that of the last operation in it."""
    inside = [op.opcode for op in module.inside(instruction)]
    return next(
        (opcode for opcode in reversed(inside) if opcode not in _LAID_OUT), instruction.opcode
    )
