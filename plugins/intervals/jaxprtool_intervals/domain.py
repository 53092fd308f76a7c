"""The domain of intervals: kinds, rules, and the pass over one body."""

import math
from dataclasses import dataclass
from itertools import product

import jax.numpy as jnp
import numpy as np

from jaxprtool.errors import ArgumentsError, did_you_mean
from jaxprtool.extend import Call, Literal, RuleTable, close_jaxpr, rule, traits
from jaxprtool.extend.mapping import BodyBuilder, Domain, by_edges, custom_derivative

INF = math.inf

#: The largest magnitude of integers that are bounded: floats hold larger ones rounded.
EXACT = 2**53 - 1


@dataclass(frozen=True)
class Interval:
    """Bounds of all elements of a value; `nan` if some of them may be NaN."""

    low: float = -INF
    high: float = INF
    nan: bool = True


def of_any(dtype):
    """Return the interval of a value of which only the dtype is known."""
    return Interval(nan=bool(jnp.issubdtype(dtype, np.inexact)))


def of_value(value, dtype):
    """Return the interval of a known value."""
    real = jnp.issubdtype(dtype, np.floating) or jnp.issubdtype(dtype, np.integer)
    array = np.asarray(value).astype(np.float64) if real else np.empty(0)
    if not array.size or np.isnan(array).any():
        return Interval()
    if jnp.issubdtype(dtype, np.integer) and np.abs(array).max() > EXACT:
        return of_any(dtype)
    return Interval(float(array.min()), float(array.max()), False)


# --- rules of primitives --------------------------------------------------------------------------

#: `rule(eqn, *operands) -> Interval`, of exact arithmetic. Rounding is added by `rounded`.
rules = RuleTable()


def hull(points, *operands):
    """Return the interval from the least to the largest of some numbers."""
    points = list(points)
    if any(math.isnan(point) for point in points):  # such as inf - inf
        return Interval()
    return Interval(min(points), max(points), any(x.nan for x in operands))


def corners(function, x, y):
    """Return the interval of a function of two operands that is monotone in each."""
    return hull((function(a, b) for a, b in product((x.low, x.high), (y.low, y.high))), x, y)


def multiplied(x, y):
    """Return the interval of a product."""
    for a, b in (x, y), (y, x):
        if a.low <= 0 <= a.high and (math.isinf(b.low) or math.isinf(b.high)):
            return Interval()  # 0 * inf is NaN
    return corners(lambda a, b: a * b, x, y)


def summed(count, x):
    """Return the interval of a sum of terms."""
    if not isinstance(count, int):  # symbolic
        return Interval()
    return hull((x.low * count, x.high * count), x) if count else Interval(0.0, 0.0, False)


def joined(intervals):
    """Return the smallest interval that contains all of these."""
    lows, highs, nans = zip(*((x.low, x.high, x.nan) for x in intervals), strict=True)
    return Interval(min(lows), max(highs), any(nans))


def monotone(function):
    """Return the rule of a function that grows, or falls, everywhere."""
    return lambda eqn, x: hull((function(x.low), function(x.high)), x)


def exponential(a):
    """Return the exponential, or infinity where it overflows."""
    try:
        return math.exp(a)
    except OverflowError:
        return INF


rule(rules, "add", "add_any")(lambda eqn, x, y: corners(lambda a, b: a + b, x, y))
rule(rules, "sub")(lambda eqn, x, y: corners(lambda a, b: a - b, x, y))
rule(rules, "mul")(lambda eqn, x, y: multiplied(x, y))
rule(rules, "max")(lambda eqn, x, y: hull((max(x.low, y.low), max(x.high, y.high)), x, y))
rule(rules, "min")(lambda eqn, x, y: hull((min(x.low, y.low), min(x.high, y.high)), x, y))
rule(rules, "neg")(monotone(lambda a: -a))
rule(rules, "exp")(monotone(exponential))
rule(rules, "tanh")(monotone(math.tanh))
rule(rules, "logistic")(monotone(lambda a: 1 / (1 + exponential(-a))))
rule(rules, "sin", "cos")(lambda eqn, x: Interval(-1.0, 1.0, x.nan or INF in (-x.low, x.high)))
rule(rules, "reduce_sum")(lambda eqn, x: summed(_size(eqn), x))
rule(rules, "dot_general")(lambda eqn, x, y: summed(_size(eqn), multiplied(x, y)))
rule(rules, "reduce_max", "reduce_min")(lambda eqn, x: x if _size(eqn) else Interval())
rule(rules, "abs")(lambda eqn, x: hull(map(abs, (x.low, x.high, min(max(x.low, 0), x.high))), x))
rule(rules, "convert_element_type")(lambda eqn, x: x)
rule(rules, "slice", "dynamic_slice")(lambda eqn, x, *starts: x)
rule(rules, "concatenate")(lambda eqn, *xs: joined(xs))
rule(rules, "select_n")(lambda eqn, which, *cases: joined(cases))


def _size(eqn):
    """Return the number of elements, or products, that are summed in each element."""
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["dimension_numbers"][0][0]
    return math.prod(eqn.invars[0].aval.shape[i] for i in axes)


def rounded(x, eqn, dtype):
    """Return the interval of results as they are rounded, or wrapped, to a dtype."""
    if jnp.issubdtype(dtype, np.integer):
        least, most = max(jnp.iinfo(dtype).min, -EXACT), min(jnp.iinfo(dtype).max, EXACT)
        if x.nan or x.low < least or x.high > most:
            return of_any(dtype)
        return Interval(math.floor(x.low), math.ceil(x.high), False)
    if not jnp.issubdtype(dtype, np.floating):
        return of_any(dtype)
    if traits(eqn).moves or eqn.primitive.name in ("max", "min", "neg", "abs"):
        return x
    if x == Interval():
        return x
    info = jnp.finfo(dtype)
    least, most, tiny = float(info.min), float(info.max), float(info.tiny)
    # Rounding keeps the order of sums, so that a bound is off by its own error. Accelerators round
    # the operands of products to few digits.
    terms = _size(eqn) if eqn.primitive.name == "reduce_sum" else 1
    error = 2.0**-7 if traits(eqn).bilinear else float(info.eps) * (16 + terms)
    low, high = min(x.low, most), max(x.high, least)
    low, high = low - abs(low) * error - tiny, high + abs(high) * error + tiny
    if (low < least or high > most) and not np.isinf(np.asarray(INF).astype(dtype)):
        return Interval()  # the dtype has no infinity, so that what overflows is NaN
    low, high = -INF if low < least else low, INF if high > most else high
    return Interval(low, high, x.nan or (math.isinf(low) and math.isinf(high)))


# --- the domain -----------------------------------------------------------------------------------

structured = RuleTable()
rule(structured, *Call.primitives, "cond", "scan", "while")(by_edges)
rule(structured, "custom_jvp_call", "custom_vjp_call")(custom_derivative)


class IntervalBodyBuilder(BodyBuilder):
    """One body while it is written."""

    def body(self, body, kinds, wanted):
        for var, value in zip(body.constvars, body.consts, strict=True):
            self.bind(var, of_value(value, var.aval.dtype), var)
        return super().body(body, kinds, wanted)

    def rewrite(self, eqn):
        if self.structured(eqn):
            return
        kinds = [*map(self.kind, eqn.invars)]
        operands = [*map(self.held, eqn.invars, kinds)]
        kept = _outcome(eqn.primitive.name, kinds) if len(kinds) == 2 else None
        if kept is not None and operands[kept].aval == eqn.outvars[0].aval:
            self.bind(eqn.outvars[0], kinds[kept], operands[kept])
            return
        self.unchanged(eqn, operands)
        apply = rules.get(eqn.primitive.name)
        if apply is None and traits(eqn).gives in ("same", "layout") and len(eqn.outvars) == 1:
            apply = rules["slice"]
        for var in eqn.outvars:
            found = apply(eqn, *kinds) if apply else Interval()
            self.bind(var, rounded(found, eqn, getattr(var.aval, "dtype", None)), var)


def _outcome(primitive, kinds):
    """Return the position of the operand that a `max` or `min` returns; None if it is not known.

    It is known only for operands that are never equal: for equal ones, both contribute to the
    derivative.
    """
    for i, (x, other) in enumerate((kinds, kinds[::-1])):
        beyond = {"max": x.low > other.high, "min": x.high < other.low}
        if beyond.get(primitive) and not other.nan:
            return i
    return None


class IntervalDomain(Domain):
    """Bounds of values."""

    builder_class = IntervalBodyBuilder
    rules = rules
    structured_rules = structured

    def kind_of(self, atom):
        return of_value(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else Interval()

    def join(self, first, second):
        return joined((first, second))

    def widened(self, before, now):
        """Drop a bound that an iteration exceeds, so that the fixed point is reached."""
        low = before.low if before.low <= now.low else -INF
        high = before.high if before.high >= now.high else INF
        return Interval(low, high, before.nan or now.nan)

    def fits(self, kind, wanted):
        return True  # nothing is converted

    def tangent(self, kind, aval):
        return Interval()


def rewritten(program, arguments):
    """Return the rewritten body of a program, whose kinds are the bounds of its results."""
    names = program.arg_names
    if unknown := arguments.keys() - set(names):
        hint = did_you_mean(min(unknown), names) or f"its arguments are {', '.join(names)}"
        raise ArgumentsError(f"{program.name} has no argument {min(unknown)}", hint)
    kinds = [
        Interval(*map(float, arguments[name]), False) if name in arguments else of_any(dtype)
        for name, dtype in zip(names, (var.aval.dtype for var in program.jaxpr.invars), strict=True)
    ]
    return IntervalDomain().body(close_jaxpr(program.jaxpr), kinds)
