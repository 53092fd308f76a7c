"""Decide between which numbers a value is known to be, and whether it is kept away from zero.

Each open table has rules by primitive. The result of an equation without a rule may be anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxprtool.analysis.lint.graph import Node, Value
from jaxprtool.analysis.lint.linted_program import ancestors, is_same, origin
from jaxprtool.ir.basics.rules import RuleTable, rule
from jaxprtool.ir.core.equations import is_inexact

#: The relations of a result to an operand that has the same elements, up to their precision.
MOVES = ("same", "layout", "cast")

#: The number of equations to look back.
_MOST_STEPS = 40

#: The number of values before a subtrahend among which a maximum is looked for.
_MOST_VALUES = 24

#: Larger constants are not read.
_MOST_ELEMENTS = 1 << 16


class Bounds(NamedTuple):
    """The smallest and the largest number that a value may be; infinite if unknown."""

    low: float = -math.inf
    high: float = math.inf


ANY, UNIT = Bounds(), Bounds(-1.0, 1.0)

#: Returns the bounds of an operand.
Look: TypeAlias = Callable[[Value], Bounds]
BoundsRule: TypeAlias = Callable[[Node, Look], Bounds]

bounds_rules: RuleTable[BoundsRule] = RuleTable()


def is_variable(value: Value) -> bool:
    """Return True unless a value is a literal or a constant."""
    return value.literal is None and value.constant is None


def known_numbers(value: Value) -> np.ndarray | None:
    """Return the numbers of a literal or a small constant of floats; None for other values.

    The literal may be an integer that is converted: `jnp.where(mask, x, 0)`.
    """
    root = origin(value, MOVES)
    given: Any = root.literal if root.literal is not None else root.constant
    if given is None or not is_inexact(value) or np.size(given) > _MOST_ELEMENTS:
        return None
    return np.asarray(given, np.float64) if np.isrealobj(given) else None


def bounds(value: Value) -> Bounds:
    """Return the numbers between which a value is known to be: (-30, 30) for `30 * tanh(x)`."""
    seen = dict[Value, Bounds]()

    def look(value: Value, steps: int = _MOST_STEPS) -> Bounds:
        if value not in seen:
            seen[value] = ANY
            seen[value] = _bounds(value, lambda other: look(other, steps - 1) if steps else ANY)
        return seen[value]

    return look(value)


def _bounds(value: Value, look: Look) -> Bounds:
    numbers, kind = known_numbers(value), getattr(value.dtype, "kind", "")
    if numbers is not None:
        return Bounds(float(numbers.min()), float(numbers.max())) if numbers.size else UNIT
    root = origin(value, MOVES)
    if root is not value:
        return look(root)
    if kind == "b":
        return Bounds(0.0, 1.0)
    found = None if value.node is None else bounds_rules.get(value.node.name)
    if value.node is None or found is None:
        return Bounds(low=0.0) if kind == "u" and is_variable(value) else ANY
    low, high = found(value.node, look)
    return ANY if math.isnan(low) or math.isnan(high) else Bounds(low, high)


# --- bounds of functions --------------------------------------------------------------------------

#: The bounds of functions whose results are bounded for all numbers.
_IMAGES = {
    "acos": Bounds(0.0, math.pi),
    "asin": Bounds(-math.pi / 2, math.pi / 2),
    "atan": Bounds(-math.pi / 2, math.pi / 2),
    "atan2": Bounds(-math.pi, math.pi),
    "cos": UNIT,
    "cosh": Bounds(low=1.0),
    "erf": UNIT,
    "erfc": Bounds(0.0, 2.0),
    "logistic": Bounds(0.0, 1.0),
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
def _image(node: Node, look: Look) -> Bounds:
    return _IMAGES[node.name]


@rule(bounds_rules, *_GROWING)
def _growing(node: Node, look: Look) -> Bounds:
    low, high = look(node.ins[0])
    return Bounds(_GROWING[node.name](low), _GROWING[node.name](high))


@rule(bounds_rules, "ceil", "floor", "round")
def _rounded(node: Node, look: Look) -> Bounds:
    low, high = look(node.ins[0])
    return Bounds(low - 1, high + 1)


@rule(bounds_rules, "rsqrt")
def _inverse_root(node: Node, look: Look) -> Bounds:
    low, _ = look(node.ins[0])
    return Bounds(0.0, low**-0.5 if low > 0 else math.inf)


@rule(bounds_rules, "abs")
def _absolute(node: Node, look: Look) -> Bounds:
    low, high = look(node.ins[0])
    return Bounds(max(low, -high, 0.0), max(-low, high))


@rule(bounds_rules, "square")
def _square(node: Node, look: Look) -> Bounds:
    low, high = _absolute(node, look)
    return Bounds(low * low, high * high)


@rule(bounds_rules, "integer_pow")
def _power(node: Node, look: Look) -> Bounds:
    power, limits = node.eqn.params["y"], look(node.ins[0])
    if power <= 0:
        return Bounds(low=0.0) if power % 2 == 0 or limits.low >= 0 else ANY
    low, high = _absolute(node, look) if power % 2 == 0 else limits
    if max(abs(low), abs(high)) > 1e30:  # of which the power is not a float
        return Bounds(low=0.0) if low >= 0 else ANY
    return Bounds(low**power, high**power)


@rule(bounds_rules, "pow")
def _any_power(node: Node, look: Look) -> Bounds:
    return Bounds(low=0.0) if look(node.ins[0]).low >= 0 else ANY


# --- bounds of arithmetic -------------------------------------------------------------------------


@rule(bounds_rules, "neg")
def _negative(node: Node, look: Look) -> Bounds:
    low, high = look(node.ins[0])
    return Bounds(-high, -low)


@rule(bounds_rules, "add", "add_any")
def _sum(node: Node, look: Look) -> Bounds:
    one, two = map(look, node.ins)
    return Bounds(one.low + two.low, one.high + two.high)


@rule(bounds_rules, "sub")
def _difference(node: Node, look: Look) -> Bounds:
    one, two = map(look, node.ins)
    high = one.high - two.low
    return Bounds(one.low - two.high, min(high, 0.0) if _has_maximum(node.ins[1]) else high)


def _has_maximum(value: Value) -> bool:
    """Return True if a value is computed from a maximum, or by a loop, a few equations before."""
    nodes = (each.node for each in ancestors(value, _MOST_VALUES))
    return any(node is not None and ("max" in node.name or node.inner) for node in nodes)


@rule(bounds_rules, "mul")
def _product(node: Node, look: Look) -> Bounds:
    one, two = node.ins
    if one is two:
        return _square(node, look)
    limit = _normalized(node.outs[0])
    if limit is not None:
        return Bounds(-limit, limit)
    return _times(_scale(one, two, look), _scale(two, one, look))


@rule(bounds_rules, "div")
def _quotient(node: Node, look: Look) -> Bounds:
    above, below = node.ins
    if _is_share(above, below):
        return Bounds(0.0 if look(above).low >= 0 else -1.0, 1.0)
    limit = _normalized(node.outs[0])
    if limit is not None:
        return Bounds(-limit, limit)
    low, high = _scale(below, above, look)
    if low > 0 or high < 0:
        return _times(look(above), Bounds(1 / high, 1 / low))
    return _times(look(above), Bounds(low=0.0)) if low == 0 else ANY


def _scale(value: Value, other: Value, look: Look) -> Bounds:
    """Return the bounds of a factor or a divisor of another value.

    A number that the caller passes, such as a temperature, is taken to be one: it is chosen for the
    bounds of what it scales.
    """
    limits, root = look(value), origin(value, MOVES)
    is_number = root.node is None and is_variable(root) and root.elements == 1
    return Bounds(1.0, 1.0) if is_number and limits == ANY and look(other) != ANY else limits


def _times(one: Bounds, two: Bounds) -> Bounds:
    ends = [0.0 if 0.0 in (a, b) else a * b for a in one for b in two]
    return Bounds(min(ends), max(ends))


@rule(bounds_rules, "rem")
def _remainder(node: Node, look: Look) -> Bounds:
    one, two = map(look, node.ins)
    size = max(-two.low, two.high)
    return Bounds(-size if one.low < 0 else 0.0, size if one.high > 0 else 0.0)


# --- bounds of choices and reductions -------------------------------------------------------------


@rule(bounds_rules, "max")
def _maximum(node: Node, look: Look) -> Bounds:
    one, two = map(look, node.ins)
    return Bounds(max(one.low, two.low), max(one.high, two.high))


@rule(bounds_rules, "min")
def _minimum(node: Node, look: Look) -> Bounds:
    one, two = map(look, node.ins)
    return Bounds(min(one.low, two.low), min(one.high, two.high))


@rule(bounds_rules, "clamp")
def _clamped(node: Node, look: Look) -> Bounds:
    """Return the bounds of `clip`. The caller passes a limit that is not known, to be safe."""
    low, value, high = map(look, node.ins)
    top = 0.0 if high.high == math.inf else high.high
    return Bounds(max(low.low, min(value.low, high.low)), max(low.low, min(value.high, top)))


@rule(bounds_rules, "select_n")
def _choice(node: Node, look: Look) -> Bounds:
    predicate, *cases = node.ins
    if predicate.node is not None and predicate.node.name == "ne":
        one, two = predicate.node.ins
        cases = cases[:1] if one is two else cases  # `x != x` is false, unless x is NaN
    return _union([look(case) for case in cases if not is_nan(case)])


def is_nan(value: Value) -> bool:
    """Return True for the number NaN, which `jnp.var` chooses for no elements."""
    numbers = known_numbers(value)
    return numbers is not None and bool(np.isnan(numbers).all())


def _union(cases: list[Bounds]) -> Bounds:
    return Bounds(min(each.low for each in cases), max(each.high for each in cases))


@rule(bounds_rules, "concatenate", "pad", "stack")
def _joined(node: Node, look: Look) -> Bounds:
    return _union([look(value) for value in node.ins])


@rule(
    bounds_rules,
    *("cummax", "cummin", "dynamic_slice", "gather", "reduce_max", "reduce_min", "slice", "split"),
    *("top_k", "unstack"),
)
def _some_elements(node: Node, look: Look) -> Bounds:
    return look(node.ins[0])


@rule(bounds_rules, "cond")
def _branches(node: Node, look: Look) -> Bounds:
    if len(node.outs) != 1 or not node.inner:
        return ANY
    return _union([look(scope.results[0]) for scope in node.inner])


@rule(bounds_rules, "cumsum", "dot_general", "reduce_sum")
def _total(node: Node, look: Look) -> Bounds:
    """Return the bounds of a sum: those of its terms, as often as there are terms."""
    limit = _normalized(node.outs[0])
    if limit is not None:
        return Bounds(-limit, limit)
    term, axes = node.ins[0], node.eqn.params.get("axes", ())
    if node.name == "dot_general":
        ((axes, _), _) = node.eqn.params["dimension_numbers"]
        low, high = _times(look(term), look(node.ins[1]))
    else:
        axes = axes or (node.eqn.params.get("axis", 0),)
        low, high = look(term)
    count = math.prod(size if isinstance(size, int) else 1 << 20 for size in _sizes(term, axes))
    return Bounds(min(low, low * count), max(high, high * count))


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
    terms = [origin(each, MOVES).node for each in node.ins] if node.name == "add" else []
    sizes = [each for each in terms if each is not None and each.name == "abs"]
    is_own = any(origin(each.ins[0], MOVES) is value for each in sizes)
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
        norms = [_norm(each, lengths) for each in factors]
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
    found: list[tuple[Value, list[_Length]]] = []
    if node.name == "div":
        found = [(node.ins[0], _lengths(node.ins[1]))]
    elif node.name == "mul":
        one, two = node.ins
        found = [(one, _inverse_lengths(two)), (two, _inverse_lengths(one))]
    return [(value, lengths) for value, lengths in found if lengths]


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
    known = None if node is None else length_rules.get(node.name)
    return [] if known is None else list(known(node))


def _squares(value: Value) -> list[_Length]:
    node = origin(value, MOVES).node
    if node is None:
        return []
    vector = squared(node)
    known = square_rules.get(node.name)
    if vector is not None:
        return [(vector, 1.0)]
    return [] if known is None else list(known(node))


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
    return [length for each in node.ins for length in _lengths(each)]


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
    return [(each, factor * root) for each, factor in _squares(node.ins[0]) if root]


@rule(square_rules, "add")
def _square_and_epsilon(node: Node) -> list[_Length]:
    return _any_square(node) if any(map(is_positive_number, node.ins)) else []


@rule(square_rules, "clamp", "max", "select_n")
def _any_square(node: Node) -> list[_Length]:
    return [square for each in node.ins for square in _squares(each)]


def _product_of(
    node: Node, parts: Callable[[Value], list[_Length]], scale: Callable[[float], float]
) -> list[_Length]:
    """Return the norms in a product of norms and numbers; nothing if it has other factors."""
    found, factor = list[_Length](), 1.0
    for value in node.ins:
        numbers, own = known_numbers(value), parts(value)
        root = origin(value, MOVES)
        if own:
            found += own
        elif numbers is not None and numbers.size and numbers.min() > 0:
            factor *= scale(float(numbers.min()))
        elif root.node is not None or not is_variable(root) or root.elements > 1:
            return []
    return [(vector, size * factor) for vector, size in found]


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
        return not is_variable(value)
    known = guarded_rules.get(value.node.name)
    return not value.node.ins or (known is not None and known(value.node, _MOST_STEPS))


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
    compared = {origin(each, MOVES) for each in ancestors(predicate, _MOST_VALUES)}
    return any(origin(each, MOVES) in compared for each in cases if is_variable(each))


def _has_zero(value: Value) -> bool:
    numbers = known_numbers(value)
    return numbers is not None and not numbers.all()


@rule(guarded_rules, "add", "add_any")
def _has_epsilon(node: Node, steps: int) -> bool:
    return any(map(is_positive_number, node.ins))
