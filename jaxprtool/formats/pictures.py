"""Graphs for programs that draw them: Graphviz and its pictures, and Model Explorer.

Each equation is a box and each edge a value with its type; dashed edges lead from one iteration of
a loop to the next. Frames group the equations of a layer, a function, a loop, a branch or a call.
In a large program, frames are folded to boxes (`formats.graph`).
"""

from __future__ import annotations

import html
import json
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Any

from jaxprtool.errors import OutputError
from jaxprtool.formats.graph import (
    MOST_BOXES,
    Graph,
    GraphEdge,
    GraphFrame,
    GraphNode,
    folded,
    graph_of,
    is_border,
    sliced,
    values_text,
)
from jaxprtool.ir.documents import plural
from jaxprtool.ir.equations import type_of
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.notation.names import UserNames
from jaxprtool.ir.notation.signatures import Notation
from jaxprtool.ir.places import BEHIND
from jaxprtool.ir.process import without_collector
from jaxprtool.ir.program import Program, ProgramSignature, path_parts, program_signature
from jaxprtool.ir.regions import holds_jaxpr
from jaxprtool.jaxcompat import Jaxpr, JaxprEqn, name_stack

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
        for body in (body for bodies in graph.shared.values() for body in bodies):
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
