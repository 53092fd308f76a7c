"""A program as a graph of equations and values, in which calls are inlined.

Rules look for patterns that JAX spreads over calls: `jnp.sort(x)[-3:]` is a `jit` with a `sort`,
and a slice beside it. So the calls of `jit`, `remat` and custom derivatives are inlined. Loops and
branches are nodes whose bodies are scopes of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.analysis.cost.by_equation import Operations
from jaxprtool.analysis.cost.trip_counts import trip_count
from jaxprtool.ir.core.equations import is_flat, size_in_bytes
from jaxprtool.ir.core.regions import Regions, regions
from jaxprtool.ir.core.traits import Traits, traits
from jaxprtool.ir.shapes.symbols import value_of
from jaxprtool.ir.source.scopes import is_backward
from jaxprtool.jaxcompat import Aval, DropVar, Jaxpr, JaxprEqn, Literal, Var

#: The number of equations after which bodies that were entered before are not entered again.
_MOST_EQUATIONS = 30_000


class Value:
    """A value in a scope.

    Attributes:
        aval: Its type.
        scope: The scope that it belongs to; None for a literal.
        node: The equation that computes it; None for arguments, constants and literals.
        index: Its position among the results of the equation, or the arguments of the scope.
        readers: The equations of the scope that read it, each as often as it is their operand.
        is_result: Whether it is a result of the scope.
        literal: The number, for a literal; else None.
        constant: The array, for a constant; else None.
        outer: For an argument of a body that is the same in every iteration: the operand.
    """

    __slots__ = (
        *("aval", "constant", "index", "is_result", "literal", "node", "outer", "readers"),
        "scope",
    )

    def __init__(self, aval: Aval, scope: Scope | None, node: Node | None = None, index: int = 0):
        self.aval = aval
        self.scope = scope
        self.node = node
        self.index = index
        self.readers: list[Node] = []
        self.is_result = False
        self.literal: Any = None
        self.constant: Any = None
        self.outer: Value | None = None

    @property
    def shape(self) -> tuple[Any, ...]:
        """Its shape; () for a token."""
        return tuple(getattr(self.aval, "shape", ()))

    @property
    def dtype(self) -> Any:
        """Its dtype; None for a token."""
        return getattr(self.aval, "dtype", None)

    @property
    def live_readers(self) -> list[Node]:
        """The equations that read it and that a result or an effect depends on."""
        return [node for node in self.readers if node.is_live]

    @property
    def bytes(self) -> int:
        """Its size."""
        return self._number(size_in_bytes(self.aval))

    @property
    def elements(self) -> int:
        """The number of its elements."""
        count: Any = 1
        for size in self.shape:
            count = count * size
        return self._number(count)

    def _number(self, size: Any) -> int:
        return size if isinstance(size, int) or self.scope is None else self.scope.number(size)


class Node:
    """An equation of a scope.

    Attributes:
        eqn: The equation.
        around: The equations whose bodies contain it, the outermost first.
        scope: The scope that it is in.
        ins: Its operands.
        outs: Its results.
        held: The regions of a loop or a branch; else None.
        inner: The scopes of its bodies.
        is_live: Whether a result or an effect of the program depends on it.
    """

    __slots__ = ("around", "eqn", "held", "inner", "ins", "is_live", "outs", "scope")

    def __init__(self, eqn: JaxprEqn, around: tuple[JaxprEqn, ...], scope: Scope):
        self.eqn = eqn
        self.around = around
        self.scope = scope
        self.ins: tuple[Value, ...] = ()
        self.outs: tuple[Value, ...] = ()
        self.held: Regions | None = None
        self.inner: tuple[Scope, ...] = ()
        self.is_live = True

    @property
    def name(self) -> str:
        """The name of its primitive."""
        return str(self.eqn.primitive.name)

    @property
    def traits(self) -> Traits:
        """The traits of its primitive."""
        return traits(self.eqn)

    @property
    def path(self) -> tuple[JaxprEqn, ...]:
        """The equations around it, and its own."""
        return (*self.around, self.eqn)

    @property
    def is_backward(self) -> bool:
        """True if it belongs to the backward part of a gradient."""
        return any(map(is_backward, self.path))

    @property
    def is_checkpointed(self) -> bool:
        """True if it is in a call of `jax.checkpoint`."""
        return any(traits(eqn).call == "remat" for eqn in self.around)

    @property
    def has_rule(self) -> bool:
        """True if it is in a function with its own derivative."""
        return any(traits(eqn).custom_derivative for eqn in self.around)

    @property
    def operations(self) -> int:
        """The FLOPs and transcendentals of all its runs."""
        return self.scope.number(self.scope.count.of(self.eqn)) * self.scope.runs

    @property
    def bytes(self) -> int:
        """The bytes of its results, in all its runs."""
        return sum(value.bytes for value in self.outs) * self.scope.runs


class Scope:
    """The program, or the body of a loop or a branch, with the calls in it inlined.

    Attributes:
        parent: The equation that holds the body; None for the program.
        nodes: The equations, in order.
        arguments: The arguments.
        constants: The constants, also those of inlined calls.
        results: The results.
        runs: How often it runs; loops with an unknown trip count count as one iteration.
        number_of_body: The index of the body among those of the parent.
        count: Counts the operations of equations.
    """

    def __init__(
        self, parent: Node | None, number_of_body: int, runs: int, sizes: Any, count: Operations
    ):
        self.parent = parent
        self.number_of_body = number_of_body
        self.runs = runs
        self.nodes: list[Node] = []
        self.arguments: list[Value] = []
        self.constants: list[Value] = []
        self.results: list[Value] = []
        self.count = count
        self._sizes = sizes

    def number(self, size: Any) -> int:
        """Return a size as a number, with symbolic dimensions of a typical size."""
        return int(size if isinstance(size, int) else value_of(size, self._sizes))

    @cached_property
    def loop(self) -> Node | None:
        """The innermost loop around, or None."""
        scope: Scope | None = self
        while scope is not None and scope.parent is not None:
            if scope.parent.held is not None and scope.parent.held.kind == "loop":
                return scope.parent
            scope = scope.parent.scope
        return None

    def walk(self) -> Iterator[Node]:
        """Yield the equations at every depth, in order."""
        for node in self.nodes:
            yield node
            for inner in node.inner:
                yield from inner.walk()

    def inside(self) -> Iterator[Scope]:
        """Yield this scope and those in it, at every depth."""
        todo = [self]
        for scope in todo:
            yield scope
            todo += [inner for node in scope.nodes for inner in node.inner]


class GraphBuilder:
    """Builds the graph of a program.

    Args:
        sizes: The sizes of symbolic dimensions.
    """

    def __init__(self, sizes: Any) -> None:
        self._sizes = sizes
        self._count = 0
        self._entered: set[Jaxpr] = set()
        self._operations = Operations()

    def program(self, top: Jaxpr) -> Scope:
        """Return the graph of a program's open jaxpr."""
        return self._body(jaxcompat.close_jaxpr(top), None, 0, 1, ())

    def _body(
        self, closed: Any, parent: Node | None, number: int, runs: int, around: tuple[JaxprEqn, ...]
    ) -> Scope:
        scope = Scope(parent, number, runs, self._sizes, self._operations)
        jaxpr = jaxcompat.open_jaxpr(closed)
        known: dict[Var, Value] = {}
        for i, var in enumerate(jaxpr.invars):
            known[var] = Value(var.aval, scope, None, i)
            scope.arguments.append(known[var])
        self._add(scope, closed, known, around)
        for atom in jaxpr.outvars:
            value = _literal(atom) if type(atom) is Literal else known[atom]
            value.is_result = True
            scope.results.append(value)
        return scope

    def _add(
        self, scope: Scope, closed: Any, known: dict[Var, Value], around: tuple[JaxprEqn, ...]
    ) -> None:
        """Add the equations of a body, whose arguments are known, to a scope."""
        jaxpr = jaxcompat.open_jaxpr(closed)
        constants = closed.consts or [None] * len(jaxpr.constvars)  # none if the jaxpr is open
        for var, constant in zip(jaxpr.constvars, constants, strict=True):
            value = known[var] = Value(var.aval, scope)
            value.constant = constant
            scope.constants.append(value)
        self._count += len(jaxpr.eqns)
        flat = is_flat(jaxpr)
        for eqn in jaxpr.eqns:
            ins = tuple([_literal(v) if type(v) is Literal else known[v] for v in eqn.invars])
            held = None if flat else regions(eqn)
            if held is not None and not self._may_enter(held):
                held = None
            if held is not None and held.kind == "call":
                self._open(scope, held, ins, known, (*around, eqn))
                continue
            node = Node(eqn, around, scope)
            node.ins = ins
            for value in ins:
                value.readers.append(node)
            node.outs = tuple(
                [Value(var.aval, scope, node, i) for i, var in enumerate(eqn.outvars)]
            )
            known.update(zip(eqn.outvars, node.outs, strict=True))
            scope.nodes.append(node)
            if held is not None:
                self._hold(node, held)

    def _may_enter(self, held: Regions) -> bool:
        """Return True if bodies are to be added; calls of calls may be exponentially many."""
        seen = self._entered.issuperset(held.jaxprs)
        self._entered.update(held.jaxprs)
        return not seen or self._count < _MOST_EQUATIONS

    def _open(
        self,
        scope: Scope,
        held: Regions,
        ins: tuple[Value, ...],
        known: dict[Var, Value],
        around: tuple[JaxprEqn, ...],
    ) -> None:
        (closed,), (body,), (region,) = held.bodies, held.jaxprs, held.regions
        own = {var: ins[i] for i, var in zip(region.ins, body.invars, strict=True)}
        self._add(scope, closed, own, around)
        for out, atom in zip(region.outs, body.outvars, strict=True):
            assert out is not None
            value = _literal(atom) if type(atom) is Literal else own[atom]
            var = held.eqn.outvars[out]
            if not isinstance(var, DropVar):
                known[var] = value

    def _hold(self, node: Node, held: Regions) -> None:
        """Add the scopes of the bodies of a loop or a branch."""
        node.held = held
        count = trip_count(held)
        runs = node.scope.runs * (1 if count is None else node.scope.number(count))
        scopes = []
        for number, (closed, region) in enumerate(zip(held.bodies, held.regions, strict=True)):
            scope = self._body(closed, node, number, runs, node.path)
            pairs = zip(scope.arguments, region.ins, region.loop_invariant, strict=True)
            for value, place, is_same in pairs:
                value.outer = node.ins[place] if is_same else None
            scopes.append(scope)
        node.inner = tuple(scopes)


def _literal(atom: Literal) -> Value:
    value = Value(atom.aval, None)
    value.literal = atom.val
    return value


def mark_live(scope: Scope, is_live: bool = True) -> None:
    """Set which equations a result or an effect depends on, at every depth."""
    for node in reversed(scope.nodes):
        node.is_live = is_live and (
            bool(node.eqn.effects)
            or any(out.is_result or any(n.is_live for n in out.readers) for out in node.outs)
        )
        for inner in node.inner:
            mark_live(inner, node.is_live)
