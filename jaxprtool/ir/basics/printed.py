"""Results that print as their command does: `print(jaxprtool.cost(program))`."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Printed:
    """A result that prints as its command shows it, and is a table in a notebook.

    The packages that render results are imported when one is printed.
    """

    def __str__(self) -> str:
        return str(_renderers().text(self))

    def _repr_html_(self) -> str:
        return str(_renderers().html(self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


def _renderers() -> Any:
    return import_module("jaxprtool.api.printed_results")
