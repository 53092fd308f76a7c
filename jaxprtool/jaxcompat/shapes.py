"""JAX's symbolic dimensions: their constraints, and the sizes that fit actual shapes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax._src.export import shape_poly
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxprtool.jaxcompat.aliases import Aval
from jaxprtool.jaxcompat.jaxprs import open_jaxpr

SymbolicDimension = shape_poly._DimExpr

#: The primitive whose equations return the value of a symbolic dimension.
DIM_AS_VALUE = shape_poly.dim_as_value_p.name

#: Whether a size is an expression such as `2*n`.
is_symbolic_dimension = jax.export.is_symbolic_dim


def lacks_a_size(error: Exception) -> bool:
    """Return True if JAX raised an error because no argument determines a symbol."""
    if isinstance(error, NotImplementedError):  # for an equation that is evaluated by itself
        return DIM_AS_VALUE in str(error)
    return isinstance(error, shape_poly.UnexpectedDimVar)


def mentions_symbols(value: Any) -> bool:
    """Return True if a parameter has a symbolic dimension, or is a body with one."""
    if isinstance(value, dict):
        return any(map(mentions_symbols, value.values()))
    if isinstance(value, tuple | list):
        return any(map(mentions_symbols, value))
    if isinstance(value, ClosedJaxpr):
        value = open_jaxpr(value)
    if not isinstance(value, Jaxpr):
        return is_symbolic_dimension(value)
    variables = [*value.invars, *(v for eqn in value.eqns for v in eqn.outvars)]
    shapes = (getattr(v.aval, "shape", ()) for v in variables)
    return any(map(mentions_symbols, shapes)) or any(mentions_symbols(e.params) for e in value.eqns)


def dimension_terms(size: Any) -> list[tuple[int, list[tuple[Any, int]]]]:
    """Return the terms of a symbolic dimension: coefficients, and factors with exponents.

    A factor is the name of a symbol, or a tuple of an operation ("floordiv", "mod", "max" or
    "min") and its operands, which are symbolic dimensions or constants of their type.
    """
    return [
        (coefficient, [(f.var or (f.operation, *f.operands), n) for f, n in term._factors])
        for term, coefficient in size._sorted_terms
    ]


@dataclass(frozen=True)
class SymbolicConstraint:
    """A constraint of a scope: `left == right`, or `left >= right`; `text` is the user's."""

    text: str
    equal: bool
    left: Any
    right: Any


def symbolic_constraints(scope: jax.export.SymbolicScope) -> tuple[SymbolicConstraint, ...]:
    """Return the constraints on the dimensions of a scope, in the order of their definition."""
    return tuple(
        SymbolicConstraint(c.debug_str, c.cmp == shape_poly.Comparator.EQ, c.e1, c.e2)
        for c in scope._explicit_constraints
    )


def solved_symbols(avals: Sequence[Aval], shapes: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return the size of each symbol for which these types have these shapes, of the same ranks.

    Raises ValueError, with JAX's message, if there are none. The message names a size by the
    position of its type: `args[1].shape[0]`.
    """
    tree = jax.tree.structure(((0,) * len(avals), {}))
    solution, constraints, places = shape_poly.solve_dim_vars(tuple(avals), tree)
    found = {name: shapes[argument][axis] for name, argument, axis in places}
    evaluator = shape_poly.ShapeEvaluator(found)
    constraints.check_statically(evaluator)
    sizes = {name: evaluator.evaluate(size) for name, size in solution.items()}
    return {
        name: size if is_symbolic_dimension(size) else operator.index(size)
        for name, size in sizes.items()
    }
