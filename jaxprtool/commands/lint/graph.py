"""The program that rules check: a graph with calls inlined, its names, and the user's files."""

from __future__ import annotations

import ast
import builtins
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.commands.cost.bodies import Operations
from jaxprtool.commands.cost.rules import trip_count
from jaxprtool.ir import source_text
from jaxprtool.ir.backends import cached_method
from jaxprtool.ir.donation import Donations, donations
from jaxprtool.ir.equations import is_flat, is_inexact, size_in_bytes
from jaxprtool.ir.equivalence import Unkeyable, parameters_key
from jaxprtool.ir.evaluation import evaluate_exactly
from jaxprtool.ir.frames import SourceNames, frames_now
from jaxprtool.ir.program import Program, program_signature
from jaxprtool.ir.regions import Regions, Scan, regions
from jaxprtool.ir.scopes import is_backward
from jaxprtool.ir.symbols import symbols_of, value_of
from jaxprtool.ir.traits import Traits, traits
from jaxprtool.jaxcompat import AnyJaxpr, Aval, DropVar, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.jaxcompat.source_locations import UserFrame

if TYPE_CHECKING:
    from jaxprtool.analysis.grids import GridSteps
    from jaxprtool.commands.cost.kernels import KernelEquation

# --- linted program -------------------------------------------------------------------------------
# The program that rules check: its graph, names, frames, and helpers to follow values.

#: The size of symbolic dimensions at which costs are given.
TYPICAL_SIZE = 512

#: The maximum number of elements of an array that is computed for its numbers.
_MOST_ELEMENTS = 1 << 16

#: The maximum number of equations between such an array and the values it is computed from.
_MOST_STEPS = 64


class LintedProgram:
    """A program, as rules see it.

    Args:
        program: A `Program`, or a jaxpr.
        sources: Reads the source of the user's files. Pass the same one for several programs, so
            that each file is read once.

    Attributes:
        about: The names and types of its arguments and results.
        frames: Reads the frames of equations.
        sources: Reads the source of the user's files.
        top: The graph of the program.
        every: The equations at every depth, in order.
        nodes: Those that run, and that a result or an effect depends on.
    """

    def __init__(self, program: Program | AnyJaxpr, sources: SourceReader | None = None) -> None:
        self.program = program
        self.about = program_signature(program)
        self.frames = frames_now(self.about.roots)
        self.sources = sources or SourceReader()
        sizes = dict.fromkeys(symbols_of(self.about.jaxpr), TYPICAL_SIZE)
        closed = program.jaxpr if isinstance(program, Program) else self.about.jaxpr
        self.top: Scope = GraphBuilder(sizes).program(closed)
        mark_live(self.top)
        self.every = list(self.top.walk())
        self.nodes = [node for node in self.every if node.is_live and node.scope.runs]
        self._by_name: dict[str, list[Node]] = {}
        for node in self.nodes:
            self._by_name.setdefault(node.name, []).append(node)
        self._lines: dict[object, tuple[UserFrame, ...]] = {}
        self._arrays: dict[Value, np.ndarray | None] = {}

    def of(self, primitive: str) -> list[Node]:
        """Return the live equations of a primitive."""
        return self._by_name.get(primitive, [])

    def where(self, condition: Callable[[Node], object]) -> Iterator[Node]:
        """Yield the live equations of the primitives that meet a condition.

        The condition is called with the first equation of each primitive only.
        """
        for nodes in self._by_name.values():
            if condition(nodes[0]):
                yield from nodes

    @cached_property
    def kernels(self) -> list[LintedKernel]:
        """The Pallas kernels."""
        nodes = self.of("pallas_call")
        if not nodes:
            return []
        from jaxprtool.analysis.grids import GridSteps  # few programs have kernels
        from jaxprtool.commands.cost.kernels import kernel_equations
        from jaxprtool.ir.kernel_calls import kernel_call

        calls = ((node, kernel_call(node.eqn)) for node in nodes)
        grids = [(node, GridSteps(call)) for node, call in calls if call is not None]
        return [LintedKernel(node, grid, tuple(kernel_equations(grid))) for node, grid in grids]

    @cached_property
    def has_backward(self) -> bool:
        """True if the program has the backward part of a gradient."""
        return any(node.is_backward for node in self.nodes)

    @cached_property
    def is_loss(self) -> bool:
        """True if the program returns one real number, so that it has a gradient."""
        results = self.top.results
        return len(results) == 1 and results[0].shape == () and is_inexact(results[0])

    @property
    def differentiates(self) -> bool:
        """True if the program has a gradient, or is a loss."""
        return self.has_backward or self.is_loss

    def is_differentiated(self, node: Node) -> bool:
        """Return True if JAX differentiates an equation, or would in the gradient of a loss.

        In a program with a gradient, it does if the expression has equations of the backward part.
        A loss is differentiated with respect to its first argument, as by `jax.grad`; if that has
        no floats, with respect to all arguments.
        """
        if self.has_backward:
            return self.frame(node) in self._backward_expressions
        varies = self.is_loss and any(value in self._varying for value in node.ins)
        return varies and any(value in self.differentiable for value in node.outs)

    @cached_property
    def _backward_expressions(self) -> set[UserFrame | None]:
        return {self.frame(node) for node in self.nodes if node.is_backward} - {None}

    @cached_property
    def differentiable(self) -> set[Value]:
        """The floats from which a path of equations with derivatives leads to a result."""
        differentiable = Differentiable()
        differentiable.arguments(self.top, (True,) * len(self.top.results))
        return differentiable.moved

    @cached_property
    def _varying(self) -> set[Value]:
        """The floats that are computed from floats of the first argument."""
        floats = [value for value in self.top.arguments if is_inexact(value)]
        varying = set([self.top.arguments[i] for i in self.first_argument] or floats)
        for node in self.every:  # those of bodies follow their loop
            if any(value in varying for value in node.ins) and has_derivative(node):
                varying.update(out for out in node.outs if is_inexact(out))
                varying.update(v for scope in node.inner for v in scope.arguments if is_inexact(v))
        return varying

    @cached_property
    def first_argument(self) -> tuple[int, ...]:
        """The positions of the floats of the first argument; of all arguments of a bare jaxpr."""
        count = len(self.top.arguments)
        if isinstance(self.program, Program):
            trees = self.program.in_tree.children()[0].children()
            count = trees[0].num_leaves if trees else 0
        return tuple(i for i in range(count) if is_inexact(self.top.arguments[i]))

    def argument_number(self, value: Value) -> int | None:
        """Return the position of the argument that a value is, also of one in a loop; or None."""
        while value.node is None and value.scope is not None and value.scope.parent is not None:
            parent = value.scope.parent
            assert parent.held is not None
            region = parent.held.regions[value.scope.number_of_body]
            value = origin(parent.ins[region.ins[value.index]])
        arguments = self.top.arguments
        is_argument = value.index < len(arguments) and arguments[value.index] is value
        return value.index if is_argument else None

    @cached_property
    def donations(self) -> Donations:
        """Its donated arguments."""
        return donations(self.program)

    # --- places ---------------------------------------------------------------------------------

    def frame(self, node: Node) -> UserFrame | None:
        """Return the user's line of an equation, as a frame."""
        return self.frame_of(node.path)

    def frame_of(self, path: tuple[JaxprEqn, ...]) -> UserFrame | None:
        """Return the user's line of an equation, given its path; that of the function for ()."""
        location = self.frames.location_of(path)
        return self.function if not path else None if location is None else location.frame

    def is_own(self, node: Node) -> bool:
        """Return True if the user's line computes an equation, and not a library behind it."""
        location = self.frames.location_of(node.path)
        return location is not None and not location.behind

    def expression(self, node: Node) -> str:
        """Return the innermost expression that computes an equation; "" if unknown.

        JAX's own functions have no frames, so for `jnp.where(a, b, c)` it is this call.
        """
        return self.sources.expression(next(iter(self.frames.stack(node.path)), None))

    def user_frames(self, node: Node) -> tuple[UserFrame, ...]:
        """Return the frames of the user's lines that lead to an equation."""
        traceback = node.eqn.source_info.traceback
        if not self._lines.get(traceback):
            user_frames = (f for f in self.frames.stack(node.path) if self.frames.is_users(f.file))
            frames = tuple(dict.fromkeys(user_frames))
            if not self.frames.of(node.eqn):
                return frames  # those of the calls around it
            self._lines[traceback] = frames
        return self._lines[traceback]

    @cached_property
    def function(self) -> UserFrame | None:
        """The line of the function's `def`; None if unknown."""
        match = re.search(r"^(.*) at (.*):(\d+)$", self.about.jaxpr.debug_info.func_src_info or "")
        if match is None:
            return None
        line = self.sources.definition(match[2], int(match[3]))
        return UserFrame(match[2], line, match[1], 0, line, 0)

    # --- values ---------------------------------------------------------------------------------

    def array(self, value: Value, steps: int = _MOST_STEPS) -> np.ndarray | None:
        """Return the numbers of a value that does not depend on the arguments, if it is small."""
        if value not in self._arrays and steps:
            self._arrays[value] = self._computed(value, steps - 1)
        return self._arrays.get(value)

    def _computed(self, value: Value, steps: int) -> np.ndarray | None:
        if value.outer is not None:
            return self.array(value.outer, steps)
        constant = value.literal if value.literal is not None else value.constant
        if not all(isinstance(n, int) for n in value.shape) or value.elements > _MOST_ELEMENTS:
            return None
        if constant is not None:
            kind = getattr(value.dtype, "kind", "")
            return np.asarray(constant, value.dtype) if kind in ("b", "i", "u", "f") else None
        node = value.node
        if node is None or node.inner or len(node.outs) != 1:
            return None
        operands = []
        for operand in node.ins:
            array = self.array(operand, steps)
            if array is None:
                return None
            operands.append(array)
        return evaluate_exactly(node.eqn, operands)


def origin(value: Value, gives: Sequence[str] = ("same", "layout"), most: int = 64) -> Value:
    """Return the value that the elements of a value come from.

    Args:
        value: The value.
        gives: The relations to follow, of the trait `gives`.
        most: The maximum number of steps.
    """
    for _ in range(most):
        if value.outer is not None:
            value = value.outer
        elif value.node is not None and value.node.ins and value.node.traits.gives in gives:
            value = value.node.ins[0]
        else:
            break
    return value


def is_same(one: Value, two: Value, steps: int = 8) -> bool:
    """Return True if two values are computed alike from the same values, up to their layout."""
    one, two = (origin(value, ("same", "layout", "cast")) for value in (one, two))
    if one is two:
        return True
    if one.literal is not None and two.literal is not None:
        return bool(one.literal == two.literal)
    if one.node is None or two.node is None or not steps or not one.node.traits.may_merge:
        return False
    return (
        (one.node.name, one.index, len(one.node.ins))
        == (two.node.name, two.index, len(two.node.ins))
        and not one.node.inner
        and _parameters(one.node) == _parameters(two.node)
        and all(is_same(a, b, steps - 1) for a, b in zip(one.node.ins, two.node.ins, strict=True))
    )


def _parameters(node: Node) -> object:
    try:
        return parameters_key(node.eqn)
    except Unkeyable:
        return node


def ends(
    value: Value, gives: Sequence[str] = ("same", "layout"), *, dead: bool = False
) -> list[tuple[Value, Node | None]]:
    """Return the readers of a value, past equations that only pass its elements on.

    Args:
        value: The value.
        gives: The relations of results to operands to follow, of the trait `gives`.
        dead: Return also readers that no result depends on.

    Returns:
        Pairs of the value in its last form and the equation that reads it; None in place of the
        equation if it is a result of its scope.
    """
    readers: list[tuple[Value, Node | None]] = []
    todo = [value]
    for form in todo:
        if form.is_result:
            readers.append((form, None))
        for node in dict.fromkeys(form.readers if dead else form.live_readers):
            if node.traits.gives in gives and node.ins[0] is form:
                todo += node.outs
            else:
                readers.append((form, node))
    return readers


def ancestors(value: Value, most: int = 64) -> Iterator[Value]:
    """Yield a value and those that it is computed from, the nearest first.

    Args:
        value: The value.
        most: The maximum number of values.
    """
    todo, seen = [value], {value}
    for ancestor in itertools.islice(todo, most):
        yield ancestor
        operands = [ancestor.outer] if ancestor.outer is not None else []
        if ancestor.node is not None and not ancestor.node.inner:
            operands += ancestor.node.ins
        for other in operands:
            if other is not None and other not in seen:
                seen.add(other)
                todo.append(other)


# --- graph ----------------------------------------------------------------------------------------
# A program as a graph of equations and values, in which calls are inlined.
#
# Rules look for patterns that JAX spreads over calls: `jnp.sort(x)[-3:]` is a `jit` with a `sort`,
# and a slice beside it. So the calls of `jit`, `remat` and custom derivatives are inlined. Loops
# and branches are nodes whose bodies are scopes of their own.

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


class Enclosing:
    """An equation whose body contains others, and the equations around it.

    What is true inside of any of them is found once for each, however deep the bodies are nested.

    Attributes:
        eqn: The equation.
        outer: The equation around it; None at the top level.
        path: The equations around it, the outermost first, and its own.
        is_backward: Whether one of them belongs to the backward part of a gradient.
        is_checkpointed: Whether one of them is a call of `jax.checkpoint`.
        has_rule: Whether one of them is a function with its own derivative.
        is_outlined: Whether XLA compiles one of them once, by the pass `outline`.
    """

    __slots__ = (
        *("eqn", "has_rule", "is_backward", "is_checkpointed", "is_outlined", "outer"),
        "path",
    )

    def __init__(self, eqn: JaxprEqn, outer: Enclosing | None) -> None:
        self.eqn, self.outer = eqn, outer
        self.path: tuple[JaxprEqn, ...] = (*(outer.path if outer else ()), eqn)
        row = traits(eqn)
        self.is_backward: bool = bool(outer and outer.is_backward) or is_backward(eqn)
        self.is_checkpointed: bool = bool(outer and outer.is_checkpointed) or row.call == "remat"
        self.has_rule: bool = bool(outer and outer.has_rule) or row.custom_derivative
        self.is_outlined: bool = bool(outer and outer.is_outlined) or (
            row.call == "jit" and jaxcompat.mark_of(eqn) != "plain"
        )


class Node:
    """An equation of a scope.

    Attributes:
        eqn: The equation.
        enclosing: The innermost equation whose body contains it; None at the top level.
        scope: The scope that it is in.
        ins: Its operands.
        outs: Its results.
        held: The regions of a loop or a branch; else None.
        inner: The scopes of its bodies.
        is_live: Whether a result or an effect of the program depends on it.
    """

    __slots__ = ("enclosing", "eqn", "held", "inner", "ins", "is_live", "outs", "scope")

    def __init__(self, eqn: JaxprEqn, enclosing: Enclosing | None, scope: Scope):
        self.eqn = eqn
        self.enclosing = enclosing
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
    def around(self) -> tuple[JaxprEqn, ...]:
        """The equations whose bodies contain it, the outermost first."""
        return self.enclosing.path if self.enclosing else ()

    @property
    def path(self) -> tuple[JaxprEqn, ...]:
        """The equations around it, and its own."""
        return (*self.around, self.eqn)

    @property
    def is_backward(self) -> bool:
        """True if it belongs to the backward part of a gradient."""
        return bool(self.enclosing and self.enclosing.is_backward) or is_backward(self.eqn)

    @property
    def is_checkpointed(self) -> bool:
        """True if it is in a call of `jax.checkpoint`."""
        return bool(self.enclosing and self.enclosing.is_checkpointed)

    @property
    def has_rule(self) -> bool:
        """True if it is in a function with its own derivative."""
        return bool(self.enclosing and self.enclosing.has_rule)

    @property
    def is_outlined(self) -> bool:
        """True if it is in a call that XLA compiles once, by the pass `outline`."""
        return bool(self.enclosing and self.enclosing.is_outlined)

    @property
    def operations(self) -> int:
        """The FLOPs and transcendentals of all its runs."""
        return self.scope.number(self.scope.count.of(self.eqn)) * self.scope.runs

    @property
    def bytes(self) -> int:
        """The bytes of its results, in all its runs."""
        return sum(value.bytes for value in self.outs) * self.scope.runs


def enclosing_equations(nodes: Iterable[Node]) -> Iterator[Enclosing]:
    """Yield the equations around some equations, each after those around it, and once."""
    seen = set[int]()
    for node in nodes:
        new, enclosing = list[Enclosing](), node.enclosing
        while enclosing is not None and id(enclosing) not in seen:
            seen.add(id(enclosing))
            new.append(enclosing)
            enclosing = enclosing.outer
        yield from reversed(new)


class LintedKernel(NamedTuple):
    """A Pallas kernel.

    Attributes:
        node: The equation.
        grid: The steps of its grid.
        equations: The equations of its body, at every depth.
    """

    node: Node
    grid: GridSteps
    equations: tuple[KernelEquation, ...]


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
        return self._body(jaxcompat.close_jaxpr(top), None, 0, 1, None)

    def _body(
        self, closed: Any, parent: Node | None, number: int, runs: int, enclosing: Enclosing | None
    ) -> Scope:
        scope = Scope(parent, number, runs, self._sizes, self._operations)
        jaxpr = jaxcompat.open_jaxpr(closed)
        env: dict[Var, Value] = {}
        for i, var in enumerate(jaxpr.invars):
            env[var] = Value(var.aval, scope, None, i)
            scope.arguments.append(env[var])
        self._add(scope, closed, env, enclosing)
        for atom in jaxpr.outvars:
            value = _literal(atom) if type(atom) is Literal else env[atom]
            value.is_result = True
            scope.results.append(value)
        return scope

    def _add(
        self, scope: Scope, closed: Any, env: dict[Var, Value], enclosing: Enclosing | None
    ) -> None:
        """Add the equations of a body, whose arguments are known, to a scope."""
        jaxpr = jaxcompat.open_jaxpr(closed)
        constants = closed.consts or [None] * len(jaxpr.constvars)  # none if the jaxpr is open
        for var, constant in zip(jaxpr.constvars, constants, strict=True):
            value = env[var] = Value(var.aval, scope)
            value.constant = constant
            scope.constants.append(value)
        self._count += len(jaxpr.eqns)
        flat = is_flat(jaxpr)
        for eqn in jaxpr.eqns:
            ins = tuple([_literal(v) if type(v) is Literal else env[v] for v in eqn.invars])
            control = None if flat else regions(eqn)
            if control is not None and not self._may_enter(control):
                control = None
            if control is not None and control.kind == "call":
                self._open(scope, control, ins, env, Enclosing(eqn, enclosing))
                continue
            node = Node(eqn, enclosing, scope)
            node.ins = ins
            for value in ins:
                value.readers.append(node)
            node.outs = tuple(
                [Value(var.aval, scope, node, i) for i, var in enumerate(eqn.outvars)]
            )
            env.update(zip(eqn.outvars, node.outs, strict=True))
            scope.nodes.append(node)
            if control is not None:
                self._hold(node, control)

    def _may_enter(self, control: Regions) -> bool:
        """Return True if bodies are to be added; calls of calls may be exponentially many."""
        seen = self._entered.issuperset(control.jaxprs)
        self._entered.update(control.jaxprs)
        return not seen or self._count < _MOST_EQUATIONS

    def _open(
        self,
        scope: Scope,
        control: Regions,
        ins: tuple[Value, ...],
        env: dict[Var, Value],
        enclosing: Enclosing | None,
    ) -> None:
        (closed,), (body,), (region,) = control.bodies, control.jaxprs, control.regions
        inner_env = {var: ins[i] for i, var in zip(region.ins, body.invars, strict=True)}
        self._add(scope, closed, inner_env, enclosing)
        for out, atom in zip(region.outs, body.outvars, strict=True):
            assert out is not None
            value = _literal(atom) if type(atom) is Literal else inner_env[atom]
            var = control.eqn.outvars[out]
            if not isinstance(var, DropVar):
                env[var] = value

    def _hold(self, node: Node, control: Regions) -> None:
        """Add the scopes of the bodies of a loop or a branch."""
        node.held = control
        count = trip_count(control)
        runs = node.scope.runs * (1 if count is None else node.scope.number(count))
        scopes, enclosing = [], Enclosing(node.eqn, node.enclosing)
        for number, (closed, region) in enumerate(
            zip(control.bodies, control.regions, strict=True)
        ):
            scope = self._body(closed, node, number, runs, enclosing)
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


# --- derivatives ----------------------------------------------------------------------------------
# Find the values from which a path of equations with derivatives leads to a result.

#: The maximum number of iterations of a loop that are followed one by one.
_MAX_ITERATIONS = 64


class Differentiable:
    """Finds the values of scopes from which a path of equations with derivatives leads to results.

    Equations of which nothing is known count as having a derivative. JAX's own rules, by which
    `gradient_flow` decides, take longer.

    Attributes:
        moved: The values, at every depth.
    """

    def __init__(self) -> None:
        self.moved = set[Value]()

    @cached_method
    def arguments(self, scope: Scope, wanted: tuple[bool, ...]) -> tuple[bool, ...]:
        """Return which arguments of a scope lead to some of its results."""
        ends = zip(scope.results, wanted, strict=True)
        moved = {value for value, flag in ends if flag and is_inexact(value)}
        for node in reversed(scope.nodes):
            flags = [out in moved for out in node.outs]
            if not any(flags) or not has_derivative(node):
                continue
            operands = [True] * len(node.ins)
            if node.held is not None:
                operands = self._through(node, node.held, flags)
            pairs = zip(node.ins, operands, strict=True)
            moved.update(value for value, flag in pairs if flag and is_inexact(value))
        self.moved |= moved
        return tuple(value in moved for value in scope.arguments)

    def _through(self, node: Node, control: Regions, flags: list[bool]) -> list[bool]:
        def through(number: int, asked: list[bool]) -> tuple[bool, ...]:
            return self.arguments(node.inner[number], tuple(asked))

        scan = control.view if isinstance(control.view, Scan) else None
        if scan is None or not isinstance(scan.length, int) or scan.length < 1:
            return control.backward(flags, through)
        # At least one iteration computes the carries, so they are not those before the loop.
        first, count = len(scan.consts), len(scan.carry)
        asked, operands = list(flags), [False] * len(node.ins)
        for _ in range(min(scan.length, _MAX_ITERATIONS)):
            flags_in = through(0, asked)
            pairs = zip(operands, flags_in, strict=True)
            operands = [a or b for a, b in pairs]
            carries = list(flags_in[first : first + count])
            again, asked = asked, [*carries, *flags[count:]]
            if again == asked:
                break
        operands[first : first + count] = carries
        return operands


def has_derivative(node: Node) -> bool:
    """Return False for an equation whose derivative is zero, such as that of `round`."""
    return node.has_rule or not node.traits.stops_derivative


# --- sources --------------------------------------------------------------------------------------
# Read the user's files: the comments that silence findings, loops, and names.
#
#     x = x.astype(jnp.float32)  # jaxprtool: ignore[JT202]
#     # jaxprtool: ignore[JT202, JT203]      (for the line below)
#     def f(x):  # jaxprtool: ignore         (all codes, in the whole function)
#
# A missing file counts as empty.

_COMMENT = re.compile(r"#\s*jaxprtool:\s*ignore(?:\[([^\]]*)\])?")

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class _SourceFunction:
    """A function in a file: the lines of its head, all its lines, and its local names."""

    first: int
    line: int
    head: int
    last: int
    local: frozenset[str]


_LOOPS = ast.For | ast.While | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass(frozen=True)
class _Loop:
    """A loop or a comprehension: its first line, and the start and end of each repeated part."""

    line: int
    parts: tuple[tuple[tuple[int, int], tuple[int, int]], ...]


class SourceReader:
    """Reads the user's files, each once."""

    def __init__(self) -> None:
        self._names = SourceNames()

    def is_silenced(self, frame: UserFrame, code: str) -> bool:
        """Return True if a comment silences a code at a line."""
        lines = source_text.lines(frame.file)
        numbers = {*range(frame.line, max(frame.line, frame.end_line) + 1)}
        above = frame.line - 1
        if 1 <= above <= len(lines) and lines[above - 1].lstrip().startswith("#"):
            numbers.add(above)
        for scope in self._around(frame):
            numbers.update(range(scope.first, scope.head + 1))
        return any(_silences(lines[n - 1], code) for n in numbers if 1 <= n <= len(lines))

    def definition(self, file: str, line: int) -> int:
        """Return the line of a function's `def`, given that of its first decorator."""
        return next((s.line for s in self._scopes(file) if s.first == line), line)

    def loops(self, frame: UserFrame) -> list[int]:
        """Return the first lines of the loops that run an expression repeatedly."""
        around, place = self._around(frame), (frame.line, frame.column)
        first = around[-1].first if around else 0
        return [
            loop.line
            for loop in self._loops(frame.file)
            if loop.line >= first and any(part[0] <= place <= part[1] for part in loop.parts)
        ]

    def code(self, frame: UserFrame) -> str:
        """Return the text of a line."""
        return source_text.line(frame.file, frame.line)

    def expression(self, frame: UserFrame | None) -> str:
        """Return the text of an expression, on one line; "" if it is unknown."""
        return "" if frame is None else self._names.text(frame) or ""

    def captured_name(self, frame: UserFrame, array: Any) -> str:
        """Return the name by which an expression reads an array that its function closes over.

        Returns:
            The name of the global variable that is this array; else the only name in the
            expression that is not local, or is an attribute of an object; "" if there is not one.
        """
        module = next((m for m in list(sys.modules.values()) if _file_of(m) == frame.file), None)
        variables = {} if module is None else vars(module)
        for name, value in list(variables.items()):
            if value is array:
                return name
        text = self._names.text(frame)
        local = frozenset[str]().union(*(scope.local for scope in self._around(frame)[-1:]))
        dotted_names = dict.fromkeys(_dotted(ast.parse(text, mode="eval")) if text else ())
        free, attributes = [], []
        for dotted in dotted_names:
            base, _, rest = dotted.partition(".")
            if base in variables:
                if _shape(variables[base], rest) == array.shape:
                    free.append(dotted)
            elif base not in local and not hasattr(builtins, base):
                free.append(dotted)
            elif base == "self" and rest:
                attributes.append(dotted)
        names = free or attributes
        return names[0] if len(names) == 1 else ""

    def _around(self, frame: UserFrame) -> list[_SourceFunction]:
        """Return the functions that a line is in, the outermost first."""
        return [s for s in self._scopes(frame.file) if s.first <= frame.line <= s.last]

    @cached_method
    def _loops(self, file: str) -> list[_Loop]:
        nodes = ast.walk(self._tree(file))
        return [_loop(node) for node in nodes if isinstance(node, _LOOPS)]

    @cached_method
    def _scopes(self, file: str) -> list[_SourceFunction]:
        functions = (n for n in ast.walk(self._tree(file)) if isinstance(n, _Function))
        return sorted(map(_scope, functions), key=lambda scope: scope.first)

    @cached_method
    def _tree(self, file: str) -> ast.Module:
        try:
            return ast.parse(source_text.file_text(file))
        except (SyntaxError, ValueError, RecursionError):
            return ast.parse("")


def _loop(node: Any) -> _Loop:
    repeated: list[Any]
    if isinstance(node, ast.For | ast.While):
        repeated = node.body
    else:  # the iterable of the first `for` is evaluated once
        first, *others = node.generators
        repeated = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        repeated += [*first.ifs, *(part for other in others for part in (other.iter, *other.ifs))]
    return _Loop(node.lineno, tuple(map(_range, repeated)))


def _range(node: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _scope(function: _Function) -> _SourceFunction:
    arguments = (n.arg for n in ast.walk(function.args) if isinstance(n, ast.arg))
    stored = (
        n.id for n in ast.walk(function) if isinstance(n, ast.Name) and type(n.ctx) is ast.Store
    )
    first = min((d.lineno for d in function.decorator_list), default=function.lineno)
    head = max(function.body[0].lineno - 1, function.lineno)
    last = function.end_lineno or function.lineno
    return _SourceFunction(first, function.lineno, head, last, frozenset((*arguments, *stored)))


def _dotted(tree: ast.AST) -> list[str]:
    """Return the names in an expression, with their attributes, without functions called."""
    called = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    names, inner = [], set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner:
            inner.update(id(part) for part in ast.walk(node))
            text = ast.unparse(node)
            if id(node) in called:
                text = text.rpartition(".")[0]  # the object of a method
            if re.fullmatch(r"[\w.]+", text):
                names.append(text)
    return names


def _silences(line: str, code: str) -> bool:
    comment = _COMMENT.search(line)
    if comment is None:
        return False
    codes = [prefix.strip() for prefix in (comment[1] or "").split(",")]
    return comment[1] is None or any(prefix and code.startswith(prefix) for prefix in codes)


def _file_of(module: Any) -> str:
    return str(getattr(module, "__file__", None) or "")


def _shape(value: Any, attributes: str) -> Any:
    """Return the shape of an attribute of an object; None if it is not an array."""
    for name in attributes.split(".") if attributes else ():
        value = vars(value).get(name) if hasattr(value, "__dict__") else None
    return getattr(value, "shape", None)
