"""The collectives of a compiled module: how devices exchange values.

    for each in collectives(module):
        print(each.kind, each.bytes, each.count, module.frames(each.instruction))

Field numbers are those of `HloInstructionProto` in XLA's `xla/service/hlo.proto`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from jaxprtool.ir.hlo.module import Computation, Instruction, Module

#: The opcodes of collectives. Those that run in the background start with `KIND-start`.
KINDS = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
)

_START = "-start"


@dataclass(frozen=True, eq=False)
class Collective:
    """A collective of a compiled module.

    Attributes:
        kind: Its opcode: `all-reduce`.
        bytes: The bytes of its result on one device; of several results, if XLA merged collectives,
            their sum.
        count: How often it runs in a call of the module: the product of the trip counts of the
            loops around it. None if one of these is known only when the loop runs. In a branch it
            is counted as if the branch were taken.
        instruction: The instruction.
    """

    kind: str
    bytes: int
    count: int | None
    instruction: Instruction


def collectives(module: Module) -> Iterator[Collective]:
    """Yield the collectives of a module, in the order of its computations."""
    yield from _inside(module, module.entry, 1)


def _inside(module: Module, computation: Computation, count: int | None) -> Iterator[Collective]:
    for each in computation.instructions:
        kind = each.opcode.removesuffix(_START)
        if kind in KINDS:
            yield Collective(kind, _result_bytes(each), count, each)
            continue
        inner = count
        if each.opcode == "while":
            trips = trip_count(each)
            inner = None if trips is None or count is None else count * trips
        # The end of an operation in the background names the computation that its start runs.
        for number in () if each.opcode in ("async-update", "async-done") else each.calls:
            yield from _inside(module, module.computations[number], inner)


def trip_count(loop: Instruction) -> int | None:
    """Return the number of iterations of a `while`, if XLA knows it."""
    (text,) = loop.fields.get(43, [b""])[-1:]
    known = json.loads(text).get("known_trip_count", {}) if text else {}
    return int(known["n"]) if "n" in known else None


def _result_bytes(instruction: Instruction) -> int:
    """Return the bytes of a collective's result.

    `KIND-start` returns its operand before the result, but `all-reduce-start` the result alone.
    """
    opcode, shape = instruction.opcode, instruction.shape
    if opcode.endswith(_START) and opcode != "all-reduce-start":
        return shape.parts[1].bytes
    return shape.bytes
