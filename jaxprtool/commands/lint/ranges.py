"""What is known of values: between which numbers they are, and single elements of integers.

Each open table has rules by primitive. The result of an equation without a rule may be anything.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxprtool.commands.lint.graph import Node, Value, ancestors, is_same, origin
from jaxprtool.ir.equations import is_inexact
from jaxprtool.ir.rules import RuleTable, rule

# --- ranges ---------------------------------------------------------------------------------------
# Decide between which numbers a value is known to be, and whether it is kept away from zero.

#: The relations of a result to an operand that has the same elements, up to their precision.
MOVES = ("same", "layout", "cast")

#: The number of equations to look back.
_MOST_STEPS = 40

#: The number of values before a subtrahend among which a maximum is looked for.
_MOST_VALUES = 24

#: Larger constants are not read.
_MOST_ELEMENTS = 1 << 16


class ValueRange(NamedTuple):
    """The smallest and the largest number that a value may be; infinite if unknown."""

    low: float = -math.inf
    high: float = math.inf


ANY, UNIT = ValueRange(), ValueRange(-1.0, 1.0)

#: Returns the bounds of an operand.
Look: TypeAlias = Callable[[Value], ValueRange]
BoundsRule: TypeAlias = Callable[[Node, Look], ValueRange]

bounds_rules: RuleTable[BoundsRule] = RuleTable()


def may_vary(value: Value) -> bool:
    """Return True unless a value is a literal or a constant."""
    return value.literal is None and value.constant is None


def known_numbers(value: Value) -> np.ndarray | None:
    """Return the numbers of a literal or a small constant of floats; None for other values.

    The literal may be an integer that is converted: `jnp.where(mask, x, 0)`.
    """
    root = origin(value, MOVES)
    numbers: Any = root.literal if root.literal is not None else root.constant
    if numbers is None or not is_inexact(value) or np.size(numbers) > _MOST_ELEMENTS:
        return None
    return np.asarray(numbers, np.float64) if np.isrealobj(numbers) else None


def bounds(value: Value) -> ValueRange:
    """Return the numbers between which a value is known to be: (-30, 30) for `30 * tanh(x)`."""
    seen = dict[Value, ValueRange]()

    def look(value: Value, steps: int = _MOST_STEPS) -> ValueRange:
        if value not in seen:
            seen[value] = ANY
            seen[value] = _bounds(value, lambda other: look(other, steps - 1) if steps else ANY)
        return seen[value]

    return look(value)


def _bounds(value: Value, look: Look) -> ValueRange:
    numbers, kind = known_numbers(value), getattr(value.dtype, "kind", "")
    if numbers is not None:
        return ValueRange(float(numbers.min()), float(numbers.max())) if numbers.size else UNIT
    root = origin(value, MOVES)
    if root is not value:
        return look(root)
    if kind == "b":
        return ValueRange(0.0, 1.0)
    rule = None if value.node is None else bounds_rules.get(value.node.name)
    if value.node is None or rule is None:
        return ValueRange(low=0.0) if kind == "u" and may_vary(value) else ANY
    low, high = rule(value.node, look)
    return ANY if math.isnan(low) or math.isnan(high) else ValueRange(low, high)


# --- bounds of functions --------------------------------------------------------------------------

#: The bounds of functions whose results are bounded for all numbers.
_IMAGES = {
    "acos": ValueRange(0.0, math.pi),
    "asin": ValueRange(-math.pi / 2, math.pi / 2),
    "atan": ValueRange(-math.pi / 2, math.pi / 2),
    "atan2": ValueRange(-math.pi, math.pi),
    "cos": UNIT,
    "cosh": ValueRange(low=1.0),
    "erf": UNIT,
    "erfc": ValueRange(0.0, 2.0),
    "logistic": ValueRange(0.0, 1.0),
    "sign": UNIT,
    "sin": UNIT,
    "tanh": UNIT,
}


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def _log(x: float) -> float:
    return math.inf if x == math.inf else math.log(x) if x > 0 else -math.inf


#: Functions that grow with their operand.
_GROWING: dict[str, Callable[[float], float]] = {
    "exp": _exp,
    "exp2": lambda x: _exp(x * math.log(2)),
    "expm1": lambda x: _exp(x) - 1,
    "log": _log,
    "log1p": lambda x: _log(1 + x),
    "sqrt": lambda x: math.sqrt(max(x, 0.0)),
}


@rule(bounds_rules, *_IMAGES)
def _image(node: Node, look: Look) -> ValueRange:
    return _IMAGES[node.name]


@rule(bounds_rules, *_GROWING)
def _growing(node: Node, look: Look) -> ValueRange:
    low, high = look(node.ins[0])
    return ValueRange(_GROWING[node.name](low), _GROWING[node.name](high))


@rule(bounds_rules, "ceil", "floor", "round")
def _rounded(node: Node, look: Look) -> ValueRange:
    low, high = look(node.ins[0])
    return ValueRange(low - 1, high + 1)


@rule(bounds_rules, "rsqrt")
def _inverse_root(node: Node, look: Look) -> ValueRange:
    low, _ = look(node.ins[0])
    return ValueRange(0.0, low**-0.5 if low > 0 else math.inf)


@rule(bounds_rules, "abs")
def _absolute(node: Node, look: Look) -> ValueRange:
    low, high = look(node.ins[0])
    return ValueRange(max(low, -high, 0.0), max(-low, high))


@rule(bounds_rules, "square")
def _square(node: Node, look: Look) -> ValueRange:
    low, high = _absolute(node, look)
    return ValueRange(low * low, high * high)


@rule(bounds_rules, "integer_pow")
def _power(node: Node, look: Look) -> ValueRange:
    power, limits = node.eqn.params["y"], look(node.ins[0])
    if power <= 0:
        return ValueRange(low=0.0) if power % 2 == 0 or limits.low >= 0 else ANY
    low, high = _absolute(node, look) if power % 2 == 0 else limits
    if max(abs(low), abs(high)) > 1e30:  # of which the power is not a float
        return ValueRange(low=0.0) if low >= 0 else ANY
    return ValueRange(low**power, high**power)


@rule(bounds_rules, "pow")
def _any_power(node: Node, look: Look) -> ValueRange:
    return ValueRange(low=0.0) if look(node.ins[0]).low >= 0 else ANY


# --- bounds of arithmetic -------------------------------------------------------------------------


@rule(bounds_rules, "neg")
def _negative(node: Node, look: Look) -> ValueRange:
    low, high = look(node.ins[0])
    return ValueRange(-high, -low)


@rule(bounds_rules, "add", "add_any")
def _sum(node: Node, look: Look) -> ValueRange:
    one, two = map(look, node.ins)
    return ValueRange(one.low + two.low, one.high + two.high)


@rule(bounds_rules, "sub")
def _difference(node: Node, look: Look) -> ValueRange:
    one, two = map(look, node.ins)
    high = one.high - two.low
    return ValueRange(one.low - two.high, min(high, 0.0) if _has_maximum(node.ins[1]) else high)


def _has_maximum(value: Value) -> bool:
    """Return True if a value is computed from a maximum, or by a loop, a few equations before."""
    nodes = (ancestor.node for ancestor in ancestors(value, _MOST_VALUES))
    return any(node is not None and ("max" in node.name or node.inner) for node in nodes)


@rule(bounds_rules, "mul")
def _product(node: Node, look: Look) -> ValueRange:
    one, two = node.ins
    if one is two:
        return _square(node, look)
    limit = _normalized(node.outs[0])
    if limit is not None:
        return ValueRange(-limit, limit)
    return _times(_scale(one, two, look), _scale(two, one, look))


@rule(bounds_rules, "div")
def _quotient(node: Node, look: Look) -> ValueRange:
    above, below = node.ins
    if _is_share(above, below):
        return ValueRange(0.0 if look(above).low >= 0 else -1.0, 1.0)
    limit = _normalized(node.outs[0])
    if limit is not None:
        return ValueRange(-limit, limit)
    low, high = _scale(below, above, look)
    if low > 0 or high < 0:
        return _times(look(above), ValueRange(1 / high, 1 / low))
    return _times(look(above), ValueRange(low=0.0)) if low == 0 else ANY


def _scale(value: Value, other: Value, look: Look) -> ValueRange:
    """Return the bounds of a factor or a divisor of another value.

    A number that the caller passes, such as a temperature, is taken to be one: it is chosen for the
    bounds of what it scales.
    """
    limits, root = look(value), origin(value, MOVES)
    is_number = root.node is None and may_vary(root) and root.elements == 1
    return ValueRange(1.0, 1.0) if is_number and limits == ANY and look(other) != ANY else limits


def _times(one: ValueRange, two: ValueRange) -> ValueRange:
    ends = [0.0 if 0.0 in (a, b) else a * b for a in one for b in two]
    return ValueRange(min(ends), max(ends))


@rule(bounds_rules, "rem")
def _remainder(node: Node, look: Look) -> ValueRange:
    one, two = map(look, node.ins)
    size = max(-two.low, two.high)
    return ValueRange(-size if one.low < 0 else 0.0, size if one.high > 0 else 0.0)


# --- bounds of choices and reductions -------------------------------------------------------------


@rule(bounds_rules, "max")
def _maximum(node: Node, look: Look) -> ValueRange:
    one, two = map(look, node.ins)
    return ValueRange(max(one.low, two.low), max(one.high, two.high))


@rule(bounds_rules, "min")
def _minimum(node: Node, look: Look) -> ValueRange:
    one, two = map(look, node.ins)
    return ValueRange(min(one.low, two.low), min(one.high, two.high))


@rule(bounds_rules, "clamp")
def _clamped(node: Node, look: Look) -> ValueRange:
    """Return the bounds of `clip`. The caller passes a limit that is not known, to be safe."""
    low, value, high = map(look, node.ins)
    top = 0.0 if high.high == math.inf else high.high
    return ValueRange(max(low.low, min(value.low, high.low)), max(low.low, min(value.high, top)))


@rule(bounds_rules, "select_n")
def _choice(node: Node, look: Look) -> ValueRange:
    predicate, *cases = node.ins
    if predicate.node is not None and predicate.node.name == "ne":
        one, two = predicate.node.ins
        cases = cases[:1] if one is two else cases  # `x != x` is false, unless x is NaN
    return _union([look(case) for case in cases if not is_nan(case)])


def is_nan(value: Value) -> bool:
    """Return True for the number NaN, which `jnp.var` chooses for no elements."""
    numbers = known_numbers(value)
    return numbers is not None and bool(np.isnan(numbers).all())


def _union(cases: list[ValueRange]) -> ValueRange:
    return ValueRange(min(case.low for case in cases), max(case.high for case in cases))


@rule(bounds_rules, "concatenate", "pad", "stack")
def _joined(node: Node, look: Look) -> ValueRange:
    return _union([look(value) for value in node.ins])


@rule(
    bounds_rules,
    *("cummax", "cummin", "dynamic_slice", "gather", "reduce_max", "reduce_min", "slice", "split"),
    *("top_k", "unstack"),
)
def _some_elements(node: Node, look: Look) -> ValueRange:
    return look(node.ins[0])


@rule(bounds_rules, "cond")
def _branches(node: Node, look: Look) -> ValueRange:
    if len(node.outs) != 1 or not node.inner:
        return ANY
    return _union([look(scope.results[0]) for scope in node.inner])


@rule(bounds_rules, "cumsum", "dot_general", "reduce_sum")
def _total(node: Node, look: Look) -> ValueRange:
    """Return the bounds of a sum: those of its terms, as often as there are terms."""
    limit = _normalized(node.outs[0])
    if limit is not None:
        return ValueRange(-limit, limit)
    term, axes = node.ins[0], node.eqn.params.get("axes", ())
    if node.name == "dot_general":
        ((axes, _), _) = node.eqn.params["dimension_numbers"]
        low, high = _times(look(term), look(node.ins[1]))
    else:
        axes = axes or (node.eqn.params.get("axis", 0),)
        low, high = look(term)
    count = math.prod(size if isinstance(size, int) else 1 << 20 for size in _sizes(term, axes))
    return ValueRange(min(low, low * count), max(high, high * count))


def _sizes(value: Value, axes: Iterable[int]) -> list[Any]:
    return [value.shape[axis] for axis in axes] if value.shape else []


def _is_share(above: Value, below: Value) -> bool:
    """Return True for `x / sum(x)` of exponentials, and for `x / (c + abs(x))`."""
    node, value = origin(below, MOVES).node, origin(above, MOVES)
    if node is None:
        return False
    if node.name == "reduce_sum":
        is_exponential = value.node is not None and value.node.name == "exp"
        return is_exponential and is_same(node.ins[0], value)
    terms = [origin(operand, MOVES).node for operand in node.ins] if node.name == "add" else []
    sizes = [term for term in terms if term is not None and term.name == "abs"]
    is_own = any(origin(size.ins[0], MOVES) is value for size in sizes)
    return is_own and any(map(is_positive_number, node.ins))


# --- normalized vectors ---------------------------------------------------------------------------

#: A vector by whose norm a value is divided, and the factor by which the norm is larger than the
#: divisor: the root of the number of elements, if it is the root of the mean of their squares.
_Length: TypeAlias = tuple[Value, float]


def _normalized(value: Value, lengths: tuple[_Length, ...] = ()) -> float | None:
    """Return the most that an element is of a vector, or a product of vectors, over their norms.

    Args:
        value: The vector, or the inner product.
        lengths: The norms that it is divided by.

    Returns:
        A bound of the absolute value; None if the vectors are not divided by their norms.
    """
    node = origin(value, MOVES).node
    if node is None:
        return None
    for inner, more in _divisions(node):
        limit = _normalized(inner, (*lengths, *more))
        if limit is not None:
            return limit
    factors = node.ins if node.name == "dot_general" else ()
    if node.name == "reduce_sum":
        product = origin(node.ins[0], MOVES).node
        factors = product.ins if product is not None and product.name == "mul" else ()
    if factors:  # the inequality of Cauchy and Schwarz
        norms = [_norm(factor, lengths) for factor in factors]
        return None if None in norms else math.prod(norm for norm in norms if norm is not None)
    return _norm(value, lengths)


def _norm(value: Value, lengths: Iterable[_Length]) -> float | None:
    """Return the norm of a vector over its own norm; None if it is not divided by its norm."""
    for vector, factor in lengths:
        if is_same(vector, value):
            return factor
    node = origin(value, MOVES).node
    if node is None:
        return None
    if node.name == "select_n":  # zero, if the norm is
        norms = [_norm(case, lengths) for case in node.ins[1:] if not is_zero(case)]
        return None if None in norms else max((n for n in norms if n is not None), default=None)
    for inner, more in _divisions(node):
        norm = _norm(inner, more)
        if norm is not None:
            return norm
    return None


def is_zero(value: Value) -> bool:
    """Return True for a literal, or a constant, of zeros."""
    numbers = known_numbers(value)
    return numbers is not None and not numbers.any()


def _divisions(node: Node) -> list[tuple[Value, list[_Length]]]:
    """Return the values that an equation divides by norms, with the norms."""
    divisions: list[tuple[Value, list[_Length]]] = []
    if node.name == "div":
        divisions = [(node.ins[0], _lengths(node.ins[1]))]
    elif node.name == "mul":
        one, two = node.ins
        divisions = [(one, _inverse_lengths(two)), (two, _inverse_lengths(one))]
    return [(value, lengths) for value, lengths in divisions if lengths]


def _inverse_lengths(value: Value) -> list[_Length]:
    node = origin(value, MOVES).node
    if node is not None and node.name == "rsqrt":
        return _squares(node.ins[0])
    return _lengths(node.ins[1]) if node is not None and node.name == "div" else []


#: Rules from a divisor to the norms that it is the product of; it may be larger by an epsilon.
length_rules: RuleTable[Callable[[Node], list[_Length]]] = RuleTable()

#: Rules from a value to the vectors whose squared norm, or the mean of their squares, it is.
square_rules: RuleTable[Callable[[Node], list[_Length]]] = RuleTable()


def _lengths(value: Value) -> list[_Length]:
    node = origin(value, MOVES).node
    rule = None if node is None else length_rules.get(node.name)
    return [] if rule is None else list(rule(node))


def _squares(value: Value) -> list[_Length]:
    node = origin(value, MOVES).node
    if node is None:
        return []
    vector = squared(node)
    rule = square_rules.get(node.name)
    if vector is not None:
        return [(vector, 1.0)]
    return [] if rule is None else list(rule(node))


@rule(length_rules, "sqrt")
def _root_of_square(node: Node) -> list[_Length]:
    return _squares(node.ins[0])


@rule(length_rules, "mul")
def _product_of_lengths(node: Node) -> list[_Length]:
    return _product_of(node, _lengths, lambda count: 1 / count)


@rule(length_rules, "add")
def _length_and_epsilon(node: Node) -> list[_Length]:
    return _any_length(node) if any(map(is_positive_number, node.ins)) else []


@rule(length_rules, "clamp", "max", "select_n")
def _any_length(node: Node) -> list[_Length]:
    return [length for operand in node.ins for length in _lengths(operand)]


@rule(square_rules, "reduce_sum")
def _sum_of_squares(node: Node) -> list[_Length]:
    vector = squared(origin(node.ins[0], MOVES).node)
    return [] if vector is None else [(vector, 1.0)]


@rule(square_rules, "dot_general")
def _product_with_itself(node: Node) -> list[_Length]:
    return [(node.ins[0], 1.0)] if is_same(node.ins[0], node.ins[1]) else []


@rule(square_rules, "mul")
def _product_of_squares(node: Node) -> list[_Length]:
    return _product_of(node, _squares, lambda share: share**-0.5)


@rule(square_rules, "div")
def _mean_of_squares(node: Node) -> list[_Length]:
    count = bounds(node.ins[1])
    root = math.sqrt(count.high) if 0 < count.low <= count.high < math.inf else 0.0
    return [(vector, factor * root) for vector, factor in _squares(node.ins[0]) if root]


@rule(square_rules, "add")
def _square_and_epsilon(node: Node) -> list[_Length]:
    return _any_square(node) if any(map(is_positive_number, node.ins)) else []


@rule(square_rules, "clamp", "max", "select_n")
def _any_square(node: Node) -> list[_Length]:
    return [square for operand in node.ins for square in _squares(operand)]


def _product_of(
    node: Node, parts: Callable[[Value], list[_Length]], scale: Callable[[float], float]
) -> list[_Length]:
    """Return the norms in a product of norms and numbers; nothing if it has other factors."""
    norms, factor = list[_Length](), 1.0
    for value in node.ins:
        numbers, lengths = known_numbers(value), parts(value)
        root = origin(value, MOVES)
        if lengths:
            norms += lengths
        elif numbers is not None and numbers.size and numbers.min() > 0:
            factor *= scale(float(numbers.min()))
        elif root.node is not None or not may_vary(root) or root.elements > 1:
            return []
    return [(vector, size * factor) for vector, size in norms]


def squared(node: Node | None) -> Value | None:
    """Return the value that an equation squares, or None."""
    if node is None:
        return None
    is_power = node.name == "integer_pow" and node.eqn.params["y"] == 2
    is_product = node.name == "mul" and node.ins[0] is node.ins[1]
    if node.name == "square" or is_power or is_product:
        return origin(node.ins[0], ("same", "cast"))
    return None


# --- guarded --------------------------------------------------------------------------------------

#: A rule from an equation, and the number of equations to look back.
RangeRule: TypeAlias = Callable[[Node, int], bool]

guarded_rules: RuleTable[RangeRule] = RuleTable()


def is_guarded(value: Value) -> bool:
    """Return True if the source keeps a value away from zero, or from other unsafe numbers."""
    value = origin(value, MOVES)
    if value.node is None:
        return not may_vary(value)
    rule = guarded_rules.get(value.node.name)
    return not value.node.ins or (rule is not None and rule(value.node, _MOST_STEPS))


def is_positive_number(value: Value) -> bool:
    """Return True for a literal, or a constant, of positive floats."""
    numbers = known_numbers(value)
    return numbers is not None and bool((numbers > 0).all())


@rule(guarded_rules, "clamp", "cosh", "exp", "exp2", "logistic", "reduce_max")
def _is_kept_away(node: Node, steps: int) -> bool:
    return True


@rule(guarded_rules, "max")
def _is_at_least(node: Node, steps: int) -> bool:
    """Return True unless it is the maximum with zero; `relu` stops the gradient there."""
    return node.has_rule or not any(map(_has_zero, node.ins))


@rule(guarded_rules, "select_n")
def _is_choice(node: Node, steps: int) -> bool:
    """Return True unless a case is zero and the predicate is not computed from the other one."""
    predicate, *cases = node.ins
    if not any(map(_has_zero, cases)):
        return True
    compared = {origin(ancestor, MOVES) for ancestor in ancestors(predicate, _MOST_VALUES)}
    return any(origin(case, MOVES) in compared for case in cases if may_vary(case))


def _has_zero(value: Value) -> bool:
    numbers = known_numbers(value)
    return numbers is not None and not numbers.all()


@rule(guarded_rules, "add", "add_any")
def _has_epsilon(node: Node, steps: int) -> bool:
    return any(map(is_positive_number, node.ins))


# --- elements -------------------------------------------------------------------------------------
# Compute single elements of integers that are known, in exact arithmetic.
#
# Large arrays of indices, such as `jnp.indices((50_000, 50_000))`, are never built: an element is
# computed from those that it depends on. Of the operands of a select, only the chosen one is
# computed, so overflow in another one does not matter.

Index: TypeAlias = tuple[int, ...]

#: Returns an element of an operand, or None if it is not known.
At: TypeAlias = Callable[[Value, Index], "int | None"]
ElementRule: TypeAlias = Callable[[Node, int, Index, At], "int | None"]

#: Rules from an equation, the number of its result, and the position of an element, to the element.
element_rules: RuleTable[ElementRule] = RuleTable()

#: The number of equations that are looked back, and the number of elements of sums and constants.
_MOST_STEPS_TO_ELEMENT, _MOST_ELEMENTS_READ = 100, 1 << 12


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
                self._record(value, self._element(value, index, _MOST_STEPS_TO_ELEMENT))

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
            return int(np.asarray(array)[index]) if np.size(array) <= _MOST_ELEMENTS_READ else None
        node = value.node
        rule = None if node is None else element_rules.get(node.name)
        if node is None or rule is None:
            return None
        if not all(isinstance(size, int) for v in (value, *node.ins) for size in v.shape):
            return None

        def at(operand: Value, place: Index) -> int | None:
            number = self._element(operand, place, steps - 1)
            if node.name in BITWISE and _overflows(operand, number):
                return None  # a hash, which wraps on purpose
            self._record(operand, number)
            return number

        return rule(node, value.index, index, at)

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
def _element_of_joined(node: Node, out: int, index: Index, at: At) -> int | None:
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
def _element_of_quotient(node: Node, out: int, index: Index, at: At) -> int | None:
    operands = _operands(node, index, at)
    if operands is None or operands[1] == 0:
        return None
    quotient = _divide(*operands)
    return quotient if node.name == "div" else operands[0] - quotient * operands[1]


@rule(element_rules, "integer_pow", "pow", "shift_left")
def _element_of_power(node: Node, out: int, index: Index, at: At) -> int | None:
    operands = _operands(node, index, at)
    if operands is None:
        return None
    power = node.eqn.params["y"] if node.name == "integer_pow" else operands[1]
    if not 0 <= power < 128:
        return None
    return operands[0] << power if node.name == "shift_left" else int(operands[0] ** power)


@rule(element_rules, "clamp")
def _element_of_clamped(node: Node, out: int, index: Index, at: At) -> int | None:
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
    if count > _MOST_ELEMENTS_READ:
        return None
    return _combined(_COMBINED[node.name], [at(operand, place) for place in product(*ranges)])


def _combined(combine: Callable[[list[int]], int], numbers: list[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return combine(known) if known and len(known) == len(numbers) else None


@rule(element_rules, "dot_general")
def _inner_product(node: Node, out: int, index: Index, at: At) -> int | None:
    contracted, batch = node.eqn.params["dimension_numbers"]
    count = math.prod(node.ins[0].shape[axis] for axis in contracted[0])
    if batch[0] or len(contracted[0]) != 1 or count > _MOST_ELEMENTS_READ:
        return None
    split = len(node.ins[0].shape) - 1
    terms = list[int | None]()
    for place in range(count):
        sides = zip(node.ins, (index[:split], index[split:]), contracted, strict=True)
        pair = [at(v, (*free[: axes[0]], place, *free[axes[0] :])) for v, free, axes in sides]
        terms.append(_combined(math.prod, pair))
    return _combined(sum, terms)
