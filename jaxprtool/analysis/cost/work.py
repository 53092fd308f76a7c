"""What an equation costs, as numbers that are added up: FLOPs, bytes, and what else is counted.

Where sizes are symbolic, so are the numbers: `2*n**2*d`, as in the types of the jaxpr.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from jaxprtool import jaxcompat


class Work(NamedTuple):
    """What is done by an equation, or by several.

    Attributes:
        flops: Arithmetic operations on numbers of any kind; a multiply-add is two.
        transcendentals: Exponentials, logarithms, square roots and the like, which are no FLOPs.
        bytes_read: Bytes that are read from memory.
        bytes_written: Bytes that are written to memory.
        random_numbers: Numbers, or words of random bits, that are drawn.
        bytes_communicated: Bytes that a device gives to collectives.
    """

    flops: Any = 0
    transcendentals: Any = 0
    bytes_read: Any = 0
    bytes_written: Any = 0
    random_numbers: Any = 0
    bytes_communicated: Any = 0

    @property
    def bytes(self) -> Any:
        """The bytes that are read and written."""
        return self.bytes_read + self.bytes_written

    def times(self, count: Any) -> Work:
        """Return what is done in so many rounds, or on so many devices."""
        return self if count == 1 else self.map(lambda number: number * count)

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        return total((self, other))

    def map(self, function: Callable[[Any], Any]) -> Work:
        """Return a function of each number."""
        return Work(*map(function, self))


#: The names of what is counted.
FIELDS = Work._fields

NOTHING = Work()


def total(works: Iterable[Work]) -> Work:
    """Return the sum of some works."""
    return Work(*map(sum, zip(*works, strict=True)))


def largest(works: Iterable[Work]) -> Work:
    """Return the largest of each number."""
    return _reduced(works, jax.core.max_dim)


def smallest(works: Iterable[Work]) -> Work:
    """Return the smallest of each number."""
    return _reduced(works, jax.core.min_dim)


def _reduced(works: Iterable[Work], symbolic: Callable[[Any, Any], Any]) -> Work:
    first, *others = works
    for each in others:
        first = Work(*map(symbolic, first, each))
    return first


def count(shape: Iterable[Any]) -> Any:
    """Return the number of elements of an array."""
    return math.prod(shape)


def is_number(value: Any) -> bool:
    """Return True if a number has no symbols."""
    return not jaxcompat.is_symbolic_dimension(value)
