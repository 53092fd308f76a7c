"""Draw the terminals in the README and the gallery: `python -m tests.documentation.picture`."""

from __future__ import annotations

import io
import os
import re
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from jaxprtool.cli.main import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

#: The pictures, with the commands of each, and the terminal lines of each command: the overview of
#: a program, and a whole one; its FLOPs and memory; the costs of its lines; repeated code.
PICTURES = {
    "listing": {
        "show samples/layers.py:loss": 30,
        "show samples/batching.py:loss --names --source --terse --depth 0": 40,
    },
    "where": {
        "cost samples/transformer.py:loss --top 3": 40,
        "memory samples/transformer.py:loss --top 3": 40,
    },
    "source": {"source samples/layers.py:loss": 50},
    "outline": {"outline samples/layers.py:loss -p value_and_grad": 40},
}
WIDTH = 92

#: Dark, and legible next to GitHub's light and dark pages.
THEME = TerminalTheme(
    (22, 27, 34),
    (230, 237, 243),
    [
        *((72, 79, 88), (255, 123, 114), (126, 231, 135), (227, 179, 65)),
        *((121, 192, 255), (210, 168, 255), (118, 227, 234), (230, 237, 243)),
    ],
)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1  # only the size is queried


def printed(command: str, lines: int) -> str:
    """Return what a command prints in colors on a terminal of so many lines."""
    size = os.terminal_size((WIDTH, lines))
    with (
        mock.patch.dict(os.environ, FORCE_COLOR="1", TERM="xterm"),
        mock.patch("os.get_terminal_size", return_value=size),
        redirect_stdout(_Terminal()) as terminal,
    ):
        assert main(command.split()) == 0
    return re.sub(r" +$", "", terminal.getvalue(), flags=re.MULTILINE).rstrip("\n")


def screen(name: str) -> Text:
    """Return the commands of a picture, each with its output."""
    parts = [
        Text.assemble((f"$ jaxprtool {command}\n", "bold"), Text.from_ansi(printed(command, lines)))
        for command, lines in PICTURES[name].items()
    ]
    return Text("\n\n").join(parts)


def picture(name: str) -> str:
    """Return a picture of the terminal, as SVG."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(screen(name), highlight=False)
    return console.export_svg(title="jaxprtool", theme=THEME, unique_id=name)


if __name__ == "__main__":
    os.chdir(ROOT)
    for each in PICTURES:
        (DOCS / f"{each}.svg").write_text(picture(each))
