"""Compare two HLO modules by the user's lines: kernels, copies, bytes, FLOPs and memory.

    found = diff_modules(stored_module("old.hlo"), stored_module("new.hlo"))
    found.is_same, found.lines[0].place, found.lines[0].after.kernels

Modules are the same if their instructions are, whatever their names, numbers and lines. Otherwise
each line has the work of the kernels on it in both modules, and kernels are matched by the
operations that they compute (`kernels`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, NamedTuple, TypeAlias

import networkx

from jaxprtool.commands.cost.modules import ModuleWork, PartOrigins, kernel_runs
from jaxprtool.commands.memory.compiled import module_peak
from jaxprtool.formats.hlo import StoredModule
from jaxprtool.ir.documents import Printed, document
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.hlo.module import HloModule, Instruction, kernel_contents
from jaxprtool.ir.hlo.partitions import KINDS
from jaxprtool.ir.source_text import UNKNOWN, Place

#: The fields of an instruction that differ between equal ones: names, numbers and metadata.
_NAMES = frozenset((1, 7, 26, 35, 36, 37, 38))


#: Instructions that do nothing in a kernel.
_PASSIVE = frozenset(
    ("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "broadcast")
)

#: The figures that count kernels.
_COUNTS = ("kernels", "fusions", "copies", "transposes", "collectives")

#: Operations that XLA inserts where kernels or layouts change.
_INSERTED = frozenset(("copy", "copy-start", "copy-done", "convert", "transpose"))

#: The kind of an operation, whatever its shape: the opcode, the element type, and the bytes.
_Kind: TypeAlias = tuple[str, str, int]

#: The part of the largest difference of bytes from which a line with other operations is a cause.
_NOTABLE = 0.1


class ModuleFigures(NamedTuple):
    """What the kernels of a line, or of a module, do in a call."""

    kernels: Annotated[int, "The kernels that run, as often as the loops around them do."] = 0
    fusions: Annotated[int, "Those that are fusions."] = 0
    copies: Annotated[int, "Those that only copy."] = 0
    transposes: Annotated[int, "Those that only transpose."] = 0
    collectives: Annotated[int, "Those that are collectives."] = 0
    flops: Annotated[int, "The operations, with transcendentals."] = 0
    bytes: Annotated[int, "The bytes that are read and written."] = 0
    temporary_bytes: Annotated[int, "The bytes at the peak, without arguments and results."] = 0
    donated_bytes: Annotated[int, "Of a module: the arguments whose memory results reuse."] = 0

    def __add__(self, other: ModuleFigures) -> ModuleFigures:  # type: ignore[override]
        return ModuleFigures(*map(sum, zip(self, other, strict=True)))


@document(optional=("place",))
@dataclass(frozen=True)
class LineChange:
    """The figures of a line in both modules.

    Attributes:
        place: The user's line; "" for what XLA computes for none of them.
        before: Its figures in the first module.
        after: Its figures in the second.
        removed: The operations that it has only in the first module.
        added: Those that it has only in the second. Without either, its figures changed because
            XLA divides the same operations into other kernels.
    """

    place: Place
    before: ModuleFigures
    after: ModuleFigures
    removed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()


@document(optional=("place",))
@dataclass(frozen=True)
class KernelChange:
    """Kernels that compute the same operations, divided in another way.

    Attributes:
        before: The kernels of the first module, each with what it computes: `fusion.3: add, tanh`.
        after: Those of the second.
        place: The line of the largest.
        removed: The operations that only the first module has.
        added: The operations that only the second module has.
        bytes_before: The bytes that those of the first module read and write in a call.
        bytes_after: Those of the second.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    place: Place
    removed: tuple[str, ...]
    added: tuple[str, ...]
    bytes_before: int
    bytes_after: int


@document()
@dataclass(frozen=True)
class ModuleDiff(Printed):
    """The differences between two modules.

    Attributes:
        names: The names of the modules.
        is_same: Whether their instructions are the same.
        before: The figures of the first module.
        after: Those of the second.
        lines: The lines whose figures differ: first those with other operations and a tenth of
            the largest difference of bytes or more, then those whose work differs, and not only
            their temporaries, by a tenth of the largest difference or more, then the others; of
            each, the largest difference first. What is XLA's own is last.
        kernels: The kernels that differ, those with the largest difference of bytes first.
        has_memory: Whether both modules have a schedule, so that their memory is known.
        lost_donations: The arguments that only the first module donates.
        new_donations: Those that only the second module donates.
    """

    names: tuple[str, str]
    is_same: bool
    before: ModuleFigures
    after: ModuleFigures
    lines: tuple[LineChange, ...]
    kernels: tuple[KernelChange, ...]
    has_memory: bool
    lost_donations: tuple[str, ...] = ()
    new_donations: tuple[str, ...] = ()


def diff_modules(before: StoredModule, after: StoredModule) -> ModuleDiff:
    """Compare two modules by line and by kernel."""
    is_same = _same_modules(before.module, after.module)
    sides = _Side(before), _Side(after)
    old, new = (side.lines for side in sides)
    whole, new_whole = (
        sum(side.lines.values(), ModuleFigures(donated_bytes=side.donated_bytes)) for side in sides
    )
    changes = [_line_change(place, sides, [old, new]) for place in dict.fromkeys([*old, *new])]
    changed = [change for change in changes if change.before != change.after and not is_same]
    return ModuleDiff(
        (before.module.name, after.module.name),
        is_same,
        whole,
        new_whole,
        tuple(causes_first(changed, whole, new_whole, max(side.peak_bytes for side in sides))),
        () if is_same else tuple(_kernel_changes(*sides)),
        all(side.has_memory for side in sides),
        *(_only_donated(*pair) for pair in (sides, sides[::-1])),
    )


def _only_donated(side: _Side, other: _Side) -> tuple[str, ...]:
    """Return the arguments that only the first of two modules donates."""
    theirs = {op.parameter_number for op in other.donated}
    only = (op for op in side.donated if op.parameter_number not in theirs)
    return tuple(op.op_name or op.name for op in only)


def _line_change(
    place: Place, sides: tuple[_Side, _Side], lines: Sequence[Mapping[Place, ModuleFigures]]
) -> LineChange:
    before, after = (figures.get(place, ModuleFigures()) for figures in lines)
    old, new = sides
    removed, added = _more_than(old, new, place), _more_than(new, old, place)
    return LineChange(place, before, after, removed, added)


def _more_than(side: _Side, other: _Side, place: Place) -> tuple[str, ...]:
    """Return the operations that a line has in one module only, by their opcodes.

    One that only moved to another line, as when XLA merges it with an equal one, is left out. So
    are those that XLA inserts, unless the other module has nothing else of the line.
    """
    theirs = other.computed.get(place, {})
    only = [
        kind
        for kind in side.computed.get(place, {})
        if kind not in theirs and side.lines_with[kind] > other.lines_with[kind]
    ]
    opcodes = dict.fromkeys(opcode for opcode, *_ in only)
    return tuple(opcode for opcode in opcodes if not theirs or opcode not in _INSERTED)


def causes_first(
    changes: Sequence[LineChange], before: ModuleFigures, after: ModuleFigures, peak_bytes: int
) -> list[LineChange]:
    """Return lines with other operations first, then those of other work, each largest first.

    An added operation changes the kernels of other lines too, often by more bytes than its own.
    What computes more or less may move the peak of memory, where values of many lines are live: of
    a line, as many temporaries count as the module has more or less.
    """
    most = ModuleFigures(*map(max, before, after))
    most = most._replace(**dict.fromkeys(_COUNTS, most.kernels), temporary_bytes=peak_bytes)
    temporaries = abs(after.temporary_bytes - before.temporary_bytes)

    def shares(change: LineChange) -> tuple[float, float]:
        """Return how much of the module's work and of its memory changes."""
        differences = ModuleFigures(
            *(abs(new - old) for old, new in zip(change.before, change.after, strict=True))
        )
        size = min(differences.temporary_bytes, temporaries)
        work = differences._replace(temporary_bytes=0)
        return (
            max(part / max(whole, 1) for part, whole in zip(work, most, strict=True)),
            size / max(most.temporary_bytes, 1),
        )

    def moved(change: LineChange) -> int:
        return abs(change.after.bytes - change.before.bytes)

    least = _NOTABLE * max(map(moved, changes), default=0)
    notable = _NOTABLE * max((max(shares(change)) for change in changes), default=0.0)

    def key(change: LineChange) -> tuple[bool, bool, bool, float]:
        is_cause = bool(change.removed or change.added) and moved(change) >= least
        work, memory = shares(change)
        is_work = 0 < work >= notable
        return not change.place, not is_cause, not is_work, -max(work, memory)

    return sorted(changes, key=key)


class _Side:
    """The kernels of a module, and its figures by line."""

    def __init__(self, stored: StoredModule) -> None:
        self.module = stored.module
        self.runs = kernel_runs(stored.module)
        self._work = ModuleWork(stored.module)
        self._origins = PartOrigins(stored.module, frames_now())
        self.has_memory = bool(stored.module.schedule)
        self.peak_bytes = 0
        self.lines = self._figures(stored)

    @cached_property
    def computed(self) -> dict[Place, dict[_Kind, None]]:
        """The kinds of operations of each line."""
        lines: defaultdict[Place, dict[_Kind, None]] = defaultdict(dict)
        for kernel in self.runs:
            for op in self.module.inside(kernel):
                if op.opcode not in _PASSIVE:
                    kind = op.opcode, op.shape.dtype, op.shape.bytes
                    lines[self.place(kernel, op)][kind] = None
        return dict(lines)

    @cached_property
    def lines_with(self) -> Counter[_Kind]:
        """The number of lines that have operations of each kind."""
        return Counter(kind for kinds in self.computed.values() for kind in kinds)

    @property
    def donated(self) -> list[Instruction]:
        """The donated arguments."""
        numbers = set(self.module.donated.values())
        parameters = (op for op in self.module.entry.instructions if op.opcode == "parameter")
        return [op for op in parameters if op.parameter_number in numbers]

    @property
    def donated_bytes(self) -> int:
        """The bytes of donated arguments."""
        return sum(op.shape.bytes for op in self.donated)

    def _figures(self, stored: StoredModule) -> dict[Place, ModuleFigures]:
        lines: defaultdict[Place, ModuleFigures] = defaultdict(ModuleFigures)
        for kernel, count in self.runs.items():
            lines[self.place(kernel)] += ModuleFigures(
                count,
                count * (kernel.opcode == "fusion"),
                count * self._is_all(kernel, "copy"),
                count * self._is_all(kernel, "transpose"),
                count * (kernel.opcode.removesuffix("-start") in KINDS),
            )
            for part in self._work.parts(kernel):
                work = part.work.times(count)
                lines[self.place(kernel, part.op)] += ModuleFigures(
                    flops=work.flops + work.transcendentals, bytes=work.bytes
                )
        if self.has_memory:
            peak = module_peak(stored)
            self.peak_bytes = peak.peak_bytes
            for line in peak.lines:
                size = sum(buffer.bytes for buffer in line.buffers if buffer.kind == "value")
                lines[line.place or UNKNOWN] += ModuleFigures(temporary_bytes=size)
        return dict(lines)

    def place(self, kernel: Instruction, op: Instruction | None = None) -> Place:
        """Return the user's line of a kernel, or of an instruction in it."""
        return self._origins.of(kernel, op or kernel).place.user

    def bytes(self, kernel: Instruction) -> int:
        """Return the bytes that a kernel reads and writes in a call of the module."""
        return sum(part.work.bytes for part in self._work.parts(kernel)) * self.runs[kernel]

    def operations(self, kernel: Instruction) -> Counter[tuple[str, str, Place]]:
        """Return what a kernel computes: opcodes, types and lines."""
        return Counter(
            (op.opcode, str(op.shape), self.place(kernel, op))
            for op in self.module.inside(kernel)
            if op.opcode not in _PASSIVE
        )

    def _is_all(self, kernel: Instruction, opcode: str) -> bool:
        """Return True if a kernel only moves elements, by operations of one kind."""
        opcodes = {op.opcode.removesuffix("-start") for op in self.module.inside(kernel)}
        return opcode in opcodes and opcodes <= {opcode, *_PASSIVE}


# --- kernels --------------------------------------------------------------------------------------


def _kernel_changes(old: _Side, new: _Side) -> list[KernelChange]:
    """Return the kernels of two modules that differ, grouped by common operations."""
    sides = old, new
    computed = [{kernel: side.operations(kernel) for kernel in side.runs} for side in sides]
    left = _without_equal(*computed)
    graph = networkx.Graph()
    by_operation: defaultdict[object, tuple[list[Instruction], list[Instruction]]]
    by_operation = defaultdict(lambda: ([], []))
    for number, kernels in enumerate(left):
        graph.add_nodes_from(kernels)
        for kernel in kernels:
            for operation in computed[number][kernel]:
                by_operation[operation][number].append(kernel)
    for with_before, with_after in by_operation.values():
        # An operation of many kernels, such as the same one in each layer, says nothing.
        for pair in zip(with_before, with_after, strict=False):
            graph.add_edge(*pair)
    changes, order = [], {kernel: i for kernels in left for i, kernel in enumerate(kernels)}
    for component in networkx.connected_components(graph):
        kernels = sorted(component, key=order.__getitem__)
        parts = [[kernel for kernel in kernels if kernel in side.runs] for side in sides]
        changes.append(_kernel_change(sides, computed, parts))
    return sorted(changes, key=lambda c: -abs(c.bytes_after - c.bytes_before))


def _without_equal(
    before: Mapping[Instruction, Counter], after: Mapping[Instruction, Counter]
) -> tuple[list[Instruction], list[Instruction]]:
    """Return the kernels of each module that have no equal in the other."""
    equal: defaultdict[frozenset, list[Instruction]] = defaultdict(list)
    for kernel, operations in after.items():
        equal[_fingerprint(kernel, operations)].append(kernel)
    rest = []
    for kernel, operations in before.items():
        others = equal[_fingerprint(kernel, operations)]
        if others:
            others.pop(0)
        else:
            rest.append(kernel)
    return rest, [kernel for kernels in equal.values() for kernel in kernels]


def _fingerprint(kernel: Instruction, operations: Counter) -> frozenset:
    return frozenset((*operations.items(), kernel.opcode, str(kernel.shape)))


def _kernel_change(
    sides: tuple[_Side, _Side],
    computed: Sequence[Mapping[Instruction, Counter]],
    parts: Sequence[Sequence[Instruction]],
) -> KernelChange:
    sizes = [sum(map(side.bytes, kernels)) for side, kernels in zip(sides, parts, strict=True)]
    before, after = (
        tuple(f"{kernel.name}: {kernel_contents(side.module, kernel)}" for kernel in kernels)
        for side, kernels in zip(sides, parts, strict=True)
    )
    counts = [
        sum((operations[kernel] for kernel in kernels), Counter())
        for operations, kernels in zip(computed, parts, strict=True)
    ]
    side, kernels = next(pair for pair in zip(sides[::-1], parts[::-1], strict=True) if pair[1])
    largest = max(kernels, key=side.bytes)
    removed, added = (
        tuple(dict.fromkeys(opcode for opcode, *_ in only))
        for only in (counts[0] - counts[1], counts[1] - counts[0])
    )
    return KernelChange(before, after, side.place(largest), removed, added, *sizes)


# --- equality -------------------------------------------------------------------------------------


def _same_modules(before: HloModule, after: HloModule) -> bool:
    """Return True if two modules have the same instructions, whatever their names and lines."""
    keys: dict[object, int] = {}
    is_donated = before.donated == after.donated
    return is_donated and _key(before, keys) == _key(after, keys)


def _key(module: HloModule, keys: dict[object, int]) -> int:
    """Return a number that is equal for modules with the same instructions.

    Args:
        module: The module, which has its functions before those that call them.
        keys: The number of each function that was read, by its instructions.
    """
    numbers: dict[int, int] = {}
    for computation in module.computations.values():
        places = {op.id: place for place, op in enumerate(computation.instructions)}
        instructions = tuple(
            (
                tuple(places[number] for number in op.operands),
                tuple(numbers[number] for number in op.calls),
                tuple(sorted((n, tuple(v)) for n, v in op.fields.items() if n not in _NAMES)),
            )
            for op in computation.instructions
        )
        order = tuple(places[number] for number in module.schedule.get(computation.id, ()))
        key = instructions, order, places[computation.root.id]
        numbers[computation.id] = keys.setdefault(key, len(keys))
    return numbers[module.entry.id]
