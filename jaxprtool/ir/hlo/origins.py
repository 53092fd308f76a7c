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
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from math import log2, prod
from typing import Literal, NamedTuple, TypeAlias

from jaxprtool.ir.backends import cached_method
from jaxprtool.ir.documents import document
from jaxprtool.ir.frames import Frames, Line
from jaxprtool.ir.hlo.buffers import (
    Buffer,
    BufferAssignment,
    LiveRanges,
    Position,
    scheduled_assignment,
)
from jaxprtool.ir.hlo.module import CALLS, HloModule, Instruction, while_trip_count
from jaxprtool.ir.hlo.partitions import moved_values, started_collective
from jaxprtool.ir.scopes import NameScopes, compiled_scopes, function_levels, name_scopes
from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.ir.trees import common_path, without_numbers
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
        return any(inner.name in self.ran for inner in self._called(op))

    def _inside(self, op: Instruction) -> list[tuple[Instruction, int]]:
        """Return the operations among which an operation's time is split, and how often each runs.

        Not among them are fusions, calls and loops, whose time is that of the operations in them.
        """
        if (collective := started_collective(self.module, op)) is not None:
            return [(value, 1) for value, _ in moved_values(self.module, collective)]
        if op.opcode in CONTAINERS:
            inside = Counter() if self.is_container(op.name) else self._called(op)
        else:
            inside = self.module.inside(op)
        return [
            (inner, times)
            for inner, times in inside.items()
            if inner.opcode not in _FREE and inner.opcode not in _BODIES
        ]

    def _loops(self, op: Instruction) -> Iterator[Instruction]:
        """Return the loops that an operation is or has in its bodies."""
        ops = [op, *self._called(op)]
        return (inner for inner in ops if inner.opcode == "while")

    @cached_method
    def _called(self, op: Instruction) -> Counter[Instruction]:
        """Return the operations in the bodies of an operation, and how often each runs in a call.

        A loop with an unknown number of iterations counts as one.
        """
        called = Counter[Instruction]()
        if op.opcode not in _BODIES:
            return called  # the function of a reduction has no time of its own
        times = (while_trip_count(self.module, op) or 1) if op.opcode == "while" else 1
        for number in op.calls:
            for inner in self.module.computations[number].instructions:
                called[inner] += times
                for deeper, runs in self._called(inner).items():
                    called[deeper] += times * runs
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

    The body of a loop has the stack of the loop behind its own, which begins in the same place, or
    the frame that runs the loop several times.
    """
    whole = frames[: frames.index(frames[-1]) + 1] if frames else frames
    return tuple(frame for frame, _ in groupby(whole))


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


# --- copies ---------------------------------------------------------------------------------------
# The copies that XLA inserts in a module: of which value, how often, and the lines that need them.
#
#     for copy in inserted_copies(module, assignment, frames_now()):
#         print(copy.bytes, copy.value, copy.written, copy.read)
#
# XLA updates the carry of a loop in place, and writes slices into the array that they update. If
# the old elements are still needed, it copies the array first: because a later operation reads
# them, because the caller keeps an argument that is not donated, or because a constant may not
# change. A copy in the body of a loop is made in each iteration. Copies that the program asks for,
# as `jnp.copy` and `transpose` do, and moves to another memory, as into the VMEM of a TPU, are not
# listed.


#: Why a copy is made: its elements are overwritten while others read the old ones; an argument is
#: not donated; a constant may not change; a value is returned twice, or becomes another carry; the
#: layout of the elements changes; or "" if none of this is seen.
CopyReason: TypeAlias = Literal[
    "overwritten", "not donated", "constant", "returned", "another carry", "layout", ""
]

#: What is copied.
CopiedKind: TypeAlias = Literal["carry", "argument", "constant", "value"]

#: Instructions that hand on their first operand.
_ALIASES = frozenset(
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
    times: dict[int, int | None] = {module.entry.id: 1}
    # A module has its computations before those that call them.
    for computation in reversed(module.computations.values()):
        count = times.get(computation.id, 0)
        for op in computation.instructions:
            runs[op.id] = inner = count
            if op.opcode == "while":
                trips = while_trip_count(module, op)
                inner = None if trips is None or count is None else count * trips
            # The end of an operation in the background names the computation that its start runs.
            for number in () if op.opcode in ("async-update", "async-done") else op.calls:
                before = times.get(number, 0)
                times[number] = None if before is None or inner is None else before + inner
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
            if op.opcode in _ALIASES | CALLS | _PASSIVE or _copies(self._module, op):
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
