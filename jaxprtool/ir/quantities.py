"""Counts and sizes as text."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """Return a count as text: `1 equation`, `2 equations`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def in_bytes(count: float) -> str:
    """Return a number of bytes as text: `1.5 MiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def with_prefix(number: float) -> str:
    """Return a number as text, with a prefix of the SI: `1.5 M`."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(number) < 999.95:
            return f"{number:,}" if not prefix else f"{number:.1f} {prefix}"
        number /= 1000
    return f"{number:,.1f} E"
