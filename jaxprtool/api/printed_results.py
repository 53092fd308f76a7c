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
    "Bench": ("bench", lambda result, width, module: module.table(result, width)),
    "Comparison": ("compare", lambda result, width, module: module.comparison(result, width, ROWS)),
    "CompiledPeak": (
        "memory",
        lambda result, width, module: module.compiled_table(result, width, TALL_ROWS),
    ),
    "Cost": ("cost", lambda result, width, module: module.cost_table(result, width, ROWS, None)),
    "Determinism": ("determinism", lambda result, width, module: module.determinism(result, width)),
    "Diff": ("diff", lambda result, width, module: module.diff_text(result, width, ROWS)),
    "Findings": (
        "lint",
        lambda result, width, module: module.findings_by_line(result, width, ROWS),
    ),
    "GradientAnswer": (
        "why",
        lambda result, width, module: module.gradient_text(result, width, module.CAUSES),
    ),
    "Memory": ("memory", lambda result, width, module: module.memory_table(result, width, ROWS)),
    "NanSearch": ("nans", lambda result, width, module: module.first_found(result, width)),
    "Path": ("why", lambda result, width, module: module.path_text(result, width, ROWS)),
    "Precision": (
        "precision",
        lambda result, width, module: module.precision_text(result, width, ROWS),
    ),
    "Profile": (
        "profile",
        lambda result, width, module: module.profile_table(result, "line", width, ROWS),
    ),
    "Residuals": (
        "residuals",
        lambda result, width, module: module.residuals_table(result, width, TALL_ROWS),
    ),
    "Run": ("record", lambda result, width, module: module.summary(result, width)),
    "Shardings": (
        "shardings",
        lambda result, width, module: module.shardings_tables(result, width, TALL_ROWS),
    ),
    "Source": (
        "source",
        lambda result, width, module: module.source_text(result, width, False, None),
    ),
    "Stats": ("summary", lambda result, width, module: module.stats(result, width, ROWS)),
    "Watched": ("watch", lambda result, width, module: module.watched_text(result, width, ROWS)),
    "Why": ("why", lambda result, width, module: module.slices_by_line(result, width, ROWS)),
}

#: The width of a result in a notebook, in characters.
_NOTEBOOK_WIDTH = 100


def text(result: object) -> str:
    """Return a result as text, at the width of the terminal."""
    return str(_rendering(result, shutil.get_terminal_size().columns).plain())


def html(result: object) -> str:
    """Return a result as HTML, with the colors of the terminal."""
    console = Console(file=io.StringIO(), record=True, width=_NOTEBOOK_WIDTH)
    console.print(_rendering(result, _NOTEBOOK_WIDTH), soft_wrap=True)
    # The colors of the theme are for a light page; a notebook may be dark.
    look = "overflow-x: auto; line-height: 1.3; padding: 0.5em; background: #fff; color: #111"
    pre = f'<pre style="{look}">{{code}}</pre>'
    return console.export_html(inline_styles=True, code_format=pre)


def _rendering(result: object, width: int) -> Any:
    module, render = _RENDERERS[type(result).__name__]
    return render(result, width, import_module(f"jaxprtool.render.reports.{module}"))
