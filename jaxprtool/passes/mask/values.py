"""Padded values, and what is known of them.

A value whose type mentions a masked symbol, `f32[n,d]`, is computed padded, `f32[512,d]`: along
each padded axis its elements are first, and what comes after them is padding, which may hold
anything, NaN too. What a rule knows of the padding is a *fill*: along an axis whose fill is 0.0,
all elements beyond the logical size are 0.0, wherever they lie along the other axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxprtool.jaxcompat import Atom, Literal

#: What fills the padding along an axis: a number as an array of rank 0, in bytes. None: unknown.
Fill = bytes | None


@dataclass(frozen=True)
class Facts:
    """What is known of a value while a program is masked.

    Attributes:
        shape: The logical shape: that of its type in the program that is masked.
        fills: For each axis, what the padding along it holds; None along one without padding.
        active: True if it may have a derivative with respect to an argument of the program.
        literal: The value of a literal of rank 0, in bytes.
        varies: True in the body of a scan of masked length for what differs from round to round.
    """

    shape: tuple[Any, ...]
    fills: tuple[Fill, ...]
    active: bool
    literal: Fill = None
    varies: bool = False

    @classmethod
    def of(cls, atom: Atom, *, active: bool) -> Facts:
        """Return what the type of an atom says, and its value if it is a literal."""
        shape = getattr(atom.aval, "shape", ())
        literal = None
        if type(atom) is Literal and shape == () and is_number(atom.aval):
            literal = fill(atom.val, atom.aval.dtype)
        return cls(tuple(shape), (None,) * len(shape), active and is_float(atom.aval), literal)

    @classmethod
    def unknown(cls, shape: Sequence[Any], *, active: bool = False) -> Facts:
        """Return what is known of a value of a logical shape and no more."""
        return cls(tuple(shape), (None,) * len(shape), active)

    def joined(self, other: Facts) -> Facts:
        """Return what is known of a value that is one of two, of the same shape."""
        pairs = zip(self.fills, other.fills, strict=True)
        return replace(
            self,
            fills=tuple(mine if mine == theirs else None for mine, theirs in pairs),
            active=self.active or other.active,
            varies=self.varies or other.varies,
            literal=self.literal if self.literal == other.literal else None,
        )


def fill(value: Any, dtype: Any) -> bytes:
    """Return a number of a dtype as a fill. NaN is equal to itself, and 0.0 is not -0.0."""
    return np.asarray(value, dtype).tobytes()


def number(held: bytes, dtype: Any) -> np.ndarray:
    """Return the number that a fill is."""
    return np.frombuffer(held, dtype).reshape(())


def is_number(aval: Any) -> bool:
    """Return True for types that NumPy has arrays of, in which padding can be filled."""
    dtype = getattr(aval, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype != jax.dtypes.float0


def is_float(aval: Any) -> bool:
    """Return True for types that have derivatives."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, np.inexact)


@dataclass(frozen=True, eq=False)
class Padded:
    """A value as a rule has it: an array, padded along some axes, and what is known of it.

    Attributes:
        array: The array, of the padded shape.
        facts: What is known of it; `facts.shape` is its logical shape.
    """

    array: Any
    facts: Facts

    @property
    def shape(self) -> tuple[Any, ...]:
        """The logical shape."""
        return self.facts.shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.facts.shape)

    @property
    def dtype(self) -> Any:
        """The dtype."""
        return self.array.dtype

    @property
    def active(self) -> bool:
        """True if it may have a derivative."""
        return self.facts.active

    def fill(self, axis: int) -> np.ndarray | None:
        """Return the number that is known to fill the padding along an axis, or None."""
        held = self.facts.fills[axis]
        return None if held is None else number(held, self.dtype)


@dataclass(frozen=True, eq=False)
class Filled:
    """A result of a rule of which it knows fills: numbers by axis."""

    array: Any
    fills: dict[int, Any]


def result_facts(made: Any, shape: Sequence[Any], active: bool, varies: bool) -> tuple[Any, Facts]:
    """Return the array that a rule returned, and what is known of it."""
    array = made.array if isinstance(made, Filled) else made
    fills = dict(made.fills) if isinstance(made, Filled) and is_number(array) else {}
    held = tuple(
        fill(fills[i], array.dtype) if fills.get(i) is not None else None for i in range(len(shape))
    )
    return array, Facts(tuple(shape), held, active and is_float(array), varies=varies)
