"""Tracked values: the step that computed each one, and the origins of non-finite elements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from jaxprtool.execute.nans.states import FINITE, INF, NAN, state_of
from jaxprtool.jaxcompat import JaxprEqn


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
class Origin:
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
    devices: tuple[str, ...] = ()
    led_to: dict[tuple[int, int], Origin] = field(default_factory=dict)
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
    origins: tuple[Origin, ...] = ()
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


def representative(origins: Sequence[Origin]) -> Origin:
    """Return the origin that represents all origins of an equation and state.

    It is the first one that reaches a result, or else the first one.
    """
    found = next((each for each in origins if each.reached), origins[0])
    others = [each for each in origins if each is not found]
    found.times += sum(each.times for each in others)
    found.reached = sorted({place for each in origins for place in each.reached})
    return found


def origins_of(values: Iterable[Tracked]) -> tuple[Origin, ...]:
    """Return the distinct origins of some values."""
    return union(origin for value in values for origin in value.origins)


def union(origins: Iterable[Origin]) -> tuple[Origin, ...]:
    """Return origins without duplicates."""
    return tuple(dict.fromkeys(origins))


def with_origins(value: Tracked, origins: Sequence[Origin]) -> Tracked:
    """Return a value with these origins added if it is not finite."""
    if origins and value.state != FINITE:
        value.origins = tuple(origins)
    return value
