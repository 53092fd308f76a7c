"""Programs as trees: calls, loops and branches with their bodies.

Each equation is one line. One with bodies has its argument and result types and its number of
equations; a shared jaxpr is unfolded at its first use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from jaxprtool import jaxcompat
from jaxprtool.ir.core.equations import bodies
from jaxprtool.ir.notation.selection import equations
from jaxprtool.ir.notation.tokens import Comment, ParameterToken, SharedName, Type
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.program_signature import (
    ProgramSignature,
    program_signature,
    size_of_values,
)
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Jaxpr, JaxprEqn
from jaxprtool.render.terminal.comments import SourceComments
from jaxprtool.render.terminal.lines import cut, printable
from jaxprtool.render.terminal.listing import Listing
from jaxprtool.render.terminal.rendering import DEFAULTS, MOST_IN_A_ROW, ShowOptions
from jaxprtool.render.terminal.rows import Reader

T = TypeVar("T")


def tree(program: Program | AnyJaxpr, options: ShowOptions = DEFAULTS) -> Listing:
    """Return the tree of a program; long lines are cut at the width."""
    about = program_signature(program)
    builder = _Lines(about, options)
    tokens = cut([SharedName(about.name), " ", *builder.first(about)], options.width)
    for line in builder.equations(about.jaxpr, 0, ""):
        tokens += "\n", *cut(line, options.width)
    return Listing(printable(tokens))


class _Lines:
    """The lines of a program's tree, each in tokens."""

    def __init__(self, about: ProgramSignature, options: ShowOptions):
        self._reader = Reader(about, options)
        self._comments = SourceComments(options, about.roots)
        self._types = options.types
        self._selection = options.selection()
        self._unfolded: set[Jaxpr] = set()

    def equations(self, jaxpr: Jaxpr, depth: int, guides: str) -> Iterator[list[str]]:
        """Yield the lines of the equations of `jaxpr`, preceded by tree guides."""
        if self._selection.folds(depth) or jaxpr in self._unfolded:
            return
        self._unfolded.add(jaxpr)
        for row, mark, below in _branches(list(self._selection.rows(jaxpr)), guides):
            if isinstance(row, int):
                yield [mark, Comment(self._selection.left_out(row))]
                continue
            _, eqn = row
            inside = bodies(eqn)
            if not inside:
                yield [mark, *self._reader.line(eqn, self._types), *self._comment(eqn)]
            elif len(inside) == 1:
                _, body = inside[0]
                types, comment = [" ", *self.signature(body)], self._comment(eqn)
                # The line is cut at its end, which must not hide that the equation is opaque.
                behind = [*comment, " ", *types] if jaxcompat.is_opaque(eqn) else [*types, *comment]
                yield [mark, *self._reader.head(eqn), *behind]
                yield from self.equations(body, depth + 1, below)
            else:
                yield [mark, *self._reader.head(eqn), *self._comment(eqn)]
                for (path, body), inner, deeper in _branches(inside, below):
                    yield [inner, ParameterToken(path), " ", *self.signature(body)]
                    yield from self.equations(body, depth + 1, deeper)

    def first(self, about: ProgramSignature) -> list[str]:
        """Return the signature of the program; many values are summarized by size."""
        types = self.signature(about.jaxpr)
        if self._types and max(len(about.arguments), len(about.outputs)) > MOST_IN_A_ROW:
            sizes = (
                size_of_values("argument", about.arguments),
                size_of_values("result", about.outputs),
            )
            types[0] = Type("({}) → {}".format(*sizes))
        return types

    def signature(self, jaxpr: Jaxpr) -> list[str]:
        """Return `(f32[3]) → f32[3]  12 equations`, and whether they are shown above."""
        count = equations(self._selection.count(jaxpr)).removeprefix("… ")
        shown = Comment(f"{count}, shown above" if jaxpr in self._unfolded else count)
        if not self._types:
            return [shown]
        ins, outs = map(self._some_types, (jaxpr.invars, jaxpr.outvars))
        return [Type(f"({ins}) → {outs}"), "  ", shown]

    def _some_types(self, atoms: Sequence[Atom], most: int = 4) -> str:
        shown = [self._reader.type_of(atom)[1:] for atom in atoms[:most]]
        if len(atoms) > most:
            shown.append(f"… {len(atoms) - most} more")
        return " ".join(shown) or "()"

    def _comment(self, eqn: JaxprEqn) -> list[str]:
        comment = self._comments.comment(eqn)
        return ["  ", *comment] if comment else []


def _branches(items: Sequence[T], guides: str) -> Iterator[tuple[T, str, str]]:
    """Yield each item of a branch with its guides, and the guides of its children."""
    for number, item in enumerate(items):
        if number < len(items) - 1:
            yield item, Comment(guides + "├── "), guides + "│   "
        else:
            yield item, Comment(guides + "└── "), guides + "    "
