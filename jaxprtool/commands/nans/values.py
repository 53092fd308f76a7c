"""Tracked values: the steps that computed them, and the states and origins of their elements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from jaxprtool.execute.running.arrays import is_on_host, plain_array
from jaxprtool.ir.dtypes import is_extended
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import AbstractRef, JaxprEqn, Literal

# --- tracked --------------------------------------------------------------------------------------
# Tracked values: the step that computed each one, and the origins of non-finite elements.


@dataclass(eq=False)
class Evaluation:
    """One execution of an equation.

    Attributes:
        eqn: The equation.
        around: The equations around it, outermost first.
        iterations: The number of the iteration of each loop around it.
        operands: Its operands; empty once dropped.
        held: Whether no operand depends on an argument.
    """

    eqn: JaxprEqn
    around: tuple[JaxprEqn, ...]
    iterations: tuple[int, ...]
    operands: Sequence[Tracked]
    held: bool = False

    @property
    def eqns(self) -> tuple[JaxprEqn, ...]:
        """The enclosing equations, followed by the equation."""
        return (*self.around, self.eqn)


@dataclass(eq=False)
class DataMovement:
    """The slicing of a loop operand into a row, or the stacking of rows into a result.

    Attributes:
        operands: The sliced value, or the stacked rows; empty once dropped.
        row: The index of the row; None for a stack.
    """

    operands: Sequence[Tracked]
    row: int | None = None


@dataclass(eq=False)
class NonfiniteOrigin:
    """The origin of a NaN or an infinity: an equation, an argument or a constant.

    Attributes:
        state: Which of the two.
        step: The step that produced it; None for an argument or a constant.
        name: The argument that contains it, or "".
        results: The results of the equation, or the argument.
        operands: The operands of the equation.
        provenance: The values from which it was computed, the nearest first.
        number: Its consecutive number.
        times: The number of executions of the equation that produced one.
        reached: The positions of the results that it reaches.
        dropped: The last equation that read a value with this origin and had finite results.
        raises: Whether the program raised an error that depends on it.
        devices: The devices of a `shard_map` on which it was produced.
        led_to: The origins that it caused, one per equation and state.
        closed: Whether no live value has it.
    """

    state: int
    step: Evaluation | None
    name: str
    results: Sequence[Tracked]
    operands: Sequence[Tracked] = ()
    provenance: Sequence[ProvenanceValue] = ()
    number: int = 0
    times: int = 1
    reached: list[int] = field(default_factory=list)
    dropped: Evaluation | None = None
    raises: bool = False
    devices: tuple[str, ...] = ()
    led_to: dict[tuple[int, int], NonfiniteOrigin] = field(default_factory=dict)
    closed: bool = False

    @property
    def held(self) -> bool:
        """Whether it is a NaN in a constant, which is intended unless it reaches a result."""
        if self.step is None:
            return not self.name
        return self.state == NAN and any(
            isinstance(x, ConstantValue) and x.has_nan for x in self.operands
        )


@dataclass(eq=False)
class Tracked:
    """A value with its step and origins.

    Attributes:
        data: The value.
        step: The step that computed it; None for an argument or a constant.
        origins: The origins of its non-finite elements.
        name: The argument that it is or is a row of, or "".
        position: Its index among the step's results.
        moved: For a row or a stack, the move; `step` and `name` are then those of the source.
    """

    data: Any
    step: Evaluation | None = None
    origins: tuple[NonfiniteOrigin, ...] = ()
    name: str = ""
    position: int = 0
    moved: DataMovement | None = None

    @cached_property
    def state(self) -> int:
        """Its state: the kinds of non-finite elements."""
        return state_of(self.data)

    @property
    def held(self) -> bool:
        """Whether it does not depend on an argument."""
        return not self.name if self.step is None else self.step.held


class ConstantValue(Tracked):
    """A literal or a constant; a NaN in it is attributed to the equation that reads it."""

    @cached_property
    def state(self) -> int:
        return state_of(self.data) & INF

    @cached_property
    def has_nan(self) -> bool:
        """Whether it contains a NaN."""
        return bool(state_of(self.data) & NAN)


class ProvenanceValue(NamedTuple):
    """A value on the path to an origin.

    Attributes:
        value: The value.
        place: The position of the relevant element; None if unknown.
    """

    value: Tracked
    place: tuple[int, ...] | None


def representative(origins: Sequence[NonfiniteOrigin]) -> NonfiniteOrigin:
    """Return the origin that represents all origins of an equation and state.

    It is the first one that reaches a result or leads to an error, or else the first one.
    """
    first = next((origin for origin in origins if origin.reached or origin.raises), origins[0])
    others = [origin for origin in origins if origin is not first]
    first.times += sum(origin.times for origin in others)
    first.reached = sorted({place for origin in origins for place in origin.reached})
    return first


def origins_of(values: Iterable[Tracked]) -> tuple[NonfiniteOrigin, ...]:
    """Return the distinct origins of some values."""
    return union(origin for value in values for origin in value.origins)


def union(origins: Iterable[NonfiniteOrigin]) -> tuple[NonfiniteOrigin, ...]:
    """Return origins without duplicates."""
    return tuple(dict.fromkeys(origins))


def with_origins(value: Tracked, origins: Sequence[NonfiniteOrigin]) -> Tracked:
    """Return a value with these origins added if it is not finite."""
    if origins and value.state != FINITE:
        value.origins = tuple(origins)
    return value


# --- states ---------------------------------------------------------------------------------------
# States of arrays: finite, with infinities, with NaNs; and equations that can change them.

#: The states of an array as bits: all finite, has an infinity, has a NaN.
FINITE, INF, NAN = 0, 1, 2


def has_state(value: Any) -> bool:
    """Return True if a value is an array with an inexact dtype."""
    if isinstance(value, float | complex):
        return True
    dtype = getattr(value, "dtype", None)
    if dtype is None or isinstance(jax.typeof(value), AbstractRef):
        return False
    return can_be_nonfinite(dtype)


def can_be_nonfinite(dtype: Any) -> bool:
    """Return True if a dtype has NaNs or infinities."""
    return not is_extended(dtype) and bool(jnp.issubdtype(dtype, jnp.inexact))


def nonfinite_flags(value: Any) -> tuple[Any, Any]:
    """Return whether an array has a NaN, and whether it has an infinity; it may be traced."""
    if not has_state(value):
        return False, False
    return jnp.isnan(value).any(), jnp.isinf(value).any()


@jax.jit
def _state(array: Any) -> Any:
    nan, inf = nonfinite_flags(array)
    return NAN * nan.astype(np.uint8) + INF * inf.astype(np.uint8)


def state_of(value: Any) -> int:
    """Return the state of a value; values without numbers are finite."""
    if not has_state(value):
        return FINITE
    if isinstance(value, jax.Array) and not is_on_host(value):
        return int(_state(value))
    # NumPy reads CPU memory directly without compiling.
    array = plain_array(value)
    if np.isfinite(array).all():
        return FINITE
    return NAN * bool(np.isnan(array).any()) + INF * bool(np.isinf(array).any())


def may_make(eqn: JaxprEqn) -> bool:
    """Return True if an equation may compute a NaN or an infinity from operands without any.

    A NaN in a literal or a constant counts as produced by the equation that reads it.
    """
    if not traits(eqn).keeps_finite:
        return True
    return any(type(atom) is Literal and state_of(atom.val) & NAN for atom in eqn.invars)


def moves_constants(eqn: JaxprEqn) -> bool:
    """Return True if an equation's results count as constants when its operands are constants."""
    like = traits(eqn)
    return bool(eqn.invars) and (like.moves or bool(like.gives))


def is_moving(eqn: JaxprEqn) -> bool:
    """Return True if the elements of an equation's results are elements of its operands."""
    like = traits(eqn)
    return like.moves or like.updates or like.gives in ("same", "layout", "part")


# --- places ---------------------------------------------------------------------------------------
# The positions of elements that are not finite.

#: An index of an array: one element or several.
Index = tuple[Any, ...]


def count_in_state(value: Tracked, state: int) -> int:
    """Return the number of elements that are NaN, or infinite."""
    array = plain_array(value.data)
    return int((np.isnan(array) if state == NAN else np.isinf(array)).sum())


def first_place(value: Tracked) -> tuple[int, ...]:
    """Return the position of the first NaN, or else of the first infinity."""
    array = plain_array(value.data)
    wrong = np.isnan(array) if value.state & NAN else np.isinf(array)
    return tuple(map(int, np.unravel_index(int(wrong.argmax()), wrong.shape)))


def place_after(step: Evaluation, place: Index | None) -> Index | None:
    """Return the place in a step's operands that corresponds to a place in its results."""
    return place if traits(step.eqn).elementwise else None


def element(value: Tracked, place: Index | None) -> Any:
    """Return the element of a value at a place of a result, or None."""
    if place is None or np.shape(value.data) not in ((), _shape_holding(value, place)):
        return None
    array = plain_array(value.data)  # JAX's indexing may need an output sharding
    return array[place if array.ndim else ()].item()


def _shape_holding(value: Tracked, place: tuple[int, ...]) -> tuple[int, ...] | None:
    shape = np.shape(value.data)
    fits = len(shape) == len(place) and all(i < n for i, n in zip(place, shape, strict=True))
    return shape if fits else None
