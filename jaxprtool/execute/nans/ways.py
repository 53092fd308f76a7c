"""The way to a NaN or an infinity: from the equation that made it back to an argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxprtool.execute.nans.states import NAN, has_state
from jaxprtool.execute.nans.steps import OnWay, Step, Value, Written
from jaxprtool.execute.summary import plain
from jaxprtool.ir.traits import traits

#: A way has at most so many values.
_LONGEST = 12


def way_to(step: Step, results: Sequence[Value]) -> list[OnWay]:
    """Return the values that led to what a step gave: from its operands back to an argument.

    At each step it is the operand that is most likely to blame: where the step computes element by
    element, by the element at the first place that is not finite, else by all elements. A zero is
    likelier than a large number, and what is not finite likeliest. Values that were only moved are
    left out.
    """
    found: list[OnWay] = []
    place: tuple[int, ...] | None = first_place(next(x for x in results if x.state))
    current: Step | None = step
    while current is not None and len(found) < _LONGEST:
        place = place_after(current, place)
        operands = [x for x in current.operands if not isinstance(x, Written)]
        operands = [x for x in operands if has_state(x.data)] or operands[:1]
        if not operands:
            break
        value = max(operands, key=lambda x: _suspicion(x, place))
        current = value.step
        if current is None or not traits(current.eqn).moves:
            found.append(OnWay(value, place))
    return found


def count_of(value: Value, state: int) -> int:
    """Return how many elements are NaN, or infinite."""
    array = plain(value.data)
    return int((np.isnan(array) if state == NAN else np.isinf(array)).sum())


def first_place(value: Value) -> tuple[int, ...]:
    """Return the position of the first element that is not finite; a NaN before infinities."""
    array = plain(value.data)
    wrong = np.isnan(array) if value.state & NAN else np.isinf(array)
    return tuple(map(int, np.unravel_index(int(wrong.argmax()), wrong.shape)))


def place_after(step: Step, place: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the place in the operands of a step that a place of its results is computed from."""
    return place if traits(step.eqn).elementwise else None


def element(value: Value, place: tuple[int, ...] | None) -> Any:
    """Return the element of a value that stands at a place of a result; None if it has none."""
    if place is None or np.shape(value.data) not in ((), _shape_holding(value, place)):
        return None
    array = plain(value.data)  # JAX's own indexing may need a sharding of the result
    return array[place if array.ndim else ()].item()


def _shape_holding(value: Value, place: tuple[int, ...]) -> tuple[int, ...] | None:
    shape = np.shape(value.data)
    fits = len(shape) == len(place) and all(i < n for i, n in zip(place, shape, strict=True))
    return shape if fits else None


def _suspicion(value: Value, place: tuple[int, ...] | None) -> tuple[int, float]:
    """Return how likely a value is to blame."""
    if not has_state(value.data) or np.size(value.data) == 0:
        return 0, 0.0
    one = element(value, place)
    size = abs(one) if one is not None else float(np.abs(plain(value.data)).max())
    if not np.isfinite(size):
        return 3, 0.0
    return (2, 0.0) if one == 0 else (1, size)
