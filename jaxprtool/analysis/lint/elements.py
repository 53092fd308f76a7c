"""Compute single elements of integers that are known, in exact arithmetic.

Large arrays of indices, such as `jnp.indices((50_000, 50_000))`, are never built: an element is
computed from those that it depends on. Of the operands of a select, only the chosen one is
computed, so overflow in another one does not matter.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from itertools import product
from typing import Any, TypeAlias

import numpy as np

from jaxprtool.analysis.lint.graph import Node, Value
from jaxprtool.ir.basics.rules import RuleTable, rule

Index: TypeAlias = tuple[int, ...]

#: Returns an element of an operand, or None if it is not known.
At: TypeAlias = Callable[[Value, Index], "int | None"]
ElementRule: TypeAlias = Callable[[Node, int, Index, At], "int | None"]

#: Rules from an equation, the number of its result, and the position of an element, to the element.
element_rules: RuleTable[ElementRule] = RuleTable()

#: The number of equations that are looked back, and the number of elements of sums and constants.
_MOST_STEPS, _MOST_ELEMENTS = 100, 1 << 12


class Elements:
    """Computes elements, and records where they do not fit in their type.

    Attributes:
        overflows: The equations whose result overflows, and the exact number.
    """

    def __init__(self) -> None:
        self.overflows: dict[Node, int] = {}
        self._known: dict[tuple[Value, Index], int | None] = {}

    def visit_corners(self, value: Value) -> None:
        """Compute the first and last elements along each axis of an array."""
        if all(isinstance(size, int) and size > 0 for size in value.shape):
            ends = [sorted({0, size - 1}) for size in value.shape[:_MOST_AXES]]
            ends += [[size - 1] for size in value.shape[_MOST_AXES:]]
            for index in product(*ends):
                self._record(value, self._element(value, index, _MOST_STEPS))

    def _element(self, value: Value, index: Index, steps: int) -> int | None:
        key = value, index
        if key not in self._known:
            self._known[key] = self._computed(value, index, steps) if steps else None
        return self._known[key]

    def _computed(self, value: Value, index: Index, steps: int) -> int | None:
        if getattr(value.dtype, "kind", "") not in ("b", "i", "u"):
            return None
        if value.outer is not None:
            return self._element(value.outer, index, steps - 1)
        array: Any = value.literal if value.literal is not None else value.constant
        if array is not None:
            return int(np.asarray(array)[index]) if np.size(array) <= _MOST_ELEMENTS else None
        node = value.node
        found = None if node is None else element_rules.get(node.name)
        if node is None or found is None:
            return None
        if not all(isinstance(size, int) for each in (value, *node.ins) for size in each.shape):
            return None

        def at(operand: Value, place: Index) -> int | None:
            number = self._element(operand, place, steps - 1)
            if node.name in BITWISE and _overflows(operand, number):
                return None  # a hash, which wraps on purpose
            self._record(operand, number)
            return number

        return found(node, value.index, index, at)

    def _record(self, value: Value, number: int | None) -> None:
        if value.node is not None and number is not None and _overflows(value, number):
            self.overflows[value.node] = max(number, self.overflows.get(value.node, 0), key=abs)


def _overflows(value: Value, number: int | None) -> bool:
    """Return True if a number does not fit in the type of signed integers."""
    if number is None or value.dtype.kind != "i":
        return False
    limits = np.iinfo(value.dtype)
    return not limits.min <= number <= limits.max


#: Both ends are computed of this many axes.
_MOST_AXES = 4


# --- positions ------------------------------------------------------------------------------------


@rule(element_rules, "iota")
def _position(node: Node, out: int, index: Index, at: At) -> int | None:
    return index[node.eqn.params["dimension"]]


@rule(element_rules, "argmax", "argmin")
def _last_position(node: Node, out: int, index: Index, at: At) -> int | None:
    """Return the largest possible position."""
    return math.prod(node.ins[0].shape[axis] for axis in node.eqn.params["axes"]) - 1


@rule(element_rules, "sort", "top_k")
def _order(node: Node, out: int, index: Index, at: At) -> int | None:
    """Return the largest possible position in a result of argsort or `top_k`."""
    if node.name == "top_k":
        return node.ins[0].shape[-1] - 1 if out == 1 else None
    axis = node.eqn.params["dimension"]
    last = (*index[:axis], node.ins[0].shape[axis] - 1, *index[axis + 1 :])
    source = node.ins[out].node
    return at(node.ins[out], last) if source is not None and source.name == "iota" else None


@rule(element_rules, "broadcast_in_dim")
def _broadcast(node: Node, out: int, index: Index, at: At) -> int | None:
    places = node.eqn.params["broadcast_dimensions"]
    shape = node.ins[0].shape
    return at(
        node.ins[0], tuple(index[p] if n != 1 else 0 for p, n in zip(places, shape, strict=True))
    )


@rule(element_rules, "reshape", "squeeze")
def _reshaped(node: Node, out: int, index: Index, at: At) -> int | None:
    flat = 0
    for place, size in zip(index, node.outs[0].shape, strict=True):
        flat = flat * size + place
    inner = []
    for size in reversed(node.ins[0].shape):
        inner.append(flat % size)
        flat //= size
    return at(node.ins[0], tuple(reversed(inner)))


@rule(element_rules, "transpose")
def _transposed(node: Node, out: int, index: Index, at: At) -> int | None:
    order = node.eqn.params["permutation"]
    return at(node.ins[0], tuple(index[order.index(axis)] for axis in range(len(order))))


@rule(element_rules, "rev")
def _reversed(node: Node, out: int, index: Index, at: At) -> int | None:
    axes, sizes = node.eqn.params["dimensions"], node.ins[0].shape
    pairs = enumerate(zip(index, sizes, strict=True))
    return at(node.ins[0], tuple(n - 1 - i if axis in axes else i for axis, (i, n) in pairs))


@rule(element_rules, "slice")
def _sliced(node: Node, out: int, index: Index, at: At) -> int | None:
    starts = node.eqn.params["start_indices"]
    strides = node.eqn.params["strides"] or (1,) * len(starts)
    places = (s + i * k for s, i, k in zip(starts, index, strides, strict=True))
    return at(node.ins[0], tuple(places))


@rule(element_rules, "concatenate")
def _joined(node: Node, out: int, index: Index, at: At) -> int | None:
    axis = node.eqn.params["dimension"]
    place = index[axis]
    for value in node.ins:
        if place < value.shape[axis]:
            return at(value, (*index[:axis], place, *index[axis + 1 :]))
        place -= value.shape[axis]
    return None


@rule(element_rules, "stack")
def _stacked(node: Node, out: int, index: Index, at: At) -> int | None:
    axis = node.eqn.params["axis"]
    return at(node.ins[index[axis]], (*index[:axis], *index[axis + 1 :]))


@rule(element_rules, "unstack")
def _unstacked(node: Node, out: int, index: Index, at: At) -> int | None:
    axis = node.eqn.params["axis"]
    return at(node.ins[0], (*index[:axis], out, *index[axis:]))


# --- arithmetic -----------------------------------------------------------------------------------


def _divide(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_ARITHMETIC: dict[str, Callable[..., int]] = {
    "abs": abs,
    "add": operator.add,
    "eq": operator.eq,
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
    "max": max,
    "mul": operator.mul,
    "ne": operator.ne,
    "neg": operator.neg,
    "sign": lambda a: (a > 0) - (a < 0),
    "square": lambda a: a * a,
    "sub": operator.sub,
}


@rule(element_rules, *_ARITHMETIC)
def _computed(node: Node, out: int, index: Index, at: At) -> int | None:
    operands = _operands(node, index, at)
    return None if operands is None else int(_ARITHMETIC[node.name](*operands))


def _operands(node: Node, index: Index, at: At) -> list[int] | None:
    """Return the elements of elementwise operands; those of size 1 are broadcast."""
    numbers = []
    for value in node.ins:
        places = zip(index, value.shape, strict=True) if value.shape else ()
        number = at(value, tuple(i if n != 1 else 0 for i, n in places))
        if number is None:
            return None
        numbers.append(number)
    return numbers


#: Operations on bits. Integers that they read may wrap on purpose.
BITWISE: dict[str, Callable[..., int]] = {
    "and": operator.and_,
    "or": operator.or_,
    "shift_right_arithmetic": operator.rshift,
    "shift_right_logical": operator.rshift,
    "xor": operator.xor,
}


@rule(element_rules, "not", "population_count", *BITWISE)
def _of_bits(node: Node, out: int, index: Index, at: At) -> int | None:
    operands = _operands(node, index, at)
    if operands is None or min(operands) < 0 or ("shift" in node.name and operands[1] > 64):
        return None
    if node.name in BITWISE:
        return int(BITWISE[node.name](*operands))
    return int(not operands[0]) if node.outs[0].dtype == bool else None


@rule(element_rules, "div", "rem")
def _quotient(node: Node, out: int, index: Index, at: At) -> int | None:
    operands = _operands(node, index, at)
    if operands is None or operands[1] == 0:
        return None
    quotient = _divide(*operands)
    return quotient if node.name == "div" else operands[0] - quotient * operands[1]


@rule(element_rules, "integer_pow", "pow", "shift_left")
def _power(node: Node, out: int, index: Index, at: At) -> int | None:
    operands = _operands(node, index, at)
    if operands is None:
        return None
    power = node.eqn.params["y"] if node.name == "integer_pow" else operands[1]
    if not 0 <= power < 128:
        return None
    return operands[0] << power if node.name == "shift_left" else int(operands[0] ** power)


@rule(element_rules, "clamp")
def _clamped(node: Node, out: int, index: Index, at: At) -> int | None:
    """Return the limit for an element that is not known: a clipped index may be the last one."""
    low, value, high = (at(v, index if v.shape else ()) for v in node.ins)
    if low is None or high is None or value is None:
        return high
    return min(max(low, value), high)


@rule(element_rules, "convert_element_type", "copy", "optimization_barrier")
def _converted(node: Node, out: int, index: Index, at: At) -> int | None:
    return at(node.ins[out], index)


@rule(element_rules, "min")
def _limited(node: Node, out: int, index: Index, at: At) -> int | None:
    """Return the limit for an element that is not known, as for a clipped index."""
    shape = node.outs[0].shape
    whole = [value for value in node.ins if value.shape in ((), shape)]
    numbers = [at(value, index if value.shape else ()) for value in whole]
    return min((number for number in numbers if number is not None), default=None)


@rule(element_rules, "select_n")
def _chosen(node: Node, out: int, index: Index, at: At) -> int | None:
    predicate, *cases = node.ins
    case = at(predicate, index if predicate.shape else ())
    return None if case is None or not 0 <= case < len(cases) else at(cases[case], index)


# --- sums -----------------------------------------------------------------------------------------

_COMBINED: dict[str, Callable[[list[int]], int]] = {
    "cumprod": math.prod,
    "cumsum": sum,
    "reduce_max": max,
    "reduce_prod": math.prod,
    "reduce_sum": sum,
}


@rule(element_rules, *_COMBINED)
def _reduced(node: Node, out: int, index: Index, at: At) -> int | None:
    """Return a sum or a product of few elements, or the sum of many that are equal."""
    operand, params = node.ins[0], node.eqn.params
    if node.name.startswith("cum"):
        axes = (params["axis"],)
        last = operand.shape[axes[0]]
        ranges = [range(place, place + 1) for place in index]
        ends = (index[axes[0]], last) if params["reverse"] else (0, index[axes[0]] + 1)
        ranges[axes[0]] = range(*ends)
    else:
        axes, kept = params["axes"], iter(index)
        starts = (
            (0, n) if axis in axes else (next(kept), 0) for axis, n in enumerate(operand.shape)
        )
        ranges = [range(start, n or start + 1) for start, n in starts]
    count = math.prod(map(len, ranges))
    filled = operand.node
    if filled is not None and filled.traits.fills and filled.ins and not filled.ins[0].shape:
        number = at(filled.ins[0], ())
        return number * count if number is not None and _COMBINED[node.name] is sum else None
    if count > _MOST_ELEMENTS:
        return None
    return _combined(_COMBINED[node.name], [at(operand, place) for place in product(*ranges)])


def _combined(combine: Callable[[list[int]], int], numbers: list[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return combine(known) if known and len(known) == len(numbers) else None


@rule(element_rules, "dot_general")
def _inner_product(node: Node, out: int, index: Index, at: At) -> int | None:
    contracted, batch = node.eqn.params["dimension_numbers"]
    count = math.prod(node.ins[0].shape[axis] for axis in contracted[0])
    if batch[0] or len(contracted[0]) != 1 or count > _MOST_ELEMENTS:
        return None
    split = len(node.ins[0].shape) - 1
    terms = list[int | None]()
    for place in range(count):
        sides = zip(node.ins, (index[:split], index[split:]), contracted, strict=True)
        pair = [at(v, (*free[: axes[0]], place, *free[axes[0] :])) for v, free, axes in sides]
        terms.append(_combined(math.prod, pair))
    return _combined(sum, terms)
