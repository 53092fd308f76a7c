"""What the ways to show a program share: their options, and that Rich lays them out."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

from jaxprtool.ir.notation.selection import Selection
from jaxprtool.ir.notation.signatures import Notation
from jaxprtool.ir.notation.terse import TerseNotation
from jaxprtool.ir.notation.user_names import UserNames
from jaxprtool.ir.programs.border import Border
from jaxprtool.ir.source.frame_choice import FrameChoice


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """What is shown of a program.

    Attributes:
        width: How many columns there are.
        source: Whether each equation is shown with the line that it comes from.
        frames: Which frames of it; None for those that `jaxprtool.frames` says.
        scopes: Whether each equation is shown with its name stack.
        types: Whether what is bound is shown with its type.
        depth: Bodies nested deeper become one line with the count of their equations.
        only: Patterns of primitive names, as in `conv*`: other equations are counted and left
            out, unless one asked for is inside them.
        among: Equations by `id`: others are counted and left out.
        others: What these others are: "that x does not touch".
        names: Whether variables are called what the user calls them, where that is known.
        terse: Whether parameters at their defaults are left out.
        weak: Whether weak types are shown as such: `~f32[3]`.
        fit: Whether the lines that JAX's layout leaves longer than the width are broken.
        fold: Whether of many variables in a row, as of large signatures, some are shown.
    """

    width: int = 80
    source: bool = False
    frames: FrameChoice | None = None
    scopes: bool = False
    types: bool = True
    depth: int | None = None
    only: Sequence[str] | None = None
    among: frozenset[int] | None = None
    others: str = ""
    names: bool = False
    terse: bool = False
    weak: bool = False
    fit: bool = False
    fold: bool = False

    def selection(self) -> Selection:
        """Return which equations are shown."""
        return Selection(self.depth, self.only, self.among, self.others)

    def notation(self, about: Border) -> Notation:
        """Return how the equations of a program are written."""
        notation = TerseNotation() if self.terse else Notation()
        notation.weak = self.weak
        if self.names:
            paths = [value.name for value in about.arguments]
            notation.variable_names = partial(UserNames, arguments=paths, roots=about.roots)
        return notation


#: Of more variables in a row, what fits on a line is shown where they are folded.
MOST_IN_A_ROW = 12

#: How a program is shown if nothing else is asked for.
DEFAULTS = ShowOptions()


@dataclass(frozen=True)
class Rendering:
    """A Rich renderable laid out for `width` columns, with a plain text."""

    renderable: RenderableType
    width: int

    def plain(self) -> str:
        """Return the text, without colours and without a newline at its end."""
        file = io.StringIO()
        Console(file=file, width=self.width, color_system=None, markup=False).print(self.renderable)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Wrapping is done here, at our width, also where the caller prints with soft_wrap=True.
        # A type such as f32[n] is not markup.
        options = options.update(width=self.width, no_wrap=False, overflow="fold", markup=False)
        yield from console.render(self.renderable, options)
