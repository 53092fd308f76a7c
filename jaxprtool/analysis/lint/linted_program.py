"""The program that rules check: its graph, names, frames, and helpers to follow values."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np

from jaxprtool.analysis.lint.derivatives import Differentiable, has_derivative
from jaxprtool.analysis.lint.graph import GraphBuilder, Node, Scope, Value, mark_live
from jaxprtool.analysis.lint.sources import Sources
from jaxprtool.ir.core.equations import is_inexact
from jaxprtool.ir.equality.structural_key import Unkeyable, parameters_key
from jaxprtool.ir.evaluation.exact_numpy import evaluate_exactly
from jaxprtool.ir.programs.donation import Donations, donations
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.program_signature import program_signature
from jaxprtool.ir.shapes.symbols import symbols_of
from jaxprtool.ir.source.frames import frames_now
from jaxprtool.jaxcompat import AnyJaxpr, JaxprEqn
from jaxprtool.jaxcompat.source_locations import UserFrame

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

    def __init__(self, program: Program | AnyJaxpr, sources: Sources | None = None) -> None:
        self.program = program
        self.about = program_signature(program)
        self.frames = frames_now(self.about.roots)
        self.sources = sources or Sources()
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
        found = Differentiable()
        found.arguments(self.top, (True,) * len(self.top.results))
        return found.moved

    @cached_property
    def _varying(self) -> set[Value]:
        """The floats that are computed from floats of the first argument."""
        floats = [value for value in self.top.arguments if is_inexact(value)]
        found = set([self.top.arguments[i] for i in self.first_argument] or floats)
        for node in self.every:  # those of bodies follow their loop
            if any(value in found for value in node.ins) and has_derivative(node):
                found.update(out for out in node.outs if is_inexact(out))
                found.update(v for scope in node.inner for v in scope.arguments if is_inexact(v))
        return found

    @cached_property
    def first_argument(self) -> tuple[int, ...]:
        """The positions of the floats of the first argument; of all arguments of a bare jaxpr."""
        count = len(self.top.arguments)
        if isinstance(self.program, Program):
            trees = self.program.in_tree.children()[0].children()
            count = trees[0].num_leaves if trees else 0
        return tuple(i for i in range(count) if is_inexact(self.top.arguments[i]))

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
            own = (f for f in self.frames.stack(node.path) if self.frames.is_users(f.file))
            found = tuple(dict.fromkeys(own))
            if not self.frames.of(node.eqn):
                return found  # those of the calls around it
            self._lines[traceback] = found
        return self._lines[traceback]

    @cached_property
    def function(self) -> UserFrame | None:
        """The line of the function's `def`; None if unknown."""
        found = re.search(r"^(.*) at (.*):(\d+)$", self.about.jaxpr.debug_info.func_src_info or "")
        if found is None:
            return None
        line = self.sources.definition(found[2], int(found[3]))
        return UserFrame(found[2], line, found[1], 0, line, 0)

    # --- values ---------------------------------------------------------------------------------

    def array(self, value: Value, steps: int = _MOST_STEPS) -> np.ndarray | None:
        """Return the numbers of a value that does not depend on the arguments, if it is small."""
        if value not in self._arrays and steps:
            self._arrays[value] = self._computed(value, steps - 1)
        return self._arrays.get(value)

    def _computed(self, value: Value, steps: int) -> np.ndarray | None:
        if value.outer is not None:
            return self.array(value.outer, steps)
        given = value.literal if value.literal is not None else value.constant
        if not all(isinstance(n, int) for n in value.shape) or value.elements > _MOST_ELEMENTS:
            return None
        if given is not None:
            kind = getattr(value.dtype, "kind", "")
            return np.asarray(given, value.dtype) if kind in ("b", "i", "u", "f") else None
        node = value.node
        if node is None or node.inner or len(node.outs) != 1:
            return None
        operands = []
        for each in node.ins:
            array = self.array(each, steps)
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
    one, two = (origin(each, ("same", "layout", "cast")) for each in (one, two))
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
    found: list[tuple[Value, Node | None]] = []
    todo = [value]
    for each in todo:
        if each.is_result:
            found.append((each, None))
        for node in dict.fromkeys(each.readers if dead else each.live_readers):
            if node.traits.gives in gives and node.ins[0] is each:
                todo += node.outs
            else:
                found.append((each, node))
    return found


def ancestors(value: Value, most: int = 64) -> Iterator[Value]:
    """Yield a value and those that it is computed from, the nearest first.

    Args:
        value: The value.
        most: The maximum number of values.
    """
    todo, seen = [value], {value}
    for each in itertools.islice(todo, most):
        yield each
        before = [each.outer] if each.outer is not None else []
        if each.node is not None and not each.node.inner:
            before += each.node.ins
        for other in before:
            if other is not None and other not in seen:
                seen.add(other)
                todo.append(other)
