"""`check --update`: write the measured amounts as the budgets of pyproject.toml.

Comments and layout are kept. A budget with a unit keeps it, and is rounded up to three digits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit

from jaxprtool.api.investigate.budgets import Quantity, amount_of
from jaxprtool.files import file_written_whole
from jaxprtool.render.documents.problems import Change

#: A number, and its unit with the space before it.
_AMOUNT = re.compile(r"\s*([\d.]+(?:e\+?\d+)?)(\s*)([kmgtp]?)(i?)(.*?)\s*", re.IGNORECASE)

#: The number of significant digits of a budget with a unit.
_DIGITS = 3


def update_budgets(path: Path, measured: Mapping[str, Mapping[Quantity, float]]) -> list[Change]:
    """Set the budgets in a file to the measured amounts, and write it if one changes.

    Args:
        path: The file.
        measured: The measured amounts by target.

    Returns:
        The changes.

    Raises:
        OutputError: If the file cannot be written. It is then unchanged.
    """
    # Bytes, as reading text would change the ends of lines.
    document: Any = tomlkit.parse(path.read_bytes().decode())
    changes = []
    for name, amounts in measured.items():
        table = document["tool"]["jaxprtool"]["targets"][name]
        for quantity, amount in amounts.items():
            key = quantity.replace("_", "-")
            before = table[key].unwrap()
            after = budget_like(before, quantity, amount)
            if after != before:
                _replace(table, key, after)
                changes.append(Change(name, key, _toml(before), _toml(after)))
    if changes:
        with file_written_whole(str(path)) as file:
            file.write(tomlkit.dumps(document).encode())
    return changes


def _replace(table: Any, key: str, value: object) -> None:
    """Set a key, and keep the comment behind it."""
    trivia = table[key].trivia
    item = tomlkit.item(value)
    item.trivia.indent, item.trivia.comment_ws = trivia.indent, trivia.comment_ws
    item.trivia.comment, item.trivia.trail = trivia.comment, trivia.trail
    table[key] = item


def _toml(value: object) -> str:
    return tomlkit.item(value).as_string()  # type: ignore[no-any-return]


def budget_like(earlier: object, quantity: Quantity, amount: float) -> object:
    """Return the smallest budget that allows an amount, written like an earlier budget.

    If the earlier one is a number, return the amount. If it is text, keep its unit, or change the
    prefix of the unit to avoid many digits, and round up.
    """
    match = _AMOUNT.fullmatch(earlier) if isinstance(earlier, str) else None
    if match is None:
        return math.ceil(amount)
    _, space, prefix, binary, unit = match.groups()
    base = 1024 if binary else 1000
    letters = ["", *("KMGTP" if binary else "kMGTP")]
    power = " kmgtp".index(prefix.lower() or " ")
    if not 1 <= amount / base**power <= 999 and amount:
        # 999.5 of a unit would be rounded up to 1000 of it.
        fitting = (n for n in range(len(letters)) if amount / base**n <= 999)
        power = next(fitting, len(letters) - 1)
        prefix = letters[power]
    binary = binary if power else ""
    number = _rounded_up(amount / base**power)
    text = f"{number}{space if prefix or unit else ''}{prefix}{binary}{unit}"
    return text if amount_of(quantity, text) >= amount else math.ceil(amount)


def _rounded_up(number: float) -> str:
    """Return the least number of three digits that is not smaller, as text."""
    whole = len(str(int(number)))
    places = max(_DIGITS - whole, 0)
    up = math.ceil(round(number * 10**places, 6)) / 10**places
    return f"{up:.{places}f}".rstrip("0").rstrip(".") if places else str(int(up))
