"""The open table of masking rules, and the context argument of rules.

    @rule(mask_rules, "my_primitive")
    def _(context, eqn, x):
        x = context.filled(x, {0: 0.0})
        return context.bind(eqn, x)

A rule takes padded operands and returns padded results, computed with JAX's functions. Each result
is an array of the padded shape, or a `Filled` if the contents of its padding are known. The padding
of a result may hold anything. The padding of an operand must not influence an element of a result.
It must not influence a derivative either, although the padding of operands and cotangents may be
NaN. An elementwise operation satisfies that as it is. A rule that combines elements along a padded
axis, or repeats them along one (its transpose sums), must use `MaskContext.apply`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.basics.rules import RuleTable
from jaxprtool.ir.core.equations import named
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mapping.domains.rules import RuleContext
from jaxprtool.passes.mapping.mask.guards import Guard, MaskedFill, mixes_iterations, with_fill
from jaxprtool.passes.mapping.mask.sizes import Bounds, computed
from jaxprtool.passes.mapping.mask.values import Facts, Padded

#: Numbers to fill the padding with, by axis.
Fills = Mapping[int, Any]

#: `rule(context, eqn, *operands) -> result`, or a sequence of results if the primitive has several.
MaskRule = Callable[..., Any]

#: The open table of rules by primitive.
mask_rules: RuleTable[MaskRule] = RuleTable()

#: The facts about a size, in the order in which they are computed from each other.
FACTS = ("size", "valid")


class MaskContext(RuleContext):
    """The context of a rule: sizes, masks, and functions that fill padding.

    Args:
        name: The name of the primitive.
        bounds: The masked symbols and their bounds.
        symbols: The value of each masked symbol: `i32[]`.
        known: The values and the masks of sizes computed so far, by `FACTS`.
        iteration: In the body of a scan of masked length, a flag that is False if the current
            iteration is padding: `bool[]`.
        in_scan: Whether the equation is in the body of a scan.
    """

    operand = Padded

    def __init__(
        self,
        name: str,
        bounds: Bounds,
        symbols: Mapping[str, Any],
        known: dict[tuple[str, Any], Any],
        iteration: Any = None,
        in_scan: bool = False,
    ) -> None:
        super().__init__(symbols, known)
        self.bounds = bounds
        self._name = name
        self._iteration = iteration
        self._in_scan = in_scan

    # --- sizes ----------------------------------------------------------------------------------

    def axes(self, x: Padded) -> tuple[int, ...]:
        """Return the padded axes of a value."""
        return self.bounds.axes(x.shape)

    def size(self, size: Any) -> Any:
        """Return the value of a logical size: an `i32[]`, or a number."""
        return self.fact("size", size) if jaxcompat.is_symbolic_dimension(size) else size

    def _size(self, size: Any) -> Any:
        return computed(size, self._symbols)

    def valid(self, size: Any) -> jax.Array:
        """Return the mask of an axis of a logical size: `bool[padded]`, False in the padding."""
        return self.fact("valid", size)

    def _valid(self, size: Any) -> jax.Array:
        return lax.iota(jnp.int32, self.bounds.padded(size)) < self.size(size)

    def held_size(self, size: Any) -> Any:
        return self.bounds.padded(size)

    # --- padding --------------------------------------------------------------------------------

    def filled(self, x: Padded, fills: Fills) -> Any:
        """Return the array of a value, with its padding along some axes filled with numbers.

        Padding that is known to hold the number already is not filled again.

        Args:
            x: The value.
            fills: The numbers, by axis. Axes without padding are ignored.

        Raises:
            ValueError: If the dtype of the value does not have such a number.
        """
        array = x.array
        for axis, value in self._needed(x, fills).items():
            _require_number(value, x.dtype)
            array = with_fill(array, axis, value, self.valid(x.shape[axis]))
        return array

    def _needed(self, x: Padded, fills: Fills) -> dict[int, Any]:
        return {
            axis: value
            for axis, value in fills.items()
            if self.bounds.is_masked(x.shape[axis]) and not _is(x.fill(axis), value, x.dtype)
        }

    def apply(
        self,
        compute: Callable[..., Any],
        operands: Sequence[Padded],
        shape: Sequence[Any],
        *,
        needed: Sequence[Fills] | None = None,
        derivative: Sequence[Fills] | None = None,
        mixed: Sequence[int] = (),
    ) -> Any:
        """Return `compute(*arrays)`, with a derivative that no padding influences.

        Args:
            compute: A function of arrays. It must not close over arrays.
            operands: Its operands.
            shape: The logical shape of its result.
            needed: For each operand, the fills that `compute` needs.
            derivative: For each operand, more fills, which only the derivative of `compute` needs:
                those of the coefficients of its transpose.
            mixed: The axes of the result over which the transpose of `compute` sums. The padding
                of the cotangent along these axes is set to 0.
        """
        needed = [{}] * len(operands) if needed is None else needed
        derivative = [{}] * len(operands) if derivative is None else derivative
        before = [self._needed(x, fills) for x, fills in zip(operands, needed, strict=True)]
        after = [
            {**self._needed(x, fills), **first}
            for x, fills, first in zip(operands, derivative, before, strict=True)
        ]
        ends = [axis for axis in mixed if self.bounds.is_masked(shape[axis])]
        mixes = self._iteration is not None and mixes_iterations([x.facts for x in operands])
        if not any(x.active for x in operands) or not (mixes or ends or after != before):
            return compute(*map(self.filled, operands, before))
        sizes = [x.shape[axis] for x, fills in zip(operands, after, strict=True) for axis in fills]
        positions = {n: i for i, n in enumerate(dict.fromkeys([*sizes, *(shape[i] for i in ends)]))}

        def placed(x: Padded, fills: Fills) -> list[MaskedFill]:
            for value in fills.values():
                _require_number(value, x.dtype)
            return [(axis, value, positions[x.shape[axis]]) for axis, value in fills.items()]

        guard = Guard(
            f"masked_{self._name}",
            compute,
            list(map(placed, operands, before)),
            list(map(placed, operands, after)),
            [(axis, positions[shape[axis]]) for axis in ends],
            [x.facts.varies for x in operands] if mixes else None,
        )
        masks = [*map(self.valid, positions), *([self._iteration] if mixes else [])]
        function = guard.safe if self._in_scan else guard.function
        return function(*(x.array for x in operands), *masks)

    def isolate_cotangent(
        self, array: Any, shape: Sequence[Any], axes: Sequence[int], *, active: bool
    ) -> Any:
        """Return the same array, with a derivative that sets the padding of the cotangent to 0.

        Args:
            array: The result of a rule.
            shape: Its logical shape.
            axes: The axes along which the padding of the cotangent would reach other elements.
            active: Whether the array may have a derivative.
        """
        x = Padded(array, Facts.unknown(shape, active=active))
        return self.apply(lambda value: value, [x], shape, mixed=axes)


def refusal(eqn: JaxprEqn, reason: str, hint: str | None = None) -> UnsupportedError:
    """Return the error for an equation that cannot be masked."""
    return UnsupportedError(f"{named(eqn)} cannot be masked: {reason}", hint)


def _is(known: np.ndarray | None, wanted: Any, dtype: Any) -> bool:
    """Return True if padding is known to hold a number. 0.0 and -0.0 count as equal."""
    if known is None or isinstance(wanted, jax.core.Tracer):
        return False
    return np.array_equal(known, np.asarray(wanted, dtype), equal_nan=True)


def _require_number(value: Any, dtype: Any) -> None:
    """Raise ValueError for a number that a dtype does not have: f8_e8m0fnu has no zero."""
    if isinstance(value, jax.core.Tracer) or value != value:
        return
    if complex(np.asarray(value, dtype)) != complex(value):
        raise ValueError(f"{np.dtype(dtype).name} has no {value} for the padding")
