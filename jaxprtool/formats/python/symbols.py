"""Symbolic dimensions in an emitted module: their expressions and definitions.

A function that uses a symbol first computes it from the shapes of its arguments, as JAX does:

    n = x.shape[0]
    m = y.shape[0] - 2 * n

A function whose own arguments do not determine its symbols is nested in one whose arguments do.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.formats.python.expressions import (
    Expression,
    Infix,
    Prefix,
    PythonFunction,
    Scope,
    call,
    pieces_of,
)
from jaxprtool.formats.python.layout import Piece, statement
from jaxprtool.ir.core.equations import equations, type_of
from jaxprtool.ir.shapes.symbols import names_of, names_of_factor
from jaxprtool.jaxcompat import Jaxpr, Var


@dataclass(frozen=True)
class Symbol(Expression):
    """The variable that holds the size of a symbol."""

    name: str

    def pieces(self, scope: Scope) -> list[Piece]:
        return [scope.symbol(self.name)]


@dataclass(frozen=True)
class ArgumentSize(Expression):
    """A dimension of an argument: `x.shape[0]`."""

    argument: str
    axis: int

    def pieces(self, scope: Scope) -> list[Piece]:
        return [f"{self.argument}.shape[{self.axis}]"]


@dataclass(frozen=True)
class Solution:
    """The solution for a symbol: the argument size that determines it, equal to `equation`.

    `exact` is True if the equation has a solution for any size.
    """

    size: ArgumentSize
    equation: Any
    value: Any
    exact: bool


# --- writing ----------------------------------------------------------------------------------


def dimension(size: Any) -> Any:
    """Return a symbolic dimension as an expression of its symbols: `2 * n + 1`."""
    terms = jaxcompat.dimension_terms(size)
    # Positive terms first: `3 - n`.
    return _plus(None, sorted(terms, key=lambda term: term[0] < 0))


def _plus(total: Any, terms: Iterable[tuple[int, Any]]) -> Any:
    """Return the sum of an expression and terms with coefficients."""
    for coefficient, factors in terms:
        if total is None:
            total = _product(coefficient, factors)
        else:
            sign = "-" if coefficient < 0 else "+"
            total = Infix(sign, total, _product(abs(coefficient), factors))
    return 0 if total is None else total


def _product(coefficient: int, factors: Iterable[tuple[Any, int]]) -> Any:
    parts = [_factor(factor, exponent) for factor, exponent in factors]
    if not parts:
        return coefficient
    if coefficient == -1:
        parts[0] = Prefix("-", parts[0])
    elif coefficient != 1:
        parts.insert(0, coefficient)
    return reduce(partial(Infix, "*"), parts)


def _factor(factor: Any, exponent: int) -> Any:
    if isinstance(factor, str):
        base: Any = Symbol(factor)
    else:
        operation, *operands = factor
        base = _OPERATIONS[operation](*map(dimension, operands))
    return base if exponent == 1 else Infix("**", base, exponent)


#: Operations of JAX's symbolic dimensions besides products and sums.
_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "floordiv": lambda a, b: Infix("//", a, b),
    "mod": lambda a, b: Infix("%", a, b),
    # Python's builtins cannot compare symbolic dimensions when the module is traced with them.
    "max": lambda a, b: call("jax.core.max_dim", a, b),
    "min": lambda a, b: call("jax.core.min_dim", a, b),
}


# --- solving ----------------------------------------------------------------------------------


def solutions(sizes: Iterable[tuple[ArgumentSize, Any]]) -> dict[str, Solution]:
    """Return the solutions of symbols from argument sizes, each based on earlier solutions.

    As in JAX, only equations that are linear in one unknown symbol are solved.
    """
    equations = [(size, equal) for size, equal in sizes if jaxcompat.is_symbolic_dimension(equal)]
    found: dict[str, Solution] = {}
    while True:
        # A lone symbol needs no arithmetic, so such equations come first.
        todo = sorted(equations, key=lambda e: len(jaxcompat.dimension_terms(e[1])))
        new = next((s for e in todo if (s := _solved(*e, found)) is not None), None)
        if new is None:
            return found
        found[new[0]] = new[1]


def _solved(
    size: ArgumentSize, equation: Any, known: dict[str, Any]
) -> tuple[str, Solution] | None:
    """Return the only unknown symbol of an equation and its solution, if it is linear in it."""
    terms = jaxcompat.dimension_terms(equation)
    unknown = [t for t in terms if any(names_of_factor(f) - known.keys() for f, _ in t[1])]
    if len(unknown) != 1:
        return None
    coefficient, ((name, exponent), *more) = unknown[0]
    if more or exponent != 1 or not isinstance(name, str):
        return None
    rest = [term for term in terms if term is not unknown[0]]
    if coefficient == -1:
        value = Infix("-", _plus(None, rest), size)
    else:
        value = _plus(size, [(-k, factors) for k, factors in rest])
        value = value if coefficient == 1 else Infix("//", value, coefficient)
    return name, Solution(size, equation, value, coefficient in (1, -1))


# --- functions --------------------------------------------------------------------------------


def sizes_of(variables: Sequence[Var], places: Sequence[str]) -> Iterator[tuple[ArgumentSize, Any]]:
    """Yield each dimension of each argument as an expression and as a size."""
    for var, name in zip(variables, places, strict=True):
        for axis, size in enumerate(getattr(var.aval, "shape", ())):
            yield ArgumentSize(name, axis), size


def determines_its_symbols(function: PythonFunction) -> bool:
    """Return True if the arguments of a function and of its rules determine its symbols."""
    bodies = [function, *(rule for _, rules, _ in function.rules for rule in rules)]
    jaxprs = [jaxcompat.open_jaxpr(f.jaxpr) for f in bodies if f.raises is None]
    return all(
        _needed(jaxpr) <= solutions(sizes_of(jaxpr.invars, [""] * len(jaxpr.invars))).keys()
        for jaxpr in jaxprs
    )


def _needed(jaxpr: Jaxpr) -> set[str]:
    """Return the symbols that an open jaxpr may use, at every depth."""
    found = _in_shapes(jaxpr.outvars)
    for eqn in equations(jaxpr):
        found |= names_of(list(eqn.params.values())) | _in_shapes(eqn.outvars)
    return found


def _in_shapes(variables: Sequence[Var]) -> set[str]:
    return names_of([getattr(v.aval, "shape", ()) for v in variables])


def bindings(
    arguments: Sequence[tuple[Var, str]], body: Sequence[str], names: dict[str, str], scope: Scope
) -> list[str]:
    """Return the lines that compute a body's symbols; `names` are their variables.

    `arguments` are variables with their expressions. Raises UnsupportedError if their shapes do not
    determine a symbol.
    """
    tree = ast.parse("\n".join(("def body():", *body)))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    missing = {symbol for symbol, name in names.items() if name in used}
    found = solutions(sizes_of(*zip(*arguments, strict=True))) if arguments else {}
    lines: list[str] = []
    # Last solution first: each is based on the ones before it.
    for symbol, solution in reversed(found.items()):
        if symbol in missing:
            missing.remove(symbol)
            missing |= names_of(solution.equation) - {symbol}
            lines[:0] = _binding(names[symbol], solution, scope)
    if missing:
        raise _undetermined(sorted(missing), arguments)
    return lines


def _binding(name: str, solution: Solution, scope: Scope) -> list[str]:
    lines = statement(f"{name} = ", pieces_of(solution.value, scope), "", 1)
    if not solution.exact:
        whole = Infix("==", solution.size, dimension(solution.equation))
        lines += statement("assert ", whole.pieces(scope), "", 1)
    return lines


def _undetermined(symbols: Sequence[str], arguments: Sequence[tuple[Var, str]]) -> UnsupportedError:
    shapes = [
        f"{place}:{type_of(var.aval)}"
        for var, place in arguments
        if names_of(getattr(var.aval, "shape", ())) & {*symbols}
    ]
    return UnsupportedError(
        f"the size of {', '.join(symbols)} cannot be derived from the shapes of the arguments "
        f"({', '.join(shapes) or 'none has it'})",
        "a symbol can be derived from a size that is linear in it, such as n or 2*n + 1",
    )
