"""Dataflow graphs of programs in the language of Graphviz's `dot`.

Each equation is a box and each edge a value with its type; dashed edges lead from one iteration of
a loop to the next. Frames group the equations of a layer, a function, a loop, a branch or a call.
In a large program, frames are folded to boxes (`formats.folding`).
"""

from __future__ import annotations

import html
from collections.abc import Collection

from jaxprtool.formats.folding import MOST_BOXES, folded, values_text
from jaxprtool.formats.graph import Edge, Frame, Graph, Node, graph_of
from jaxprtool.formats.slice_graph import sliced
from jaxprtool.ir.basics.quantities import plural
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.program_signature import program_signature

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
    return _Text(graph.title, title).of(shown)


class _Text:
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
        self._names: dict[Node, str] = {}
        self._frames = 0

    def of(self, graph: Graph) -> str:
        """Return the whole graph."""
        self._parts(graph.root, 1)
        # An edge written inside a frame would place both of its nodes in the frame.
        edges = [self._edge(edge) for edge in graph.edges]
        return "\n".join([*self._lines, *edges, "}", ""])

    def _parts(self, frame: Frame, depth: int) -> None:
        for part in frame.parts:
            if isinstance(part, Node):
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

    def _node(self, node: Node) -> str:
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

    def _edge(self, edge: Edge) -> str:
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
