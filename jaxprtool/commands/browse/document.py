"""A program as the browser shows it: foldable rows, the states of passes, and navigation.

The children of a row are created when it is first unfolded. A body shared by several equations is a
child of each of them.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import chain
from typing import ClassVar, TypeAlias

from jaxprtool import Program, Programs
from jaxprtool.extend import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    NamedValue,
    ProgramSignature,
    Var,
    bodies,
    equations,
    is_flat,
    program_signature,
    top_jaxpr,
    type_of,
)
from jaxprtool.extend.listing import (
    BinderToken,
    Comment,
    ModuleJaxpr,
    ParameterToken,
    Reader,
    ScopeReader,
    Selection,
    SharedName,
    ShowOptions,
    Type,
    UserFrame,
    frames_now,
    in_bytes,
    plural,
    printable,
    summary,
)
from jaxprtool.extend.programs import (
    Changes,
    DataFlow,
    Holder,
    Observer,
    Start,
    Step,
    backward_slice,
    changes,
    left_to_partitioner,
)

# --- outline --------------------------------------------------------------------------------------
# A program as foldable rows: equations by nesting of bodies, optionally grouped by scope.

#: Returns the scopes around each equation of a body, the outermost first.
Scopes: TypeAlias = Callable[[Jaxpr], Sequence[tuple[str, ...]]]

#: Where a row is: the positions of equations and bodies that lead to it. -1 leads to the arguments
#: of the program, and `AFTER` to its results. Places sort in program order.
RowPlace: TypeAlias = tuple[int, ...]
AFTER = sys.maxsize

#: The maximum number of rows unfolded at once.
MOST_ROWS = 200_000


class Kind(Enum):
    """The kind of a row."""

    program = "program"
    arguments = "arguments"
    argument = "argument"
    equation = "equation"
    body = "body"
    scope = "scope"
    results = "results"
    result = "result"


class OutlineNode:
    """A row and its children.

    Attributes:
        kind: Its kind.
        parent: The parent row; None for the program.
        jaxpr: The jaxpr that contains it.
        index: The position of the equation, argument, result or body in the jaxpr.
        label: The name of a scope or a body.
        body: The jaxpr whose equations are its children, if any.
        leaves: The rows of these equations, by position, once created.
    """

    __slots__ = (
        *("kind", "parent", "jaxpr", "index", "label", "body", "leaves"),
        *("depth", "is_open", "folds", "children"),
    )

    def __init__(
        self,
        kind: Kind,
        parent: OutlineNode | None,
        jaxpr: Jaxpr,
        index: int,
        label: str = "",
        body: Jaxpr | None = None,
    ):
        self.kind, self.parent, self.jaxpr, self.index = kind, parent, jaxpr, index
        self.label, self.body = label, body
        self.leaves: list[OutlineNode] = []
        self.depth: int = -1 if parent is None else parent.depth + 1
        self.is_open = False
        self.folds = body is not None
        self.children: list[OutlineNode] | None = None

    @property
    def eqn(self) -> JaxprEqn | None:
        """The equation of the row, or None."""
        return self.jaxpr.eqns[self.index] if self.kind is Kind.equation else None

    @property
    def container(self) -> OutlineNode:
        """The row whose body contains this row."""
        node = self.parent
        while node is not None and node.kind is Kind.scope:
            node = node.parent
        assert node is not None
        return node

    @property
    def chain(self) -> list[OutlineNode]:
        """The rows around it that are not scopes, the outermost first, and itself."""
        rows, node = [self], self.container
        while node.kind is not Kind.program:
            rows.append(node)
            node = node.container
        return rows[::-1]

    @property
    def equations(self) -> list[JaxprEqn]:
        """The equations whose bodies contain it, the outermost first, and its own if it has one."""
        return [node.jaxpr.eqns[node.index] for node in self.chain if node.kind is Kind.equation]

    @property
    def place(self) -> RowPlace:
        """Its place; for a scope, that of its first equation."""
        steps: list[int] = []
        for node in self.chain:
            if node.kind is not Kind.body and node.container.kind is Kind.equation:
                steps.append(0)
            steps.append({Kind.arguments: -1, Kind.results: AFTER}.get(node.kind, node.index))
        return tuple(steps)

    @property
    def path(self) -> str:
        """Its path from the program's jaxpr: `eqns[3].params['jaxpr'].eqns[0]`."""
        if self.kind in (Kind.argument, Kind.result):
            return f"{'invars' if self.kind is Kind.argument else 'outvars'}[{self.index}]"
        parts: list[str] = []
        for node in self.chain:
            if node.kind is Kind.body:
                parts[-1] += _parameter(node.label)
            elif node.kind is Kind.equation:
                if node.container.kind is Kind.equation:
                    around = node.container.jaxpr.eqns[node.container.index]
                    parts[-1] += _parameter(bodies(around)[0][0])
                parts.append(f"eqns[{node.index}]")
        return ".".join(parts)


def _parameter(path: str) -> str:
    """Return `.params['branches'][1]` for `branches[1]`."""
    name, bracket, rest = path.partition("[")
    return f".params['{name}']{bracket}{rest}"


class ProgramOutline:
    """The rows of a program, and which of them are visible.

    Args:
        flow: The program's values.
        scopes: Returns the scopes around each equation of a body, by which equations are then
            grouped.
    """

    def __init__(self, flow: DataFlow, scopes: Scopes | None = None):
        self._flow = flow
        self._scopes = scopes
        self.root = OutlineNode(Kind.program, None, flow.top, 0, body=flow.top)
        self.root.is_open = True
        self.rows = list(self._visible(self.root))
        while len(calls := [n for n in self.rows if n.folds and n.body is not None]) == 1:
            # A program that only calls a function is unfolded.
            if calls[0].is_open or len(self.rows) > 4:
                break
            self.toggle(self.rows.index(calls[0]))

    # --- creation -----------------------------------------------------------------------------

    def children(self, node: OutlineNode) -> list[OutlineNode]:
        """Return the children of a row."""
        if node.children is None:
            node.children = self._make(node)
        return node.children

    def _make(self, node: OutlineNode) -> list[OutlineNode]:
        if node.kind is Kind.program:
            return [*self._ends(node, True), *self._equations(node), *self._ends(node, False)]
        if node.kind in (Kind.arguments, Kind.results):
            arguments = node.kind is Kind.arguments
            kind = Kind.argument if arguments else Kind.result
            values = node.jaxpr.invars if arguments else node.jaxpr.outvars
            return [OutlineNode(kind, node, node.jaxpr, i) for i in range(len(values))]
        if node.kind is Kind.equation and node.body is None:
            nested = enumerate(bodies(node.jaxpr.eqns[node.index]))
            return [
                OutlineNode(Kind.body, node, node.jaxpr, i, path, body)
                for i, (path, body) in nested
            ]
        return self._equations(node)

    def _ends(self, node: OutlineNode, arguments: bool) -> Iterator[OutlineNode]:
        values = node.jaxpr.invars if arguments else node.jaxpr.outvars
        if values:
            kind = Kind.arguments if arguments else Kind.results
            end = OutlineNode(kind, node, node.jaxpr, 0)
            end.folds = True
            yield end

    def _equations(self, node: OutlineNode) -> list[OutlineNode]:
        assert node.body is not None
        if self._scopes is not None:
            return self._by_scope(node, node.body, self._scopes(node.body))
        node.leaves = _leaves(node, node.body)
        return node.leaves

    def _by_scope(
        self, container: OutlineNode, body: Jaxpr, scopes: Sequence[tuple[str, ...]]
    ) -> list[OutlineNode]:
        """Return the equations of a body in order, grouped under their scopes."""
        top: list[OutlineNode] = []
        open_groups: list[OutlineNode] = []
        runs = _runs(scopes)
        for index, groups in enumerate(runs):
            level = 0
            while level < min(len(open_groups), len(groups)) and (
                open_groups[level].index == groups[level][0]
            ):
                level += 1
            del open_groups[level:]
            for start, label in groups[len(open_groups) :]:
                parent = open_groups[-1] if open_groups else container
                group = OutlineNode(Kind.scope, parent, body, start, label)
                group.folds, group.children = True, []
                (parent.children if open_groups else top).append(group)  # type: ignore[union-attr]
                open_groups.append(group)
            parent = open_groups[-1] if open_groups else container
            leaf = _leaf(parent, body, index)
            container.leaves.append(leaf)
            (parent.children if open_groups else top).append(leaf)  # type: ignore[union-attr]
        return top

    # --- folding ------------------------------------------------------------------------------

    def _visible(self, node: OutlineNode) -> Iterator[OutlineNode]:
        todo = [iter(self.children(node))]
        while todo:
            child = next(todo[-1], None)
            if child is None:
                todo.pop()
            else:
                yield child
                if child.is_open:
                    todo.append(iter(self.children(child)))

    def toggle(self, row: int) -> None:
        """Fold or unfold a row."""
        node = self.rows[row]
        if not node.folds:
            return
        if node.is_open:
            node.is_open = False
            self.rows[row + 1 : self.end(row)] = []
        else:
            node.is_open = True
            self.rows[row + 1 : row + 1] = self._visible(node)

    def end(self, row: int) -> int:
        """Return the first row after a row and its descendants."""
        depth, row = self.rows[row].depth, row + 1
        while row < len(self.rows) and self.rows[row].depth > depth:
            row += 1
        return row

    def open_all(self) -> None:
        """Unfold every scope and every body; a shared body only at its first occurrence."""
        seen: set[Jaxpr] = set()
        todo, count = [self.root], 0
        while todo and count < MOST_ROWS:
            node = todo.pop()
            if node.body is not None:
                if node.body in seen:
                    continue
                seen.add(node.body)
            node.is_open = True
            count += len(self.children(node))
            inside = [n for n in self.children(node) if n.folds]
            todo += [n for n in reversed(inside) if n.kind not in (Kind.arguments, Kind.results)]
        self.rows = list(self._visible(self.root))

    def close_all(self) -> None:
        """Fold all rows."""
        for node in self.rows:
            node.is_open = False
        self.rows = list(self._visible(self.root))

    # --- lookup -------------------------------------------------------------------------------

    def show(self, node: OutlineNode) -> int:
        """Unfold the ancestors of a row, and return its number."""
        above = node.parent
        hidden = False
        while above is not None:
            hidden |= not above.is_open
            above.is_open = True
            above = above.parent
        if hidden:
            self.rows = list(self._visible(self.root))
        return self.rows.index(node)

    def leaf(self, container: OutlineNode, index: int) -> OutlineNode:
        """Return the row of an equation in the body of a row."""
        self.children(container)
        return container.leaves[index]

    def inside(self, node: OutlineNode, body: Jaxpr) -> OutlineNode | None:
        """Return the row with this body of an equation: the row itself or a child."""
        if node.body is not None:
            return node if node.body is body else None
        return next((child for child in self.children(node) if child.body is body), None)

    def locate(self, place: RowPlace) -> OutlineNode:
        """Return the row of an equation, or of an argument or result of the program."""
        first, *rest = place
        if first in (-1, AFTER):
            wanted = Kind.arguments if first == -1 else Kind.results
            end = next(n for n in self.children(self.root) if n.kind is wanted)
            return self.children(end)[rest[0]]
        row = self.leaf(self.root, first)
        for number, index in zip(rest[::2], rest[1::2], strict=True):
            row = self.leaf(row if row.body is not None else self.children(row)[number], index)
        return row


def _leaf(parent: OutlineNode, jaxpr: Jaxpr, index: int) -> OutlineNode:
    node = OutlineNode(Kind.equation, parent, jaxpr, index)
    nested = bodies(jaxpr.eqns[index])
    node.folds = bool(nested)
    if len(nested) == 1:
        node.body = nested[0][1]
    return node


def _leaves(parent: OutlineNode, jaxpr: Jaxpr) -> list[OutlineNode]:
    """Return a row for each equation of a jaxpr."""
    if is_flat(jaxpr):
        return [OutlineNode(Kind.equation, parent, jaxpr, i) for i in range(len(jaxpr.eqns))]
    return [_leaf(parent, jaxpr, i) for i in range(len(jaxpr.eqns))]


def _runs(stacks: Sequence[tuple[str, ...]]) -> list[list[tuple[int, str]]]:
    """Return the groups of each equation: the start of the group, and its label.

    Consecutive equations share a group for each common scope. Scopes that contain only one another
    are one group.
    """
    groups: list[list[tuple[int, str]]] = [[] for _ in stacks]
    todo = [(0, len(stacks), 0)]
    while todo:
        start, stop, level = todo.pop()
        i = start
        while i < stop:
            name = stacks[i][level : level + 1]
            j = i + 1
            while j < stop and stacks[j][level : level + 1] == name:
                j += 1
            if name and j - i > 1:
                deeper = level + 1
                label = name[0]
                while (one := stacks[i][deeper : deeper + 1]) and all(
                    stacks[k][deeper : deeper + 1] == one for k in range(i + 1, j)
                ):
                    label += f"/{stacks[i][deeper]}"
                    deeper += 1
                for k in range(i, j):
                    groups[k].append((i, label))
                todo.append((i, j, deeper))
            i = j
    return groups


# --- document -------------------------------------------------------------------------------------
# A program as shown by the browser: its states, and the rows, sources and values of each.

#: The maximum number of results, and operands, of an equation named in its row.
_MOST_NAMED = 6

#: A program with more equations is first shown without names of variables.
MANY = 15_000


#: The frames of an equation and of the calls around it, the innermost first.
CallStack: TypeAlias = tuple[UserFrame, ...]


class Document:
    """The displayed content of a program state.

    Args:
        state: The state.
        names: Whether variables have the user's names.

    Attributes:
        noun: What an equation is called.
        searched: What a search finds.
        unchanged: Why no pass has changed the program.
        nests_scopes: Whether the scopes of an equation are inside those of the equations around it.
    """

    noun: ClassVar[str] = "equation"
    searched: ClassVar[str] = "primitive, type, path, scope, file:line"
    unchanged: ClassVar[str] = "no pass has changed the program; run passes with -p PASSES"
    nests_scopes: ClassVar[bool] = True

    def __init__(self, state: PassState, names: bool = True):
        self.state = state
        self.about = self._signature()
        self.top = self.about.jaxpr
        self.flow = DataFlow(self.top)
        self.frames = frames_now(self.about.roots)
        self._selection = Selection()
        self._counts: dict[int, int] = {}
        self._stacks: dict[tuple[object, CallStack], CallStack] = {}
        self._scope_reader = ScopeReader(self.about.roots)
        self._scopes: dict[Jaxpr, Sequence[tuple[str, ...]]] = {}
        self._options = ShowOptions(names=names, terse=True)
        #: Whether names, scopes and marks are known, which a large program computes later.
        self.is_complete = len(self.top.eqns) <= MANY and self.count <= MANY
        self.reader = self._read(self.is_complete)

    def _signature(self) -> ProgramSignature:
        return program_signature(self.state.program)

    def _read(self, named: bool) -> Reader:
        return Reader(self.about, self._options, named)

    @property
    def notes(self) -> list[str]:
        """What the first line says of the program besides its size."""
        left = left_to_partitioner(self.state.program)
        return [f"left to XLA's partitioner: {', '.join(left)}"] if left else []

    @cached_property
    def count(self) -> int:
        """The number of equations at every depth."""
        return self._selection.count(self.top)

    def complete(self) -> None:
        """Compute the names of variables, the scopes and the changes of a large program."""
        if not self.is_complete:
            self.scopes(self.top)
            self.reader = self._read(True)
            _ = self.state.marks
            self.is_complete = True

    def mark(self, eqn: JaxprEqn) -> str:
        """Return the mark of an equation that a pass changed, if known."""
        is_known = self.is_complete or self.state.is_compared
        return self.state.marks.get(id(eqn), "") if is_known else ""

    # --- scopes -----------------------------------------------------------------------------------

    def scopes(self, jaxpr: Jaxpr) -> Sequence[tuple[str, ...]]:
        """Return the scopes around each equation of a body, as `cost --by scope` groups them."""
        if jaxpr not in self._scopes:
            self._scopes[jaxpr] = self._scope_reader.paths(jaxpr)
        return self._scopes[jaxpr]

    # --- source locations -------------------------------------------------------------------------

    def stack(self, eqn: JaxprEqn, above: CallStack = ()) -> CallStack:
        """Return the frames of an equation, innermost first; without user code, its call's follow.

        JAX traces a jitted function once for all its calls, and keeps only the frames inside it.

        Args:
            eqn: The equation.
            above: The stack of the call of its body.
        """
        key = eqn.source_info.traceback, above
        if key not in self._stacks:
            frames = tuple(self.frames.of(eqn))
            is_users = any(self.frames.is_users(frame.file) for frame in frames)
            self._stacks[key] = frames if is_users else frames + above
        return self._stacks[key]

    def all_frames(self, node: OutlineNode) -> list[UserFrame]:
        """Return the frames of a row's equation and of its calls, starting with the shown one."""
        stack: CallStack = ()
        for eqn in node.equations:
            stack = self.stack(eqn, stack)
        nearest = self.frames.nearest(stack)
        return list(dict.fromkeys([*stack[nearest:][:1], *stack[:nearest], *reversed(stack)]))

    def line(self, eqn: JaxprEqn, above: CallStack) -> tuple[str, int] | None:
        """Return the file and line of an equation in a body that is called from a stack."""
        stack = self.stack(eqn, above)
        return stack[self.frames.nearest(stack)][:2] if stack else None

    @cached_property
    def lines(self) -> set[tuple[str, int]]:
        """The lines of the user's files that have equations."""
        locations = map(self.frames.location, equations(self.top))
        return {
            location.frame[:2]
            for location in set(locations)
            if location is not None and self.frames.is_users(location.frame.file)
        }

    # --- rows ---------------------------------------------------------------------------------

    def row(self, node: OutlineNode, width: int | None = None) -> list[str]:
        """Return the tokens of a row, without parameters that exceed `width`."""
        tokens = printable(getattr(self, f"_{node.kind.value}")(node))
        if width is None or node.folds or sum(map(len, tokens)) <= width:
            return tokens
        eqn = node.eqn
        if eqn is None:
            return tokens
        return printable(self.line_of(eqn, _MOST_NAMED, parameters=False))

    def line_of(self, eqn: JaxprEqn, most: int | None = None, parameters: bool = True) -> list[str]:
        """Return the tokens of an equation on one line; see `Reader.line`."""
        return self.reader.line(eqn, True, most, parameters)

    def results(self, eqn: JaxprEqn, most: int | None = None) -> list[str]:
        """Return the tokens of the results of an equation."""
        return self.reader.results(eqn, True, most)

    def operands(self, eqn: JaxprEqn, most: int | None = None) -> list[str]:
        """Return the tokens of the operands of an equation, at most `most`."""
        return self.reader.operands(eqn, most)

    def head(self, eqn: JaxprEqn) -> list[str]:
        """Return the tokens that say what an equation with bodies is."""
        return self.reader.head(eqn)

    def body_name(self, eqn: JaxprEqn, number: int) -> str:
        """Return the name of a body among those of an equation."""
        return bodies(eqn)[number][0]

    def called(self, eqn: JaxprEqn) -> str:
        """Return the name by which an equation can be searched, "" if it has none."""
        name = eqn.params.get("name")
        return name if isinstance(name, str) else ""

    def explained(self, eqn: JaxprEqn) -> str:
        """Return a sentence on what an equation's primitive does, "" if none is known."""
        return summary(eqn.primitive.name) or ""

    def path(self, node: OutlineNode) -> str:
        """Return where a row is, by the equations and bodies that lead to it."""
        return node.path

    def _equation(self, node: OutlineNode) -> list[str]:
        eqn = node.jaxpr.eqns[node.index]
        if not node.folds:
            return self.line_of(eqn, _MOST_NAMED)
        operands = self.operands(eqn, _MOST_NAMED)
        tokens = [*self.results(eqn, _MOST_NAMED), *self.head(eqn), " ", *operands]
        return [*tokens, *self._counted(self._selection.count_equation(eqn) - 1)]

    def _body(self, node: OutlineNode) -> list[str]:
        assert node.body is not None
        name = self.body_name(node.jaxpr.eqns[node.container.index], node.index)
        return [ParameterToken(name), *self._counted(self._selection.count(node.body))]

    def _scope(self, node: OutlineNode) -> list[str]:
        return [SharedName(node.label), *self._counted(self._in_scope(node))]

    def _counted(self, count: int) -> list[str]:
        return ["  ", Comment(f"… {plural(count, self.noun)}")]

    def _in_scope(self, node: OutlineNode) -> int:
        if id(node) not in self._counts:
            self._counts[id(node)] = sum(
                self._in_scope(child)
                if child.kind is Kind.scope
                else self._selection.count_equation(child.jaxpr.eqns[child.index])
                for child in node.children or ()
            )
        return self._counts[id(node)]

    def ends(self, kind: Kind) -> Sequence[NamedValue]:
        """Return the arguments or the results of the program."""
        is_argument = kind in (Kind.arguments, Kind.argument)
        return self.about.arguments if is_argument else self.about.outputs

    def _ends(self, node: OutlineNode) -> list[str]:
        sizes = [value.bytes for value in self.ends(node.kind)]
        known_sizes = [size for size in sizes if size is not None]
        size = (
            Comment(f"  {in_bytes(sum(known_sizes))}") if len(known_sizes) == len(sizes) > 0 else ""
        )
        return [ParameterToken(plural(len(sizes), node.kind.value.removesuffix("s"))), size]

    _arguments = _results = _ends

    def _argument(self, node: OutlineNode) -> list[str]:
        value = self.about.arguments[node.index]
        name = self.reader.name(node.jaxpr.invars[node.index])
        called = [f" {name}"] if name not in (value.name, "·") else []
        return [BinderToken(value.name), Type(f":{value.type}"), *called]

    def _result(self, node: OutlineNode) -> list[str]:
        value, atom = self.about.outputs[node.index], node.jaxpr.outvars[node.index]
        return [BinderToken(value.name), Type(f":{value.type}"), " = ", self.reader.operand(atom)]

    def parameters(self, eqn: JaxprEqn) -> dict[str, str]:
        """Return all parameters of an equation except jaxprs, including those hidden in its row."""
        return self._whole.parameters(eqn)

    @cached_property
    def _whole(self) -> Reader:
        return Reader(self.about, named=False)

    def name(self, atom: Atom) -> str:
        """Return the name of an operand as plain text."""
        return "".join(printable([self.reader.operand(atom)]))

    def text(self, node: OutlineNode) -> str:
        """Return a row, such as a whole equation, as plain text."""
        eqn = node.eqn
        tokens = self.row(node) if eqn is None else self.line_of(eqn)
        return "".join(printable(tokens))

    def slice_text(self, node: OutlineNode) -> str:
        """Return the equations on which a row's values depend, one per line, bodies indented."""
        marked = backward_slice(self.top, Start(self.values(node))).members()
        if node.eqn is not None:
            marked |= {id(node.eqn)}
        lines: list[str] = []
        seen = {self.top}

        def write(jaxpr: Jaxpr, indent: int) -> None:
            for eqn in jaxpr.eqns:
                if id(eqn) not in marked:
                    continue
                lines.append("  " * indent + "".join(printable(self.line_of(eqn))))
                for number, (_, body) in enumerate(bodies(eqn)):
                    if body not in seen:
                        seen.add(body)
                        name = self.body_name(eqn, number)
                        lines.append("  " * (indent + 1) + f"{name}:")
                        write(body, indent + 2)

        write(self.top, 0)
        return "\n".join(lines)

    def values(self, node: OutlineNode) -> list[tuple[Jaxpr, Atom]]:
        """Return the values that a row binds, or the value of an argument or result."""
        if (eqn := node.eqn) is not None:
            return [(node.jaxpr, var) for var in eqn.outvars]
        if node.kind is Kind.argument:
            return [(node.jaxpr, node.jaxpr.invars[node.index])]
        if node.kind is Kind.result:
            atom = node.jaxpr.outvars[node.index]
            return [] if isinstance(atom, Literal) else [(node.jaxpr, atom)]
        return []


# --- states ---------------------------------------------------------------------------------------
# The states of a program: as traced, and after each pass that changed it.


@dataclass(eq=False)
class PassState:
    """A program between two passes.

    Attributes:
        label: The pass that produced it, or its name.
        program: The program.
        before: The state from which it was produced; None if traced.
        after: The states produced from it.
        module: The HLO module that the program stands for, if it is one.
    """

    label: str
    program: Program | ClosedJaxpr
    before: PassState | None = None
    after: list[PassState] = field(default_factory=list)
    module: ModuleJaxpr | None = None

    @cached_property
    def changes(self) -> Changes:
        """The changes of the pass that produced this state."""
        if self.before is None:
            return Changes(frozenset(), frozenset())
        return changes(top_jaxpr(self.before.program), top_jaxpr(self.program))

    @cached_property
    def marks(self) -> Mapping[int, str]:
        """The marks of equations, by `id`, that a pass added or will remove."""
        removed = [state.changes.removed for state in self.after]
        goes = removed[0].intersection(*removed) if removed else frozenset()
        added = self.changes.added
        return {**dict.fromkeys(goes, "-"), **{k: "±" if k in goes else "+" for k in added}}

    @property
    def is_compared(self) -> bool:
        """Whether `marks` and `changes` are computed, which takes time for large programs."""
        return "marks" in vars(self)


class StateRecorder(Observer):
    """Records the states of the programs in a pipeline, in order of creation."""

    def __init__(self, program: Program):
        self.states = [PassState("traced", program)]
        self._latest = {id(program): self.states[0]}

    def after(
        self, step: Step, program: Program, result: Program | Programs, seconds: float
    ) -> None:
        before = self._latest[id(program)]
        if result is program:
            return
        several = isinstance(result, Mapping)
        for name, new_program in result.items() if isinstance(result, Mapping) else [("", result)]:
            state = PassState(f"{step} {name}" if several else str(step), new_program, before)
            before.after.append(state)
            self.states.append(state)
            self._latest[id(new_program)] = state


# --- navigation -----------------------------------------------------------------------------------
# Navigation from a row to definitions and uses, and the search for rows.


@dataclass(frozen=True)
class Way:
    """A destination of a jump.

    Attributes:
        label: The value that leads there.
        node: The row.
    """

    label: str
    node: OutlineNode


class Navigator:
    """Finds the destinations of jumps from a row.

    Args:
        document: The program.
        outline: Its rows.
    """

    def __init__(self, document: Document, outline: ProgramOutline):
        self._document = document
        self._flow = document.flow
        self._outline = outline

    def definitions(self, node: OutlineNode) -> list[Way]:
        """Return the definitions of a row's operands: equations or arguments of the program.

        An argument of a body is defined by the operand of the call, and by the carry of a loop.
        """
        ways: list[Way] = []
        if (eqn := node.eqn) is not None:
            for atom in dict.fromkeys(v for v in eqn.invars if type(v) is not Literal):
                ways += self._definition(node.container, node.jaxpr, atom)
            if node.folds:
                ways += self._made_inside(node)
        elif node.kind is Kind.result:
            ways += self._definition(self._outline.root, node.jaxpr, node.jaxpr.outvars[node.index])
        return _distinct(ways)

    def sources(self, node: OutlineNode) -> list[str]:
        """Return a short description of the source of each operand of an equation."""
        return [
            "" if type(atom) is Literal else self._source(node, atom)
            for atom in node.jaxpr.eqns[node.index].invars
        ]

    def _source(self, node: OutlineNode, var: Var) -> str:
        for note, where in self._binders(node.container, node.jaxpr, var):
            if note:
                return note.strip(", ")
            eqn = where.eqn
            return "an argument" if eqn is None else f"← {eqn.primitive.name}"
        return ""

    def _definition(self, container: OutlineNode, jaxpr: Jaxpr, atom: Atom) -> Iterator[Way]:
        if type(atom) is Literal:
            return
        label = self._document.name(atom)
        for where, node in self._binders(container, jaxpr, atom):
            yield Way(f"{label}{where}", node)

    def _binders(
        self, container: OutlineNode, jaxpr: Jaxpr, var: Var
    ) -> Iterator[tuple[str, OutlineNode]]:
        """Yield the rows that bind a variable, with a description of each."""
        index = self._flow.definition(jaxpr, var)
        if index is not None:
            yield "", self._outline.leaf(container, index)
            return
        position = self._flow.argument(jaxpr, var)
        if position is None:
            return
        if container.kind is Kind.program:
            yield "", self._outline.locate((-1, position))
            return
        call = container if container.kind is Kind.equation else container.container
        holder = self._holder(call, container)
        origins = self._flow.origins(holder, position)
        if not origins:
            yield ", bound by the call", call
        for number, (where, atom) in enumerate(origins):
            note = ", from the previous iteration" if number else f" = {self._document.name(atom)}"
            if type(atom) is Literal:
                yield note, call
                continue
            if where is call.jaxpr:
                yield from ((note, node) for _, node in self._binders(call.container, where, atom))
            elif (inside := self._outline.inside(call, where)) is not None:
                back = self._flow.definition(where, atom)
                yield note, call if back is None else self._outline.leaf(inside, back)

    def _made_inside(self, node: OutlineNode) -> Iterator[Way]:
        """Yield the rows in bodies that compute the results of a call or a loop."""
        eqn = node.jaxpr.eqns[node.index]
        for number, (_, body) in enumerate(bodies(eqn)):
            inside = self._outline.inside(node, body)
            for position, atom in enumerate(body.outvars):
                index = None if type(atom) is Literal else self._flow.definition(body, atom)
                if inside is None or index is None:
                    continue
                for where, var in self._flow.destinations(
                    Holder(node.jaxpr, node.index, number), position
                ):
                    if where is node.jaxpr:
                        label = f"{self._document.name(var)}, computed inside"
                        yield Way(label, self._outline.leaf(inside, index))

    def uses(self, node: OutlineNode) -> list[Way]:
        """Return the uses of the values that a row binds, including those in bodies."""
        ways: list[Way] = []
        container = self._outline.root if node.eqn is None else node.container
        for jaxpr, atom in self._document.values(node):
            if type(atom) is not Literal and node.kind is not Kind.result:
                ways += self._uses(container, jaxpr, atom, self._document.name(atom))
        return _distinct(ways)

    def _uses(self, container: OutlineNode, jaxpr: Jaxpr, var: Var, label: str) -> Iterator[Way]:
        for index in self._flow.readers(jaxpr, var):
            leaf = self._outline.leaf(container, index)
            yield Way(label, leaf)
            if leaf.folds:
                yield from self._uses_inside(leaf, var, label)
        for position in self._flow.results(jaxpr, var):
            if container.kind is Kind.program:
                yield Way(label, self._outline.locate((AFTER, position)))
                continue
            call = container if container.kind is Kind.equation else container.container
            yield Way(f"{label}, a result", call)
            for where, value in self._flow.destinations(self._holder(call, container), position):
                if where is call.jaxpr:
                    alias = f"{label} = {self._document.name(value)}"
                    for index in self._flow.readers(where, value):
                        yield Way(alias, self._outline.leaf(call.container, index))
                    if call.container.kind is Kind.program:
                        for place in self._flow.results(where, value):
                            yield Way(alias, self._outline.locate((AFTER, place)))

    def _uses_inside(self, call: OutlineNode, var: Var, label: str) -> Iterator[Way]:
        """Yield the rows in the bodies of an equation that use an operand's argument."""
        eqn = call.jaxpr.eqns[call.index]
        for number, (_, body) in enumerate(bodies(eqn)):
            inside = self._outline.inside(call, body)
            for position, arg in enumerate(body.invars):
                readers = self._flow.readers(body, arg)
                if inside is None or not readers:
                    continue
                origins = self._flow.origins(Holder(call.jaxpr, call.index, number), position)
                if origins and origins[0] == (call.jaxpr, var):
                    for index in readers:
                        yield Way(f"{label}, inside", self._outline.leaf(inside, index))

    def _holder(self, call: OutlineNode, container: OutlineNode) -> Holder:
        nested = bodies(call.jaxpr.eqns[call.index])
        number = next(i for i, (_, body) in enumerate(nested) if body is container.body)
        return Holder(call.jaxpr, call.index, number)


def _distinct(ways: list[Way]) -> list[Way]:
    """Return the first way to each row."""
    by_row: dict[int, Way] = {}
    for way in ways:
        by_row.setdefault(id(way.node), way)
    return list(by_row.values())


def way_text(way: Way, document: Document) -> str:
    """Return the text of a destination, preceded by its label unless the row starts with it."""
    text = "".join(document.row(way.node))
    return text if text.startswith(f"{way.label}:") else f"{way.label}   {text}"


def counterpart(
    node: OutlineNode, document: Document, outline: ProgramOutline
) -> OutlineNode | None:
    """Return the row in another state or grouping that corresponds to a row."""
    if node.kind in (Kind.argument, Kind.result):
        is_there = node.index < len(document.ends(node.kind))
        return outline.locate(node.place) if is_there else None
    if (eqn := node.eqn) is None:
        return None
    results = set(map(id, eqn.outvars))
    matching = RowMatches(document, lambda jaxpr, index, _: jaxpr.eqns[index] is eqn)
    if not matching.total:
        matching = RowMatches(
            document,
            lambda jaxpr, index, _: any(id(var) in results for var in jaxpr.eqns[index].outvars),
        )
    if not matching.total:
        return None
    return outline.locate(node.place if node.place in matching else matching.at(0))


# --- search ---------------------------------------------------------------------------------------
# Queries of a search, and matching rows.
#
#     dot_general            a primitive, or part of its name; also reduce_*
#     f32[8,3]  bf16  [8,3]  a type, a dtype or a shape of a result or operand
#     params['w']            an argument, and its readers
#     Dense_0                a scope, or the function of a call
#     model.py:9  :9         a line of the source
#
# All words of a query must match. Lower case letters also match capitals.

_LINE = re.compile(r"(?P<file>\S*):(?P<line>\d+)")

#: Returns True if an equation matches: a body, a position in it, and the call stack of the body.
Fits: TypeAlias = Callable[[Jaxpr, int, CallStack], bool]

#: A body, and the call stack that its equations without user code inherit; empty if not needed.
_Called: TypeAlias = tuple[Jaxpr, CallStack]


class _BodyMatches:
    """The matches in a body: the steps to them, and how many are before each step."""

    def __init__(self) -> None:
        self.steps: list[RowPlace] = []
        self.bodies: list[_Called | None] = []
        self.before = [0]

    def add(self, step: RowPlace, body: _Called | None = None, count: int = 1) -> None:
        """Append a matching row, or a body with matches."""
        self.steps.append(step)
        self.bodies.append(body)
        self.before.append(self.before[-1] + count)


class RowMatches:
    """The places of matching rows, in program order; a shared body counts at each of its calls.

    Places are counted, not listed: bodies that share bodies have exponentially many.

    Args:
        document: The program.
        fits: Returns True if an equation matches.
        ends: The places of matching arguments and results.
        by_line: Whether `fits` reads the call stack.
    """

    def __init__(
        self, document: Document, fits: Fits, ends: Sequence[RowPlace] = (), by_line: bool = False
    ):
        self._document, self._fits, self._ends, self._by_line = document, fits, ends, by_line
        self._top: _Called = document.top, ()
        self._counts: dict[_Called, _BodyMatches] = {}
        todo: list[_Called] = [self._top]
        calls: dict[_Called, dict[int, list[_Called]]] = {self._top: self._calls(self._top)}
        while todo:  # inner bodies first
            inside = chain.from_iterable(calls[todo[-1]].values())
            if new := [body for body in inside if body not in self._counts]:
                calls |= {body: self._calls(body) for body in new if body not in calls}
                todo += new
            elif (body := todo.pop()) not in self._counts:
                self._counts[body] = self._counted(body, calls[body])

    def _calls(self, called: _Called) -> dict[int, list[_Called]]:
        """Return the bodies in each equation of a body, by its position."""
        jaxpr, above = called
        calls = {}
        for index, eqn in enumerate(() if is_flat(jaxpr) else jaxpr.eqns):
            if nested := bodies(eqn):
                stack = self._document.stack(eqn, above) if self._by_line else ()
                calls[index] = [(body, stack) for _, body in nested]
        return calls

    def _counted(self, called: _Called, calls: Mapping[int, list[_Called]]) -> _BodyMatches:
        (jaxpr, above), counts = called, _BodyMatches()
        ends = self._ends if jaxpr is self._document.top else ()
        for place in ends:
            if place < (0,):
                counts.add(place)
        for index in range(len(jaxpr.eqns)):
            if self._fits(jaxpr, index, above):
                counts.add((index,))
            for number, body in enumerate(calls.get(index, ())):
                if count := self._counts[body].before[-1]:
                    counts.add((index, number), body, count)
        for place in ends:
            if place > (0,):
                counts.add(place)
        return counts

    @property
    def total(self) -> int:
        """The number of matches."""
        return self._counts[self._top].before[-1]

    def at(self, number: int) -> RowPlace:
        """Return the place of a match."""
        place: RowPlace = ()
        body: _Called | None = self._top
        while body is not None:
            counts = self._counts[body]
            row = bisect_right(counts.before, number) - 1
            number -= counts.before[row]
            place += counts.steps[row]
            body = counts.bodies[row]
        return place

    def before(self, place: RowPlace) -> int:
        """Return the number of matches before a place."""
        number = 0
        body: _Called | None = self._top
        while body is not None and place:
            counts = self._counts[body]
            step, place = place[:2], place[2:]
            row = bisect_left(counts.steps, step)
            number += counts.before[row]
            body = counts.bodies[row] if counts.steps[row : row + 1] == [step] else None
        return number

    def __contains__(self, place: RowPlace) -> bool:
        number = self.before(place)
        return number < self.total and self.at(number) == place

    def next(self, place: RowPlace, by: int) -> int:
        """Return the number of the next match relative to a place; the search wraps around.

        With `by` 0 it is at or after the place, with 1 after it, with -1 before it.
        """
        number = self.before(place)
        if by > 0 and place in self:
            number += 1
        return (number - (by < 0)) % self.total


def matches(document: Document, query: str) -> RowMatches:
    """Return the matches of a query."""
    words = [_Word(document, word) for word in query.split()]

    def fits(jaxpr: Jaxpr, index: int, above: CallStack) -> bool:
        return all(word.fits(jaxpr, index, above) for word in words)

    ends = [
        (first, index)
        for first, values in ((-1, document.about.arguments), (AFTER, document.about.outputs))
        for index, value in enumerate(values)
        if all(word.fits_text(value.name) or word.fits_text(value.type) for word in words)
    ]
    return RowMatches(document, fits, ends, any(word.is_line for word in words))


def matches_of_line(document: Document, line: tuple[str, int]) -> RowMatches:
    """Return the equations of a source line: a file, and a number."""
    return RowMatches(
        document,
        lambda jaxpr, index, above: document.line(jaxpr.eqns[index], above) == line,
        by_line=True,
    )


class _Word:
    """One word of a query."""

    def __init__(self, document: Document, word: str):
        self._document = document
        self._folds = word == word.lower()
        self._word = word
        self._types: dict[int, bool] = {}
        self._texts: dict[str, bool] = {}
        self._stacks: dict[CallStack, bool] = {}
        escaped = re.escape(word).replace(r"\*", ".*")
        self._pattern = re.compile(escaped) if "*" in word else None
        line = _LINE.fullmatch(word)
        self._line = (line["file"], int(line["line"])) if line else None
        self.is_line = line is not None
        self._arguments = {
            var
            for var, value in zip(document.top.invars, document.about.arguments, strict=True)
            if self.fits_text(value.name)
        }

    def fits_text(self, text: str) -> bool:
        """Return True if a text contains the word or matches its pattern."""
        fits = self._texts.get(text)
        if fits is None:
            fits = self._texts[text] = self._is_in(text)
        return fits

    def _is_in(self, text: str) -> bool:
        text = text.lower() if self._folds else text
        return self._pattern.fullmatch(text) is not None if self._pattern else self._word in text

    def fits(self, jaxpr: Jaxpr, index: int, above: CallStack) -> bool:
        """Return True if an equation matches, in a body called from a stack."""
        eqn = jaxpr.eqns[index]
        if self._line is not None:
            return self._fits_line(self._document.stack(eqn, above), *self._line)
        name = self._document.called(eqn)
        if self.fits_text(eqn.primitive.name) or (name and self.fits_text(name)):
            return True
        if any(map(self._fits_value, eqn.outvars)) or any(map(self._fits_value, eqn.invars)):
            return True
        if self._arguments and any(
            type(v) is not Literal and v in self._arguments for v in eqn.invars
        ):
            return True
        return self.fits_text("/".join(self._document.scopes(jaxpr)[index]))

    def _fits_value(self, atom: Atom) -> bool:
        key = id(atom.aval)
        fits = self._types.get(key)
        if fits is None:
            fits = self._types[key] = self.fits_text(type_of(atom.aval))
        return fits

    def _fits_line(self, stack: CallStack, file: str, line: int) -> bool:
        if stack not in self._stacks:
            frames = self._document.frames
            shown = stack if file else stack[frames.nearest(stack) :][:1]
            self._stacks[stack] = any(
                frame.line == line
                and (not file or f"/{frames.path(frame.file)}".endswith(f"/{file}"))
                for frame in shown
            )
        return self._stacks[stack]
