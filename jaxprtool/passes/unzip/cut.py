"""Find the cheapest set of a graph's nodes that cuts its sink off from its source.

`Graph.minimum_cut` is exact: no other set costs less, and of those with the same cost it is the one
nearest the sink. Costs are integers of any size, or `math.inf` for nodes that cannot be chosen.

Graphs of programs are large and nearly trees, so most of the work is done by `Graph.reduce`, in
time linear in the graph. For most nodes, bounds from both sides prove that other nodes cut at a
lower cost, or nearer the sink; such nodes are merged into their neighbours. A node that is then
alone between source and sink must be chosen. The rest, one connected part at a time, is cut by the
maximum flow that NetworkX finds. The cut is taken from the sink's side, where the nearest one is
(Picard and Queyranne, On the structure of all minimum cuts in a network, 1980).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence, Set

#: The two nodes that every graph has. They cannot be chosen.
SOURCE, SINK = 0, 1

_NO_CUT = "no cut: a path from the source to the sink has only nodes that cannot be chosen"


class Graph:
    """A directed graph of nodes that have a cost; nodes are numbered as they are added.

    Edges may form cycles. Reductions work best if edges run from lower numbers to higher ones, as
    they do where nodes are added in the order of computation.
    """

    def __init__(self) -> None:
        self.costs: list[float] = [math.inf, math.inf]
        self.after: list[set[int]] = [set(), set()]
        self.before: list[set[int]] = [set(), set()]

    def add(self, cost: float) -> int:
        """Add a node that costs `cost`, an int or `math.inf`, and return it."""
        self.costs.append(cost)
        self.after.append(set())
        self.before.append(set())
        return len(self.costs) - 1

    def link(self, start: int, end: int) -> None:
        """Add an edge: `end` is not cut off unless `start` is, or one of the two is chosen."""
        if start != end:
            self.after[start].add(end)
            self.before[end].add(start)

    def unlink(self, start: int, end: int) -> None:
        """Remove an edge."""
        self.after[start].discard(end)
        self.before[end].discard(start)

    def part(self, nodes: Collection[int]) -> Graph:
        """Return the subgraph of some nodes, the source and the sink."""
        part, kept = Graph(), {SOURCE, SINK, *nodes}
        part.costs = list(self.costs)
        empty: set[int] = set()
        part.after, part.before = ([empty] * len(self.costs) for _ in range(2))
        for node in kept:
            part.after[node] = self.after[node] & kept
            part.before[node] = self.before[node] & kept
        return part

    def leading_to_sink(self, nodes: Set[int]) -> set[int]:
        """Return the sink, and the nodes among `nodes` that lead to it through one another."""
        return _reached((SINK,), self.before, nodes)

    @property
    def nodes(self) -> list[int]:
        """The nodes that have edges, without source and sink, in order."""
        return [n for n in range(2, len(self.costs)) if self.after[n] or self.before[n]]

    def minimum_cut(self) -> list[int]:
        """Return the chosen nodes, in order. Destroys the graph.

        Raises ValueError if every cut has a node that cannot be chosen.
        """
        chosen: list[int] = []
        before, count = math.inf, len(self.nodes)
        while 0 < count < 0.9 * before:  # bounds the cost of all repetitions by that of ten
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

        `fixed` are nodes where a larger graph will be connected: they stay, and so do all nodes
        that the cut of any such graph could choose.
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
        """Remove nodes on no path from the source or a fixed node to the sink or a fixed node."""
        forwards = _reached((SOURCE, *fixed), self.after)
        backwards = _reached((SINK, *fixed), self.before)
        for node in self.nodes:
            if node not in fixed and not (node in forwards and node in backwards):
                self._unlink(node)

    def _forbid_dominated(self, fixed: Collection[int]) -> None:
        """Set the cost to infinity for nodes that are in no minimum cut, or none nearest the sink.

        A node is not chosen if its successors can be cut off from the sink for no more, or its
        predecessors from the source for less. The bounds choose each node, or a set that cuts off
        each of its neighbours, and may count a node twice.
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
        """Remove a node that cannot be chosen, and connect its predecessors to its successors."""
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

    # --- the remaining graph ------------------------------------------------------------------

    def _parts(self) -> Iterator[list[int]]:
        """Yield the nodes of each connected part, without source and sink."""
        around = [after | before for after, before in zip(self.after, self.before, strict=True)]
        left = set(self.nodes)
        for node in self.nodes:
            if node in left:
                part = _reached((node,), around, left)
                left -= part
                yield sorted(part)


def _reached(
    start: Iterable[int], edges: Sequence[set[int]], among: Set[int] | None = None
) -> set[int]:
    """Return the nodes reachable from `start`; if `among` is given, only through these nodes."""
    found = set(start)
    todo = list(found)
    while todo:
        new = edges[todo.pop()] - found
        new = new if among is None else new & among
        found |= new
        todo += new
    return found


def _cut_by_flow(graph: Graph, part: Sequence[int]) -> list[int]:
    """Return the cut of a part of a graph: nodes are arcs of their cost, edges have no limit."""
    import networkx  # only used here, and slow to import

    network = networkx.DiGraph()
    network.add_nodes_from((SOURCE, SINK))
    for node in part:
        finite = {} if graph.costs[node] == math.inf else {"capacity": graph.costs[node]}
        network.add_edge((node, "in"), (node, "out"), **finite)
        if SOURCE in graph.before[node]:
            network.add_edge(SOURCE, (node, "in"))
        for other in graph.after[node]:
            network.add_edge((node, "out"), SINK if other == SINK else (other, "in"))
    try:
        residual = networkx.flow.preflow_push(network, SOURCE, SINK)
    except networkx.NetworkXUnbounded:
        raise ValueError(_NO_CUT) from None
    # The nodes that still lead to the sink in the residual: the side of the nearest cut.
    arcs = residual.edges
    has_room = networkx.subgraph_view(
        residual, filter_edge=lambda a, b: arcs[a, b]["flow"] < arcs[a, b]["capacity"]
    )
    behind = networkx.ancestors(has_room, SINK)
    return [node for node in part if (node, "in") not in behind and (node, "out") in behind]
