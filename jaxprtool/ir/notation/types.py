"""The notation of types, as a jaxpr prints them: one grammar for all readers of types.

    f32[8,128]   key<fry>[2]   bf16[]          dtype and shape
    f32[2*n,128]   f32[2<=n<=64]              symbolic dimensions, and constraints in `--args`
    f32[8@x,4@(y,z)]                           dimensions that are sharded over axes of a mesh
    f32[2]{V:i}   f32[2]{U:(j,k)}              varying, unreduced, reduced over axes of a mesh
    f32<host>[3]                               in another memory space
    ~f32[]   f32[8@x]@m0                       in `.jaxpr` files: weakly typed; the mesh's name

`parse_type` splits a text into its parts, and `aval_of_type` builds a type from the parts. The
caller reads the sizes of dimensions: a file has other symbols than `--args` or a pattern.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxprtool import jaxcompat
from jaxprtool.ir.dtypes import array_dtypes, key_dtypes
from jaxprtool.ir.notation.expressions import MAX_INTEGER_BITS, ParsedArguments
from jaxprtool.jaxcompat import Aval, DType


class Dimension(NamedTuple):
    """A dimension as written.

    Attributes:
        size: The text of its size.
        axes: The axes of a mesh that it is sharded over.
        at: The position of the size in the text of the type.
    """

    size: str
    axes: tuple[str, ...]
    at: int


class TypeText(NamedTuple):
    """An array's type as written.

    Attributes:
        weak: Whether it is weakly typed.
        dtype: The name of the dtype, `key<fry>` for keys.
        memory_space: The name of the memory space, or None.
        dims: The dimensions.
        axes: The axes that it is varying, unreduced and reduced over, by these words.
        mesh: The name of the mesh, or None.
    """

    weak: bool
    dtype: str
    memory_space: str | None
    dims: tuple[Dimension, ...]
    axes: dict[str, list[str]]
    mesh: str | None

    @property
    def axis_names(self) -> list[str]:
        """The axes of a mesh that the type names."""
        return [
            *(axis for dim in self.dims for axis in dim.axes),
            *(axis for names in self.axes.values() for axis in names),
        ]


def _nested(levels: int) -> str:
    """Return a pattern of one bracketed text, with up to `levels` levels of brackets inside."""
    inside = r"[^][{}\n]*+"
    if levels:
        inside += rf"(?:{_nested(levels - 1)}[^][{{}}\n]*+)*+"
    return rf"(?:\[{inside}\]|\{{{inside}\}})"


#: A pattern of a type within a longer text, and one of types without spaces, as most are.
ANY_TYPE = rf"~?[A-Za-z]\w*+(?:<\w*+>)?{_nested(3)}*+(?:@\w++)?"
DENSE_TYPE = r"~?[A-Za-z]\w*+(?:<\w*+>)?(?:\[[\w,@]*+\])?(?:\{[\w:,()]*+\})?(?:@\w++)?"

_ARRAY = re.compile(
    r"(~?)(key<\w+>|\w+)(?:<(\w+)>)?\s*\[([^\[\]{}]*)\](?:\{([^{}]*)\})?(?:@(\w+))?"
)

#: JAX's names for the kinds of axes in a type.
_AXES = {"V": "varying", "U": "unreduced", "R": "reduced"}


def parse_type(text: str) -> TypeText:
    """Split the text of an array's type into its parts.

    Raises:
        ValueError: If the text is not a type.
    """
    parts = _ARRAY.fullmatch(text)
    if parts is None:
        raise ValueError(f"'{text}' is not a type")
    weak, dtype, space, shape, axes, mesh = parts.groups()
    start = parts.start(4)
    dims = tuple(_dimension(item, start + at) for item, at in _items(shape))
    return TypeText(bool(weak), dtype, space, dims, _named_axes(axes) if axes else {}, mesh)


def _dimension(text: str, at: int) -> Dimension:
    if "@" not in text:  # the usual case
        return Dimension(text, (), at)
    size, _, axes = text.partition("@")
    return Dimension(size.rstrip(), tuple(_names(axes)), at)


#: The comparisons of sizes; `n < 65` is `n <= 64`.
_COMPARISON = re.compile(r"\s*([<>=]=|[<>=])\s*")


def constrained(dim: Dimension) -> tuple[Dimension, list[str]]:
    """Split a dimension `2 <= n <= 64` into `n` and its constraints: `2 <= n`, `n <= 64`.

    Raises:
        ValueError: If it is not a comparison of one size with numbers by `<=` and `>=`.
    """
    parts = _COMPARISON.split(dim.size)
    if len(parts) == 1:
        return dim, []
    sizes, signs = parts[::2], parts[1::2]
    named = [i for i, size in enumerate(sizes) if not size.isdecimal()]
    if len(named) != 1 or not set(signs) <= {"<=", ">="} or sizes[named[0]] == "_":
        raise ValueError(f"'{dim.size}' is not a bound of a size, such as n<=64 or 2<=n<=64")
    (place,) = named
    at = dim.at + dim.size.rindex(sizes[place]) if place else dim.at
    pairs = zip(sizes, signs, sizes[1:], strict=False)
    return dim._replace(size=sizes[place], at=at), [" ".join(pair) for pair in pairs]


def _named_axes(text: str) -> dict[str, list[str]]:
    """Return the axes in `V:i, U:(j,k)` by kind."""
    by_kind = {}
    for item, _ in _items(text):
        kind, _, names = item.partition(":")
        if kind not in _AXES or not names:
            raise ValueError(f"'{item}' names no axes")
        by_kind[_AXES[kind]] = _names(names)
    return by_kind


def _names(text: str) -> list[str]:
    return [name for name, _ in _items(text[1:-1])] if text.startswith("(") else [text]


def _items(text: str) -> list[tuple[str, int]]:
    """Return the items between commas outside of parentheses, and the position of each."""
    items, at = [], 0
    for item in _split(text) if "(" in text else text.split(","):
        stripped = item.strip()
        items.append((stripped, at + item.index(stripped)))
        at += len(item) + 1
    if not items[-1][0]:  # there are no items, or a comma ends the last
        items.pop()
    return items


def _split(text: str) -> list[str]:
    items, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            items.append(text[start:i])
            start = i + 1
    return [*items, text[start:]]


# --- meaning of the parts ---------------------------------------------------------------------


def dtype_named(name: str) -> DType:
    """Return the dtype of a name. Raises ValueError."""
    if name.startswith("key<"):
        dtype = key_dtypes().get(name[4:-1])
        if dtype is None:
            raise ValueError(f"unknown random number generator '{name[4:-1]}'")
        return dtype
    dtype = array_dtypes().get(name)
    if dtype is None:
        raise ValueError(f"unknown dtype '{name}'")
    return dtype


def memory_space_named(name: str) -> Any:
    """Return the memory space of a name. Raises ValueError."""
    for space in jax.memory.Space:
        if space.name.lower() == name:
            return space
    raise ValueError(f"unknown memory space '{name}'")


def aval_of_type(
    parsed: TypeText,
    sizes: Sequence[Any],
    mesh: AbstractMesh | None = None,
    foreign: Mapping[str, Any] | None = None,
) -> Aval:
    """Return the abstract value of a type.

    Args:
        parsed: The type as written.
        sizes: The size of each dimension.
        mesh: The mesh whose axes the type names; None if it names none.
        foreign: The dtypes and memory spaces that JAX does not have, by name.

    Raises:
        ValueError: If the dtype, memory space or axes are unknown, or the mesh does not divide a
            dimension.
    """
    foreign, space = foreign or {}, parsed.memory_space or "device"
    return jaxcompat.array_type(
        sizes,
        foreign[parsed.dtype] if parsed.dtype in foreign else dtype_named(parsed.dtype),
        parsed.weak,
        memory_space=foreign[space] if space in foreign else memory_space_named(space),
        **({} if mesh is None else _layout(parsed, mesh)),
    )


def _layout(parsed: TypeText, mesh: AbstractMesh) -> dict[str, Any]:
    """Return how an array is sharded over a mesh."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    axes = dict(parsed.axes)
    manual: dict[str, list[str]] = {"varying": axes.pop("varying", [])}
    spec: dict[str, set[str]] = {}
    for kind, names in axes.items():
        manual[kind] = [a for a in names if types.get(a) == AxisType.Manual]
        spec[kind] = {a for a in names if types.get(a) != AxisType.Manual}
    partitions = [d.axes[0] if len(d.axes) == 1 else d.axes or None for d in parsed.dims]
    return {
        "sharding": NamedSharding(mesh, PartitionSpec(*partitions, **spec)),
        "varying": manual,
    }


# --- sizes that a user writes ---------------------------------------------------------------------

_OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}

#: The functions that JAX uses in sizes.
_FUNCTIONS: dict[str, Callable] = {
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": jax.core.max_dim,
    "min": jax.core.min_dim,
}

#: The highest power in a size.
_MOST_EXPONENT = 64


@dataclass(frozen=True, eq=False)
class SizeExpression:
    """The size of a dimension as a user writes it: an integer, a name, or an expression of them.

    It may be written as JAX prints sizes (`floordiv(n, 2)`, `n^2`), or in Python (`n // 2`).
    """

    source: ParsedArguments
    node: ast.expr

    @property
    def names(self) -> list[str]:
        """The names in the expression."""
        nodes = list(ast.walk(self.node))
        functions = [node.func for node in nodes if isinstance(node, ast.Call)]
        return [node.id for node in nodes if isinstance(node, ast.Name) and node not in functions]

    def __call__(self, sizes: Mapping[str, Any]) -> Any:
        """Return the size for these values of the names, or raise the source's error."""
        return self._value(self.node, sizes)

    def _value(self, node: ast.expr, sizes: Mapping[str, Any]) -> Any:
        if isinstance(node, ast.Name):
            return sizes[node.id]
        if isinstance(node, ast.Constant):
            return self.source.integer(node)
        match node:
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand, sizes)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self._value(operand, sizes)
            case ast.BinOp(left=left, right=right) if type(node.op) in _OPERATORS:
                combine = _OPERATORS[type(node.op)]
            case ast.Call(func=ast.Name(id=name), args=[left, right], keywords=[]) if (
                name in _FUNCTIONS
            ):
                combine = _FUNCTIONS[name]
            case _:
                hint = "a dimension must be an integer, or a name such as n or 2*n"
                raise self.source.not_allowed(node, hint)
        first, second = self._value(left, sizes), self._value(right, sizes)
        if combine is operator.pow and second not in range(1, _MOST_EXPONENT + 1):
            raise self.source.fail(right, f"an exponent must be from 1 to {_MOST_EXPONENT}")
        value = combine(first, second)
        if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
            raise self.source.fail(node, f"an integer has more than {MAX_INTEGER_BITS} bits")
        return value


def size_in(source: ParsedArguments, start: int, dim: Dimension) -> SizeExpression:
    """Return the size of a dimension of a type that begins at `start` in a text."""
    at = start + dim.at
    return SizeExpression(source, source.part(slice(at, at + len(dim.size))))
