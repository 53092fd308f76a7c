"""Compare two HLO modules by the user's lines: kernels, copies, bytes, FLOPs and memory.

    found = diff_modules(stored_module("old.hlo"), stored_module("new.hlo"))
    found.is_same, found.lines[0].place, found.lines[0].after.kernels

Modules are the same if their instructions are, whatever their names, numbers and lines. Otherwise
each line has the work of the kernels on it in both modules, and kernels are matched by the
operations that they compute (`kernels`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import networkx

from jaxprtool.commands.cost.modules import ModuleWork, PartOrigins, kernel_contents, kernel_runs
from jaxprtool.commands.memory.compiled import module_peak
from jaxprtool.formats.hlo import StoredModule
from jaxprtool.ir.documents import Printed, document
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.hlo.module import HloModule, Instruction
from jaxprtool.ir.hlo.partitions import KINDS
from jaxprtool.ir.places import UNKNOWN, Place

#: The fields of an instruction that differ between equal ones: names, numbers and metadata.
_NAMES = frozenset((1, 7, 26, 35, 36, 37, 38))


#: Instructions that do nothing in a kernel.
_PASSIVE = frozenset(
    ("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "broadcast")
)


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
    """

    place: Place
    before: ModuleFigures
    after: ModuleFigures


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
        lines: The lines whose figures differ, the largest difference first; what is XLA's own last.
        kernels: The kernels that differ, those with the largest difference of bytes first.
        has_memory: Whether both modules have a schedule, so that their memory is known.
    """

    names: tuple[str, str]
    is_same: bool
    before: ModuleFigures
    after: ModuleFigures
    lines: tuple[LineChange, ...]
    kernels: tuple[KernelChange, ...]
    has_memory: bool


def diff_modules(before: StoredModule, after: StoredModule) -> ModuleDiff:
    """Compare two modules by line and by kernel."""
    is_same = _same_modules(before.module, after.module)
    sides = _Side(before), _Side(after)
    old, new = (side.lines for side in sides)
    whole, new_whole = (
        sum(side.lines.values(), ModuleFigures(donated_bytes=side.donated_bytes)) for side in sides
    )
    changes = [
        LineChange(place, old.get(place, ModuleFigures()), new.get(place, ModuleFigures()))
        for place in dict.fromkeys([*old, *new])
    ]
    changed = [change for change in changes if change.before != change.after and not is_same]
    return ModuleDiff(
        (before.module.name, after.module.name),
        is_same,
        whole,
        new_whole,
        tuple(sorted(changed, key=_largest_first(whole, new_whole))),
        () if is_same else tuple(_kernel_changes(*sides)),
        all(side.has_memory for side in sides),
    )


def _largest_first(
    before: ModuleFigures, after: ModuleFigures
) -> Callable[[LineChange], tuple[bool, float]]:
    """Return a sort key for lines: by the largest difference, as a share of that of the modules."""
    most = tuple(map(max, before, after))

    def key(change: LineChange) -> tuple[bool, float]:
        pairs = zip(change.before, change.after, most, strict=True)
        shares = (abs(new - old) / max(whole, 1) for old, new, whole in pairs)
        return not change.place, -max(shares)

    return key


class _Side:
    """The kernels of a module, and its figures by line."""

    def __init__(self, stored: StoredModule) -> None:
        self.module = stored.module
        self.runs = kernel_runs(stored.module)
        self._work = ModuleWork(stored.module)
        self._origins = PartOrigins(stored.module, frames_now())
        self.has_memory = bool(stored.module.schedule)
        self.lines = self._figures(stored)

    @property
    def donated_bytes(self) -> int:
        """The bytes of donated arguments."""
        donated = set(self.module.donated.values())
        parameters = (op for op in self.module.entry.instructions if op.opcode == "parameter")
        return sum(op.shape.bytes for op in parameters if op.parameter_number in donated)

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
        for line in module_peak(stored).lines if self.has_memory else ():
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
    members = [set(kernels) for kernels in left]
    changes = []
    for component in networkx.connected_components(graph):
        parts = [
            [kernel for kernel in kernels if kernel in component & members[number]]
            for number, kernels in enumerate(left)
        ]
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
