"""Folding of large graphs for pictures: frames become boxes, and edges are merged.

Deep or shared frames are folded. Frames are opened from the outside inwards, the largest of a level
first, while the picture has at most `MOST_BOXES` boxes. Of several equal frames one is opened, and
the others refer to it. Arguments read by the same boxes share a box, as do results of the same box.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, takewhile
from typing import NamedTuple

from jaxprtool.formats.graph import Edge, Frame, Graph, Node, is_border
from jaxprtool.ir.basics.quantities import in_bytes, plural
from jaxprtool.ir.core.equations import size_of, type_of
from jaxprtool.ir.programs.program_signature import path_parts
from jaxprtool.jaxcompat import Aval

#: The maximum number of boxes of a picture; frames of a larger one are folded.
MOST_BOXES = 60

#: The number of equal adjacent frames that become one box if the whole graph must fit a picture.
_MANY = 6

#: A frame of fewer equations is drawn as a box, unless all frames are open.
_LEAST = 8


def folded(graph: Graph, depth: int | None = None) -> Graph:
    """Return a graph with frames folded.

    Args:
        graph: The graph of a program.
        depth: The depth up to which frames are open; None for as many as a picture can show.
    """
    if depth is not None:
        folding = _Folding(graph)
        return folding.result(folding.as_deep_as(depth))
    folding = _Folding(graph, _MANY)
    return folding.result(folding.fitting())


def values_text(values: Sequence[Aval]) -> str:
    """Return the type of one value, or a summary of several: `12 arrays, 1.2 MiB`."""
    if len(values) == 1:
        return type_of(values[0])
    return f"{plural(len(values), 'array')}, {in_bytes(sum(size_of(v, 0) for v in values))}"


class _Folding:
    """Folds a graph.

    Args:
        graph: The graph.
        many: The number of equal adjacent frames that become one box; None to keep them apart.
    """

    def __init__(self, graph: Graph, many: int | None = None):
        self._graph, self._many = graph, many
        self._into: defaultdict[Node, list[Edge]] = defaultdict(list)
        for edge in graph.edges:
            self._into[edge.target].append(edge)
        self._keys: dict[Frame, int] = {}
        self._structures: dict[Hashable, int] = {}

    # --- open frames

    def as_deep_as(self, depth: int) -> set[Frame]:
        """Return the frames up to a nesting depth."""
        opened = level = [self._graph.root]
        for _ in range(depth):
            level = [inner for frame in level for inner in frame.frames()]
            opened = opened + level
        return set(opened)

    def fitting(self) -> set[Frame]:
        """Return the frames to open: as many as the picture has room for."""
        root = self._graph.root
        opened, level = {root}, root.frames()
        border = sum(map(is_border, root.parts))
        room = MOST_BOXES + border - len(self._units(root, opened))
        seen = set[int]()
        while level:
            inside: list[Frame] = []
            large = [frame for frame in level if frame.equations >= _LEAST]
            for frame in sorted(large, key=lambda frame: -frame.equations):
                cost = len(self._units(frame, opened)) - 1 + self._arguments(frame)
                if cost <= room and (key := self.key(frame)) not in seen:
                    room -= cost
                    seen.add(key)
                    opened.add(frame)
                    inside += frame.frames()
            level = inside
        return opened

    def _arguments(self, frame: Frame) -> int:
        """Return the number of arguments read by the equations directly in a frame."""
        nodes = (part for part in frame.parts if isinstance(part, Node))
        read = {edge.source for node in nodes for edge in self._into[node]}
        return sum(map(is_border, read))

    def _units(self, frame: Frame, opened: set[Frame]) -> list[list[Node | Frame]]:
        """Return the parts of a frame as lists; each list is drawn as one box."""
        units: list[list[Node | Frame]] = []
        for key, run in groupby(frame.parts, lambda part: self._closed(part, opened)):
            parts = list(run)
            if self._many is not None and key is not None and len(parts) >= self._many:
                units.append(parts)
            else:
                units += ([part] for part in parts)
        return units

    def _closed(self, part: Node | Frame, opened: set[Frame]) -> int | None:
        """Return the key of a frame that is drawn as a box, else None."""
        return self.key(part) if isinstance(part, Frame) and part not in opened else None

    def key(self, frame: Frame) -> int:
        """Return a number that is equal for frames with equal computations."""
        if frame not in self._keys:
            inside = list(_walk(frame, 0))
            numbers: dict[object, int] = {part: i for i, (part, _) in enumerate(inside)}
            entries: list[Hashable] = [frame.like]
            for part, level in inside:
                entries.append((level, part.like))
                for edge in self._into[part] if isinstance(part, Node) else ():
                    if edge.source in numbers:
                        origin = numbers[edge.source], edge.output
                    else:  # outside values are numbered by first use
                        value = edge.source, edge.output
                        origin = numbers.setdefault(value, len(numbers)), 0
                    entries.append((*origin, edge.place, edge.back, *edge.values))
            self._keys[frame] = self._structures.setdefault(tuple(entries), len(self._structures))
        return self._keys[frame]

    # --- the result

    def result(self, opened: set[Frame]) -> Graph:
        """Return the graph with all frames folded except `opened`."""
        first: dict[int, tuple[Frame, str, str]] = {}
        names = Counter(frame.title for frame in _visible(self._graph.root, opened))
        shown_by: dict[Node, Node] = {}
        places: dict[Node, Frame] = {}

        def copy(frame: Frame, path: str) -> Frame:
            result = Frame(frame.title, frame.like, frame.eqn)
            for part, *others in self._units(frame, opened):
                if isinstance(part, Node):
                    places[part] = result
                    result.parts.append(part)
                    continue
                name = part.title if names[part.title] == 1 else f"{path}{part.title}"
                other, title, far = first.setdefault(self.key(part), (frame, part.title, name))
                if part in opened:
                    result.parts.append(copy(part, f"{part.title}/"))
                else:
                    same = title if other is frame else far
                    unit = [part, *(other for other in others if isinstance(other, Frame))]
                    box = _box(unit, "" if far == name else same)
                    result.parts.append(box)
                    for one in unit:
                        shown_by.update(dict.fromkeys(one.nodes(), box))
            return result

        root = copy(self._graph.root, "")
        edges = self._grouped_border(root, _between(self._graph.edges, shown_by), places)
        return Graph(self._graph.title, root, _merged(edges), self._graph.shared)

    def _grouped_border(
        self, root: Frame, edges: Sequence[_Passing], places: Mapping[Node, Frame]
    ) -> list[_Passing]:
        """Replace argument and result nodes by grouped boxes next to their readers and producers.

        Arguments read by the same box, or results of the same box, are grouped if they belong to
        one pytree.
        """
        groups: defaultdict[Hashable, dict[Node, None]] = defaultdict(dict)
        border = set(filter(is_border, root.parts))

        def near(node: Node, other: Node) -> Hashable:
            if other.kind != "folded":
                return node, places[other]
            return node.kind, path_parts(node.title)[:1], other

        for passing in edges:
            if passing.source in border:
                groups[near(passing.source, passing.target)][passing.source] = None
            if passing.target in border:
                groups[near(passing.target, passing.source)][passing.target] = None
        used = {node for group in groups.values() for node in group}
        for node in root.parts:
            if node in border and node not in used:
                groups[node.kind, path_parts(node.title)[:1]][node] = None
        boxes = {key: _one_of(list(nodes)) for key, nodes in groups.items()}
        inside = [part for part in root.parts if part not in border]
        given = [box for box in boxes.values() if box.kind != "result"]
        root.parts = [*given, *inside, *(box for box in boxes.values() if box.kind == "result")]
        return [
            _Passing(
                boxes[near(source, target)] if source in border else source,
                boxes[near(target, source)] if target in border else target,
                edge,
            )
            for source, target, edge in edges
        ]


class _Passing(NamedTuple):
    """An edge, and the nodes drawn for its ends."""

    source: Node
    target: Node
    edge: Edge


def _between(edges: Iterable[Edge], shown_by: Mapping[Node, Node]) -> list[_Passing]:
    """Return the edges that are not inside a box."""
    shown = []
    for edge in edges:
        source = shown_by.get(edge.source, edge.source)
        target = shown_by.get(edge.target, edge.target)
        if source is not target or source is edge.source:
            shown.append(_Passing(source, target, edge))
    return shown


def _merged(edges: Iterable[_Passing]) -> list[Edge]:
    """Return the edges, merged so that a box has one per other end."""
    result: list[Edge] = []
    merged: defaultdict[tuple[Node, Node, bool], dict[tuple[Node, int], Edge]] = defaultdict(dict)
    for source, target, edge in edges:
        if source.kind == "folded" or target.kind == "folded":
            merged[source, target, edge.back].setdefault((edge.source, edge.output), edge)
        else:
            result.append(replace(edge, source=source, target=target))
    for (source, target, back), several in merged.items():
        types = tuple(value for edge in several.values() for value in edge.values)
        result.append(Edge(source, 0, target, 0, types, back))
    return result


def _one_of(nodes: Sequence[Node]) -> Node:
    """Return a box for arguments or results of one pytree."""
    values = tuple(value for node in nodes for value in node.values)
    steps = zip(*(path_parts(node.title) for node in nodes), strict=False)
    title = "".join(step[0] for step in takewhile(lambda step: len(set(step)) == 1, steps))
    return Node(nodes[0].kind, title, (values_text(values),), values)


def _walk(frame: Frame, level: int) -> Iterator[tuple[Node | Frame, int]]:
    """Yield the parts of a frame with their depth, outer parts before inner ones."""
    for part in frame.parts:
        yield part, level
        if isinstance(part, Frame):
            yield from _walk(part, level + 1)


def _visible(frame: Frame, opened: set[Frame]) -> Iterator[Frame]:
    """Yield the frames that are drawn, open or as a box."""
    for inner in frame.frames():
        yield inner
        if inner in opened:
            yield from _visible(inner, opened)


def _box(frames: Sequence[Frame], same: str) -> Node:
    """Return the box of folded equal frames; `same` is an open frame equal to them."""
    number = sum(frame.equations for frame in frames)
    title, details = frames[0].title, [plural(number, "equation")]
    if len(frames) > 1:
        title += f" … {frames[-1].title}"
        details.append(f"{len(frames)}, all like {same}" if same else f"{len(frames)}, all alike")
    elif same:
        details.append(f"like {same}")
    return Node("folded", title, tuple(details), equations=number)
