"""The types that a pattern's arguments are declared with: examples, and what they ask of a match.

A declaration is text in the notation of a jaxpr, `f32[n,d]`, or anything with a shape and a dtype,
or a number. It stands for arrays of the same kind of dtype (`f32` for every float, `i32` for every
integer), of the same number of dimensions, or at least as many where the text begins with an
ellipsis: `f32[...,n,d]`. A number is an example of a size. A name is one size, the same wherever
it stands in the pattern, and an expression of names (`2*n`) is what these make of it.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp

from jaxprtool import expressions, jaxcompat
from jaxprtool.errors import ArgumentsError, did_you_mean
from jaxprtool.ir import dtypes

_HINT = "types are written as a jaxpr prints them: f32[n,d], bf16[...,8,n], i32[]"

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}

_KINDS = (jax.dtypes.prng_key, jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


@dataclass(frozen=True)
class Declared:
    """One declared type. `dims` are numbers, and expressions as Python's `ast` has them."""

    dtype: Any
    dims: tuple[Any, ...]
    more_dims: bool = False

    @property
    def is_scalar(self) -> bool:
        return not self.dims and not self.more_dims

    def aval(
        self, sizes: Mapping[str, Any], floats: Any = None, more: int = 0, weak: bool = False
    ) -> Any:
        """A type of this declaration, with these sizes for the names.

        `floats` is the dtype of those declared as floats, if not their own; `more` is how many
        dimensions an ellipsis stands for; `weak` has scalars weakly typed, as Python's are.
        """
        leading = tuple(range(2, 2 + more)) if self.more_dims else ()
        dtype = floats if floats is not None and kind(self.dtype) is jnp.floating else self.dtype
        shape = (*leading, *(_size(dim, sizes) for dim in self.dims))
        return jaxcompat.array_type(shape, dtype, weak and self.is_scalar)


def declared(value: Any, what: str) -> Declared:
    """The declaration that a leaf of the example arguments is; `what` is its name for messages.

    Raises ArgumentsError for what is none.
    """
    if isinstance(value, str):
        return _read(value, what)
    try:
        aval = jax.api_util.shaped_abstractify(value)
        return Declared(aval.dtype, tuple(aval.shape))
    except (TypeError, AttributeError):
        kind = type(value).__name__
        raise ArgumentsError(f"{what} is declared by a {kind}, which is no type", _HINT) from None


def kind(dtype: Any) -> Any:
    """The kind of a dtype, of which all match each other."""
    return next((each for each in _KINDS if jax.dtypes.issubdtype(dtype, each)), dtype)


def names_of(declarations: Sequence[Declared]) -> list[str]:
    """The names of sizes in declarations, in order."""
    nodes = (node for each in declarations for dim in each.dims for node in _nodes(dim))
    return list(dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name)))


def example_sizes(declarations: Sequence[Declared]) -> dict[str, int]:
    """A size for each name: different ones, and none that occurs otherwise."""
    primes = (n for n in count(11) if all(n % d for d in range(2, n)))
    return dict(zip(names_of(declarations), primes, strict=False))


def symbolic_sizes(names: Sequence[str]) -> dict[str, Any]:
    """A symbolic size for each name."""
    from jax import export  # seldom needed, and slow to import

    if not names:
        return {}
    symbols = export.symbolic_shape(", ".join(f"size{i}" for i in range(len(names))))
    return dict(zip(names, symbols, strict=True))


def sizes_in(declarations: Sequence[Declared], avals: Sequence[Any]) -> dict[str, Any] | None:
    """The sizes by name with which values of these types are as declared; None if they are not."""
    sizes: dict[str, Any] = {}
    expected: list[tuple[ast.expr, Any]] = []
    for each, aval in zip(declarations, avals, strict=True):
        rank = len(each.dims)
        if aval.ndim < rank or (aval.ndim > rank and not each.more_dims):
            return None
        if kind(aval.dtype) is not kind(each.dtype):
            return None
        for dim, size in zip(each.dims, aval.shape[aval.ndim - rank :], strict=True):
            if isinstance(dim, ast.Name):
                if not _equal(sizes.setdefault(dim.id, size), size):
                    return None
            elif isinstance(dim, ast.expr):
                expected.append((dim, size))
    return sizes if all(_equal(_size(dim, sizes), size) for dim, size in expected) else None


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # of symbolic dimensions, that cannot be told
        return False


def _size(dim: Any, sizes: Mapping[str, Any]) -> Any:
    if isinstance(dim, ast.Name):
        return sizes[dim.id]
    if isinstance(dim, ast.Constant):
        return dim.value
    if isinstance(dim, ast.BinOp):
        return _OPERATORS[type(dim.op)](_size(dim.left, sizes), _size(dim.right, sizes))
    return dim


def _nodes(dim: Any) -> Any:
    return ast.walk(dim) if isinstance(dim, ast.AST) else ()


def _read(text: str, what: str) -> Declared:
    source = expressions.read(text, f"the type of {what}", ArgumentsError, empty_subscripts=True)
    if len(source.args) != 1 or source.keywords:
        raise ArgumentsError(f"the type of {what} is '{text}', which is not one type", _HINT)
    (node,) = source.args
    if source.is_empty_subscript(node) and isinstance(node, ast.Call):
        name, dims = node.func, []
    elif isinstance(node, ast.Subscript):
        name = node.value
        dims = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    else:
        raise source.not_allowed(node, _HINT)
    if not isinstance(name, ast.Name) or name.id not in dtypes.array_dtypes():
        near = did_you_mean(source.segment(name), dtypes.array_dtypes())
        raise source.fail(name, f"'{source.segment(name)}' is no dtype", near or _HINT)
    more = bool(dims) and isinstance(dims[0], ast.Constant) and dims[0].value is Ellipsis
    sizes = tuple(_dimension(source, dim) for dim in dims[more:])
    made = Declared(dtypes.array_dtypes()[name.id], sizes, more)
    known = {node.id for dim in sizes for node in _nodes(dim) if isinstance(node, ast.Name)}
    made.aval(dict.fromkeys(known, 97))
    return made


def _dimension(source: expressions.Source, node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value >= 0:
        return node.value
    for part in ast.walk(node):
        if isinstance(part, ast.Name | ast.BinOp | ast.expr_context):
            continue
        if isinstance(part, ast.Constant) and type(part.value) is int:
            continue
        if isinstance(part, ast.operator) and type(part) in _OPERATORS:
            continue
        hint = "a size is a number, a name, or an expression of them such as 2*n"
        raise source.fail(node, f"'{source.segment(node)}' is no size", hint)
    return node
