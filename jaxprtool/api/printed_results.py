"""The text and HTML of results, as their commands show them; see `ir.documents`."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from importlib import import_module
from typing import Any

from rich.console import Console

from jaxprtool.render.terminal.tables import ROWS, TALL_ROWS

#: For each type of result, the module of `render.reports` that renders it, and the call that does
#: so, with the defaults of the command.
_RENDERERS: dict[str, tuple[str, Callable[[Any, int, Any], Any]]] = {
    "Bench": ("bench", lambda found, width, module: module.table(found, width)),
    "Comparison": ("compare", lambda found, width, module: module.comparison(found, width, ROWS)),
    "CompiledPeak": (
        "memory",
        lambda found, width, module: module.compiled_table(found, width, TALL_ROWS),
    ),
    "Cost": ("cost", lambda found, width, module: module.cost_table(found, width, ROWS, None)),
    "Determinism": ("determinism", lambda found, width, module: module.determinism(found, width)),
    "Diff": ("diff", lambda found, width, module: module.diff_text(found, width, ROWS)),
    "Findings": ("lint", lambda found, width, module: module.findings_by_line(found, width, ROWS)),
    "GradientAnswer": (
        "why",
        lambda found, width, module: module.gradient_text(found, width, module.CAUSES),
    ),
    "Memory": ("memory", lambda found, width, module: module.memory_table(found, width, ROWS)),
    "NanSearch": ("nans", lambda found, width, module: module.first_found(found, width)),
    "Path": ("why", lambda found, width, module: module.path_text(found, width, ROWS)),
    "Precision": (
        "precision",
        lambda found, width, module: module.precision_text(found, width, ROWS),
    ),
    "Profile": (
        "profile",
        lambda found, width, module: module.profile_table(found, "line", width, ROWS),
    ),
    "Residuals": (
        "residuals",
        lambda found, width, module: module.residuals_table(found, width, TALL_ROWS),
    ),
    "Run": ("record", lambda found, width, module: module.summary(found, width)),
    "Shardings": (
        "shardings",
        lambda found, width, module: module.shardings_tables(found, width, TALL_ROWS),
    ),
    "Source": (
        "source",
        lambda found, width, module: module.source_text(found, width, False, None),
    ),
    "Stats": ("summary", lambda found, width, module: module.stats(found, width, ROWS)),
    "Watched": ("watch", lambda found, width, module: module.watched_text(found, width, ROWS)),
    "Why": ("why", lambda found, width, module: module.slices_by_line(found, width, ROWS)),
}

#: The width of a result in a notebook, in characters.
_NOTEBOOK_WIDTH = 100


def text(found: object) -> str:
    """Return a result as text, at the width of the terminal."""
    return str(_rendering(found, shutil.get_terminal_size().columns).plain())


def html(found: object) -> str:
    """Return a result as HTML, with the colors of the terminal."""
    console = Console(file=io.StringIO(), record=True, width=_NOTEBOOK_WIDTH)
    console.print(_rendering(found, _NOTEBOOK_WIDTH), soft_wrap=True)
    # The colors of the theme are for a light page; a notebook may be dark.
    look = "overflow-x: auto; line-height: 1.3; padding: 0.5em; background: #fff; color: #111"
    pre = f'<pre style="{look}">{{code}}</pre>'
    return console.export_html(inline_styles=True, code_format=pre)


def _rendering(found: object, width: int) -> Any:
    module, render = _RENDERERS[type(found).__name__]
    return render(found, width, import_module(f"jaxprtool.render.reports.{module}"))
