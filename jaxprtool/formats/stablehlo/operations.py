"""Rules for operations on arrays: elementwise, shapes, indices, products, random bits.

Each calls the `lax` function whose lowering is the operation. A rule for what `lax` does not have
as it stands says how it differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import primitives
from jax.extend.mlir.dialects import stablehlo as stablehlo_dialect

from jaxprtool.formats.stablehlo.reader import (
    LAZY,
    Lazy,
    Operation,
    Splat,
    bundled,
    forced,
    lazy,
    leaves,
    stablehlo_rules,
)
from jaxprtool.ir.rules import rule

#: The bindings of the dialect, which have no types.
stablehlo: Any = stablehlo_dialect

# --- elementwise ----------------------------------------------------------------------------------
# Operations by element. `lax` takes a scalar constant as it is, without broadcasting it.

_UNARY: Mapping[str, Callable[[Any], Any]] = {
    "abs": lax.abs,
    "cbrt": lax.cbrt,
    "ceil": lax.ceil,
    "cosine": lax.cos,
    "count_leading_zeros": lax.clz,
    "exponential": lax.exp,
    "exponential_minus_one": lax.expm1,
    "floor": lax.floor,
    "is_finite": lax.is_finite,
    "log": lax.log,
    "log_plus_one": lax.log1p,
    "logistic": lax.logistic,
    "negate": lax.neg,
    "not": lax.bitwise_not,
    "popcnt": lax.population_count,
    "round_nearest_afz": partial(lax.round, rounding_method=lax.RoundingMethod.AWAY_FROM_ZERO),
    "round_nearest_even": partial(lax.round, rounding_method=lax.RoundingMethod.TO_NEAREST_EVEN),
    "rsqrt": lax.rsqrt,
    "sign": lax.sign,
    "sine": lax.sin,
    "sqrt": lax.sqrt,
    "tan": lax.tan,
    "tanh": lax.tanh,
}

_CHLO: Mapping[str, Callable[..., Any]] = {
    "acos": lax.acos,
    "acosh": lax.acosh,
    "asin": lax.asin,
    "asinh": lax.asinh,
    "atan": lax.atan,
    "atanh": lax.atanh,
    "bessel_i1e": lax.bessel_i1e,
    "conj": lax.conj,
    "cosh": lax.cosh,
    "digamma": lax.digamma,
    "erf": lax.erf,
    "erf_inv": lax.erf_inv,
    "erfc": lax.erfc,
    "lgamma": lax.lgamma,
    "next_after": lax.nextafter,
    "polygamma": lax.polygamma,
    "sinh": lax.sinh,
    "square": lax.square,
    "tan": lax.tan,
    "zeta": lax.zeta,
}

#: The operations of two operands; also those that a region names.
BINARY: Mapping[str, Callable[..., Any]] = {
    "stablehlo.add": lax.add,
    "stablehlo.and": lax.bitwise_and,
    "stablehlo.atan2": lax.atan2,
    "stablehlo.complex": lax.complex,
    "stablehlo.divide": lax.div,
    "stablehlo.maximum": lax.max,
    "stablehlo.minimum": lax.min,
    "stablehlo.multiply": lax.mul,
    "stablehlo.or": lax.bitwise_or,
    "stablehlo.power": lax.pow,
    "stablehlo.remainder": lax.rem,
    "stablehlo.shift_left": lax.shift_left,
    "stablehlo.shift_right_arithmetic": lax.shift_right_arithmetic,
    "stablehlo.shift_right_logical": lax.shift_right_logical,
    "stablehlo.subtract": lax.sub,
    "stablehlo.xor": lax.bitwise_xor,
}


#: What the operations of numbers are on booleans, which `lax` refuses.
_OF_BOOLEANS: Mapping[Any, Callable[..., Any]] = {lax.add: lax.bitwise_or, lax.mul: lax.bitwise_and}


def binary(name: str, element_type: Any) -> Callable[..., Any] | None:
    """Return the function of `lax` for an operation of two operands; None for another one."""
    function = BINARY.get(name)
    return _OF_BOOLEANS.get(function, function) if str(element_type) == "i1" else function


def _elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(op: Operation, *operands: Any) -> Any:
        _require_default_accuracy(op)
        return function(*operands)

    return apply


def _binary(function: Callable[..., Any]) -> Callable[..., Any]:
    of_booleans = _OF_BOOLEANS.get(function)

    @lazy
    def apply(op: Operation, *operands: Any) -> Any:
        _require_default_accuracy(op)
        if of_booleans is not None and op.result_type.dtype == np.bool_:
            return of_booleans(*with_scalars(operands))
        return function(*with_scalars(operands))

    return apply


def with_scalars(operands: Sequence[Any]) -> list[Any]:
    """Return operands with constants as scalars, unless all of them are constants."""
    if all(isinstance(operand, Splat) for operand in operands):
        return [forced(operand) for operand in operands]
    return [
        operand.scalar if isinstance(operand, Splat) else forced(operand) for operand in operands
    ]


def _require_default_accuracy(op: Operation) -> None:
    accuracy = op.attributes.pop("result_accuracy", None)
    if accuracy is not None and "mode<DEFAULT>" not in str(accuracy).replace(" ", ""):
        raise op.refused(f"result_accuracy = {accuracy}")


for _name, _function in _UNARY.items():
    rule(stablehlo_rules, f"stablehlo.{_name}")(_elementwise(_function))
for _name, _function in _CHLO.items():
    rule(stablehlo_rules, f"chlo.{_name}", f"mhlo.{_name}")(_elementwise(_function))
for _name, _function in BINARY.items():
    rule(stablehlo_rules, _name)(_binary(_function))


def also(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator of a further rule for an operation, for operands that are `Lazy`.

    If it returns None, the rule applies that the operation had.
    """
    plain = stablehlo_rules[name]

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        @rule(stablehlo_rules, name)
        @lazy
        def apply(op: Operation, *operands: Any) -> Any:
            result = function(op, *operands)
            return plain(op, *operands) if result is None else result

        return apply

    return add


@rule(stablehlo_rules, "stablehlo.real")
def _(op: Operation, x: Any) -> Any:
    return lax.real(x) if jax.numpy.iscomplexobj(x) else x


@rule(stablehlo_rules, "stablehlo.imag")
def _(op: Operation, x: Any) -> Any:
    return lax.imag(x) if jax.numpy.iscomplexobj(x) else lax.full_like(x, 0)


@also("stablehlo.power")
def _(op: Operation, x: Any, y: Any) -> Any:
    """Return powers of integers; XLA's of a negative exponent is rounded towards zero."""
    dtype = op.result_type.dtype
    if not jax.dtypes.issubdtype(dtype, np.integer):
        return None
    if isinstance(y, Splat) and y.scalar >= 0:
        return lax.integer_pow(forced(x), int(y.scalar))
    base, exponent = forced(x), forced(y)
    one = lax.full_like(base, 1)

    def square(values: Any) -> Any:
        power, base, exponent = values
        is_odd = lax.ne(lax.bitwise_and(exponent, one), lax.full_like(one, 0))
        power = lax.select_n(is_odd, power, lax.mul(power, base))
        return power, lax.mul(base, base), lax.shift_right_logical(exponent, one)

    def goes_on(values: Any) -> Any:
        return lax.reduce_or(lax.ne(values[2], lax.full_like(one, 0)), range(one.ndim))

    power = lax.while_loop(goes_on, square, (one, base, exponent))[0]
    if not jax.dtypes.issubdtype(dtype, np.signedinteger):
        return power
    # The powers of 1 and -1 repeat, so that the bits of a negative exponent give them.
    is_unit = lax.eq(lax.abs(base), one)
    is_inverse = lax.bitwise_and(lax.lt(exponent, lax.full_like(one, 0)), lax.bitwise_not(is_unit))
    return lax.select_n(is_inverse, power, lax.full_like(one, 0))


_COMPARISONS = {
    "EQ": lax.eq,
    "NE": lax.ne,
    "LT": lax.lt,
    "LE": lax.le,
    "GT": lax.gt,
    "GE": lax.ge,
}


@rule(stablehlo_rules, "stablehlo.compare")
@lazy
def _(op: Operation, x: Any, y: Any) -> Any:
    direction, kind = op.take("comparison_direction"), op.take("compare_type")
    dtype = op.operand_types()[0].dtype
    x, y = with_scalars((x, y))
    if (dtype.kind, kind) in (("i", "UNSIGNED"), ("u", "SIGNED")):
        other = f"{'int' if kind == 'SIGNED' else 'uint'}{8 * dtype.itemsize}"
        x, y = (lax.bitcast_convert_type(value, other) for value in (x, y))
    if kind != "TOTALORDER" or not jax.dtypes.issubdtype(dtype, np.inexact):
        return _COMPARISONS[direction](x, y)
    match direction:
        case "EQ":
            return primitives.eq_to_p.bind(x, y)
        case "NE":
            return lax.bitwise_not(primitives.eq_to_p.bind(x, y))
        case "LT":
            return primitives.lt_to_p.bind(x, y)
        case "LE":
            return primitives.le_to_p.bind(x, y)
        case "GT":
            return primitives.lt_to_p.bind(y, x)
    return primitives.le_to_p.bind(y, x)


@rule(stablehlo_rules, "stablehlo.select")
def _(op: Operation, which: Any, on_true: Any, on_false: Any) -> Any:
    return lax.select_n(which, on_false, on_true)


@rule(stablehlo_rules, "stablehlo.clamp")
@lazy
def _(op: Operation, low: Any, x: Any, high: Any) -> Any:
    bounds = low, high
    if all(isinstance(bound, Splat) for bound in bounds):
        low, high = low.scalar, high.scalar
    value = forced(x)

    def clamped() -> Any:
        return lax.clamp(forced(low), value, forced(high))

    if np.shape(value):
        return clamped()
    return Clamped((), clamped, value, (low, high))


class Clamped(Lazy):
    """A scalar between two bounds: `lax.switch` clamps its index itself."""

    def __init__(
        self, shape: Sequence[int], force: Callable[[], Any], value: Any, bounds: tuple[Any, Any]
    ) -> None:
        super().__init__(shape, force)
        self.value = value
        self.bounds = bounds


@rule(stablehlo_rules, "stablehlo.convert")
@lazy
def _(op: Operation, x: Any) -> Any:
    dtype = op.result_type.dtype
    if isinstance(x, Count) and dtype == np.uint32:
        return x.low()
    value = forced(x)
    if not np.shape(value) and value.dtype == np.bool_ and dtype == np.int32:
        return Choice((), lambda: lax.convert_element_type(value, dtype), value)
    return lax.convert_element_type(value, dtype)


class Choice(Lazy):
    """A boolean scalar as an index: `lax.cond` converts its predicate itself."""

    def __init__(self, shape: Sequence[int], force: Callable[[], Any], value: Any) -> None:
        super().__init__(shape, force)
        self.value = value


@rule(stablehlo_rules, "stablehlo.bitcast_convert")
def _(op: Operation, x: Any) -> Any:
    return lax.bitcast_convert_type(x, op.result_type.dtype)


@rule(stablehlo_rules, "stablehlo.reduce_precision")
def _(op: Operation, x: Any) -> Any:
    return lax.reduce_precision(x, op.take("exponent_bits"), op.take("mantissa_bits"))


@rule(stablehlo_rules, "mhlo.copy")
def _(op: Operation, x: Any) -> Any:
    return x


@rule(stablehlo_rules, "stablehlo.optimization_barrier")
def _(op: Operation, *operands: Any) -> Any:
    kinds = [operand.type for operand in op.op.operands]
    return bundled(kinds, iter(lax.optimization_barrier(leaves(operands))))


@rule(stablehlo_rules, "stablehlo.map")
def _(op: Operation, *operands: Any) -> Any:
    dimensions, function = op.take("dimensions"), op.body()
    for _axis in dimensions:
        function = jax.vmap(function)
    return function(*operands)


# --- broadcasting ---------------------------------------------------------------------------------
# Operations of CHLO that broadcast their operands as NumPy does.


def _broadcasting(name: str) -> Callable[..., Any]:
    """Return the rule for an operation on operands of its result's shape, with broadcasting."""
    function = stablehlo_rules[name]

    @lazy
    def apply(op: Operation, *operands: Any) -> Any:
        shape = op.result_type.shape
        dimensions = op.take("broadcast_dimensions")
        rank = min(len(kind.shape) for kind in op.operand_types())
        if dimensions not in (None, [*range(len(shape) - rank, len(shape))]):
            raise op.refused(f"broadcast_dimensions = {dimensions}, not those of NumPy")
        values = [_broadcast(operand, shape) for operand in operands]
        return function(op, *(values if function in LAZY else map(forced, values)))

    return apply


def _broadcast(x: Any, shape: Sequence[int]) -> Any:
    if isinstance(x, Splat):
        return Splat(x.scalar, shape)
    value = forced(x)
    if value.shape == shape:
        return x
    missing = len(shape) - len(value.shape)
    return lax.broadcast_in_dim(value, shape, tuple(range(missing, len(shape))))


for _name, _of_chlo in {
    **{name: name.replace("stablehlo", "chlo") for name in BINARY},
    "stablehlo.compare": "chlo.compare",
    "stablehlo.select": "chlo.select",
    **{f"chlo.{name}": f"chlo.{name}" for name in _CHLO},
}.items():
    rule(stablehlo_rules, _of_chlo.replace(".", ".broadcast_"))(_broadcasting(_name))


@rule(stablehlo_rules, "chlo.constant_like")
@lazy
def _(op: Operation, x: Any) -> Any:
    kind = op.result_type
    return Splat(np.array(op.take("value")).astype(kind.dtype)[()], kind.shape)


@rule(stablehlo_rules, "chlo.is_inf")
def _(op: Operation, x: Any) -> Any:
    return lax.eq(lax.abs(x), np.array(np.inf, x.dtype))


@rule(stablehlo_rules, "chlo.is_pos_inf")
def _(op: Operation, x: Any) -> Any:
    return lax.eq(x, np.array(np.inf, x.dtype))


@rule(stablehlo_rules, "chlo.is_neg_inf")
def _(op: Operation, x: Any) -> Any:
    return lax.eq(x, np.array(-np.inf, x.dtype))


# --- counts ---------------------------------------------------------------------------------------
# JAX counts the elements of an array in 64 bits, even where 64-bit types are disabled, and splits
# the counts into two words of 32 bits (`jax.random.bits`). Written in 64 bits, the program could
# not be run by such a JAX.


class Count(Lazy):
    """A sum of 64-bit multiples of indices that fits into 32 bits.

    Attributes:
        steps: What an index adds, by dimension.
    """

    def __init__(self, shape: Sequence[int], steps: Sequence[int]) -> None:
        super().__init__(shape, partial(self._summed, np.uint64))
        self.steps = tuple(steps)

    def low(self) -> Any:
        """Return the lower words."""
        return self._summed(np.uint32)

    def fits(self) -> bool:
        """Return True if the upper words are zero."""
        largest = (step * (size - 1) for step, size in zip(self.steps, self.shape, strict=True))
        return sum(largest) < 2**32

    def _summed(self, dtype: Any) -> Any:
        total = None
        for axis, step in enumerate(self.steps):
            if step:
                term = lax.broadcasted_iota(dtype, self.shape, axis)
                term = term if step == 1 else lax.mul(term, np.array(step, dtype))
                total = term if total is None else lax.add(total, term)
        return total if total is not None else lax.full(self.shape, 0, dtype)


def _counted(count: Count) -> Any:
    return count if count.fits() else forced(count)


@rule(stablehlo_rules, "stablehlo.iota", "stablehlo.dynamic_iota")
@lazy
def _(op: Operation, *shape: Any) -> Any:
    axis, aval = op.take("iota_dimension"), op.result_type
    if aval.dtype == np.uint64:
        return _counted(Count(aval.shape, [int(i == axis) for i in range(len(aval.shape))]))
    return lax.broadcasted_iota(aval.dtype, aval.shape, axis)


@also("stablehlo.multiply")
def _(op: Operation, x: Any, y: Any) -> Any:
    count, factor = (x, y) if isinstance(x, Count) else (y, x)
    if isinstance(count, Count) and isinstance(factor, Splat):
        return _counted(Count(count.shape, [step * int(factor.scalar) for step in count.steps]))
    return None


@also("stablehlo.add")
def _(op: Operation, x: Any, y: Any) -> Any:
    if isinstance(x, Count) and isinstance(y, Count):
        steps = [a + b for a, b in zip(x.steps, y.steps, strict=True)]
        return _counted(Count(x.shape, steps))
    return None


@also("stablehlo.shift_right_logical")
def _(op: Operation, x: Any, y: Any) -> Any:
    if isinstance(x, Count) and isinstance(y, Splat) and int(y.scalar) == 32:
        return Count(x.shape, [0] * len(x.shape))
    return None


# --- shapes ---------------------------------------------------------------------------------------
# The operand of a dynamic operation that says the shape is that of the type, or it has no meaning.


@rule(stablehlo_rules, "stablehlo.broadcast_in_dim", "stablehlo.dynamic_broadcast_in_dim")
@lazy
def _(op: Operation, x: Any, *output_shape: Any) -> Any:
    for name in ("known_expanding_dimensions", "known_nonexpanding_dimensions"):
        op.attributes.pop(name, None)
    shape, dims = op.result_type.shape, tuple(op.take("broadcast_dimensions"))
    if isinstance(x, Splat):
        return Splat(x.scalar, shape)
    value = forced(x)
    if [*dims] != sorted(dims):
        order = np.argsort(dims)
        value, dims = lax.transpose(value, tuple(map(int, order))), tuple(sorted(dims))
    return lax.broadcast_in_dim(value, shape, dims)


@rule(stablehlo_rules, "stablehlo.broadcast")
def _(op: Operation, x: Any) -> Any:
    return lax.broadcast(x, op.take("broadcast_sizes"))


@rule(stablehlo_rules, "stablehlo.reshape", "stablehlo.dynamic_reshape")
@lazy
def _(op: Operation, x: Any, *output_shape: Any) -> Any:
    shape = op.result_type.shape
    return Splat(x.scalar, shape) if isinstance(x, Splat) else lax.reshape(forced(x), shape)


@rule(stablehlo_rules, "stablehlo.transpose")
def _(op: Operation, x: Any) -> Any:
    permutation = tuple(op.take("permutation"))
    return primitives.transpose_p.bind(x, permutation=permutation)


@rule(stablehlo_rules, "stablehlo.reverse")
def _(op: Operation, x: Any) -> Any:
    return lax.rev(x, tuple(op.take("dimensions")))


@rule(stablehlo_rules, "stablehlo.slice")
def _(op: Operation, x: Any) -> Any:
    strides = op.take("strides")
    strides = None if all(stride == 1 for stride in strides) else strides
    return primitives.slice_p.bind(
        x,
        start_indices=tuple(op.take("start_indices")),
        limit_indices=tuple(op.take("limit_indices")),
        strides=None if strides is None else tuple(strides),
    )


@rule(stablehlo_rules, "stablehlo.pad")
def _(op: Operation, x: Any, value: Any) -> Any:
    names = "edge_padding_low", "edge_padding_high", "interior_padding"
    return lax.pad(x, value, [*zip(*map(op.take, names), strict=True)])


@rule(stablehlo_rules, "stablehlo.concatenate")
def _(op: Operation, *operands: Any) -> Any:
    return primitives.concatenate_p.bind(*operands, dimension=op.take("dimension"))


@rule(stablehlo_rules, "stablehlo.get_dimension_size")
def _(op: Operation, x: Any) -> Any:
    return np.int32(x.shape[op.take("dimension")])


@rule(stablehlo_rules, "stablehlo.set_dimension_size")
@lazy
def _(op: Operation, x: Any, size: Any) -> Any:
    """Return the operand, if the size that its elements have is that of the type."""
    whole = op.result_type.shape[op.take("dimension")]
    if not (isinstance(size, Splat) and size.scalar == whole):
        raise op.refused("a size that is not that of its type")
    return x


# --- indices --------------------------------------------------------------------------------------


@rule(stablehlo_rules, "stablehlo.dynamic_slice")
def _(op: Operation, x: Any, *indices: Any) -> Any:
    # `lax.dynamic_slice` would count negative indices from the end.
    return primitives.dynamic_slice_p.bind(x, *indices, slice_sizes=tuple(op.take("slice_sizes")))


@rule(stablehlo_rules, "stablehlo.dynamic_update_slice")
def _(op: Operation, x: Any, update: Any, *indices: Any) -> Any:
    return primitives.dynamic_update_slice_p.bind(x, update, *indices)


def with_vector_last(indices: Any, axis: int) -> Any:
    """Return the indices of a gather or scatter with index vectors along the last axis."""
    rank = len(indices.shape)
    if axis == rank:
        return lax.broadcast_in_dim(indices, (*indices.shape, 1), range(rank))
    if axis == rank - 1:
        return indices
    return lax.transpose(indices, (*(i for i in range(rank) if i != axis), axis))


@rule(stablehlo_rules, "stablehlo.gather")
def _(op: Operation, x: Any, indices: Any) -> Any:
    numbers = stablehlo.GatherDimensionNumbers(op.take("dimension_numbers"))
    return lax.gather(
        x,
        with_vector_last(indices, numbers.index_vector_dim),
        lax.GatherDimensionNumbers(
            offset_dims=tuple(numbers.offset_dims),
            collapsed_slice_dims=tuple(numbers.collapsed_slice_dims),
            start_index_map=tuple(numbers.start_index_map),
            operand_batching_dims=tuple(numbers.operand_batching_dims),
            start_indices_batching_dims=tuple(numbers.start_indices_batching_dims),
        ),
        tuple(op.take("slice_sizes")),
        indices_are_sorted=op.take("indices_are_sorted", False),
        mode=lax.GatherScatterMode.CLIP,
    )


@rule(stablehlo_rules, "stablehlo.torch_index_select")
def _(op: Operation, x: Any, indices: Any) -> Any:
    """Return elements along a dimension; an index that is too large takes the last one."""
    batch, dim = op.take("batch_dims"), op.take("dim")
    rank, shape = len(x.shape), tuple(op.result_type.shape)
    vector = lax.broadcast_in_dim(indices, (*indices.shape, 1), range(len(indices.shape)))
    first = dim + len(indices.shape) - batch
    offsets = tuple(i for i in range(len(shape)) if not (dim <= i < first or i < batch))
    numbers = lax.GatherDimensionNumbers(
        offset_dims=offsets,
        collapsed_slice_dims=(dim,),
        start_index_map=(dim,),
        operand_batching_dims=tuple(range(batch)),
        start_indices_batching_dims=tuple(range(batch)),
    )
    sizes = tuple(1 if i == dim or i < batch else x.shape[i] for i in range(rank))
    return lax.gather(x, vector, numbers, sizes, mode=lax.GatherScatterMode.CLIP)


# --- products -------------------------------------------------------------------------------------


def _precision(op: Operation) -> Any:
    """Return the precision of a product as `lax` takes it; None for the default."""
    levels = [getattr(lax.Precision, name) for name in op.take("precision_config", [])]
    return None if {*levels} <= {lax.Precision.DEFAULT} else tuple(levels)


@rule(stablehlo_rules, "stablehlo.dot_general")
def _(op: Operation, x: Any, y: Any) -> Any:
    numbers = stablehlo.DotDimensionNumbers(op.take("dot_dimension_numbers"))
    algorithm, precision = op.take("algorithm"), _precision(op)
    if algorithm is not None:
        read = stablehlo.DotAlgorithm(algorithm)
        precision = lax.DotAlgorithm(
            *(
                _dtype(op, getattr(read, f"{name}_type"))
                for name in ("lhs_precision", "rhs_precision")
            ),
            accumulation_type=_dtype(op, read.accumulation_type),
            lhs_component_count=read.lhs_component_count,
            rhs_component_count=read.rhs_component_count,
            num_primitive_operations=read.num_primitive_operations,
            allow_imprecise_accumulation=read.allow_imprecise_accumulation,
        )
    contracting = numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions
    batching = numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions
    return lax.dot_general(
        x,
        y,
        (tuple(map(tuple, contracting)), tuple(map(tuple, batching))),
        precision=precision,
        preferred_element_type=op.result_type.dtype,
    )


@rule(stablehlo_rules, "stablehlo.dot")
def _(op: Operation, x: Any, y: Any) -> Any:
    """Return a product of matrices and vectors, as XLA writes it."""
    numbers = (((len(x.shape) - 1,), (0,)), ((), ()))
    dtype = op.result_type.dtype
    return lax.dot_general(x, y, numbers, _precision(op), preferred_element_type=dtype)


@rule(stablehlo_rules, "stablehlo.einsum", "stablehlo.unary_einsum")
def _(op: Operation, *operands: Any) -> Any:
    return jax.numpy.einsum(op.take("einsum_config"), *operands)


def _dtype(op: Operation, kind: Any) -> Any:
    try:
        return op.reader.dtypes[str(kind)]
    except KeyError:
        raise op.refused(f"algorithm with elements of {kind}") from None


@rule(stablehlo_rules, "stablehlo.convolution")
def _(op: Operation, x: Any, kernel: Any) -> Any:
    numbers = stablehlo.ConvDimensionNumbers(op.take("dimension_numbers"))
    spatial = [*numbers.kernel_spatial_dimensions]
    ones = [1] * len(spatial)
    reversal = op.take("window_reversal") or [False] * len(spatial)
    if any(reversal):
        axes = tuple(axis for axis, flag in zip(spatial, reversal, strict=True) if flag)
        kernel = lax.rev(kernel, axes)
    padding = op.take("padding", np.zeros((len(spatial), 2), int))
    return lax.conv_general_dilated(
        x,
        kernel,
        window_strides=tuple(op.take("window_strides", ones)),
        padding=[(int(low), int(high)) for low, high in padding],
        lhs_dilation=tuple(op.take("lhs_dilation", ones)),
        rhs_dilation=tuple(op.take("rhs_dilation", ones)),
        dimension_numbers=lax.ConvDimensionNumbers(
            (
                numbers.input_batch_dimension,
                numbers.input_feature_dimension,
                *numbers.input_spatial_dimensions,
            ),
            (
                numbers.kernel_output_feature_dimension,
                numbers.kernel_input_feature_dimension,
                *spatial,
            ),
            (
                numbers.output_batch_dimension,
                numbers.output_feature_dimension,
                *numbers.output_spatial_dimensions,
            ),
        ),
        feature_group_count=op.take("feature_group_count", 1),
        batch_group_count=op.take("batch_group_count", 1),
        precision=_precision(op),
        preferred_element_type=op.result_type.dtype,
    )


@rule(stablehlo_rules, "stablehlo.cholesky")
def _(op: Operation, x: Any) -> Any:
    if op.take("lower", False):
        return lax.linalg.cholesky(x, symmetrize_input=False)
    transposed = lax.linalg.cholesky(_adjoint(x), symmetrize_input=False)
    return _adjoint(transposed)


def _adjoint(x: Any) -> Any:
    rank = len(x.shape)
    swapped = lax.transpose(x, (*range(rank - 2), rank - 1, rank - 2))
    return lax.conj(swapped) if jax.dtypes.issubdtype(x.dtype, np.complexfloating) else swapped


@rule(stablehlo_rules, "stablehlo.triangular_solve")
def _(op: Operation, a: Any, b: Any) -> Any:
    transpose = op.take("transpose_a", "NO_TRANSPOSE")
    return lax.linalg.triangular_solve(
        a,
        b,
        left_side=op.take("left_side"),
        lower=op.take("lower"),
        transpose_a=transpose != "NO_TRANSPOSE",
        conjugate_a=transpose == "ADJOINT",
        unit_diagonal=op.take("unit_diagonal"),
    )


@rule(stablehlo_rules, "stablehlo.fft")
def _(op: Operation, x: Any) -> Any:
    return lax.fft(x, op.take("fft_type"), tuple(op.take("fft_length")))


# --- random numbers and top k -----------------------------------------------------------------


@rule(stablehlo_rules, "stablehlo.rng_bit_generator")
def _(op: Operation, key: Any) -> Any:
    algorithms = lax.RandomAlgorithm
    algorithm = {
        "DEFAULT": algorithms.RNG_DEFAULT,
        "THREE_FRY": algorithms.RNG_THREE_FRY,
        "PHILOX": algorithms.RNG_PHILOX,
    }[op.take("rng_algorithm")]
    if (tuple(key.shape), key.dtype) != (
        (2,),
        np.uint64,
    ):  # XLA has no other, nor has JAX's lowering
        raise op.refused(f"its state is {key.dtype}[{key.shape[0]}], and JAX's is uint64[2]")
    bits = op.result_types[1]
    return lax.rng_bit_generator(key, bits.shape, bits.dtype, algorithm)


@rule(stablehlo_rules, "stablehlo.rng")
def _(op: Operation, low: Any, high: Any, shape: Any) -> Any:
    op.require(rng_distribution="UNIFORM")
    return lax.rng_uniform(low, high, op.result_type.shape)


@rule(stablehlo_rules, "chlo.top_k", "@TopK", "@mhlo.topk")
def _(op: Operation, x: Any) -> Any:
    values = op.result_types[0]
    op.require(is_stable=True, largest=True)
    for name in ("k", "call_target_name", "api_version", "called_computations", "backend_config"):
        op.attributes.pop(name, None)
    return lax.top_k(x, values.shape[-1])


# --- normalization --------------------------------------------------------------------------------
# As StableHLO's specification computes it: of a batch along all dimensions but one.


def _along(values: Any, x: Any, axis: int) -> Any:
    """Return one value for each place along an axis, broadcast to all of an array."""
    return lax.broadcast_in_dim(values, x.shape, (axis,))


def _normalized(x: Any, mean: Any, variance: Any, epsilon: Any, axis: int) -> Any:
    deviation = lax.sqrt(lax.add(variance, lax.full_like(variance, epsilon)))
    return lax.div(lax.sub(x, _along(mean, x, axis)), _along(deviation, x, axis))


@rule(stablehlo_rules, "stablehlo.batch_norm_inference")
def _(op: Operation, x: Any, scale: Any, offset: Any, mean: Any, variance: Any) -> Any:
    epsilon, axis = op.take("epsilon"), op.take("feature_index")
    normalized = _normalized(x, mean, variance, epsilon, axis)
    return lax.add(lax.mul(_along(scale, x, axis), normalized), _along(offset, x, axis))


@rule(stablehlo_rules, "stablehlo.batch_norm_training")
def _(op: Operation, x: Any, scale: Any, offset: Any) -> Any:
    epsilon, axis = op.take("epsilon"), op.take("feature_index")
    mean = _mean(x, axis)
    variance = _mean(lax.square(lax.sub(x, _along(mean, x, axis))), axis)
    normalized = _normalized(x, mean, variance, epsilon, axis)
    scaled = lax.add(lax.mul(_along(scale, x, axis), normalized), _along(offset, x, axis))
    return [scaled, mean, variance]


def _sum(x: Any, axis: int) -> Any:
    return lax.reduce_sum(x, [i for i in range(len(x.shape)) if i != axis])


def _mean(x: Any, axis: int) -> Any:
    total = _sum(x, axis)
    return lax.div(total, lax.full_like(total, x.size // x.shape[axis]))


@rule(stablehlo_rules, "stablehlo.batch_norm_grad")
def _(op: Operation, x: Any, scale: Any, mean: Any, variance: Any, cotangent: Any) -> Any:
    epsilon, axis = op.take("epsilon"), op.take("feature_index")
    normalized = _normalized(x, mean, variance, epsilon, axis)
    of_scale = _sum(lax.mul(cotangent, normalized), axis)
    of_offset = _sum(cotangent, axis)
    count = lax.full_like(of_scale, x.size // x.shape[axis])
    centered = lax.sub(cotangent, _along(lax.div(of_offset, count), x, axis))
    projected = lax.mul(normalized, _along(lax.div(of_scale, count), x, axis))
    deviation = lax.sqrt(lax.add(variance, lax.full_like(variance, epsilon)))
    factor = _along(lax.div(scale, deviation), x, axis)
    return [lax.mul(factor, lax.sub(centered, projected)), of_scale, of_offset]
