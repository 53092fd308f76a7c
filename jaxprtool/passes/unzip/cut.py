"""The cheapest set of a graph's nodes that cuts its sink off from its source.

`Graph.minimum_cut` is exact: no other set costs less, and of those that cost the same it is the
one nearest the sink. Costs are integers of any size, or `math.inf` for what cannot be chosen.

Graphs of programs are large and nearly trees, so most of the work is done by `Graph.reduce`, in
time linear in the graph: bounds from both sides tell of most nodes that others do as well for
less, or nearer the sink; such nodes are merged into their neighbours, and a node that then stands
alone between source and sink must be chosen. What remains is cut by maximum flow, a connected
part at a time (Dinic, Algorithm for solution of a problem of maximum flow in networks, 1970). The
cut is read off from the sink's side, where the nearest one is (Picard and Queyranne, On the
structure of all minimum cuts in a network, 1980).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence, Set

#: The two nodes that every graph has. They cannot be chosen.
SOURCE, SINK = 0, 1

_NO_CUT = "no cut: what cannot be chosen leads from the source to the sink"


class Graph:
    """A directed graph of nodes that have a cost; nodes are numbered as they are added.

    Edges may form cycles. Reductions find the more, the more edges run from lower numbers to
    higher ones, as they do where nodes are added in the order of computation.
    """

    def __init__(self) -> None:
        self.costs: list[float] = [math.inf, math.inf]
        self.after: list[set[int]] = [set(), set()]
        self.before: list[set[int]] = [set(), set()]

    def add(self, cost: float) -> int:
        """A new node that costs `cost`: an int, or `math.inf`."""
        self.costs.append(cost)
        self.after.append(set())
        self.before.append(set())
        return len(self.costs) - 1

    def link(self, start: int, end: int) -> None:
        """An edge: `end` is not cut off unless `start` is, or one of the two is chosen."""
        if start != end:
            self.after[start].add(end)
            self.before[end].add(start)

    def unlink(self, start: int, end: int) -> None:
        """Take an edge away."""
        self.after[start].discard(end)
        self.before[end].discard(start)

    def part(self, nodes: Collection[int]) -> Graph:
        """The graph of some of the nodes alone, and the edges between them, source and sink."""
        part, kept = Graph(), {SOURCE, SINK, *nodes}
        part.costs = list(self.costs)
        empty: set[int] = set()
        part.after, part.before = ([empty] * len(self.costs) for _ in range(2))
        for node in kept:
            part.after[node] = self.after[node] & kept
            part.before[node] = self.before[node] & kept
        return part

    def leading_to_sink(self, nodes: Set[int]) -> set[int]:
        """The sink, and those of some nodes that lead to it through one another."""
        found, todo = {SINK}, [SINK]
        while todo:
            new = (self.before[todo.pop()] & nodes) - found
            found |= new
            todo += new
        return found

    @property
    def nodes(self) -> list[int]:
        """The nodes that have edges, source and sink left out, in order."""
        return [n for n in range(2, len(self.costs)) if self.after[n] or self.before[n]]

    def minimum_cut(self) -> list[int]:
        """The chosen nodes, in order. Uses the graph up.

        Raises ValueError if every cut has a node that cannot be chosen.
        """
        chosen: list[int] = []
        before, count = math.inf, len(self.nodes)
        while 0 < count < 0.9 * before:  # so that all rounds together cost no more than ten
            self.reduce()
            forced = self.after[SOURCE] & self.before[SINK]
            chosen += forced
            for node in forced:
                self._unlink(node)
            before, count = count, len(self.nodes)
        if SINK in self.after[SOURCE]:
            raise ValueError(_NO_CUT)
        for part in self._parts():
            chosen += _cut_by_flow(self, part)
        return sorted(chosen)

    # --- reductions ---------------------------------------------------------------------------

    def reduce(self, fixed: Collection[int] = ()) -> None:
        """Make the graph smaller without changing its cut.

        `fixed` are nodes where a larger graph will be joined on: they stay, and what the cut of
        any such graph could choose stays.
        """
        fixed = frozenset(fixed)
        self._drop_dead(fixed)
        self._forbid_dominated(fixed)
        inner = [n for n in self.nodes if n not in fixed and self.costs[n] == math.inf]
        # In this order, a node's many edges are moved once, not once for each node of a chain.
        for node in inner:
            if len(self.before[node]) == 1 or SOURCE in self.before[node]:
                self._bypass(node)
        for node in reversed(inner):
            if len(self.after[node]) == 1 or SINK in self.after[node]:
                self._bypass(node)

    def _drop_dead(self, fixed: Collection[int]) -> None:
        """Take out what is on no path to the sink, or a fixed node, from the source, or one."""
        forwards = _reached((SOURCE, *fixed), self.after)
        backwards = _reached((SINK, *fixed), self.before)
        for node in self.nodes:
            if node not in fixed and not (node in forwards and node in backwards):
                self._unlink(node)

    def _forbid_dominated(self, fixed: Collection[int]) -> None:
        """Give infinite costs to nodes that are in no minimum cut, or in none nearest the sink.

        A node is not chosen if what comes after it can be cut off from the sink for no more, or
        what comes before it from the source for less. The bounds choose each node, or what cuts
        off each of its neighbours, and may count a node twice.
        """
        costs, nodes = self.costs, self.nodes
        below, above = list(costs), list(costs)
        forbidden = []
        for node in reversed(nodes):
            if node not in fixed:
                bound = sum(below[n] if n > node else costs[n] for n in self.after[node])
                if bound <= costs[node]:
                    below[node] = bound
                    forbidden.append(node)
        for node in nodes:
            if node not in fixed:
                bound = sum(above[n] if n < node else costs[n] for n in self.before[node])
                if bound < costs[node]:
                    above[node] = bound
                    forbidden.append(node)
        for node in forbidden:
            costs[node] = math.inf

    def _bypass(self, node: int) -> None:
        """Take out a node that cannot be chosen, and join those before it to those after it."""
        before = [SOURCE] if SOURCE in self.before[node] else list(self.before[node])
        after = [SINK] if SINK in self.after[node] else list(self.after[node])
        self._unlink(node)
        for start in before:
            for end in after:
                self.link(start, end)

    def _unlink(self, node: int) -> None:
        for other in self.before[node]:
            self.after[other].discard(node)
        for other in self.after[node]:
            self.before[other].discard(node)
        self.after[node], self.before[node] = set(), set()

    # --- what remains -------------------------------------------------------------------------

    def _parts(self) -> Iterable[list[int]]:
        """The nodes of each part that hangs together, source and sink left out."""
        seen = {SOURCE, SINK}
        for node in self.nodes:
            if node not in seen:
                part = [node]
                seen.add(node)
                for each in part:
                    new = (self.after[each] | self.before[each]) - seen
                    seen |= new
                    part += new
                yield part


def _reached(start: Iterable[int], edges: Sequence[set[int]]) -> set[int]:
    found = set(start)
    todo = list(found)
    while todo:
        new = edges[todo.pop()] - found
        found |= new
        todo += new
    return found


# --- maximum flow -----------------------------------------------------------------------------


class _Network:
    """Arcs with capacities; arc `i` and arc `i ^ 1` run between the same nodes, back and forth."""

    def __init__(self, count: int):
        self.arcs: list[list[int]] = [[] for _ in range(count)]
        self.ends: list[int] = []
        self.room: list[float] = []

    def add(self, start: int, end: int, capacity: float) -> None:
        for at, to, room in (start, end, capacity), (end, start, 0):
            self.arcs[at].append(len(self.ends))
            self.ends.append(to)
            self.room.append(room)

    def levels(self, start: int, backwards: bool = False) -> list[int]:
        """How far each node is from `start` over arcs with room, or to it; -1 if not at all."""
        level = [-1] * len(self.arcs)
        level[start] = 0
        todo = deque([start])
        while todo:
            node = todo.popleft()
            for arc in self.arcs[node]:
                end = self.ends[arc]
                if level[end] < 0 and self.room[arc ^ backwards] > 0:
                    level[end] = level[node] + 1
                    todo.append(end)
        return level

    def saturate(self, source: int, sink: int) -> None:
        """Send as much as can be sent from `source` to `sink`.

        Raises ValueError if that is without end.
        """
        while (level := self.levels(source))[sink] >= 0:
            tried = [0] * len(self.arcs)
            path: list[int] = []
            while True:
                node = self.ends[path[-1]] if path else source
                if node == sink:
                    del path[self._send(path) :]
                    continue
                for arc in self.arcs[node][tried[node] :]:
                    if self.room[arc] > 0 and level[self.ends[arc]] == level[node] + 1:
                        path.append(arc)
                        break
                    tried[node] += 1
                else:
                    if not path:
                        break
                    path.pop()
                    tried[self.ends[path[-1]] if path else source] += 1

    def _send(self, path: Sequence[int]) -> int:
        """Send as much as a path takes; gives the position of the first arc that is then full."""
        amount = min(self.room[arc] for arc in path)
        if amount == math.inf:
            raise ValueError(_NO_CUT)
        for arc in path:
            self.room[arc] -= amount
            self.room[arc ^ 1] += amount
        return next(i for i, arc in enumerate(path) if not self.room[arc])


def _cut_by_flow(graph: Graph, part: Sequence[int]) -> list[int]:
    """The cut of a part of a graph: each node is an arc of its cost, each edge has room for all."""
    place = {node: 2 * i for i, node in enumerate(part, start=1)}
    network = _Network(2 * len(part) + 2)
    for node, start in place.items():
        network.add(start, start + 1, graph.costs[node])
        if SOURCE in graph.before[node]:
            network.add(SOURCE, start, math.inf)
        for other in graph.after[node]:
            network.add(start + 1, place.get(other, SINK), math.inf)
    network.saturate(SOURCE, SINK)
    level = network.levels(SINK, backwards=True)
    return [node for node, at in place.items() if level[at] < 0 <= level[at + 1]]
