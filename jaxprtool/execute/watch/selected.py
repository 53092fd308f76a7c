"""Selection of the iterations of loops to watch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from jaxprtool.errors import ArgumentsError


class IterationChoice:
    """A selection of iterations by list indices and slices.

    Args:
        chosen: `0` and `-1` are the first and the last, `slice(None, None, 10)` every tenth; None
            for all.
    """

    def __init__(self, chosen: Sequence[int | slice] | None):
        for each in chosen or ():
            if not isinstance(each, int | slice):
                raise ArgumentsError(f"an iteration must be a number or a slice, not {each!r}")
        self.chosen = chosen

    @cached_property
    def need_length(self) -> bool:
        """Whether some are counted from the end."""
        numbers = [
            n
            for each in self.chosen or ()
            for n in ((each.start, each.stop) if isinstance(each, slice) else (each,))
        ]
        steps = [each.step for each in self.chosen or () if isinstance(each, slice)]
        return any(n is not None and n < 0 for n in (*numbers, *steps))

    def has(self, number: int, length: int | None) -> bool:
        """Return True if an iteration of a loop of `length` (None if unknown) is selected."""
        return bool(self.among(np.array([number]), length)[0])

    def among(self, numbers: np.ndarray, length: int | None) -> Any:
        """Return a mask of the selected iterations."""
        if self.chosen is None:
            return np.ones(numbers.shape, bool)
        found = np.zeros(numbers.shape, bool)
        for each in self.chosen:
            if isinstance(each, slice):
                end = int(numbers.max(initial=0)) + 1 if length is None else length
                found |= np.isin(numbers, range(*each.indices(end)))
            elif each >= 0 or length is not None:
                found |= numbers == (each if each >= 0 else each + (length or 0))
        return found
