"""The open table of masking rules, and what a rule is given to work with.

    @rule(mask_rules, "my_primitive")
    def _(masking, eqn, x):
        x = masking.filled(x, {0: 0.0})
        return masking.bind(eqn, x)

A rule computes on padded operands, with JAX's functions, what an equation computes on logical ones,
and returns its padded results: for each an array of the padded shape, or a `Filled` of which it
knows the padding. What is in the padding of its results does not matter, and what is in that of its
operands may not reach an element that is not padding.

Neither may it reach one of a derivative, where padding of an operand is NaN, or that of the
cotangent of a result. In an elementwise operation it does not. Where a rule brings elements
together along a padded axis, or repeats them along one (which is summed over when it is
transposed), it says so: see `Masking.apply`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.equations import named
from jaxprtool.ir.rules import RuleTable
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mask.sizes import Bounds, computed
from jaxprtool.passes.mask.values import Facts, Padded

#: Numbers to fill the padding with, by axis.
Fills = Mapping[int, Any]

#: `rule(masking, eqn, *operands) -> result`, or a sequence of results if the primitive has several.
MaskRule = Callable[..., Any]

#: What is done to the operand of a number, with masks at hand.
Step = Callable[[int, Any, Sequence[Any]], Any]

#: The open table of rules by primitive.
mask_rules: RuleTable[MaskRule] = RuleTable()


class Masking:
    """What a rule asks while it is traced: sizes, masks, and padding that is filled.

    Args:
        name: The name of the primitive whose rule it is.
        bounds: The masked symbols and their bounds.
        symbols: The value of each masked symbol.
        sizes: The values of sizes, as far as they have been computed.
        valid: The masks of sizes, as far as they have been computed.
        round: In the body of a scan of masked length, whether the round is no padding.
        in_scan: True in the body of a scan.
    """

    def __init__(
        self,
        name: str,
        bounds: Bounds,
        symbols: Mapping[str, Any],
        sizes: dict[Any, Any],
        valid: dict[Any, Any],
        round: Any = None,
        in_scan: bool = False,
    ) -> None:
        self.bounds = bounds
        self._name = name
        self._symbols = symbols
        self._sizes = sizes
        self._valid = valid
        self._round = round
        self._in_scan = in_scan

    # --- sizes ----------------------------------------------------------------------------------

    def axes(self, x: Padded) -> tuple[int, ...]:
        """Return the axes along which a value is padded."""
        return self.bounds.axes(x.shape)

    def size(self, size: Any) -> Any:
        """Return the value of a logical size: an `i32[]`, or a number."""
        if not jaxcompat.is_symbolic_dimension(size):
            return size
        if size not in self._sizes:
            self._sizes[size] = computed(size, self._symbols)
        return self._sizes[size]

    def valid(self, size: Any) -> jax.Array:
        """Return the mask of an axis of this logical size: `bool[padded]`, True in front."""
        if size not in self._valid:
            numbers = lax.iota(jnp.int32, self.bounds.padded(size))
            self._valid[size] = numbers < self.size(size)
        return self._valid[size]

    # --- padding --------------------------------------------------------------------------------

    def filled(self, x: Padded, fills: Fills) -> Any:
        """Return the array of a value with numbers in the padding along some axes.

        Nothing is computed for padding that is known to hold them.

        Args:
            x: The value.
            fills: The numbers, by axis. Axes without padding are left out.
        """
        needed = self._needed(x, fills)
        return _with_fills(x.array, needed, [self.valid(x.shape[axis]) for axis in needed])

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
        """Return `compute(*arrays)`, whose derivative keeps what is in padding apart.

        Args:
            compute: A function of arrays, which closes over none.
            operands: Its operands.
            shape: The logical shape of its result.
            needed: For each operand, what its padding is filled with before.
            derivative: For each operand, what its padding is filled with where the derivative of
                `compute` is taken: the coefficients of its transpose. Axes in `needed` are too.
            mixed: The axes of the result over which the transpose sums: a cotangent's padding
                along these is made 0 before.
        """
        needed = [{}] * len(operands) if needed is None else needed
        derivative = [{}] * len(operands) if derivative is None else derivative
        before = [self._needed(x, fills) for x, fills in zip(operands, needed, strict=True)]
        after = [
            {**self._needed(x, fills), **first}
            for x, fills, first in zip(operands, derivative, before, strict=True)
        ]
        mixed_axes = [axis for axis in mixed if self.bounds.is_masked(shape[axis])]
        active = any(x.active for x in operands)
        in_rounds = self._round is not None and mixes_rounds([x.facts for x in operands])
        guards = active and (in_rounds or bool(mixed_axes) or after != before)
        used = after if guards else before
        sizes = [x.shape[axis] for x, fills in zip(operands, used, strict=True) for axis in fills]
        sizes += [shape[axis] for axis in mixed_axes] if guards else []
        places = {size: i for i, size in enumerate(dict.fromkeys(sizes))}

        def filled(fills: Sequence[Fills]) -> Step:
            def fill(i: int, array: Any, masks: Sequence[Any]) -> Any:
                shape, each = operands[i].shape, fills[i]
                return _with_fills(array, each, [masks[places[shape[axis]]] for axis in each])

            return fill

        def point(i: int, array: Any, masks: Sequence[Any]) -> Any:
            array = filled(after)(i, array, masks)
            return _or_zeros(masks[-1], array) if in_rounds and operands[i].facts.varies else array

        def end(array: Any, other: Any, masks: Sequence[Any]) -> Any:
            for axis in mixed_axes:
                within = lax.broadcast_in_dim(masks[places[shape[axis]]], array.shape, (axis,))
                array = lax.select(within, array, other)
            return lax.select(masks[-1], array, other) if in_rounds else array

        arrays = [x.array for x in operands]
        masks = [self.valid(size) for size in places]
        if not guards:
            return compute(*(filled(before)(i, x, masks) for i, x in enumerate(arrays)))
        guarded = _Guarded(f"masked_{self._name}", compute, len(arrays), filled(before), point, end)
        function = guarded.safe if self._in_scan else guarded.function
        return function(*arrays, *masks, *([self._round] if in_rounds else []))

    def apart(self, array: Any, shape: Sequence[Any], axes: Sequence[int], *, active: bool) -> Any:
        """Return an array as it is, but for its cotangent, whose padding is made 0.

        Args:
            array: What a rule has computed.
            shape: Its logical shape.
            axes: The axes along which the padding of a cotangent would reach what is no padding.
            active: True if it may have a derivative.
        """
        x = Padded(array, Facts.unknown(shape, active=active))
        return self.apply(lambda value: value, [x], shape, mixed=axes)

    def bind(self, eqn: JaxprEqn, *operands: Any, **params: Any) -> Any:
        """Return what an equation's primitive gives for arrays, with padded sizes in parameters.

        Args:
            eqn: The equation.
            operands: Arrays, or padded values, whose arrays are meant.
            params: Parameters that take the place of the equation's own.
        """
        arrays = [x.array if isinstance(x, Padded) else x for x in operands]
        return eqn.primitive.bind(*arrays, **{**self.params(eqn), **params})

    def params(self, eqn: JaxprEqn) -> dict[str, Any]:
        """Return the parameters of an equation, each size in them padded."""
        return {name: self._padded(value) for name, value in eqn.params.items()}

    def _padded(self, value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(self._padded, value))
        return self.bounds.padded(value)


def refusal(eqn: JaxprEqn, reason: str, hint: str | None = None) -> UnsupportedError:
    """Return the error for an equation that cannot be masked, which it names."""
    return UnsupportedError(f"{named(eqn)} cannot be masked: {reason}", hint)


def _is(known: np.ndarray | None, wanted: Any, dtype: Any) -> bool:
    """Return True if padding is known to hold a number. 0.0 and -0.0 are the same to a sum."""
    if known is None or isinstance(wanted, jax.core.Tracer):
        return False
    return np.array_equal(known, np.asarray(wanted, dtype), equal_nan=True)


def mixes_rounds(facts: Sequence[Facts]) -> bool:
    """Return True for operands of which some differ between rounds, and others have a derivative.

    That derivative is summed over the rounds.
    """
    return any(each.varies for each in facts) and any(
        each.active and not each.varies for each in facts
    )


def _or_zeros(flag: Any, array: Any) -> Any:
    """Return an array, or zeros where a flag is False."""
    return lax.select(flag, array, lax.full_like(array, 0))


def guarded(flag: Any, array: Any) -> Any:
    """Return an array whose derivative is zero where a flag is False."""
    return lax.select(flag, array, lax.stop_gradient(array))


def _with_fills(array: Any, fills: Fills, masks: Sequence[Any]) -> Any:
    """Return an array with numbers where the mask along an axis is False, axis by axis."""
    for (axis, value), mask in zip(fills.items(), masks, strict=True):
        within = lax.broadcast_in_dim(mask, array.shape, (axis,))
        array = lax.select(within, array, lax.full_like(array, value))
    return array


@dataclass(frozen=True)
class _Guarded:
    """A function of arrays whose derivatives, of any order, keep what is in padding apart.

    Derivatives are those of `safe`, which is made of selections alone. A rule of a custom
    derivative would not do for the higher ones, nor in a scan: JAX forgets it where it
    differentiates a scan in reverse.

    Attributes:
        name: The name of the function.
        compute: What is computed of operands.
        count: How many operands there are; masks follow.
        before: Fills padding of an operand.
        point: Fills padding of an operand where the derivative is taken.
        end: Gives of two arrays the first, in its padding the second.
    """

    name: str
    compute: Callable[..., Any]
    count: int
    before: Step
    point: Step
    end: Callable[[Any, Any, Sequence[Any]], Any]

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The function of the operands and the masks."""
        guarded = jax.custom_jvp(self._value)
        guarded.defjvp(self._derivative, symbolic_zeros=True)
        return guarded

    @property
    def __name__(self) -> str:
        return self.name

    def _value(self, *args: Any) -> Any:
        masks = args[self.count :]
        return self.compute(*(self.before(i, x, masks) for i, x in enumerate(args[: self.count])))

    def safe(self, *args: Any) -> Any:
        """Compute the result, and with it what all its derivatives need."""
        masks = args[self.count :]
        result = self.compute(*(self.point(i, x, masks) for i, x in enumerate(args[: self.count])))
        return self.end(result, lax.stop_gradient(result), masks)

    def _derivative(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

        def of(*values: Any) -> Any:
            args = list(primals)
            for i, value in zip(moving, values, strict=True):
                args[i] = value
            return self.safe(*args)

        return jax.jvp(of, [primals[i] for i in moving], [tangents[i] for i in moving])
