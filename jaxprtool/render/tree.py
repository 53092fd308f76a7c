"""A program's structure as a tree: calls, loops and branches with what is inside them.

Each equation is one line. One that holds jaxprs bears its types from and to and its count of
equations; a jaxpr that several share is unfolded where it comes first.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from rich.tree import Tree

from jaxprtool.ir.border import border
from jaxprtool.ir.equations import bodies, type_of
from jaxprtool.ir.notation.selection import equations
from jaxprtool.ir.program import Program
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Jaxpr, JaxprEqn
from jaxprtool.render import theme
from jaxprtool.render.comments import SourceComments
from jaxprtool.render.rendering import DEFAULTS, Rendering, ShowOptions
from jaxprtool.render.rows import Reader, binders, operands, parameters


def tree(program: Program | AnyJaxpr, options: ShowOptions = DEFAULTS) -> Rendering:
    """Return the tree of a program; lines longer than the width are cut there."""
    about = border(program)
    maker = _Nodes(about.jaxpr, options)
    label = Text(about.name, style=theme.SHARED_NAME)
    root = Tree(maker.line(label, " ", maker.signature(about.jaxpr)), guide_style=theme.COMMENT)
    maker.fill(root, about.jaxpr, 0)
    return Rendering(root, options.width)


class _Nodes:
    def __init__(self, root: Jaxpr, options: ShowOptions):
        self.reader = Reader(root)
        self.comments = SourceComments(options)
        self.types = options.types
        self.selection = options.selection()
        self.unfolded: set[Jaxpr] = set()

    def fill(self, node: Tree, jaxpr: Jaxpr, depth: int) -> None:
        """Add the equations of `jaxpr` to its node."""
        if self.selection.folds(depth) or jaxpr in self.unfolded:
            return
        self.unfolded.add(jaxpr)
        for row in self.selection.rows(jaxpr):
            if isinstance(row, int):
                node.add(Text(equations(row), style=theme.COMMENT))
            else:
                self._add(node, row[1], depth)

    def _add(self, node: Tree, eqn: JaxprEqn, depth: int) -> None:
        inside = bodies(eqn)
        if not inside:
            node.add(self._leaf(eqn))
            return
        label = [Text(eqn.primitive.name, style=theme.PRIMITIVE)]
        if isinstance(name := eqn.params.get("name"), str):
            label += [Text(" "), Text(name, style=theme.SHARED_NAME)]
        comment = self._comment(eqn)
        if len(inside) == 1:
            child = node.add(self.line(*label, " ", self.signature(inside[0][1]), comment))
            self.fill(child, inside[0][1], depth + 1)
            return
        child = node.add(self.line(*label, comment))
        for path, body in inside:
            text = Text(path, style=theme.PARAMETER)
            self.fill(child.add(self.line(text, " ", self.signature(body))), body, depth + 1)

    def signature(self, jaxpr: Jaxpr) -> Text:
        """`(f32[3]) → f32[3]  12 equations`, and whether they stand above."""
        text = Text()
        if self.types:
            text.append(f"({_types(jaxpr.invars)}) → {_types(jaxpr.outvars)}  ", theme.TYPE)
        text.append(equations(self.selection.count(jaxpr)).removeprefix("… "), theme.COMMENT)
        if jaxpr in self.unfolded:
            text.append(", shown above", theme.COMMENT)
        return text

    def _leaf(self, eqn: JaxprEqn) -> Text:
        names = binders(self.reader, eqn.outvars, self.types)
        left: list[Text | str] = [names, " = "] if names else []
        params = parameters(self.reader, eqn)
        inside: list[Text | str] = ["[", params, "]"] if params.plain else []
        primitive = Text(eqn.primitive.name, style=theme.PRIMITIVE)
        last = operands(self.reader, eqn.invars)
        return self.line(*left, primitive, *inside, " ", last, self._comment(eqn))

    def _comment(self, eqn: JaxprEqn) -> Text:
        comment = self.comments.comment(eqn)
        return Text(f"  {comment}" if comment else "", style=theme.COMMENT)

    def line(self, *parts: Text | str) -> Text:
        """One line of the tree, cut where the width ends."""
        text = Text.assemble(*parts)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


def _types(atoms: Sequence[Atom], most: int = 4) -> str:
    shown = [type_of(atom.aval) for atom in atoms[:most]]
    if len(atoms) > most:
        shown.append(f"… {len(atoms) - most} more")
    return " ".join(shown) or "()"
