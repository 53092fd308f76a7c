"""Find the operations of which each device computes more than its share.

The partitioner cannot split every operation: it gathers the operands of a grouped convolution or a
factorization, and each device computes all of it. Work is compared right before and after the
partitioner, where operations still have the same paths and lines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from jaxprtool.analysis.shardings import LARGE, RepeatedWork
from jaxprtool.analysis.shardings.sharded_module import MAPPED, ShardedModule
from jaxprtool.ir.hlo.device_tiles import device_tiles
from jaxprtool.ir.hlo.module import Instruction, Shape
from jaxprtool.ir.hlo.products import flops_of
from jaxprtool.ir.hlo.trip_counts import executed
from jaxprtool.ir.source.frames import BEHIND

#: Products, whose work is counted in FLOPs.
_PRODUCTS = frozenset({"dot", "convolution"})

#: Other operations that compute more than one operation for each element of their result.
_OTHERS = frozenset({
    "fft", "sort", "topk", "cholesky", "triangular-solve", "reduce-window", "select-and-scatter",
    "scatter", "gather", "custom-call",
})  # fmt: skip

#: The least number of times its share that counts: padding is not repeated work.
_LEAST = 1.5


@dataclass
class _Work:
    """The work of the operations with the same path and call stack.

    Attributes:
        original: The first of them, before the partitioner.
        whole: The work of all devices, each loop counted once.
        part: The work of each device, each loop counted once.
        flops: The FLOPs of products on each device in a call.
        elements: The elements of the results on each device in a call.
    """

    original: Instruction
    whole: int = 0
    part: int = 0
    flops: int = 0
    elements: int = 0


def repeated_work(
    whole: ShardedModule, parts: ShardedModule
) -> tuple[tuple[RepeatedWork, ...], float]:
    """Return the large operations of which each device computes more than its share.

    Args:
        whole: The module before the partitioner.
        parts: The module after it.

    Returns:
        The operations, those with most FLOPs first; and the part of the FLOPs of all products on a
        device that would be left if no device computed more than its share.
    """
    devices = whole.axes.devices
    works = _works(whole, parts)
    times = [each.part * devices / each.whole for each in works]
    flops = sum(each.flops for each in works)
    shares = sum(each.flops / max(n, 1.0) for each, n in zip(works, times, strict=True))
    most = max((each.elements for each in works), default=0)
    rows: dict[object, RepeatedWork] = {}
    for each, n in zip(works, times, strict=True):
        is_large = each.flops > flops * LARGE if each.flops else each.elements > most * LARGE
        if n < _LEAST or not is_large:
            continue
        line = whole.line(each.original).partition(BEHIND)[0]
        key = line, whole.name(each.original), round(n, 2)
        row = rows.get(key, RepeatedWork(*key, 0, 0, 0))
        rows[key] = replace(
            row,
            flops=row.flops + each.flops,
            elements=row.elements + each.elements,
            count=row.count + 1,
        )
    listed = sorted(rows.values(), key=lambda each: (-each.flops, -each.elements))
    return tuple(listed), shares / flops if flops else 1.0


def _works(whole: ShardedModule, parts: ShardedModule) -> list[_Work]:
    """Return the work of products and other large operations outside of `shard_map`."""
    found: dict[object, _Work] = {}
    local = set()
    for each, _ in executed(whole.module):
        if _amount(whole, each):
            key = each.opcode, each.path, whole.frames(each)
            found.setdefault(key, _Work(each)).whole += _amount(whole, each)
            tiles = device_tiles(each, whole.axes.devices)
            if any(array is not None and array.is_local for array in tiles):
                local.add(key)
    for each, count in executed(parts.module):
        key = each.opcode, each.path, parts.frames(each)
        if key in found and (amount := _amount(parts, each)):
            runs = 1 if count is None else count
            work = found[key]
            work.part += amount
            work.flops += sum(flops_of(parts.module, each).values()) * runs
            work.elements += _elements(each.shape) * runs
    return [work for key, work in found.items() if key not in local and work.part]


def _amount(module: ShardedModule, instruction: Instruction) -> int:
    """Return the work of an operation in FLOPs or elements; 0 if it is not a large one."""
    if instruction.opcode in _PRODUCTS:
        return sum(flops_of(module.module, instruction).values())
    target = instruction.custom_call_target
    if instruction.opcode not in _OTHERS or target in MAPPED or "callback" in target:
        return 0
    if instruction.opcode == "scatter":
        return _elements(list(module.operands(instruction))[-1].shape)
    return _elements(instruction.shape)


def _elements(shape: Shape) -> int:
    return sum(map(_elements, shape.parts)) if shape.parts else prod(shape.sizes)
