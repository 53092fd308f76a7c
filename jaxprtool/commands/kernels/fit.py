"""Other block sizes of a kernel, with their figures, and what the compiler of a TPU says.

    fit = block_choices(cost, device, frames, path)
    fit.choices[0].sizes, fit.choices[0].vmem_bytes  # (1024, 1024), 12582912

All sizes for which the kernel computes the same (`block_sizes`) have figures of the same model as
the kernel itself. They are ranked by the lower bound of the time, then by the bytes that are
copied, then by the number of steps. The model is no promise: it counts neither the time that a step
takes to start, nor the VMEM that the compiler needs besides the blocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.analysis.devices import DeviceSpec
from jaxprtool.commands.cost.kernels import KernelCost, kernel_cost
from jaxprtool.commands.kernels.block_sizes import BlockAxis, BlockSizes
from jaxprtool.errors import ArgumentsError, JaxprToolError
from jaxprtool.ir.documents import Number, document
from jaxprtool.ir.equations import variables
from jaxprtool.ir.kernel_calls import kernel_call
from jaxprtool.ir.places import Place
from jaxprtool.ir.program import Program

if TYPE_CHECKING:
    from jaxprtool.ir.frames import Frames
    from jaxprtool.jaxcompat import JaxprEqn

#: The maximum number of combinations of sizes that have figures.
MOST_TRIED = 512

#: The number of them that are shown, and compiled.
MOST_SHOWN = 5


@document(optional=("fits", "bytes", "message"))
@dataclass(frozen=True)
class CompiledKernel:
    """What the compiler of a TPU says about a kernel.

    Attributes:
        fits: Whether the kernel fits; None if it was not compiled for another reason.
        bytes: The vector memory that it has assigned, if it says.
        message: The error, if it was not compiled.
    """

    fits: bool | None
    bytes: int | None = None
    message: str | None = None


@dataclass(frozen=True)
class FitAxis:
    """An axis along which a kernel may have other block sizes.

    Attributes:
        name: The name of the axis of the grid.
        is_new: Whether the grid does not have it yet, so that blocks are whole along it.
        size: The size of the blocks along it.
        extent: The size of the arrays along it.
        sums: Whether the kernel sums along it, so that another size changes the rounding.
        dimensions: The dimensions of blocks that it moves: `x_ref axis 0`.
    """

    name: str
    is_new: bool
    size: int
    extent: int
    sums: bool
    dimensions: tuple[str, ...]


@document(optional=("place",))
@dataclass(frozen=True)
class FixedSize:
    """An axis of the grid along which the block size is not changed, and why.

    Attributes:
        name: The name of the axis; "" for all of them.
        reason: What fixes the size.
        place: The line that does it, if one does.
    """

    name: str
    reason: str
    place: Place | None = None


@document(optional=("compiled",))
@dataclass(frozen=True)
class BlockChoice:
    """Block sizes of a kernel, with the figures of a call.

    Attributes:
        sizes: The size of blocks along each axis.
        grid: The sizes of the grid, with new axes first.
        seconds: A lower bound of the time of a call.
        limit: What limits it.
        bytes: The bytes that a call copies between HBM and the core, at least.
        vmem_bytes: The bytes of all blocks and the scratch in vector memory, at least.
        fits: Whether these are less than the limit.
        compiled: What the compiler says, if it was asked.
    """

    sizes: tuple[int, ...]
    grid: tuple[int, ...]
    seconds: float
    limit: str
    bytes: Number
    vmem_bytes: int
    fits: bool
    compiled: CompiledKernel | None = None


@dataclass(frozen=True)
class KernelFit:
    """Other block sizes of a kernel.

    Attributes:
        axes: The axes along which they may differ.
        fixed: The axes of the grid along which they may not.
        tried: The number of combinations that have figures.
        now: The sizes that the kernel has.
        choices: The combinations that fit, the best first.
    """

    axes: tuple[FitAxis, ...]
    fixed: tuple[FixedSize, ...]
    tried: int
    now: BlockChoice
    choices: tuple[BlockChoice, ...]


def block_choices(
    cost: KernelCost, device: DeviceSpec, frames: Frames, path: Sequence[JaxprEqn]
) -> KernelFit:
    """Return other block sizes of a kernel for a TPU, the best first.

    Args:
        cost: The cost of the kernel.
        device: A device with vector memory.
        frames: The lines of the program.
        path: The equations around the kernel, and its own.
    """
    sizes = BlockSizes(cost.grid)
    fixed = [
        FixedSize(f.name, f.reason.text, frames.line_of((*path, *f.reason.path)))
        if f.reason.path
        else FixedSize(f.name, f.reason.text)
        for f in sizes.fixed
    ]
    now = _choice(tuple(axis.size for axis in sizes.axes), cost, device)
    tried = [
        choice
        for chosen in _combinations(sizes)
        if (choice := _figures(sizes, chosen, device)) is not None
    ]
    ranked = sorted((c for c in tried if c.fits), key=_rank)
    axes = tuple(_fit_axis(sizes, axis) for axis in sizes.axes)
    return KernelFit(axes, tuple(fixed), len(tried), now, tuple(ranked))


def _rank(choice: BlockChoice) -> tuple[Any, ...]:
    return choice.seconds, choice.bytes, math.prod(choice.grid), choice.vmem_bytes


def _fit_axis(sizes: BlockSizes, axis: BlockAxis) -> FitAxis:
    names = tuple(f"{sizes.kernel.blocks[i].name} axis {d}" for i, d in axis.places)
    is_new = axis.grid_axis is None
    return FitAxis(axis.name, is_new, axis.size, axis.extent, axis.sums, names)


def _combinations(sizes: BlockSizes) -> Iterator[tuple[int, ...]]:
    """Yield the sizes along each axis, other than those of the kernel.

    If there are too many, every second of the most choices is left out, but not the largest.
    """
    choices = [axis.choices for axis in sizes.axes]
    while math.prod(map(len, choices)) > MOST_TRIED:
        longest = max(range(len(choices)), key=lambda i: len(choices[i]))
        choices[longest] = choices[longest][::-2][::-1]
    now = tuple(axis.size for axis in sizes.axes)
    yield from (chosen for chosen in product(*choices) if choices and chosen != now)


def _figures(sizes: BlockSizes, chosen: Sequence[int], device: DeviceSpec) -> BlockChoice | None:
    """Return the figures of the kernel with other sizes; None if it would not be the same."""
    inner_of_sum = [axis.grid_axis for axis in sizes.axes if axis.sums]
    for axis, size in zip(sizes.axes, chosen, strict=True):
        is_inner = any(a is not None and (axis.grid_axis or 0) > a for a in inner_of_sum)
        if is_inner and axis.extent != size:
            return None
    cost = kernel_cost(sizes.resized(dict(enumerate(chosen))), in_order=True)
    return None if cost is None else _choice(tuple(chosen), cost, device)


def _choice(sizes: tuple[int, ...], cost: KernelCost, device: DeviceSpec) -> BlockChoice:
    bound = cost.bound(device)
    copied = cost.traffic("input")[0] + cost.traffic("output")[0]
    grid = tuple(axis.size for axis in cost.kernel.grid)
    limit = cost.kernel.vmem_limit_bytes or device.kernel_vmem
    vmem = cost.vmem_bytes
    fits = limit is None or vmem < limit  # the compiler always needs some bytes more
    return BlockChoice(sizes, grid, bound.seconds, bound.limit, copied, vmem, fits)


# --- compiling ------------------------------------------------------------------------------------

#: The vector memory that the compiler has assigned to a kernel.
_ASSIGNED = re.compile(
    r'custom_call_target="tpu_custom_call".*'
    r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"\}'
)


def compiled_choices(
    fit: KernelFit, cost: KernelCost, devices: Sequence[jax.Device], most: int
) -> KernelFit:
    """Compile a kernel, and the first of the other block sizes, for a TPU.

    Args:
        fit: The block sizes.
        cost: The cost of the kernel.
        devices: A description of the TPU.
        most: How many of the choices to compile.
    """
    sizes = BlockSizes(cost.grid)
    eqns = [sizes.resized(dict(enumerate(choice.sizes))) for choice in fit.choices[:most]]
    compiled = [compiled_kernel(eqn, devices) for eqn in eqns]
    choices = [
        replace(choice, compiled=result)
        for choice, result in zip(fit.choices[:most], compiled, strict=True)
    ]
    return replace(fit, choices=(*choices, *fit.choices[most:]))


def tpu_devices(backend: str) -> Sequence[jax.Device]:
    """Return the devices of a TPU by the name of the backend: `tpu:v5e:2x2`.

    Raises:
        BackendError: If there is no such backend.
        ArgumentsError: If it is no TPU.
    """
    from jaxprtool.execute.running.backends import devices_to_compile_for

    if backend.partition(":")[0].lower() != "tpu":
        raise ArgumentsError(
            f"'{backend}' is no TPU: kernels are compiled for TPUs only",
            "name a TPU, which this machine may lack: --backend tpu:v5e:2x2",
        )
    return devices_to_compile_for(backend)


def compiled_kernel(eqn: JaxprEqn, devices: Sequence[jax.Device]) -> CompiledKernel:
    """Compile a kernel alone for a TPU, and return what its compiler says."""
    from jaxprtool.formats.lowering import compiled

    try:
        text = compiled(alone(eqn), (), devices[0], devices[:1]).as_text()
    except JaxprToolError as error:
        cause = error.__cause__ or error
        message = "\n".join(line.rstrip() for line in str(cause).strip().splitlines())
        is_large = "RESOURCE_EXHAUSTED" in message
        return CompiledKernel(False if is_large else None, message=message)
    found = _ASSIGNED.search(text)
    return CompiledKernel(True, int(found[1]) if found else None)


def alone(eqn: JaxprEqn) -> Program:
    """Return the program of a kernel alone, which is compiled and not interpreted."""
    kernel = kernel_call(eqn)
    assert kernel is not None
    eqn = eqn.replace(params={**eqn.params, "interpret": False})
    invars = [*dict.fromkeys(variables(eqn.invars))]
    debug = jaxcompat.DebugInfo(kernel.name, kernel.name, None, None)
    jaxpr = jaxcompat.new_jaxpr((), (), invars, eqn.outvars, [eqn], debug)
    avals = [v.aval for v in invars], [v.aval for v in eqn.outvars]
    trees = jax.tree.structure((tuple(avals[0]), {})), jax.tree.structure(tuple(avals[1]))
    names = tuple(f"x{i}" for i in range(len(avals[0])))
    results = tuple(f"y{i}" for i in range(len(avals[1])))
    return Program(kernel.name, jaxpr, *trees, names, results)
