"""Count the Pallas kernels of a program: operations, copies and memory, and a bound of the time.

    report = kernels(program, "tpu-v5e")
    report.kernels[0].vmem_bytes, report.kernels[0].seconds

Nothing is compiled unless a backend is named. The figures of a call are those of
`commands.cost.kernels`, which `cost` uses too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.analysis.devices import DeviceSpec, device_named, device_of_kind
from jaxprtool.analysis.grids import BlockMemory, shared_bytes
from jaxprtool.commands.cost.kernels import KernelCost, kernel_cost
from jaxprtool.commands.cost.rules import Work, trip_count
from jaxprtool.commands.kernels.block_sizes import (
    MOST_SHOWN,
    CompiledKernel,
    KernelFit,
    block_choices,
    compiled_choices,
    compiled_kernel,
    tpu_devices,
)
from jaxprtool.errors import ArgumentsError
from jaxprtool.ir.documents import Number, Printed, document
from jaxprtool.ir.equations import type_of
from jaxprtool.ir.frames import Frames, frames_now
from jaxprtool.ir.kernel_calls import KernelCall, block_text, kernel_call
from jaxprtool.ir.program import Program, program_signature
from jaxprtool.ir.regions import regions, run_jaxprs
from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.jaxcompat import AnyJaxpr, Jaxpr, JaxprEqn


@document(optional=("most_fetches", "most_bytes"))
@dataclass(frozen=True)
class KernelPart:
    """A block of a kernel, or its scratch.

    Attributes:
        name: The name of its Ref.
        kind: "input", "output" or "scratch".
        text: The array, the block and its index map: `f32[128,128] in [64,64] at (i, k)`.
        buffers: The number of buffers: two if the block depends on the step of the grid.
        vmem_bytes: The bytes of all buffers in a TPU's vector memory, padded to tiles, at least.
        fetches: How often a call copies it between HBM and the core, at least.
        bytes: The bytes that a call copies, at least.
        most_fetches: How often at most; None if that is the same or unknown.
        most_bytes: The bytes at most; None if that is the same or unknown.
    """

    name: str
    kind: str
    text: str
    buffers: int
    vmem_bytes: Number
    fetches: Number
    bytes: Number
    most_fetches: Number | None = None
    most_bytes: Number | None = None


@document(
    flat=("work",),
    optional=(
        *("place", "seconds", "limit", "vmem_bytes", "vmem_limit", "fits", "fit", "compiled"),
        *("shared_bytes", "shared_limit"),
    ),
)
@dataclass(frozen=True)
class KernelRow:
    """A kernel of a program, with the figures of one call.

    Attributes:
        name: The name of the kernel.
        place: The user's line that calls it.
        grid: The sizes of the grid; None for one that is known at run time only.
        calls: How often the program calls it: once for each iteration of the loops around it, and
            for each equal kernel on the same line.
        per_round: Whether it, or a part of it, is in a loop whose trip count is unknown, and counts
            one iteration.
        work: Operations, at most, and the bytes that blocks are copied, at least.
        least_flops: FLOPs, at least.
        products: FLOPs of matrix products by precision, at most.
        vmem_bytes: The bytes of vector memory that blocks and scratch take on a TPU, at least; None
            on a GPU.
        parts: The blocks and the scratch.
        uncounted: What is not counted: the number of equations of each primitive, and "grid" if its
            steps are too many, or known at run time only. All figures are "at least" then.
        seconds: A lower bound of the time of a call on the device.
        limit: What limits it: "matrix unit", "vector unit" or "memory".
        vmem_limit: The vector memory that the kernel may use: the author's limit, or the device's.
        fits: False if the blocks and the scratch take this limit, or more: the compiler always
            needs some bytes besides. If they take less, it may still need more.
        fit: Other block sizes, if they were requested.
        compiled: What the compiler of a TPU says about it, if a backend was named.
        backend: The compiler that its parameters name: "tpu", "mosaic_gpu" or "triton"; "" if none.
        shared_bytes: The bytes of shared memory that it allocates on a GPU, at least; None if they
            are not known: those of a kernel for Triton are not.
        shared_limit: The shared memory that it may use on the device.
    """

    name: str
    place: Place
    grid: tuple[Number | None, ...]
    calls: Number
    per_round: bool
    work: Work
    least_flops: Number
    products: Mapping[str, Any]
    vmem_bytes: Number | None
    parts: tuple[KernelPart, ...]
    uncounted: Mapping[str, int]
    seconds: float | None = None
    limit: str = ""
    vmem_limit: int | None = None
    fits: bool | None = None
    fit: KernelFit | None = None
    compiled: CompiledKernel | None = None
    backend: str = ""
    shared_bytes: int | None = None
    shared_limit: int | None = None

    @property
    def is_at_least(self) -> bool:
        """True if its figures are lower bounds, because a part of it is not counted."""
        return bool(self.uncounted) or self.per_round


@document(optional=("place", "shared_limit"))
@dataclass(frozen=True)
class UncountedKernel:
    """A kernel of another primitive than `pallas_call`, such as `mpmd_map`. It is not counted.

    Attributes:
        primitive: The name of the primitive.
        place: The user's line that calls it.
        shared_bytes: The bytes of shared memory that it allocates on a GPU, at least.
        shared_limit: The shared memory that it may use on the device.
    """

    primitive: str
    place: Place
    shared_bytes: int
    shared_limit: int | None = None


@document(optional=("device",))
@dataclass(frozen=True)
class KernelReport(Printed):
    """The Pallas kernels of a program.

    Attributes:
        name: The name of the program.
        kernels: The kernels, in order.
        device: The name of the device of the bounds.
        steps: The first steps of each grid, if they were requested.
        uncounted: The number of equations of each other primitive that runs a kernel, such as
            `core_map`. They are not counted.
        others: These kernels.
    """

    name: str
    kernels: tuple[KernelRow, ...]
    device: str | None = None
    steps: tuple[GridTable, ...] = ()
    uncounted: Mapping[str, int] = field(default_factory=dict)
    others: tuple[UncountedKernel, ...] = ()

    @property
    def vmem_bytes(self) -> int:
        """The vector memory of the kernel that takes most; 0 if there are none."""
        return max((row.vmem_bytes or 0 for row in self.kernels), default=0)

    @property
    def hbm_bytes(self) -> Number:
        """The bytes that all calls copy between HBM and the cores, at least."""
        return sum(row.work.bytes * row.calls for row in self.kernels)


@dataclass(frozen=True)
class GridStep:
    """A step of a kernel's grid.

    Attributes:
        position: The index along each axis.
        indices: The index of each block, by its index map; None if it is that of the step before.
            An index along a dimension is None if it depends on data.
    """

    position: tuple[int, ...]
    indices: tuple[tuple[int | None, ...] | None, ...]


@dataclass(frozen=True)
class GridTable:
    """The blocks of the first steps of a kernel's grid.

    Attributes:
        name: The name of the kernel.
        axes: The names of the axes of the grid.
        blocks: The names of the blocks.
        steps: The steps.
    """

    name: str
    axes: tuple[str, ...]
    blocks: tuple[str, ...]
    steps: tuple[GridStep, ...]


def kernels(
    program: Program | AnyJaxpr,
    device: str | None = None,
    steps: int = 0,
    *,
    fit: bool = False,
    backend: str | None = None,
) -> KernelReport:
    """Count the Pallas kernels of a program.

    Args:
        program: A `Program`, or a jaxpr.
        device: The device of the bounds: "tpu-v5e", or a file of figures, as for `cost --device`.
            By default that of `backend`, if it is a TPU.
        steps: How many of the first steps of each grid to list.
        fit: Whether to list other block sizes, for a TPU.
        backend: Where to compile each kernel alone, and the best of the other block sizes: a TPU,
            which this machine may lack, with the package libtpu: `tpu:v5e:2x2`.

    Returns:
        A row for each kernel. Equal kernels that a line calls are one row.

    Raises:
        ArgumentsError: If no device has the name; or if other block sizes are requested, and the
            device is no TPU.
        BackendError: If there is no such backend.
    """
    on, devices = modeled_device(device, backend, fit)
    about = program_signature(program)
    frames = frames_now(about.roots)
    rows: dict[Any, KernelRow] = {}
    tables: dict[Any, GridTable] = {}
    others = tuple(
        _other(path, frames, on)
        for path in _paths(about.jaxpr)
        if jaxcompat.kernel_axes(path[-1].params) and kernel_call(path[-1]) is None
    )
    uncounted = Counter(other.primitive for other in others)
    for call in _calls(about.jaxpr):
        cost = kernel_cost(call.path[-1], None if on is None else on.vmem is not None)
        if cost is None:
            continue
        row = _row(cost, frames.line_of(call.path), call, on)
        key = row.place, row.name, row.grid, row.parts
        if key in rows:
            calls, per_round = rows[key].calls + row.calls, rows[key].per_round or row.per_round
            rows[key] = replace(rows[key], calls=calls, per_round=per_round)
            continue
        if fit and on is not None:
            row = replace(row, fit=block_choices(cost, on, frames, call.path))
        rows[key] = _compiled(row, cost, devices) if devices else row
        if steps:
            tables.setdefault(key, _grid_table(cost, steps))
    name = None if on is None else on.name
    shown = tuple(rows.values()), name, tuple(tables.values())
    return KernelReport(about.name, *shown, uncounted, others)


def modeled_device(
    device: str | None, backend: str | None, fit: bool
) -> tuple[DeviceSpec | None, Sequence[Any]]:
    """Return the device of the bounds, and the devices to compile for; see `kernels`."""
    devices = () if backend is None else tpu_devices(backend)
    kind = device_of_kind(devices[0].device_kind) if devices else None
    on = kind if device is None else device_named(device)
    if fit and (on is None or on.vmem is None):
        raise ArgumentsError(
            "other block sizes are found for a TPU, whose vector memory they must fit in",
            "name one: --device tpu-v5e",
        )
    return on, devices


class _CalledKernel(NamedTuple):
    """A kernel in a program.

    Attributes:
        path: The equations around it, the outermost first, and its own.
        calls: How often it is called.
        per_round: Whether that counts one iteration of a loop whose trip count is unknown.
    """

    path: tuple[JaxprEqn, ...]
    calls: Any
    per_round: bool


def _calls(
    jaxpr: Jaxpr, path: tuple[JaxprEqn, ...] = (), calls: Any = 1, per_round: bool = False
) -> Iterator[_CalledKernel]:
    for eqn in jaxpr.eqns:
        here = (*path, eqn)
        if eqn.primitive.name == "pallas_call":
            yield _CalledKernel(here, calls, per_round)
        elif (control := regions(eqn)) is not None:
            trips = trip_count(control)
            inside = calls * (1 if trips is None else trips), per_round or trips is None
            for body in control.jaxprs:
                yield from _calls(body, here, *inside)
        else:
            for _, inner in run_jaxprs(eqn):
                yield from _calls(jaxcompat.open_jaxpr(inner), here, calls, per_round)


def _paths(jaxpr: Jaxpr, path: tuple[JaxprEqn, ...] = ()) -> Iterator[tuple[JaxprEqn, ...]]:
    """Yield each equation outside of kernels, with the equations around it."""
    for eqn in jaxpr.eqns:
        here = (*path, eqn)
        yield here
        if not jaxcompat.kernel_axes(eqn.params):
            for _, inner in run_jaxprs(eqn):
                yield from _paths(jaxcompat.open_jaxpr(inner), here)


def _other(path: Sequence[JaxprEqn], frames: Frames, device: DeviceSpec | None) -> UncountedKernel:
    """Return a kernel that is not counted; its arguments may be scratch."""
    bodies = [jaxcompat.open_jaxpr(inner) for _, inner in run_jaxprs(path[-1])]
    shared = max((shared_bytes(body, body.invars) for body in bodies), default=0)
    limit = None if device is None else device.shared
    return UncountedKernel(path[-1].primitive.name, frames.line_of(path), shared, limit)


def _row(
    cost: KernelCost, place: Place, call: _CalledKernel, device: DeviceSpec | None
) -> KernelRow:
    kernel = cost.kernel
    (read, _), (written, _) = cost.traffic("input"), cost.traffic("output")
    row = KernelRow(
        name=kernel.name,
        place=place or UNKNOWN,
        grid=tuple(axis.size for axis in kernel.grid),
        calls=call.calls,
        per_round=call.per_round or any(e.runs.per_round for e, *_ in cost.equations),
        work=cost.most._replace(bytes_read=read, bytes_written=written),
        least_flops=cost.least.flops,
        products=cost.products,
        vmem_bytes=cost.vmem_bytes if cost.grid.in_order else None,
        parts=tuple(_part(kernel, part) for part in cost.grid.parts),
        uncounted=cost.uncounted,
        backend=kernel.backend or "",
    )
    if kernel.backend == "mosaic_gpu":
        scratch = [part.ref for part in kernel.scratch]
        shared = shared_bytes(jaxcompat.open_jaxpr(kernel.body), scratch)
        row = replace(
            row, shared_bytes=shared, shared_limit=None if device is None else device.shared
        )
    return row if device is None else _bounded(row, cost, device)


def _compiled(row: KernelRow, cost: KernelCost, devices: Sequence[Any]) -> KernelRow:
    """Return a row with what the compiler says about the kernel, and about other block sizes."""
    fit = None if row.fit is None else compiled_choices(row.fit, cost, devices, MOST_SHOWN)
    return replace(row, fit=fit, compiled=compiled_kernel(cost.kernel.eqn, devices))


def _bounded(row: KernelRow, cost: KernelCost, device: DeviceSpec) -> KernelRow:
    bound = cost.bound(device)
    row = replace(row, seconds=bound.seconds, limit=bound.limit)
    limit = cost.kernel.vmem_limit_bytes or device.kernel_vmem
    if row.vmem_bytes is None or limit is None:
        return row
    return replace(row, vmem_limit=limit, fits=row.vmem_bytes < limit)


def _part(kernel: KernelCall, part: BlockMemory) -> KernelPart:
    if part.steps is None:
        array = next(s for s in kernel.scratch if s.name == part.name)
        text = f"{type_of(array.array)} in {array.memory_space}"
        return KernelPart(part.name, part.kind, text, part.buffers, part.bytes, 0, 0)
    text = block_text(part.steps.block, kernel.index_names)
    (fetches, most), (size, most_size) = part.steps.fetches, part.steps.bytes
    return KernelPart(
        part.name,
        part.kind,
        text,
        part.buffers,
        part.bytes,
        fetches,
        size,
        None if most == fetches else most,
        None if most_size == size else most_size,
    )


def _grid_table(cost: KernelCost, count: int) -> GridTable:
    grid, blocks = cost.grid, cost.kernel.blocks
    steps = tuple(
        GridStep(
            tuple(int(grid.axis(i)[step]) for i in range(len(cost.kernel.grid))),
            tuple(_index(grid.block(block).indices, step) for block in blocks),
        )
        for step in range(min(count, grid.count or 0))
    )
    names = tuple(axis.name for axis in cost.kernel.grid)
    return GridTable(cost.kernel.name, names, tuple(block.name for block in blocks), steps)


def _index(indices: Sequence[np.ndarray | None], step: int) -> tuple[int | None, ...] | None:
    """Return the index of a block in a step; None if it is that of the step before."""
    known = all(index is not None for index in indices)
    if step and known and all(i[step] == i[step - 1] for i in indices if i is not None):
        return None
    return tuple(None if index is None else int(index[step]) for index in indices)
