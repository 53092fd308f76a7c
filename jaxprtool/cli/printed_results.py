"""The text and HTML of results, as their commands show them; see `ir.documents`."""

from __future__ import annotations

import io
import shutil
from typing import Any

from rich.console import Console

from jaxprtool.registry import renderers

#: The width of a result in a notebook, in characters.
_NOTEBOOK_WIDTH = 100


def result_text(result: object) -> str:
    """Return a result as text, at the width of the terminal."""
    return str(_rendering(result, shutil.get_terminal_size().columns).plain())


def result_html(result: object) -> str:
    """Return a result as HTML, with the colors of the terminal."""
    console = Console(file=io.StringIO(), record=True, width=_NOTEBOOK_WIDTH)
    console.print(_rendering(result, _NOTEBOOK_WIDTH), soft_wrap=True)
    # The colors of the theme are for a light page; a notebook may be dark.
    look = "overflow-x: auto; line-height: 1.3; padding: 0.5em; background: #fff; color: #111"
    pre = f'<pre style="{look}">{{code}}</pre>'
    return console.export_html(inline_styles=True, code_format=pre)


def _rendering(result: object, width: int) -> Any:
    return renderers()[type(result).__name__](result, width)
