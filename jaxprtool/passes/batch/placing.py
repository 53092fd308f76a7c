"""Where operands that are mapped along different dimensions are best brought together.

JAX's rules bring them to the front, all of them, even where all are mapped along the same other
dimension. Here they meet where the fewest bytes are moved, on one condition: should the results be
wanted at the front after all, the moves until then must not cost more than JAX's, in number or in
bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.ir.dtypes import itemsize
from jaxprtool.jaxcompat import Primitive
from jaxprtool.passes.batch.axis import Axis, Dim
from jaxprtool.passes.batch.table import batch_rules

OwnRule = Callable[[Axis, Primitive, Sequence[Any], Sequence[Dim], dict[str, Any]], Any]


def prefers_jaxs(axis: Axis) -> bool:
    """Whether JAX's rules are to be used where they could: on an axis that is `plain`, and for
    lanes that are spread over mesh axes."""
    return axis.plain or axis.spmd_name is not None or axis.mesh_axes is not None


def rule_for(*names: str, always: bool = False) -> Callable[[OwnRule], OwnRule]:
    """Enter a rule in `batch_rules` for these primitives, one that JAX's rule could stand in for,
    unless it is there `always`, since JAX's is not right."""

    def enter(rule: OwnRule) -> OwnRule:
        def guarded(
            axis: Axis,
            primitive: Primitive,
            operands: Sequence[Any],
            dims: Sequence[Dim],
            params: dict[str, Any],
        ) -> Any:
            if prefers_jaxs(axis) or any(map(_is_of_keys, operands)):
                return None
            return rule(axis, primitive, operands, dims, params)

        batch_rules.update(dict.fromkeys(names, rule if always else guarded))
        return rule

    return enter


def _is_of_keys(x: Any) -> bool:
    """Whether an array is one of random keys. It is laid out as by JAX's rules: what the rbg
    generators draw for an array of keys depends on where in it each key is."""
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def lane_shape(x: Any, dim: Dim) -> tuple[Any, ...]:
    """The shape of one lane of a value."""
    return x.shape if dim is None else x.shape[:dim] + x.shape[dim + 1 :]


def only(operands: Sequence[Any], dims: Sequence[Dim]) -> tuple[Any, int]:
    """The operand of an equation that has one, and where it is mapped."""
    (x,), (dim,) = operands, dims
    assert dim is not None
    return x, dim


def nbytes(shape: Iterable[Any], dtype: Any) -> int:
    """The bytes of an array; a symbolic dimension counts as any other that is not 1."""
    return math.prod(d if isinstance(d, int) else 2 for d in shape) * itemsize(dtype)


def result_sizes(
    axis: Axis, primitive: Primitive, operands: Sequence[Any], dims: Sequence[Dim], params: Any
) -> list[int]:
    """The bytes of each result of an equation, of all lanes; none if all dimensions are in front,
    where operands then meet, whatever comes out."""
    if not any(dims):
        return []
    lanes = [
        jax.core.ShapedArray(lane_shape(x, dim), x.dtype)
        for x, dim in zip(operands, dims, strict=True)
    ]
    results = jaxcompat.result_types(primitive, lanes, params)
    return [nbytes((axis.size, *result.shape), result.dtype) for result in results]


def meeting_dim(operands: Sequence[Any], dims: Sequence[Dim], results: Sequence[int]) -> int:
    """The dimension to bring all mapped operands to, for results of so many bytes.

    Operands have the same rank where they are mapped. Unmapped ones cost the same everywhere.
    """
    mapped = [
        (nbytes(x.shape, x.dtype), dim)
        for x, dim in zip(operands, dims, strict=True)
        if dim is not None
    ]

    def moved(target: int) -> list[int]:
        return [size for size, dim in mapped if dim != target]

    def insured(target: int) -> bool:
        """Whether it costs no more than the front, even if results are to be there at last."""
        most, moves = moved(0), [*moved(target), *results]
        return sum(moves) <= sum(most) and len(moves) <= len(most)

    places = sorted({dim for _, dim in mapped if dim and insured(dim)})
    return min([0, *places], key=lambda place: (sum(moved(place)), len(moved(place))))


def placed(axis: Axis, x: Any, dim: Dim, target: int) -> Any:
    """A value moved, or repeated for every lane, to be mapped along `target`."""
    return jaxcompat.match_axis(axis.data, dim, target, x)


def together(
    axis: Axis, operands: Sequence[Any], dims: Sequence[Dim], results: Sequence[int]
) -> tuple[list[Any], int]:
    """Operands of one rank, all mapped along the dimension where they meet, and which that is."""
    target = meeting_dim(operands, dims, results)
    return [placed(axis, x, dim, target) for x, dim in zip(operands, dims, strict=True)], target


_ONE_LANE = Axis(None, 1)


def with_one_lane(x: Any, target: int) -> Any:
    """An unmapped value with a dimension of size 1 where others are mapped."""
    return jaxcompat.match_axis(_ONE_LANE.data, None, target, x)


def filled(x: Any, like: Any, target: int) -> Any:
    """A value with one number for each lane, as an array in the shape of `like`."""
    if x.shape == like.shape:
        return x
    sharding = jax.typeof(like).sharding
    return jax.lax.broadcast_in_dim(x, like.shape, (target,), out_sharding=sharding)
