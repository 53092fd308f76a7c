"""The result of XLA's partitioner: collectives by source line, and the shardings of values.

found = jaxprtool.shardings(program)
found.collectives[0].line, found.collectives[0].reason, found.values[0].spec
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from jaxprtool.analysis.cost.interconnects import bytes_sent
from jaxprtool.ir.basics.documents import document
from jaxprtool.ir.basics.printed import Printed
from jaxprtool.ir.hlo.collectives import REDUCTIONS
from jaxprtool.ir.hlo.device_tiles import DeviceTiles
from jaxprtool.jaxcompat.source_locations import UserFrame

#: The share of the memory on a device above which a value is large.
LARGE = 0.01

#: Who asked for a collective: the program, by `psum` in `shard_map`, or XLA's partitioner.
Source: TypeAlias = Literal["program", "partitioner"]


@document(also=("rematerializes",), optional=("way_spec",))
@dataclass(frozen=True)
class Reason:
    """Why the partitioner added a collective: an operation needs a value in another spec.

    Attributes:
        operand: The value that moves: the path of an argument, or an operation and its line.
        operand_spec: Its spec; "one device" if only one device has it, as the result of a callback.
        consumer: The operation that needs it in another spec, and its line.
        consumer_spec: The spec in which that operation needs the value; for a reduction, the spec
            of its result. For an operation that reads across devices along a dimension, as a sort
            or a shift does, it is the spec of the operand.
        way_spec: An intermediate spec, in which devices hold more of the value than the operation
            needs, if XLA found no direct way; else "".
    """

    operand: str
    operand_spec: str
    consumer: str
    consumer_spec: str
    way_spec: str = ""

    @property
    def rematerializes(self) -> bool:
        """Whether each device holds the whole value on the way from one spec to the other.

        XLA calls it an involuntary full rematerialization.
        """
        return self.way_spec == "P()"

    @property
    def mixes(self) -> bool:
        """Whether the operation reads across devices, however the value is sharded."""
        return self.operand_spec == self.consumer_spec


@document(
    without=("frames", "overlapping"),
    also=("sent_bytes",),
    optional=("reason", "seconds", "overlap_seconds"),
)
@dataclass(frozen=True)
class Collective:
    """A value that devices exchange.

    XLA may merge the moves of several values in one operation; each is listed separately.

    Attributes:
        kind: The kind: `all-reduce`.
        axes: The axes of the mesh along which devices exchange values; None if the groups of
            devices are not along axes.
        devices: The number of devices in a group.
        bytes: The bytes of the result on one device.
        count: How often it runs in a call; None if a loop around it has an unknown trip count.
        line: The user's line that needs the value, followed by the library's; "" if unknown.
        value: The value that moves: the path of an argument, or an operation and its line.
        source: Who asked for it: "program" or "partitioner".
        reason: Why the partitioner added it; None if unknown, or if the program asked for it.
        merged: The number of values that the operation moves.
        operation: The name of XLA's operation.
        overlapping: The FLOPs of independent matrix products on a device that could run at the same
            time, in one run, by element type.
        frames: The call stack of the line, the innermost frame first.
        seconds: A lower bound of the time of all runs; None without an interconnect.
        overlap_seconds: The part of `seconds` in which independent products could run; None
            without a device.
    """

    kind: str
    axes: tuple[str, ...] | None
    devices: int
    bytes: int
    count: int | None
    line: str
    value: str
    source: Source
    reason: Reason | None
    merged: int
    operation: str
    overlapping: Mapping[str, int]
    frames: tuple[UserFrame, ...] = ()
    seconds: float | None = None
    overlap_seconds: float | None = None

    @property
    def reduces(self) -> bool:
        """Whether it is a reduction, such as a sum."""
        return self.kind in REDUCTIONS

    @property
    def sent_bytes(self) -> int:
        """A lower bound of the bytes that each device sends, in all runs.

        An all-reduce sends almost twice its result, a reduce-scatter almost its operand. A loop
        with an unknown trip count runs once. The result of a `ragged-all-to-all` is an upper bound.
        """
        sent = bytes_sent(self.kind, self.bytes, self.devices)
        runs = 1 if self.count is None else self.count
        return round(self.bytes if sent is None else sent) * runs


@document(without=("tiles",), also=("replicated",))
@dataclass(frozen=True)
class ShardedValue:
    """An argument, a result, or a large value of a program.

    Attributes:
        name: Its path, or its operation and line.
        kind: "argument", "result" or "value".
        type: The type of the global array, as XLA writes it.
        shape: The shape of the global array.
        shape_per_device: Its shape on each device, with padding.
        spec: Its spec; "" if no spec describes its sharding.
        unreduced: The axes along which each device holds a term of the value, which is their sum.
        bytes: The bytes of the global array.
        bytes_per_device: Its bytes on each device, with padding.
        copies: The number of devices that hold the same part, and of an unreduced value the same
            term.
        padded_bytes: The bytes of padding on all devices, in one copy.
        count: The number of values with the same name, type and spec.
        line: The user's line; "" for arguments.
        tiles: The part that each device holds.
    """

    name: str
    kind: Literal["argument", "result", "value"]
    type: str
    shape: tuple[int, ...]
    shape_per_device: tuple[int, ...]
    spec: str
    unreduced: tuple[str, ...]
    bytes: int
    bytes_per_device: int
    copies: int
    padded_bytes: int
    count: int
    line: str
    tiles: DeviceTiles

    @property
    def replicated(self) -> bool:
        """Whether each device holds all of it."""
        return self.copies == len(self.tiles.of_device)

    @property
    def terms(self) -> dict[int, int] | None:
        """The term of the sum that each device holds; None unless the value is unreduced."""
        terms = self.tiles.term_of
        return None if terms is None else dict(enumerate(terms.tolist()))

    @property
    def ranges(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """The range of indices that each device holds, for each dimension."""
        sizes = list(zip(self.shape, self.shape_per_device, strict=True))
        found = {}
        for device, place in enumerate(self.tiles.of_device.tolist()):
            starts = [(i * part, size) for i, (size, part) in zip(place, sizes, strict=True)]
            parts = zip(starts, self.shape_per_device, strict=True)
            found[device] = tuple(
                (min(start, size), min(start + part, size)) for (start, size), part in parts
            )
        return found


@dataclass(frozen=True)
class RepeatedWork:
    """An operation of which each device computes more than its share.

    Attributes:
        line: The user's line.
        operation: The operation and its line.
        times: How many times its share each device computes: the number of devices if each
            computes all of it.
        flops: For a matrix product or a convolution, its FLOPs on each device in a call; else 0.
        elements: The elements of its results on each device in a call.
        count: The number of such operations of the line.
    """

    line: str
    operation: str
    times: float
    flops: int
    elements: int
    count: int


@dataclass(frozen=True)
class Constraint:
    """A sharding constraint with which the compiled program moves fewer bytes.

    Attributes:
        line: The line of the operation that computes the value.
        value: The operation and its line.
        spec: The spec for `with_sharding_constraint`; "" if the constraint is removed.
        replaces: Whether the operation is a constraint already, and only its spec changes.
        replaced: The spec that such a constraint has in the source; else "".
        sent_bytes: The bytes that each device sends in a call with this constraint.
        memory_bytes: The bytes of memory on each device with this constraint.
    """

    line: str
    value: str
    spec: str
    replaces: bool
    replaced: str
    sent_bytes: int
    memory_bytes: int


@document(also=("sent_bytes",), optional=("compute_seconds", "constraints"))
@dataclass(frozen=True)
class Shardings(Printed):
    """The collectives and the shardings of values in a partitioned program.

    Attributes:
        name: The name of the program.
        devices: The number of devices.
        platform: Their platform, whose compiler partitioned the program.
        mesh: The size of each axis of the mesh.
        memory_bytes: The bytes of memory of the compiled program on each device.
        products: The FLOPs of matrix products on each device, by element type.
        collectives: The values that devices exchange, those with the most bytes sent first.
        values: Arguments, results and large values, the largest on a device first.
        repeated: Large products, convolutions, sorts, factorizations and the like of which each
            device computes more than its share, the largest first.
        products_share: The part of `products` that would be left if no device computed more than
            its share.
        compute_seconds: A lower bound of the time of the products on a device; None without a
            device.
        constraints: Constraints that help, each tried alone, the best first; None if none were
            tried.
        tried: The number of constraints that were compiled.
    """

    name: str
    devices: int
    platform: str
    mesh: Mapping[str, int]
    memory_bytes: int
    products: Mapping[str, int]
    collectives: tuple[Collective, ...]
    values: tuple[ShardedValue, ...]
    repeated: tuple[RepeatedWork, ...] = ()
    products_share: float = 1.0
    compute_seconds: float | None = None
    constraints: tuple[Constraint, ...] | None = None
    tried: int = 0

    @property
    def sent_bytes(self) -> int:
        """The bytes that each device sends in a call."""
        return sum(each.sent_bytes for each in self.collectives)

    def is_large_copy(self, value: ShardedValue) -> bool:
        """Return True if each device holds all of a value that takes 1 % of its memory."""
        return value.replicated and value.bytes_per_device > self.memory_bytes * LARGE
