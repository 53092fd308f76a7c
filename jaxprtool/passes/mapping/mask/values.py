"""Padded values, and the facts known about them.

A value whose type mentions a masked symbol, `f32[n,d]`, is padded to `f32[512,d]`. Along each
padded axis its elements come first; the padding after them may hold anything, NaN included. If the
contents of the padding are known, they are called a *fill*. Along an axis with fill 0.0, all
elements beyond the logical size are 0.0, at every position along the other axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxprtool.jaxcompat import Atom, Literal

#: The number that fills the padding along an axis, as the bytes of a scalar; None if unknown.
Fill = bytes | None


@dataclass(frozen=True)
class Facts:
    """The facts known about a value while a program is masked.

    Attributes:
        shape: The logical shape, which the value has in the old program.
        fills: The fill along each axis; None if it is unknown, or the axis has no padding.
        active: True if the value may have a derivative with respect to an argument of the program.
        literal: The bytes of the value, if it is a scalar literal.
        varies: True if the value varies between iterations, in the body of a scan of masked length.
    """

    shape: tuple[Any, ...]
    fills: tuple[Fill, ...]
    active: bool
    literal: Fill = None
    varies: bool = False

    @classmethod
    def of(cls, atom: Atom, *, active: bool) -> Facts:
        """Return the facts known from the type of an atom, and its value if it is a literal."""
        shape = getattr(atom.aval, "shape", ())
        literal = None
        if type(atom) is Literal and shape == () and is_number(atom.aval):
            literal = fill(atom.val, atom.aval.dtype)
        return cls(tuple(shape), (None,) * len(shape), active and is_float(atom.aval), literal)

    @classmethod
    def unknown(cls, shape: Sequence[Any], *, active: bool = False) -> Facts:
        """Return the facts about a value if only the logical shape is known."""
        return cls(tuple(shape), (None,) * len(shape), active)

    def joined(self, other: Facts) -> Facts:
        """Return the facts that hold for both of two values of the same shape."""
        pairs = zip(self.fills, other.fills, strict=True)
        return replace(
            self,
            fills=tuple(mine if mine == theirs else None for mine, theirs in pairs),
            active=self.active or other.active,
            varies=self.varies or other.varies,
            literal=self.literal if self.literal == other.literal else None,
        )


def fill(value: Any, dtype: Any) -> bytes:
    """Return a number as a fill. As bytes, NaN is equal to itself, and 0.0 differs from -0.0."""
    return np.asarray(value, dtype).tobytes()


def number(held: bytes, dtype: Any) -> np.ndarray:
    """Return the number of a fill, as an array of rank 0."""
    return np.frombuffer(held, dtype).reshape(())


def is_number(aval: Any) -> bool:
    """Return True for a type with a NumPy dtype, whose padding can be filled with a number."""
    dtype = getattr(aval, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype != jax.dtypes.float0


def is_float(aval: Any) -> bool:
    """Return True for a type that has derivatives."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, np.inexact)


@dataclass(frozen=True, eq=False)
class Padded:
    """An operand as it is passed to a rule.

    Attributes:
        array: The array, of the padded shape.
        facts: The facts about it; `facts.shape` is its logical shape.
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
        """True if the value may have a derivative."""
        return self.facts.active

    def fill(self, axis: int) -> np.ndarray | None:
        """Return the number that fills the padding along an axis, or None if it is unknown."""
        held = self.facts.fills[axis]
        return None if held is None else number(held, self.dtype)


@dataclass(frozen=True, eq=False)
class Filled:
    """A result of a rule with known padding.

    Attributes:
        array: The array, of the padded shape.
        fills: The number that fills the padding along some axes. None means unknown.
    """

    array: Any
    fills: dict[int, Any]


def result_facts(made: Any, shape: Sequence[Any], active: bool, varies: bool) -> tuple[Any, Facts]:
    """Return the array that a rule returned, and the facts about it.

    Args:
        made: The result of the rule: an array or a `Filled`.
        shape: Its logical shape.
        active: Whether an operand that it is computed from is active.
        varies: Whether an operand varies.
    """
    array = made.array if isinstance(made, Filled) else made
    fills = dict(made.fills) if isinstance(made, Filled) and is_number(array) else {}
    held = tuple(
        fill(fills[i], array.dtype) if fills.get(i) is not None else None for i in range(len(shape))
    )
    return array, Facts(tuple(shape), held, active and is_float(array), varies=varies)
