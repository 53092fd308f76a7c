"""The families of primitives that rewriting rules combine, and how far each is enumerated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

from tests.programs.enumerated.bodies import KINDS, Bodies, Scalar
from tests.programs.enumerated.graphs import Family
from tests.programs.enumerated.templates import Operation


def _array(dtype: Any, *shape: int, weak: bool = False) -> Any:
    return jax.core.ShapedArray(shape, np.dtype(dtype), weak_type=weak)


def _operations(arity: int, *functions: Callable[..., Any]) -> list[Operation]:
    return [Operation(f.__name__.removeprefix("bitwise_"), f, arity) for f in functions]


def _named(arity: int, **functions: Callable[..., Any]) -> list[Operation]:
    return [Operation(name, function, arity) for name, function in functions.items()]


def _bound(primitive: Any, **params: Any) -> Callable[..., Any]:
    """Return a function that binds a primitive, even if the equation is an identity."""
    return lambda *xs: primitive.bind(*xs, **params)


_FLOAT, _INT, _BOOL = _array(np.float32), _array(np.int32), _array(np.bool_)
_BYTE = _array(np.uint8)
_WEAK, _COMPLEX = _array(np.float32, weak=True), _array(np.complex64)
_LITERALS = (0.0, -0.0, 1.0, -1.0, 2.0)
_ALL = ("simplify", "fold", "cse", "forward", "patterns", "-O1", "-O2", "-O3")


def _converted(dtype: Any, weak: bool = False) -> Callable[..., Any]:
    params = {"new_dtype": np.dtype(dtype), "weak_type": weak, "sharding": None}
    return _bound(lax.convert_element_type_p, **params)


def _converts(*dtypes: Any) -> list[Operation]:
    return [Operation(f"to_{np.dtype(d).name}", _converted(d), 1) for d in dtypes]


_ARITHMETIC = [*_operations(1, lax.neg), *_operations(2, lax.add, lax.sub, lax.mul)]
_QUOTIENTS = [*_operations(1, lax.neg), *_operations(2, lax.div, lax.mul)]
_SUMS = [
    *_operations(1, lax.neg),
    *_operations(2, lax.mul, lax.sub),
    *_named(2, add_any=_bound(primitives.add_jaxvals_p)),
]
_BITS = [
    *_operations(1, lax.bitwise_not),
    *_operations(2, lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor),
]
_SHIFTS = [
    *_operations(1, lax.bitwise_not),
    *_operations(2, lax.shift_left, lax.shift_right_logical, lax.shift_right_arithmetic),
    *_operations(2, lax.bitwise_and, lax.rem),
]
_SIGNS = [
    *_operations(1, lax.neg, lax.abs, lax.sign, lax.square),
    *_operations(2, lax.max, lax.min),
]
_POWERS = [
    *_operations(1, lax.neg, lax.square),
    *_named(1, **{f"power_{y}": _bound(lax.integer_pow_p, y=y) for y in (1, 2, 3)}),
    *_operations(2, lax.mul, lax.pow),
]
_ROUNDING = [
    *_operations(1, lax.neg, lax.floor, lax.ceil, lax.abs),
    *_named(
        1,
        round=lax.round,
        round_even=lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    ),
]
_GROWTH = [
    *_operations(1, lax.exp, lax.log, lax.log1p, lax.expm1, lax.sqrt, lax.square),
    *_operations(2, lax.mul, lax.div),
]
_PARTS = [
    *_operations(1, lax.real, lax.imag, lax.conj, lax.neg, lax.abs),
    *_operations(2, lax.complex, lax.mul),
]
_COMPARISONS = [
    *_operations(1, lax.bitwise_not),
    *_operations(2, lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge),
]
_SELECTION = [
    *_operations(1, lax.bitwise_not, lax.neg),
    *_operations(2, lax.lt),
    Operation("select", lax.select_n, 3),
]
#: A predicate may be an integer, of which `select_n` takes the nearest valid case.
_PREDICATES = [
    *_BITS,
    *_operations(2, lax.eq, lax.ne, lax.lt, lax.ge),
    Operation("select", lax.select_n, 3),
    Operation("clamp", lax.clamp, 3),
]
_CLAMPS = [
    Operation("clamp", lax.clamp, 3),
    *_operations(1, lax.neg),
    *_operations(2, lax.max, lax.min),
]
_CONVERSIONS = [
    *_converts(np.float32, np.float16, jnp.bfloat16, np.int32, np.int8, np.bool_),
    *_named(1, to_weak=_converted(np.float32, weak=True)),
    *_operations(1, lax.neg),
]
_LAYOUT = [
    *_named(
        1,
        transpose=lambda x: lax.transpose_p.bind(x, permutation=tuple(range(x.ndim))[::-1]),
        stay=lambda x: lax.transpose_p.bind(x, permutation=tuple(range(x.ndim))),
        flatten=lambda x: lax.reshape_p.bind(x, new_sizes=(6,), dimensions=None, sharding=None),
        rev=lambda x: lax.rev(x, (0,)),
    ),
    *_operations(1, lax.neg),
    *_operations(2, lax.sub, lax.mul),
]


def _reshape(*shape: int) -> Callable[..., Any]:
    def reshape(x: Any) -> Any:
        if x.size != np.prod(shape):
            raise TypeError("another size")
        return lax.reshape_p.bind(x, new_sizes=shape, dimensions=None, sharding=None)

    return reshape


def _broadcast(*shape: int, over: tuple[int, ...]) -> Callable[..., Any]:
    return _bound(lax.broadcast_in_dim_p, shape=shape, broadcast_dimensions=over, sharding=None)


_TRANSPOSES = [each for each in _LAYOUT if each.name in ("transpose", "neg", "sub", "mul")]
_SHAPES = [
    *_named(
        1,
        row=_broadcast(1, 3, over=(1,)),
        column=_broadcast(3, 1, over=(0,)),
        rows=_broadcast(2, 3, over=(1,)),
        grown=_broadcast(2, 3, over=(0, 1)),
        first=lambda x: lax.squeeze(x, (0,)),
        second=lambda x: lax.squeeze(x, (1,)),
        flat=_reshape(3),
        upright=_reshape(3, 1),
        lying=_reshape(1, 3),
        flipped=lambda x: lax.transpose(x, (1, 0)),
    ),
    *_operations(1, lax.neg),
    *_operations(2, lax.sub, lax.max),
]


def _slice(start: int, limit: int, stride: int = 1) -> Callable[..., Any]:
    return lambda x: lax.slice(x, (start,), (limit,), (stride,))


_SLICES = [
    *_named(
        1,
        front=_slice(0, 2),
        middle=_slice(1, 3),
        back=_slice(2, 4),
        odd=_slice(0, 3, 2),
        whole=lambda x: lax.slice_p.bind(
            x, start_indices=(0,), limit_indices=x.shape, strides=None
        ),
        empty=_slice(1, 1),
        padded=lambda x: lax.pad(x, np.float32(0), ((1, 1, 0),)),
        unpadded=lambda x: lax.pad(x, np.float32(0), ((0, 0, 0),)),
        halves=lambda x: lax.split(x, (x.shape[0] // 2,) * 2),
        from_one=lambda x: lax.dynamic_slice(x, (np.int32(1),), (2,)),
    ),
    *_named(
        2,
        joined=lambda x, y: lax.concatenate([x, y], 0),
        updated=lambda x, y: lax.dynamic_update_slice(x, y, (np.int32(1),)),
    ),
    Operation("three", lambda x, y, z: lax.concatenate([x, y, z], 0), 3),
]
_REDUCTIONS = [
    *_named(
        1,
        sum_rows=lambda x: lax.reduce_sum(x, (0,)),
        sum_unit=lambda x: lax.reduce_sum(x, (1,)),
        sum_both=lambda x: lax.reduce_sum(x, (0, 1)),
        max_rows=lambda x: lax.reduce_max(x, (0,)),
        max_unit=lambda x: lax.reduce_max(x, (1,)),
        product_unit=lambda x: lax.reduce_prod(x, (1,)),
        cumsum_unit=lambda x: lax.cumsum(x, 1),
        cumprod_unit=lambda x: lax.cumprod(x, 1, reverse=True),
        cummax=lambda x: lax.cummax(x, 0),
        squeezed=lambda x: lax.squeeze(x, (1,)),
        spread=_broadcast(2, 1, 3, over=(2,)),
        raised=_broadcast(2, 1, 3, over=(0, 2)),
    ),
    *_operations(1, lax.neg),
    *_operations(2, lax.add),
]
_TRUTHS = [
    *_named(
        1,
        all_rows=lambda x: lax.reduce_and(x, (0,)),
        all_unit=lambda x: lax.reduce_and(x, (1,)),
        any_rows=lambda x: lax.reduce_or(x, (0,)),
        any_unit=lambda x: lax.reduce_or(x, (1,)),
        any_both=lambda x: lax.reduce_or(x, (0, 1)),
    ),
    *_operations(1, lax.bitwise_not),
]


def _dot(x_dim: int, y_dim: int) -> Callable[..., Any]:
    return lambda x, y: lax.dot_general(x, y, (((x_dim,), (y_dim,)), ((), ())))


_PRODUCTS = [
    *_named(1, transpose=lambda x: lax.transpose(x, (1, 0))),
    *_operations(1, lax.neg),
    *_named(2, dot=_dot(1, 0), dot_of_columns=_dot(0, 0), dot_of_rows=_dot(1, 1)),
    *_operations(2, lax.add),
]
_INDEXING = [
    *_named(
        2,
        taken=lambda x, i: lax.dynamic_slice(x, (i,), (2,)),
        gathered=lambda x, i: lax.gather(
            x,
            lax.broadcast(i, (1,)),
            lax.GatherDimensionNumbers((), (0,), (0,)),
            (1,),
            mode=lax.GatherScatterMode.CLIP,
        ),
    ),
    Operation("updated", lambda x, y, i: lax.dynamic_update_slice(x, y, (i,)), 3),
    *_operations(1, lax.neg),
    *_operations(2, lax.add),
]
_CONSTANTS = [
    *_named(0, iota=lambda: lax.iota(np.int32, 3), twos=lambda: lax.full((3,), 2, np.int32)),
    *_operations(1, lax.neg),
    *_operations(2, lax.add, lax.mul),
]
_INDICES = tuple(map(np.int32, (0, 3, -1)))
_TYPED = (np.float32(0), np.float32(1), np.True_, np.False_)

# Most families: all programs of four equations with one unused result, up to the order of
# independent equations; or of three, in every order, with a literal and another result. Programs
# with other results or more literals are sampled.
_FOUR: dict[str, Any] = {"equations": 4, "unread": 1, "returned": 0, "orders": False}
_THREE: dict[str, Any] = {"equations": 3, "unread": 1, "returned": 1}
_TWO: dict[str, Any] = {"equations": 2, "pipelines": _ALL}

_MATRIX, _INT_MATRIX = _array(np.float32, 2, 3), _array(np.int32, 2, 3)
_BODY = [*_operations(1, lax.neg), *_operations(2, lax.sub, lax.mul)]
_NAMED: dict[str, Any] = {"equations": 1, "alike": False}

FAMILIES: list[Family | Bodies] = [
    # Small, and proved completely in CI.
    Family("trees", _ARITHMETIC, [_FLOAT] * 3, **_FOUR, trees=True, in_ci=True),
    Family("transposes", _TRANSPOSES, [_MATRIX], **_THREE, in_ci=True),
    # Arithmetic.
    Family("arithmetic", _ARITHMETIC, [_FLOAT] * 3, **_FOUR, groups=16),
    Family("arithmetic of any results", _ARITHMETIC, [_FLOAT] * 3, equations=4, share=1e-4),
    Family("arithmetic in any pipeline", _ARITHMETIC, [_FLOAT] * 3, pipelines=_ALL, share=0.05),
    Family("arithmetic with dead equations", _ARITHMETIC, [_FLOAT] * 2, dead=True, share=0.15),
    Family(
        "arithmetic with a literal",
        _ARITHMETIC,
        [_FLOAT] * 3,
        _LITERALS,
        **_THREE,
        share=0.1,
        groups=2,
    ),
    Family(
        "arithmetic with literals",
        _ARITHMETIC,
        [_FLOAT] * 3,
        _LITERALS,
        **_THREE,
        most_literals=3,
        share=2e-3,
        groups=2,
    ),
    Family(
        "four equations with literals",
        _ARITHMETIC,
        [_FLOAT] * 3,
        _LITERALS,
        **_FOUR,
        most_literals=2,
        share=5e-5,
    ),
    Family(
        "integers",
        _ARITHMETIC,
        [_INT] * 2,
        (0, 1, -1, 2),
        **_THREE,
        most_literals=2,
        share=0.04,
    ),
    Family(
        "weak types",
        [*_ARITHMETIC, *_converts(np.float32)],
        [_WEAK, _FLOAT, _WEAK],
        _LITERALS,
        **_THREE,
        share=0.02,
    ),
    Family("cotangents", _SUMS, [_FLOAT] * 3, **_FOUR, share=0.05),
    Family("quotients", _QUOTIENTS, [_FLOAT] * 3, **_FOUR, share=0.15),
    Family("quotients with a literal", _QUOTIENTS, [_FLOAT] * 3, _LITERALS, **_THREE, share=0.15),
    Family("signs", _SIGNS, [_FLOAT] * 2, (0.0, -0.0, np.inf, -np.inf), **_THREE, share=0.1),
    Family("powers", _POWERS, [_FLOAT] * 2, _LITERALS, **_THREE, share=0.08),
    Family("rounding", _ROUNDING, [_FLOAT], **_FOUR),
    Family("exponentials", _GROWTH, [_FLOAT], **_THREE, share=0.5),
    Family("complex numbers", _PARTS, [_COMPLEX, _FLOAT, _FLOAT], **_THREE),
    # Bits, comparisons, selection.
    Family("bits", _BITS, [_BOOL] * 2, **_FOUR, share=0.07),
    Family("bits with literals", _BITS, [_BOOL] * 2, (True, False), **_THREE, share=0.1),
    Family("shifts", _SHIFTS, [_INT] * 2, (0, -1, 1), **_THREE, share=0.02),
    Family("comparisons", _COMPARISONS, [_FLOAT] * 2, (0.0, -0.0), **_THREE, share=0.08),
    Family("truth values", _COMPARISONS, [_BOOL] * 2, (True, False), **_THREE, share=0.01),
    Family("selection", _SELECTION, [_BOOL, _FLOAT, _FLOAT], _TYPED, **_THREE, share=0.08),
    Family("bits of integers", _BITS, [_INT] * 2, (0, -1, 5), **_THREE, share=0.05),
    Family("bits of bytes", _BITS, [_BYTE] * 2, (0, 255, 5), **_THREE, share=0.05),
    Family(
        "integer predicates",
        _PREDICATES,
        [_INT, _BOOL, _INT],
        (np.int32(0), np.int32(1), np.int32(-1), np.True_, np.False_),
        **_THREE,
        share=5e-4,
        groups=2,
    ),
    Family(
        "two of predicates",
        _PREDICATES,
        [_INT, _BOOL, _INT],
        (np.int32(0), np.int32(1), np.int32(-1), np.True_, np.False_),
        equations=2,
        most_literals=2,
        share=0.1,
        groups=4,
    ),
    Family("clamps", _CLAMPS, [_INT] * 2, (-(2**31), 2**31 - 1, 0), **_THREE, share=0.01),
    # Types and shapes.
    Family("conversions of floats", _CONVERSIONS, [_FLOAT], **_FOUR),
    Family("conversions of weak floats", _CONVERSIONS, [_WEAK], **_FOUR),
    Family("conversions of integers", _CONVERSIONS, [_INT], **_FOUR),
    Family("layout", _LAYOUT, [_MATRIX] * 2, **_FOUR, share=0.15),
    Family("shapes", _SHAPES, [_array(np.float32, 3)], (2.0,), **_THREE, share=0.5),
    Family("slices", _SLICES, [_array(np.float32, 4)], **_THREE, share=0.2),
    Family("reductions", _REDUCTIONS, [_array(np.int32, 2, 1, 3)], **_THREE, share=0.6),
    Family("reductions of floats", _REDUCTIONS, [_array(np.float32, 2, 1, 3)], **_THREE, share=0.3),
    Family(
        "reductions of complex numbers",
        [each for each in _REDUCTIONS if "max" not in each.name],
        [_array(np.complex64, 2, 1, 3)],
        **_THREE,
        share=0.1,
    ),
    Family("reductions of bits", _TRUTHS, [_array(np.bool_, 2, 1, 3)], **_FOUR),
    Family("products", _PRODUCTS, [_INT_MATRIX] * 2, **_THREE, share=0.5),
    Family("products of floats", _PRODUCTS, [_MATRIX] * 2, **_THREE, share=0.2),
    Family("indexing", _INDEXING, [_array(np.float32, 5), _INT], _INDICES, **_THREE, share=0.2),
    Family(
        "constants",
        _CONSTANTS,
        [_array(np.int32, 3)],
        (0, 1, 2),
        **_THREE,
        pipelines=_ALL,
        share=0.1,
    ),
    # All programs of two equations, whatever they return.
    Family(
        "two with literals",
        _ARITHMETIC,
        [_FLOAT] * 3,
        _LITERALS,
        equations=2,
        most_literals=4,
        groups=3,
    ),
    Family("two of arithmetic", _ARITHMETIC, [_FLOAT] * 3, _LITERALS, **_TWO),
    Family("two of layout", _LAYOUT, [_MATRIX] * 2, **_TWO),
    Family("two of slices", _SLICES, [_array(np.float32, 4)], **_TWO),
    # Loops, branches and calls.
    Bodies("calls", KINDS["call"], Family("", _BODY, [Scalar] * 3, (2.0,), **_NAMED)),
    Bodies("scans", KINDS["scan"], Family("", _BODY, [Scalar] * 4, (2.0,), **_NAMED), share=0.06),
    Bodies("whiles", KINDS["while"], Family("", _BODY, [Scalar] * 3, (2.0,), **_NAMED)),
    Bodies("conds", KINDS["cond"], Family("", _BODY, [Scalar] * 2, (2.0,), **_NAMED), share=0.06),
]
