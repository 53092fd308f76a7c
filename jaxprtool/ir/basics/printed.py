"""Values that print as their command shows them, and the functions of higher rooms that do so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: The functions of higher rooms that methods of values call, by name. `jaxprtool` registers them,
#: so that they are imported when they are called.
METHODS: dict[str, Callable[..., Any]] = {}


class Printed:
    """A result that prints as its command does, `print(jaxprtool.cost(program))`.

    In a notebook it is a table.
    """

    def __str__(self) -> str:
        return str(METHODS["result_text"](self))

    def _repr_html_(self) -> str:
        return str(METHODS["result_html"](self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))
