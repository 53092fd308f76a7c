"""Rules for what reads and writes at indices: gather, the scatters, dynamic slices and updates.

JAX's rules bring all operands to the front, and make a gather or a scatter of every dynamic slice
and update. Here an array that is read or written stays as it is mapped: its mapped dimension is
one of the window, or one in step with the indices, if they differ by lane. A dynamic slice or
update whose start is the same in all lanes stays one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from jaxprtool.jaxcompat import Primitive, varying_alike
from jaxprtool.passes.batch.axis import Axis, Dim
from jaxprtool.passes.batch.placing import lane_shape, nbytes, placed, rule_for

Params = dict[str, Any]


# --- gather and scatter -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Windows:
    """How the windows of a gather's or a scatter's operand lie in the array that holds them all,
    a gather's result or a scatter's updates: windows along `held`, one for each row of indices.

    The other dimensions of the operand are `dropped` from windows, or in step, as `operand_steps`,
    with those of the indices, `index_steps`. Starts are along the operand's dimensions `starts`.
    """

    held: tuple[int, ...]
    dropped: tuple[int, ...]
    starts: tuple[int, ...]
    operand_steps: tuple[int, ...]
    index_steps: tuple[int, ...]

    def span_of_window(self, dim: int, rank: int) -> range:
        """Where among all windows a dimension can be that windows have at `dim` of the operand;
        `rank` is the rank of the array of all windows without it."""
        apart = (*self.dropped, *self.operand_steps)
        before = sum(d not in apart for d in range(dim))
        return _span(self.held, before, rank)

    def span_of_rows(self, dim: int, rank: int) -> range:
        """Where among all windows a dimension can be that indices have at `dim`."""
        return _span(self._rows(rank), dim, rank)

    def row_dim(self, place: int, rank: int) -> int:
        """The dimension of the indices for one that is at `place` among all windows."""
        return sum(row < place for row in self._rows(rank))

    def _rows(self, rank: int) -> tuple[int, ...]:
        return tuple(d for d in range(rank) if d not in self.held)

    def with_window_dim(self, dim: int, place: int) -> _Windows:
        """Windows with the operand's new dimension `dim`, which is at `place` among them."""
        held = tuple(sorted((*_past(self.held, place), place)))
        return _Windows(
            held,
            _past(self.dropped, dim),
            _past(self.starts, dim),
            _past(self.operand_steps, dim),
            self.index_steps,
        )

    def with_rows(self, dim: int, place: int) -> _Windows:
        """More rows, by a new dimension of the indices, which is at `place` among windows."""
        return _Windows(
            _past(self.held, place),
            self.dropped,
            self.starts,
            self.operand_steps,
            _past(self.index_steps, dim),
        )

    def with_step(self, operand_dim: int, index_dim: int, place: int) -> _Windows:
        """A new dimension that the operand and the indices have both."""
        rows = self.with_rows(index_dim, place)
        steps = zip(_past(self.operand_steps, operand_dim), rows.index_steps, strict=True)
        operand_steps, index_steps = zip(*sorted([*steps, (operand_dim, index_dim)]), strict=True)
        return _Windows(
            rows.held,
            _past(self.dropped, operand_dim),
            _past(self.starts, operand_dim),
            operand_steps,
            index_steps,
        )

    def numbers(self, kind: Any) -> Any:
        """As the dimension numbers of a gather or a scatter."""
        return kind(self.held, self.dropped, self.starts, self.operand_steps, self.index_steps)


def _past(dims: Sequence[int], new: int) -> tuple[int, ...]:
    """Dimensions, after there is a new one."""
    return tuple(d + (d >= new) for d in dims)


def _span(dims: Sequence[int], before: int, rank: int) -> range:
    """Where a dimension may be put that comes after so many of these."""
    return range(
        dims[before - 1] + 1 if before else 0, (dims[before] if before < len(dims) else rank) + 1
    )


def _size(x: Any) -> int:
    return nbytes(x.shape, x.dtype)


@rule_for("gather")
def _gather(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Params
) -> Any:
    """Mapped indices are moved to the front where the result is larger than they, and so is a
    mapped operand, read by the same indices in all lanes."""
    (operand, indices), (dim, index_dim) = operands, dims
    windows, sizes = _Windows(*params["dimension_numbers"]), params["slice_sizes"]
    rows = lane_shape(indices, index_dim)[:-1]
    rank = len(rows) + len(windows.held)
    result = nbytes((axis.size, *rows, *sizes), operand.dtype)
    if index_dim is None:
        assert dim is not None  # something is mapped
        place = windows.span_of_window(dim, rank)[0]
        if place and result > _size(operand):
            operand, dim, place = placed(axis, operand, dim, 0), 0, 0
        windows = windows.with_window_dim(dim, place)
        params = {**params, "slice_sizes": (*sizes[:dim], operand.shape[dim], *sizes[dim:])}
    else:
        if index_dim == indices.ndim - 1 or result > _size(indices):
            indices, index_dim = placed(axis, indices, index_dim, 0), 0
        place = windows.span_of_rows(index_dim, rank)[0]
        if dim is None:
            windows = windows.with_rows(index_dim, place)
            # What one lane reads another may read too, and in another order.
            params = {**params, "unique_indices": False, "indices_are_sorted": False}
        else:
            windows = windows.with_step(dim, index_dim, place)
            # JAX has windows of no lanes, if there are none, and of one lane else.
            width = min(1, axis.size) if isinstance(axis.size, int) else 1
            params = {**params, "slice_sizes": (*sizes[:dim], width, *sizes[dim:])}
    numbers = windows.numbers(lax.GatherDimensionNumbers)
    return primitive.bind(operand, indices, **{**params, "dimension_numbers": numbers}), place


@rule_for("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def _scatter(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Params
) -> Any:
    """The operand is repeated for every lane if it is unmapped, and moved only if that saves
    moving the updates."""
    (operand, indices, updates), (dim, index_dim, update_dim) = operands, dims
    windows = _Windows(*params["dimension_numbers"])
    rank = updates.ndim - (update_dim is not None)
    if index_dim is None:
        target = _target_of_windows(windows, operand, updates, dim, update_dim, rank)
        place = _nearest(update_dim, windows.span_of_window(target, rank))
        windows = windows.with_window_dim(target, place)
    else:
        target = 0 if dim is None else dim
        wanted, is_last = index_dim, index_dim == indices.ndim - 1
        if is_last or (update_dim is not None and _size(indices) < _size(updates)):
            wanted = windows.row_dim(update_dim or 0, rank)
        indices = placed(axis, indices, index_dim, wanted)
        place = _nearest(update_dim, windows.span_of_rows(wanted, rank))
        windows = windows.with_step(target, wanted, place)
    operand = placed(axis, operand, dim, target)
    updates = placed(axis, updates, update_dim, place)
    numbers = windows.numbers(lax.ScatterDimensionNumbers)
    results = primitive.bind(operand, indices, updates, **{**params, "dimension_numbers": numbers})
    return results, target


def _nearest(dim: Dim, span: range) -> int:
    return span[0] if dim is None or dim not in span else dim


def _target_of_windows(
    windows: _Windows, operand: Any, updates: Any, dim: Dim, update_dim: Dim, rank: int
) -> int:
    """Where to have the operand mapped that is written to at the same indices in all lanes.

    It stays, unless that means to move the updates too, and to move it to the front means not to.
    """
    if dim is None:
        return 0
    if update_dim is None:
        return dim
    fits = update_dim in windows.span_of_window(dim, rank)
    return dim if fits or update_dim not in windows.span_of_window(0, rank) else 0


# --- dynamic slices and updates -----------------------------------------------------------------


@rule_for("dynamic_slice")
def _dynamic_slice(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Params
) -> Any:
    """One whose start differs by lane is a gather, of those starts that can be other than 0."""
    (operand, *starts), (dim, *start_dims) = operands, dims
    sizes, shape = params["slice_sizes"], lane_shape(operand, dim)
    if len(starts) != len(shape):
        return None
    free = [i for i, size in enumerate(sizes) if size != shape[i]]
    if all(start_dims[i] is None for i in free):
        if dim is None:
            return None
        sizes = (*sizes[:dim], operand.shape[dim], *sizes[dim:])
        starts = _starts(starts, start_dims, dim)
        return primitive.bind(*varying_alike(operand, *starts), slice_sizes=sizes), dim
    windows = _Windows(tuple(range(len(shape))), (), tuple(free), (), ())
    windows = windows.with_rows(0, 0) if dim is None else windows.with_step(dim, 0, 0)
    if dim is not None:
        width = min(1, axis.size) if isinstance(axis.size, int) else 1
        sizes = (*sizes[:dim], width, *sizes[dim:])
    result = lax.gather(
        operand,
        _rows_of_starts(axis, starts, start_dims, free),
        windows.numbers(lax.GatherDimensionNumbers),
        sizes,
        unique_indices=dim is not None,
        indices_are_sorted=dim is not None,
        mode=lax.GatherScatterMode.CLIP,
    )
    return result, 0


@rule_for("dynamic_update_slice")
def _dynamic_update_slice(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Params
) -> Any:
    """One whose start differs by lane is a scatter, by those starts that can be other than 0."""
    (operand, update, *starts), (dim, update_dim, *start_dims) = operands, dims
    lane = lane_shape(operand, dim)
    free = [i for i, size in enumerate(lane_shape(update, update_dim)) if size != lane[i]]
    if all(start_dims[i] is None for i in free):
        if dim is None and update_dim is None:
            return None
        target = 0 if dim is None or update_dim == 0 else dim
        pair = placed(axis, operand, dim, target), placed(axis, update, update_dim, target)
        starts = _starts(starts, start_dims, target)
        return primitive.bind(*varying_alike(*pair, *starts)), target
    target = 0 if dim is None else dim
    place = 0 if update_dim is None else update_dim
    windows = _Windows(tuple(range(len(lane))), (), tuple(free), (), ())
    result = lax.scatter(
        placed(axis, operand, dim, target),
        _rows_of_starts(axis, starts, start_dims, free),
        placed(axis, update, update_dim, place),
        windows.with_step(target, 0, place).numbers(lax.ScatterDimensionNumbers),
        indices_are_sorted=True,
        unique_indices=True,
        mode=lax.GatherScatterMode.CLIP,
    )
    return result, target


def _starts(starts: Sequence[Any], dims: Sequence[Dim], new: int) -> list[Any]:
    """Starts with one for a new dimension. Those that differ by lane are clamped to 0 anyway."""
    zero = (starts[0].dtype if starts else np.dtype(np.int32)).type(0)
    kept = [start if dim is None else zero for start, dim in zip(starts, dims, strict=True)]
    return [*kept[:new], zero, *kept[new:]]


def _rows_of_starts(
    axis: Axis, starts: Sequence[Any], dims: Sequence[Dim], free: Sequence[int]
) -> Any:
    """The starts along the dimensions `free` as indices, a row for each lane."""
    columns = [
        lax.broadcast_in_dim(starts[i], (axis.size, 1), ())
        if dims[i] is None
        else lax.reshape(starts[i], (axis.size, 1))
        for i in free
    ]
    return lax.concatenate(columns, 1) if len(columns) > 1 else columns[0]
