"""The open table of rules for packed rows, and the context argument of rules.

    @rule("ragged", "my_primitive")
    def _(context, eqn, x):
        return context.bind(eqn, x)

A rule applies an equation to all examples, with JAX's functions. Its operands are `Shared`,
`Batched` or `Packed` values (see `values`). A result with a ragged axis is returned packed along
the same axis, any other result by examples, `[B, ...]`. If the rule returns None, the operands are
padded, and the masking rule of the primitive is applied to each example.

Spare rows may not influence a result. A rule whose results have spare rows must make them equal to
the first row, with `RaggedContext.spared`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.basics.rules import RuleTable
from jaxprtool.ir.core.equations import named
from jaxprtool.ir.core.weak_types import as_weak_as
from jaxprtool.ir.shapes.ragged import row_positions
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mapping.domains.rules import RuleContext
from jaxprtool.passes.mapping.mask.sizes import computed
from jaxprtool.passes.mapping.ragged.values import Batched, Sizes, Value

#: `rule(context, eqn, *operands) -> result`, or a sequence of results if the primitive has several.
RaggedRule = Callable[..., Any]

#: The open table of rules by primitive.
ragged_rules: RuleTable[RaggedRule] = RuleTable()

#: The facts about a size, in the order in which they are computed from each other.
FACTS = ("value", "lengths", "starts", "examples", "batch_indices", "positions")


class RaggedContext(RuleContext):
    """The context of a rule while it is traced: the lengths of examples and the positions of rows.

    In the shapes below, B is the number of examples, and N is the number of packed rows of a size.

    Attributes:
        sizes: The sizes of the program.
    """

    operand = Value

    def __init__(
        self, sizes: Sizes, symbols: Mapping[str, Any], known: dict[tuple[str, Any], Any]
    ) -> None:
        super().__init__(symbols, known)
        self.sizes = sizes

    # --- sizes ----------------------------------------------------------------------------------

    def symbol(self, name: str) -> Any:
        """Return the value of a ragged symbol in each example: `i32[B]`."""
        return self._symbols[name]

    def held_size(self, size: Any) -> Any:
        return self.sizes.count(size) if jaxcompat.is_symbolic_dimension(size) else size

    def value(self, size: Any) -> Any:
        """Return the value of a size in each example: `i32[B]`. That of `n - 1` may be negative."""
        return self.fact("value", size)

    def lengths(self, size: Any) -> Any:
        """Return the number of rows of each example: `i32[B]`."""
        return self.fact("lengths", size)

    def starts(self, size: Any) -> Any:
        """Return the index of the first row of each example: `i32[B]`."""
        return self.fact("starts", size)

    def examples(self, size: Any) -> Any:
        """Return the example of each row, and B for a spare row: `i32[N]`."""
        return self.fact("examples", size)

    def batch_indices(self, size: Any) -> Any:
        """Return the example of each row, and that of the first row for a spare row: `i32[N]`."""
        return self.fact("batch_indices", size)

    def positions(self, size: Any) -> Any:
        """Return the position of each row in its example, from 0: `i32[N]`."""
        return self.fact("positions", size)

    def _value(self, size: Any) -> Any:
        names = self.sizes.names(size)

        def one(*values: Any) -> Any:
            return jnp.asarray(computed(size, dict(zip(names, values, strict=True))), jnp.int32)

        return jax.vmap(one)(*(self._symbols[name] for name in names))

    def _lengths(self, size: Any) -> Any:
        return jnp.maximum(self.value(size), 0)

    def _starts(self, size: Any) -> Any:
        return lax.cumsum(self.lengths(size)) - self.lengths(size)

    def _examples(self, size: Any) -> Any:
        return row_positions(self.lengths(size), self.sizes.count(size)).examples

    def _batch_indices(self, size: Any) -> Any:
        examples = self.examples(size)
        if self.sizes.is_exact(size):
            return examples
        return jnp.minimum(self.spared(examples, 0, size), self.sizes.batch_size - 1)

    def _positions(self, size: Any) -> Any:
        numbers = jnp.arange(self.sizes.count(size), dtype=jnp.int32)
        return self.spared(numbers - self.at_rows(self.starts(size), size), 0, size)

    # --- rows -----------------------------------------------------------------------------------

    def real(self, size: Any) -> Any:
        """Return True for each row that belongs to an example, and is not spare: `bool[N]`."""
        return self.examples(size) < self.sizes.batch_size

    def spared(self, array: Any, axis: int, size: Any) -> Any:
        """Return packed rows, with the spare ones made equal to the first."""
        if self.sizes.is_exact(size):
            return array
        return select(self.real(size), axis, array, lax.slice_in_dim(array, 0, 1, axis=axis))

    def at_rows(self, array: Any, size: Any) -> Any:
        """Return the value of its example for each row: `[B, ...]` to `[N, ...]`."""
        return taken(array, self.batch_indices(size))

    def along(self, x: Value, shape: tuple[Any, ...], axis: int) -> Any:
        """Return an operand of an elementwise equation as an array that fits packed operands.

        Args:
            x: The operand. If batched, it is a scalar, or has size 1 along the ragged axis.
            shape: The shape of the result in one example.
            axis: The ragged axis of the result, the first one if it has two.
        """
        if not isinstance(x.kind, Batched):
            return x.array
        rows = self.at_rows(x.array, shape[axis])
        if x.shape:
            return jnp.moveaxis(jnp.squeeze(rows, axis + 1), 0, axis)
        whole = self.sizes.shape(self.sizes.held(shape), shape)
        return lax.broadcast_in_dim(rows, whole, (axis,))


def taken(array: Any, indices: Any, axis: int = 0) -> Any:
    """Return the elements at indices along an axis. Indices out of bounds are clipped.

    Along an axis of size 0, as in a batch of no examples, the result is zeros.
    """
    array = jnp.asarray(array)
    if array.shape[axis] == 0:
        return jnp.zeros(
            (*array.shape[:axis], *indices.shape, *array.shape[axis + 1 :]), array.dtype
        )
    where = (*(slice(None),) * axis, indices)
    return array.at[where].get(mode="clip", wrap_negative_indices=False)


def select(mask: Any, axis: int, array: Any, other: Any) -> Any:
    """Return `array` where a mask along an axis is True, and `other` elsewhere.

    Args:
        mask: A vector, for the elements along the axis.
        axis: The axis of `array`.
        array: The array.
        other: An array or a number that is broadcast to the shape of `array`.
    """
    within = lax.broadcast_in_dim(mask, array.shape, (axis,))
    other = jnp.broadcast_to(other, array.shape).astype(array.dtype)
    return lax.select(within, array, as_weak_as(other, jax.typeof(array)))


def broadcast_unsorted(array: Any, shape: Sequence[Any], dims: Sequence[int]) -> Any:
    """Return `lax.broadcast_in_dim(array, shape, dims)`, where `dims` need not be sorted."""
    order = sorted(range(len(dims)), key=lambda i: dims[i])
    return lax.broadcast_in_dim(jnp.transpose(array, order), shape, sorted(dims))


def refusal(eqn: JaxprEqn, reason: str, hint: str | None = None) -> UnsupportedError:
    """Return the error for an equation that cannot be computed for examples of several lengths."""
    return UnsupportedError(f"{named(eqn)} cannot be made ragged: {reason}", hint)
