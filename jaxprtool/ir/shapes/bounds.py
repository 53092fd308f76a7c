"""The bounds of arguments that are sizes, or lengths of examples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from jaxprtool.ir.shapes.symbols import Sizes, value_of

#: Sizes and lengths have this dtype; bounds must be representable in it.
MOST = int(np.iinfo(np.int32).max)


@dataclass(frozen=True)
class SizeBound:
    """A size, or an array of sizes: from `at_least` to `at_most`."""

    at_most: int
    at_least: int = 0

    def __str__(self) -> str:
        return f"a size from {self.at_least} to {self.at_most}"

    def fault(self, values: np.ndarray, sizes: Sizes) -> str | None:
        """Return a message about values out of bounds, or None."""
        wrong = values[(values < self.at_least) | (values > self.at_most)]
        return f"is {wrong[0]}, but must be {self}" if len(wrong) else None

    def at(self, sizes: Sizes) -> SizeBound:
        """Return the bound with symbols replaced by these sizes."""
        return self

    def random(self, rng: np.random.Generator, shape: tuple[int, ...], sizes: Sizes) -> Any:
        """Return random values within the bound."""
        return rng.integers(self.at_least, self.at_most + 1, shape)


@dataclass(frozen=True)
class LengthsBound:
    """The lengths of examples, along the last axis.

    Attributes:
        rows: The number of rows of all examples: a number, or a symbolic dimension. The size of its
            symbol may be another argument.
        longest: The maximum number of rows of an example; None if unknown.
        left_over: Whether there may be spare rows after the examples.
        shortest: The minimum number of rows of an example.
    """

    rows: Any
    longest: int | None = None
    left_over: bool = False
    shortest: int = 0

    def __str__(self) -> str:
        most = "at most " * self.left_over
        each = range_of_lengths(self.shortest, self.longest)
        return f"an array of lengths that add up to {most}{self.rows}{each}"

    def fault(self, values: np.ndarray, sizes: Sizes) -> str | None:
        """Return a message about values out of bounds, or None."""
        for i, value in np.ndenumerate(values):
            if value < self.shortest or (self.longest is not None and value > self.longest):
                least, most, place = self.shortest, self.longest, ", ".join(map(str, i))
                valid = f"of at least {least}" if most is None else f"from {least} to {most}"
                return f"is {value} at [{place}], but must be a length {valid}"
        rows = value_of(self.rows, sizes)
        totals = values.sum(-1, dtype=np.int64)
        if not isinstance(rows, int):
            return None
        wrong = totals[(totals > rows) | (totals < (0 if self.left_over else rows))]
        return f"adds up to {wrong[0]}, but there are {rows} rows" if len(wrong) else None

    def at(self, sizes: Sizes) -> LengthsBound:
        """Return the bound with symbols replaced by these sizes."""
        return replace(self, rows=value_of(self.rows, sizes))

    def random(self, rng: np.random.Generator, shape: tuple[int, ...], sizes: Sizes) -> Any:
        """Return random values within the bound. Raises ValueError if there are none."""
        rows, count = value_of(self.rows, sizes), shape[-1]
        if not isinstance(rows, int):
            raise ValueError(f"{rows} must be a number")
        least, most = self.shortest, rows if self.longest is None else min(self.longest, rows)
        if count * most < rows:
            raise ValueError(f"no {count} lengths of at most {most} add up to {rows}")
        if count * least > rows:
            raise ValueError(f"no {count} lengths of at least {least} add up to {rows}")
        if count == 0:
            return np.zeros(shape)
        more = rng.multivariate_hypergeometric(
            [most - least] * count, rows - count * least, shape[:-1], "marginals"
        )
        return least + more


def range_of_lengths(shortest: int, longest: int | None) -> str:
    """Describe the range of each length, after a comma; "" if it is unbounded."""
    if longest is None:
        return f", each at least {shortest}" if shortest else ""
    return f", each {f'from {shortest} to' if shortest else 'at most'} {longest}"


Bound: TypeAlias = SizeBound | LengthsBound
