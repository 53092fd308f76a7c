"""Draw the listing at the top of the README: `python -m tests.documentation.picture`."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

from rich.console import Console
from rich.text import Text

from jaxprtool.cli.main import main

ROOT = Path(__file__).parents[2]
PATH = ROOT / "docs" / "listing.svg"
COMMAND = "show samples/branches.py:huber --source"


def picture() -> str:
    """Return the picture of a command and of what it prints in colours, as SVG."""
    printed = io.StringIO()
    with mock.patch.dict(os.environ, FORCE_COLOR="1"), redirect_stdout(printed):
        assert main(COMMAND.split()) == 0
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True)
    console.print(f"[bold]$ jaxprtool {COMMAND}[/]", highlight=False)
    console.print(Text.from_ansi(printed.getvalue()))
    return console.export_svg(title="jaxprtool", unique_id="listing")


if __name__ == "__main__":
    os.chdir(ROOT)
    PATH.write_text(picture())
