"""The first rows of a list, and how many more there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

#: The number of rows of a list that commands show by default, and where rows have several lines.
ROWS, TALL_ROWS = 20, 10

#: The option of commands that shows all rows.
ALL = "--all"


def split(rows: Sequence[T], top: int | None) -> tuple[Sequence[T], Sequence[T]]:
    """Return the first `top` rows of a list, or all if it is None, and the others."""
    most = len(rows) if top is None else top
    return rows[:most], rows[most:]


def more(count: int, remark: str = "", option: str = ALL) -> str:
    """Return `… 291 more: --all` for rows that are not shown; "" if there are none.

    Args:
        count: The number of the other rows.
        remark: A remark on them.
        option: The option that shows them; "" if none does.
    """
    if not count:
        return ""
    return f"… {count:,} more{remark}" + (f": {option}" if option else "")
