"""The text and HTML of results, as their commands show them; see `ir.documents`."""

from __future__ import annotations

import io
import re
import shutil
from typing import Any

from rich.console import Console

from jaxprtool.registry import renderers

#: The width of a result in a notebook, in characters.
_NOTEBOOK_WIDTH = 100

#: The style of a result in a notebook: a fixed font and no wrapped lines, which nbconvert and
#: VS Code do not give a `<pre>`, and a light page for the colors of the theme.
_LOOK = (
    "white-space: pre; overflow-x: auto; line-height: 1.3; padding: 0.5em; "
    "font-family: ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; "
    "background: #fff; color: #111"
)

#: Few fixed fonts have the braille patterns of plots, and those of other fonts have other widths.
_BRAILLE = re.compile("[\u2800-\u28ff]")

#: The style of a character that takes one column in any font.
_BOX = "display: inline-block; width: 1ch; font-style: normal"


def result_text(result: object) -> str:
    """Return a result as text, at the width of the terminal."""
    return str(_rendering(result, shutil.get_terminal_size().columns).plain())


def result_html(result: object) -> str:
    """Return a result as HTML, with the colors of the terminal."""
    # Rich displays what is printed in a notebook's kernel, whatever file it is for.
    console = Console(file=io.StringIO(), record=True, width=_NOTEBOOK_WIDTH, force_jupyter=False)
    console.print(_rendering(result, _NOTEBOOK_WIDTH), soft_wrap=True)
    pre = f'<pre style="{_LOOK}">{{code}}</pre>'
    page = console.export_html(inline_styles=True, code_format=pre)
    return _BRAILLE.sub(rf'<i style="{_BOX}">\g<0></i>', page)


def _rendering(result: object, width: int) -> Any:
    kind = type(result)
    return renderers()[f"{kind.__module__}:{kind.__qualname__}"](result, width)
