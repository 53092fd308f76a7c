"""Values as they are followed: which step made each, and where what is not finite comes from."""

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
        around: The equations whose bodies it is in, the outermost first.
        iterations: The number of the iteration of each loop around it.
        operands: What it was given; nothing, once that is forgotten.
        held: Whether it was given nothing that depends on an argument.
    """

    eqn: JaxprEqn
    around: tuple[JaxprEqn, ...]
    iterations: tuple[int, ...]
    operands: Sequence[Tracked]
    held: bool = False

    @property
    def eqns(self) -> tuple[JaxprEqn, ...]:
        """The equation, behind those that it is in."""
        return (*self.around, self.eqn)


@dataclass(eq=False)
class Moved:
    """What a loop does between its operands or results and those of its iterations.

    Attributes:
        operands: The value of which a row was taken, or the rows that were stacked; nothing, once
            that is forgotten.
        row: The number of the row; None of a stack.
    """

    operands: Sequence[Tracked]
    row: int | None = None


@dataclass(eq=False)
class Origin:
    """A NaN or an infinity that was made.

    Attributes:
        state: Which it is.
        step: The equation that made it; None of an argument, or of what the program holds.
        name: The argument that it came with, or "".
        results: What the equation gave, or the argument.
        operands: What the equation was given.
        way: The values that led to it, the nearest first.
        number: Its number, of all that are made.
        times: How often it made one.
        reached: The positions of the results that have what comes of it.
        dropped: The last equation that read what comes of it, and gave what is finite.
        devices: The devices of a `shard_map` that it was made on.
        led_to: The origins that were made of it, of each equation and state one.
        closed: Whether no value that is still read has it.
    """

    state: int
    step: Evaluation | None
    name: str
    results: Sequence[Tracked]
    operands: Sequence[Tracked] = ()
    way: Sequence[OnWay] = ()
    number: int = 0
    times: int = 1
    reached: list[int] = field(default_factory=list)
    dropped: Evaluation | None = None
    devices: tuple[str, ...] = ()
    led_to: dict[tuple[int, int], Origin] = field(default_factory=dict)
    closed: bool = False

    @property
    def held(self) -> bool:
        """Whether it is a NaN that the program holds, on purpose unless it reaches a result."""
        if self.step is None:
            return not self.name
        return self.state == NAN and any(
            isinstance(x, Written) and x.has_nan for x in self.operands
        )


@dataclass(eq=False)
class Tracked:
    """A value.

    Attributes:
        data: The value.
        step: The step that made it; None of an argument, or of what the program holds.
        origins: Those of what is not finite in it.
        name: The argument that it is, or a row of, or "".
        position: Which of the step's results it is.
        moved: If it is a row or a stack, of what; `step` and `name` are then those of that.
    """

    data: Any
    step: Evaluation | None = None
    origins: tuple[Origin, ...] = ()
    name: str = ""
    position: int = 0
    moved: Moved | None = None

    @cached_property
    def state(self) -> int:
        """What is not finite in it."""
        return state_of(self.data)

    @property
    def held(self) -> bool:
        """Whether it does not depend on an argument."""
        return not self.name if self.step is None else self.step.held


class Written(Tracked):
    """A literal or a constant: a NaN in it does not excuse the equation that reads it."""

    @cached_property
    def state(self) -> int:
        return state_of(self.data) & INF

    @cached_property
    def has_nan(self) -> bool:
        """Whether there is a NaN in it."""
        return bool(state_of(self.data) & NAN)


class OnWay(NamedTuple):
    """A value that led to what was found.

    Attributes:
        value: The value.
        place: Where in it the element is that led there; None if that is not known.
    """

    value: Tracked
    place: tuple[int, ...] | None


def standing_for(origins: Sequence[Origin]) -> Origin:
    """Return the origin of an equation that stands for all of one state.

    It is the first that reaches a result, or else the first.
    """
    found = next((each for each in origins if each.reached), origins[0])
    others = [each for each in origins if each is not found]
    found.times += sum(each.times for each in others)
    found.reached = sorted({place for each in origins for place in each.reached})
    return found


def origins_of(values: Iterable[Tracked]) -> tuple[Origin, ...]:
    """Return the origins of some values, each once."""
    return union(origin for value in values for origin in value.origins)


def union(origins: Iterable[Origin]) -> tuple[Origin, ...]:
    """Return origins, each once."""
    return tuple(dict.fromkeys(origins))


def tainted(value: Tracked, origins: Sequence[Origin]) -> Tracked:
    """Return a value with these origins, if it is not finite."""
    if origins and value.state != FINITE:
        value.origins = tuple(origins)
    return value
