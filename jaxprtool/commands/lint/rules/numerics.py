"""Expressions that overflow, and gradients that are NaN or zero."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

import jax
import numpy as np
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.commands.lint.graph import (
    LintedProgram,
    Node,
    Value,
    ancestors,
    enclosing_equations,
    ends,
    has_derivative,
    is_same,
    origin,
)
from jaxprtool.commands.lint.lint import Found, lint_rule
from jaxprtool.commands.lint.ranges import (
    MOVES,
    bounds,
    is_guarded,
    is_nan,
    is_positive_number,
    is_zero,
    known_numbers,
    may_vary,
    squared,
)
from jaxprtool.commands.why.gradients import (
    NO_DERIVATIVE,
    GradientFlow,
    Stop,
    StopReason,
    call_lines,
    gradient_flow,
    losses_by_lines,
)
from jaxprtool.ir.documents import shell_word, some
from jaxprtool.ir.equations import is_inexact, part_of, type_of
from jaxprtool.ir.program import Program, covering, path_parts
from jaxprtool.ir.rules import RuleTable, rule
from jaxprtool.ir.scopes import is_backward, is_differentiated
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import JaxprEqn

# --- numerics -------------------------------------------------------------------------------------
# Expressions that overflow, or whose gradients are NaN.

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


def _in_forward(program: LintedProgram, *primitives: str) -> Iterator[Node]:
    """Yield the equations of some primitives in the forward part, of the user's own lines.

    If only the gradient is a result, the last equations of the forward part are dead.
    """
    for node in program.every if program.has_backward else program.nodes:
        if node.name in primitives and not _is_left_out(program, node):
            yield node


def _is_left_out(program: LintedProgram, node: Node) -> bool:
    """Return True for equations of backward passes, of custom derivatives, and of libraries."""
    return node.is_backward or node.has_rule or not program.is_own(node)


# --- exp ------------------------------------------------------------------------------------------


@lint_rule("JT701", "exp-without-max", bad=_BAD_SOFTMAX, good=_GOOD_SOFTMAX, kind="wrong")
def exp_without_max(program: LintedProgram) -> Iterator[Found]:
    """A softmax or the logarithm of a sum of exponentials does not subtract the maximum first.

    In f32, exp overflows above 88, and the softmax is NaN. If all scores are below -103, all
    exponentials are 0, and the softmax divides 0 by 0.
    """
    for node in _in_forward(program, "exp"):
        limit = float(np.log(float(jnp.finfo(node.outs[0].dtype).max)))
        if bounds(node.ins[0]).high <= limit:
            continue
        readers = [reader for _, reader in ends(node.outs[0], MOVES, dead=program.has_backward)]
        sums = [reader for reader in readers if reader is not None and reader.name == "reduce_sum"]
        if any(_normalizes(total, node) for total in sums):
            yield Found(
                node,
                "the exponentials of a softmax or logsumexp overflow: no maximum is subtracted",
                "use jax.nn.softmax or jax.nn.logsumexp, or subtract the maximum",
                f"NaN or infinity for scores above {int(limit)}",
            )


def _normalizes(total: Node, exp: Node) -> bool:
    """Return True if a sum divides its own exponentials, or if its logarithm is taken."""
    for value, reader in ends(total.outs[0], MOVES, dead=True):
        if reader is not None and reader.name == "log":
            return True
        if reader is None or reader.name != "div" or reader.ins[1] is not value:
            continue
        if is_same(reader.ins[0], exp.outs[0]):
            return True
    return False


# --- where ----------------------------------------------------------------------------------------


@lint_rule("JT702", "single-where", bad=_BAD_WHERE, good=_GOOD_WHERE, kind="wrong")
def single_where(program: LintedProgram) -> Iterator[Found]:
    """A `where` guards the result of a logarithm, a root or a quotient, but not its operand.

    The value is right, but the gradient is NaN where the guard is false: the backward pass
    multiplies a zero cotangent by an infinite derivative. The rule checks programs that have a
    gradient, and functions that return one real number.
    """
    for select in _in_forward(program, "select_n") if program.differentiates else ():
        if any(map(is_nan, select.ins[1:])) or not _is_stated(program, select):
            continue
        for node in _computed_for(select):
            risky = _risky(node)
            if risky is None or node.has_rule or not is_inexact(risky):
                continue
            if is_guarded(risky) or not _depends(select.ins[0], risky):
                continue
            if not program.is_differentiated(node) or _is_masked_mean(node):
                continue
            yield Found(
                node,
                f"a where guards the result of this {node.name}, but not its operand",
                "add a where that replaces the operand by a safe number (the double where)",
                "a gradient of NaN where the guard is false",
            )


def _computed_for(select: Node, most: int = 8) -> list[Node]:
    """Return the elementwise equations that compute the cases of a select, the last ones first."""
    todo = [origin(case, MOVES).node for case in select.ins[1:]]
    nodes = dict[Node, None]()
    for node in todo:
        if node is None or node.name == "select_n" or len(nodes) == most or node in nodes:
            continue
        nodes[node] = None
        if node.traits.elementwise:
            todo += [origin(value, MOVES).node for value in node.ins]
    return [*nodes]


def _is_stated(program: LintedProgram, select: Node) -> bool:
    """Return True if the user's source has the select, and not only a function of JAX."""
    return any(word in program.expression(select) for word in ("where(", "select("))


def _risky(node: Node) -> Value | None:
    """Return the operand if a derivative is infinite at some of its values, or None."""
    if node.name == "div":
        low, high = bounds(node.ins[1])
        return node.ins[1] if low <= 0 <= high and _varies(node.ins[1]) else None
    between = node.traits.finite_between
    if between is None or not node.traits.elementwise or not is_inexact(node.outs[0]):
        return None
    low, high = bounds(node.ins[0])
    is_inside = between[0] < low and (high < between[1] or between[1] == np.inf)
    return None if is_inside else node.ins[0]


def _is_masked_mean(node: Node) -> bool:
    """Return True for a sum of masked values, divided by a value computed from the mask.

    If the mask is empty, the gradient of the quotient is NaN, but the mask of the sum stops it.
    """
    if node.name != "div":
        return False
    total, count = (origin(operand, MOVES).node for operand in node.ins)
    if total is None or count is None or total.name != "reduce_sum":
        return False
    chosen = origin(total.ins[0], MOVES).node
    if chosen is None or chosen.name != "select_n":
        return False
    masks = {origin(ancestor, MOVES) for ancestor in ancestors(node.ins[1])}
    return origin(chosen.ins[0], MOVES) in masks


def _varies(value: Value) -> bool:
    """Return True if a value is computed from arguments, and not from numbers alone."""
    return any(ancestor.node is None and may_vary(ancestor) for ancestor in ancestors(value))


def _depends(predicate: Value, operand: Value) -> bool:
    """Return True if a predicate compares the operand, or a value that it is computed from."""
    roots = {origin(ancestor, MOVES) for ancestor in ancestors(predicate, 16)}
    root = origin(operand, MOVES)
    if root in roots:
        return True
    # A distance is guarded by the sum of squares that it is the root of, and so on.
    sources = root.node.ins if root.node is not None and root.node.traits.elementwise else ()
    return any(origin(source, MOVES) in roots and may_vary(source) for source in sources)


# --- log ------------------------------------------------------------------------------------------


@lint_rule("JT703", "log-of-softmax", bad=_BAD_LOG, good=_GOOD_LOG, kind="wrong")
def log_of_softmax(program: LintedProgram) -> Iterator[Found]:
    """A function takes the logarithm of a softmax or a sigmoid.

    Small probabilities are rounded to 0. Their logarithm is minus infinity, and its gradient NaN.
    `log_softmax` and `log_sigmoid` are accurate there.
    """
    for node in _in_forward(program, "log", "log1p", "log2"):
        value = node.ins[0]
        what = _share_below_one(value) if node.name == "log1p" else _probability(value)
        if what is not None:
            yield Found(
                node,
                f"this is the logarithm of a {what}: minus infinity for small probabilities",
                f"use jax.nn.log_{what}" + (", or of -x for 1 - p" if what == "sigmoid" else ""),
                "an infinite value, and a gradient of NaN",
            )


#: The relations of a result to an operand of which it has some elements.
_PARTS = (*MOVES, "part")


def _probability(value: Value) -> str | None:
    """Return the function that a value is a probability of: "softmax" or "sigmoid"; else None."""
    value = _picked(value)
    node = value.node
    if node is None:
        return None
    if node.name == "logistic":
        return "sigmoid"
    if node.name == "sub" and is_positive_number(node.ins[0]):
        return _share_below_one(node.ins[1], sign=1)
    if node.name != "div":
        return None
    above, below = _picked(node.ins[0]), _picked(node.ins[1])
    if below.node is None:
        return None
    if is_positive_number(above) and below.node.name == "add":
        terms = [_picked(operand).node for operand in below.node.ins]
        has_exponential = any(term is not None and term.name == "exp" for term in terms)
        return (
            "sigmoid" if has_exponential and any(map(is_positive_number, below.node.ins)) else None
        )
    if above.node is None or above.node.name != "exp" or below.node.name != "reduce_sum":
        return None
    summed = origin(below.node.ins[0], MOVES)
    if summed is above:
        return "softmax"
    if summed.node is None or summed.node.name != "exp":
        return None
    scores, picked = _picked(summed.node.ins[0]), _picked(above.node.ins[0])
    return "softmax" if is_same(scores, picked) else None


def _share_below_one(value: Value, sign: int = -1) -> str | None:
    """Return "sigmoid" if a value is that of a probability, or minus it, which is added to one."""
    node = _picked(value).node
    if sign < 0:
        node = _picked(node.ins[0]).node if node is not None and node.name == "neg" else None
    return "sigmoid" if node is not None and node.name == "logistic" else None


def _picked(value: Value, most: int = 16) -> Value:
    """Return the value that elements are picked from: by indices, or by a product with a mask."""
    for _ in range(most):
        value = origin(value, _PARTS)
        node = value.node
        if node is not None and node.name == "reduce_sum":
            node = origin(node.ins[0], MOVES).node
        elif node is None or not node.traits.bilinear:
            break
        chosen: list[Value] = []
        if node is not None and node.name == "select_n":
            mask, *cases = node.ins
            chosen = [case for case in cases if not is_zero(case) and _is_one_hot(mask)]
        elif node is not None and (node.name == "mul" or node.traits.bilinear):
            pairs = (node.ins, node.ins[::-1])
            chosen = [factor for factor, other in pairs if _is_one_hot(other)]
        if not chosen:
            break
        value = chosen[0]
    return value


def _is_one_hot(value: Value) -> bool:
    """Return True for a comparison with the positions along an axis, as `jax.nn.one_hot` is."""
    node = origin(value, MOVES).node
    if node is None or node.name != "eq":
        return False
    nodes = (origin(operand, MOVES).node for operand in node.ins)
    return any(maker is not None and maker.name == "iota" for maker in nodes)


@lint_rule("JT704", "root-of-zero", bad=_BAD_DISTANCE, good=_GOOD_DISTANCE, kind="wrong")
def roots_of_zero(program: LintedProgram) -> Iterator[Found]:
    """A function takes the root of squared distances between all pairs of the same points.

    The distance of a point to itself is zero. The derivative of the root at zero is infinite, so
    the gradient is NaN. The rule checks programs that have a gradient, and functions that return
    one real number.
    """
    for node in _in_forward(program, *root_rules) if program.differentiates else ():
        if not root_rules[node.name](node) or not program.is_differentiated(node):
            continue
        total = _above_zero(node.ins[0])
        if total is not None and (_is_sum_of_differences(total) or _is_expanded(total)):
            yield Found(
                node,
                "this is a root of zero: the distance of each point to itself",
                "add a where before the root and one after it (the double where)",
                "a gradient of NaN",
            )


#: Rules that decide if the derivative of an equation is infinite where its operand is zero.
root_rules: RuleTable[Callable[[Node], bool]] = RuleTable()


@rule(root_rules, "rsqrt", "sqrt")
def _is_root(node: Node) -> bool:
    return True


@rule(root_rules, "pow")
def _is_fraction(node: Node) -> bool:
    powers = known_numbers(node.ins[1])
    return powers is not None and bool(((powers > 0) & (powers < 1)).all())


def _above_zero(value: Value, most: int = 8) -> Node | None:
    """Return the equation that computes a value, before negative numbers are replaced by zero."""
    for _ in range(most):
        node = origin(value, MOVES).node
        if node is None:
            return None
        if node.name == "abs":
            value = node.ins[0]
        elif node.name == "clamp" and is_zero(node.ins[0]):
            value = node.ins[1]
        elif node.name == "max" and any(map(is_zero, node.ins)):
            value = next((operand for operand in node.ins if not is_zero(operand)), node.ins[0])
        else:
            return node
    return None


def _is_sum_of_differences(total: Node) -> bool:
    """Return True for the sum of the squared differences of all pairs of the same points."""
    difference = None
    if total.name == "reduce_sum":
        difference = squared(origin(total.ins[0], MOVES).node)
    elif total.traits.bilinear and is_same(total.ins[0], total.ins[1]):
        difference = total.ins[0]
    if difference is None or difference.node is None or difference.node.name != "sub":
        return False
    one, two = (origin(operand, MOVES) for operand in difference.node.ins)
    return one is two and may_vary(one) and total.outs[0].elements > _points(one, difference)


def _points(points: Value, difference: Value) -> int:
    """Return the number of points, given all their differences."""
    return points.elements // max(difference.shape[-1] if difference.shape else 1, 1)


def _is_expanded(total: Node) -> bool:
    """Return True for `x² + y² - 2xy` of all pairs of the same points, by their Gram matrix."""
    terms, todo = list[Node](), [total.outs[0]]
    while todo:
        node = origin(todo.pop(), MOVES).node
        if node is None or len(terms) > 2:
            return False
        operands = term_rules[node.name](node) if node.name in term_rules else None
        if operands is None:
            terms.append(node)
        else:
            todo += operands
    products = [node for node in terms if node.name == "dot_general" and _is_gram(node)]
    norms = [node.outs[0] for node in terms if node not in products]
    return len(products) == 1 and len(norms) == 2 and is_same(norms[0], norms[1])


def _is_gram(product: Node) -> bool:
    """Return True for the product of a value and itself, up to a number."""
    operands = []
    for value in product.ins:
        node = origin(value, MOVES).node
        scaled = node.ins if node is not None and node.name == "mul" else ()
        others = [factor for factor in scaled if known_numbers(factor) is None]
        operands.append(others[0] if len(others) == 1 else value)
    return is_same(operands[0], operands[1])


#: Rules that return the terms of a sum, up to numbers; None if there are none.
term_rules: RuleTable[Callable[[Node], list[Value] | None]] = RuleTable()


@rule(term_rules, "add", "neg", "sub")
def _terms(node: Node) -> list[Value] | None:
    return [*node.ins]


@rule(term_rules, "mul")
def _scaled_term(node: Node) -> list[Value] | None:
    others = [factor for factor in node.ins if known_numbers(factor) is None]
    return others if len(others) == 1 else None


# --- fractions ------------------------------------------------------------------------------------
# Fractions that are rounded to whole numbers.

_BAD_FRACTION = """
    import jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("i32[]", "f32[64]", "f32[64]")
    def f(count, w, gradient):
        rate = 0.1 * (1 - count // 1000)  # JT804
        return w - rate * gradient
"""

_GOOD_FRACTION = """
    import jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("i32[]", "f32[64]", "f32[64]")
    def f(count, w, gradient):
        rate = 0.1 * (1 - count / 1000)
        return w - rate * gradient
"""


@lint_rule("JT804", "floored-fraction", bad=_BAD_FRACTION, good=_GOOD_FRACTION, kind="wrong")
def floored_fractions(program: LintedProgram) -> Iterator[Found]:
    """A fraction of a count is rounded to a whole number, and 1 is its bound or what it is left of.

    `1 - count // steps` is 1 until `count` reaches `steps`, and `minimum(count // steps, 1)` is 0:
    a schedule that is meant to be linear is constant. Only scalars that a float is computed from
    are reported, and powers of such numbers, as in a decay by steps, are not.
    """
    for node in program.where(lambda node: node.name in fraction_rules):
        rounded = fraction_rules[node.name](node)
        if node.outs[0].shape or rounded is None or not _is_rounded(rounded):
            continue
        if _is_rounded(node.outs[0]) or not _gives_float(node.outs[0]):
            continue
        yield Found(
            node,
            "a fraction is rounded to a whole number, so that this is constant until it reaches 1",
            "divide with / instead of //, and do not round",
            "a schedule without its slope",
        )


#: Rules that return what 1 bounds from above, or what is subtracted from 1; else None.
fraction_rules: RuleTable[Callable[[Node], Value | None]] = RuleTable()


@rule(fraction_rules, "sub")
def _left_of_one(node: Node) -> Value | None:
    return node.ins[1] if _is_one(node.ins[0]) else None


@rule(fraction_rules, "min")
def _at_most_one(node: Node) -> Value | None:
    return next((v for v, bound in (node.ins, node.ins[::-1]) if _is_one(bound)), None)


@rule(fraction_rules, "clamp")
def _clamped_to_one(node: Node) -> Value | None:
    return node.ins[1] if _is_one(node.ins[2]) else None


def _is_one(value: Value) -> bool:
    root = origin(value, ("same", "layout", "cast"))
    number = root.literal if root.literal is not None else root.constant
    return np.size(number) == 1 and bool(np.all(np.asarray(number) == 1))


def _is_rounded(value: Value) -> bool:
    """Return True for a whole number that a quotient was rounded to."""
    node = origin(value).node
    if node is None:
        return False
    if node.name == "max" or (node.traits.gives == "cast" and not is_inexact(node.ins[0])):
        return any(map(_is_rounded, node.ins))
    if any(eqn.params.get("name") == "floor_divide" for eqn in node.around):
        return True
    to_integer = node.traits.gives == "cast" and not is_inexact(node.outs[0])
    quotient = origin(node.ins[0]).node if to_integer or not has_derivative(node) else None
    return quotient is not None and quotient.name == "div"


def _gives_float(value: Value, most: int = 30) -> bool:
    """Return True if a float is computed from a number, element by element."""
    todo = [value]
    for current in todo:
        if is_inexact(current):
            return True
        for node in current.live_readers if len(todo) < most else ():
            if node.traits.elementwise or node.traits.gives in ("same", "layout", "cast"):
                todo += node.outs
    return False


# --- gradients ------------------------------------------------------------------------------------
# Gradients that are zero, and checkpoints that save nothing.

#: The maximum number of arrays of the first argument whose stops are named.
_MOST_ARRAYS = 32

#: The maximum number of values between a gradient and the results that it updates.
_MOST_UPDATES = 500

#: The share of a function's operations in one checkpoint above which it saves nothing.
_WHOLE = 0.95

#: Functions of fewer operations need no checkpoint at all, and no finding about one.
LEAST_OPERATIONS = 10_000

_BAD_ZERO = """
    import jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example({"scale": "f32[64]", "w": "f32[64]"}, "f32[8,64]")
    def f(params, x):
        steps = jnp.round(params["scale"] * 127.0)  # JT801
        return jnp.square(x * params["w"] * steps).mean()
"""

_GOOD_ZERO = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example({"scale": "f32[64]", "w": "f32[64]"}, "f32[8,64]")
    def f(params, x):
        exact = params["scale"] * 127.0
        steps = exact + jax.lax.stop_gradient(jnp.round(exact) - exact)
        return jnp.square(x * params["w"] * steps).mean()
"""

_BAD_UNTRAINED = """
    import jax, jax.numpy as jnp
    import jaxprtool


    def loss(params, x):
        hidden = jax.nn.relu(x @ params["w"])
        gate = (params["gate"] > 0).astype(x.dtype)  # JT803
        return jnp.square(gate * hidden).mean()


    @jaxprtool.example({"gate": "f32[64]", "w": "f32[64,64]"}, "f32[8,64]")
    def f(params, x):
        gradient = jax.grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
"""

_GOOD_UNTRAINED = """
    import jax, jax.numpy as jnp
    import jaxprtool


    def loss(params, x):
        hidden = jax.nn.relu(x @ params["w"])
        gate = jax.nn.sigmoid(params["gate"])
        return jnp.square(gate * hidden).mean()


    @jaxprtool.example({"gate": "f32[64]", "w": "f32[64,64]"}, "f32[8,64]")
    def f(params, x):
        gradient = jax.grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
"""

_BAD_CHECKPOINT = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[4,64,64]", "f32[8,64]")
    @jax.checkpoint
    def f(layers, x):  # JT802
        for w in layers:
            x = jax.nn.gelu(x @ w)
        return x.mean()
"""

_GOOD_CHECKPOINT = """
    import jax, jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[4,64,64]", "f32[8,64]")
    def f(layers, x):
        @jax.checkpoint
        def layer(x, w):
            return jax.nn.gelu(x @ w)

        for w in layers:
            x = layer(x, w)
        return x.mean()
"""


@lint_rule("JT801", "zero-gradient", bad=_BAD_ZERO, good=_GOOD_ZERO, kind="wrong")
def zero_gradients(program: LintedProgram) -> Iterator[Found]:
    """The gradient of a loss with respect to an array of its first argument is zero.

    Every path from the array to the result goes through an operation without a derivative: `round`,
    a comparison, a cast to integers, `argmax`. The rule does not report `stop_gradient`, unless the
    gradient with respect to every argument is zero, nor metrics that count, such as an accuracy.
    Programs that take the gradient, such as a training step, have JT803.
    """
    if program.has_backward or not (program.is_loss and isinstance(program.program, Program)):
        return
    top = program.top.arguments
    floats = [i for i, value in enumerate(top) if is_inexact(value) and value.live_readers]
    moved = [i for i in floats if top[i] in program.differentiable]
    stopped = [i for i in program.first_argument if i in floats and i not in moved]
    if not moved:
        yield from _without_gradient(program, stopped)
    elif len(stopped) == len(program.first_argument):
        return  # the first argument is data
    for position in stopped[:_MOST_ARRAYS] if moved else ():
        flow = gradient_flow(program.program, [position])
        meant = any(stop.primitive == "stop_gradient" for stop in flow.stops)
        if flow.reached or not flow.zero or not flow.stops or meant:
            continue
        yield _zero(program, flow, flow.argument, [position])


def _without_gradient(program: LintedProgram, stopped: list[int]) -> Iterator[Found]:
    """Yield a finding if the gradient with respect to all arguments is zero."""
    arrays = [i for i in stopped if program.top.arguments[i].elements > 1]
    if not arrays or _counts(program.top.results[0]):
        return
    assert isinstance(program.program, Program)
    flow = gradient_flow(program.program, stopped)
    if not flow.reached and flow.zero and flow.stops:
        yield _zero(program, flow, "every argument", arrays)


def _is_zeros(eqn: JaxprEqn) -> bool:
    """Return True for an array of floating-point zeros outside of a gradient."""
    value = None if is_differentiated(eqn) else eqn.invars[0]
    return isinstance(value, jaxcompat.Literal) and is_inexact(value) and not np.any(value.val)


def _zero(program: LintedProgram, flow: GradientFlow, what: str, positions: list[int]) -> Found:
    return Found(
        _node(program, flow.stops[0]),
        f"the gradient with respect to {what} is zero: {_stopped(flow)}",
        NO_DERIVATIVE.get(flow.stops[0].primitive, StopReason("")).remedy
        or "pass a value with a gradient on one path",
        "{bytes} that are never trained",
        bytes=sum(program.about.arguments[i].bytes or 0 for i in positions),
        command=_why(_paths(program, positions)[0]),
    )


def _paths(program: LintedProgram, positions: Iterable[int]) -> list[str]:
    """Return the paths of arguments, such as `params` for all below it."""
    names, chosen = [argument.name for argument in program.about.arguments], set(positions)
    return [*covering(names, [i in chosen for i in range(len(names))])]


def _why(argument: str, inside: str = "") -> str:
    """Return the command that shows why the gradient with respect to an argument is zero."""
    return f"jaxprtool why TARGET{inside} --gradient {shell_word(argument)}"


def _stopped(flow: GradientFlow) -> str:
    names = some([f"{stop.primitive} ({stop.source})" for stop in flow.stops], 3)
    return f"{names} {'stops' if len(flow.stops) == 1 else 'stop'} every path"


def _counts(value: Value, most: int = 1000) -> bool:
    """Return True for a metric: a number computed from comparisons, and not from other steps."""
    todo, seen = [value], {value}
    for current in todo:
        node = current.node
        if node is None or current.dtype == bool:
            continue
        is_cut = not is_inexact(current) and any(map(is_inexact, node.ins))
        if is_cut or node.traits.stops_derivative or node.inner or len(seen) > most:
            return False
        todo += [other for other in node.ins if other not in seen]
        seen.update(node.ins)
    return True


def _node(program: LintedProgram, stop: Stop) -> Node | None:
    """Return the equation at which a tangent stops."""
    for node in program.of(stop.primitive):
        if stop.frame is not None and program.frame(node) == stop.frame:
            return node
    return next((n for n in program.nodes if stop.frame and program.frame(n) == stop.frame), None)


@lint_rule("JT803", "untrained", bad=_BAD_UNTRAINED, good=_GOOD_UNTRAINED, kind="wrong")
def untrained(program: LintedProgram) -> Iterator[Found]:
    """A step takes the gradient with respect to an array, and it is zero.

    The loss does not use the array, or every path from it goes through an operation without a
    derivative, such as a comparison or a cast to integers. The optimizer keeps a state for the
    array all the same, and weight decay shrinks it. An array that only `stop_gradient` freezes is
    meant to be frozen, and is not reported.
    """
    losses = losses_by_lines(program.about.jaxpr, program.frames)
    groups = defaultdict[tuple[str, str, Node], list[Value]](list)
    for zeros in program.of("broadcast_in_dim") if losses else ():
        loss = losses.get(call_lines(program.frames.of(zeros.eqn)))
        argument = None if loss is None or not _is_zeros(zeros.eqn) else _trained(program, zeros)
        reason = None if argument is None else _why_zero(program, argument)
        if loss is not None and argument is not None and reason is not None:
            why, stop = reason
            groups[loss, why, stop or zeros].append(argument)
    for (loss, why, where), arguments in groups.items():
        numbers = [program.argument_number(argument) for argument in arguments]
        paths = _paths(program, [i for i in numbers if i is not None])
        types = [type_of(argument.aval) for argument in arguments]
        yield Found(
            where,
            f"the gradient with respect to {some(paths or types, 3)} is zero: {why}",
            "pass a value with a gradient on one path; if it is meant to stay as it is, take no "
            "gradient for it (argnums, eqx.partition, nnx.DiffState)",
            "{bytes} that are never trained, with an optimizer's state and updates",
            bytes=sum(argument.bytes for argument in arguments),
            command=_why(paths[0], f":{loss}") if paths and loss.isidentifier() else "",
        )


def _trained(program: LintedProgram, zeros: Node) -> Value | None:
    """Return the argument that an array of zeros is the gradient of, or None.

    The next value of the argument is computed from both, as those of the optimizer's state are. But
    of these arguments, only that one is read elsewhere, or else has only one next value.
    """
    gradient = zeros.outs[0]
    updated = _updates(gradient, lambda v: [out for node in v.live_readers for out in node.outs])
    chain, counts = {value.node for value in updated}, Counter[Value]()
    for result in (value for value in updated if value.is_result):
        values = _updates(result, lambda v: () if v.node is None else v.node.ins)
        if any(value.node is not None and value.node.is_backward for value in values):
            return None  # another gradient of it is not zero
        chain.update(value.node for value in values)
        counts.update(value for value in values if value.node is None and value.constant is None)
    if not counts:
        return _namesake(program, gradient)
    elsewhere = [value for value in counts if any(n not in chain for n in value.live_readers)]
    return min(elsewhere or counts, key=counts.__getitem__)


def _namesake(program: LintedProgram, gradient: Value) -> Value | None:
    """Return the argument whose path ends a result's: `params['w']` and `grads['w']`."""
    arguments = list(zip(program.about.arguments, program.top.arguments, strict=True))
    for output, result in zip(program.about.outputs, program.top.results, strict=True):
        path, ends = path_parts(output.name), defaultdict[int, list[Value]](list)
        for about, argument in arguments if result is gradient else ():
            _, *end = path_parts(about.name)
            if argument.shape == gradient.shape and list(path[len(path) - len(end) :]) == end:
                ends[len(end)].append(argument)
        if ends and len(ends[max(ends)]) == 1:
            return ends[max(ends)][0]
    return None


def _updates(value: Value, following: Callable[[Value], Iterable[Value]]) -> list[Value]:
    """Return the values that are computed in turn from a value, or that it is, of its shape."""
    reached = {value: None}
    todo = [value]
    for current in todo:
        for other in following(current):
            is_update = other.shape == value.shape and other.scope is value.scope
            if is_update and other not in reached and len(reached) < _MOST_UPDATES:
                reached[other] = None
                todo.append(other)
    return todo


def _why_zero(program: LintedProgram, argument: Value) -> tuple[str, Node | None] | None:
    """Return why the gradient with respect to an argument of a scope is zero, and where.

    It is None if only `stop_gradient` stops it, so that the array is frozen on purpose.
    """
    scope = argument.scope
    assert scope is not None
    jaxpr = program.about.jaxpr
    if scope.parent is not None and scope.parent.held is not None:
        jaxpr = scope.parent.held.jaxprs[scope.number_of_body]
    forward = [eqn for eqn in jaxpr.eqns if is_differentiated(eqn) and not is_backward(eqn)]
    loss = part_of(jaxpr, forward, "loss")
    inner = jaxcompat.open_jaxpr(loss)
    if jaxpr.invars[argument.index] not in inner.invars:
        return "the loss does not depend on it", None
    scalars = [v for v in inner.outvars if is_inexact(v) and v.aval.shape == ()]
    position = inner.invars.index(jaxpr.invars[argument.index])
    flow = gradient_flow(jaxcompat.replace_jaxpr(loss, outvars=scalars), [position])
    if not flow.zero and not flow.reached:
        return "the loss does not depend on it", None
    if not flow.stops or flow.reached:
        return "no path with derivatives leads to the loss", None
    if all(stop.primitive == "stop_gradient" for stop in flow.stops):
        return None
    return _stopped(flow), _node(program, flow.stops[0])


@lint_rule("JT802", "useless-checkpoint", bad=_BAD_CHECKPOINT, good=_GOOD_CHECKPOINT)
def useless_checkpoints(program: LintedProgram) -> Iterator[Found]:
    """A `jax.checkpoint` around nearly the whole function does not lower the peak.

    The backward pass first recomputes the whole function and stores all of its values, so the peak
    is as high as without the checkpoint. Checkpoints of parts, one after the other, lower it. A
    checkpoint whose policy saves everything is reported too.
    """
    yield from _saving_everything(program)
    if program.has_backward or not program.is_loss:
        return
    total = sum(node.operations for node in program.nodes if node.scope is program.top)
    if total < LEAST_OPERATIONS:
        return
    seen, around_others = set[int](), set[int]()
    for enclosing in enclosing_equations(program.nodes):
        if _is_checkpoint(enclosing.eqn):
            around_others.update(map(id, filter(_is_checkpoint, enclosing.path[:-1])))
    for enclosing in enclosing_equations(n for n in program.nodes if n.scope is program.top):
        eqn, call = enclosing.eqn, enclosing.path
        if not _is_checkpoint(eqn) or id(eqn) in seen:
            continue
        seen.add(id(eqn))
        operations = program.top.number(program.top.count.of(eqn))
        is_whole = operations >= _WHOLE * total and id(eqn) not in around_others
        if eqn.params.get("policy") is None and is_whole:
            yield Found(
                call if program.frame_of(call) else None,
                "one checkpoint holds nearly all of the function: it does not lower the peak",
                "checkpoint parts (each layer), or remove it",
                "{flops} that a GPU or TPU computes again in the backward pass (XLA for "
                "the CPU merges them with the forward pass)",
                flops=operations,
            )


def _is_checkpoint(eqn: JaxprEqn) -> bool:
    return traits(eqn).call == "remat"


def _saving_everything(program: LintedProgram) -> Iterator[Found]:
    """Yield a finding for each checkpoint whose policy saves everything."""
    seen = set[int]()
    for enclosing in enclosing_equations(program.nodes):
        eqn, call = enclosing.eqn, enclosing.path
        policy = eqn.params.get("policy")
        if policy is jax.checkpoint_policies.everything_saveable and id(eqn) not in seen:
            seen.add(id(eqn))
            yield Found(
                call if program.frame_of(call) else None,
                "the policy of this checkpoint saves everything: it does not lower the peak",
                "use another policy, such as nothing_saveable or dots_saveable, or remove the "
                "checkpoint",
                "the memory of all residuals",
            )
