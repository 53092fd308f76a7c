"""The number of iterations of a loop in a compiled module.

XLA for CPU and GPU states known trip counts in the module. XLA for TPU does not: there, loops are
recognized that count up to a constant, as `scan` and `fori_loop` do. Field numbers are those of
XLA's `xla/service/hlo.proto` and `xla/xla_data.proto`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from jaxprtool.ir.hlo.module import Computation, Instruction, Module
from jaxprtool.ir.hlo.wire import integers, submessage, text

#: Operations that pass on their operand.
_SAME = frozenset({"copy", "bitcast", "copy-start", "copy-done"})


def trip_count(module: Module, loop: Instruction) -> int | None:
    """Return the number of iterations of a `while`; None if it is unknown before the loop runs."""
    config = text(loop.fields, 43)
    known = json.loads(config).get("known_trip_count", {}) if config.startswith("{") else {}
    return int(known["n"]) if "n" in known else counted_trips(module, loop)


def executed(
    module: Module, computation: Computation | None = None, count: int | None = 1
) -> Iterator[tuple[Instruction, int | None]]:
    """Yield the instructions of a module, and how often each runs in a call of the module.

    The count is the product of the trip counts of the loops around it; None if one of these is
    known only when the loop runs. In a branch it is counted as if the branch were taken.

    Args:
        module: The module.
        computation: A function of it; by default the one that is run.
        count: How often that function runs.
    """
    for each in (computation or module.entry).instructions:
        yield each, count
        inner = count
        if each.opcode == "while":
            trips = trip_count(module, each)
            inner = None if trips is None or count is None else count * trips
        # The end of an operation in the background names the computation that its start runs.
        for number in () if each.opcode in ("async-update", "async-done") else each.calls:
            yield from executed(module, module.computations[number], inner)


def counted_trips(module: Module, loop: Instruction) -> int | None:
    """Return the iterations of a loop that counts from a constant up to a constant, or None."""
    body, condition = (module.computations[each] for each in loop.calls[:2])
    compare = condition.root
    if compare.opcode != "compare" or text(compare.fields, 63) != "LT":
        return None
    counter, limit = (module.instructions[each] for each in compare.operands)
    end = _constant(module, limit)
    index = _carried(module, counter)
    if index is None or end is None or body.root.opcode != "tuple":
        return None
    start = _constant(module, _element(module, module.instructions[loop.operands[0]], index))
    step = _step(module, _element(module, body.root, index), index)
    if start is None or not step or step < 0:
        return None
    return max(0, -(-(end - start) // step))


def _element(module: Module, value: Instruction, index: int) -> Instruction:
    """Return an element of a tuple; the value itself if it is not made as one."""
    return module.instructions[value.operands[index]] if value.opcode == "tuple" else value


def _step(module: Module, made: Instruction, index: int) -> int | None:
    """Return the constant that is added to an element of a loop's carry, or None."""
    made = _passed(module, made)
    if made.opcode != "add":
        return None
    operands = [_passed(module, module.instructions[each]) for each in made.operands]
    counters = [_carried(module, each) == index for each in operands]
    if counters == [True, False]:
        return _constant(module, operands[1])
    return _constant(module, operands[0]) if counters == [False, True] else None


def _carried(module: Module, value: Instruction) -> int | None:
    """Return the index of a value in a loop's carry, in the body or the condition, or None."""
    if value.opcode != "get-tuple-element":
        return None
    is_carry = module.instructions[value.operands[0]].opcode == "parameter"
    return value.tuple_index if is_carry else None


def _constant(module: Module, value: Instruction) -> int | None:
    """Return the value of an integer constant, or None."""
    value = _passed(module, value)
    if value.opcode != "constant" or value.shape.sizes or value.shape.dtype not in ("s32", "s64"):
        return None
    literal = submessage(value.fields, 8)
    (found,) = integers(literal, 4) or integers(literal, 5) or [0]
    return found


def _passed(module: Module, value: Instruction) -> Instruction:
    """Return the value that a chain of copies and bitcasts starts from."""
    while value.opcode in _SAME and value.operands:
        value = module.instructions[value.operands[0]]
    return value
