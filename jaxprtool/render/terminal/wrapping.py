"""Text with long names and paths, which are divided between their parts.

    optimizer.opt_state[0].nu
    .blocks[0..5].down.kernel
    flax/nnx/nn/
    normalization.py:180

Rich divides a word that is longer than a line anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, OverflowMethod
from rich.containers import Lines
from rich.measure import Measurement
from rich.text import Text

#: Where a word may be divided: after slashes, and before attributes and indices.
_BREAK = re.compile(r"(?<=/)(?=[^\s/])|(?<=[\w\])])(?=\.(?!py\b)[A-Za-z_])|(?<=[\w\])])(?=\[)")

_WORD = re.compile(r"\s*\S+\s*|\s+")


class PathText(Text):
    """Text whose long words are divided between the parts of names and paths."""

    def wrap(
        self,
        console: Console,
        width: int,
        *,
        justify: JustifyMethod | None = None,
        overflow: OverflowMethod | None = None,
        tab_size: int = 8,
        no_wrap: bool | None = None,
    ) -> Lines:
        """Return the text in lines of at most `width` columns."""
        if no_wrap or overflow == "ellipsis":
            return super().wrap(
                console,
                width,
                justify=justify,
                overflow=overflow,
                tab_size=tab_size,
                no_wrap=no_wrap,
            )
        lines = Lines()
        for line in self.split(allow_blank=True):
            lines.extend(line.divide(list(_offsets(line.plain, width))))
        for line in lines:
            line.rstrip_end(width)
        return lines

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the widths of the longest part of a word and of the longest line."""
        lines = self.plain.splitlines() or [""]
        parts = (part for line in lines for word in _WORD.findall(line) for part in _parts(word))
        least = max((cell_len(part.rstrip()) for part in parts), default=0)
        return Measurement(least, max(map(cell_len, lines)))


def _parts(word: str) -> list[str]:
    places = [0, *(found.start() for found in _BREAK.finditer(word)), len(word)]
    return [word[start:stop] for start, stop in pairwise(places) if start < stop]


def _offsets(line: str, width: int) -> Iterator[int]:
    """Yield the offsets at which a line is divided.

    A word that is longer than a line is divided between its parts, and a longer part anywhere.
    """
    position, used = 0, 0
    for word in _WORD.findall(line):
        for part in [word] if cell_len(word.rstrip()) <= width else _parts(word):
            if used and used + cell_len(part.rstrip()) > width:
                yield position
                used = 0
            while cell_len(part.rstrip()) > width:
                position, part = position + width, part[width:]
                yield position
            position, used = position + len(part), used + cell_len(part)
