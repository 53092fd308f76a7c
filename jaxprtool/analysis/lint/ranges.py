"""Decide if the numbers in a value are known not to be negative, not to be large, and so on.

Each open table has rules by primitive: functions from an equation, and the number of equations to
look back, to a bool. The result of an equation without a rule may be anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from jaxprtool.analysis.lint.graph import Node, Value
from jaxprtool.analysis.lint.linted_program import ancestors, origin
from jaxprtool.ir.basics.rules import RuleTable, rule
from jaxprtool.ir.core.equations import is_inexact

#: The relations of a result to an operand that has the same elements, up to their precision.
MOVES = ("same", "layout", "cast")

RangeRule: TypeAlias = Callable[[Node, int], bool]

not_negative_rules: RuleTable[RangeRule] = RuleTable()
bounded_rules: RuleTable[RangeRule] = RuleTable()

#: The number of equations to look back.
_MOST_STEPS = 8

#: The number of values before a subtrahend among which a maximum is looked for.
_MOST_VALUES = 24

#: Larger constants are not read.
_MOST_ELEMENTS = 1 << 16


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


def is_not_negative(value: Value, steps: int = _MOST_STEPS) -> bool:
    """Return True if a value is known not to be negative: a square, a sum of squares, and so on."""
    numbers = known_numbers(value)
    value = origin(value, MOVES)
    if numbers is not None:
        return bool((numbers >= 0).all())
    if value.node is None or not steps:
        return False
    known = not_negative_rules.get(value.node.name)
    return known is not None and known(value.node, steps - 1)


def is_bounded_above(value: Value, steps: int = _MOST_STEPS) -> bool:
    """Return True if a value is known not to be large, as is `x - max(x)`."""
    value = origin(value, MOVES)
    if not is_variable(value):
        return True
    if value.node is None or not steps:
        return False
    known = bounded_rules.get(value.node.name)
    return known is not None and known(value.node, steps - 1)


# --- not negative ---------------------------------------------------------------------------------


@rule(not_negative_rules, "abs", "cosh", "erfc", "exp", "exp2", "logistic", "sqrt", "square")
def _always(node: Node, steps: int) -> bool:
    return True


@rule(not_negative_rules, "integer_pow")
def _even_power(node: Node, steps: int) -> bool:
    return bool(node.eqn.params["y"] % 2 == 0) or is_not_negative(node.ins[0], steps)


@rule(not_negative_rules, "mul")
def _product(node: Node, steps: int) -> bool:
    return node.ins[0] is node.ins[1] or all(is_not_negative(v, steps) for v in node.ins)


@rule(not_negative_rules, "add", "add_any", "div", "min", "reduce_max", "reduce_min", "reduce_sum")
def _all_operands(node: Node, steps: int) -> bool:
    return all(is_not_negative(v, steps) for v in node.ins)


@rule(not_negative_rules, "max")
def _any_operand(node: Node, steps: int) -> bool:
    return any(is_not_negative(v, steps) for v in node.ins)


@rule(not_negative_rules, "select_n")
def _all_cases(node: Node, steps: int) -> bool:
    return all(is_not_negative(v, steps) for v in node.ins[1:])


# --- bounded above --------------------------------------------------------------------------------


@rule(bounded_rules, "clamp", "cos", "erf", "erfc", "logistic", "sign", "sin", "tanh")
def _is_small(node: Node, steps: int) -> bool:
    return True


@rule(bounded_rules, "neg")
def _negative(node: Node, steps: int) -> bool:
    return is_not_negative(node.ins[0])


@rule(bounded_rules, "sub")
def _difference(node: Node, steps: int) -> bool:
    first, second = node.ins
    return _has_maximum(second) or (is_bounded_above(first, steps) and is_not_negative(second))


@rule(bounded_rules, "min")
def _minimum(node: Node, steps: int) -> bool:
    return any(is_bounded_above(v, steps) for v in node.ins)


@rule(bounded_rules, "add", "add_any", "max")
def _sum(node: Node, steps: int) -> bool:
    return all(is_bounded_above(v, steps) for v in node.ins)


@rule(bounded_rules, "select_n")
def _choice(node: Node, steps: int) -> bool:
    return all(is_bounded_above(v, steps) for v in node.ins[1:])


@rule(bounded_rules, "mul", "div")
def _scaled(node: Node, steps: int) -> bool:
    """Return True if one operand is not negative, and the other not positive."""
    return sorted(map(_sign, node.ins)) == [-1, 1]


def _sign(value: Value) -> int:
    """Return 1 if a value is known not to be negative, -1 if not to be positive, else 0."""
    numbers = known_numbers(value)
    value = origin(value, MOVES)
    if numbers is not None and (numbers <= 0).all():
        return -1
    if value.node is not None and value.node.name == "neg":
        return -_sign(value.node.ins[0])
    return 1 if is_not_negative(value) else 0


def _has_maximum(value: Value) -> bool:
    """Return True if a value is computed from a maximum, or by a loop, a few equations before."""
    nodes = (each.node for each in ancestors(value, _MOST_VALUES))
    return any(node is not None and ("max" in node.name or node.inner) for node in nodes)


# --- guarded --------------------------------------------------------------------------------------

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


# --- derivatives ----------------------------------------------------------------------------------

#: Primitives of floats whose derivative is zero.
step_rules: RuleTable[RangeRule] = RuleTable()


@rule(step_rules, "ceil", "floor", "round", "sign")
def _is_step(node: Node, steps: int) -> bool:
    return True
