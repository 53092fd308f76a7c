"""A program as a picture of its dataflow, in the language of Graphviz's `dot`.

Each equation is a box, each edge a value with its type. A jaxpr inside an equation is a frame
around its own equations. Values flow into the frame of a call directly; a loop has a node for each
value that it carries or takes from a sequence, and dashed edges go back from one step to the next;
each branch ends in a node, of which the `cond` picks one.

A jaxpr that several calls share is drawn within the first of them, and the others are boxes, if the
calls are marked for XLA as `outline` marks them, or the picture would have more than
`MOST_EQUATIONS` equations.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.ir.border import NamedValue, border
from jaxprtool.ir.equations import bodies, type_of
from jaxprtool.ir.notation.selection import Selection
from jaxprtool.ir.notation.signatures import Notation
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import Regions, regions
from jaxprtool.ir.structured import ShardMap
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Aval, Jaxpr, JaxprEqn, Literal, Var
from jaxprtool.primitives import sow_p

#: Where a value comes from: the node that makes it, or the literal that it is.
Origin: TypeAlias = str | Literal
#: Those of the variables in sight.
Origins: TypeAlias = dict[Var, Origin]

_INK, _QUIET, _LINE = "#2b3440", "#6b7686", "#9aa5b4"
#: Fill and line colour of each kind of node.
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
    about = border(program)
    drawing = _Drawing(about.name, Selection().count(about.jaxpr) > MOST_EQUATIONS)
    constants = [drawing.border(value, "constant") for value in about.constants]
    arguments = [drawing.border(value, "argument") for value in about.arguments]
    atoms = [*about.jaxpr.constvars, *about.jaxpr.invars]
    outs = drawing.jaxpr(about.jaxpr, dict(zip(atoms, constants + arguments, strict=True)))
    for value, atom, origin in zip(about.outputs, about.jaxpr.outvars, outs, strict=True):
        drawing.edge(origin, drawing.border(value, "result"), atom.aval)
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

    def edge(self, origin: Origin, target: str, aval: Aval | None = None, style: str = "") -> None:
        """An edge from where a value comes from to where it goes, labelled with its type."""
        if isinstance(origin, Literal):
            origin = self.node("constant", _literal(origin))
        label = f"label={_quoted(f' {type_of(aval)}')}" if aval is not None else ""
        self._edges.append(f"  {origin} -> {target} [{label or style}];")

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

    def jaxpr(self, jaxpr: Jaxpr, origins: Origins) -> list[Origin]:
        """Draw the equations of an open jaxpr, and give the origins of its results."""
        for eqn in jaxpr.eqns:
            inside = {body for _, body in bodies(eqn)}
            draw = _leaf
            if inside:
                draw = _parts if regions(eqn) is None else _regions
            if (self._share or eqn.ctx.xla_metadata) and inside <= self._drawn:
                draw = _leaf
            self._drawn |= inside
            found = draw(self, eqn, origins)
            origins.update(zip(eqn.outvars, found, strict=True))
        return [_origin(origins, atom) for atom in jaxpr.outvars]

    def body(self, closed: AnyJaxpr, inputs: Sequence[Origin]) -> list[Origin]:
        """Draw a closed body whose arguments come from `inputs`."""
        jaxpr = jaxcompat.open_jaxpr(closed)
        constants = [self.node("constant", "constant", [type_of(v.aval)]) for v in jaxpr.constvars]
        atoms = [*jaxpr.constvars, *jaxpr.invars]
        return self.jaxpr(jaxpr, dict(zip(atoms, [*constants, *inputs], strict=True)))

    def equation(self, eqn: JaxprEqn, origins: Origins) -> str:
        """The node of an equation, with the edges into it; literals stand in it."""
        found = [_origin(origins, atom) for atom in eqn.invars]
        literals = [_literal(each) if isinstance(each, Literal) else "·" for each in found]
        details = self._telling(eqn)
        if any(text != "·" for text in literals):
            details.insert(0, f"({', '.join(literals)})")
        called = eqn.params.get("name") if bodies(eqn) else None
        title = f"{eqn.primitive.name} {called}" if called else eqn.primitive.name
        node = self.node("equation", title, details)
        for atom, origin in zip(eqn.invars, found, strict=True):
            if not isinstance(origin, Literal):
                self.edge(origin, node, atom.aval)
        return node

    def _telling(self, eqn: JaxprEqn) -> list[str]:
        """The parameters that say most about an equation, as `axes=(0,)`."""
        hidden = () if eqn.primitive is sow_p else _HIDDEN
        telling = [
            f"{name}{value}"
            for name, value in self._notation.signature(eqn).pairs
            if isinstance(value, str) and value not in ("None", "False", "()")
            if len(value) <= _LONGEST_PARAMETER and name.rstrip("=") not in hidden
        ]
        return telling[:_MOST_PARAMETERS]


def _origin(origins: Origins, atom: Atom) -> Origin:
    return atom if isinstance(atom, Literal) else origins[atom]


# --- equations of each kind -------------------------------------------------------------------


def _leaf(drawing: _Drawing, eqn: JaxprEqn, origins: Origins) -> list[Origin]:
    return [drawing.equation(eqn, origins)] * len(eqn.outvars)


def _regions(drawing: _Drawing, eqn: JaxprEqn, origins: Origins) -> list[Origin]:
    """A loop, a branch or a call is a frame in which values pass along the edges of its regions."""
    inside = regions(eqn)
    assert inside is not None
    given = [_origin(origins, atom) for atom in eqn.invars]
    results: dict[int, Origin] = {}
    ends = []
    with drawing.frame(_title(inside)):
        _ports(drawing, inside, given)
        for number, (region, body) in enumerate(zip(inside.regions, inside.bodies, strict=True)):
            with _body_frame(drawing, inside, number):
                outs = drawing.body(body, [given[i] for i in region.ins])
                if region.decides:
                    drawing.edge(outs[0], drawing.node("port", "go on?"), None)
                if inside.deciding:
                    ends.append(drawing.node("port", "result" if len(outs) == 1 else "results"))
                    for origin, var in zip(outs, eqn.outvars, strict=True):
                        drawing.edge(origin, ends[-1], var.aval)
            for origin, out, back in zip(outs, region.outs, region.back, strict=True):
                if out is not None:
                    results[out] = origin
                # Where a value changes, it goes from the end of a round to the next.
                if isinstance(back, int) and origin != given[back]:
                    drawing.edge(origin, str(given[back]), None, "style=dashed, constraint=false")
        if inside.deciding:
            chosen = drawing.node("equation", eqn.primitive.name)
            results = dict.fromkeys(range(len(eqn.outvars)), chosen)
    if any(region.decides for region in inside.regions):
        results.update((out, given[i]) for i, out in inside.carried)
    for i in inside.deciding:
        drawing.edge(given[i], chosen, eqn.invars[i].aval)
    for end in ends:
        drawing.edge(end, chosen, None)
    return [results[i] for i in range(len(eqn.outvars))]


def _title(inside: Regions) -> str:
    """What stands over the frame of an equation."""
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


def _body_frame(drawing: _Drawing, inside: Regions, number: int) -> AbstractContextManager[None]:
    """The frame around one body, if there are several."""
    if len(inside.bodies) == 1 and not inside.deciding:
        return nullcontext()
    region = inside.regions[number]
    name = "condition" if region.decides else region.field
    return drawing.frame(f"branch {number}" if inside.deciding else name)


def _ports(drawing: _Drawing, inside: Regions, given: list[Origin]) -> None:
    """Put a node in place of each value that changes from round to round, with its first value."""
    carried = [i for i, _ in inside.carried]
    rows = [i for field in inside.edges.sliced for i in inside.operands[field]]
    for name, operands in ("carry", carried), ("x", rows):
        for number, i in enumerate(operands):
            port = drawing.node("port", f"{name} {number}" if len(operands) > 1 else name)
            drawing.edge(given[i], port, inside.eqn.invars[i].aval)
            given[i] = port


def _parts(drawing: _Drawing, eqn: JaxprEqn, origins: Origins) -> list[Origin]:
    """An equation of a kind that we do not know: itself, and its jaxprs, each on its own."""
    with drawing.frame(eqn.primitive.name):
        node = drawing.equation(eqn, origins)
        for path, body in bodies(eqn):
            with drawing.frame(path):
                inputs = [drawing.node("port", "input", [type_of(v.aval)]) for v in body.invars]
                end = None
                for origin, atom in zip(drawing.body(body, inputs), body.outvars, strict=True):
                    end = end or drawing.node("port", "result")
                    drawing.edge(origin, end, atom.aval)
    return [node] * len(eqn.outvars)


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
