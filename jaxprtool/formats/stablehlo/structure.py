"""Rules for operations with regions, and for calls.

Regions that `lax` has names for are recovered: a `reduce` that adds becomes `reduce_sum`, a `while`
with a counter becomes a `scan`, which has a reverse mode. Others stay as they are, under the
general primitives. What is recovered computes the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import primitives
from jax.extend.mlir.dialects import stablehlo as stablehlo_dialect

from jaxprtool import jaxcompat
from jaxprtool.formats.stablehlo.operations import (
    Choice,
    Clamped,
    binary,
    with_vector_last,
)
from jaxprtool.formats.stablehlo.reader import (
    Aggregate,
    Operation,
    Splat,
    attribute_names,
    bundled,
    forced,
    ir,
    lazy,
    leaves,
    stablehlo_rules,
)
from jaxprtool.ir.rules import rule

#: The bindings of the dialect, which have no types.
stablehlo: Any = stablehlo_dialect

# --- regions --------------------------------------------------------------------------------------
# What a region computes, if it has a name.


def operations_in(block: Any) -> list[Any]:
    """Return the operations of a block."""
    return [view.operation for view in block.operations]


def combiner(block: Any) -> Callable[[Any, Any], Any] | None:
    """Return the function of `lax` that a region of two arguments is; None if it is another one."""
    match operations_in(block):
        case [op, end] if [*end.operands] == [*op.results] and {*op.operands} == {*block.arguments}:
            named = binary(op.name, block.arguments[0].type.element_type)
            return named if named in _COMMUTATIVE else None
    return None


_COMMUTATIVE = frozenset(
    (lax.add, lax.mul, lax.max, lax.min, lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor)
)


def canonical(block: Any) -> str:
    """Return the text of a region that has no regions, with its values numbered.

    Constants are cited where they are read: a module may have them in the region or before it.
    """
    numbers: dict[Any, int] = {value: i for i, value in enumerate(block.arguments)}
    lines = [", ".join(str(value.type) for value in block.arguments)]
    for op in operations_in(block):
        if op.name == "stablehlo.constant":
            continue
        operands = [_operand_text(value, numbers) for value in op.operands]
        for value in op.results:
            numbers[value] = len(numbers)
        attributes = [f"{name}={op.attributes[name]}" for name in attribute_names(op.attributes)]
        lines.append(f"{op.name} {operands} {attributes}")
    return "\n".join(lines)


def _operand_text(value: Any, numbers: Mapping[Any, int]) -> object:
    """Return the number of a value, the text of a constant, or "outer"."""
    if value in numbers:
        return numbers[value]
    owner = getattr(value.owner, "operation", value.owner)
    is_constant = getattr(owner, "name", "") == "stablehlo.constant"
    return str(owner.attributes["value"]) if is_constant else "outer"


def _scalars(op: Operation, values: Sequence[Any]) -> list[Any]:
    """Return the initial values of a reduction: constants as NumPy's scalars, which `lax` reads."""
    return [value.scalar if isinstance(value, Splat) else forced(value) for value in values]


# --- reductions -----------------------------------------------------------------------------------


@rule(stablehlo_rules, "stablehlo.reduce")
@lazy
def _(op: Operation, *values: Any) -> Any:
    count = len(values) // 2
    operands = [forced(value) for value in values[:count]]
    inits = _scalars(op, values[count:])
    dimensions = tuple(op.take("dimensions"))
    if count == 1 and (named := combiner(op.block())) is not None:
        return lax.reduce(operands[0], inits[0], named, dimensions)
    if (index := _arg_of_extreme(op, operands, dimensions)) is not None:
        return index
    body = op.body()
    if count == 1:
        return lax.reduce(operands[0], inits[0], lambda x, y: body(x, y)[0], dimensions)
    pairs = tuple(operands), tuple(inits)
    return lax.reduce(*pairs, lambda xs, ys: tuple(body(*xs, *ys)), dimensions)


def _arg_of_extreme(
    op: Operation, operands: Sequence[Any], dimensions: Sequence[int]
) -> Any | None:
    """Return the index of the largest or smallest element, if a reduction is JAX's for it.

    None if it is another one, or if the element itself is used.
    """
    if len(operands) != 2 or len(dimensions) != 1 or [*op.op.results[0].uses]:
        return None
    indices = op.op.operands[1].owner
    if getattr(indices, "name", "") != "stablehlo.iota":
        return None
    if indices.attributes["iota_dimension"].value != dimensions[0]:
        return None
    x, dtype = operands[0], operands[1].dtype
    reduction = _reduction(op.op)
    for function in (lax.argmax, lax.argmin):
        if reduction == _lowered_arg(function, x.dtype, dtype):
            index = function(x, dimensions[0], dtype)
            return [Splat(np.zeros((), x.dtype)[()], index.shape), index]
    return None


@cache
def _lowered_arg(function: Any, dtype: Any, index_dtype: Any) -> list[str]:
    """Return what `_reduction` does of JAX's `argmax` or `argmin`."""
    reductions: list[list[str]] = []
    _visit_lowered(
        lambda x: function(x, 0, index_dtype),
        [jax.ShapeDtypeStruct((2,), dtype)],
        (dtype, index_dtype),
        "stablehlo.reduce",
        lambda op: reductions.append(_reduction(op)),
    )
    return reductions[0] if reductions else []


def _reduction(op: Any) -> list[str]:
    """Return the region and the initial values of a reduction as text."""
    inits = [*op.operands][len(op.operands) // 2 :]
    texts = [getattr(init.owner, "name", "") and init.owner.get_asm() for init in inits]
    return [canonical(op.regions[0].blocks[0]), *(text.partition("dense")[2] for text in texts)]


def _visit_lowered(
    function: Any,
    structs: Sequence[Any],
    dtypes: Sequence[Any],
    name: str,
    read: Callable[[Any], None],
) -> None:
    """Call `read` on the operations of a name in JAX's lowering of a function."""
    x64 = any(np.dtype(dtype).itemsize >= 8 for dtype in dtypes)
    with jax.enable_x64(x64):
        module = jax.jit(function).lower(*structs).compiler_ir("stablehlo")

    def visit(op: Any) -> Any:
        if op.name == name:
            read(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)


@rule(stablehlo_rules, "stablehlo.reduce_window")
@lazy
def _(op: Operation, *values: Any) -> Any:
    count = len(values) // 2
    operands = [forced(value) for value in values[:count]]
    inits = _scalars(op, values[count:])
    ones = [1] * len(operands[0].shape)
    padding = op.take("padding", np.zeros((len(ones), 2), int))
    window = {
        "window_dimensions": tuple(op.take("window_dimensions")),
        "window_strides": tuple(op.take("window_strides", ones)),
        "padding": [(int(low), int(high)) for low, high in padding],
        "base_dilation": tuple(op.take("base_dilations", ones)),
        "window_dilation": tuple(op.take("window_dilations", ones)),
    }
    named = combiner(op.block())
    if count == 1 and (running := _running(op, named, operands[0], inits[0], window)) is not None:
        return running
    if count == 1 and named is not None:
        return lax.reduce_window(operands[0], inits[0], named, **window)
    body = op.body()
    if count == 1:
        return lax.reduce_window(operands[0], inits[0], lambda x, y: body(x, y)[0], **window)
    pairs = tuple(operands), tuple(inits)
    return lax.reduce_window(*pairs, lambda xs, ys: tuple(body(*xs, *ys)), **window)


#: Reductions of all elements up to each one, if the initial value is the one of the second column.
#: None is for regions without a name.
_RUNNING = {
    lax.add: (lax.cumsum, 0),
    lax.mul: (lax.cumprod, 1),
    None: (lax.cumlogsumexp, -np.inf),
}


def _running(op: Operation, named: Any, x: Any, init: Any, window: Mapping[str, Any]) -> Any | None:
    """Return the reduction of all elements up to each one, if JAX lowers it so; else None."""
    sizes = [axis for axis, size in enumerate(window["window_dimensions"]) if size != 1]
    if named not in _RUNNING or len(sizes) != 1 or not isinstance(init, np.generic):
        return None
    (axis,) = sizes
    function, identity = _RUNNING[named]
    if named is None and not jax.dtypes.issubdtype(x.dtype, np.floating):
        return None
    size = x.shape[axis]
    low, high = window["padding"][axis]
    plain = all(
        step == 1
        for name in ("window_strides", "base_dilation", "window_dilation")
        for step in window[name]
    )
    others = [pad for i, pad in enumerate(window["padding"]) if i != axis]
    if not plain or window["window_dimensions"][axis] != size or any(map(any, others)):
        return None
    if {low, high} != {0, size - 1} or init != identity:
        return None
    if _lowered_windows(function, x.shape, axis, x.dtype) != [canonical(op.block())]:
        return None
    return function(x, axis, reverse=low == 0)


@cache
def _lowered_windows(function: Any, shape: Sequence[int], axis: int, dtype: Any) -> list[str]:
    """Return the region of each `reduce_window` to which JAX lowers such a reduction."""
    regions: list[str] = []
    struct = jax.ShapeDtypeStruct(shape, dtype)
    _visit_lowered(
        lambda x: function(x, axis),
        [struct],
        [dtype],
        "stablehlo.reduce_window",
        lambda op: regions.append(canonical(op.regions[0].blocks[0])),
    )
    return regions


@rule(stablehlo_rules, "stablehlo.select_and_scatter")
@lazy
def _(op: Operation, x: Any, source: Any, init: Any) -> Any:
    ones = [1] * len(op.result_type.shape)
    padding = op.take("padding", np.zeros((len(ones), 2), int))
    window = {
        "window_dimensions": tuple(op.take("window_dimensions")),
        "window_strides": tuple(op.take("window_strides", ones)),
        "padding": tuple((int(low), int(high)) for low, high in padding),
    }
    select = _comparison(op.block())
    is_sum = combiner(op.block(1)) is lax.add
    x, source = forced(x), forced(source)
    if select is not None and is_sum and isinstance(init, Splat) and init.scalar == 0:
        return primitives.select_and_scatter_add_p.bind(source, x, select_prim=select, **window)
    return primitives.select_and_scatter_p.bind(
        x,
        source,
        forced(init),
        select_jaxpr=_of_scalars(op.body(0), x.dtype),
        select_consts=(),
        scatter_jaxpr=_of_scalars(op.body(1), x.dtype),
        scatter_consts=(),
        **window,
    )


def _of_scalars(body: Callable[..., list[Any]], dtype: Any) -> Any:
    """Return a region of two scalars as the open jaxpr that primitives of `lax` take."""
    scalar = jax.ShapeDtypeStruct((), dtype)
    return jaxcompat.open_jaxpr(jax.make_jaxpr(lambda x, y: body(x, y)[0])(scalar, scalar))


def _comparison(block: Any) -> Any | None:
    """Return the primitive of a region that compares its two arguments in order."""
    match operations_in(block):
        case [op, end] if (
            op.name == "stablehlo.compare"
            and [*end.operands] == [*op.results]
            and [*op.operands] == [*block.arguments]
            and not _is_total(op)
        ):
            direction = str(op.attributes["comparison_direction"])
            return next((p for d, p in _EXTREMES.items() if d in direction), None)
    return None


_EXTREMES = {"GE>": primitives.ge_p, "LE>": primitives.le_p}


def _is_total(compare: Any) -> bool:
    """Return True if a comparison orders the two zeros, and NaN."""
    attributes = compare.attributes
    return "compare_type" in attributes and "TOTAL" in str(attributes["compare_type"])


@rule(stablehlo_rules, "stablehlo.scatter")
def _(op: Operation, *values: Any) -> Any:
    if len(values) != 3:
        raise op.refused("it updates several arrays")
    x, indices, updates = values
    numbers = stablehlo.ScatterDimensionNumbers(op.take("scatter_dimension_numbers"))
    dimensions = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(numbers.update_window_dims),
        inserted_window_dims=tuple(numbers.inserted_window_dims),
        scatter_dims_to_operand_dims=tuple(numbers.scattered_dims_to_operand_dims),
        operand_batching_dims=tuple(numbers.input_batching_dims),
        scatter_indices_batching_dims=tuple(numbers.scatter_indices_batching_dims),
    )
    options = {
        "indices_are_sorted": op.take("indices_are_sorted", False),
        "unique_indices": op.take("unique_indices", False),
        "mode": lax.GatherScatterMode.FILL_OR_DROP,
    }
    indices = with_vector_last(indices, numbers.index_vector_dim)
    block = op.block()
    if [*operations_in(block)[0].operands] == [block.arguments[1]] and len(
        operations_in(block)
    ) == 1:
        return lax.scatter(x, indices, updates, dimensions, **options)
    named = combiner(block)
    if named in _SCATTERS:
        return _SCATTERS[named](x, indices, updates, dimensions, **options)
    return primitives.scatter_p.bind(
        x,
        indices,
        updates,
        dimension_numbers=dimensions,
        update_jaxpr=_of_scalars(op.body(), x.dtype),
        update_consts=(),
        **options,
    )


_SCATTERS = {
    lax.add: lax.scatter_add,
    lax.mul: lax.scatter_mul,
    lax.min: lax.scatter_min,
    lax.max: lax.scatter_max,
}

# --- sort -----------------------------------------------------------------------------------------


@rule(stablehlo_rules, "stablehlo.sort")
def _(op: Operation, *operands: Any) -> Any:
    rank = len(operands[0].shape)
    options = {
        "dimension": op.take("dimension", -1) % rank,
        "is_stable": op.take("is_stable", False),
    }
    text = canonical(op.block())
    dtypes = tuple(str(x.dtype) for x in operands)
    for keys in range(1, len(operands) + 1):
        if text == _lowered_sort(dtypes, keys):
            return primitives.sort_p.bind(*operands, num_keys=keys, **options)
    key = _single_key(op.block())
    if key is None:
        return _sorted_by_computed_key(op, operands, options)
    position, is_ascending, is_total = key
    encode, decode = _order(operands[position].dtype, is_ascending, is_total)
    rest = [x for i, x in enumerate(operands) if i != position]
    first, *others = primitives.sort_p.bind(
        encode(operands[position]), *rest, num_keys=1, **options
    )
    others.insert(position, decode(first))
    return others


@cache
def _lowered_sort(dtypes: Sequence[str], keys: int) -> str:
    """Return the comparison of `lax.sort` for operands of these dtypes."""
    structs = [jax.ShapeDtypeStruct((2,), dtype) for dtype in dtypes]
    texts: list[str] = []
    _visit_lowered(
        lambda *xs: lax.sort(xs, num_keys=keys),
        structs,
        dtypes,
        "stablehlo.sort",
        lambda sort: texts.append(canonical(sort.regions[0].blocks[0])),
    )
    return texts[0] if texts else ""


def _single_key(block: Any) -> tuple[int, bool, bool] | None:
    """Return the operand that a comparison is about, if it ascends, and if its order is total."""
    match operations_in(block):
        case [op, end] if op.name == "stablehlo.compare" and [*end.operands] == [*op.results]:
            arguments = [*block.arguments]
            places = [arguments.index(value) for value in op.operands if value in arguments]
            if len(places) == 2 and places[0] // 2 == places[1] // 2 and places[0] != places[1]:
                direction = str(op.attributes["comparison_direction"])
                if "LT>" in direction or "GT>" in direction:
                    ascends = ("LT>" in direction) == (places[0] < places[1])
                    return places[0] // 2, ascends, _is_total(op)
    return None


def _sorted_by_computed_key(
    op: Operation, operands: Sequence[Any], options: Mapping[str, Any]
) -> list[Any]:
    """Sort by what a comparison computes of each of its two elements, in the same way."""
    block = op.block()
    compare = _definition(operations_in(block)[-1].operands[0])
    direction, expressions = "", []
    if compare is not None and compare.name == "stablehlo.compare":
        direction = str(compare.attributes["comparison_direction"])
        expressions = [_expression(x, block, parity) for parity, x in enumerate(compare.operands)]
    is_ordered = "LT>" in direction or "GT>" in direction
    if (
        compare is None
        or not is_ordered
        or None in expressions
        or len({*map(str, expressions)}) > 1
    ):
        raise op.refused("its comparison is not one by `lax.sort`, or of one key of each element")
    body, reader, first = op.body(), op.reader, compare.operands[0]

    def key(*elements: Any) -> Any:
        body(*(x for x in elements for _ in range(2)))
        return reader.value(first)

    for _axis in operands[0].shape:
        key = jax.vmap(key)
    keys = key(*operands)
    encode, _ = _order(keys.dtype, "LT>" in direction, _is_total(compare))
    return primitives.sort_p.bind(encode(keys), *operands, num_keys=1, **options)[1:]


def _expression(value: Any, block: Any, parity: int) -> list[str] | None:
    """Return how a block computes a value of its arguments of a parity; None if of others too."""
    arguments = [*block.arguments]
    numbers: dict[Any, int] = {}
    lines: list[str] = []

    def visit(value: Any) -> bool:
        if value in numbers:
            return True
        if value in arguments:
            place, of = divmod(arguments.index(value), 2)
            text, is_known = f"argument {place}", of == parity
        else:
            owner, is_known = _definition(value), True
            if owner is None or len(owner.regions) or len(owner.results) != 1:
                return False
            is_inside = owner.block == block or owner.name == "stablehlo.constant"
            if not is_inside or not all(map(visit, owner.operands)):
                return False
            names = attribute_names(owner.attributes)
            attributes = [f"{name}={owner.attributes[name]}" for name in names]
            text = f"{owner.name} {[numbers[x] for x in owner.operands]} {attributes} {value.type}"
        numbers[value] = len(numbers)
        lines.append(text)
        return is_known

    return lines if visit(value) else None


def _order(
    dtype: Any, is_ascending: bool, is_total: bool
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return functions to and from a key that `lax.sort` orders, ascending, in the order asked."""
    if jax.dtypes.issubdtype(dtype, np.inexact) and not is_total:
        return (_same, _same) if is_ascending else (lax.neg, lax.neg)
    if not jax.dtypes.issubdtype(dtype, np.inexact):
        return (_same, _same) if is_ascending else (lax.bitwise_not, lax.bitwise_not)
    integers = np.dtype(f"int{8 * np.dtype(dtype).itemsize}")

    def encode(x: Any) -> Any:
        bits = _flipped(lax.bitcast_convert_type(x, integers))
        return bits if is_ascending else lax.bitwise_not(bits)

    def decode(bits: Any) -> Any:
        bits = bits if is_ascending else lax.bitwise_not(bits)
        return lax.bitcast_convert_type(_flipped(bits), dtype)

    return encode, decode


def _same(x: Any) -> Any:
    return x


def _flipped(bits: Any) -> Any:
    """Return the bits of floats as integers of the same order, and back."""
    largest = np.array(np.iinfo(bits.dtype).max, bits.dtype)
    negative = lax.lt(bits, np.array(0, bits.dtype))
    return lax.select_n(negative, bits, lax.bitwise_xor(bits, largest))


# --- loops and branches ---------------------------------------------------------------------------


@rule(stablehlo_rules, "stablehlo.while")
@lazy
def _(op: Operation, *inits: Any) -> Any:
    cond, body = op.body(0), op.body(1)
    trips = _trip_count(op, inits)
    if trips is not None:
        return _CountedLoop(op, inits, trips).scan(inits)
    kinds = [init.type for init in op.op.operands]
    last = lax.while_loop(
        lambda xs: cond(*bundled(kinds, iter(xs)))[0],
        lambda xs: leaves(body(*bundled(kinds, iter(xs)))),
        leaves(inits),
    )
    return bundled(kinds, iter(last))


class _CountedLoop:
    """A loop with a counter, whose body may read or write a row of an array in each iteration.

    `lax.scan` slices and stacks such arrays itself. Other arrays that the body does not change are
    closed over.

    Attributes:
        reads: The results that are rows of an argument of the body, each with its position.
        writes: The results that have a row of an argument replaced, each with its position, and
            the row.
        reverse: Whether the rows are those of decreasing indices.
        counter: The position of the counter.
    """

    def __init__(self, op: Operation, inits: Sequence[Any], trips: int) -> None:
        self.op = op
        self.trips = trips
        self.block = op.block(1)
        self.steps = operations_in(self.block)
        self.arguments = [*self.block.arguments]
        self.ends = [*self.steps[-1].operands]
        self.counter = [*op.block(0).arguments].index(operations_in(op.block(0))[-2].operands[0])
        self.reverse = False
        self.reads: dict[Any, int] = {}
        self.writes: dict[Any, tuple[int, Any]] = {}
        start = inits[self.counter].scalar
        for reverse in (False, True) if trips and start == 0 else ():
            if not (self.reads or self.writes):
                self.reverse = reverse
                self._find_rows()
        self.reverse = self.reverse and bool(self.reads or self.writes)
        self.skipped = self._without_rows()

    def scan(self, inits: Sequence[Any]) -> list[Any]:
        reader, arguments = self.op.reader, self.arguments
        written = {position for position, _ in self.writes.values()}
        counted = self._is_needed(arguments[self.counter])
        carried = [
            i
            for i, (end, argument) in enumerate(zip(self.ends, arguments, strict=True))
            if end != argument and i not in written and (counted or i != self.counter)
            if not isinstance(inits[i], Aggregate)
        ]
        sliced = [*dict.fromkeys(self.reads.values())]

        def step(carry: Sequence[Any], rows: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            args = [*inits]
            for i, value in zip(carried, carry, strict=True):
                args[i] = value
            by_position = dict(zip(sliced, rows, strict=True))
            for result, position in self.reads.items():
                shape = reader.type_of(result.type).shape
                reader.values[result] = _shaped(by_position[position], shape)
            reader.values.update(dict.fromkeys(self.writes))
            with reader.skipping(self.skipped):
                results = reader.run(self.block, self.op.op, *args)
            stacked = [
                _shaped(forced(reader.values[row]), inits[position].shape[1:])
                for position, row in self.writes.values()
            ]
            return [results[i] for i in carried], stacked

        start = [forced(inits[i]) for i in carried]
        rows = [forced(inits[i]) for i in sliced]
        last, stacked = lax.scan(step, start, rows, self.trips, reverse=self.reverse)
        results = [*inits]
        for i, value in zip(carried, last, strict=True):
            results[i] = value
        for (position, _), value in zip(self.writes.values(), stacked, strict=True):
            results[position] = value
        if not counted:
            results[self.counter] = np.array(self.trips, inits[self.counter].scalar.dtype)[()]
        return results

    # --- rows -----------------------------------------------------------------------------------

    def _find_rows(self) -> None:
        for step in self.steps[:-1]:
            for position, argument in enumerate(self.arguments):
                if [*step.operands][:1] != [argument] or len(step.results) != 1:
                    continue
                shape = self.op.reader.type_of(argument.type).shape
                if shape[:1] != (self.trips,):
                    continue
                result = step.results[0]
                if self.ends[position] == argument:
                    if self._is_row(_row_read(step, self.op.reader), shape):
                        self.reads[result] = position
                elif self.ends[position] == result and _uses(argument) == _uses(result) == 1:
                    access = _row_write(step, self.op.reader)
                    if self._is_row(access, shape):
                        self.writes[result] = position, step.operands[1]

    def _is_row(self, access: tuple[Any, Sequence[int]] | None, shape: Sequence[int]) -> bool:
        if access is None or [*access[1]] != [1, *shape[1:]]:
            return False
        wanted = (-1, self.trips - 1) if self.reverse else (1, 0)
        return self._affine(access[0]) == wanted

    def _affine(self, value: Any) -> tuple[int, int] | None:
        """Return the factor and the summand by which an index follows from the counter."""
        if value == self.arguments[self.counter]:
            return 1, 0
        if (constant := _constant(self.op.reader, value)) is not None:
            return 0, constant
        owner = getattr(value.owner, "operation", value.owner)
        sign = {"stablehlo.add": 1, "stablehlo.subtract": -1}.get(getattr(owner, "name", ""))
        if sign is None:
            return None
        x, y = map(self._affine, owner.operands)
        return None if x is None or y is None else (x[0] + sign * y[0], x[1] + sign * y[1])

    def _without_rows(self) -> set[Any]:
        """Return results that need not be computed: rows, and indices that only they need."""
        skipped = {*self.reads, *self.writes}
        counter = self.arguments[self.counter]
        if skipped:  # rows are those of a counter from zero, whose last value is known
            skipped.add(self.ends[self.counter])
        rows = {row for _, row in self.writes.values()}
        for step in reversed(self.steps[:-1]):
            if step.name in _OF_INDICES and step.results[0] not in rows:
                users = [getattr(use.owner, "operation", use.owner) for use in step.results[0].uses]
                if all(user.results and user.results[0] in skipped for user in users):
                    skipped.add(step.results[0])
        if self._is_needed(counter, skipped):
            skipped.discard(self.ends[self.counter])
        return skipped

    def _is_needed(self, counter: Any, skipped: set[Any] | None = None) -> bool:
        """Return True if the body reads the counter other than to count, and to index rows."""
        skipped = self.skipped if skipped is None else skipped
        users = [getattr(use.owner, "operation", use.owner) for use in counter.uses]
        return not all(user.results and user.results[0] in skipped for user in users)


def _shaped(x: Any, shape: Sequence[int]) -> Any:
    return x if np.shape(x) == tuple(shape) else lax.reshape(x, shape)


_OF_INDICES = ("stablehlo.add", "stablehlo.subtract", "stablehlo.constant")


def _uses(value: Any) -> int:
    return sum(1 for _ in value.uses)


def _row_read(op: Any, reader: Any) -> tuple[Any, Sequence[int]] | None:
    """Return the index of the first axis and the sizes of a slice; None for another operation.

    JAX calls a function for it, which slices and drops the axis.
    """
    if op.name == "func.call":
        inner, arguments, end = _only_access(op, reader, "stablehlo.dynamic_slice")
        access = None if inner is None else _row_read(inner, reader)
        if (
            access is None
            or [*inner.operands][:2] != arguments
            or _unshaped(end) != inner.results[0]
        ):
            return None
        return op.operands[1], access[1]
    if op.name != "stablehlo.dynamic_slice" or not _are_zeros([*op.operands][2:], reader):
        return None
    return op.operands[1], [*op.attributes["slice_sizes"]]


def _row_write(op: Any, reader: Any) -> tuple[Any, Sequence[int]] | None:
    """Return the index of the first axis and the sizes of an update; None for another operation."""
    if op.name == "func.call":
        inner, arguments, end = _only_access(op, reader, "stablehlo.dynamic_update_slice")
        access = None if inner is None else _row_write(inner, reader)
        if access is None or end != inner.results[0]:
            return None
        x, update, index = [*inner.operands][:3]
        return (op.operands[2], access[1]) if [x, _unshaped(update), index] == arguments else None
    name = "stablehlo.dynamic_update_slice"
    if op.name != name or not _are_zeros([*op.operands][3:], reader):
        return None
    return op.operands[2], reader.type_of(op.operands[1].type).shape


def _are_zeros(indices: Sequence[Any], reader: Any) -> bool:
    return all(_constant(reader, index) == 0 for index in indices)


def _only_access(call: Any, reader: Any, name: str) -> tuple[Any, list[Any], Any]:
    """Return the only operation of a name in a called function, its arguments, and its result.

    The operation is None if there is none, or if the function does more than to add or drop axes.
    """
    block = reader.block_named(call.attributes["callee"].value)
    *others, end = operations_in(block)
    others = [step for step in others if step.name != "stablehlo.constant"]
    accesses = [step for step in others if step.name == name]
    is_only = len(accesses) == 1 and len(others) <= 2 and len(end.operands) == 1
    return accesses[0] if is_only else None, [*block.arguments], [*end.operands][:1][0]


def _unshaped(value: Any) -> Any:
    """Return the operand of a reshape, or of a broadcast that only adds axes of size 1."""
    owner = getattr(value.owner, "operation", value.owner)
    name = getattr(owner, "name", "")
    if name == "stablehlo.reshape":
        return owner.operands[0]
    if name == "stablehlo.broadcast_in_dim":
        (operand,) = owner.operands
        rank = operand.type.rank
        dims = [*owner.attributes["broadcast_dimensions"]]
        if value.type.shape == [1, *operand.type.shape] and dims == [*range(1, rank + 1)]:
            return operand
    return value


def _trip_count(op: Operation, inits: Sequence[Any]) -> int | None:
    """Return how often a loop runs whose counter goes up to a constant; None for another loop."""
    reader, test = op.reader, _compare_of(op.block(0))
    if test is None:
        return None
    arguments = [*op.block(0).arguments]
    counter, limit = test.operands
    if counter not in arguments or "LT>" not in str(test.attributes["comparison_direction"]):
        return None
    position = arguments.index(counter)
    block = op.block(1)
    step = operations_in(block)[-1].operands[position].owner
    if getattr(step, "name", "") != "stablehlo.add":
        return None
    step_operands = [*step.operands]
    if block.arguments[position] not in step_operands:
        return None
    step_operands.remove(block.arguments[position])
    start, stop = inits[position], _constant(reader, limit)
    add = _constant(reader, step_operands[0])
    if not isinstance(start, Splat) or stop is None or add is None or start.shape != ():
        return None
    if not jax.dtypes.issubdtype(start.scalar.dtype, np.integer) or add <= 0:
        return None
    first = int(start.scalar)
    trips = max(0, -((first - stop) // add))
    fits = first + trips * add <= np.iinfo(start.scalar.dtype).max
    return trips if fits else None


def _compare_of(block: Any) -> Any | None:
    """Return the comparison that a region consists of; None for another region."""
    match [step for step in operations_in(block) if step.name != "stablehlo.constant"]:
        case [test, end] if test.name == "stablehlo.compare":
            return test if end.operands[0] == test.results[0] else None
    return None


def _constant(reader: Any, value: Any) -> int | None:
    """Return the integer that all elements of a value are; None if it is not constant."""
    owner = getattr(value.owner, "operation", value.owner)
    if getattr(owner, "name", "") == "stablehlo.broadcast_in_dim":
        return _constant(reader, owner.operands[0])
    if getattr(owner, "name", "") != "stablehlo.constant":
        return None
    constant = reader.constant(owner)
    return int(constant.scalar) if isinstance(constant, Splat) else None


@rule(stablehlo_rules, "stablehlo.if")
def _(op: Operation, pred: Any) -> Any:
    return _chosen(op, partial(lax.cond, pred), [0, 1])


@rule(stablehlo_rules, "stablehlo.case")
@lazy
def _(op: Operation, index: Any) -> Any:
    last = len(op.op.regions) - 1
    if isinstance(index, Choice) and last == 1:
        return _chosen(op, partial(lax.cond, index.value), [1, 0])
    order = range(last + 1)
    if isinstance(index, Clamped) and [*map(_as_int, index.bounds)] == [0, last]:
        return _chosen(op, lambda *branches: lax.switch(index.value, branches), order)
    index = forced(index)
    # Another index than those of the branches means the last one; `lax.switch` would clamp it.
    inside = lax.bitwise_and(lax.ge(index, np.int32(0)), lax.le(index, np.int32(last)))
    index = lax.select_n(inside, np.int32(last), index)
    return _chosen(op, lambda *branches: lax.switch(index, branches), order)


def _chosen(op: Operation, choose: Callable[..., Any], regions: Sequence[int]) -> list[Any]:
    """Return the results of one of the regions, which a function chooses among, in this order."""
    branches = [partial(_leaves_of, op.body(i)) for i in regions]
    return bundled([result.type for result in op.op.results], iter(choose(*branches)))


def _leaves_of(body: Callable[..., list[Any]]) -> list[Any]:
    return leaves(body())


def _as_int(bound: Any) -> int | None:
    return int(bound) if isinstance(bound, np.generic | np.ndarray) else None


# --- calls ----------------------------------------------------------------------------------------


@rule(stablehlo_rules, "func.call")
@lazy
def _(op: Operation, *operands: Any) -> Any:
    name = op.take("callee")
    if _OF_LOOPS.fullmatch(name):
        return op.reader.run_function(name, operands)
    return op.reader.call(name, [forced(x) for x in operands])


#: Functions that JAX makes of the bodies of loops when it lowers them.
_OF_LOOPS = re.compile(r"closed_call(_\d+)?")


@rule(stablehlo_rules, "stablehlo.composite")
def _(op: Operation, *operands: Any) -> Any:
    """Call the function that a composite without a rule of its own names."""
    for name in ("name", "version", "composite_attributes"):
        op.attributes.pop(name, None)
    return op.reader.call(op.take("decomposition"), operands)


@rule(stablehlo_rules, "stablehlo.custom_call")
def _custom_call(op: Operation, *operands: Any) -> Any:
    """Return the results of a call of another library, which XLA looks up when it runs."""
    target, version = op.take("call_target_name"), op.take("api_version", 1)
    if "callback" in target:
        raise op.refused("it calls a Python function of the process that wrote the module")
    if op.take("called_computations"):
        raise op.refused("it calls functions of the module")
    legacy, attributes = None, {}
    config = op.attributes.pop("backend_config", None)
    if isinstance(config, ir.DictAttr):
        attributes = {name: _ffi_value(op, config[name]) for name in attribute_names(config)}
    elif config is not None:
        legacy = config.value or None
    more = op.attributes.pop("mhlo.backend_config", None)
    if more is not None:  # how JAX writes the attributes of typed calls
        version = 4
        attributes |= {name: _ffi_value(op, more[name]) for name in attribute_names(more)}
    aliases = {}
    for alias in op.take("output_operand_aliases", []):
        read = stablehlo.OutputOperandAlias(alias)
        (output,) = read.output_tuple_indices or (0,)
        aliases[read.operand_index] = output
    layouts = {
        f"{ours}_layouts": [_major_to_minor(layout) for layout in given]
        for ours, theirs in (("input", "operand"), ("output", "result"))
        if (given := op.take(f"{theirs}_layouts"))
    }
    call = jax.ffi.ffi_call(
        target,
        op.result_types,
        has_side_effect=op.take("has_side_effect", False),
        vmap_method="sequential",
        input_output_aliases=aliases or None,
        custom_call_api_version=version,
        legacy_backend_config=legacy,
        **layouts,
    )
    return call(*operands, **attributes)


def _major_to_minor(layout: Any) -> tuple[int, ...]:
    return tuple(int(axis) for axis in np.asarray(layout))[::-1]


def _ffi_value(op: Operation, attribute: Any) -> Any:
    """Return an attribute of a custom call as `jax.ffi.ffi_call` takes it, with its type."""
    match attribute:
        case ir.BoolAttr() | ir.StringAttr():
            return attribute.value
        case ir.IntegerAttr() | ir.FloatAttr():
            dtype = op.reader.dtypes.get(str(attribute.type))
            if dtype is not None:
                return np.array(attribute.value, dtype)[()]
        case ir.DenseElementsAttr():
            return np.asarray(attribute)
    raise op.refused(f"attribute {attribute} for the library")


@rule(stablehlo_rules, "stablehlo.tuple")
@lazy
def _(op: Operation, *elements: Any) -> Any:
    return Aggregate(elements)


@rule(stablehlo_rules, "stablehlo.get_tuple_element")
def _(op: Operation, values: Any) -> Any:
    return values.elements[op.take("index")]


@rule(stablehlo_rules, "@shape_assertion")
@lazy
def _(op: Operation, *operands: Any) -> Any:
    """Return nothing, if it is known that the assertion holds."""
    op.attributes.clear()
    if not (isinstance(operands[0], Splat) and operands[0].scalar):
        raise op.refused("it is not known that the assertion holds")
    return []


# --- effects --------------------------------------------------------------------------------------
# Tokens order effects. They have no values, so those without an effect are dropped.


@rule(stablehlo_rules, "stablehlo.create_token", "stablehlo.after_all")
def _(op: Operation, *operands: Any) -> Any:
    return Aggregate(())


@rule(stablehlo_rules, *(f"stablehlo.{name}" for name in ("infeed", "outfeed", "send", "recv")))
def _(op: Operation, *operands: Any) -> Any:
    raise op.refused("it exchanges data with the host or a device while the program runs")


# --- LAPACK ---------------------------------------------------------------------------------------
# jaxlib's calls of LAPACK that a primitive of `lax` with derivatives makes. LAPACK reports failure
# by a number, and `lax` returns NaN. So the rules apply where the number is only compared with
# zero, which is how JAX turns it into NaN.


def _for_floats(name: str) -> list[str]:
    return [f"@{name.format(letter)}" for letter in "sdcz"]


def _reports_only(op: Operation, position: int, direction: str = "EQ") -> bool:
    """Return True if a result of an operation is only compared with zero."""
    for use in op.op.results[position].uses:
        user = getattr(use.owner, "operation", use.owner)
        if user.name != "stablehlo.compare" or _constant(op.reader, user.operands[1]) != 0:
            return False
        if f"{direction}>" not in str(user.attributes["comparison_direction"]):
            return False
    return True


def _lapack(*names: str) -> Callable[[Any], Any]:
    """Return a decorator of a rule that may return None, for calls of LAPACK by all its types."""

    def add(function: Any) -> Any:
        def apply(op: Operation, *operands: Any) -> Any:
            config = op.op.attributes
            options = {}
            if "mhlo.backend_config" in config:
                read = config["mhlo.backend_config"]
                options = {
                    name: chr(read[name].value)
                    for name in attribute_names(read)
                    if isinstance(read[name], ir.IntegerAttr) and read[name].value > 9
                }
            if 0 in operands[0].shape:
                results = _of_nothing(op)
            else:
                results = function(op, options, *operands)
            if results is None:
                return _custom_call(op, *operands)
            op.attributes.clear()
            return results

        for name in names:
            rule(stablehlo_rules, *_for_floats(name))(apply)
        return function

    return add


def _of_nothing(op: Operation) -> list[Any] | None:
    """Return the results for an empty array: empty ones, and that nothing failed; else None."""
    kinds = op.result_types
    if not all(0 in kind.shape or kind.dtype == np.int32 for kind in kinds):
        return None
    return [Splat(np.zeros((), kind.dtype)[()], kind.shape) for kind in kinds]


def _failed(element: Any) -> Any:
    """Return LAPACK's number of a failure from an element that `lax` makes NaN then."""
    return lax.convert_element_type(lax.ne(element, element), np.int32)


@_lapack("lapack_{}potrf_ffi")
def _(op: Operation, options: Any, x: Any) -> Any:
    if options != {"uplo": "L"} or not _reports_only(op, 1):
        return None
    factor = lax.linalg.cholesky(x, symmetrize_input=False)
    rank = len(x.shape)
    rows, columns = (lax.broadcasted_iota(np.int32, x.shape, rank - i) for i in (2, 1))
    kept = lax.select_n(lax.ge(rows, columns), x, factor)  # the other triangle is left as it is
    return [kept, _failed(factor[..., 0, 0])]


@_lapack("lapack_{}getrf_ffi")
def _(op: Operation, options: Any, x: Any) -> Any:
    if not _reports_only(op, 2, "GE"):
        return None
    factors, pivots, _ = lax.linalg.lu(x)
    info = op.result_types[2]
    return [factors, lax.add(pivots, np.int32(1)), Splat(np.int32(0), info.shape)]


@_lapack("lapack_{}trsm_ffi")
def _(op: Operation, options: Any, a: Any, b: Any, *scale: Any) -> Any:
    if scale or {*options} != {"side", "uplo", "trans_x", "diag"}:
        return None
    return lax.linalg.triangular_solve(
        a,
        b,
        left_side=options["side"] == "L",
        lower=options["uplo"] == "L",
        transpose_a=options["trans_x"] != "N",
        conjugate_a=options["trans_x"] == "C",
        unit_diagonal=options["diag"] == "U",
    )


@_lapack("lapack_{}gtsv_ffi")
def _(op: Operation, options: Any, lower: Any, diagonal: Any, upper: Any, b: Any) -> Any:
    """Solve a tridiagonal system. LAPACK overwrites the diagonals, which must not be read."""
    if any([*op.op.results[i].uses] for i in range(3)) or not _reports_only(op, 4):
        return None
    x = lax.linalg.tridiagonal_solve(lower, diagonal, upper, b)
    diagonals = [Splat(np.zeros((), y.dtype)[()], y.shape) for y in (lower, diagonal, upper)]
    return [*diagonals, x, _failed(x[..., 0, 0])]


@_lapack("lapack_{}geqrf_ffi")
def _(op: Operation, options: Any, x: Any) -> Any:
    """Return R in the upper triangle; LAPACK's vectors below it have no derivative."""
    if not (_are_all(_is_product, op.op.results[1]) and _are_all(_reads_upper, op.op.results[0])):
        return None
    below, scales = _custom_call(op, lax.stop_gradient(x))
    r = lax.linalg.qr(x, full_matrices=False)[1]
    rank, missing = len(x.shape), x.shape[-2] - r.shape[-2]
    padding = [(0, missing if axis == rank - 2 else 0, 0) for axis in range(rank)]
    r = lax.pad(r, np.zeros((), r.dtype), padding)
    rows, columns = (lax.broadcasted_iota(np.int32, x.shape, rank - i) for i in (2, 1))
    return [lax.select_n(lax.le(rows, columns), below, r), scales]


def _are_all(test: Callable[[Any], bool], value: Any) -> bool:
    """Return True if all operations that read a value satisfy a test."""
    return all(test(getattr(use.owner, "operation", use.owner)) for use in value.uses)


def _is_product(op: Any) -> bool:
    """Return True if an operation multiplies LAPACK's vectors of a QR decomposition to Q."""
    names = {f"lapack_{letter}gqr_ffi" for letter in ("sor", "dor", "cun", "zun")}
    return "call_target_name" in op.attributes and op.attributes["call_target_name"].value in names


def _reads_upper(op: Any) -> bool:
    """Return True if an operation, and those that read its result, take only R of LAPACK's."""
    if op.name == "stablehlo.slice":
        return not any(op.attributes["start_indices"]) and _are_all(_reads_upper, op.results[0])
    if op.name == "stablehlo.pad":
        return _are_all(_is_product, op.results[0])
    return _is_product(op) or (op.name == "stablehlo.select" and _is_below(op.operands[0]))


def _is_below(mask: Any) -> bool:
    """Return True if a mask is that of the elements below the diagonal, as JAX computes it."""
    compare = _definition(mask)
    if compare is not None and compare.name == "stablehlo.broadcast_in_dim":
        compare = _definition(compare.operands[0])
    if compare is None or compare.name != "stablehlo.compare":
        return False
    shifted, columns = map(_definition, compare.operands)
    if shifted is None or columns is None or shifted.name != "stablehlo.add":
        return False
    rows, shift = map(_definition, shifted.operands)
    if "GE>" not in str(compare.attributes["comparison_direction"]) or shift is None:
        return False
    if shift.name == "stablehlo.broadcast_in_dim":
        shift = _definition(shift.operands[0])
    if rows is None or shift is None or shift.name != "stablehlo.constant":
        return False
    places = [
        view.attributes["iota_dimension"].value
        for view in (rows, columns)
        if view.name == "stablehlo.iota"
    ]
    rank = compare.results[0].type.rank
    is_next = bool((np.asarray(shift.attributes["value"]) == -1).all())
    return is_next and places == [rank - 2, rank - 1]


def _definition(value: Any) -> Any | None:
    """Return the operation of which a value is a result; None for an argument."""
    owner = getattr(value.owner, "operation", value.owner)
    return owner if isinstance(owner, ir.Operation) else None


@_lapack("lapack_{}orgqr_ffi", "lapack_{}ungqr_ffi")
def _(op: Operation, options: Any, vectors: Any, scales: Any) -> Any:
    """Return Q, if the vectors are those of a QR decomposition of the module."""
    whole = _unsliced(op.op.operands[0])
    factors = getattr(op.op.operands[1].owner, "operation", op.op.operands[1].owner)
    if getattr(factors, "name", "") != "stablehlo.custom_call" or whole != factors.results[0]:
        return None
    if not factors.attributes["call_target_name"].value.endswith("geqrf_ffi"):
        return None
    q = lax.linalg.qr(op.reader.value(factors.operands[0]), full_matrices=False)[0]
    return q if q.shape == op.result_type.shape else None


def _unsliced(value: Any) -> Any:
    """Return the operand of a slice that leaves out last rows and columns; other values as such."""
    owner = getattr(value.owner, "operation", value.owner)
    if getattr(owner, "name", "") == "stablehlo.slice" and not any(
        owner.attributes["start_indices"]
    ):
        return owner.operands[0]
    return value


@_lapack("lapack_{}syevd_ffi", "lapack_{}heevd_ffi")
def _(op: Operation, options: Any, x: Any) -> Any:
    if not _reports_only(op, 2) or options.get("mode") != "V":
        return None
    vectors, values = lax.linalg.eigh(x, lower=options["uplo"] == "L", symmetrize_input=False)
    return [vectors, values, _failed(values[..., 0])]


@_lapack("lapack_{}gesdd_ffi")
def _(op: Operation, options: Any, x: Any) -> Any:
    unused = [not [*result.uses] for result in op.op.results]
    if not unused[0] or not _reports_only(op, 4):
        return None
    if options["mode"] == "N":
        if not (unused[2] and unused[3]):
            return None
        s = lax.linalg.svd(x, compute_uv=False)
        left, right = (Splat(np.zeros((), x.dtype)[()], op.result_types[i].shape) for i in (2, 3))
        return [x, s, left, right, _failed(s[..., 0])]
    u, s, vt = lax.linalg.svd(x, full_matrices=options["mode"] == "A")
    return [x, s, u, vt, _failed(s[..., 0])]
