"""Counters in a file that is mapped into memory, so that they survive a crash of the process.

Each counter is a row of numbers. An event in the process's events says what a row counts.
"""

from __future__ import annotations

import mmap
import threading
from typing import Any

#: The numbers of a row: the count, the total seconds, the longest time in seconds, the bytes.
COLUMNS = 4
_ROW = 8 * COLUMNS
_ROWS = 1 << 14


class Counters:
    """The counters of a process, in a new file."""

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        self._rows = 0
        with open(path, "xb+") as file:
            file.truncate(_ROW * _ROWS)  # a sparse file: unused rows take no disk space
            self._map = mmap.mmap(file.fileno(), _ROW * _ROWS)
        self._numbers: Any = memoryview(self._map).cast("d")

    def new(self) -> int | None:
        """Return a new counter, or None if there are too many."""
        with self._lock:
            if self._rows == _ROWS:
                return None
            self._rows += 1
            return self._rows - 1

    def add(self, counter: int, seconds: float = 0.0, size: int = 0, count: int = 1) -> None:
        """Count an event of this duration, in seconds, and size, in bytes."""
        at, numbers = counter * COLUMNS, self._numbers
        with self._lock:
            numbers[at] += count
            numbers[at + 1] += seconds
            if seconds > numbers[at + 2]:
                numbers[at + 2] = seconds
            if size:
                numbers[at + 3] += size


def read_counters(path: str) -> list[tuple[float, ...]]:
    """Return the rows of a file of counters, without the empty rows at its end."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return []
    numbers = memoryview(data[: len(data) // _ROW * _ROW]).cast("d")
    rows = [tuple(numbers[i : i + COLUMNS]) for i in range(0, len(numbers), COLUMNS)]
    while rows and not any(rows[-1]):
        rows.pop()
    return rows
