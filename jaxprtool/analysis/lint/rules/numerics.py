"""Expressions that overflow, or whose gradients are NaN."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxprtool.analysis.lint.findings import Found
from jaxprtool.analysis.lint.graph import Node, Value
from jaxprtool.analysis.lint.linted_program import LintedProgram, ancestors, ends, origin
from jaxprtool.analysis.lint.table import lint_rule
from jaxprtool.ir.core.equations import is_inexact

#: What passes on the elements of a value, whatever their precision.
_MOVES = ("same", "layout", "cast")

_BAD_SOFTMAX = """
    import jax.numpy as jnp
    import jaxprtool

    @jaxprtool.example("f32[8,64]")
    def f(scores):
        weights = jnp.exp(scores)  # JT701
        return weights / weights.sum(-1, keepdims=True)
"""

_GOOD_SOFTMAX = """
    import jax
    import jaxprtool

    @jaxprtool.example("f32[8,64]")
    def f(scores):
        return jax.nn.softmax(scores)
"""

_BAD_WHERE = """
    import jax.numpy as jnp
    import jaxprtool

    @jaxprtool.example("f32[64]")
    def f(x):
        return jnp.where(x > 0, jnp.log(x), 0.0).sum()  # JT702
"""

_GOOD_WHERE = """
    import jax.numpy as jnp
    import jaxprtool

    @jaxprtool.example("f32[64]")
    def f(x):
        safe = jnp.where(x > 0, x, 1.0)
        return jnp.where(x > 0, jnp.log(safe), 0.0).sum()
"""

_BAD_LOG = """
    import jax, jax.numpy as jnp
    import jaxprtool

    @jaxprtool.example("f32[8,64]")
    def f(scores):
        return -jnp.log(jax.nn.softmax(scores)).mean()  # JT703
"""

_GOOD_LOG = """
    import jax
    import jaxprtool

    @jaxprtool.example("f32[8,64]")
    def f(scores):
        return -jax.nn.log_softmax(scores).mean()
"""

_BAD_DISTANCE = """
    import jax.numpy as jnp
    import jaxprtool

    @jaxprtool.example("f32[16,3]")
    def f(x):
        difference = x[:, None] - x[None, :]
        return jnp.sqrt((difference**2).sum(-1)).sum()  # JT704
"""

_GOOD_DISTANCE = """
    import jax.numpy as jnp
    import jaxprtool

    @jaxprtool.example("f32[16,3]")
    def f(x):
        difference = x[:, None] - x[None, :]
        square = (difference**2).sum(-1)
        is_zero = square == 0
        return jnp.where(is_zero, 0.0, jnp.sqrt(jnp.where(is_zero, 1.0, square))).sum()
"""


def _is_left_out(program: LintedProgram, node: Node) -> bool:
    """Return True for equations of backward passes, of custom derivatives, and of libraries."""
    return node.is_backward or node.has_rule or not program.is_own(node)


# --- exp ------------------------------------------------------------------------------------------


@lint_rule("JT701", "exp-without-max", bad=_BAD_SOFTMAX, good=_GOOD_SOFTMAX, kind="wrong")
def exp_without_max(program: LintedProgram) -> Iterator[Found]:
    """A softmax or the logarithm of a sum of exponentials does not subtract the maximum first.

    In f32, exp overflows above 88, so that the softmax is NaN; if all scores are below -103, all
    are 0, and 0 is divided by 0.
    """
    for node in program.of("exp"):
        if _is_left_out(program, node) or _is_bounded_above(node.ins[0]):
            continue
        sums = [r for _, r in ends(node.outs[0], _MOVES) if r is not None and r.name == "reduce_sum"]
        if any(_normalizes(each, node) for each in sums):
            limit = int(np.log(float(_largest(node.outs[0]))))
            yield Found(
                node,
                "the exponentials of a softmax or logsumexp overflow: no maximum is subtracted",
                "use jax.nn.softmax or jax.nn.logsumexp, or subtract the maximum",
                f"NaN or infinity for scores above {limit}",
            )


def _largest(value: Value) -> float:
    import jax.numpy as jnp

    return float(jnp.finfo(value.dtype).max)


def _normalizes(total: Node, exp: Node) -> bool:
    """Return True if a sum divides its own exponentials, or if its logarithm is taken."""
    for value, reader in ends(total.outs[0], _MOVES):
        if reader is not None and reader.name == "log":
            return True
        if reader is not None and reader.name == "div" and reader.ins[1] is value:
            if origin(reader.ins[0], _MOVES) is exp.outs[0]:
                return True
    return False


def _is_bounded_above(value: Value, depth: int = 8) -> bool:
    """Return True if a value is known not to be large: what a maximum is taken off, and so on."""
    value = origin(value, _MOVES)
    if value.literal is not None or value.constant is not None:
        return True
    node = value.node
    if node is None or depth == 0:
        return False
    if node.name == "sub":
        return _has_maximum(node.ins[1]) or (
            _is_bounded_above(node.ins[0], depth - 1) and _is_not_negative(node.ins[1])
        )
    if node.name == "neg":
        return _is_not_negative(node.ins[0])
    if node.name in _LEAST_OPERAND:
        return any(_is_bounded_above(each, depth - 1) for each in node.ins)
    if node.name in _ALL_OPERANDS:
        signs = [_sign(each) for each in node.ins]
        if node.traits.bilinear or node.name == "mul" or node.name == "div":
            return sorted(signs) == [-1, 1]
        return all(_is_bounded_above(each, depth - 1) for each in node.ins[-2:])
    return node.traits.finite_between is None and _is_small(node)


#: A minimum is bounded if one operand is; a sum, a product, a choice if all are.
_LEAST_OPERAND = frozenset(["min"])
_ALL_OPERANDS = frozenset("add mul div max select_n".split())


def _is_small(node: Node) -> bool:
    """Return True for functions with values of at most 1, and for clipped values."""
    return node.name == "clamp" or node.name.startswith(("tanh", "logistic", "sin", "cos", "erf"))


def _has_maximum(value: Value) -> bool:
    """Return True if a value is computed from a maximum, a few equations before."""
    nodes = (each.node for each in ancestors(value, 24))
    return any(node is not None and "max" in node.name for node in nodes) or any(
        each.node is not None and each.node.inner for each in ancestors(value, 24)
    )


def _sign(value: Value) -> int:
    """Return 1 if a value is known not to be negative, -1 if not to be positive, else 0."""
    value = origin(value, _MOVES)
    given = value.literal if value.literal is not None else value.constant
    if given is not None and np.size(given) < 1 << 16 and is_inexact(value):
        numbers = np.asarray(given, np.float64)
        return 1 if (numbers >= 0).all() else -1 if (numbers <= 0).all() else 0
    if value.node is not None and value.node.name == "neg":
        return -_sign(value.node.ins[0])
    return 1 if _is_not_negative(value) else 0


def _is_not_negative(value: Value, depth: int = 8) -> bool:
    """Return True if a value is known not to be negative: a square, a sum of squares, and so on."""
    value = origin(value, _MOVES)
    node = value.node
    if node is None:
        given = value.literal
        return given is not None and bool(np.all(np.asarray(given) >= 0))
    if depth == 0:
        return False
    if node.name == "integer_pow":
        return node.eqn.params["y"] % 2 == 0
    if node.name == "mul" and node.ins[0] is node.ins[1]:
        return True
    if node.name.startswith(("square", "abs", "exp", "sqrt", "logistic")):
        return True
    if node.name.startswith(("add", "mul", "div", "reduce_sum", "reduce_max")):
        return all(_is_not_negative(each, depth - 1) for each in node.ins)
    return False


# --- where ----------------------------------------------------------------------------------------


@lint_rule("JT702", "single-where", bad=_BAD_WHERE, good=_GOOD_WHERE, kind="wrong")
def single_where(program: LintedProgram) -> Iterator[Found]:
    """A `where` guards a logarithm, a root or a quotient, but its operand is not guarded.

    The value is right, but the gradient is NaN where the guard is false: the zero that flows back
    through the choice is multiplied by an infinite derivative. It is reported in programs that have
    a gradient, and in functions that return one real number.
    """
    if not (program.has_backward or program.is_loss):
        return
    for select in program.of("select_n"):
        if _is_left_out(program, select) or any(map(_is_nan, select.ins[1:])):
            continue
        if not _is_stated(program, select):
            continue
        for case in select.ins[1:]:
            node = origin(case, _MOVES).node
            risky = None if node is None else _risky(node)
            if node is None or risky is None or node.has_rule or not is_inexact(risky):
                continue
            if _is_guarded(risky) or not _depends(select.ins[0], risky):
                continue
            yield Found(
                node,
                f"where guards this {node.name}, but not its operand: its gradient is NaN there",
                "choose a safe operand by a where before it as well (the double where)",
                "a gradient of NaN where the guard is false",
            )


def _is_stated(program: LintedProgram, select: Node) -> bool:
    """Return True if the source states a choice, which JAX's own functions have inside too."""
    return any(word in program.expression(select) for word in ("where(", "select("))


def _risky(node: Node) -> Value | None:
    """Return the operand at some of whose values a derivative is infinite, or None."""
    if node.name == "div":
        return node.ins[1] if _varies(node.ins[1]) else None
    between = node.traits.finite_between
    if between is None or not node.traits.elementwise or not is_inexact(node.outs[0]):
        return None
    return node.ins[0]


def _is_nan(value: Value) -> bool:
    """Return True for the number NaN, which `jnp.var` chooses for no elements."""
    given = origin(value, _MOVES).literal
    return given is not None and is_inexact(value) and bool(np.isnan(given).all())


def _varies(value: Value) -> bool:
    """Return True if a value is computed from arguments, and not from numbers alone."""
    return any(each.node is None and _is_variable(each) for each in ancestors(value))


def _is_variable(value: Value) -> bool:
    return value.literal is None and value.constant is None


def _is_guarded(value: Value) -> bool:
    """Return True if a value cannot be zero: it is chosen, clipped, or has something added."""
    value = origin(value, _MOVES)
    node = value.node
    if node is None:
        return not _is_variable(value)
    if node.name in ("select_n", "clamp") or "max" in node.name:
        return True
    if node.name.startswith("add"):
        return any(_is_positive_number(each) for each in node.ins)
    return node.name.startswith(("exp", "logistic")) or not node.ins


def _is_positive_number(value: Value) -> bool:
    given = origin(value, _MOVES).literal
    return given is not None and bool(np.all(np.asarray(given) > 0))


def _depends(predicate: Value, operand: Value) -> bool:
    """Return True if a predicate compares the operand, or what the operand is computed from."""
    roots = {origin(each, _MOVES) for each in ancestors(predicate, 16)}
    root = origin(operand, _MOVES)
    if root in roots:
        return True
    # A distance is guarded by the sum of squares that it is the root of, and so on.
    before = root.node.ins if root.node is not None and root.node.traits.elementwise else ()
    return any(origin(each, _MOVES) in roots and _is_variable(each) for each in before)


# --- log ------------------------------------------------------------------------------------------


@lint_rule("JT703", "log-of-softmax", bad=_BAD_LOG, good=_GOOD_LOG, kind="wrong")
def log_of_softmax(program: LintedProgram) -> Iterator[Found]:
    """The logarithm of a softmax or a sigmoid is taken.

    Small probabilities are rounded to 0, whose logarithm is minus infinity, and whose gradient is
    NaN. `log_softmax` and `log_sigmoid` are exact there.
    """
    for node in program.of("log"):
        if _is_left_out(program, node):
            continue
        what = _probability(node.ins[0])
        if what is not None:
            yield Found(
                node,
                f"this is the logarithm of a {what}: minus infinity for small probabilities",
                f"use jax.nn.log_{what}" + (", or of -x for 1 - p" if what == "sigmoid" else ""),
                "an infinite value, and a gradient of NaN",
            )


def _probability(value: Value) -> str | None:
    """Return the function that a value is a probability of: "softmax" or "sigmoid"; else None."""
    node = origin(value, _MOVES).node
    if node is None:
        return None
    if node.name == "logistic":
        return "sigmoid"
    if node.name == "sub" and _is_positive_number(node.ins[0]):
        inner = origin(node.ins[1], _MOVES).node
        return "sigmoid" if inner is not None and inner.name == "logistic" else None
    if node.name != "div":
        return None
    above, below = (origin(each, _MOVES).node for each in node.ins)
    if above is None or below is None or above.name != "exp" or below.name != "reduce_sum":
        return None
    return "softmax" if origin(below.ins[0], _MOVES).node is above else None


@lint_rule("JT704", "root-of-zero", bad=_BAD_DISTANCE, good=_GOOD_DISTANCE, kind="wrong")
def roots_of_zero(program: LintedProgram) -> Iterator[Found]:
    """Distances between all pairs of the same points: that of each point to itself is zero.

    The derivative of the root at zero is infinite, and so the gradient is NaN. It is reported in
    programs that have a gradient, and in functions that return one real number.
    """
    if not (program.has_backward or program.is_loss):
        return
    for node in program.of("sqrt"):
        total = origin(node.ins[0], _MOVES).node
        if _is_left_out(program, node) or total is None or total.name != "reduce_sum":
            continue
        difference = _squared(origin(total.ins[0], _MOVES).node)
        if difference is None or difference.node is None or difference.node.name != "sub":
            continue
        one, two = (origin(each, _MOVES) for each in difference.node.ins)
        if one is two and _is_variable(one):
            yield Found(
                node,
                "this root is of zero: the distance of each point to itself",
                "choose a safe operand by a where before and after the root (the double where)",
                "a gradient of NaN",
            )


def _squared(node: Node | None) -> Value | None:
    """Return the value that an equation squares, or None."""
    if node is None:
        return None
    is_power = node.name == "integer_pow" and node.eqn.params["y"] == 2
    is_product = node.name == "mul" and node.ins[0] is node.ins[1]
    if node.name == "square" or is_power or is_product:
        return origin(node.ins[0], ("same", "cast"))
    return None
