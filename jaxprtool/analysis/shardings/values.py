"""The shardings of the arguments, the results and the large values of a program.

A value is large if it takes more than a hundredth of the memory on a device. Since XLA fuses most
values, a value counts only if the compiled module has an operation of its name, its lines and its
size on a device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Literal

from jaxprtool.analysis.shardings import LARGE, ShardedValue
from jaxprtool.analysis.shardings.sharded_module import Place, ShardedModule, own_frames
from jaxprtool.ir.hlo.device_tiles import DeviceTiles
from jaxprtool.ir.hlo.live_ranges import CALLS
from jaxprtool.ir.hlo.module import Computation, Instruction, Module, Shape

#: Operations that compute nothing: they pass values on, or return constants.
_NOT_MADE = frozenset(
    {"parameter", "tuple", "get-tuple-element", "constant", "bitcast", "iota", "broadcast"}
)


def found_values(
    whole: ShardedModule,
    final: Module,
    memory_bytes: int,
    reduced: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> tuple[ShardedValue, ...]:
    """Return the arguments, the results and the large values, the largest on a device first.

    Args:
        whole: The module before the partitioner.
        final: The module that runs.
        memory_bytes: The memory of the program on a device.
        reduced: The axes that the types of arguments and results name as reduced, by name. XLA
            does not know them.
    """
    given = (each for each in whole.module.entry.instructions if each.opcode == "parameter")
    named = ((each, whole.name(each)) for each in given)
    arguments = (
        _described(whole, each, name, "argument", whole.tiles(each), reduced.get(name, ()))
        for each, name in named
    )
    results = (
        _described(whole, made, name, "result", whole.result_tiles[name], reduced.get(name, ()))
        for name, made in whole.results.items()
    )
    returned = {whole.maker(each).id for each in whole.results.values()}
    found = [each for each in (*arguments, *results) if each is not None]
    found += _large(whole, final, memory_bytes, returned)
    return tuple(sorted(found, key=lambda each: -each.bytes_per_device * each.count))


def _large(
    whole: ShardedModule, final: Module, memory_bytes: int, returned: set[int]
) -> Iterator[ShardedValue]:
    """Yield the large values that are not arguments or results; equal ones of a line once."""
    made = set(_made(final, final.entry))
    counts, first = Counter[tuple[str, ...]](), dict[tuple[str, ...], ShardedValue]()
    for each in whole.module.instructions.values():
        if each.opcode in _NOT_MADE or each.id in returned or not _is_moved(whole, each):
            continue
        value = _described(whole, each, whole.name(each), "value", whole.tiles(each))
        if value is None or value.bytes_per_device <= memory_bytes * LARGE:
            continue
        local = str(_local(each.shape, value.tiles))
        if any((place, local) in made for place in whole.places(each)):
            key = value.name, value.type, value.spec
            first.setdefault(key, value)
            counts[key] += 1
    yield from (
        ShardedValue(**{**vars(value), "count": counts[key]}) for key, value in first.items()
    )


def _is_moved(whole: ShardedModule, instruction: Instruction) -> bool:
    """Return True unless an instruction is a copy with the sharding of its operand."""
    if instruction.opcode != "copy":
        return True
    before, after = whole.tiles(next(whole.operands(instruction))), whole.tiles(instruction)
    return before is None or after is None or not before.is_as(after)


def _made(module: Module, computation: Computation) -> Iterator[tuple[Place, str]]:
    """Yield the place and the type of each value that a compiled module computes.

    Values inside a fusion are left out: they are not written to memory.
    """
    for each in computation.instructions:
        if each.opcode not in _NOT_MADE:
            place = Place(each.path, own_frames(module, each))
            yield from ((place, str(shape)) for shape in each.shape.parts or (each.shape,))
        if each.opcode in CALLS:
            for number in each.calls:
                yield from _made(module, module.computations[number])


def _local(shape: Shape, tiles: DeviceTiles) -> Shape:
    """Return the shape on a device, with padding."""
    pairs = zip(shape.sizes, tiles.parts, strict=True)
    return Shape(shape.dtype, tuple(-(-size // parts) for size, parts in pairs))


def _described(
    whole: ShardedModule,
    instruction: Instruction,
    name: str,
    kind: Literal["argument", "result", "value"],
    tiles: DeviceTiles | None,
    reduced: Sequence[str] = (),
) -> ShardedValue | None:
    """Return a value; None if it is not an array, or is in the body of a `shard_map`."""
    if tiles is None or tiles.is_local:
        return None
    shape = instruction.shape
    local = _local(shape, tiles)
    return ShardedValue(
        name,
        kind,
        str(shape),
        shape.sizes,
        local.sizes,
        whole.text_of(tiles, reduced),
        whole.axes.unreduced(tiles),
        shape.bytes,
        local.bytes,
        tiles.copies,
        local.bytes * prod(tiles.parts) - shape.bytes,
        1,
        "" if kind == "argument" else whole.line(instruction),
        tiles,
    )
