"""Masked symbols: bounds of symbolic sizes, and the computation of sizes at run time."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from types import MappingProxyType
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError, UnsupportedError
from jaxprtool.ir.core.equations import Contains
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.shapes.symbols import chosen_sizes, names_of, symbols_of, value_of
from jaxprtool.jaxcompat import JaxprEqn

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
        found = self._axes.get(key)
        if found is None:
            found = tuple(i for i, size in enumerate(key) if self.is_masked(size))
            self._axes[key] = found
        return found

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
                found = _range(size, self.bounds)[1]
            else:
                found = self._partly(size)
            self._padded[size] = found
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
        low, high = _RANGES[operation](*(_range(each, bounds, least) for each in operands))
        powers = [low**exponent, high**exponent]
        return (0 if low < 0 < high and exponent % 2 == 0 else min(powers)), max(powers)

    if not jaxcompat.is_symbolic_dimension(size):
        return operator.index(size), operator.index(size)
    total = (0, 0)
    for coefficient, factors in jaxcompat.dimension_terms(size):
        low, high = reduce(_product, (factor(*each) for each in factors), (1, 1))
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
            known = names_of(sides) <= bounds.keys()
            left, right = (_range(x, bounds, least) if known else (0, 1) for x in sides)
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
    known = symbols_of(program.jaxpr)
    for scope in dict.fromkeys(size.scope for size in known.values()):
        for constraint in jaxcompat.symbolic_constraints(scope):
            if not names_of([constraint.left, constraint.right]) <= known.keys():
                return program.specialized(chosen_sizes(program.name, known, {}))
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
            value = _COMPUTED[operation](*(computed(each, symbols) for each in operands))
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
        value = reduce(operator.mul, (factor(*each) for each in factors))
        terms.append(value if coefficient == 1 else value * coefficient)
    return reduce(operator.add, terms)


_COMPUTED: dict[str, Callable[[Any, Any], Any]] = {
    "floordiv": jnp.floor_divide,
    "mod": jnp.remainder,
    "max": lax.max,
    "min": lax.min,
}

assert _COMPUTED.keys() == _RANGES.keys()
