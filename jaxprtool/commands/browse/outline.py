"""A program as foldable rows: equations by nesting of bodies, optionally grouped by scope.

The children of a row are created when it is first unfolded. A body shared by several equations is a
child of each of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import TypeAlias

from jaxprtool.extend import Jaxpr, JaxprEqn, bodies, is_flat
from jaxprtool.extend.programs import DataFlow

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
