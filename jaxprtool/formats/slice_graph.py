"""The part of a graph that is a slice of its program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from jaxprtool.formats.graph import Frame, Graph, Node


def sliced(graph: Graph, among: Collection[int], ends: Collection[str]) -> Graph:
    """Return a graph with some of its equations, arguments and results.

    Ports of a body are kept if they are between two of these.

    Args:
        graph: The graph of a program.
        among: The equations to keep, by `id`.
        ends: The arguments and results to keep, by name.
    """
    nodes = list(graph.root.nodes())
    kept = {node for node in nodes if _stays(node, among, ends)}
    after: dict[Node, list[Node]] = defaultdict(list)
    before: dict[Node, list[Node]] = defaultdict(list)
    for edge in graph.edges:
        after[edge.source].append(edge.target)
        before[edge.target].append(edge.source)
    ports = _ports_from(kept, after) & _ports_from(kept, before)
    read = {edge.source for edge in graph.edges if edge.target in kept}
    kept |= ports | {node for node in nodes if node.kind == "constant" and node in read}
    edges = [edge for edge in graph.edges if edge.source in kept and edge.target in kept]
    shared = {node: held for node, held in graph.shared.items() if node in kept}
    return replace(graph, root=_frame(graph.root, kept), edges=edges, shared=shared)


def _stays(node: Node, among: Collection[int], ends: Collection[str]) -> bool:
    if node.kind in ("argument", "result"):
        return node.title in ends
    return node.eqn is not None and id(node.eqn) in among


def _ports_from(nodes: Iterable[Node], next_to: Mapping[Node, list[Node]]) -> set[Node]:
    """Return the ports reachable from these nodes through ports only."""
    found: set[Node] = set()
    todo = list(nodes)
    while todo:
        for node in next_to.get(todo.pop(), ()):
            if node.kind == "port" and node not in found:
                found.add(node)
                todo.append(node)
    return found


def _frame(frame: Frame, kept: Collection[Node]) -> Frame:
    """Return a frame with only the kept nodes, without empty frames."""
    parts: list[Node | Frame] = []
    for part in frame.parts:
        if isinstance(part, Frame):
            inner = _frame(part, kept)
            parts += [inner] if inner.parts else []
        elif part in kept:
            parts.append(part)
    return replace(frame, parts=parts)
