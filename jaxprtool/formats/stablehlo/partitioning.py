"""Rules for meshes: shardings, computations by device, and the collectives in them.

A manual computation becomes a `shard_map` over a mesh without devices. StableHLO numbers devices,
and `lax` names the axes of the mesh: groups of devices become the axes along which they lie.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.mlir.dialects import sdy as sdy_dialect
from jax.extend.mlir.dialects import stablehlo as stablehlo_dialect
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxprtool.formats.stablehlo.operations import also, binary
from jaxprtool.formats.stablehlo.reader import (
    Lazy,
    ModuleReader,
    Operation,
    Splat,
    forced,
    ir,
    lazy,
    stablehlo_rules,
)
from jaxprtool.formats.stablehlo.structure import operations_in
from jaxprtool.ir.rules import rule

#: The bindings of the dialects, which have no types.
sdy: Any = sdy_dialect
stablehlo: Any = stablehlo_dialect

# --- shardings ------------------------------------------------------------------------------------


@rule(stablehlo_rules, "sdy.sharding_constraint", "sdy.reshard")
@lazy
def _(op: Operation, x: Any) -> Any:
    return _constrained(op, op.attributes.pop("sharding"), x)


def _constrained(op: Operation, attribute: Any, x: Any) -> Any:
    sharding = named_sharding(op, attribute)
    if sharding is None or all(part is PartitionSpec.UNCONSTRAINED for part in sharding.spec):
        return x
    return lax.with_sharding_constraint(forced(x), sharding)


@rule(
    stablehlo_rules, "sdy.all_gather", "sdy.all_slice", "sdy.all_to_all", "sdy.collective_permute"
)
@lazy
def _(op: Operation, x: Any) -> Any:
    """Return the operand with another sharding: what Shardy inserts changes no value."""
    sharding = op.attributes["out_sharding"]
    op.attributes.clear()
    return _constrained(op, sharding, x)


@rule(stablehlo_rules, "sdy.named_computation")
@lazy
def _(op: Operation, *operands: Any) -> Any:
    op.attributes.pop("name")
    ins, outs = (op.attributes.pop(f"{key}_shardings", None) for key in ("in", "out"))
    results = op.body()(*(operands if ins is None else _all_constrained(op, ins, operands)))
    return results if outs is None else _all_constrained(op, outs, results)


@rule(stablehlo_rules, "sdy.sharding_per_value")
def _all_constrained(op: Operation, attribute: Any, values: Sequence[Any]) -> list[Any]:
    """Return values with the shardings that an attribute of an operation says they have."""
    shardings = sdy.TensorShardingPerValueAttr(attribute).shardings
    return [_constrained(op, sharding, x) for sharding, x in zip(shardings, values, strict=True)]


@rule(stablehlo_rules, "sdy.sharding")
def named_sharding(op: Operation, attribute: Any) -> NamedSharding | None:
    """Return a sharding of Shardy as JAX's; None on a mesh without axes."""
    read = sdy.TensorShardingAttr(attribute)
    mesh = _mesh(op, read)
    if mesh is None:
        return None
    entries = []
    for dimension in read.dimension_shardings:
        names = _axes(op, dimension)
        is_closed = sdy.DimensionShardingAttr(dimension).is_closed
        entries.append(names or (None if is_closed else PartitionSpec.UNCONSTRAINED))
    around = jax.sharding.get_abstract_mesh()
    return NamedSharding(mesh if around.empty else around, PartitionSpec(*entries))


def _mesh(op: Operation, sharding: Any) -> AbstractMesh | None:
    """Return the mesh of a sharding of Shardy; None if it has no axes."""
    if [*sharding.unreduced_axes]:
        raise op.refused("a sharding whose sums are open")
    return _mesh_named(op, str(sharding.mesh_or_ref))


def _mesh_named(op: Operation, name: str) -> AbstractMesh | None:
    """Return a mesh, "@mesh" or as it is, without devices; None if it has no axes."""
    if name.startswith("@"):
        read = sdy.MeshAttr(op.reader.symbols[name[1:].strip('"')].attributes["mesh"])
    elif name.startswith("#sdy.mesh"):
        read = sdy.MeshAttr(ir.Attribute.parse(name))
    else:
        raise op.refused(f"a mesh without a name, {name}")
    if [*read.device_ids]:
        raise op.refused(f"the mesh {name} orders its devices itself")
    axes = [sdy.MeshAxisAttr(axis) for axis in read.axes]
    if not axes:
        return None
    sizes, names = tuple(axis.size for axis in axes), tuple(axis.name for axis in axes)
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def _axes(op: Operation, dimension: Any) -> tuple[str, ...]:
    """Return the axes of the mesh along which a dimension is divided."""
    names = [sdy.AxisRefAttr(axis) for axis in sdy.DimensionShardingAttr(dimension).axes]
    if any(axis.sub_axis_info is not None for axis in names):
        raise op.refused("it splits an axis of the mesh")
    return tuple(axis.name for axis in names)


# --- manual computations --------------------------------------------------------------------------


@rule(stablehlo_rules, "sdy.manual_computation")
def _(op: Operation, *operands: Any) -> Any:
    ins, outs = (
        [sdy.TensorShardingAttr(x) for x in sdy.TensorShardingPerValueAttr(attribute).shardings]
        for attribute in map(op.attributes.pop, ("in_shardings", "out_shardings"))
    )
    manual = frozenset(re.findall(r'"([^"]*)"', str(op.attributes.pop("manual_axes"))))
    body = op.body()
    if not manual or not outs:
        return body(*operands)
    mesh = _mesh(op, (ins + outs)[0])
    around = jax.sharding.get_abstract_mesh()
    computed = jax.shard_map(
        lambda *shards: tuple(map(forced, body(*shards))),
        mesh=mesh if around.empty else None,
        in_specs=tuple(_manual_spec(op, sharding, manual) for sharding in ins),
        out_specs=tuple(_manual_spec(op, sharding, manual) for sharding in outs),
        axis_names=manual,
        check_vma=False,
    )
    return computed(*operands)


def _manual_spec(op: Operation, sharding: Any, manual: frozenset[str]) -> PartitionSpec:
    """Return the manual axes of a sharding; the partitioner chooses how the others are used."""
    dimensions = (_axes(op, dimension) for dimension in sharding.dimension_shardings)
    return PartitionSpec(*(tuple(name for name in names if name in manual) for names in dimensions))


# --- manual computations of the older partitioner -------------------------------------------------
# A module for the partitioner before Shardy has no meshes. Calls convert arrays to the parts of
# each device, and back; between them JAX calls a function of the parts. Its mesh is the coarsest
# whose axes divide the devices as the shardings of operands and results do.


class _Part(Lazy):
    """The part of an array that each device has.

    Attributes:
        whole: The array.
        sharding: Its sharding, as text, if it is an operand; empty for a result.
    """

    def __init__(self, op: Operation, shape: Sequence[int], whole: Any, sharding: str = ""):
        super().__init__(shape, self._refuse)
        self._op, self.whole, self.sharding = op, whole, sharding

    def _refuse(self) -> Any:
        raise self._op.refused("the parts of devices are read other than by one function")


@rule(stablehlo_rules, "@Sharding")
@lazy
def _(op: Operation, x: Any) -> Any:
    """Return the operand: an annotation, which has no mesh."""
    op.attributes.clear()
    return x


@rule(stablehlo_rules, "@SPMDFullToShardShape")
def _(op: Operation, x: Any) -> Any:
    if _sharding_text(op.op) != "{manual}":
        raise op.refused("some axes are left to the partitioner")
    source = op.op.operands[0].owner
    text = _sharding_text(getattr(source, "operation", source))
    op.attributes.clear()
    return _Part(op, op.result_type.shape, x, text or "{replicated}")


@rule(stablehlo_rules, "@SPMDShardToFullShape")
@lazy
def _(op: Operation, x: Any) -> Any:
    op.attributes.clear()
    return x.whole if isinstance(x, _Part) else _Part(op, x.shape, None).force()


@rule(stablehlo_rules, "@annotate_device_placement")
def _(op: Operation, *operands: Any) -> Any:
    raise op.refused("it is for one of several memories")


@also("func.call")
def _(op: Operation, *operands: Any) -> Any:
    """Return the results of a function of the parts of devices, as a `shard_map`."""
    outs = [_text_of_whole(result) for result in op.op.results]
    texts = [text for text in outs if text is not None]
    if not any(isinstance(x, _Part) for x in operands) or len(texts) < len(outs):
        return None
    name, kinds = op.take("callee"), op.result_types
    parts = [x if isinstance(x, _Part) else _Part(op, (), x, "{replicated}") for x in operands]
    shardings = [_OldSharding(op, text) for text in (*(x.sharding for x in parts), *texts)]
    mesh, specs = _mesh_of(op, shardings)
    wholes = jax.shard_map(
        lambda *shards: tuple(op.reader.call(name, shards)),
        mesh=mesh,
        in_specs=tuple(specs[: len(parts)]),
        out_specs=tuple(specs[len(parts) :]),
        check_vma=False,
    )(*(forced(x.whole) for x in parts))
    return [_Part(op, kind.shape, x) for kind, x in zip(kinds, wholes, strict=True)]


def _sharding_text(op: Any) -> str:
    attributes = getattr(op, "attributes", {})
    return attributes["mhlo.sharding"].value if "mhlo.sharding" in attributes else ""


def _text_of_whole(part: Any) -> str | None:
    """Return the sharding of the array whose parts a value is; None if it is read otherwise."""
    users = [getattr(use.owner, "operation", use.owner) for use in part.uses]
    if len(users) != 1 or users[0].name != "stablehlo.custom_call":
        return None
    match users[0].attributes["call_target_name"].value:
        case "Sharding":
            return _text_of_whole(users[0].results[0])
        case "SPMDShardToFullShape":
            return _sharding_text(users[0])
    return None


class _OldSharding:
    """A sharding as text: `{devices=[1,2,4]<=[4,2]T(1,0) last_tile_dim_replicate}`.

    Attributes:
        tiles: The number of parts along each dimension, and of copies at last.
        axes: The size and the stride of each axis of the devices, in the order of the tiles.
        has_copies: Whether the last tile is of copies.
    """

    _FORM = re.compile(
        r"\{devices=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?( last_tile_dim_replicate)?\}"
    )

    def __init__(self, op: Operation, text: str) -> None:
        self.tiles: list[int] = []
        self.axes: list[tuple[int, int]] = []
        self.has_copies = False
        if text == "{replicated}":
            return
        match = self._FORM.fullmatch(text)
        if match is None:
            raise op.refused(f"sharding {text}")
        tiles, sizes, order = (
            [int(number) for number in group.split(",")] if group else None
            for group in match.groups()[:3]
        )
        assert tiles is not None and sizes is not None
        strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        places = order or range(len(sizes))
        self.tiles, self.has_copies = tiles, match[4] is not None
        self.axes = [(sizes[i], strides[i]) for i in places]

    def dimensions(self) -> list[list[tuple[int, int]]] | None:
        """Return the size and the stride of the axes of each tile; None if they do not fit."""
        rest, tiles = [*self.axes], []
        for tile in self.tiles:
            parts = []
            while tile > 1:
                size, stride = rest.pop(0)
                if tile % size and size % tile:
                    return None
                used = min(tile, size)
                parts.append((used, stride * (size // used)))
                if used < size:
                    rest.insert(0, (size // used, stride))
                tile //= used
            tiles.append(parts)
        return tiles[:-1] if self.has_copies else tiles


def _mesh_of(
    op: Operation, shardings: Sequence[_OldSharding]
) -> tuple[AbstractMesh, list[PartitionSpec]]:
    """Return a mesh for some shardings, and each of them on it."""
    attributes = op.reader.module.operation.attributes
    count = attributes["mhlo.num_partitions"].value if "mhlo.num_partitions" in attributes else 1
    dimensions = [sharding.dimensions() for sharding in shardings]
    cuts = {1, count}
    for tiles in dimensions:
        for size, stride in (part for tile in tiles or () for part in tile):
            cuts |= {stride, stride * size}
    strides = sorted(cuts, reverse=True)
    pairs = [*pairwise(strides)]
    if None in dimensions or any(large % small for large, small in pairs):
        raise op.refused("its shardings divide the devices in ways that no mesh does")
    names = {small: f"axis{i}" for i, (_, small) in enumerate(pairs)}
    sizes = tuple(large // small for large, small in pairs)
    mesh = AbstractMesh(sizes, tuple(names.values()), axis_types=(AxisType.Auto,) * len(sizes))
    specs = [
        PartitionSpec(
            *(
                tuple(
                    names[small]
                    for size, stride in tile
                    for large, small in pairs
                    if stride <= small and large <= stride * size
                )
                for tile in tiles
            )
        )
        for tiles in dimensions
        if tiles is not None
    ]
    return mesh, specs


# --- devices --------------------------------------------------------------------------------------
# A module may be the program of one device: of a replica, as `jax.pmap` made it, or of a partition,
# as the partitioner leaves it. Then it has collectives, and no shardings. StableHLO numbers all
# devices: those of the first replica, by partition, come first.


@dataclass(frozen=True)
class ReplicasAndPartitions:
    """The devices that each run the function `main`.

    Attributes:
        replicas: The number of replicas.
        partitions: The number of partitions of each.
    """

    replicas: int
    partitions: int

    @property
    def count(self) -> int:
        """The number of devices."""
        return self.replicas * self.partitions

    def mapped(self, function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """Return a function of what all devices have, stacked along a new first axis."""
        sizes = {"replicas": self.replicas, "partitions": self.partitions}
        used = {name: size for name, size in sizes.items() if size > 1}
        mesh = AbstractMesh(
            tuple(used.values()), tuple(used), axis_types=(AxisType.Auto,) * len(used)
        )
        spec = PartitionSpec(tuple(used))

        def of_device(*parts: Any) -> tuple[Any, ...]:
            results = function(*(lax.squeeze(part, [0]) for part in parts))
            return tuple(lax.expand_dims(result, [0]) for result in results)

        def of_all(*stacked: Any) -> list[Any]:
            mapping = {"mesh": mesh, "in_specs": spec, "out_specs": spec, "check_vma": False}
            return list(jax.shard_map(of_device, **mapping)(*stacked))

        return of_all


#: Collectives that reduce or gather in groups of replicas and all partitions, or of any devices.
_OF_GROUPS = ("stablehlo.all_gather", "stablehlo.all_reduce", "stablehlo.reduce_scatter")

_COLLECTIVES = (
    *_OF_GROUPS,
    "stablehlo.all_to_all",
    "stablehlo.collective_broadcast",
    "stablehlo.collective_permute",
)


_NUMBERS = ("stablehlo.partition_id", "stablehlo.replica_id")


@rule(stablehlo_rules, "builtin.module")
def devices_of_module(reader: ModuleReader) -> ReplicasAndPartitions | None:
    """Return the devices of a module that is the program of one of several; None for others.

    If the module does not say how many there are, they are those in the groups of its collectives.

    Raises:
        UnsupportedError: If a collective combines what several partitions have, of unknown number.
    """
    if not reader.has_any((*_COLLECTIVES, *_NUMBERS)):
        return None
    attributes = reader.module.operation.attributes
    names = {"replicas": "mhlo.num_replicas", "partitions": "mhlo.num_partitions"}
    said = {key: attributes[name].value for key, name in names.items() if name in attributes}
    collectives = reader.operations_named(*_COLLECTIVES)
    numbers = reader.operations_named(*_NUMBERS)
    if not (collectives or (numbers and said)) or _has_meshes(reader):
        return None
    counts = {"replicas": 1, "partitions": 1} | (said or _counted(reader, collectives))
    devices = ReplicasAndPartitions(**counts)
    return devices if devices.count > 1 else None


def _has_meshes(reader: ModuleReader) -> bool:
    """Return True if shardings, or manual computations, divide the values of a module."""
    calls = reader.operations_named("stablehlo.custom_call")
    targets = {call.attributes["call_target_name"].value for call in calls}
    has_manual = bool(reader.operations_named("sdy.manual_computation"))
    return (
        has_manual
        or "SPMDFullToShardShape" in targets
        or "sdy.sharding" in str(reader.main.attributes)
    )


def _counted(reader: ModuleReader, collectives: Sequence[Any]) -> dict[str, int]:
    """Return the numbers of devices that the groups of collectives need, which have all of them."""
    counts: dict[str, int] = {}
    for op in collectives:
        kind = _strategy(op)
        if kind == "replica and partition":
            raise reader.refused(op, "the module does not say how many partitions it is for")
        if op.name.removeprefix("stablehlo.") in ("collective_broadcast", "collective_permute"):
            continue
        groups = reader.value_of(op.attributes["replica_groups"])
        if isinstance(groups, np.ndarray):  # not axes of a mesh
            counts[kind] = max(counts.get(kind, 1), groups.max(initial=0) + 1)
    replicas = int(counts.get("replica", 1))
    partitions = max(counts.get("partition", 1), -(-counts.get("flattened", 1) // replicas))
    return {"replicas": replicas, "partitions": int(partitions)}


def _strategy(op: Any) -> str:
    """Return what the numbers in the groups of a collective are, as StableHLO defines it."""
    attributes = op.attributes
    is_global = "use_global_device_ids" in attributes
    channel = 0
    if "channel_handle" in attributes:
        channel = stablehlo.ChannelHandle(attributes["channel_handle"]).handle
    if channel <= 0:
        return "replica"
    if op.name not in _OF_GROUPS:
        return "partition"
    return "flattened" if is_global else "replica and partition"


def _of_all_devices(op: Operation, groups: np.ndarray) -> np.ndarray:
    """Return groups of numbers of devices for those in a collective, of replicas or partitions."""
    around, total = op.reader.devices, _Devices(op).numbers.size
    replicas = 1 if around is None else around.replicas
    partitions, kind = total // replicas, _strategy(op.op)
    if not groups.size:
        count = {"replica": replicas, "partition": partitions, "flattened": total}
        groups = np.arange(count.get(kind, replicas))[None]
    match kind:
        case "replica":
            made = [groups * partitions + i for i in range(partitions)]
        case "partition":
            made = [groups + i * partitions for i in range(replicas)]
        case "flattened":
            made = [groups]
        case _:
            made = [np.concatenate([groups * partitions + i for i in range(partitions)], 1)]
    result = np.concatenate(made)
    if result.size and result.max() >= total:
        raise op.refused(f"it is for more than the {total} devices of its mesh")
    return result


class _Devices:
    """The mesh on which an operation runs, and the numbers of its devices.

    Attributes:
        names: The names of its axes of more than one device.
        numbers: The number of the device at each place of these axes.
    """

    def __init__(self, op: Operation) -> None:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise op.refused("it is not in a computation over a mesh")
        sizes = {name: size for name, size in mesh.shape.items() if size > 1}
        self.names = tuple(sizes)
        self.numbers = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        self._op, self._manual = op, {*mesh.manual_axes}

    def size(self, name: str) -> int:
        """Return the number of devices along an axis."""
        return self.numbers.shape[self.names.index(name)]

    def along(self, axes: Sequence[str]) -> np.ndarray:
        """Return the devices along some axes, in this order, in a row for each place elsewhere."""
        positions = [self.names.index(name) for name in axes]
        rest = [i for i in range(len(self.names)) if i not in positions]
        count = math.prod(self.numbers.shape[i] for i in positions)
        return np.transpose(self.numbers, (*rest, *positions)).reshape(-1, count)

    def choices(self, choose: Any = permutations) -> Iterator[tuple[str, ...]]:
        """Yield all choices of axes in all orders, the fewest and those in order first."""
        for count in range(len(self.names) + 1):
            yield from choose(self.names, count)

    def manual(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return these axes, if they are not left to the partitioner."""
        if others := [name for name in axes if name not in self._manual]:
            raise self._op.refused(f"axes that are left to the partitioner: {', '.join(others)}")
        return tuple(axes)

    def groups(self, groups: np.ndarray) -> tuple[tuple[str, ...], list[list[int]] | None]:
        """Return the axes along which groups of devices lie.

        If they are not all devices along some axes, the groups follow that each row of devices
        along these axes has, as `lax` takes them: of places in the row.
        """
        wanted = {tuple(map(int, group)) for group in groups}
        for axes in self.choices():
            if {tuple(map(int, row)) for row in self.along(axes)} == wanted:
                return self.manual(axes), None
        for axes in self.choices():
            rows = [
                [[list(row).index(i) for i in group] for group in wanted if {*group} <= {*row}]
                for row in map(np.ndarray.tolist, self.along(axes))
            ]
            first = sorted(rows[0])
            if all(sorted(row) == first for row in rows) and sum(map(len, first)) == len(
                self.along(axes)[0]
            ):
                return self.manual(axes), first
        raise self._op.refused("groups of devices that do not lie along axes of the mesh")

    def pairs(self, pairs: np.ndarray) -> tuple[tuple[str, ...], list[tuple[int, int]]]:
        """Return the axes along which data moves, with pairs of places on them."""
        wanted = {(int(source), int(target)) for source, target in pairs}
        for axes in self.choices(combinations):
            rows = self.along(axes).tolist()
            places = [
                {
                    (row.index(source), row.index(target))
                    for source, target in wanted
                    if source in row and target in row
                }
                for row in rows
            ]
            is_whole = len(places[0]) * len(rows) == len(wanted)
            if axes and is_whole and all(row == places[0] for row in places):
                return self.manual(axes), sorted(places[0])
        raise self._op.refused("pairs of devices that do not lie along axes of the mesh")


def _groups(op: Operation) -> tuple[tuple[str, ...], list[list[int]] | None]:
    """Return the axes of a collective of groups of partitions, and groups in them or None."""
    for name in ("channel_handle", "use_global_device_ids"):
        op.attributes.pop(name, None)
    groups, devices = op.take("replica_groups"), _Devices(op)
    if isinstance(groups, np.ndarray):
        if (groups < 0).any():
            raise op.refused("groups of different sizes")
        return devices.groups(_of_all_devices(op, groups))
    if _strategy(op.op) == "replica":
        raise op.refused("it is over replicas")
    read = stablehlo.ReplicaGroupMeshAxesAttr(groups)
    mesh = _mesh_named(op, str(read.mesh))
    axes = [stablehlo.AxisRefAttr(axis) for axis in read.axes]
    if mesh is None or mesh.shape != jax.sharding.get_abstract_mesh().shape:
        raise op.refused("its mesh is another one than that of the computation")
    if any(axis.sub_axis_info is not None for axis in axes):
        raise op.refused("it splits an axis of the mesh")
    names = [axis.name for axis in axes]
    return devices.manual([name for name in names if name in devices.names]), None


# --- collectives ----------------------------------------------------------------------------------


@rule(stablehlo_rules, "stablehlo.all_reduce")
def _(op: Operation, *operands: Any) -> Any:
    axes, groups = _groups(op)
    combine = _combiner(op.block())
    if not axes:
        return operands
    if combine in _REDUCTIONS and not any(x.dtype == np.bool_ for x in operands):
        return [_REDUCTIONS[combine](x, axes, axis_index_groups=groups) for x in operands]
    if combine is None:
        raise op.refused("it reduces by an operation that is not commutative")
    gathered = [lax.all_gather(x, axes, axis_index_groups=groups) for x in operands]
    return [_reduced(combine, x) for x in gathered]


_REDUCTIONS: dict[Any, Callable[..., Any]] = {
    lax.add: lax.psum,
    lax.max: lax.pmax,
    lax.min: lax.pmin,
}

_REDUCERS: dict[Any, Callable[..., Any]] = {
    lax.add: lax.reduce_sum,
    lax.max: lax.reduce_or,  # of booleans
    lax.min: lax.reduce_and,
    lax.mul: lax.reduce_prod,
    lax.bitwise_and: lax.reduce_and,
    lax.bitwise_or: lax.reduce_or,
    lax.bitwise_xor: lax.reduce_xor,
}


def _reduced(combine: Any, gathered: Any) -> Any:
    return _REDUCERS[combine](gathered, axes=(0,))


def _combiner(block: Any) -> Any | None:
    """Return the function by which a collective reduces; None if `lax` has none.

    The partitioner's annotations of its scalars say nothing.
    """
    match [step for step in operations_in(block) if step.name != "sdy.sharding_constraint"]:
        case [op, _] if {*op.operands} == {*block.arguments}:
            combine = binary(op.name, block.arguments[0].type.element_type)
            return combine if combine in _REDUCERS else None
    return None


@rule(stablehlo_rules, "stablehlo.all_gather")
def _(op: Operation, *operands: Any) -> Any:
    axes, groups = _groups(op)
    dimension = op.take("all_gather_dim")
    if not axes:
        return operands
    options = {"axis": dimension, "axis_index_groups": groups, "tiled": True}
    return [lax.all_gather(x, axes, **options) for x in operands]


@rule(stablehlo_rules, "stablehlo.reduce_scatter")
def _(op: Operation, x: Any) -> Any:
    axes, groups = _groups(op)
    dimension, combine = op.take("scatter_dimension"), _combiner(op.block())
    if not axes:
        return x
    if combine is not lax.add or x.dtype == np.bool_:
        raise op.refused("it reduces by another operation than a sum")
    options = {"scatter_dimension": dimension, "axis_index_groups": groups, "tiled": True}
    return lax.psum_scatter(x, axes, **options)


@rule(stablehlo_rules, "stablehlo.all_to_all")
def _(op: Operation, *operands: Any) -> Any:
    axes, groups = _groups(op)
    split, concat = op.take("split_dimension"), op.take("concat_dimension")
    op.attributes.pop("split_count", None)  # the size of the groups
    if not axes:
        return operands
    options = {"axis_index_groups": groups, "tiled": True}
    return [lax.all_to_all(x, axes, split, concat, **options) for x in operands]


@rule(stablehlo_rules, "stablehlo.collective_permute")
def _(op: Operation, *operands: Any) -> Any:
    op.attributes.pop("channel_handle", None)
    pairs = np.asarray(op.take("source_target_pairs")).reshape(-1, 2)
    axes, places = _Devices(op).pairs(_of_all_devices(op, pairs))
    return [lax.ppermute(x, axes, places) for x in operands]


@rule(stablehlo_rules, "stablehlo.collective_broadcast")
def _(op: Operation, x: Any) -> Any:
    """Return the operand of the first device of each group."""
    axes, groups = _groups(op)
    if not axes:
        return x
    gathered = lax.all_gather(x, axes, axis_index_groups=groups)
    return lax.index_in_dim(gathered, 0, keepdims=False)


# --- numbers of devices ---------------------------------------------------------------------------


class DeviceNumber(Lazy):
    """The number of a partition, divided by a step, and modulo a count: an index on the mesh."""

    def __init__(self, op: Operation, step: int = 1, count: int | None = None) -> None:
        super().__init__((), lambda: self.index(np.uint32))
        self._op, self.step, self.count = op, step, count

    def index(self, dtype: Any) -> Any:
        """Return it as an index along axes of the mesh."""
        devices, around = _Devices(self._op), self._op.reader.devices
        total = devices.numbers.size // (1 if around is None else around.replicas)
        count = self.count or total // self.step
        sizes = devices.numbers.shape
        steps = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        axes = [
            name
            for name, step in zip(devices.names, steps, strict=True)
            if self.step <= step < self.step * count
        ]
        if math.prod(map(devices.size, axes)) != count:
            raise self._op.refused(f"its number / {self.step} % {count} is no index on the mesh")
        if not axes:
            return np.zeros((), dtype)[()]
        return lax.convert_element_type(lax.axis_index(devices.manual(axes)), dtype)


@rule(stablehlo_rules, "stablehlo.partition_id")
@lazy
def _(op: Operation) -> Any:
    return DeviceNumber(op)


@rule(stablehlo_rules, "stablehlo.replica_id")
def _(op: Operation) -> Any:
    around = op.reader.devices
    if around is not None and around.replicas > 1:
        return lax.convert_element_type(lax.axis_index("replicas"), np.uint32)
    attributes = op.reader.module.operation.attributes
    name = "mhlo.num_replicas"
    if around is None and name in attributes and attributes[name].value != 1:
        raise op.refused("the module is for several replicas")
    return np.uint32(0)


@also("stablehlo.divide")
def _(op: Operation, x: Any, y: Any) -> Any:
    if isinstance(x, DeviceNumber) and isinstance(y, Splat) and x.count is None:
        return DeviceNumber(op, x.step * int(y.scalar))
    return None


@also("stablehlo.remainder")
def _(op: Operation, x: Any, y: Any) -> Any:
    if isinstance(x, DeviceNumber) and isinstance(y, Splat) and x.count is None:
        return DeviceNumber(op, x.step, int(y.scalar))
    return None


@also("stablehlo.convert")
def _(op: Operation, x: Any) -> Any:
    return x.index(op.result_type.dtype) if isinstance(x, DeviceNumber) else None
