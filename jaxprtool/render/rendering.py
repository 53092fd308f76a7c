"""What the tree, the table and the stats have in common: Rich lays them out for a given width."""

from __future__ import annotations

import io
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult


@dataclass(frozen=True)
class Rendering:
    """A Rich renderable laid out for `width` columns, with a plain text."""

    renderable: RenderableType
    width: int

    def plain(self) -> str:
        """The text, without colours and without a newline at its end."""
        file = io.StringIO()
        Console(file=file, width=self.width, color_system=None).print(self.renderable)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Wrapping is done here, at our width, also where the caller prints with soft_wrap=True.
        options = options.update(width=self.width, no_wrap=False, overflow="fold")
        yield from console.render(self.renderable, options)
