"""A program as a picture of its dataflow, in the language of Graphviz's `dot`.

Each equation is a box, each edge a value with its type. A jaxpr inside an equation is a frame
around its own equations. Values flow into the frame of a call directly; a loop has a node for each
value that it carries or takes from a sequence, and dashed edges go back from one step to the next;
each branch ends in a node, of which the `cond` picks one.

A picture of more than `MOST_EQUATIONS` equations draws a jaxpr that several equations share within
the first of them; the others are boxes.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.ir import structured
from jaxprtool.ir.equations import bodies, type_of
from jaxprtool.ir.notation.selection import Selection
from jaxprtool.ir.notation.signatures import Notation
from jaxprtool.ir.outline import NamedValue, outline
from jaxprtool.ir.program import Program
from jaxprtool.jaxcompat import Atom, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.primitives import sow_p

#: Where a value comes from: the node that makes it, or the literal that it is.
Source: TypeAlias = str | Literal
#: The sources of the variables in sight.
Sources: TypeAlias = dict[Var, Source]

_INK, _QUIET, _LINE = "#2b3440", "#6b7686", "#9aa5b4"
#: Fill and outline of each kind of node.
_COLOURS = {
    "argument": ("#e3eefa", "#86acd6"),
    "constant": ("#fbf0d9", "#d8b878"),
    "result": ("#e2f2e5", "#8abf95"),
    "port": ("#efeaf7", "#b3a2d3"),
    "equation": ("#ffffff", "#a9b3c1"),
}
#: Fills of frames, by depth.
_FRAMES = ("#f6f8fa", "#eef1f5", "#e6eaf0", "#dfe4eb")

#: Parameters that say little about what an equation does.
_HIDDEN = frozenset(
    (
        *("accuracy", "axis_index_groups", "indices_are_sorted", "mode", "name", "out_sharding"),
        *("precision", "preferred_element_type", "sharding", "unique_indices", "weak_type"),
    )
)
#: A parameter longer than this, and more than so many of them, would blow up the picture.
_LONGEST_PARAMETER, _MOST_PARAMETERS = 36, 4

#: More than that, those of a shared jaxpr counted at each mention, are not all drawn.
MOST_EQUATIONS = 2000


def dot(program: Program) -> str:
    """The program's graph; its name is the graph's title."""
    shape = outline(program)
    drawing = _Drawing(shape.name, Selection().count(shape.jaxpr) > MOST_EQUATIONS)
    constants = [drawing.border(value, "constant") for value in shape.constants]
    arguments = [drawing.border(value, "argument") for value in shape.arguments]
    atoms = [*shape.jaxpr.constvars, *shape.jaxpr.invars]
    outs = drawing.jaxpr(shape.jaxpr, dict(zip(atoms, constants + arguments, strict=True)))
    for value, atom, source in zip(shape.outputs, shape.jaxpr.outvars, outs, strict=True):
        drawing.edge(source, drawing.border(value, "result"), atom.aval)
    return drawing.text()


class _Drawing:
    """The lines of a graph, written in one pass over the equations."""

    def __init__(self, title: str, share: bool):
        self._share, self._drawn = share, set[Jaxpr]()
        self._notation = Notation()
        self._indent = 1
        self._nodes = self._frames = 0
        font = 'fontname="Helvetica,Arial,sans-serif"'
        self._lines = [
            f"digraph {_quoted(title)} {{",
            f'  graph [{font}, fontsize=14, fontcolor="{_INK}", bgcolor="white", pad=0.3,',
            f"         label={_quoted(title)}, labelloc=t, labeljust=l, nodesep=0.3, ranksep=0.4];",
            f'  node [{font}, fontsize=11, fontcolor="{_INK}", shape=box, height=0.3,',
            '        style="rounded,filled", margin="0.1,0.04"];',
            f'  edge [{font}, fontsize=9, fontcolor="{_QUIET}", color="{_LINE}", arrowsize=0.6];',
        ]
        # An edge that is written inside a frame would draw both its nodes into it.
        self._edges: list[str] = []

    def text(self) -> str:
        """The whole graph."""
        return "\n".join([*self._lines, *self._edges, "}", ""])

    # --- what a graph is made of

    def node(self, kind: str, title: str, details: Iterable[str] = ()) -> str:
        """A new node: a title, and smaller lines below it."""
        name = f"n{self._nodes}"
        self._nodes += 1
        fill, line = _COLOURS[kind]
        rows = [_escaped(title) if kind == "port" else f"<b>{_escaped(title)}</b>"]
        small = f'<font point-size="9" color="{_QUIET}">'
        rows += [f"{small}{_escaped(detail)}</font>" for detail in details]
        cells = "".join(f"<tr><td>{row}</td></tr>" for row in rows)
        label = f'<<table border="0" cellspacing="0" cellpadding="1">{cells}</table>>'
        self._put(f'{name} [label={label}, fillcolor="{fill}", color="{line}"];')
        return name

    def border(self, value: NamedValue, kind: str) -> str:
        """The node of an argument, a result or a constant."""
        return self.node(kind, value.name, [value.type])

    def edge(self, source: Source, target: str, aval: Any = None, style: str = "") -> None:
        """An edge from where a value comes from to where it goes, labelled with its type."""
        if isinstance(source, Literal):
            source = self.node("constant", _literal(source))
        label = f"label={_quoted(f' {type_of(aval)}')}" if aval is not None else ""
        self._edges.append(f"  {source} -> {target} [{label or style}];")

    @contextmanager
    def frame(self, title: str) -> Iterator[None]:
        """A frame with a title around what is drawn meanwhile."""
        self._put(f"subgraph cluster_{self._frames} {{")
        self._frames += 1
        fill = _FRAMES[(self._indent - 1) % len(_FRAMES)]
        self._indent += 1
        self._put(
            f'label=<<b>{_escaped(title)}</b>>; fontsize=10; fontcolor="{_QUIET}"; '
            f'style="rounded,filled"; fillcolor="{fill}"; color="#c9d1db"; margin=12;'
        )
        yield
        self._indent -= 1
        self._put("}")

    def _put(self, line: str) -> None:
        self._lines.append("  " * self._indent + line)

    # --- jaxprs and their equations

    def jaxpr(self, jaxpr: Jaxpr, sources: Sources) -> list[Source]:
        """Draw the equations of an open jaxpr, and give the sources of its results."""
        for eqn in jaxpr.eqns:
            inside = {body for _, body in bodies(eqn)}
            draw = _DRAWN.get(type(structured.view(eqn))) or (_parts if inside else _leaf)
            if self._share and inside <= self._drawn:
                draw = _leaf
            self._drawn |= inside
            found = draw(self, eqn, sources)
            sources.update(zip(eqn.outvars, found, strict=True))
        return [_source(sources, atom) for atom in jaxpr.outvars]

    def body(self, closed: Any, inputs: Sequence[Source]) -> list[Source]:
        """Draw a closed body whose arguments come from `inputs`."""
        jaxpr = jaxcompat.open_jaxpr(closed)
        constants = [self.node("constant", "constant", [type_of(v.aval)]) for v in jaxpr.constvars]
        atoms = [*jaxpr.constvars, *jaxpr.invars]
        return self.jaxpr(jaxpr, dict(zip(atoms, [*constants, *inputs], strict=True)))

    def equation(self, eqn: JaxprEqn, sources: Sources) -> str:
        """The node of an equation, with the edges into it; literals stand in it."""
        literals = [
            _literal(source) if isinstance(source, Literal) else "·"
            for source in (_source(sources, atom) for atom in eqn.invars)
        ]
        details = list(self._telling(eqn))
        if any(text != "·" for text in literals):
            details.insert(0, f"({', '.join(literals)})")
        called = eqn.params.get("name") if bodies(eqn) else None
        title = f"{eqn.primitive.name} {called}" if called else eqn.primitive.name
        node = self.node("equation", title, details)
        for atom in eqn.invars:
            source = _source(sources, atom)
            if not isinstance(source, Literal):
                self.edge(source, node, atom.aval)
        return node

    def _telling(self, eqn: JaxprEqn) -> Iterator[str]:
        """The parameters that say most about an equation, as `axes=(0,)`."""
        count = 0
        for name, value in self._notation.signature(eqn).pairs:
            plain = isinstance(value, str) and value not in ("None", "False", "()")
            shown = name.rstrip("=") not in _HIDDEN or eqn.primitive is sow_p
            if plain and len(value) <= _LONGEST_PARAMETER and shown:
                count += 1
                if count <= _MOST_PARAMETERS:
                    yield f"{name}{value}"


def _source(sources: Sources, atom: Atom) -> Source:
    return atom if isinstance(atom, Literal) else sources[atom]


# --- equations of each kind -------------------------------------------------------------------


def _leaf(drawing: _Drawing, eqn: JaxprEqn, sources: Sources) -> list[Source]:
    return [drawing.equation(eqn, sources)] * len(eqn.outvars)


def _call(drawing: _Drawing, eqn: JaxprEqn, sources: Sources) -> list[Source]:
    """A call is a frame through which the values pass."""
    view = structured.view(eqn)
    name = eqn.params.get("name") or jaxcompat.open_jaxpr(view.body).debug_info.func_name
    with drawing.frame(f"{eqn.primitive.name} {name}"):
        return drawing.body(view.body, [_source(sources, atom) for atom in view.operands])


def _shard_map(drawing: _Drawing, eqn: JaxprEqn, sources: Sources) -> list[Source]:
    view = structured.view(eqn)
    axes = ", ".join(f"{name}={size}" for name, size in view.mesh.shape.items())
    with drawing.frame(f"shard_map {axes}"):
        return drawing.body(view.body, [_source(sources, atom) for atom in view.operands])


def _scan(drawing: _Drawing, eqn: JaxprEqn, sources: Sources) -> list[Source]:
    view = structured.view(eqn)
    backwards = ", reverse" if view.reverse else ""
    with drawing.frame(f"scan length={view.length}{backwards}"):
        constants = [_source(sources, atom) for atom in view.consts]
        carry = _ports(drawing, "carry", view.carry, sources)
        xs = _ports(drawing, "x", view.xs, sources)
        outs = drawing.body(view.body, [*constants, *carry, *xs])
        _back(drawing, outs[: len(carry)], carry, view.carry)
    return outs


def _while(drawing: _Drawing, eqn: JaxprEqn, sources: Sources) -> list[Source]:
    view = structured.view(eqn)
    with drawing.frame("while"):
        carry = _ports(drawing, "carry", view.carry, sources)
        with drawing.frame("condition"):
            constants = [_source(sources, atom) for atom in view.cond_consts]
            (holds,) = drawing.body(view.cond, [*constants, *carry])
            drawing.edge(holds, drawing.node("port", "go on?"), None)
        with drawing.frame("body"):
            constants = [_source(sources, atom) for atom in view.body_consts]
            outs = drawing.body(view.body, [*constants, *carry])
        _back(drawing, outs, carry, view.carry)
    return list(carry)


def _ports(drawing: _Drawing, name: str, atoms: Sequence[Atom], sources: Sources) -> list[str]:
    """A node for each value that changes from step to step, with the edge of its first value."""
    ports = []
    for i, atom in enumerate(atoms):
        ports.append(drawing.node("port", f"{name} {i}" if len(atoms) > 1 else name))
        drawing.edge(_source(sources, atom), ports[-1], atom.aval)
    return ports


def _back(
    drawing: _Drawing, outs: Sequence[Source], ports: Sequence[str], atoms: Sequence[Atom]
) -> None:
    """The edges from the end of a step to the next, where a value changes."""
    for source, port in zip(outs, ports, strict=True):
        if source != port:
            drawing.edge(source, port, None, "style=dashed, constraint=false")


def _cond(drawing: _Drawing, eqn: JaxprEqn, sources: Sources) -> list[Source]:
    view = structured.view(eqn)
    inputs = [_source(sources, atom) for atom in view.operands]
    ends = []
    with drawing.frame("cond"):
        for i, branch in enumerate(view.branches):
            with drawing.frame(f"branch {i}"):
                outs = drawing.body(branch, inputs)
                ends.append(drawing.node("port", "result" if len(outs) == 1 else "results"))
                for source, atom in zip(outs, view.outs, strict=True):
                    drawing.edge(source, ends[-1], atom.aval)
        chosen = drawing.node("equation", "cond")
    drawing.edge(_source(sources, view.index), chosen, view.index.aval)
    for end in ends:
        drawing.edge(end, chosen, None)
    return [chosen] * len(view.outs)


def _parts(drawing: _Drawing, eqn: JaxprEqn, sources: Sources) -> list[Source]:
    """An equation of a kind that we do not know: itself, and its jaxprs, each on its own."""
    with drawing.frame(eqn.primitive.name):
        node = drawing.equation(eqn, sources)
        for path, body in bodies(eqn):
            with drawing.frame(path):
                inputs = [drawing.node("port", "input", [type_of(v.aval)]) for v in body.invars]
                end = None
                for source, atom in zip(drawing.body(body, inputs), body.outvars, strict=True):
                    end = end or drawing.node("port", "result")
                    drawing.edge(source, end, atom.aval)
    return [node] * len(eqn.outvars)


_DRAWN: dict[type, Callable[[_Drawing, JaxprEqn, Sources], list[Source]]] = {
    structured.Call: _call,
    structured.CustomJVP: _call,
    structured.CustomVJP: _call,
    structured.ShardMap: _shard_map,
    structured.Scan: _scan,
    structured.While: _while,
    structured.Cond: _cond,
}


# --- text -------------------------------------------------------------------------------------


def _quoted(text: str) -> str:
    """A string of the dot language."""
    return '"' + _printable(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _escaped(text: str) -> str:
    """Text inside a label of the HTML kind."""
    return html.escape(_printable(text), quote=False) or " "


def _literal(literal: Literal) -> str:
    """The value of a literal, as short as its type allows."""
    return "[…]" if np.shape(literal.val) else str(np.asarray(literal.val))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)
