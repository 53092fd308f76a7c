"""The declared types of a pattern's arguments: examples, and the requirements on a match.

A declaration is text in the notation of a jaxpr, `f32[n,d]`, or anything with a shape and a dtype,
or a number. It matches arrays of the same kind of dtype (`f32` for every float, `i32` for every
integer) with the same number of dimensions, or at least as many if the text begins with an
ellipsis: `f32[...,n,d]`. A number is an example of a size. A name is one size, the same wherever it
occurs in the pattern, and an expression of names (`2*n`) is computed from these.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError, did_you_mean
from jaxprtool.ir.basics import dtypes
from jaxprtool.ir.notation import expressions, types
from jaxprtool.ir.notation.types import SizeExpression
from jaxprtool.jaxcompat import Aval

_HINT = "write types as a jaxpr prints them: f32[n,d], bf16[...,8,n], i32[]"

_KINDS = (jax.dtypes.prng_key, jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


@dataclass(frozen=True)
class Declared:
    """One declared type."""

    dtype: np.dtype
    dims: tuple[int | SizeExpression, ...]
    more_dims: bool = False

    @property
    def is_scalar(self) -> bool:
        return not self.dims and not self.more_dims

    def aval(
        self,
        sizes: Mapping[str, Any],
        floats: np.dtype | None = None,
        more: int = 0,
        weak: bool = False,
    ) -> Aval:
        """Return a type of this declaration, with these sizes for the names.

        `floats` is the dtype of those declared as floats, if not their own; `more` is how many
        dimensions an ellipsis represents; with `weak`, scalars are weakly typed, as Python's are.
        """
        leading = tuple(range(2, 2 + more)) if self.more_dims else ()
        dtype = floats if floats is not None and kind(self.dtype) is jnp.floating else self.dtype
        shape = (*leading, *(_size(dim, sizes) for dim in self.dims))
        return jaxcompat.array_type(shape, dtype, weak and self.is_scalar)


def declared(value: object, what: str) -> Declared:
    """Return the declaration of a leaf of the example arguments; `what` names it in messages.

    Raises ArgumentsError if it is not a declaration.
    """
    if isinstance(value, str):
        return _read(value, what)
    try:
        aval = jax.api_util.shaped_abstractify(value)
        return Declared(aval.dtype, tuple(aval.shape))
    except (TypeError, AttributeError):
        type_name = type(value).__name__
        raise ArgumentsError(
            f"{what} is declared by a {type_name}, which is not a type", _HINT
        ) from None


def kind(dtype: np.dtype) -> Any:
    """Return the kind of a dtype; dtypes of the same kind match each other."""
    return next((each for each in _KINDS if jax.dtypes.issubdtype(dtype, each)), dtype)


def names_of(declarations: Sequence[Declared]) -> list[str]:
    """Return the names of sizes in declarations, in order."""
    sizes = (dim for each in declarations for dim in each.dims if isinstance(dim, SizeExpression))
    return list(dict.fromkeys(name for size in sizes for name in size.names))


def example_sizes(declarations: Sequence[Declared]) -> dict[str, int]:
    """Return a distinct size for each name that is unlikely to occur otherwise."""
    primes = (n for n in count(11) if all(n % d for d in range(2, n)))
    return dict(zip(names_of(declarations), primes, strict=False))


def symbolic_sizes(names: Sequence[str]) -> dict[str, Any]:
    """Return a symbolic size for each name."""
    from jax import export  # seldom needed, and slow to import

    if not names:
        return {}
    symbols = export.symbolic_shape(", ".join(f"size{i}" for i in range(len(names))))
    return dict(zip(names, symbols, strict=True))


def sizes_in(declarations: Sequence[Declared], avals: Sequence[Aval]) -> dict[str, Any] | None:
    """Return the sizes by name with which these types fit the declarations; None if they do not."""
    sizes: dict[str, Any] = {}
    expected: list[tuple[SizeExpression, Any]] = []
    for each, aval in zip(declarations, avals, strict=True):
        rank = len(each.dims)
        if aval.ndim < rank or (aval.ndim > rank and not each.more_dims):
            return None
        if kind(aval.dtype) is not kind(each.dtype):
            return None
        for dim, size in zip(each.dims, aval.shape[aval.ndim - rank :], strict=True):
            if isinstance(dim, SizeExpression) and isinstance(dim.node, ast.Name):
                if not _equal(sizes.setdefault(dim.node.id, size), size):
                    return None
            elif isinstance(dim, SizeExpression):
                expected.append((dim, size))
    return sizes if all(_equal(dim(sizes), size) for dim, size in expected) else None


def _equal(a: object, b: object) -> bool:
    try:
        return bool(a == b)
    except Exception:  # for symbolic dimensions, equality may be undecidable
        return False


def _size(dim: int | SizeExpression, sizes: Mapping[str, Any]) -> Any:
    return dim(sizes) if isinstance(dim, SizeExpression) else dim


def _read(text: str, what: str) -> Declared:
    source = expressions.read(text, f"the type of {what}", ArgumentsError, types=True)
    if len(source.args) != 1 or source.keywords:
        raise ArgumentsError(f"the type of {what} is '{text}', which is not a single type", _HINT)
    (node,) = source.args
    where = source.type_at(node)
    if where is None:
        raise source.not_allowed(node, _HINT)
    try:
        parsed = types.parse(source.text[where])
    except ValueError as error:
        raise source.fail(node, str(error), _HINT) from None
    if parsed.memory_space or parsed.axes:
        raise source.fail(node, f"'{source.segment(node)}' has more than a dtype and sizes", _HINT)
    if parsed.dtype not in dtypes.array_dtypes():
        near = did_you_mean(parsed.dtype, dtypes.array_dtypes())
        raise source.fail(node, f"'{parsed.dtype}' is not a dtype", near or _HINT)
    more = bool(parsed.dims) and parsed.dims[0].size == "..."
    sizes = tuple(_dimension(source, where.start, dim) for dim in parsed.dims[more:])
    made = Declared(dtypes.array_dtypes()[parsed.dtype], sizes, more)
    made.aval(dict.fromkeys(names_of([made]), 97))
    return made


def _dimension(
    source: expressions.Source, start: int, dim: types.Dimension
) -> int | SizeExpression:
    size = types.size_in(source, start, dim)
    try:
        value = size(dict.fromkeys(size.names, 97))
    except ArgumentsError:
        value = -1
    if value < 0 or dim.axes:
        hint = "a size must be a number, a name, or an expression of names such as 2*n"
        raise source.fail_at(start + dim.at, f"'{dim.size}' is not a size", hint)
    return size if size.names else value
