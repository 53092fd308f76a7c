"""Count the cost of an HLO module: what its kernels compute, read and write, by the user's lines.

    module_cost(module).total.work.flops
    module_cost(module, by="kernel").groups[0]

A kernel is an instruction that runs on its own: a fusion, a product, a copy. It reads its operands
from memory and writes its results there, once in each iteration of the loops around it. Operations
are counted as XLA's `HloCostAnalysis` counts them (xla/service/hlo_cost_analysis.cc), except that
loops run as often as their trip count says, and slices read and write only their own elements. An
operation on complex numbers is several real ones, a sort takes the logarithm of the length that it
sorts, an FFT 5 n log2(n), a solve n^2, and a ragged product multiplies each row once. Conversions
and the sums of collectives are no FLOPs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple, get_args

from jaxprtool.analysis.devices import bytes_sent
from jaxprtool.commands.cost.bodies import CostTally, Tallies, either_branch, together
from jaxprtool.commands.cost.estimate import Cost, Group, added_tallies, group_of, prefixes
from jaxprtool.commands.cost.rules import NOTHING, Work, binary_logarithm, multiplied_pairs, total
from jaxprtool.ir.backends import cached_method
from jaxprtool.ir.frames import Frames, Line, frames_now
from jaxprtool.ir.hlo.buffers import BufferAssignment
from jaxprtool.ir.hlo.module import (
    CALLS,
    NO_KERNEL,
    Computation,
    HloModule,
    HloShape,
    Instruction,
    Message,
    integer,
    integers,
    kernel_contents,
    submessage,
    submessages,
    while_trip_count,
)
from jaxprtool.ir.hlo.origins import OperationOrigin, OperationOrigins, inserted_copies
from jaxprtool.ir.hlo.partitions import KINDS, device_groups, result_shape
from jaxprtool.ir.process import without_collector
from jaxprtool.ir.source_text import Place

#: The criteria by which the cost of a module is grouped.
ModuleBy = Literal["line", "scope", "primitive", "dtype", "kernel"]

MODULE_BY: tuple[ModuleBy, ...] = get_args(ModuleBy)

#: One transcendental for each element.
_TRANSCENDENTAL = frozenset(
    (
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atan2",
        "atanh",
        "cbrt",
        "cosh",
        "cosine",
        "erf",
        "exponential",
        "exponential-minus-one",
        "log",
        "log-plus-one",
        "logistic",
        "power",
        "rsqrt",
        "sine",
        "sinh",
        "sqrt",
        "tan",
        "tanh",
    )
)

#: One operation for each element.
_ARITHMETIC = frozenset(
    (
        "abs",
        "add",
        "and",
        "ceil",
        "clamp",
        "compare",
        "complex",
        "count-leading-zeros",
        "divide",
        "floor",
        "imag",
        "is-finite",
        "maximum",
        "minimum",
        "multiply",
        "negate",
        "not",
        "or",
        "popcnt",
        "real",
        "reduce-precision",
        "remainder",
        "round-nearest-afz",
        "round-nearest-even",
        "select",
        "shift-left",
        "shift-right-arithmetic",
        "shift-right-logical",
        "sign",
        "stochastic-convert",
        "subtract",
        "xor",
    )
)

#: Products of matrices, and convolutions.
_PRODUCTS = frozenset(("convolution", "dot", "ragged-dot", "scaled-dot"))

#: Instructions that read a part of their first operand, as large as their result.
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))


class ModulePart(NamedTuple):
    """What an instruction of a kernel computes, reads from memory or writes to it.

    Attributes:
        op: The instruction: the kernel itself, or one in its fusion.
        work: Its work.
        product: The dtype of a matrix product or a convolution; "" for others.
    """

    op: Instruction
    work: Work
    product: str = ""


@dataclass(frozen=True)
class ModuleWork:
    """The work of the kernels of a module.

    Attributes:
        module: The module.
        unknown: The number of kernels whose operations are not known, by what they call.
    """

    module: HloModule
    unknown: Counter[str] = field(default_factory=Counter)

    @cached_method
    def parts(self, kernel: Instruction) -> tuple[ModulePart, ...]:
        """Return the parts of a kernel, for one run of it."""
        if kernel.opcode == "custom-call":
            self.unknown[kernel.custom_call_target] += 1
        inside = self.module.inside(kernel)
        parts = [
            ModulePart(op, self.arithmetic(op).times(runs), self._product(op))
            for op, runs in inside.items()
        ]
        fused = self._fused(kernel)
        if fused is None:
            parts.append(ModulePart(kernel, self._moved(kernel)))
        else:
            parts += self._read_by(kernel, fused)
            parts += self._written_by(kernel, fused)
        return tuple(part for part in parts if part.work is not NOTHING)

    def _product(self, op: Instruction) -> str:
        if op.opcode not in _PRODUCTS:
            return ""
        dtype = self.module.instructions[op.operands[0]].shape.dtype
        return {"c64": "f32", "c128": "f64"}.get(dtype, dtype)

    def _fused(self, kernel: Instruction) -> Computation | None:
        is_fusion = kernel.opcode == "fusion"
        return self.module.computations[kernel.calls[0]] if is_fusion else None

    # --- operations

    def arithmetic(self, op: Instruction) -> Work:
        """Return the operations of an instruction, without those of kernels in it."""
        elements = _elements(op.shape)
        if op.opcode in _TRANSCENDENTAL:
            return Work(transcendentals=elements)
        if op.opcode in _ARITHMETIC:
            return Work(flops=elements * _weight(op))
        if op.opcode in _PRODUCTS:
            return Work(flops=self._multiply_adds(op) * _of_product(op))
        if op.opcode in ("cholesky", "triangular-solve"):
            flops = elements * self._operand(op).sizes[-1] * _of_product(op) // 2
            return Work(flops=flops // 3 if op.opcode == "cholesky" else flops)
        if op.opcode in ("reduce", "reduce-window", "map", "scatter", "select-and-scatter"):
            return self._applied(op).times(self._times_applied(op))
        if op.opcode == "sort":
            sizes = self._operand(op).sizes
            (dimension,) = integers(op.fields, 14) or (0,)
            length = sizes[dimension] if sizes else 1
            return Work(flops=prod(sizes) * binary_logarithm(length))
        if op.opcode == "fft":
            return Work(flops=self._fourier(op))
        if op.opcode in ("rng", "rng-bit-generator"):
            return Work(random_numbers=elements)
        if (kind := op.opcode.removesuffix("-start")) in KINDS:
            groups = device_groups(op, self.module.devices)
            size = len(groups[0]) if groups else self.module.devices
            sent = bytes_sent(kind, result_shape(op).bytes, size)
            return Work(bytes_communicated=round(sent or 0))
        return NOTHING

    def _multiply_adds(self, op: Instruction) -> int:
        left, right = (self._operand(op, position) for position in range(2))
        if op.opcode != "convolution":
            ragged = submessage(op.fields, 90)
            numbers = submessage(ragged, 1) or submessage(op.fields, 30)
            contracted = integers(numbers, 1)
            # A row is multiplied by the matrix of its group alone, or summed in its group.
            sums_groups = not {*contracted}.isdisjoint(integers(ragged, 2))
            groups = self._operand(op, 2).sizes[-1] if sums_groups else 1
            return prod(op.shape.sizes) // groups * prod(left.sizes[i] for i in contracted)
        numbers = submessage(op.fields, 16)
        kernel_features = right.sizes[integer(numbers, 3)]
        batch, features = (op.shape.sizes[integer(numbers, number)] for number in (9, 10))
        pairs = batch * features * kernel_features
        windows = submessages(submessage(op.fields, 15), 1)
        spatial = (integers(numbers, number) for number in (11, 6, 12))
        for window, i, j, k in zip(windows, *spatial, strict=True):
            stride, low, spread, dilation = (integer(window, n, 1 - (n == 3)) for n in (2, 3, 5, 6))
            sizes = left.sizes[i], right.sizes[j], op.shape.sizes[k]
            pairs *= multiplied_pairs(*sizes, stride, low, dilation, spread)
        return pairs

    def _fourier(self, op: Instruction) -> int:
        """Count 5 n log2(n) operations for n complex elements, and half of that for real ones."""
        lengths = integers(op.fields, 32)
        shape = self._operand(op)
        number = prod(shape.sizes[: -len(lengths)]) * prod(lengths)
        is_complex = shape.dtype.startswith("c") and op.shape.dtype.startswith("c")
        return number * sum(map(binary_logarithm, lengths)) * 5 // (1 if is_complex else 2)

    def _applied(self, op: Instruction) -> Work:
        """Return the operations of the function that an instruction applies to elements."""
        body = self.module.computations[op.calls[-1]]
        inside = (ops for op in body.instructions for ops in self.module.inside(op).items())
        return total([NOTHING, *(self.arithmetic(op).times(runs) for op, runs in inside)])

    def _times_applied(self, op: Instruction) -> int:
        results = _elements(op.shape) // max(len(op.shape.parts), 1)
        if op.opcode == "map":
            return results
        if op.opcode == "scatter":
            return _elements(self._operand(op, len(op.operands) - 1))
        if op.opcode == "reduce":
            return max(_elements(self._operand(op)) - results, 0)
        windows = submessages(submessage(op.fields, 15), 1)
        if op.opcode == "reduce-window":
            shape = op.shape.parts[0] if op.shape.parts else op.shape
            return _window_pairs(windows, shape.sizes)
        window = prod(integer(d, 1) for d in windows)
        return _elements(self._operand(op, 1)) * window

    def _operand(self, op: Instruction, position: int = 0) -> HloShape:
        return self.module.instructions[op.operands[position]].shape

    # --- memory

    def _moved(self, op: Instruction) -> Work:
        """Return the bytes that an instruction outside of fusions reads and writes."""
        if op.opcode.endswith(("-done", "-update")):
            return NOTHING
        sizes = [_in_memory(self._operand(op, i)) for i in range(len(op.operands))]
        if op.opcode == "dynamic-update-slice":
            return Work(bytes_read=sizes[1], bytes_written=sizes[1])
        if op.opcode == "scatter":  # arrays, indices, and as many updates
            count = len(sizes) // 2
            return Work(bytes_read=sum(sizes[count:]), bytes_written=sum(sizes[count + 1 :]))
        shape = result_shape(op) if op.opcode.endswith("-start") and op.shape.parts else op.shape
        if op.opcode in _SLICES:
            sizes[0] = min(sizes[0], shape.bytes)
        return Work(bytes_read=sum(sizes), bytes_written=_in_memory(shape))

    def _read_by(self, kernel: Instruction, fused: Computation) -> Iterator[ModulePart]:
        """Yield what a fusion reads, with the first instruction in it that reads each operand."""
        readers = _readers(fused)
        for op in fused.instructions:
            if op.opcode != "parameter":
                continue
            uses = list(_uses(op, readers))
            if not uses:
                continue
            whole = _in_memory(self._operand(kernel, op.parameter_number))
            parts = [self._part_read(op, use, passed, whole) for passed, use in uses]
            read = min(sum(parts), whole)
            if read:
                yield ModulePart(uses[0][1], Work(bytes_read=read))

    def _part_read(self, op: Instruction, use: Instruction, passed: int, whole: int) -> int:
        """Return the bytes of a parameter that an instruction reads, which may be a part of it."""
        if passed == use.operands[0]:
            if use.opcode in _SLICES:
                return use.shape.bytes
            if use.opcode == "dynamic-update-slice":
                return 0  # the other elements stay where they are
        return whole

    def _written_by(self, kernel: Instruction, fused: Computation) -> Iterator[ModulePart]:
        for op, place in self._outputs(fused.root, kernel.shape):
            made = self._passed(op)
            update = made.opcode == "dynamic-update-slice"
            size = self._operand(made, 1).bytes if update else place.bytes
            if not place.space:
                yield ModulePart(made, Work(bytes_written=size))

    def _outputs(
        self, root: Instruction, shape: HloShape
    ) -> Iterator[tuple[Instruction, HloShape]]:
        """Yield the arrays that a fusion writes, with the instruction that computes each."""
        if root.opcode != "tuple":
            yield from ((root, leaf) for leaf in _leaves(shape))
            return
        for number, part in zip(root.operands, shape.parts, strict=True):
            yield from self._outputs(self.module.instructions[number], part)

    def _passed(self, op: Instruction) -> Instruction:
        """Return the instruction whose result bitcasts pass on."""
        while op.opcode == "bitcast":
            op = self.module.instructions[op.operands[0]]
        return op


def _window_pairs(windows: Sequence[Message], sizes: Sequence[int]) -> int:
    """Return how often a reduction of windows applies its function, given the result's sizes.

    A window that is centered on each element and reaches all others is a reduction whose result is
    broadcast, as XLA writes it for TPUs: it is computed once for all elements.
    """
    results = elements = 1
    for window, size in zip(windows, sizes, strict=True):
        around = [integer(window, number) for number in range(1, 5)]
        reaches_all = around == [2 * size - 1, 1, size - 1, size - 1]
        elements *= size if reaches_all else integer(window, 1)
        results *= 1 if reaches_all else size
    return results * (elements - 1)


def _readers(computation: Computation) -> dict[int, list[Instruction]]:
    readers: defaultdict[int, list[Instruction]] = defaultdict(list)
    for op in computation.instructions:
        for number in dict.fromkeys(op.operands):
            readers[number].append(op)
    return readers


def _uses(
    op: Instruction, readers: dict[int, list[Instruction]]
) -> Iterator[tuple[int, Instruction]]:
    """Yield the instructions that read a value, also through bitcasts, and what they read."""
    for reader in readers.get(op.id, ()):
        if reader.opcode == "bitcast":
            yield from _uses(reader, readers)
        else:
            yield op.id, reader


def _elements(shape: HloShape) -> int:
    return sum(map(_elements, shape.parts)) if shape.parts else prod(shape.sizes)


def _leaves(shape: HloShape) -> Iterator[HloShape]:
    if not shape.parts:
        yield shape
    for part in shape.parts:
        yield from _leaves(part)


def _in_memory(shape: HloShape) -> int:
    """Return the bytes of a value in the main memory: none on the chip, as in a TPU's VMEM."""
    return sum(leaf.bytes for leaf in _leaves(shape) if not leaf.space)


def _weight(op: Instruction) -> int:
    """Return the real operations of one on complex numbers."""
    if not op.shape.dtype.startswith("c"):
        return 1
    return {"multiply": 6, "divide": 6, "add": 2, "subtract": 2}.get(op.opcode, 1)


def _of_product(op: Instruction) -> int:
    return 8 if op.shape.dtype.startswith("c") else 2


# --- groups ---------------------------------------------------------------------------------------


@without_collector()
def module_cost(
    module: HloModule, by: ModuleBy = "line", assignment: BufferAssignment | None = None
) -> Cost:
    """Count the cost of a module, in total and by groups of what its kernels compute.

    Args:
        module: The module, before or after XLA's optimizations.
        by: The criterion of the groups: the user's "line", the "scope" that modules open, the
            "primitive", the "dtype" of a result, or the "kernel" that runs.
        assignment: The memory of the module; None to derive it from its schedule.

    Returns:
        The cost on one device. A loop with an unknown trip count is counted once.
    """
    work = ModuleWork(module)
    whole = _ModuleSums(work, lambda kernel, op: "")[module.entry].get("", CostTally())
    groups = tuple(_groups(by, work, PartOrigins(module, frames_now())))
    sent = _ModuleSums(work, lambda kernel, op: _collective(op))[module.entry]
    return Cost(
        module.name,
        by,
        group_of(whole),
        None,
        tuple(sorted(groups, key=_order)),
        tuple(sorted((group_of(sent[kind], kind) for kind in sent if kind), key=_order)),
        dict(work.unknown),
        copies=inserted_copies(module, assignment, frames_now()),
    )


def _order(group: Group) -> tuple[object, ...]:
    work = group.work
    return -work.flops - work.transcendentals, -work.bytes, group.name


def _collective(op: Instruction) -> str:
    kind = op.opcode.removesuffix("-start")
    return kind if kind in KINDS else ""


class _ModuleSums:
    """The work of the computations of a module by group, for one run of each."""

    def __init__(self, work: ModuleWork, key: Callable[[Instruction, Instruction], object]) -> None:
        self._work, self._key = work, key

    @cached_method
    def __getitem__(self, computation: Computation) -> Tallies:
        sums: Tallies = {}
        items: defaultdict[object, list[tuple[Work, str]]] = defaultdict(list)
        for op in computation.instructions:
            if op.opcode in CALLS:
                sums = together([sums, self._inside(op)])
            elif op.opcode == "async-start":
                sums = together([sums, self[self._module.computations[op.calls[0]]]])
            elif op.opcode not in NO_KERNEL and op.opcode not in ("async-update", "async-done"):
                for part in self._work.parts(op):
                    items[self._key(op, part.op)].append((part.work, part.product))
        for key, listed in items.items():
            sums.setdefault(key, CostTally()).add_items(listed)
        return sums

    @property
    def _module(self) -> HloModule:
        return self._work.module

    def _inside(self, op: Instruction) -> Tallies:
        bodies = [self[self._module.computations[number]] for number in op.calls]
        if op.opcode == "conditional":
            return either_branch(bodies)
        sums = together(bodies)
        if op.opcode == "call":
            return sums
        trips = while_trip_count(self._module, op)
        if trips is not None:
            return {key: tally.times(trips) for key, tally in sums.items()}
        for tally in sums.values():
            tally.per_round = True
        return sums


def kernel_runs(module: HloModule) -> dict[Instruction, int]:
    """Return how often each kernel of a module runs in a call of it.

    A loop with an unknown trip count counts as one iteration, and a branch as if it were taken.
    """
    runs, times = {}, Counter({module.entry.id: 1})
    # A module has its functions before those that call them.
    for computation in reversed(module.computations.values()):
        count = times[computation.id]
        for op in computation.instructions if count else ():
            if op.opcode in CALLS:
                trips = while_trip_count(module, op) if op.opcode == "while" else 1
                for number in op.calls:
                    times[number] += count * (1 if trips is None else trips)
            elif op.opcode not in NO_KERNEL and not op.opcode.endswith(("-update", "-done")):
                runs[op] = count
    return runs


class PartOrigins:
    """Where the parts of the kernels of a module come from.

    Args:
        module: The module.
        frames: Reads frames, and decides which files are the user's.
    """

    def __init__(self, module: HloModule, frames: Frames) -> None:
        self._origins = OperationOrigins(module, frames, frozenset(module.by_name))
        #: The places of each line, which differ in the lines of libraries behind it.
        self.places: defaultdict[Line | None, dict[Place, None]] = defaultdict(dict)

    @cached_method
    def of(self, kernel: Instruction, op: Instruction) -> OperationOrigin:
        """Return where a part comes from; if it has no line, where most of its kernel does."""
        origin = self._origins.origin(op)
        if origin.line is None:
            origin, _ = max(self._origins.of(kernel.name), key=lambda part: part[1])
        self.places[origin.line][origin.place] = None
        return origin

    def place(self, line: Line | None) -> Place:
        """Return the place of a line, and of the library that it calls if there is only one."""
        place, *others = self.places[line]
        return place.user if others else place


def _groups(by: ModuleBy, work: ModuleWork, origins: PartOrigins) -> Iterator[Group]:
    module = work.module

    def sums(key: Callable[[Instruction, Instruction], Any]) -> Iterable[tuple[Any, CostTally]]:
        return _ModuleSums(work, key)[module.entry].items()

    if by == "line":
        for line, tally in sums(lambda kernel, op: origins.of(kernel, op).line):
            place = origins.place(line)
            yield group_of(tally, str(place.user), line=line, place=place)
    elif by == "scope":
        paths = sums(lambda kernel, op: origins.of(kernel, op).scope)
        for path, tally in added_tallies(prefixes(paths)).items():
            yield group_of(tally, "/".join(path), path=path)
    elif by == "kernel":
        for name, tally in sums(lambda kernel, op: kernel.name):
            yield group_of(tally, f"{name}: {kernel_contents(module, module.by_name[name])}")
    elif by == "dtype":
        for name, tally in sums(lambda kernel, op: op.shape.dtype):
            yield group_of(tally, name)
    else:
        for name, tally in sums(lambda kernel, op: origins.of(kernel, op).primitive):
            yield group_of(tally, name)
