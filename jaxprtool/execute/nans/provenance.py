"""The path of a NaN or an infinity, from its equation back to an argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxprtool.execute.nans.source_elements import Index, SourceElements, source_elements
from jaxprtool.execute.nans.states import NAN, has_state, is_moving
from jaxprtool.execute.nans.tracked import ConstantValue, Evaluation, ProvenanceValue, Tracked
from jaxprtool.execute.running.summary import plain
from jaxprtool.ir.core.traits import traits

#: The maximum number of values of a path, and the most moved values that are skipped.
_MOST_VALUES, _MOST_STEPS = 12, 100


def provenance(step: Evaluation, results: Sequence[Tracked]) -> list[ProvenanceValue]:
    """Return the values that led to the results of a step, from its operands to an argument.

    The path follows one element at a time, from the first non-finite one to an element from which
    it was computed. Elements that depend on an argument are preferred to constants; among these,
    the most suspicious one is taken. Values that were only moved are left out.
    """
    found: list[ProvenanceValue] = []
    value = next(x for x in results if x.state)
    place: Index | None = first_place(value)
    reads = source_elements(value, place) or [SourceElements(x, None) for x in step.operands]
    is_known = True
    for _ in range(_MOST_STEPS):
        reads = [x for x in reads if not isinstance(x.value, ConstantValue)]
        reads = [x for x in reads if has_state(x.value.data)] or reads[:1]
        reads = [x for x in reads if not x.value.held] or reads
        if not reads or len(found) == _MOST_VALUES:
            break
        one = _element(value, place)
        read = max(reads, key=lambda x: _most_suspicious(x, one)[0])
        is_known &= read.where is not None
        value, place = read.value, _most_suspicious(read, one)[1]
        if not _is_moved(value):
            found.append(ProvenanceValue(value, place if is_known else None))
        reads = source_elements(value, place)
    return found


def _is_moved(value: Tracked) -> bool:
    if value.moved is not None:
        return bool(value.moved.operands)
    return value.step is not None and is_moving(value.step.eqn)


def _element(value: Tracked, place: Index | None) -> float | complex | None:
    if place is None or not has_state(value.data):
        return None
    return plain(value.data)[place].item()  # type: ignore[no-any-return]


def _most_suspicious(
    read: SourceElements, result: float | complex | None
) -> tuple[tuple[int, float], Index | None]:
    """Return the suspicion score of a read value for an element, and the most suspicious place.

    Non-finite elements rank first, then zeros, then the largest magnitude. If the element is
    another number, zeros do not count, nor do non-finite elements that may not have been read.
    """
    if not has_state(read.value.data) or not np.size(read.value.data):
        return (0, 0.0), None
    array = plain(read.value.data)
    sizes = np.abs(array if read.where is None else array[read.where])
    is_finite = result is None or np.isfinite(result)
    ranks = np.where(sizes == 0, 0 if is_finite and result else 2, 1)
    ranks = np.where(np.isfinite(sizes), ranks, -1 if is_finite and sizes.ndim else 3)
    rank = int(ranks.max())
    likeliest = np.where(ranks == rank, sizes if rank == 1 else 1, -1)
    inside = iter(np.unravel_index(int(likeliest.argmax()), sizes.shape))
    index = [slice(None)] * array.ndim if read.where is None else read.where
    place = tuple(int(next(inside)) if isinstance(i, slice) else i for i in index)
    return (rank, float(likeliest.max())), place


def count_of(value: Tracked, state: int) -> int:
    """Return the number of elements that are NaN, or infinite."""
    array = plain(value.data)
    return int((np.isnan(array) if state == NAN else np.isinf(array)).sum())


def first_place(value: Tracked) -> tuple[int, ...]:
    """Return the position of the first NaN, or else of the first infinity."""
    array = plain(value.data)
    wrong = np.isnan(array) if value.state & NAN else np.isinf(array)
    return tuple(map(int, np.unravel_index(int(wrong.argmax()), wrong.shape)))


def place_after(step: Evaluation, place: Index | None) -> Index | None:
    """Return the place in a step's operands that corresponds to a place in its results."""
    return place if traits(step.eqn).elementwise else None


def element(value: Tracked, place: Index | None) -> Any:
    """Return the element of a value at a place of a result, or None."""
    if place is None or np.shape(value.data) not in ((), _shape_holding(value, place)):
        return None
    array = plain(value.data)  # JAX's indexing may need an output sharding
    return array[place if array.ndim else ()].item()


def _shape_holding(value: Tracked, place: tuple[int, ...]) -> tuple[int, ...] | None:
    shape = np.shape(value.data)
    fits = len(shape) == len(place) and all(i < n for i, n in zip(place, shape, strict=True))
    return shape if fits else None
