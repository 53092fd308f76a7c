"""Options common to all renderings of a program, and layout by Rich."""

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
from jaxprtool.ir.programs.program_signature import ProgramSignature
from jaxprtool.ir.source.frame_choice import FrameChoice


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """Options for showing a program.

    Attributes:
        width: The width in columns.
        source: Whether to show the source line of each equation.
        frames: Which frames to show; None for those set by `jaxprtool.frames`.
        scopes: Whether to show the name stack of each equation.
        types: Whether to show the types of binders.
        depth: Bodies nested more deeply become one line with their number of equations.
        only: Patterns of primitive names, such as `conv*`: other equations are counted and left
            out, unless they contain a matching one.
        among: Equations by `id`: others are counted and left out.
        others: A description of the others: "that x does not touch".
        names: Whether to use the user's names of variables, if known.
        terse: Whether to leave out parameters with default values, and to cut long values.
        whole: Whether not to cut long values, even if `terse`.
        weak: Whether to mark weak types: `~f32[3]`.
        fit: Whether to break lines that JAX's layout leaves longer than the width.
        fold: Whether to fold long rows of variables, such as large signatures.
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
    whole: bool = False
    weak: bool = False
    fit: bool = False
    fold: bool = False

    def selection(self) -> Selection:
        """Return the selection of equations to show."""
        return Selection(self.depth, self.only, self.among, self.others)

    def notation(self, about: ProgramSignature) -> Notation:
        """Return the notation for the equations of a program."""
        notation = TerseNotation(self.whole) if self.terse else Notation()
        notation.weak = self.weak
        if self.names:
            paths = [value.name for value in about.arguments]
            notation.variable_names = partial(UserNames, arguments=paths, roots=about.roots)
        return notation


#: A folded row with more variables shows only those that fit a line.
MOST_IN_A_ROW = 12

#: The default options.
DEFAULTS = ShowOptions()


@dataclass(frozen=True)
class Rendering:
    """A Rich renderable laid out for `width` columns, with a plain text."""

    renderable: RenderableType
    width: int

    def plain(self) -> str:
        """Return the text without colors and without a final newline."""
        file = io.StringIO()
        Console(file=file, width=self.width, color_system=None, markup=False).print(self.renderable)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Wrap here, at our width, even if the caller prints with soft_wrap=True. A type such as
        # f32[n] is not markup.
        options = options.update(width=self.width, no_wrap=False, overflow="fold", markup=False)
        yield from console.render(self.renderable, options)
