"""The elements of operands from which an element of a result is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxprtool.execute.nans.states import has_state, is_moving
from jaxprtool.execute.nans.tracked import DataMovement, Evaluation, Tracked
from jaxprtool.execute.running.summary import plain
from jaxprtool.ir.core.regions import regions
from jaxprtool.ir.core.structured import holds_jaxpr
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.evaluation.interpret import bind
from jaxprtool.jaxcompat import JaxprEqn

#: An index of an array: one element or several.
Index = tuple[Any, ...]


class SourceElements(NamedTuple):
    """Elements of a value from which an element of a result is computed.

    Attributes:
        value: The value.
        where: The elements; None if any of them may be read.
    """

    value: Tracked
    where: Index | None


def source_elements(value: Tracked, place: Index | None) -> list[SourceElements]:
    """Return the elements that an element of a value is computed from; empty for an argument."""
    if value.moved is not None:
        return [_before_movement(value.moved, place)] if value.moved.operands else []
    step = value.step
    if step is None or not step.operands:
        return []
    if place is not None and has_state(value.data) and not step.eqn.effects:
        found = _elements(step, value, place) or _alike(step.operands, value, place)
        if found:
            return found
    started = _start(step.eqn, value.position)
    if started is not None and not step.operands[started].held:
        return [SourceElements(step.operands[started], None)]
    return [SourceElements(x, None) for x in step.operands]


def _before_movement(moved: DataMovement, place: Index | None) -> SourceElements:
    """Return the element of the stack or row that an element was moved from."""
    if moved.row is not None:
        return SourceElements(moved.operands[0], None if place is None else (moved.row, *place))
    if place is None:
        return SourceElements(moved.operands[-1], None)
    return SourceElements(moved.operands[place[0]], place[1:])


def _elements(step: Evaluation, value: Tracked, place: Index) -> list[SourceElements]:
    """Return the elements that an element of a result is computed from; empty if unknown."""
    eqn, operands = step.eqn, step.operands
    like, name = traits(eqn), eqn.primitive.name
    if like.gives == "same":
        return [SourceElements(operands[value.position], place)]
    if like.elementwise:
        reads = [SourceElements(x, _broadcast(np.shape(x.data), place)) for x in operands]
        chooses = _CHOOSES.get(name)
        chosen = [] if chooses is None else list(chooses(reads, plain(value.data)[place]))
        # If the selected value is a constant of the program, blame the value it replaces.
        return [x for x in chosen if not x.value.held] or reads
    if is_moving(eqn):
        return _origin(step, value, place)
    if like.reduces and "axes" in eqn.params:
        return [
            SourceElements(
                operands[0], _reduced(np.ndim(operands[0].data), eqn.params["axes"], place)
            )
        ]
    if name == "dot_general":
        return list(map(SourceElements, operands, _contracted(step, place)))
    return []


def _alike(operands: Sequence[Tracked], value: Tracked, place: Index) -> list[SourceElements]:
    """Return an operand's element that was probably forwarded: equal and nonzero."""
    element = plain(value.data)[place]
    for x in operands:
        if element and has_state(x.data) and not x.held:
            same = plain(x.data) == element
            if same.any():
                there = same.shape == np.shape(value.data) and same[place]
                return [SourceElements(x, place if there else _first(same))]
    return []


def _broadcast(shape: Sequence[int], place: Index) -> Index:
    return tuple(i if n > 1 else 0 for i, n in zip(place, shape, strict=False)) if shape else ()


def _chosen(reads: Sequence[SourceElements], element: Any) -> Iterator[SourceElements]:
    """Yield the selected case of a `select_n`: for an invalid integer, the nearest valid one."""
    predicate, *cases = reads
    number = int(plain(predicate.value.data)[predicate.where])
    yield cases[min(max(number, 0), len(cases) - 1)]


def _equal(reads: Sequence[SourceElements], element: Any) -> Iterator[SourceElements]:
    """Yield the operands to which an element of a `max`, `min` or `clamp` is equal."""
    for each in reads:
        if np.array_equal(plain(each.value.data)[each.where], element, equal_nan=True):
            yield each


_CHOOSES: dict[str, Callable[[Sequence[SourceElements], Any], Iterator[SourceElements]]] = {
    "select_n": _chosen,
    "max": _equal,
    "min": _equal,
    "clamp": _equal,
}


def _origin(step: Evaluation, value: Tracked, place: Index) -> list[SourceElements]:
    """Return the element moved to a place; empty if it is a fill value or computed.

    To find it, the equation is run on element indices instead of elements.
    """
    eqn, movable = step.eqn, [x for x in step.operands if has_state(x.data)]
    ends = np.cumsum([np.size(x.data) for x in movable])
    if not movable or ends[-1] > np.iinfo(np.int32).max or holds_jaxpr(eqn.params.values()):
        return []
    data = [x.data for x in step.operands]
    for i, x in enumerate(step.operands):
        if has_state(x.data):
            end = ends[movable.index(x)]
            numbers = np.arange(end - np.size(x.data), end, dtype=np.int32)
            data[i] = _like(x.data, numbers.reshape(np.shape(x.data)))
    if "fill_value" in eqn.params:
        eqn = eqn.replace(params={**eqn.params, "fill_value": -1})
    number = int(plain(bind(eqn, data)[value.position])[place])
    if not 0 <= number < ends[-1]:
        return []
    which = int(np.searchsorted(ends, number, side="right"))
    x = movable[which]
    index = np.unravel_index(number - ends[which] + np.size(x.data), np.shape(x.data))
    return [SourceElements(x, tuple(map(int, index)))]


def _like(array: Any, numbers: np.ndarray) -> Any:
    """Return numbers placed on the devices of an array."""
    sharding = getattr(array, "sharding", None)
    return numbers if sharding is None else jax.device_put(numbers, sharding)


def _reduced(rank: int, axes: Sequence[int], place: Index) -> Index:
    kept = iter(place)
    return tuple(slice(None) if axis in axes else next(kept) for axis in range(rank))


def _first(flags: np.ndarray) -> Index:
    return tuple(map(int, np.unravel_index(int(flags.argmax()), flags.shape)))


def _contracted(step: Evaluation, place: Index) -> Iterator[Index]:
    """Yield the operand elements from which an element of a `dot_general` is computed."""
    contracted, batch = step.eqn.params["dimension_numbers"]
    begin = len(batch[0])
    for x, summed, shared in zip(step.operands, contracted, batch, strict=True):
        rank = np.ndim(x.data)
        index: list[Any] = [slice(None)] * rank
        for axis, i in zip(shared, place, strict=False):
            index[axis] = i
        free = [axis for axis in range(rank) if axis not in (*summed, *shared)]
        for axis, i in zip(free, place[begin:], strict=False):
            index[axis] = i
        begin += len(free)
        yield tuple(index)


def _start(eqn: JaxprEqn, position: int) -> int | None:
    """Return the position of the operand with the initial value of a loop result, or None."""
    held = regions(eqn) if holds_jaxpr(eqn.params.values()) else None
    return None if held is None else {out: i for i, out in held.carried}.get(position)
