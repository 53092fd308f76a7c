"""Counts and sizes as text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal

from jaxprtool.errors import ArgumentsError


def plural(count: int, noun: str) -> str:
    """Return a count as text: `1 equation`, `2 equations`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def times(count: int, type: str) -> str:
    """Return a type with the number of its values, if there are several: `3 x f32[8]`."""
    return f"{count:,} x {type}" if count > 1 else type


def some(names: Iterable[str], most: int, end: str = " and {:,} more") -> str:
    """Return names as text, shortened after `most`: `a, b and 3 more`."""
    names = list(names)
    more = len(names) - most
    return ", ".join(names[:most]) + (end.format(more) if more > 0 else "")


def listed(names: Iterable[str], most: int) -> str:
    """Return names as text, shortened after `most`: `a, b, … 3 more`."""
    return some(names, most, ", … {:,} more")


def in_bytes(count: float) -> str:
    """Return a number of bytes as text: `1.5 MiB`."""
    if count < 1024:
        return f"{count:,} byte{'' if count == 1 else 's'}"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def with_prefix(number: float, unit: str = "") -> str:
    """Return a number as text, with a prefix of the SI: `1.5 M`, `1.5 MB/s`."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(number) < 999.95:
            return f"{number:.1f} {prefix}{unit}" if prefix else f"{number:,} {unit}".rstrip()
        number /= 1000
    return f"{number:,.1f} E{unit}"


#: A number, and a prefix of the SI or of the IEC.
_AMOUNT = r"(\d+(?:\.\d*)?(?:e\+?\d\d?)?)\s*(?:([kmgtp])(i?))?"
_BYTES = re.compile(f"{_AMOUNT}b?", re.IGNORECASE)
_FLOPS = re.compile(f"{_AMOUNT}(?:flops?)?", re.IGNORECASE)


def bytes_of(text: str) -> int:
    """Return the number of bytes in a text: `8GiB`, `500 MB`, `2e9`.

    Raises:
        ArgumentsError: If the text is not a number of bytes.
    """
    return _amount(text, _BYTES, "bytes such as 8GiB, 500MB or 2e9")


def flops_of(text: str) -> int:
    """Return the number of FLOPs in a text: `3 GFLOP`, `1.5e9`.

    Raises:
        ArgumentsError: If the text is not a number of FLOPs.
    """
    return _amount(text, _FLOPS, "FLOPs such as 3 GFLOP, 500M or 2e9")


def _amount(text: str, pattern: re.Pattern[str], what: str) -> int:
    read = pattern.fullmatch(text.strip())
    if read is None:
        raise ArgumentsError(f"'{text}' is not a number of {what}")
    number, prefix, binary = read.groups()
    unit = (1024 if binary else 1000) ** (" kmgtp".index(prefix.lower()) if prefix else 0)
    return int(Decimal(number) * unit)
