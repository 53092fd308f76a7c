"""Symbolic dimensions: their symbols, bounds and sizes.

A symbol, such as the n in `f32[2*n,128]`, represents a size of at least 1. Its scope holds the
constraints that the user gave (`jax.export.symbolic_shape`). The sizes of symbols for given
arguments are found by JAX's own solver.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.export
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError, StructureError, did_you_mean
from jaxprtool.ir.equations import equations, type_of
from jaxprtool.ir.notation import expressions
from jaxprtool.ir.notation.types import SizeExpression
from jaxprtool.jaxcompat import AnyJaxpr, Aval
from jaxprtool.jaxcompat.jaxprs import identity

# --- symbols --------------------------------------------------------------------------------------
# Symbolic dimensions: find their symbols, evaluate them, and solve for sizes of symbols.

#: The size of each symbol, an integer or a symbolic dimension.
Sizes = Mapping[str, Any]


def names_of(value: Any) -> set[str]:
    """Return the names of the symbols in a size, or in a nested tuple or list of sizes."""
    if isinstance(value, tuple | list):
        return set().union(*map(names_of, value))
    if not jaxcompat.is_symbolic_dimension(value):
        return set()
    factors = (factor for _, fs in jaxcompat.dimension_terms(value) for factor, _ in fs)
    return set().union(*map(names_of_factor, factors))


def names_of_factor(factor: Any) -> set[str]:
    """Return the names of the symbols in a factor of a term of `jaxcompat.dimension_terms`."""
    return {factor} if isinstance(factor, str) else names_of(factor[1:])


def symbolic_sizes(avals: Iterable[Aval]) -> list[Any]:
    """Return all symbolic dimensions in the shapes of types."""
    sizes = (size for aval in avals for size in getattr(aval, "shape", ()))
    return [
        size for size in sizes if type(size) is not int and jaxcompat.is_symbolic_dimension(size)
    ]


def sizes_by_symbol(avals: Iterable[Aval]) -> dict[str, Any]:
    """Return the symbols in types, as symbolic dimensions by name."""
    return _symbols_in(symbolic_sizes(avals))


def symbols_of(jaxpr: AnyJaxpr) -> dict[str, Any]:
    """Return the symbols in a jaxpr, as symbolic dimensions by name.

    The symbols of its arguments come first. There may be more, which the function closes over.
    """
    body = jaxcompat.open_jaxpr(jaxpr)
    # JAX shares equal types, so looking at each object once is fast.
    avals = {identity(v.aval): v.aval for v in body.invars}
    dims = []
    for eqn in equations(body):
        for v in eqn.outvars:
            avals[identity(v.aval)] = v.aval
        if eqn.primitive.name == jaxcompat.DIM_AS_VALUE:
            dims.append(eqn.params["dim"])
    return _symbols_in([*symbolic_sizes(avals.values()), *dims])


def _symbols_in(sizes: Iterable[Any]) -> dict[str, Any]:
    return {
        name: jax.export.symbolic_shape(name, scope=size.scope)[0]
        for size in dict.fromkeys(sizes)
        for name in sorted(names_of(size))
    }


def known_range(symbol: Any) -> tuple[int, int | None]:
    """Return the range of a symbol by constraints such as `2 <= n` and `n <= 64`.

    Returns:
        The least size, or 0 without a constraint, although JAX assumes 1; and the largest size, or
        None without a constraint.
    """
    least, largest = 0, None
    for constraint in jaxcompat.symbolic_constraints(symbol.scope):
        left, right = constraint.left, constraint.right
        if constraint.equal:
            continue
        if left == symbol and not jaxcompat.is_symbolic_dimension(right):
            least = max(least, operator.index(right))
        elif right == symbol and not jaxcompat.is_symbolic_dimension(left):
            bound = operator.index(left)
            largest = bound if largest is None else min(largest, bound)
    return least, largest


class Symbols(Mapping[str, Any]):
    """Sizes by name. A name that is not known is a new symbol, all of one scope.

    Args:
        known: Sizes by name.
        scope: The scope of new symbols. By default, that of a known one.
    """

    def __init__(
        self, sizes: Sizes = MappingProxyType({}), scope: jax.export.SymbolicScope | None = None
    ) -> None:
        self._scope = scope or next((size.scope for size in sizes.values()), None)
        self._found = dict(sizes)
        self._constraints: dict[str, None] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._found:
            self._scope = self._scope or jax.export.SymbolicScope(tuple(self._constraints))
            try:
                (self._found[name],) = jax.export.symbolic_shape(name, scope=self._scope)
            except ValueError:  # min, max and the like, which are functions there
                raise ValueError(f"'{name}' is not a valid symbol name") from None
        return self._found[name]

    def constrain(self, constraints: Iterable[str]) -> None:
        """Add constraints on sizes, such as `n <= 64`.

        Raises:
            ValueError: If there is a symbol already: a scope has its constraints from the start.
        """
        new = dict.fromkeys(text for text in constraints if text not in self._constraints)
        if new and self._scope:
            raise ValueError(f"{next(iter(new))} must be declared in the types of arguments")
        self._constraints |= new

    def unnamed(self) -> Any:
        """Return a new symbol, for a size that is written as `_`."""
        numbers = itertools.count(1)
        return self[next(name for i in numbers if (name := f"_{i}") not in self._found)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def value_of(size: Any, sizes: Sizes) -> Any:
    """Evaluate a size. Symbols that are not in `sizes` stay symbolic.

    Raises:
        ZeroDivisionError: If a divisor is zero at these sizes.
    """
    if not jaxcompat.is_symbolic_dimension(size):
        return size
    names, scope = names_of(size), size.scope
    if names and sizes.keys().isdisjoint(names):
        return size

    def factor(base: Any, exponent: int) -> Any:
        if isinstance(base, str):
            has_size = base in sizes
            value = sizes[base] if has_size else jax.export.symbolic_shape(base, scope=scope)[0]
        else:
            operation, *operands = base
            value = _OPERATIONS[operation](*(value_of(operand, sizes) for operand in operands))
        return value**exponent

    terms = jaxcompat.dimension_terms(size)
    values = [k * math.prod(factor(*power) for power in factors) for k, factors in terms]
    total = reduce(operator.add, values)
    return total if jaxcompat.is_symbolic_dimension(total) else operator.index(total)


#: The operations in symbolic dimensions besides products and sums.
_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": jax.core.max_dim,
    "min": jax.core.min_dim,
}


# --- sizes that fit -----------------------------------------------------------------------------


def chosen_sizes(what: str, symbols: Mapping[str, Any], sizes: Mapping[str, int | str]) -> Sizes:
    """Return the new size of each symbol of a program, for sizes that the user chose.

    Args:
        what: The pass and the program, for errors.
        symbols: The symbols of the program, as symbolic dimensions by name.
        sizes: The chosen sizes by symbol: integers, or expressions of symbols as text, `2*n`. In an
            expression, symbols with a chosen integer are replaced by it.

    Returns:
        The size of each symbol in `symbols`. Symbols without a chosen size stay symbolic, in a new
        scope with the constraints that remain. A constraint is dropped if it mentions a symbol that
        the program lacks.

    Raises:
        ArgumentsError: If a name is not a symbol of the program, a size is not valid, or sizes
            violate a constraint.
    """
    check_symbols(what, sizes, symbols)
    scopes = dict.fromkeys(size.scope for size in symbols.values())
    constraints = [
        c
        for scope in scopes
        for c in jaxcompat.symbolic_constraints(scope)
        if names_of([c.left, c.right]) <= symbols.keys()
    ]
    numbers = {name: n for name, n in sizes.items() if not isinstance(n, str) and n > 0}
    scope = jax.export.SymbolicScope()
    # JAX applies the equalities of a scope when it parses a size in it. So the sizes are computed
    # first to get the constraints of the new scope, and again in this scope.
    for final in (False, True):
        scoped = Symbols(numbers, scope)
        chosen = {name: _size(what, name, sizes.get(name, name), scoped) for name in symbols}
        if not final:
            scope = _scope(what, chosen, constraints)
    return chosen


_NO_SYMBOLS = "it has no symbols; trace it with a type such as f32[n,128] to have one"


def check_symbols(what: str, names: Iterable[str], symbols: Collection[str]) -> None:
    """Check that names are symbols of a program.

    Args:
        what: The pass and the program, for the error.
        names: The names.
        symbols: The symbols of the program.

    Raises:
        ArgumentsError: If a name is not one of them.
    """
    for name in names:
        if name not in symbols:
            has = f"its symbols are: {', '.join(symbols)}" if symbols else _NO_SYMBOLS
            raise ArgumentsError(f"{what}: no symbol '{name}'", did_you_mean(name, symbols) or has)


#: Sizes to try a program at, starting with some that are not multiples of each other.
_EXAMPLES = (3, 5, 7, 4, 8, 2, 6, 16)

#: The maximum number of combinations to try, for symbols with constraints.
_MOST_TRIED = 2000


def example_sizes(what: str, avals: Sequence[Aval]) -> Sizes:
    """Return small sizes for the symbols in the types of arguments, all different if possible.

    Raises:
        ArgumentsError: If none of the sizes tried satisfies the constraints without negative
            dimensions.
    """
    symbols = sizes_by_symbol(avals)
    names = list(symbols)
    # Try different sizes first: equal sizes, and sizes of 1, hide errors.
    numbers = itertools.chain(
        itertools.permutations(_EXAMPLES, len(names)),
        itertools.product((*_EXAMPLES, 1), repeat=len(names)),
    )
    for trial in itertools.islice(numbers, _MOST_TRIED):
        try:
            sizes = chosen_sizes(what, symbols, dict(zip(names, trial, strict=True)))
        except ArgumentsError:
            continue
        if all(value_of(size, sizes) >= 0 for size in symbolic_sizes(avals)):
            return sizes
    raise ArgumentsError(
        f"{what}: no small sizes for {', '.join(names)} satisfy its constraints",
        "give sizes with specialize(n=…)",
    )


def _size(what: str, name: str, chosen: int | str, symbols: Mapping[str, Any]) -> Any:
    """Return the size that the user gave as an integer, or as the text of an expression."""
    size: Any = chosen
    if isinstance(chosen, str):
        source = expressions.parse_arguments(chosen, f"the size of {name}", ArgumentsError)
        if len(source.args) != 1 or source.keywords:
            raise ArgumentsError(f"{what}: {name}={chosen!r} is not a size")
        try:
            size = SizeExpression(source, source.args[0])(symbols)
        except (ValueError, ArithmeticError, TypeError) as error:  # of symbolic dimensions
            reason = str(error).partition("\n")[0]
            raise ArgumentsError(f"{what}: {name}={chosen!r} is not a size: {reason}") from None
    if not jaxcompat.is_symbolic_dimension(size) and size < 1:
        raise ArgumentsError(f"{what}: {name}={size} is not a size: a symbol is at least 1")
    return size


def _scope(
    what: str, sizes: Sizes, constraints: Iterable[jaxcompat.SymbolicConstraint]
) -> jax.export.SymbolicScope:
    """Return a scope with the constraints that remain after symbols are replaced by sizes."""
    left: dict[str, str] = {}
    for constraint in constraints:
        sides = [value_of(side, sizes) for side in (constraint.left, constraint.right)]
        sign = "==" if constraint.equal else ">="
        left[constraint.text] = f"{sides[0]} {sign} {sides[1]}"
        if not any(map(jaxcompat.is_symbolic_dimension, sides)):
            del left[constraint.text]
            if sides[0] < sides[1] or (constraint.equal and sides[0] != sides[1]):
                raise _forbidden(what, sizes, constraint.text)
    try:
        return jax.export.SymbolicScope(tuple(left.values()))
    except (ValueError, NotImplementedError):
        raise _forbidden(what, sizes, ", ".join(left)) from None


def _forbidden(what: str, sizes: Sizes, constraint: str) -> ArgumentsError:
    shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
    return ArgumentsError(f"{what}: {shown} violates the constraint {constraint}")


def found_sizes(
    what: str, arguments: Sequence[tuple[str, Aval]], shapes: Sequence[Sequence[Any]]
) -> Sizes:
    """Solve for the sizes of symbols at which the types of arguments have given shapes.

    Args:
        what: The program, for errors.
        arguments: The name and the type of each argument.
        shapes: The shapes of the actual arguments, which may be symbolic too.

    Raises:
        StructureError: If a shape has another rank, or another size than one that is a number.
        ArgumentsError: If there are no such sizes, with the reason that JAX gives.
    """
    for (name, aval), shape in zip(arguments, shapes, strict=True):
        wanted = getattr(aval, "shape", ())
        if len(wanted) != len(shape) or any(
            not jaxcompat.is_symbolic_dimension(want) and want != size
            for want, size in zip(wanted, shape, strict=True)
        ):
            shown = ",".join(map(str, shape))
            raise StructureError(
                f"argument '{name}' has shape [{shown}], but {what} takes {type_of(aval)}"
            )
    pairs = zip(arguments, shapes, strict=True)
    symbolic = [(*argument, shape) for argument, shape in pairs if symbolic_sizes([argument[1]])]
    if not symbolic:
        return {}
    names, avals, actual = zip(*symbolic, strict=True)
    try:
        return jaxcompat.solved_symbols(avals, actual)
    except ValueError as error:
        raise _misfit(what, names, str(error)) from None


def _misfit(what: str, names: Sequence[str], reason: str) -> ArgumentsError:
    """Return the error for arguments that do not fit, from JAX's message with arguments renamed."""
    text = re.sub(r"args\[(\d+)\]", lambda match: names[int(match[1])], " ".join(reason.split()))
    text = text.partition(" Please see ")[0]
    solved = re.search(r"Obtained dimension variables: (.*?)[, .]*$", text)
    message = re.sub(r"\.? ?Using the following polymorphic shapes specifications.*", "", text)
    message = message.removeprefix(
        "Input shapes do not match the polymorphic shapes specification. "
    )
    message = message[:1].lower() + message[1:].rstrip(". ")
    hint = solved[1] if solved else None
    return ArgumentsError(f"the arguments do not fit {what}: {message}", hint)


# --- bounds ---------------------------------------------------------------------------------------
# The bounds of arguments that are sizes, or lengths of examples.

#: Sizes and lengths have this dtype; bounds must be representable in it.
MOST = int(np.iinfo(np.int32).max)


@dataclass(frozen=True)
class SizeBound:
    """A size, or an array of sizes: from `at_least` to `at_most`."""

    at_most: int
    at_least: int = 0

    def __str__(self) -> str:
        return f"a size from {self.at_least} to {self.at_most}"

    def fault(self, values: np.ndarray, sizes: Sizes) -> str | None:
        """Return a message about values out of bounds, or None."""
        wrong = values[(values < self.at_least) | (values > self.at_most)]
        return f"is {wrong[0]}, but must be {self}" if len(wrong) else None

    def at(self, sizes: Sizes) -> SizeBound:
        """Return the bound with symbols replaced by these sizes."""
        return self

    def random(self, rng: np.random.Generator, shape: tuple[int, ...], sizes: Sizes) -> Any:
        """Return random values within the bound."""
        return rng.integers(self.at_least, self.at_most + 1, shape)


@dataclass(frozen=True)
class LengthsBound:
    """The lengths of examples, along the last axis.

    Attributes:
        rows: The number of rows of all examples: a number, or a symbolic dimension. The size of its
            symbol may be another argument.
        longest: The maximum number of rows of an example; None if unknown.
        left_over: Whether there may be spare rows after the examples.
        shortest: The minimum number of rows of an example.
    """

    rows: Any
    longest: int | None = None
    left_over: bool = False
    shortest: int = 0

    def __str__(self) -> str:
        most = "at most " * self.left_over
        lengths = range_of_lengths(self.shortest, self.longest)
        return f"an array of lengths that add up to {most}{self.rows}{lengths}"

    def fault(self, values: np.ndarray, sizes: Sizes) -> str | None:
        """Return a message about values out of bounds, or None."""
        for i, value in np.ndenumerate(values):
            if value < self.shortest or (self.longest is not None and value > self.longest):
                least, most, place = self.shortest, self.longest, ", ".join(map(str, i))
                valid = f"of at least {least}" if most is None else f"from {least} to {most}"
                return f"is {value} at [{place}], but must be a length {valid}"
        rows = value_of(self.rows, sizes)
        totals = values.sum(-1, dtype=np.int64)
        if not isinstance(rows, int):
            return None
        wrong = totals[(totals > rows) | (totals < (0 if self.left_over else rows))]
        return f"adds up to {wrong[0]}, but there are {rows} rows" if len(wrong) else None

    def at(self, sizes: Sizes) -> LengthsBound:
        """Return the bound with symbols replaced by these sizes."""
        return replace(self, rows=value_of(self.rows, sizes))

    def random(self, rng: np.random.Generator, shape: tuple[int, ...], sizes: Sizes) -> Any:
        """Return random values within the bound. Raises ValueError if there are none."""
        rows, count = value_of(self.rows, sizes), shape[-1]
        if not isinstance(rows, int):
            raise ValueError(f"{rows} must be a number")
        least, most = self.shortest, rows if self.longest is None else min(self.longest, rows)
        if count * most < rows:
            raise ValueError(f"no {count} lengths of at most {most} add up to {rows}")
        if count * least > rows:
            raise ValueError(f"no {count} lengths of at least {least} add up to {rows}")
        if count == 0:
            return np.zeros(shape)
        more = rng.multivariate_hypergeometric(
            [most - least] * count, rows - count * least, shape[:-1], "marginals"
        )
        return least + more


def range_of_lengths(shortest: int, longest: int | None) -> str:
    """Describe the range of each length, after a comma; "" if it is unbounded."""
    if longest is None:
        return f", each at least {shortest}" if shortest else ""
    return f", each {f'from {shortest} to' if shortest else 'at most'} {longest}"


Bound: TypeAlias = SizeBound | LengthsBound
