"""Graphs of programs, folded if large, or of a slice, that Graphviz and Model Explorer draw.

Each equation is a node, and values pass along the edges. Frames group the equations of a scope
(`ir.scopes`) or of a body. Values flow into the frame of a call directly. A loop has a node
for each carry and each scanned value, and edges back from one iteration to the next. Each branch
ends in a node, one of which the `cond` selects.

In a picture each equation is a box and each edge a value with its type; dashed edges lead from one
iteration of a loop to the next. Frames group the equations of a layer, a function, a loop, a branch
or a call.
"""

from __future__ import annotations

import html
import json
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby, takewhile
from typing import Any, NamedTuple, TypeAlias, TypeGuard
from typing import Literal as Choice

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.errors import OutputError
from jaxprtool.ir.documents import in_bytes, plural
from jaxprtool.ir.equations import bodies, size_of, type_of
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.notation.layout import Selection
from jaxprtool.ir.notation.signatures import Notation, UserNames
from jaxprtool.ir.process import without_collector
from jaxprtool.ir.program import (
    NamedValue,
    Program,
    ProgramSignature,
    path_parts,
    program_signature,
)
from jaxprtool.ir.regions import Regions, ShardMap, holds_jaxpr, regions
from jaxprtool.ir.scopes import Part, ScopeCall, ScopeReader
from jaxprtool.ir.source_text import BEHIND
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Aval, Jaxpr, JaxprEqn, Literal, Var, name_stack
from jaxprtool.primitives import sow_p

# --- graph ----------------------------------------------------------------------------------------
# Dataflow graphs of programs, for formats that are drawn.

#: The kinds of nodes. A port is a value at the boundary of a body; a folded node represents all
#: nodes of a frame.
NodeKind: TypeAlias = Choice["argument", "constant", "result", "port", "equation", "folded"]


@dataclass(eq=False)
class GraphNode:
    """A node of a graph.

    Attributes:
        kind: The kind of node.
        title: Its name: a primitive, or the path of an argument.
        details: Further lines of its label.
        values: The types of its outputs; for a result, of its input.
        eqn: Its equation.
        like: A key that is equal for nodes with the same computation, apart from their operands.
        equations: The number of equations that it represents.
    """

    kind: NodeKind
    title: str
    details: tuple[str, ...] = ()
    values: tuple[Aval, ...] = ()
    eqn: JaxprEqn | None = None
    like: str = ""
    equations: int = 0


@dataclass(eq=False)
class GraphFrame:
    """A frame around nodes and other frames, in program order.

    Attributes:
        title: Its heading.
        like: A key that is equal for frames that differ only in title or contents.
        eqn: The equation whose body it is; None for scopes, and for one of several bodies.
        parts: Its contents.
    """

    title: str
    like: str = ""
    eqn: JaxprEqn | None = None
    parts: list[GraphNode | GraphFrame] = field(default_factory=list)

    def nodes(self) -> Iterator[GraphNode]:
        """Yield the nodes in it, at any depth."""
        for part in self.parts:
            if isinstance(part, GraphFrame):
                yield from part.nodes()
            else:
                yield part

    def frames(self) -> list[GraphFrame]:
        """Return the frames directly in it."""
        return [part for part in self.parts if isinstance(part, GraphFrame)]

    @property
    def equations(self) -> int:
        """The number of equations that it represents."""
        return (self.eqn is not None) + sum(part.equations for part in self.parts)


def is_border(part: GraphNode | GraphFrame) -> TypeGuard[GraphNode]:
    """Return True if a node is an argument, a constant or a result."""
    return isinstance(part, GraphNode) and part.kind in ("argument", "constant", "result")


@dataclass(frozen=True)
class GraphEdge:
    """The values that pass from one node to another.

    Attributes:
        source: The node at its start.
        output: The index of the value among that node's outputs.
        target: The node at its end.
        place: The index of the value among that node's operands.
        values: The types of the values; empty for a predicate.
        back: Whether it leads from one iteration of a loop to the next.
    """

    source: GraphNode
    output: int
    target: GraphNode
    place: int = 0
    values: tuple[Aval, ...] = ()
    back: bool = False


@dataclass
class Graph:
    """A program's graph.

    Attributes:
        title: The program's name.
        root: The frame around all nodes.
        edges: The edges, in program order.
        shared: The undrawn bodies that several equations share, by node.
    """

    title: str
    root: GraphFrame
    edges: list[GraphEdge] = field(default_factory=list)
    shared: dict[GraphNode, tuple[Jaxpr, ...]] = field(default_factory=dict)


#: Where a value comes from: an output of a node, or a literal.
_Origin: TypeAlias = tuple[GraphNode, int] | Literal
#: The origins of the variables in scope.
_Origins: TypeAlias = dict[Var, _Origin]

#: Parameters that say little about what an equation computes.
_HIDDEN = frozenset(
    (
        *("accuracy", "axis_index_groups", "indices_are_sorted", "mode", "name", "out_sharding"),
        *("precision", "preferred_element_type", "sharding", "unique_indices", "weak_type"),
    )
)
#: The longest parameter and the maximum number of parameters shown in a node.
_LONGEST_PARAMETER, _MOST_PARAMETERS = 36, 4


def graph_of(about: ProgramSignature, most_equations: int) -> Graph:
    """Return the graph of a program.

    Args:
        about: The program.
        most_equations: If the program has more equations, a body shared by several equations is
            drawn once. So is the shared body of calls with the XLA metadata that `outline` adds.
    """
    builder = _ProgramGraphBuilder(about, Selection().count(about.jaxpr) > most_equations)
    jaxpr = about.jaxpr
    origins: _Origins = {}
    for var, value in zip(jaxpr.constvars, about.constants, strict=True):
        origins[var] = builder.border("constant", value, var.aval), 0
    for var, value in zip(jaxpr.invars, about.arguments, strict=True):
        origins[var] = builder.border("argument", value, var.aval), 0
    outs = builder.jaxpr(jaxpr, origins)
    for value, atom, origin in zip(about.outputs, jaxpr.outvars, outs, strict=True):
        builder.edge(origin, builder.border("result", value, atom.aval), aval=atom.aval)
    return builder.graph


class _ProgramGraphBuilder:
    """Builds a graph in one pass over the equations."""

    def __init__(self, about: ProgramSignature, share: bool):
        self.graph = Graph(about.name, GraphFrame(about.name))
        self._share, self._drawn = share, set[Jaxpr]()
        self._frame = self.graph.root
        self._notation, self._scopes = Notation(), ScopeReader(about.roots)
        self._selection = Selection()

    # --- parts of a graph

    def add(self, node: GraphNode) -> GraphNode:
        """Add a node to the current frame."""
        self._frame.parts.append(node)
        return node

    def border(self, kind: NodeKind, value: NamedValue, aval: Aval) -> GraphNode:
        """Add the node of an argument, a result or a constant."""
        return self.add(GraphNode(kind, value.name, (value.type,), (aval,)))

    def port(self, title: str, values: tuple[Aval, ...] = ()) -> GraphNode:
        """Add a node for a value at the boundary of a body."""
        return self.add(GraphNode("port", title, (), values, like=title))

    def edge(
        self,
        origin: _Origin,
        target: GraphNode,
        place: int = 0,
        aval: Aval | None = None,
        back: bool = False,
    ) -> None:
        """Add an edge from the origin of a value to its use."""
        if isinstance(origin, Literal):
            text = _literal(origin)
            origin = self.add(GraphNode("constant", text, (), (origin.aval,), like=text)), 0
        source, output = origin
        values = () if aval is None else (aval,)
        self.graph.edges.append(GraphEdge(source, output, target, place, values, back))

    @contextmanager
    def frame(self, title: str, eqn: JaxprEqn | None = None) -> Iterator[None]:
        """Collect the nodes added in the `with` block in a frame; an empty frame is dropped."""
        like = title if eqn is None else self._like(eqn)
        frame, outer = GraphFrame(title, like, eqn), self._frame
        outer.parts.append(frame)
        self._frame = frame
        yield
        self._frame = outer
        if not frame.parts:
            outer.parts.remove(frame)

    # --- jaxprs and their equations

    def jaxpr(self, jaxpr: Jaxpr, origins: _Origins) -> list[_Origin]:
        """Add the equations of an open jaxpr, and return the origins of its results."""
        self._add_parts(self._scopes.parts(jaxpr), origins)
        return [_origin(origins, atom) for atom in jaxpr.outvars]

    def _add_parts(self, parts: Sequence[Part], origins: _Origins) -> None:
        for part in parts:
            if isinstance(part, ScopeCall):
                with self.frame(part.name):
                    self._frame.like = ""
                    self._add_parts(part.parts, origins)
            else:
                results = self._draw(part, origins)
                origins.update(zip(part.outvars, results, strict=True))

    def _draw(self, eqn: JaxprEqn, origins: _Origins) -> list[_Origin]:
        inside = dict.fromkeys(body for _, body in bodies(eqn))
        shared = self._share or bool(eqn.ctx.xla_metadata)
        if not inside or (shared and self._drawn.issuperset(inside)):
            node = self.equation(eqn, origins, inside)
            if inside:
                self.graph.shared[node] = tuple(inside)
            return [(node, i) for i in range(len(eqn.outvars))]
        self._drawn.update(inside)
        eqn_regions = regions(eqn)
        return (
            _parts(self, eqn, origins)
            if eqn_regions is None
            else _regions(self, eqn_regions, origins)
        )

    def body(self, closed: AnyJaxpr, inputs: Sequence[_Origin]) -> list[_Origin]:
        """Add a closed body whose arguments come from `inputs`."""
        jaxpr = jaxcompat.open_jaxpr(closed)
        constants: list[_Origin] = []
        for var in jaxpr.constvars:
            like = f"constant {id(var)}"  # its value is not compared
            node = GraphNode("constant", "constant", (type_of(var.aval),), (var.aval,), like=like)
            constants.append((self.add(node), 0))
        atoms = [*jaxpr.constvars, *jaxpr.invars]
        return self.jaxpr(jaxpr, dict(zip(atoms, [*constants, *inputs], strict=True)))

    def equation(self, eqn: JaxprEqn, origins: _Origins, inside: Iterable[Jaxpr] = ()) -> GraphNode:
        """Add the node of an equation with its incoming edges; literals are shown in the node.

        It also represents the bodies `inside`.
        """
        sources = [_origin(origins, atom) for atom in eqn.invars]
        literals = [_literal(source) if isinstance(source, Literal) else "·" for source in sources]
        details = self._informative_parameters(eqn)
        if any(text != "·" for text in literals):
            details.insert(0, f"({', '.join(literals)})")
        called = eqn.params.get("name") if bodies(eqn) else None
        title = f"{eqn.primitive.name} {called}" if called else eqn.primitive.name
        like = f"{self._like(eqn)} {literals} {[id(body) for body in inside]}"
        number = 1 + sum(map(self._selection.count, inside))
        types = tuple(v.aval for v in eqn.outvars)
        node = self.add(GraphNode("equation", title, tuple(details), types, eqn, like, number))
        for place, (atom, origin) in enumerate(zip(eqn.invars, sources, strict=True)):
            if not isinstance(origin, Literal):
                self.edge(origin, node, place, atom.aval)
        return node

    def _informative_parameters(self, eqn: JaxprEqn) -> list[str]:
        """Return the most informative parameters of an equation, as `axes=(0,)`."""
        hidden = () if eqn.primitive is sow_p else _HIDDEN
        telling = [
            f"{name}{value}"
            for name, value in self._notation.signature(eqn).pairs
            if isinstance(value, str) and value not in ("None", "False", "()")
            if len(value) <= _LONGEST_PARAMETER and name.rstrip("=") not in hidden
        ]
        return telling[:_MOST_PARAMETERS]

    def _like(self, eqn: JaxprEqn) -> str:
        """Return a text of an equation's primitive and parameters, without its bodies."""
        signature = self._notation.signature(eqn)
        if signature.head is not None:
            return "".join(signature.head)
        plain = ((k, v) for k, v in eqn.params.items() if not holds_jaxpr([v]))
        texts = (f"{k}={self._notation.text(v)}" for k, v in plain)
        return " ".join([eqn.primitive.name, *texts])


def _origin(origins: _Origins, atom: Atom) -> _Origin:
    return atom if isinstance(atom, Literal) else origins[atom]


def _literal(literal: Literal) -> str:
    """Return the shortest text of a literal's value for its type."""
    return "[…]" if np.shape(literal.val) else str(np.asarray(literal.val))


# --- equations with bodies --------------------------------------------------------------------


def _regions(builder: _ProgramGraphBuilder, inside: Regions, origins: _Origins) -> list[_Origin]:
    """Draw a loop, a branch or a call as a frame with edges along the flow of its regions."""
    eqn = inside.eqn
    sources = [_origin(origins, atom) for atom in eqn.invars]
    results: dict[int, _Origin] = {}
    ends: list[GraphNode] = []
    with builder.frame(_title(inside), eqn):
        _ports(builder, inside, sources)
        for number, (region, body) in enumerate(zip(inside.regions, inside.bodies, strict=True)):
            with _body_frame(builder, inside, number):
                outs = builder.body(body, [sources[i] for i in region.ins])
                if region.is_predicate:
                    builder.edge(outs[0], builder.port("predicate"))
                if inside.predicates:
                    ends.append(builder.port("result" if len(outs) == 1 else "results"))
                    for i, (origin, var) in enumerate(zip(outs, eqn.outvars, strict=True)):
                        builder.edge(origin, ends[-1], i, var.aval)
            for origin, out, operand in zip(outs, region.outs, region.next_iteration, strict=True):
                if out is not None:
                    results[out] = origin
                # A carry passes from the end of an iteration to the start of the next.
                if operand is not None and origin != sources[operand]:
                    builder.edge(origin, _port(sources[operand]), 1, back=True)
        if inside.predicates:
            types = tuple(v.aval for v in eqn.outvars)
            chosen = builder.add(
                GraphNode("equation", eqn.primitive.name, (), types, eqn, "chosen")
            )
            results = {i: (chosen, i) for i in range(len(eqn.outvars))}
    if any(region.is_predicate for region in inside.regions):
        results.update((out, sources[i]) for i, out in inside.carried)
    for i in inside.predicates:
        builder.edge(sources[i], chosen, 0, eqn.invars[i].aval)
    for place, end in enumerate(ends, 1):
        builder.edge((end, 0), chosen, place)
    return [results[i] for i in range(len(eqn.outvars))]


def _port(origin: _Origin) -> GraphNode:
    """Return the port of a carry."""
    assert not isinstance(origin, Literal)
    return origin[0]


def _title(inside: Regions) -> str:
    """Return the heading of an equation's frame."""
    structured, eqn = inside.view, inside.eqn
    if isinstance(structured, ShardMap):
        about = ", ".join(f"{name}={size}" for name, size in structured.mesh.shape.items())
    elif inside.kind == "call":
        debug = jaxcompat.open_jaxpr(inside.bodies[0]).debug_info
        about = eqn.params.get("name") or debug.func_name
    elif inside.kind == "loop" and structured.trips is not None:
        about = f"length={structured.trips}" + (", reverse" if eqn.params.get("reverse") else "")
    else:
        return eqn.primitive.name
    return f"{eqn.primitive.name} {about}"


def _body_frame(
    builder: _ProgramGraphBuilder, inside: Regions, number: int
) -> AbstractContextManager[None]:
    """Return the frame of one body, if there are several."""
    if len(inside.bodies) == 1 and not inside.predicates:
        return nullcontext()
    region = inside.regions[number]
    name = "condition" if region.is_predicate else region.field
    return builder.frame(f"branch {number}" if inside.predicates else name)


def _ports(builder: _ProgramGraphBuilder, inside: Regions, sources: list[_Origin]) -> None:
    """Add a port for each carry and scanned value, with an edge from its initial value."""
    carried = [i for i, _ in inside.carried]
    rows = [i for field in inside.edges.sliced for i in inside.operands[field]]
    arguments = {
        i: var.aval
        for body, region in zip(inside.bodies, inside.regions, strict=True)
        for i, var in zip(region.ins, body.invars, strict=True)
    }
    for name, operands in ("carry", carried), ("x", rows):
        for number, i in enumerate(operands):
            aval = inside.eqn.invars[i].aval
            title = f"{name} {number}" if len(operands) > 1 else name
            port = builder.port(title, (arguments.get(i, aval),))
            builder.edge(sources[i], port, 0, aval)
            sources[i] = port, 0


def _parts(builder: _ProgramGraphBuilder, eqn: JaxprEqn, origins: _Origins) -> list[_Origin]:
    """Draw an equation of unknown semantics: its node, and each of its jaxprs separately."""
    with builder.frame(eqn.primitive.name):
        node = builder.equation(eqn, origins)
        for path, body in bodies(eqn):
            with builder.frame(path):
                inputs: list[_Origin] = [
                    (builder.add(GraphNode("port", "input", (type_of(v.aval),), (v.aval,))), 0)
                    for v in body.invars
                ]
                end = None
                origins_out = builder.body(body, inputs)
                for i, (origin, atom) in enumerate(zip(origins_out, body.outvars, strict=True)):
                    end = end or builder.port("result")
                    builder.edge(origin, end, i, atom.aval)
    return [(node, i) for i in range(len(eqn.outvars))]


# --- folding --------------------------------------------------------------------------------------
# Folding of large graphs for pictures: frames become boxes, and edges are merged.
#
# Deep or shared frames are folded. Frames are opened from the outside inwards, the largest of a
# level first, while the picture has at most `MOST_BOXES` boxes. Of several equal frames one is
# opened, and the others refer to it. Arguments read by the same boxes share a box, as do results of
# the same box.

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
        self._into: defaultdict[GraphNode, list[GraphEdge]] = defaultdict(list)
        for edge in graph.edges:
            self._into[edge.target].append(edge)
        self._keys: dict[GraphFrame, int] = {}
        self._structures: dict[Hashable, int] = {}

    # --- open frames

    def as_deep_as(self, depth: int) -> set[GraphFrame]:
        """Return the frames up to a nesting depth."""
        opened = level = [self._graph.root]
        for _ in range(depth):
            level = [inner for frame in level for inner in frame.frames()]
            opened = opened + level
        return set(opened)

    def fitting(self) -> set[GraphFrame]:
        """Return the frames to open: as many as the picture has room for."""
        root = self._graph.root
        opened, level = {root}, root.frames()
        border = sum(map(is_border, root.parts))
        room = MOST_BOXES + border - len(self._units(root, opened))
        seen = set[int]()
        while level:
            inside: list[GraphFrame] = []
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

    def _arguments(self, frame: GraphFrame) -> int:
        """Return the number of arguments read by the equations directly in a frame."""
        nodes = (part for part in frame.parts if isinstance(part, GraphNode))
        read = {edge.source for node in nodes for edge in self._into[node]}
        return sum(map(is_border, read))

    def _units(
        self, frame: GraphFrame, opened: set[GraphFrame]
    ) -> list[list[GraphNode | GraphFrame]]:
        """Return the parts of a frame as lists; each list is drawn as one box."""
        units: list[list[GraphNode | GraphFrame]] = []
        for key, run in groupby(frame.parts, lambda part: self._closed(part, opened)):
            parts = list(run)
            if self._many is not None and key is not None and len(parts) >= self._many:
                units.append(parts)
            else:
                units += ([part] for part in parts)
        return units

    def _closed(self, part: GraphNode | GraphFrame, opened: set[GraphFrame]) -> int | None:
        """Return the key of a frame that is drawn as a box, else None."""
        return self.key(part) if isinstance(part, GraphFrame) and part not in opened else None

    def key(self, frame: GraphFrame) -> int:
        """Return a number that is equal for frames with equal computations."""
        if frame not in self._keys:
            inside = list(_walk(frame, 0))
            numbers: dict[object, int] = {part: i for i, (part, _) in enumerate(inside)}
            entries: list[Hashable] = [frame.like]
            for part, level in inside:
                entries.append((level, part.like))
                for edge in self._into[part] if isinstance(part, GraphNode) else ():
                    if edge.source in numbers:
                        origin = numbers[edge.source], edge.output
                    else:  # outside values are numbered by first use
                        value = edge.source, edge.output
                        origin = numbers.setdefault(value, len(numbers)), 0
                    entries.append((*origin, edge.place, edge.back, *edge.values))
            self._keys[frame] = self._structures.setdefault(tuple(entries), len(self._structures))
        return self._keys[frame]

    # --- the result

    def result(self, opened: set[GraphFrame]) -> Graph:
        """Return the graph with all frames folded except `opened`."""
        first: dict[int, tuple[GraphFrame, str, str]] = {}
        names = Counter(frame.title for frame in _visible(self._graph.root, opened))
        shown_by: dict[GraphNode, GraphNode] = {}
        places: dict[GraphNode, GraphFrame] = {}

        def copy(frame: GraphFrame, path: str) -> GraphFrame:
            result = GraphFrame(frame.title, frame.like, frame.eqn)
            for part, *others in self._units(frame, opened):
                if isinstance(part, GraphNode):
                    places[part] = result
                    result.parts.append(part)
                    continue
                name = part.title if names[part.title] == 1 else f"{path}{part.title}"
                other, title, far = first.setdefault(self.key(part), (frame, part.title, name))
                if part in opened:
                    result.parts.append(copy(part, f"{part.title}/"))
                else:
                    same = title if other is frame else far
                    unit = [part, *(other for other in others if isinstance(other, GraphFrame))]
                    box = _box(unit, "" if far == name else same)
                    result.parts.append(box)
                    for one in unit:
                        shown_by.update(dict.fromkeys(one.nodes(), box))
            return result

        root = copy(self._graph.root, "")
        edges = self._grouped_border(root, _between(self._graph.edges, shown_by), places)
        return Graph(self._graph.title, root, _merged(edges), self._graph.shared)

    def _grouped_border(
        self, root: GraphFrame, edges: Sequence[_Passing], places: Mapping[GraphNode, GraphFrame]
    ) -> list[_Passing]:
        """Replace argument and result nodes by grouped boxes next to their readers and producers.

        Arguments read by the same box, or results of the same box, are grouped if they belong to
        one pytree.
        """
        groups: defaultdict[Hashable, dict[GraphNode, None]] = defaultdict(dict)
        border = set(filter(is_border, root.parts))

        def near(node: GraphNode, other: GraphNode) -> Hashable:
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
        inputs = [box for box in boxes.values() if box.kind != "result"]
        root.parts = [*inputs, *inside, *(box for box in boxes.values() if box.kind == "result")]
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

    source: GraphNode
    target: GraphNode
    edge: GraphEdge


def _between(edges: Iterable[GraphEdge], shown_by: Mapping[GraphNode, GraphNode]) -> list[_Passing]:
    """Return the edges that are not inside a box."""
    shown = []
    for edge in edges:
        source = shown_by.get(edge.source, edge.source)
        target = shown_by.get(edge.target, edge.target)
        if source is not target or source is edge.source:
            shown.append(_Passing(source, target, edge))
    return shown


def _merged(edges: Iterable[_Passing]) -> list[GraphEdge]:
    """Return the edges, merged so that a box has one per other end."""
    result: list[GraphEdge] = []
    merged: defaultdict[
        tuple[GraphNode, GraphNode, bool], dict[tuple[GraphNode, int], GraphEdge]
    ] = defaultdict(dict)
    for source, target, edge in edges:
        if source.kind == "folded" or target.kind == "folded":
            merged[source, target, edge.back].setdefault((edge.source, edge.output), edge)
        else:
            result.append(replace(edge, source=source, target=target))
    for (source, target, back), several in merged.items():
        types = tuple(value for edge in several.values() for value in edge.values)
        result.append(GraphEdge(source, 0, target, 0, types, back))
    return result


def _one_of(nodes: Sequence[GraphNode]) -> GraphNode:
    """Return a box for arguments or results of one pytree."""
    values = tuple(value for node in nodes for value in node.values)
    steps = zip(*(path_parts(node.title) for node in nodes), strict=False)
    title = "".join(step[0] for step in takewhile(lambda step: len(set(step)) == 1, steps))
    return GraphNode(nodes[0].kind, title, (values_text(values),), values)


def _walk(frame: GraphFrame, level: int) -> Iterator[tuple[GraphNode | GraphFrame, int]]:
    """Yield the parts of a frame with their depth, outer parts before inner ones."""
    for part in frame.parts:
        yield part, level
        if isinstance(part, GraphFrame):
            yield from _walk(part, level + 1)


def _visible(frame: GraphFrame, opened: set[GraphFrame]) -> Iterator[GraphFrame]:
    """Yield the frames that are drawn, open or as a box."""
    for inner in frame.frames():
        yield inner
        if inner in opened:
            yield from _visible(inner, opened)


def _box(frames: Sequence[GraphFrame], same: str) -> GraphNode:
    """Return the box of folded equal frames; `same` is an open frame equal to them."""
    number = sum(frame.equations for frame in frames)
    title, details = frames[0].title, [plural(number, "equation")]
    if len(frames) > 1:
        title += f" … {frames[-1].title}"
        details.append(f"{len(frames)}, all like {same}" if same else f"{len(frames)}, all alike")
    elif same:
        details.append(f"like {same}")
    return GraphNode("folded", title, tuple(details), equations=number)


# --- slice graph ----------------------------------------------------------------------------------
# The part of a graph that is a slice of its program.


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
    after: dict[GraphNode, list[GraphNode]] = defaultdict(list)
    before: dict[GraphNode, list[GraphNode]] = defaultdict(list)
    for edge in graph.edges:
        after[edge.source].append(edge.target)
        before[edge.target].append(edge.source)
    ports = _ports_from(kept, after) & _ports_from(kept, before)
    read = {edge.source for edge in graph.edges if edge.target in kept}
    kept |= ports | {node for node in nodes if node.kind == "constant" and node in read}
    edges = [edge for edge in graph.edges if edge.source in kept and edge.target in kept]
    shared = {node: jaxprs for node, jaxprs in graph.shared.items() if node in kept}
    return replace(graph, root=_frame(graph.root, kept), edges=edges, shared=shared)


def _stays(node: GraphNode, among: Collection[int], ends: Collection[str]) -> bool:
    if node.kind in ("argument", "result"):
        return node.title in ends
    return node.eqn is not None and id(node.eqn) in among


def _ports_from(
    nodes: Iterable[GraphNode], next_to: Mapping[GraphNode, list[GraphNode]]
) -> set[GraphNode]:
    """Return the ports reachable from these nodes through ports only."""
    ports: set[GraphNode] = set()
    todo = list(nodes)
    while todo:
        for node in next_to.get(todo.pop(), ()):
            if node.kind == "port" and node not in ports:
                ports.add(node)
                todo.append(node)
    return ports


def _frame(frame: GraphFrame, kept: Collection[GraphNode]) -> GraphFrame:
    """Return a frame with only the kept nodes, without empty frames."""
    parts: list[GraphNode | GraphFrame] = []
    for part in frame.parts:
        if isinstance(part, GraphFrame):
            inner = _frame(part, kept)
            parts += [inner] if inner.parts else []
        elif part in kept:
            parts.append(part)
    return replace(frame, parts=parts)


# --- dot ------------------------------------------------------------------------------------------
# Dataflow graphs of programs in the language of Graphviz's `dot`.

_INK, _QUIET, _LINE = "#2b3440", "#6b7686", "#9aa5b4"
#: Fill and line color of each kind of node.
_COLORS = {
    "argument": ("#e3eefa", "#86acd6"),
    "constant": ("#fbf0d9", "#d8b878"),
    "result": ("#e2f2e5", "#8abf95"),
    "port": ("#efeaf7", "#b3a2d3"),
    "equation": ("#ffffff", "#a9b3c1"),
    "folded": ("#e9ebfb", "#8f9ad3"),
}
#: Fills of frames, by depth.
_FRAMES = ("#f6f8fa", "#eef1f5", "#e6eaf0", "#dfe4eb")

#: The number of equations above which frames are folded, and the number above which folded frames
#: are not traversed. Equations of a shared jaxpr count once per use.
MOST_EQUATIONS, _MOST_FOLDED = 2000, 20_000


def dot(
    program: Program,
    depth: int | None = None,
    full: bool = False,
    among: Collection[int] | None = None,
    ends: Collection[str] = (),
) -> str:
    """Return a program's graph; the program's name is its title.

    Args:
        program: The program.
        depth: The depth up to which frames are open; None for as many as a picture can show.
        full: Whether all frames are open.
        among: The equations to draw, by `id`; None for all.
        ends: With `among`, the arguments and results to draw, by name.
    """
    graph = graph_of(program_signature(program), MOST_EQUATIONS if full else _MOST_FOLDED)
    if among is not None:
        graph = sliced(graph, among, ends)
    shown, title = graph, graph.title
    if depth is not None or (not full and sum(1 for _ in graph.root.nodes()) > MOST_BOXES):
        shown = folded(graph, depth)
    if any(node.kind == "folded" for node in shown.root.nodes()):
        title += f": {plural(graph.root.equations, 'equation')}, folded"
    return _GraphText(graph.title, title).of(shown)


class _GraphText:
    """The lines of a graph."""

    def __init__(self, name: str, title: str):
        font = 'fontname="Helvetica,Arial,sans-serif"'
        self._lines = [
            f"digraph {_quoted(name)} {{",
            f'  graph [{font}, fontsize=14, fontcolor="{_INK}", bgcolor="white", pad=0.3,',
            f"         label={_quoted(title)}, labelloc=t, labeljust=l, nodesep=0.3, ranksep=0.4];",
            f'  node [{font}, fontsize=11, fontcolor="{_INK}", shape=box, height=0.3,',
            '        style="rounded,filled", margin="0.1,0.04"];',
            f'  edge [{font}, fontsize=9, fontcolor="{_QUIET}", color="{_LINE}", arrowsize=0.6];',
        ]
        self._names: dict[GraphNode, str] = {}
        self._frames = 0

    def of(self, graph: Graph) -> str:
        """Return the whole graph."""
        self._parts(graph.root, 1)
        # An edge written inside a frame would place both of its nodes in the frame.
        edges = [self._edge(edge) for edge in graph.edges]
        return "\n".join([*self._lines, *edges, "}", ""])

    def _parts(self, frame: GraphFrame, depth: int) -> None:
        for part in frame.parts:
            if isinstance(part, GraphNode):
                self._put(depth, self._node(part))
                continue
            self._put(depth, f"subgraph cluster_{self._frames} {{")
            self._frames += 1
            fill = _FRAMES[(depth - 1) % len(_FRAMES)]
            self._put(
                depth + 1,
                f'label=<<b>{_escaped(part.title)}</b>>; fontsize=10; fontcolor="{_QUIET}"; '
                f'style="rounded,filled"; fillcolor="{fill}"; color="#c9d1db"; margin=12;',
            )
            self._parts(part, depth + 1)
            self._put(depth, "}")

    def _node(self, node: GraphNode) -> str:
        """Return a node: a title, and smaller lines below it."""
        name = self._names[node] = f"n{len(self._names)}"
        fill, line = _COLORS[node.kind]
        title = _escaped(node.title)
        rows = [title if node.kind == "port" else f"<b>{title}</b>"]
        small = f'<font point-size="9" color="{_QUIET}">'
        rows += [f"{small}{_escaped(detail)}</font>" for detail in node.details]
        cells = "".join(f"<tr><td>{row}</td></tr>" for row in rows)
        label = f'<<table border="0" cellspacing="0" cellpadding="1">{cells}</table>>'
        return f'{name} [label={label}, fillcolor="{fill}", color="{line}"];'

    def _edge(self, edge: GraphEdge) -> str:
        """Return an edge, labelled with the types of its values."""
        label = f"label={_quoted(f' {values_text(edge.values)}')}" if edge.values else ""
        style = "style=dashed, constraint=false" if edge.back else label
        ends = f"{self._names[edge.source]} -> {self._names[edge.target]}"
        return f"  {ends} [{style}];"

    def _put(self, depth: int, line: str) -> None:
        self._lines.append("  " * depth + line)


# --- text -------------------------------------------------------------------------------------


def _quoted(text: str) -> str:
    """Return a string of the dot language."""
    return '"' + _printable(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _escaped(text: str) -> str:
    """Return text escaped for an HTML label."""
    return html.escape(_printable(text), quote=False) or " "


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


# --- picture --------------------------------------------------------------------------------------
# Pictures of graphs, drawn by Graphviz's `dot` program.


def require_graphviz(path: str) -> str:
    """Return the path of Graphviz's `dot`. Raises OutputError, which names `path`, if missing."""
    program = shutil.which("dot")
    if program is None:
        raise OutputError(
            f"cannot draw '{path}': Graphviz's program 'dot' is not on the PATH",
            "install it with apt-get install graphviz, or brew install graphviz; -o graph.dot "
            "writes the text",
        )
    return program


def graph_picture(graph: str, format_name: str, path: str) -> bytes:
    """Return the picture of a graph as svg, png or pdf; `path` is its destination, for messages.

    Raises OutputError if Graphviz is missing or fails.
    """
    command = [require_graphviz(path), f"-T{format_name}"]
    try:
        done = subprocess.run(command, input=graph.encode(), capture_output=True, check=False)
    except OSError as error:
        raise OutputError(f"cannot draw '{path}': {command[0]}: {error.strerror}") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise OutputError(f"cannot draw '{path}': dot exited with {done.returncode}: {said[:200]}")
    return done.stdout


# --- model explorer -------------------------------------------------------------------------------
# Programs as graphs of Google's Model Explorer: JSON, in layers by scope and by nesting.
#
# The document is a collection of graphs, the program's first. Its layers are the frames of
# `formats.graph`: the scopes of a model, loops, branches and calls. A parameter read by one layer
# only is in that layer; one read by several is in layers by its path. A body that several equations
# share and that is not drawn at each of them is a separate graph, which Model Explorer links from
# there.

#: The number of equations above which shared bodies are separate graphs. Equations of a shared
#: jaxpr count once per use.
MOST_INLINED_EQUATIONS = 20_000

#: The length at which a parameter's text is cut.
_LONGEST = 1000

#: The fill of nodes that are not equations.
_FILLS = {"argument": "#e3eefa", "constant": "#fbf0d9", "result": "#e2f2e5", "port": "#efeaf7"}

#: The layers of arguments and constants read by several layers, and of results.
_LAYERS = {"argument": "arguments", "constant": "constants", "result": "results"}

#: The separator of layers in a namespace, and its replacement in a layer's name; the font has few
#: characters.
_SEPARATOR, _STAND_IN = "/", ": "


@without_collector()
def model_explorer(program: Program) -> str:
    """Return a program as the text of a Model Explorer file."""
    about = program_signature(program)
    ids: dict[Jaxpr, str] = {}
    documents = []
    todo = [(about, MOST_INLINED_EQUATIONS)]
    for one, most in todo:
        graph = graph_of(one, most)
        for body in (body for shared in graph.shared.values() for body in shared):
            if body not in ids:
                inside = program_signature(body)
                ids[body] = f"{inside.name} ({len(ids) + 1})"
                todo.append((inside, 0))
        name = ids.get(one.jaxpr, one.name)
        documents.append(_GraphDrawing(one, graph, ids).document(name))
    return json.dumps({"label": about.name, "graphs": documents}, ensure_ascii=False) + "\n"


class _GraphDrawing:
    """The document of one graph."""

    def __init__(self, about: ProgramSignature, graph: Graph, ids: Mapping[Jaxpr, str]):
        self._graph, self._subgraphs = graph, ids
        self._notation, self._frames = Notation(), frames_now(about.roots)
        arguments = [value.name for value in about.arguments]
        self._names = UserNames(about.jaxpr, set(), arguments, about.roots)
        self._layers: dict[GraphNode, str] = {}
        self._groups: dict[str, dict[str, str]] = {}
        self._place(graph.root, ())
        self._place_border()
        self._ids = {node: str(number) for number, node in enumerate(self._layers)}

    def document(self, name: str) -> dict[str, Any]:
        """Return the document."""
        into: defaultdict[GraphNode, list[GraphEdge]] = defaultdict(list)
        for edge in self._graph.edges:
            into[edge.target].append(edge)
        nodes = [self._node(node, into[node]) for node in self._layers]
        return {"id": name, "nodes": nodes, "groupNodeAttributes": self._groups}

    # --- layers

    def _place(self, frame: GraphFrame, path: tuple[str, ...]) -> None:
        """Assign the contents of a frame to layers with unique names."""
        namespace = _SEPARATOR.join(path)
        self._groups[namespace] = {"equations": f"{frame.equations:,}"}
        if frame.eqn is not None:
            self._groups[namespace].update(self._facts(frame.eqn))
        numbers = Counter[str]()
        for part in frame.parts:
            if isinstance(part, GraphNode):
                self._layers[part] = namespace
                continue
            title = part.title.replace(_SEPARATOR, _STAND_IN) or "scope"
            numbers[title] += 1
            number = f" #{numbers[title]}" if numbers[title] > 1 else ""
            self._place(part, (*path, f"{title}{number}"))

    def _place_border(self) -> None:
        """Assign arguments, constants and results that belong to a pytree to layers."""
        readers: defaultdict[GraphNode, list[str]] = defaultdict(list)
        for edge in self._graph.edges:
            readers[edge.source].append(self._layers[edge.target])
        border = list(filter(is_border, self._graph.root.parts))
        trees = Counter((node.kind, path_parts(node.title)[:1]) for node in border)
        for node in border:
            if trees[node.kind, path_parts(node.title)[:1]] == 1:
                continue
            layer = _common(readers[node])
            if not layer:
                steps = [step.strip("[].'\"") for step in path_parts(node.title)[:-1]]
                steps = [step.replace(_SEPARATOR, _STAND_IN) for step in steps if step]
                layer = _SEPARATOR.join([_LAYERS[node.kind], *steps])
            self._layers[node] = layer

    # --- nodes

    def _node(self, node: GraphNode, edges: Iterable[GraphEdge]) -> dict[str, Any]:
        document: dict[str, Any] = {
            "id": self._ids[node],
            "label": node.title,
            "namespace": self._layers[node],
            "attrs": _attributes(self._attributes(node)),
            "incomingEdges": [
                {
                    "sourceNodeId": self._ids[edge.source],
                    "sourceNodeOutputId": str(edge.output),
                    "targetNodeInputId": str(edge.place),
                }
                for edge in edges
            ],
            "outputsMetadata": [
                {"id": str(i), "attrs": _attributes(facts)}
                for i, facts in enumerate(self._outputs(node))
            ],
        }
        if bodies := self._graph.shared.get(node):
            document["subgraphIds"] = [self._subgraphs[body] for body in bodies]
        if color := _FILLS.get(node.kind):
            document["style"] = {"backgroundColor": color}
        return document

    def _outputs(self, node: GraphNode) -> Iterator[dict[str, str]]:
        """Yield the type of each value and its name in the user's source."""
        if node.kind != "result":
            for i, aval in enumerate(node.values):
                name = node.title if node.kind == "argument" else ""
                if node.eqn is not None:
                    name = self._names.get(node.eqn.outvars[i]) or ""
                named = {"__tensor_tag": name} if name.strip("_") else {}
                yield {"tensor_shape": type_of(aval)} | named

    def _attributes(self, node: GraphNode) -> dict[str, str]:
        if node.eqn is None:
            return {"type": type_of(node.values[0])} if node.values else {}
        operands = [detail for detail in node.details[:1] if detail.startswith("(")]
        return ({"operands": operands[0]} if operands else {}) | self._facts(node.eqn)

    def _facts(self, eqn: JaxprEqn) -> dict[str, str]:
        """Return the parameters of an equation without its bodies, and its source location."""
        facts = {
            name: self._notation.text(value)[:_LONGEST]
            for name, value in eqn.params.items()
            if value is not None and not holds_jaxpr([value])
        }
        if place := BEHIND.join(self._frames.texts(eqn)):
            facts["source"] = place
        if scope := name_stack(eqn):
            facts["scope"] = scope
        return facts


def _attributes(facts: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in facts.items()]


def _common(layers: Iterable[str]) -> str:
    """Return the innermost layer that contains all of these layers or is one of them."""
    paths = [layer.split(_SEPARATOR) for layer in layers]
    same = takewhile(lambda steps: len(set(steps)) == 1, zip(*paths, strict=False))
    return _SEPARATOR.join(steps[0] for steps in same)
