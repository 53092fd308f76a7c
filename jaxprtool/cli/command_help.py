"""The help of a command: Typer's, in colors that can be read on black and on white."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from jaxprtool.render.terminal.colors import CYAN, GREEN, MAGENTA, RED, YELLOW, named


class Command(TyperCommand):
    """A command whose help has the colors of `render.terminal.colors`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help to stdout."""
        from typer import rich_utils  # slow to import

        rich_utils.STYLE_OPTION = f"bold {named(CYAN)}"
        rich_utils.STYLE_SWITCH = f"bold {named(GREEN)}"
        rich_utils.STYLE_NEGATIVE_OPTION = f"bold {named(MAGENTA)}"
        rich_utils.STYLE_NEGATIVE_SWITCH = f"bold {named(RED)}"
        rich_utils.STYLE_TYPES = f"bold {named(YELLOW)}"
        rich_utils.STYLE_USAGE = named(YELLOW)
        rich_utils.STYLE_REQUIRED_SHORT = named(RED)
        super().format_help(ctx, formatter)
