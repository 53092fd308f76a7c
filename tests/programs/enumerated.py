"""All small programs over a family of primitives, up to the names of arguments.

A graph is its equations, each a primitive with its operands (an argument, a literal, or the result
of an equation before), and which results it returns: the last, each that nothing else reads, and
any of the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Shape = tuple[int, ...]
#: An argument ("a", 0), the result of an equation ("r", 0), or a literal ("c", 1.0).
Operand = tuple[str, Any]


@dataclass(frozen=True)
class Operation:
    """A function of one or two values; `shape` gives that of the result from an operand's."""

    name: str
    function: Callable[..., Any]
    arity: int
    shape: Callable[[Shape], Shape] = lambda shape: shape


def _unary(*functions: Callable[..., Any]) -> list[Operation]:
    return [Operation(f.__name__, f, 1) for f in functions]


def _binary(*functions: Callable[..., Any]) -> list[Operation]:
    return [Operation(f.__name__, f, 2) for f in functions]


@dataclass(frozen=True)
class Graph:
    """A program, written as `mul(a0, -1.0); neg(r0) -> r1`."""

    equations: tuple[tuple[Operation, tuple[Operand, ...]], ...]
    results: tuple[int, ...]

    def __str__(self) -> str:
        def shown(operand: Operand) -> str:
            kind, which = operand
            return str(which) if kind == "c" else f"{kind}{which}"

        lines = (f"{op.name}({', '.join(map(shown, ins))})" for op, ins in self.equations)
        return "; ".join(lines) + " -> " + ", ".join(f"r{i}" for i in self.results)

    @property
    def arity(self) -> int:
        """The number of its arguments."""
        used = [n for _, ins in self.equations for kind, n in ins if kind == "a"]
        return max(used, default=-1) + 1

    def __call__(self, *args: Any) -> list[Any]:
        values: list[Any] = []
        for op, ins in self.equations:
            of_kind = {"a": lambda n: args[n], "r": values.__getitem__, "c": lambda value: value}
            values.append(op.function(*(of_kind[kind](which) for kind, which in ins)))
        return [values[i] for i in self.results]


@dataclass(frozen=True)
class Family:
    """Primitives that rules name together, and the programs of them that are tried."""

    name: str
    operations: Sequence[Operation]
    dtype: Any
    literals: tuple[Any, ...] = ()
    shape: Shape = (343,)
    arguments: int = 3
    equations: int = 2

    def graphs(self) -> Iterator[Graph]:
        """Give every graph once."""
        for size in range(1, self.equations + 1):
            yield from self._grown((), (), 0, size)

    def _grown(self, equations: Any, shapes: tuple[Shape, ...], used: int, size: int) -> Any:
        if len(equations) == size:
            read = {n for _, ins in equations for kind, n in ins if kind == "r"}
            choices = [(False, True) if i in read else (True,) for i in range(size)]
            for chosen in itertools.product(*choices):
                yield Graph(equations, tuple(i for i in range(size) if chosen[i]))
            return
        for op in self.operations:
            for ins, seen in self._operands(op.arity, len(equations), used):
                found = {self.shape if kind == "a" else shapes[n] for kind, n in ins if kind != "c"}
                if len(found) == 1:
                    shape = op.shape(found.pop())
                    equation = (op, ins)
                    yield from self._grown((*equations, equation), (*shapes, shape), seen, size)

    def _operands(self, arity: int, defined: int, used: int) -> Iterator[tuple[Any, int]]:
        """Give each choice of operands, with the number of arguments that are read by then."""
        if not arity:
            yield (), used
            return
        options: list[Operand] = [("a", n) for n in range(min(used + 1, self.arguments))]
        options += [("r", n) for n in range(defined)] + [("c", value) for value in self.literals]
        for first in options:
            seen = max(used, first[1] + 1) if first[0] == "a" else used
            for rest, last in self._operands(arity - 1, defined, seen):
                yield (first, *rest), last

    def values(self) -> list[jax.Array]:
        """Return arguments among whose elements all combinations of special values are."""
        special = [np.nan, np.inf, -np.inf, 0.0, -0.0, -1.5, 1e-40]
        if self.dtype != jnp.float32:
            special = [True, False] if self.dtype == jnp.bool_ else [-(2**31), 2**31 - 1, 0, -1, 5]
        grid = np.array(list(itertools.product(special, repeat=self.arguments)), self.dtype)
        size = int(np.prod(self.shape))
        rows = np.linspace(0, len(grid) - 1, size).astype(int) if size < len(grid) else None
        chosen = grid[rows] if rows is not None else np.resize(grid, (size, self.arguments))
        return [jnp.asarray(column.reshape(self.shape)) for column in chosen.T]


def _bits(function: Callable[..., Any]) -> list[Operation]:
    return [Operation(function.__name__.removeprefix("bitwise_"), function, 2)]


_ARITHMETIC = [*_unary(lax.neg), *_binary(lax.add, lax.sub, lax.mul)]
_BITS = [
    *_unary(lax.bitwise_not),
    *(each for f in (lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor) for each in _bits(f)),
]
_SIGNS = [*_unary(lax.neg, lax.abs, lax.sign, lax.square), *_binary(lax.max, lax.min)]
_LAYOUT = [
    Operation("transpose", lambda x: x.T, 1, lambda shape: shape[::-1]),
    Operation("ravel", lambda x: lax.reshape(x, (x.size,)), 1, lambda s: (int(np.prod(s)),)),
    Operation("rev", lambda x: lax.rev(x, (0,)), 1),
    *_unary(lax.neg),
    *_binary(lax.sub, lax.mul),
]
_LITERALS = (0.0, -0.0, 1.0, -1.0, 2.0)

FAMILIES = [
    Family("arithmetic of floats", _ARITHMETIC, jnp.float32, _LITERALS),
    Family("arithmetic of floats, deeper", _ARITHMETIC, jnp.float32, arguments=2, equations=3),
    Family("arithmetic of integers", _ARITHMETIC, jnp.int32, (0, 1, -1, 2)),
    Family("quotients", [*_unary(lax.neg), *_binary(lax.div, lax.mul)], jnp.float32, _LITERALS),
    Family("signs", _SIGNS, jnp.float32, (0.0, -0.0, 1.0), arguments=2),
    Family("bits", _BITS, jnp.bool_, (True, False), equations=2),
    Family("bits of integers", _BITS, jnp.int32, (0, -1), arguments=2),
    Family("layout", _LAYOUT, jnp.float32, shape=(18, 19), arguments=2, equations=3),
]
