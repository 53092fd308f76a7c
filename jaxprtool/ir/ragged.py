"""`Ragged`: a batch of examples of different lengths, concatenated in one array.

    batch = Ragged.of([x0, x1, x2])                 # f32[3,8], f32[0,8], f32[5,8]
    batch.values, batch.lengths                     # f32[8,8], i32[3]: 3, 0, 5

It is a pytree, so `jax.jit` accepts it, and `jaxprtool.vmap` maps over its examples. There may be
spare rows after the last example (`Ragged.of(..., rows=64)`), which belong to none. With them,
batches of different lengths have the same shape, and are compiled once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxprtool.errors import ArgumentsError
from jaxprtool.ir.symbols import MOST, LengthsBound
from jaxprtool.jaxcompat import Aval

#: A repr lists at most this many lengths. If there are more, it shows their range.
_SHOWN = 8


class Ragged:
    """A batch of examples that differ in their number of rows alone.

    Attributes:
        values: The rows of all examples, one after the other: `f32[N,d]`.
        lengths: The number of rows of each example: `i32[B]`.
        axis: The name of the size that varies. Two batches with the same name have equal lengths.
        longest: The maximum number of rows of an example; None if unknown. Where a function pads
            examples, it pads them to this size. Traced lengths are not checked: if an example has
            more rows, the excess is cut off where it is padded.
        shortest: The minimum number of rows of an example. A function such as a next-token loss,
            which compares `tokens[:-1]` with `tokens[1:]`, can only be traced for 2 or more.
        full: Whether it is known that there are no spare rows. It is False if the lengths are
            traced.

    Raises:
        ArgumentsError: If the lengths are not a vector of integers of at least 0 whose sum is the
            number of rows. Traced lengths are not checked.
    """

    __slots__ = ("axis", "full", "lengths", "longest", "shortest", "values")

    values: Any
    lengths: Any
    axis: str
    longest: int | None
    full: bool
    shortest: int

    def __init__(
        self,
        values: Any,
        lengths: Any,
        axis: str = "n",
        longest: int | None = None,
        shortest: int = 0,
    ) -> None:
        values, lengths = _array("values", values), _array("lengths", lengths)
        longest, shortest = _checked_options("Ragged", axis, longest, shortest)
        if values.ndim == 0:
            raise ArgumentsError(f"Ragged: values {_type_of(values)} have no rows")
        if lengths.ndim != 1 or not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise ArgumentsError(
                f"Ragged: lengths must be i32[B], one for each example, not {_type_of(lengths)}"
            )
        concrete = known_array(lengths)
        if concrete is not None and isinstance(values.shape[0], int):
            _check_lengths(concrete, values.shape[0], longest, shortest)
        self._set(values, lengths, axis, longest, concrete is not None, shortest)

    def _set(
        self,
        values: Any,
        lengths: Any,
        axis: str,
        longest: int | None,
        full: bool,
        shortest: int,
    ) -> None:
        self.values, self.lengths = values, lengths
        self.axis, self.longest, self.full, self.shortest = axis, longest, full, shortest

    @classmethod
    def of(
        cls,
        examples: Sequence[Any],
        axis: str = "n",
        rows: int | None = None,
        longest: int | None = None,
        shortest: int = 0,
    ) -> Ragged:
        """Concatenate examples.

        Args:
            examples: Arrays of the same dtype, and of the same shape except for the number of rows.
            axis: The name of the size that varies.
            rows: The number of rows of `values`. Spare rows are zero. By default there are none.
            longest: The maximum number of rows of an example.
            shortest: The minimum number of rows of an example.

        Returns:
            The batch. It holds NumPy arrays if all examples are NumPy arrays.

        Raises:
            ArgumentsError: If there are no examples, their types differ, one is longer than
                `longest` or shorter than `shortest`, or `rows` is less than their sum.
        """
        longest, shortest = _checked_options("Ragged.of", axis, longest, shortest)
        if not isinstance(examples, Iterable):
            raise ArgumentsError(
                f"Ragged.of: examples must be a sequence of arrays, not {examples!r}"
            )
        arrays = [_array(f"example {i}", example) for i, example in enumerate(examples)]
        if not arrays:
            raise ArgumentsError("Ragged.of: examples must have at least one element")
        for i, array in enumerate(arrays):
            first = arrays[0]
            same = array.shape[1:] == first.shape[1:] and array.dtype == first.dtype
            if array.ndim == 0:
                raise ArgumentsError(
                    f"Ragged.of: example {i} is {_type_of(array)}, which has no rows"
                )
            if not same:
                raise ArgumentsError(
                    f"Ragged.of: example {i} is {_type_of(array)}, but example 0 is "
                    f"{_type_of(first)}: examples may differ only in their number of rows"
                )
        lengths = np.array([array.shape[0] for array in arrays], np.int32)
        total = int(lengths.sum())
        rows = None if rows is None else _whole("Ragged.of: rows", rows, 0)
        if rows is not None and rows < total:
            raise ArgumentsError(f"Ragged.of: rows={rows}, but the examples have {total}")
        _check_lengths(lengths, total, longest, shortest)
        left = 0 if rows is None else rows - total
        numpy = np if all(isinstance(array, np.ndarray) for array in arrays) else jnp
        over = [numpy.zeros((left, *arrays[0].shape[1:]), arrays[0].dtype)] if left else []
        values = numpy.concatenate([*arrays, *over])
        return unchecked(values, lengths, axis, longest, left == 0, shortest)

    def padded(self, size: int | None = None) -> Any:
        """Return the examples padded with zeros: `f32[B,size,d]`.

        Args:
            size: The number of rows to pad to. By default that of the longest example.

        Raises:
            ArgumentsError: If an example is longer, or `size` is None and the lengths are traced.
        """
        concrete = known_array(self.lengths)
        if size is None and concrete is None:
            raise ArgumentsError("Ragged.padded: the lengths are traced, so the size must be given")
        size = None if size is None else _whole("Ragged.padded: size", size, 0)
        most = 0 if concrete is None else int(concrete.max(initial=0))
        size = most if size is None else size
        if most > size:
            raise ArgumentsError(f"Ragged.padded: size={size}, but an example has {most} rows")
        starts = jnp.cumsum(self.lengths) - self.lengths
        positions = jnp.arange(size)
        rows = starts[:, None] + positions
        real = positions < self.lengths[:, None]
        taken = jnp.asarray(self.values).at[rows].get(mode="fill", fill_value=0)
        return jnp.where(real.reshape(*real.shape, *(1,) * (taken.ndim - 2)), taken, 0)

    def __len__(self) -> int:
        return int(self.lengths.shape[0])

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, number: int) -> Any:
        """Return the rows of one example.

        Raises:
            IndexError: If there is no such example.
            ArgumentsError: If the lengths are traced.
        """
        lengths = known_array(self.lengths)
        if lengths is None:
            raise ArgumentsError("Ragged: the lengths are traced, so no example can be selected")
        length, start = lengths[number], lengths[: number % len(lengths)].sum()
        return self.values[int(start) : int(start + length)]

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise TypeError(
            "a Ragged is not an array: use `.values` for its rows, or `.padded()` for a padded "
            "array"
        )

    def __repr__(self) -> str:
        lengths = _type_of(self.lengths)
        if (concrete := known_array(self.lengths)) is not None:
            numbers = concrete.tolist()
            few = len(numbers) <= _SHOWN
            lengths = str(numbers) if few else f"{lengths} of {min(numbers)} to {max(numbers)}"
        bounds = "" if self.longest is None else f", longest={self.longest}"
        bounds += f", shortest={self.shortest}" if self.shortest else ""
        return f"Ragged({_type_of(self.values)}, lengths={lengths}, axis={self.axis!r}{bounds})"


def unchecked(
    values: Any, lengths: Any, axis: str, longest: int | None, full: bool, shortest: int = 0
) -> Ragged:
    """Return a Ragged without checking its parts, which need not be arrays."""
    ragged = object.__new__(Ragged)
    ragged._set(values, lengths, axis, longest, full, shortest)
    return ragged


# Unflatten without checks: JAX also makes trees of None, types, and its own markers.
jax.tree_util.register_pytree_with_keys(
    Ragged,
    lambda ragged: (
        [
            (jax.tree_util.GetAttrKey("values"), ragged.values),
            (jax.tree_util.GetAttrKey("lengths"), ragged.lengths),
        ],
        (ragged.axis, ragged.longest, ragged.full, ragged.shortest),
    ),
    lambda aux, children: unchecked(*children, *aux),
    lambda ragged: (
        (ragged.values, ragged.lengths),
        (ragged.axis, ragged.longest, ragged.full, ragged.shortest),
    ),
)


def ragged_parts(value: Any) -> tuple[Any, Any] | None:
    """Return the values and lengths of a Ragged, or of a dict of both, as it is read from a file.

    Returns:
        The values and the lengths; None for any other value.

    Raises:
        ArgumentsError: If in a dict the values are not an array, or the lengths are neither an
            array nor a list of integers.
    """
    if isinstance(value, Ragged):
        return value.values, value.lengths
    if not (isinstance(value, dict) and value.keys() == {"values", "lengths"}):
        return None
    parts = {"values": value["values"], "lengths": written_lengths(value["lengths"])}
    for name, part in parts.items():
        if not hasattr(part, "shape"):
            raise ArgumentsError(
                f"{name} of examples of different lengths is not an array, but "
                f"{type(part).__name__}"
            )
    return parts["values"], parts["lengths"]


def written_lengths(value: Any) -> Any:
    """Convert lengths in a list or tuple, `[3, 5]`, to an array. Return others as they are.

    Raises:
        ArgumentsError: If an item of the list is not an integer.
    """
    if type(value) not in (list, tuple):
        return value
    if not all(isinstance(n, int | np.integer) and abs(int(n)) <= MOST for n in value):
        shown = ", ".join(map(str, value[:_SHOWN])) + ", …" * (len(value) > _SHOWN)
        raise ArgumentsError(f"lengths must be whole numbers of rows, not [{shown}]")
    return np.asarray(value, np.int32)


def bounds_of_lengths(
    arguments: object, avals: Sequence[Aval]
) -> Iterator[tuple[int, LengthsBound]]:
    """Yield the index of each flat argument that is the lengths of a Ragged, and its bound.

    Args:
        arguments: A tree of arguments.
        avals: The types of the flat arguments.
    """
    place = 0
    for node in jax.tree.leaves(arguments, is_leaf=lambda node: isinstance(node, Ragged)):
        parts = jax.tree.leaves(node)
        if isinstance(node, Ragged) and len(parts) == 2:
            values, lengths = avals[place : place + 2]
            # Both may have leading axes, over which `jax.vmap` maps.
            rows = values.shape[len(lengths.shape) - 1]
            yield place + 1, LengthsBound(rows, node.longest, not node.full, node.shortest)
        place += len(parts)


class RowPositions(NamedTuple):
    """The example and the position of each row.

    Attributes:
        examples: The index of the example of each row, and B for a spare row: `i32[N]`.
        positions: The position of each row in its example: `i32[N]`.
    """

    examples: Any
    positions: Any


def row_positions(lengths: Any, rows: Any) -> RowPositions:
    """Return the places of `rows` packed rows, for examples of these lengths."""
    lengths = jnp.asarray(lengths)
    ends = lax.cumsum(lengths)
    # The example of a row is the number of examples that end at or before it. `segment_sum` drops
    # the ends beyond the last row.
    ended = jax.ops.segment_sum(jnp.ones_like(ends), ends, rows, indices_are_sorted=True)
    examples = lax.cumsum(ended)
    starts = lax.concatenate([jnp.zeros(1, ends.dtype), ends], 0)
    numbers = lax.iota(lengths.dtype, rows)
    return RowPositions(
        examples, numbers - starts.at[examples].get(mode="clip", wrap_negative_indices=False)
    )


def known_array(value: Any) -> np.ndarray | None:
    """Return an array that is not traced as a NumPy array, or None.

    Operations on JAX arrays are traced by `jax.jit` even if their values are known.
    """
    if isinstance(value, jax.core.Tracer) or not isinstance(value, np.ndarray | jax.Array):
        return None
    return np.asarray(value)


def _array(what: str, value: Any) -> Any:
    """Convert a value to a NumPy array, unless it is an array already."""
    if isinstance(value, Ragged):
        raise ArgumentsError(f"Ragged: {what} must be an array, not a Ragged")
    if isinstance(value, jax.Array | np.ndarray):
        return value
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        array = np.array(None)
    if not jnp.issubdtype(array.dtype, jnp.number) and array.dtype != bool:
        raise ArgumentsError(f"Ragged: {what} must be an array, not {type(value).__name__}")
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))


def _checked_options(
    what: str, axis: object, longest: object, shortest: object
) -> tuple[int | None, int]:
    """Check the options of a Ragged, and return `longest` and `shortest` as integers."""
    if not (isinstance(axis, str) and axis.isidentifier()):
        raise ArgumentsError(f"{what}: axis must be an identifier, not {axis!r}")
    least = _whole(f"{what}: shortest", shortest, 0)
    most = None if longest is None else _whole(f"{what}: longest", longest, 1)
    if most is not None and most < least:
        raise ArgumentsError(f"{what}: shortest={least} is more than longest={most}")
    return most, least


def _whole(what: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ArgumentsError(f"{what} must be an integer of at least {least}, not {value!r}")
    return number


def _check_lengths(lengths: np.ndarray, rows: Any, longest: int | None, shortest: int) -> None:
    total = int(lengths.sum())
    if (lengths < 0).any():
        raise ArgumentsError(f"Ragged: lengths[{int(lengths.argmin())}] is {lengths.min()}")
    if total != rows:
        raise ArgumentsError(
            f"Ragged: lengths add up to {total}, but values have {rows} rows",
            "Ragged.of(examples, rows=...) adds spare rows" if total < rows else None,
        )
    if longest is not None and (lengths > longest).any():
        raise ArgumentsError(
            f"Ragged: lengths[{int(lengths.argmax())}] is {lengths.max()}, but longest={longest}"
        )
    if (lengths < shortest).any():
        raise ArgumentsError(
            f"Ragged: lengths[{int(lengths.argmin())}] is {lengths.min()}, but shortest={shortest}"
        )


def _type_of(value: Any) -> str:
    """Return the type of a value, or its repr if it has none: a pytree may hold anything."""
    try:
        return str(jax.typeof(value).str_short(short_dtypes=True))
    except TypeError:
        return repr(value)
