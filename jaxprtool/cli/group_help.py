"""The help of `jaxprtool` itself: summary, examples, commands and options.

Typer renders the help of each command with Rich's Markdown and tracebacks, which are slower to
import than everything this page needs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jaxprtool.cli import output
from jaxprtool.registry import CommandInfo
from jaxprtool.render.terminal.tables import CYAN, YELLOW, color_name


def write_help(group: Any, context: Any, panels: Mapping[str, Mapping[str, CommandInfo]]) -> None:
    """Write the help of the command group to stdout, with the commands by panel."""
    console = output.console(sys.stdout)
    usage = Text.assemble(
        ("Usage: ", color_name(YELLOW)), (group.get_usage(context)[len("Usage: ") :], "bold")
    )
    console.print(Padding(usage, 1))
    console.print(Padding(Text.from_markup(inspect.cleandoc(group.help)), (0, 1, 1, 1)))
    width = max(len(name) for commands in panels.values() for name in commands)
    for title, commands in panels.items():
        rows = [(name, command.summary) for name, command in commands.items()]
        console.print(_panel(title, rows, width))
    options = [(", ".join(param.opts), param.help) for param in group.get_params(context)]
    console.print(_panel("Options", options))
    console.print(Padding(Text.from_markup(group.epilog), (1, 1)))


def _panel(title: str, rows: Iterable[tuple[str, str]], width: int | None = None) -> Panel:
    table = Table.grid(padding=(0, 2))
    table.add_column(style=f"bold {color_name(CYAN)}", no_wrap=True, width=width)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return Panel(table, title=title, title_align="left", border_style="dim")
