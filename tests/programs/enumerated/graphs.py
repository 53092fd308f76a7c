"""All small programs over a family of primitives, up to names.

A graph is its equations, each an operation with its operands (an argument, a literal, or a result
of an earlier equation), and the values it returns. Arguments of one type are numbered in the order
of their first use. Operands come in every order, also those of commutative operations.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Var

from jaxprtool import trace
from jaxprtool.ir.program import Program
from jaxprtool.jaxcompat import replace_jaxpr, weakly_typed
from tests.programs.enumerated.templates import Operation, Templates

#: An argument ("a", 0), a value ("r", 0), or a literal ("c", 0), by number.
Operand = tuple[str, int]
Equation = tuple[int, tuple[Operand, ...]]

#: The special values of each kind of number, and two ordinary ones.
SPECIAL = {
    "f": [np.nan, np.inf, -np.inf, 0.0, -0.0, -1.5, 3.0],
    "c": [complex(np.nan, 1), complex(-0.0, np.inf), 0.0, complex(-1.5, -0.0), 3 + 2j],
    "i": [-(2**31), 2**31 - 1, 0, -1, 5, 2],
    "b": [True, False],
}


@dataclass(slots=True)
class Graph:
    """A program under construction: its equations, and what they have read so far."""

    equations: tuple[Equation, ...]
    eqns: tuple[JaxprEqn, ...]
    values: tuple[Var, ...]
    types: tuple[int, ...]
    arguments: int = 0  # bit mask of the read arguments
    literals: int = 0
    read: int = 0  # bit mask of the read values
    #: For the last equation: the number of arguments read before it, and its first result.
    before: int = 0
    first: int = 0
    results: tuple[int, ...] = ()

    @property
    def unread(self) -> list[int]:
        return [i for i in range(len(self.values)) if not self.read >> i & 1]


EMPTY = Graph((), (), (), ())


@dataclass(frozen=True, eq=False)
class Family:
    """Primitives that rules combine, and the enumeration of their programs.

    Attributes:
        operations: The operations of equations.
        arguments: The types of the arguments.
        alike: Whether programs that differ only in the names of arguments of one type are the same.
        literals: The possible literal operands, at most `most_literals` of them in a program.
        equations: The maximum number of equations.
        unread: The maximum number of values that no equation reads; these are results.
        returned: The maximum number of other values that are results too.
        orders: Enumerate every order of independent equations. Otherwise, at least one program
            of each set that differs only in this order.
        dead: Enumerate programs whose last value is the only unread result, and other values are
            dead.
        trees: Enumerate only programs that read each argument and value once.
        share: The fraction of the programs of maximum size that is drawn, uniformly.
        pipelines: The pipelines to apply to each program.
        groups: The number of units of work.
        in_ci: Prove all programs in CI, where other families are sampled.
    """

    name: str
    operations: Sequence[Operation]
    arguments: Sequence[Any]
    literals: Sequence[Any] = ()
    equations: int = 3
    most_literals: int = 1
    unread: int = 3
    returned: int = 3
    orders: bool = True
    dead: bool = False
    trees: bool = False
    alike: bool = True
    share: float = 1.0
    pipelines: Sequence[str] = ("simplify", "-O1")
    groups: int = 1
    in_ci: bool = False
    _skeletons: dict[int, Program] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def templates(self) -> Templates:
        return Templates(self.operations, self.literals)

    @cached_property
    def argument_types(self) -> list[int]:
        return [self.templates.number(aval) for aval in self.arguments]

    @cached_property
    def variables(self) -> list[Var]:
        return list(map(Var, self.arguments))

    # --- units ----------------------------------------------------------------------------------

    @cached_property
    def _beginnings(self) -> list[Graph]:
        """Return the first equations of programs, by which these are grouped."""
        depth = self._depth
        return [g for g in self.grown(EMPTY, depth) if len(g.equations) == depth]

    @property
    def _depth(self) -> int:
        return min(2, self.equations - 1)

    def units(self) -> list[str]:
        """Return the names of groups of programs of about equal size."""
        return list(map(str, range(min(self.groups, len(self._beginnings)))))

    def programs(self, unit: str) -> Iterator[tuple[Graph, Program]]:
        """Yield every program of a unit once. A graph is valid until the next one is yielded."""
        for graph in self.graphs(unit):
            yield graph, self.program(graph)

    def graphs(self, unit: str) -> Iterator[Graph]:
        """Yield every graph of a unit once, with each choice of results."""
        number = int(unit)
        if number == 0:
            for graph in self.grown(EMPTY, self._depth - 1):
                if graph.equations:
                    yield from self._with_results(graph)
        draw = random.Random(number) if self.share < 1 else None
        for beginning in self._beginnings[number :: self.groups]:
            for graph in self.grown(beginning, self.equations, draw):
                yield from self._with_results(graph)

    # --- growth ---------------------------------------------------------------------------------

    def grown(self, graph: Graph, size: int, draw: random.Random | None = None) -> Iterator[Graph]:
        """Yield a graph and all its extensions up to a size, with a sample of the largest."""
        yield graph
        count = len(graph.equations)
        if count >= size:
            return
        # With four equations, the third is sampled too, so that few programs are built in vain.
        kept = self.share ** (1 / (self.equations - self._depth))
        for number, operation in enumerate(self.operations):
            for operands, arguments, literals in self._operands(operation.arity, graph):
                if draw and draw.random() > kept:
                    continue
                new = self._extended(graph, (number, operands), arguments, literals)
                if new is not None:
                    yield from self.grown(new, size, draw)

    def drawn(self, draw: random.Random) -> Iterator[Graph]:
        """Yield a program of maximum size, or nothing if it is not in the sample."""
        graph: Graph | None = EMPTY
        for _ in range(self.equations):
            choices = [
                (number, operands, *read)
                for number, operation in enumerate(self.operations)
                for operands, *read in self._operands(operation.arity, graph)
            ]
            draw.shuffle(choices)
            grown = (self._extended(graph, choice[:2], *choice[2:]) for choice in choices)
            graph = next((new for new in grown if new is not None), None)
            if graph is None:
                return
        results = [graph.results for graph in self._with_results(graph)]
        if results:
            graph.results = draw.choice(results)
            yield graph

    def _operands(self, arity: int, graph: Graph) -> Iterator[tuple[Any, int, int]]:
        """Yield each choice of operands, with the arguments and literals that are read by then."""
        values: list[Operand] = [("r", n) for n in range(len(graph.values))]
        if self.trees:
            values = [("r", n) for n in graph.unread]
        numbers: list[Operand] = [("c", n) for n in range(len(self.literals))]

        def chosen(count: int, arguments: int, literals: int) -> Iterator[tuple[Any, int, int]]:
            if not count:
                yield (), arguments, literals
                return
            for n in self._next_arguments(arguments):
                if not (self.trees and arguments >> n & 1):
                    for rest, *after in chosen(count - 1, arguments | 1 << n, literals):
                        yield (("a", n), *rest), *after
            for value in values:
                for rest, *after in chosen(count - 1, arguments, literals):
                    if not (self.trees and value in rest):
                        yield (value, *rest), *after
            if literals < self.most_literals:
                for number in numbers:
                    for rest, *after in chosen(count - 1, arguments, literals + 1):
                        yield (number, *rest), *after

        yield from chosen(arity, graph.arguments, graph.literals)

    def _next_arguments(self, read: int) -> list[int]:
        """Return the arguments that are read already, and the first unread one of each type."""
        if not self.alike:
            return list(range(len(self.arguments)))
        found, new = [], set()
        for n, kind in enumerate(self.argument_types):
            if read >> n & 1:
                found.append(n)
            elif kind not in new:
                new.add(kind)
                found.append(n)
        return found

    def _extended(
        self, graph: Graph, equation: Equation, arguments: int, literals: int
    ) -> Graph | None:
        number, operands = equation
        types, read = [], graph.read
        for kind, n in operands:
            if kind == "r":
                types.append(graph.types[n])
                read |= 1 << n
            else:
                types.append(self.argument_types[n] if kind == "a" else ~n)
        template = self.templates.of(number, tuple(types))
        if template is None or not (self.orders or self._in_order(graph, equation)):
            return None
        count = len(graph.values) + len(template.results)
        left = self.equations - len(graph.equations) - 1
        most_read = max(op.arity for op in self.operations) - 1 if left else 0
        if not self.dead and count - read.bit_count() > self.unread + left * max(most_read, 0):
            return None
        atoms = [
            graph.values[n] if kind == "r" else self.variables[n]
            for kind, n in operands
            if kind != "c"
        ]
        eqns, results = template.copy(atoms)
        return Graph(
            (*graph.equations, equation),
            (*graph.eqns, *eqns),
            (*graph.values, *results),
            (*graph.types, *template.results),
            arguments,
            literals,
            read,
            before=graph.arguments,
            first=len(graph.values),
        )

    def _in_order(self, graph: Graph, equation: Equation) -> bool:
        """Return False if the equation could precede the last one and compares less than it."""
        number, operands = equation
        if not graph.equations or any(k == "r" and n >= graph.first for k, n in operands):
            return True
        names: dict[int, int] = {}
        read, renamed = graph.before, []
        for kind, n in operands:
            if kind == "a" and not graph.before >> n & 1 and n not in names:
                same = self.argument_types[n]
                names[n] = next(
                    i
                    for i in self._next_arguments(read)
                    if not read >> i & 1 and self.argument_types[i] == same
                )
                read |= 1 << names[n]
            renamed.append((kind, names.get(n, n) if kind == "a" else n))
        return (number, tuple(renamed)) >= graph.equations[-1]

    def _with_results(self, graph: Graph) -> Iterator[Graph]:
        """Yield a graph with each choice of results."""
        count = len(graph.values)
        last, unread = count - 1, graph.unread
        if not self.dead and len(unread) > self.unread:
            return
        fixed = [last] if self.dead else unread
        others = [i for i in range(count) if i not in fixed]
        for size in range(min(self.returned, len(others)) + 1):
            for more in itertools.combinations(others, size):
                graph.results = tuple(sorted((*fixed, *more)))
                yield graph

    # --- programs and values --------------------------------------------------------------------

    def text(self, graph: Graph) -> str:
        """Return a program as `mul(a0, -1.0); neg(r0) -> r1`."""

        def shown(operand: Operand) -> str:
            kind, n = operand
            return str(self.literals[n]) if kind == "c" else f"{kind}{n}"

        lines = (
            f"{self.operations[k].name}({', '.join(map(shown, ins))})" for k, ins in graph.equations
        )
        return f"{self.name}: {'; '.join(lines)} -> " + ", ".join(f"r{i}" for i in graph.results)

    def program(self, graph: Graph) -> Program:
        """Return a graph as a program of all the family's arguments."""
        count = len(graph.results)
        if count not in self._skeletons:
            structs = [
                jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type)
                for a in self.arguments
            ]
            self._skeletons[count] = trace(lambda *args: [args[0]] * count, *structs)
        skeleton = self._skeletons[count]
        outs = [graph.values[i] for i in graph.results]
        jaxpr = replace_jaxpr(
            skeleton.jaxpr,
            invars=self.variables,
            outvars=outs,
            eqns=graph.eqns,
            debug_info=skeleton.jaxpr.debug_info,
        )
        return skeleton.replace(jaxpr=jaxpr)

    @cached_property
    def lanes(self) -> tuple[int, ...]:
        """Return the batch shape in which scalars are evaluated, as operations are elementwise."""
        scalar = all(aval.shape == () for aval in self.arguments)
        return (_combinations(self.arguments)[0].size,) if scalar else ()

    def inputs(self) -> list[jax.Array]:
        """Return arguments whose elements cover all combinations of special values."""
        columns = _combinations(self.arguments)
        found = []
        for column, aval in zip(columns, self.arguments, strict=True):
            array = np.resize(column, self.lanes + aval.shape)
            found.append(weakly_typed(array) if aval.weak_type else jax.numpy.asarray(array))
        return found


def _combinations(avals: Sequence[Any]) -> list[np.ndarray]:
    """Return all combinations of special values of some types, shuffled, one per column."""
    special = [SPECIAL[_kind(aval.dtype)] for aval in avals]
    grid = list(itertools.product(*special))
    random.Random(0).shuffle(grid)
    with np.errstate(all="ignore"):
        return [
            np.array([row[i] for row in grid]).astype(aval.dtype) for i, aval in enumerate(avals)
        ]


def _kind(dtype: Any) -> str:
    for letter, kind in ("b", np.bool_), ("i", np.integer), ("c", np.complexfloating):
        if jax.numpy.issubdtype(dtype, kind):
            return letter
    return "f"
