"""The open table of masking rules, padded values, masked sizes, and guards of derivatives.

A value whose type mentions a masked symbol, `f32[n,d]`, is padded to `f32[512,d]`. Along each
padded axis its elements come first; the padding after them may hold anything, NaN included. If the
contents of the padding are known, they are called a *fill*. Along an axis with fill 0.0, all
elements beyond the logical size are 0.0, at every position along the other axes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from types import MappingProxyType
from typing import Any

import jax
import jax.export
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError, UnsupportedError
from jaxprtool.ir.equations import Contains, named
from jaxprtool.ir.program import Program
from jaxprtool.ir.rules import RuleTable
from jaxprtool.ir.symbols import chosen_sizes, names_of, symbols_of, value_of
from jaxprtool.jaxcompat import Atom, JaxprEqn, Literal
from jaxprtool.passes.mapping import RuleContext

# --- values ---------------------------------------------------------------------------------------
# Padded values, and the facts known about them.

#: The number that fills the padding along an axis, as the bytes of a scalar; None if unknown.
Fill = bytes | None


@dataclass(frozen=True)
class Facts:
    """The facts known about a value while a program is masked.

    Attributes:
        shape: The logical shape, which the value has in the old program.
        fills: The fill along each axis; None if it is unknown, or the axis has no padding.
        active: True if the value may have a derivative with respect to an argument of the program.
        literal: The bytes of the value, if it is a scalar literal.
        varies: True if the value varies between iterations, in the body of a scan of masked length.
    """

    shape: tuple[Any, ...]
    fills: tuple[Fill, ...]
    active: bool
    literal: Fill = None
    varies: bool = False

    @classmethod
    def of(cls, atom: Atom, *, active: bool) -> Facts:
        """Return the facts known from the type of an atom, and its value if it is a literal."""
        shape = getattr(atom.aval, "shape", ())
        literal = None
        if type(atom) is Literal and shape == () and is_numeric_type(atom.aval):
            literal = fill_bytes(atom.val, atom.aval.dtype)
        return cls(tuple(shape), (None,) * len(shape), active and is_float(atom.aval), literal)

    @classmethod
    def unknown(cls, shape: Sequence[Any], *, active: bool = False) -> Facts:
        """Return the facts about a value if only the logical shape is known."""
        return cls(tuple(shape), (None,) * len(shape), active)

    def joined(self, other: Facts) -> Facts:
        """Return the facts that hold for both of two values of the same shape."""
        pairs = zip(self.fills, other.fills, strict=True)
        return replace(
            self,
            fills=tuple(mine if mine == theirs else None for mine, theirs in pairs),
            active=self.active or other.active,
            varies=self.varies or other.varies,
            literal=self.literal if self.literal == other.literal else None,
        )


def fill_bytes(value: Any, dtype: Any) -> bytes:
    """Return a number as a fill. As bytes, NaN is equal to itself, and 0.0 differs from -0.0."""
    return np.asarray(value, dtype).tobytes()


def fill_number(data: bytes, dtype: Any) -> np.ndarray:
    """Return the number of a fill, as an array of rank 0."""
    return np.frombuffer(data, dtype).reshape(())


def is_numeric_type(aval: Any) -> bool:
    """Return True for a type with a NumPy dtype, whose padding can be filled with a number."""
    dtype = getattr(aval, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype != jax.dtypes.float0


def is_float(aval: Any) -> bool:
    """Return True for a type that has derivatives."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, np.inexact)


@dataclass(frozen=True, eq=False)
class Padded:
    """An operand as it is passed to a rule.

    Attributes:
        array: The array, of the padded shape.
        facts: The facts about it; `facts.shape` is its logical shape.
    """

    array: Any
    facts: Facts

    @property
    def shape(self) -> tuple[Any, ...]:
        """The logical shape."""
        return self.facts.shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.facts.shape)

    @property
    def dtype(self) -> Any:
        """The dtype."""
        return self.array.dtype

    @property
    def active(self) -> bool:
        """True if the value may have a derivative."""
        return self.facts.active

    def fill(self, axis: int) -> np.ndarray | None:
        """Return the number that fills the padding along an axis, or None if it is unknown."""
        data = self.facts.fills[axis]
        return None if data is None else fill_number(data, self.dtype)


@dataclass(frozen=True, eq=False)
class Filled:
    """A result of a rule with known padding.

    Attributes:
        array: The array, of the padded shape.
        fills: The number that fills the padding along some axes. None means unknown.
    """

    array: Any
    fills: dict[int, Any]


def result_facts(value: Any, shape: Sequence[Any], active: bool, varies: bool) -> tuple[Any, Facts]:
    """Return the array that a rule returned, and the facts about it.

    Args:
        value: The result of the rule: an array or a `Filled`.
        shape: Its logical shape.
        active: Whether an operand that it is computed from is active.
        varies: Whether an operand varies.
    """
    array = value.array if isinstance(value, Filled) else value
    fills = dict(value.fills) if isinstance(value, Filled) and is_numeric_type(array) else {}
    known_fills = tuple(
        fill_bytes(fills[i], array.dtype) if fills.get(i) is not None else None
        for i in range(len(shape))
    )
    return array, Facts(tuple(shape), known_fills, active and is_float(array), varies=varies)


# --- table ----------------------------------------------------------------------------------------
# The open table of masking rules, and the context argument of rules.
#
#     @rule(mask_rules, "my_primitive")
#     def _(context, eqn, x):
#         x = context.filled(x, {0: 0.0})
#         return context.bind(eqn, x)
#
# A rule takes padded operands and returns padded results, computed with JAX's functions. Each
# result is an array of the padded shape, or a `Filled` if the contents of its padding are known.
# The padding of a result may hold anything. The padding of an operand must not influence an element
# of a result. It must not influence a derivative either, although the padding of operands and
# cotangents may be NaN. An elementwise operation satisfies that as it is. A rule that combines
# elements along a padded axis, or repeats them along one (its transpose sums), must use
# `MaskContext.apply`.

#: Numbers to fill the padding with, by axis.
Fills = Mapping[int, Any]

#: `rule(context, eqn, *operands) -> result`, or a sequence of results if the primitive has several.
MaskRule = Callable[..., Any]

#: The open table of rules by primitive.
mask_rules: RuleTable[MaskRule] = RuleTable()

#: The facts about a size, in the order in which they are computed from each other.
FACTS = ("size", "valid")


class MaskContext(RuleContext):
    """The context of a rule: sizes, masks, and functions that fill padding.

    Args:
        name: The name of the primitive.
        bounds: The masked symbols and their bounds.
        symbols: The value of each masked symbol: `i32[]`.
        known: The values and the masks of sizes computed so far, by `FACTS`.
        iteration: In the body of a scan of masked length, a flag that is False if the current
            iteration is padding: `bool[]`.
        in_scan: Whether the equation is in the body of a scan.
    """

    operand = Padded

    def __init__(
        self,
        name: str,
        bounds: Bounds,
        symbols: Mapping[str, Any],
        facts: dict[tuple[str, Any], Any],
        iteration: Any = None,
        in_scan: bool = False,
    ) -> None:
        super().__init__(symbols, facts)
        self.bounds = bounds
        self._name = name
        self._iteration = iteration
        self._in_scan = in_scan

    # --- sizes ----------------------------------------------------------------------------------

    def axes(self, x: Padded) -> tuple[int, ...]:
        """Return the padded axes of a value."""
        return self.bounds.axes(x.shape)

    def size(self, size: Any) -> Any:
        """Return the value of a logical size: an `i32[]`, or a number."""
        return self.fact("size", size) if jaxcompat.is_symbolic_dimension(size) else size

    def _size(self, size: Any) -> Any:
        return computed(size, self._symbols)

    def valid(self, size: Any) -> jax.Array:
        """Return the mask of an axis of a logical size: `bool[padded]`, False in the padding."""
        return self.fact("valid", size)

    def _valid(self, size: Any) -> jax.Array:
        return lax.iota(jnp.int32, self.bounds.padded(size)) < self.size(size)

    def held_size(self, size: Any) -> Any:
        return self.bounds.padded(size)

    # --- padding --------------------------------------------------------------------------------

    def filled(self, x: Padded, fills: Fills) -> Any:
        """Return the array of a value, with its padding along some axes filled with numbers.

        Padding that is known to hold the number already is not filled again.

        Args:
            x: The value.
            fills: The numbers, by axis. Axes without padding are ignored.

        Raises:
            ValueError: If the dtype of the value does not have such a number.
        """
        array = x.array
        for axis, value in self._needed(x, fills).items():
            _require_number(value, x.dtype)
            array = with_fill(array, axis, value, self.valid(x.shape[axis]))
        return array

    def _needed(self, x: Padded, fills: Fills) -> dict[int, Any]:
        return {
            axis: value
            for axis, value in fills.items()
            if self.bounds.is_masked(x.shape[axis]) and not _is(x.fill(axis), value, x.dtype)
        }

    def apply(
        self,
        compute: Callable[..., Any],
        operands: Sequence[Padded],
        shape: Sequence[Any],
        *,
        needed: Sequence[Fills] | None = None,
        derivative: Sequence[Fills] | None = None,
        mixed: Sequence[int] = (),
    ) -> Any:
        """Return `compute(*arrays)`, with a derivative that no padding influences.

        Args:
            compute: A function of arrays. It must not close over arrays.
            operands: Its operands.
            shape: The logical shape of its result.
            needed: For each operand, the fills that `compute` needs.
            derivative: For each operand, more fills, which only the derivative of `compute` needs:
                those of the coefficients of its transpose.
            mixed: The axes of the result over which the transpose of `compute` sums. The padding
                of the cotangent along these axes is set to 0.
        """
        needed = [{}] * len(operands) if needed is None else needed
        derivative = [{}] * len(operands) if derivative is None else derivative
        before = [self._needed(x, fills) for x, fills in zip(operands, needed, strict=True)]
        after = [
            {**self._needed(x, fills), **first}
            for x, fills, first in zip(operands, derivative, before, strict=True)
        ]
        ends = [axis for axis in mixed if self.bounds.is_masked(shape[axis])]
        mixes = self._iteration is not None and mixes_iterations([x.facts for x in operands])
        if not any(x.active for x in operands) or not (mixes or ends or after != before):
            return compute(*map(self.filled, operands, before))
        sizes = [x.shape[axis] for x, fills in zip(operands, after, strict=True) for axis in fills]
        positions = {n: i for i, n in enumerate(dict.fromkeys([*sizes, *(shape[i] for i in ends)]))}

        def placed(x: Padded, fills: Fills) -> list[MaskedFill]:
            for value in fills.values():
                _require_number(value, x.dtype)
            return [(axis, value, positions[x.shape[axis]]) for axis, value in fills.items()]

        guard = Guard(
            f"masked_{self._name}",
            compute,
            list(map(placed, operands, before)),
            list(map(placed, operands, after)),
            [(axis, positions[shape[axis]]) for axis in ends],
            [x.facts.varies for x in operands] if mixes else None,
        )
        masks = [*map(self.valid, positions), *([self._iteration] if mixes else [])]
        function = guard.safe if self._in_scan else guard.function
        return function(*(x.array for x in operands), *masks)

    def isolate_cotangent(
        self, array: Any, shape: Sequence[Any], axes: Sequence[int], *, active: bool
    ) -> Any:
        """Return the same array, with a derivative that sets the padding of the cotangent to 0.

        Args:
            array: The result of a rule.
            shape: Its logical shape.
            axes: The axes along which the padding of the cotangent would reach other elements.
            active: Whether the array may have a derivative.
        """
        x = Padded(array, Facts.unknown(shape, active=active))
        return self.apply(lambda value: value, [x], shape, mixed=axes)


def mask_error(eqn: JaxprEqn, reason: str, hint: str | None = None) -> UnsupportedError:
    """Return the error for an equation that cannot be masked."""
    return UnsupportedError(f"{named(eqn)} cannot be masked: {reason}", hint)


def _is(value: np.ndarray | None, wanted: Any, dtype: Any) -> bool:
    """Return True if padding is known to hold a number. 0.0 and -0.0 count as equal."""
    if value is None or isinstance(wanted, jax.core.Tracer):
        return False
    return np.array_equal(value, np.asarray(wanted, dtype), equal_nan=True)


def _require_number(value: Any, dtype: Any) -> None:
    """Raise ValueError for a number that a dtype does not have: f8_e8m0fnu has no zero."""
    if isinstance(value, jax.core.Tracer) or value != value:
        return
    if complex(np.asarray(value, dtype)) != complex(value):
        raise ValueError(f"{np.dtype(dtype).name} has no {value} for the padding")


# --- sizes ----------------------------------------------------------------------------------------
# Masked symbols: bounds of symbolic sizes, and the computation of sizes at run time.

#: The least and the largest value of a size.
_Range = tuple[Any, Any]


class UnboundedSize(UnsupportedError):
    """Raised for a size that has no known bound."""


class Bounds:
    """The masked symbols and their bounds. Iteration yields the names of the symbols.

    Args:
        bounds: The largest size of each masked symbol. The least is 0.
    """

    def __init__(self, bounds: Mapping[str, int]) -> None:
        self.bounds = dict(bounds)
        self._padded: dict[Any, int] = {}
        self._masked: dict[Any, bool] = {}
        self._axes: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self._mention = Contains(self._mentions_in_types)

    def __iter__(self) -> Any:
        return iter(self.bounds)

    def is_masked(self, size: Any) -> bool:
        """Return True if a size depends on a masked symbol."""
        if type(size) is int or not jaxcompat.is_symbolic_dimension(size):
            return False
        if size not in self._masked:
            self._masked[size] = not names_of(size).isdisjoint(self.bounds)
        return self._masked[size]

    def axes(self, shape: Sequence[Any]) -> tuple[int, ...]:
        """Return the padded axes of a logical shape."""
        key = tuple(shape)
        padded_axes = self._axes.get(key)
        if padded_axes is None:
            padded_axes = tuple(i for i, size in enumerate(key) if self.is_masked(size))
            self._axes[key] = padded_axes
        return padded_axes

    def padded(self, size: Any) -> Any:
        """Return the padded size of an axis: the largest value of a logical size.

        Raises:
            UnboundedSize: If the size also depends on symbols that are not masked, and is not a sum
                of products with positive coefficients.
        """
        if not self.is_masked(size):
            return size
        if size not in self._padded:
            if names_of(size) <= self.bounds.keys():
                bound = _range(size, self.bounds)[1]
            else:
                bound = self._partly(size)
            self._padded[size] = bound
        return self._padded[size]

    def least(self, size: Any) -> Any:
        """Return a lower bound of a size or an offset. It may be negative."""
        if not self.is_masked(size):
            return size
        self.padded(size)  # raises UnboundedSize
        return _range(size, self.bounds)[0] if names_of(size) <= self.bounds.keys() else 0

    def shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return the padded shape of a logical one."""
        return tuple(map(self.padded, shape))

    def _partly(self, size: Any) -> Any:
        terms = jaxcompat.dimension_terms(size)
        if all(k > 0 and all(type(f) is str for f, _ in factors) for k, factors in terms):
            return value_of(size, self.bounds)
        raise UnboundedSize(
            f"the bound of {size} is unknown while other symbols have no size",
            "mask them too, or give them a size: specialize(d=64), mask(n=512)",
        )

    def mentions(self, eqn: JaxprEqn) -> bool:
        """Return True if an equation, or a body that it holds, mentions a masked symbol."""
        return self._mention.at(eqn)

    def _mentions_in_types(self, eqn: JaxprEqn) -> bool:
        if eqn.primitive.name == jaxcompat.DIM_AS_VALUE:
            return self.is_masked(eqn.params["dim"])
        atoms = (*eqn.invars, *eqn.outvars)
        sizes = (n for v in atoms for n in getattr(v.aval, "shape", ()))
        return any(map(self.is_masked, sizes)) or self.in_params(eqn)

    def in_params(self, eqn: JaxprEqn) -> bool:
        """Return True if a parameter of an equation, such as its shape, holds a masked size."""
        return any(map(self._holds, eqn.params.values()))

    def sizes_of(self, eqn: JaxprEqn) -> list[Any]:
        """Return the masked sizes in the types of an equation, without duplicates."""
        sizes = [n for v in (*eqn.invars, *eqn.outvars) for n in getattr(v.aval, "shape", ())]
        if eqn.primitive.name == jaxcompat.DIM_AS_VALUE:
            sizes.append(eqn.params["dim"])
        return list(dict.fromkeys(filter(self.is_masked, sizes)))

    def _holds(self, value: Any) -> bool:
        """Return True if a parameter, such as the start of a slice, holds a masked size."""
        if type(value) in (tuple, list):
            return any(map(self._holds, value))
        return self.is_masked(value)


def _range(
    size: Any, bounds: Mapping[str, int], least: Mapping[str, int] = MappingProxyType({})
) -> _Range:
    """Return the range of a size by interval arithmetic.

    Each symbol ranges from its size in `least`, or 0, to its bound.
    """

    def factor(base: Any, exponent: int) -> _Range:
        if isinstance(base, str):
            return least.get(base, 0) ** exponent, bounds[base] ** exponent
        operation, *operands = base
        low, high = _RANGES[operation](*(_range(operand, bounds, least) for operand in operands))
        powers = [low**exponent, high**exponent]
        return (0 if low < 0 < high and exponent % 2 == 0 else min(powers)), max(powers)

    if not jaxcompat.is_symbolic_dimension(size):
        return operator.index(size), operator.index(size)
    total = (0, 0)
    for coefficient, factors in jaxcompat.dimension_terms(size):
        low, high = reduce(_product, (factor(*power) for power in factors), (1, 1))
        low, high = _product((coefficient, coefficient), (low, high))
        total = total[0] + low, total[1] + high
    return total


def check_constraints(
    what: str,
    symbols: Mapping[str, Any],
    bounds: Mapping[str, int],
    least: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Check that all sizes up to the bounds satisfy the constraints of symbols.

    Args:
        what: The pass and the program, for the error.
        symbols: The symbols of the program, as symbolic dimensions by name.
        bounds: The largest size of some symbols.
        least: The least size of some of these symbols; that of the others is 0.

    Raises:
        ArgumentsError: If some do not, or a constraint also mentions a symbol without a bound.
    """
    for scope in dict.fromkeys(size.scope for size in symbols.values()):
        for constraint in jaxcompat.symbolic_constraints(scope):
            sides = [constraint.left, constraint.right]
            if names_of(sides).isdisjoint(bounds):
                continue
            is_bounded = names_of(sides) <= bounds.keys()
            left, right = (_range(x, bounds, least) if is_bounded else (0, 1) for x in sides)
            fixed = left == right and left[0] == left[1]
            if not (fixed if constraint.equal else left[0] >= right[1]):
                raise ArgumentsError(
                    f"{what}: the constraint {constraint.text} does not hold for all sizes from 0",
                    "put the constraint into the types, as in f32[8*n] and f32[n+1], or omit it",
                )


def with_own_constraints(program: Program) -> Program:
    """Return a program without the constraints on symbols that it no longer has.

    JAX refuses to call a program with a constraint on a symbol that it cannot determine.
    """
    symbols = symbols_of(program.jaxpr)
    for scope in dict.fromkeys(size.scope for size in symbols.values()):
        for constraint in jaxcompat.symbolic_constraints(scope):
            if not names_of([constraint.left, constraint.right]) <= symbols.keys():
                return program.specialized(chosen_sizes(program.name, symbols, {}))
    return program


def _product(x: _Range, y: _Range) -> _Range:
    corners = [a * b for a in x for b in y]
    return min(corners), max(corners)


def _quotient(x: _Range, y: _Range) -> _Range:
    divisors = [d for d in (*y, -1, 1) if y[0] <= d <= y[1] and d != 0]
    corners = [a // d for a in x for d in divisors]
    return min(corners, default=0), max(corners, default=0)


def _remainder(x: _Range, y: _Range) -> _Range:
    if x[0] >= 0 and x[1] < y[0]:
        return x
    return min(0, y[0] + 1), max(0, y[1] - 1)


_RANGES: dict[str, Callable[[_Range, _Range], _Range]] = {
    "floordiv": _quotient,
    "mod": _remainder,
    "max": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "min": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
}


def computed(size: Any, symbols: Mapping[str, Any]) -> Any:
    """Compute the value of a size at run time, as an `i32[]`.

    Args:
        size: The size.
        symbols: The values of masked symbols. JAX computes the others from shapes.
    """
    if not jaxcompat.is_symbolic_dimension(size):
        return jnp.int32(size)

    def factor(base: Any, exponent: int) -> Any:
        if not isinstance(base, str):
            operation, *operands = base
            value = _COMPUTED[operation](*(computed(operand, symbols) for operand in operands))
        elif base in symbols:
            value = symbols[base]
        else:
            (symbol,) = jax.export.symbolic_shape(base, scope=size.scope)
            value = jnp.asarray(symbol, jnp.int32)
        return value if exponent == 1 else lax.integer_pow(value, exponent)

    terms = []
    for coefficient, factors in jaxcompat.dimension_terms(size):
        if not factors:
            terms.append(jnp.int32(coefficient))
            continue
        value = reduce(operator.mul, (factor(*power) for power in factors))
        terms.append(value if coefficient == 1 else value * coefficient)
    return reduce(operator.add, terms)


_COMPUTED: dict[str, Callable[[Any, Any], Any]] = {
    "floordiv": jnp.floor_divide,
    "mod": jnp.remainder,
    "max": lax.max,
    "min": lax.min,
}

assert _COMPUTED.keys() == _RANGES.keys()


# --- guards ---------------------------------------------------------------------------------------
# Guards, which keep padding out of derivatives.
#
# If an operation combines elements along a padded axis, or repeats them along one, its transpose
# sums over padding: over products of cotangents and coefficients, both of which may be NaN. A guard
# computes the same values as the operation, with a derivative in which both are 0.
#
# The derivatives of a guard are those of `Guard.safe`, which consists of selections, and so has
# derivatives of any order. In a scan `safe` itself is used: JAX loses a `custom_jvp` rule where it
# differentiates a scan in reverse.

#: An axis of an array, the number to fill the padding along it with, and the index of its mask.
MaskedFill = tuple[int, Any, int]


@dataclass(frozen=True, eq=False)
class Guard:
    """A function of operands and masks, whose derivatives do not depend on the padding.

    Attributes:
        name: The name of the function, shown in listings of jaxprs.
        compute: The operation, a function of the operands.
        before: For each operand, the fills of its padding before the operation.
        after: For each operand, the fills of its padding where the derivative is taken.
        mixed: The axes of the result over which the transpose sums, and the indices of their masks.
        varying: In the body of a scan of masked length, for each operand whether it differs between
            iterations. The last mask is then the flag of the iteration, True unless it is padding.
    """

    name: str
    compute: Callable[..., Any]
    before: Sequence[Sequence[MaskedFill]]
    after: Sequence[Sequence[MaskedFill]]
    mixed: Sequence[tuple[int, int]]
    varying: Sequence[bool] | None = None

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The function of operands and masks, with a custom derivative."""

        def value(*args: Any) -> Any:
            return self._value(*args)

        def masked_derivative(primals: Any, tangents: Any) -> tuple[Any, Any]:
            return self._derivative(primals, tangents)

        value.__name__ = self.name  # listings show it
        guarded = jax.custom_jvp(value)
        guarded.defjvp(masked_derivative, symbolic_zeros=True)
        return guarded

    def _value(self, *args: Any) -> Any:
        arrays, masks = self._split(args)
        filled = (_filled(x, fills, masks) for x, fills in zip(arrays, self.before, strict=True))
        return self.compute(*filled)

    def safe(self, *args: Any) -> Any:
        """Compute the result in a form that JAX differentiates without a custom rule."""
        arrays, masks = self._split(args)
        points = [_filled(x, fills, masks) for x, fills in zip(arrays, self.after, strict=True)]
        if self.varying is not None:
            pairs = zip(points, self.varying, strict=True)
            points = [
                select_if(masks[-1], x, lax.full_like(x, 0)) if varies else x for x, varies in pairs
            ]
        result = self.compute(*points)
        fixed = lax.stop_gradient(result)
        for axis, place in self.mixed:
            result = lax.select(_along(axis, masks[place], result), result, fixed)
        return result if self.varying is None else select_if(masks[-1], result, fixed)

    def _split(self, args: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        count = len(self.before)
        return args[:count], args[count:]

    def _derivative(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

        def of(*values: Any) -> Any:
            args = list(primals)
            for i, value in zip(moving, values, strict=True):
                args[i] = value
            return self.safe(*args)

        return jax.jvp(of, [primals[i] for i in moving], [tangents[i] for i in moving])


def _filled(array: Any, fills: Sequence[MaskedFill], masks: Sequence[Any]) -> Any:
    for axis, value, place in fills:
        array = with_fill(array, axis, value, masks[place])
    return array


def with_fill(array: Any, axis: int, value: Any, mask: Any) -> Any:
    """Replace the elements of an array by a number where a mask along an axis is False."""
    return lax.select(_along(axis, mask, array), array, lax.full_like(array, value))


def _along(axis: int, mask: Any, array: Any) -> Any:
    return lax.broadcast_in_dim(mask, array.shape, (axis,))


# --- iterations of a scan of masked length --------------------------------------------------------


def mixes_iterations(facts: Sequence[Facts]) -> bool:
    """Return True if some operands vary between iterations, and loop-invariant ones are active.

    The derivative with respect to the latter is a sum over the iterations.
    """
    return any(operand.varies for operand in facts) and any(
        operand.active and not operand.varies for operand in facts
    )


def guard_derivative(flag: Any, array: Any) -> Any:
    """Return an array whose derivative is zero if a flag is False."""
    return select_if(flag, array, lax.stop_gradient(array))


def select_if(flag: Any, new: Any, old: Any) -> Any:
    """Return `new` if a flag is True, otherwise `old`.

    The flag is broadcast here, so that CSE merges equal masks. If `select` took a scalar, batching
    would broadcast it each time, and JAX would store each mask in every iteration for derivatives.
    """
    return lax.select(lax.broadcast(flag, new.shape), new, old)
