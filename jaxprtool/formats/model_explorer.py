"""Programs as graphs of Google's Model Explorer: JSON, in layers by scope and by nesting.

The document is a collection of graphs, the program's first. Its layers are the frames of
`formats.graph`: the scopes of a model, loops, branches and calls. A parameter read by one layer
only is in that layer; one read by several is in layers by its path. A body that several equations
share and that is not drawn at each of them is a separate graph, which Model Explorer links from
there.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Any

from jaxprtool.formats.graph import Edge, Frame, Graph, Node, graph_of, is_border
from jaxprtool.ir.core.equations import type_of
from jaxprtool.ir.core.structured import holds_jaxpr
from jaxprtool.ir.notation.signatures import Notation
from jaxprtool.ir.notation.user_names import UserNames
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.program_signature import ProgramSignature, path_parts, program_signature
from jaxprtool.ir.source.frames import BEHIND, frames_now
from jaxprtool.jaxcompat import Jaxpr, JaxprEqn, name_stack

#: The number of equations above which shared bodies are separate graphs. Equations of a shared
#: jaxpr count once per use.
MOST_EQUATIONS = 20_000

#: The length at which a parameter's text is cut.
_LONGEST = 1000

#: The fill of nodes that are not equations.
_COLORS = {"argument": "#e3eefa", "constant": "#fbf0d9", "result": "#e2f2e5", "port": "#efeaf7"}

#: The layers of arguments and constants read by several layers, and of results.
_LAYERS = {"argument": "arguments", "constant": "constants", "result": "results"}

#: The separator of layers in a namespace, and its replacement in a layer's name; the font has few
#: characters.
_SEPARATOR, _STAND_IN = "/", ": "


def model_explorer(program: Program) -> str:
    """Return a program as the text of a Model Explorer file."""
    about = program_signature(program)
    ids: dict[Jaxpr, str] = {}
    documents = []
    todo = [(about, MOST_EQUATIONS)]
    for one, most in todo:
        graph = graph_of(one, most)
        for body in (body for held in graph.shared.values() for body in held):
            if body not in ids:
                inside = program_signature(body)
                ids[body] = f"{inside.name} ({len(ids) + 1})"
                todo.append((inside, 0))
        name = ids.get(one.jaxpr, one.name)
        documents.append(_Document(one, graph, ids).document(name))
    return json.dumps({"label": about.name, "graphs": documents}, ensure_ascii=False) + "\n"


class _Document:
    """The document of one graph."""

    def __init__(self, about: ProgramSignature, graph: Graph, ids: Mapping[Jaxpr, str]):
        self._graph, self._subgraphs = graph, ids
        self._notation, self._frames = Notation(), frames_now(about.roots)
        arguments = [value.name for value in about.arguments]
        self._names = UserNames(about.jaxpr, set(), arguments, about.roots)
        self._layers: dict[Node, str] = {}
        self._groups: dict[str, dict[str, str]] = {}
        self._place(graph.root, ())
        self._place_border()
        self._ids = {node: str(number) for number, node in enumerate(self._layers)}

    def document(self, name: str) -> dict[str, Any]:
        """Return the document."""
        into: defaultdict[Node, list[Edge]] = defaultdict(list)
        for edge in self._graph.edges:
            into[edge.target].append(edge)
        nodes = [self._node(node, into[node]) for node in self._layers]
        return {"id": name, "nodes": nodes, "groupNodeAttributes": self._groups}

    # --- layers

    def _place(self, frame: Frame, path: tuple[str, ...]) -> None:
        """Assign the contents of a frame to layers with unique names."""
        namespace = _SEPARATOR.join(path)
        self._groups[namespace] = {"equations": f"{frame.equations:,}"}
        if frame.eqn is not None:
            self._groups[namespace].update(self._facts(frame.eqn))
        numbers = Counter[str]()
        for part in frame.parts:
            if isinstance(part, Node):
                self._layers[part] = namespace
                continue
            title = part.title.replace(_SEPARATOR, _STAND_IN) or "scope"
            numbers[title] += 1
            number = f" #{numbers[title]}" if numbers[title] > 1 else ""
            self._place(part, (*path, f"{title}{number}"))

    def _place_border(self) -> None:
        """Assign arguments, constants and results that belong to a pytree to layers."""
        readers: defaultdict[Node, list[str]] = defaultdict(list)
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

    def _node(self, node: Node, edges: Iterable[Edge]) -> dict[str, Any]:
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
        if color := _COLORS.get(node.kind):
            document["style"] = {"backgroundColor": color}
        return document

    def _outputs(self, node: Node) -> Iterator[dict[str, str]]:
        """Yield the type of each value and its name in the user's source."""
        if node.kind != "result":
            for i, aval in enumerate(node.values):
                name = node.title if node.kind == "argument" else ""
                if node.eqn is not None:
                    name = self._names.get(node.eqn.outvars[i]) or ""
                named = {"__tensor_tag": name} if name.strip("_") else {}
                yield {"tensor_shape": type_of(aval)} | named

    def _attributes(self, node: Node) -> dict[str, str]:
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
