"""The floating-point operations of matrix products and convolutions in a compiled module.

Field numbers are those of XLA's `xla/service/hlo.proto` and `xla/xla_data.proto`.
"""

from __future__ import annotations

from collections import Counter
from math import prod

from jaxprtool.ir.hlo.module import Computation, Instruction, Module
from jaxprtool.ir.hlo.trip_counts import trip_count
from jaxprtool.ir.hlo.wire import integer, integers, submessage


def product_flops(module: Module, computation: Computation | None = None) -> Counter[str]:
    """Return the operations of products in a call, by the element type of the first operand.

    A loop with an unknown trip count is counted once; all branches are counted.

    Args:
        module: The module.
        computation: A function of it; by default the one that is run.
    """
    found = Counter[str]()
    for each in (computation or module.entry).instructions:
        found += flops_of(module, each)
    return found


def flops_of(module: Module, instruction: Instruction) -> Counter[str]:
    """Return the operations of the products in an instruction, by their element type."""
    if instruction.opcode in ("dot", "convolution"):
        first, second = (module.instructions[each] for each in instruction.operands[:2])
        if instruction.opcode == "dot":
            dimensions = integers(submessage(instruction.fields, 30), 1)
            terms = prod(first.shape.sizes[each] for each in dimensions)
        else:
            features = integer(submessage(instruction.fields, 16), 4)
            terms = prod(second.shape.sizes) // second.shape.sizes[features]
        return Counter({first.shape.dtype: 2 * prod(instruction.shape.sizes) * terms})
    if instruction.opcode in ("async-update", "async-done") or not instruction.calls:
        return Counter()
    times = (trip_count(module, instruction) or 1) if instruction.opcode == "while" else 1
    found = Counter[str]()
    for number in instruction.calls:
        found += product_flops(module, module.computations[number])
    return Counter({dtype: flops * times for dtype, flops in found.items()})
