"""The quantities that a cost consists of: FLOPs, bytes and so on.

If sizes are symbolic, so are the quantities: `2*n**2*d`, as in the types of the jaxpr.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.documents import Number


class Work(NamedTuple):
    """The cost of one or more equations.

    Attributes:
        flops: Arithmetic operations on numbers of any dtype; a multiply-add is two.
        transcendentals: Exponentials, logarithms, square roots and so on. They are not in `flops`.
        bytes_read: Bytes read from memory.
        bytes_written: Bytes written to memory.
        random_numbers: Random numbers drawn, or words of random bits.
        bytes_communicated: Bytes that a device sends in collectives.
    """

    flops: Number = 0
    transcendentals: Number = 0
    bytes_read: Number = 0
    bytes_written: Number = 0
    random_numbers: Number = 0
    bytes_communicated: Number = 0

    @property
    def bytes(self) -> Any:
        """The bytes read and written."""
        return self.bytes_read + self.bytes_written

    def times(self, count: Any) -> Work:
        """Return the cost of `count` runs, or on `count` devices."""
        return self if count == 1 else self.map(lambda number: number * count)

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        return total((self, other))

    def map(self, function: Callable[[Any], Any]) -> Work:
        """Apply a function to each quantity."""
        return Work(*map(function, self))


NOTHING = Work()


def total(works: Iterable[Work]) -> Work:
    """Return the sum of costs."""
    return Work(*map(sum, zip(*works, strict=True)))


def largest(works: Iterable[Work]) -> Work:
    """Return the maximum of each quantity."""
    return _reduced(works, jax.core.max_dim)


def smallest(works: Iterable[Work]) -> Work:
    """Return the minimum of each quantity."""
    return _reduced(works, jax.core.min_dim)


def _reduced(works: Iterable[Work], symbolic: Callable[[Any, Any], Any]) -> Work:
    first, *others = works
    for each in others:
        first = Work(*map(symbolic, first, each))
    return first


def count(shape: Iterable[Any]) -> Any:
    """Return the number of elements of an array of a shape."""
    return math.prod(shape)


def is_number(value: Any) -> bool:
    """Return True if a size is a number, not symbolic."""
    return not jaxcompat.is_symbolic_dimension(value)
