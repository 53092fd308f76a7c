"""The open table of rules for packed rows, and what a rule is given to work with.

    @rule("ragged", "my_primitive")
    def _(ragging, eqn, x):
        return ragging.bind(eqn, x)

A rule computes on operands as they are held (`Shared`, `Lanes` or `Packed`, see `values`), with
JAX's functions, what an equation computes in each lane, and returns its results: one with a ragged
axis packed, at the same place, any other by lanes. It may return None: then all lanes are padded,
and the masking rule of the primitive is applied to each.

What is in rows that belong to no lane may not reach a result. A rule that gives such rows makes
them equal to the first: see `Ragging.spared`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.equations import named
from jaxprtool.ir.ragged import row_places
from jaxprtool.ir.rules import RuleTable
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mask.sizes import computed
from jaxprtool.passes.ragged.values import Lanes, Sizes, Value

#: `rule(ragging, eqn, *operands) -> result`, or a sequence of results if the primitive has several.
RaggedRule = Callable[..., Any]

#: The open table of rules by primitive.
ragged_rules: RuleTable[RaggedRule] = RuleTable()

#: What is computed of a size once in each body, and given to the templates that use it.
FACTS = ("value", "lengths", "starts", "examples", "lanes", "positions")


class Ragging:
    """What a rule asks while it is traced: lengths, and where rows are.

    Attributes:
        sizes: The sizes of the program.
    """

    def __init__(
        self, sizes: Sizes, symbols: Mapping[str, Any], known: dict[tuple[str, Any], Any]
    ) -> None:
        self.sizes = sizes
        self._symbols = symbols
        self._known = known

    # --- sizes ----------------------------------------------------------------------------------

    def symbol(self, name: str) -> Any:
        """Return the value of a ragged symbol in each lane: `i32[B]`."""
        return self._symbols[name]

    def fact(self, what: str, size: Any) -> Any:
        """Return one of `FACTS` of a size."""
        if (what, size) not in self._known:
            self._known[what, size] = getattr(self, f"_{what}")(size)
        return self._known[what, size]

    def value(self, size: Any) -> Any:
        """Return the value of a size in each lane: `i32[B]`. It may be negative, as `n - 1`."""
        return self.fact("value", size)

    def lengths(self, size: Any) -> Any:
        """Return the number of rows of each lane: `i32[B]`."""
        return self.fact("lengths", size)

    def starts(self, size: Any) -> Any:
        """Return the first row of each lane: `i32[B]`."""
        return self.fact("starts", size)

    def examples(self, size: Any) -> Any:
        """Return the lane of each row, the number of lanes for a row left over: `i32[N]`."""
        return self.fact("examples", size)

    def lanes(self, size: Any) -> Any:
        """Return the lane of each row, that of the first row for one left over: `i32[N]`."""
        return self.fact("lanes", size)

    def positions(self, size: Any) -> Any:
        """Return which of its lane's rows each row is: `i32[N]`."""
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
        return row_places(self.lengths(size), self.sizes.count(size)).examples

    def _lanes(self, size: Any) -> Any:
        examples = self.examples(size)
        if self.sizes.is_exact(size):
            return examples
        return jnp.minimum(self.spared(examples, 0, size), self.sizes.lanes - 1)

    def _positions(self, size: Any) -> Any:
        numbers = jnp.arange(self.sizes.count(size), dtype=jnp.int32)
        return self.spared(numbers - self.at_rows(self.starts(size), size), 0, size)

    # --- rows -----------------------------------------------------------------------------------

    def real(self, size: Any) -> Any:
        """Return which rows belong to a lane: `bool[N]`."""
        return self.examples(size) < self.sizes.lanes

    def spared(self, array: Any, axis: int, size: Any) -> Any:
        """Return packed rows with those that belong to no lane made equal to the first."""
        if self.sizes.is_exact(size):
            return array
        return select(self.real(size), axis, array, lax.slice_in_dim(array, 0, 1, axis=axis))

    def at_rows(self, array: Any, size: Any) -> Any:
        """Return a value of each lane at each of its rows: `[B, ...]` to `[N, ...]`."""
        return taken(array, self.lanes(size))

    def along(self, x: Value, shape: tuple[Any, ...], axis: int) -> Any:
        """Return the array of a value that is broadcast to packed ones, in an elementwise equation.

        Args:
            x: The value, of rank 0, or of size 1 along the ragged axis.
            shape: The shape of the result in one lane.
            axis: The ragged axis of the result; the first if it has two.
        """
        if not isinstance(x.kind, Lanes):
            return x.array
        rows = self.at_rows(x.array, shape[axis])
        if x.shape:
            return jnp.moveaxis(jnp.squeeze(rows, axis + 1), 0, axis)
        whole = self.sizes.shape(self.sizes.held(shape), shape)
        return lax.broadcast_in_dim(rows, whole, (axis,))

    # --- equations ------------------------------------------------------------------------------

    def bind(self, eqn: JaxprEqn, *operands: Any, **params: Any) -> Any:
        """Return what an equation's primitive gives for arrays, with packed sizes in parameters.

        Args:
            eqn: The equation.
            operands: Arrays, or values, whose arrays are meant.
            params: Parameters that take the place of the equation's own.
        """
        arrays = [x.array if isinstance(x, Value) else x for x in operands]
        own = {name: self._packed(value) for name, value in eqn.params.items()}
        return eqn.primitive.bind(*arrays, **{**own, **params})

    def _packed(self, value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(self._packed, value))
        return self.sizes.count(value) if jaxcompat.is_symbolic_dimension(value) else value


def taken(array: Any, indices: Any, axis: int = 0) -> Any:
    """Return elements along an axis, at indices from 0 that may lie beyond it.

    If there are none, as in a batch of no examples, they are zeros.
    """
    array = jnp.asarray(array)
    if array.shape[axis] == 0:
        return jnp.zeros(
            (*array.shape[:axis], *indices.shape, *array.shape[axis + 1 :]), array.dtype
        )
    where = (*(slice(None),) * axis, indices)
    return array.at[where].get(mode="clip", wrap_negative_indices=False)


def select(mask: Any, axis: int, array: Any, other: Any) -> Any:
    """Return an array, and another, or a number, where a mask along an axis is False."""
    within = lax.broadcast_in_dim(mask, array.shape, (axis,))
    return lax.select(within, array, jnp.broadcast_to(other, array.shape).astype(array.dtype))


def refusal(eqn: JaxprEqn, reason: str, hint: str | None = None) -> UnsupportedError:
    """Return the error for an equation that cannot be done for lanes of different length."""
    return UnsupportedError(f"{named(eqn)} cannot be done by lanes: {reason}", hint)
