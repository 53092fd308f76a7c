"""Rules for arrays: creation, shapes, indexing, operators, reductions, products, transforms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from string import ascii_lowercase
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.formats.python.expressions import (
    Assignment,
    Attribute,
    BinaryOperation,
    CallExpression,
    MultiResult,
    Name,
    Proposal,
    PythonFunction,
    Slot,
    Subscript,
    UnaryOperation,
    call,
    dtype_name,
    method,
)
from jaxprtool.formats.python.layout import identifier
from jaxprtool.formats.python.rules_of_calls import (
    GEQRF,
    local_call,
    nondefault_params,
    python_rules,
    unsupported,
)
from jaxprtool.ir.custom_rules import BATCHING_HINT, HINT, Stub, batching_rule, callback_name
from jaxprtool.ir.rules import rule
from jaxprtool.ir.trees import Tree, describe
from jaxprtool.jaxcompat import DropVar, JaxprEqn
from jaxprtool.primitives import VARIABLE

# --- arrays ---------------------------------------------------------------------------------------
# Rules for array creation, shapes, slices and indexing.

_ALL = slice(None)


def ints(values: Any) -> tuple[Any, ...]:
    """Return a parameter's numbers as Python ints, since some are NumPy's; symbols stay."""
    return tuple(n if jaxcompat.is_symbolic_dimension(n) else int(n) for n in values)


def one_or_all(values: Sequence[Any]) -> Any:
    """Return several axes or operands as JAX takes them: a single one without a tuple."""
    return values[0] if len(values) == 1 else values


def with_out_sharding(
    expression: CallExpression, params: Mapping[str, Any], name: str = "sharding"
) -> Iterator[CallExpression]:
    """Yield a call as it is, and with the equation's `out_sharding`, if any.

    The sharding may be only the spec if the rest follows from the current mesh.
    """
    yield expression
    sharding = params.get(name)
    for out in (getattr(sharding, "spec", None), sharding):
        if out is not None:
            yield replace(expression, kwargs={**expression.kwargs, "out_sharding": out})


@rule(python_rules, "broadcast_in_dim")
def _broadcast_in_dim(eqn: JaxprEqn, x: Slot, *sizes: Slot) -> Iterator[Proposal]:
    shape, dims = eqn.params["shape"], ints(eqn.params["broadcast_dimensions"])
    old = eqn.invars[0].aval.shape
    if not old:
        dtype = dtype_name(eqn.outvars[0].aval.dtype)
        for name in ("zeros", "ones"):
            yield call(f"jnp.{name}", shape)
            yield call(f"jnp.{name}", shape, dtype)
        yield call("jnp.full", shape, x)
        yield call("jnp.full", shape, x, dtype)
    if len(dims) == len(old) and all(shape[d] == size for d, size in zip(dims, old, strict=True)):
        new = [d for d in range(len(shape)) if d not in dims]
        if dims and new and all(shape[d] == 1 for d in new):
            key = tuple(None if d in new else _ALL for d in range(len(shape)))
            if len(shape) <= 4:
                yield Subscript(x, _with_dots(key))
            yield call("jnp.expand_dims", x, one_or_all(tuple(new)))
    yield call("jnp.broadcast_to", x, shape)
    yield call("lax.broadcast", x, shape[: len(shape) - len(old)])
    yield from with_out_sharding(call("lax.broadcast_in_dim", x, shape, dims), eqn.params)


def _with_dots(key: tuple[object, ...]) -> tuple[object, ...]:
    """Return `[:, :, None]` unchanged, and `[None, :, :]` without the redundant slices."""
    while len(key) > 1 and key[-1] == _ALL:
        key = key[:-1]
    return key


@rule(python_rules, "reshape")
def _reshape(eqn: JaxprEqn, x: Slot, *sizes: Slot) -> Iterator[Proposal]:
    shape = eqn.params["new_sizes"]
    if eqn.invars[0].aval.shape:  # a scalar may be a Python number
        yield method(x, "reshape", *shape) if shape else method(x, "reshape", ())
    yield call("jnp.reshape", x, shape)
    yield from with_out_sharding(call("lax.reshape", x, shape), eqn.params)
    yield call("lax.reshape", x, shape, eqn.params["dimensions"])


@rule(python_rules, "transpose")
def _transpose(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    order = ints(eqn.params["permutation"])
    rank = len(order)
    if order == tuple(reversed(range(rank))):
        yield Attribute(x, "T")
    moved = [i for i, axis in enumerate(order) if axis != i]
    if moved == [rank - 2, rank - 1]:
        yield Attribute(x, "mT")
    if len(moved) == 2:
        yield method(x, "swapaxes", *moved)
    yield method(x, "transpose", *order)
    yield call("lax.transpose", x, order)


@rule(python_rules, "squeeze")
def _squeeze(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    axes = ints(eqn.params["dimensions"])
    yield method(x, "squeeze", one_or_all(axes))
    yield call("lax.squeeze", x, axes)


@rule(python_rules, "slice")
def _slice(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    starts, limits = ints(eqn.params["start_indices"]), ints(eqn.params["limit_indices"])
    steps = eqn.params["strides"]
    key = []
    for i, size in enumerate(eqn.invars[0].aval.shape):
        start = starts[i] or None
        stop = None if limits[i] == size else limits[i]
        key.append(slice(start, stop, None if steps is None or steps[i] == 1 else int(steps[i])))
    if key:
        yield Subscript(x, _with_dots(tuple(key)))
    yield call("lax.slice", x, starts, limits, *([] if steps is None else [ints(steps)]))


@rule(python_rules, "rev")
def _rev(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    axes = ints(eqn.params["dimensions"])
    key = tuple(
        slice(None, None, -1) if i in axes else _ALL for i in range(len(eqn.invars[0].aval.shape))
    )
    if key:
        yield Subscript(x, _with_dots(key))
    yield call("lax.rev", x, axes)


@rule(python_rules, "concatenate")
def _concatenate(eqn: JaxprEqn, *parts: Slot) -> Iterator[Proposal]:
    axis = eqn.params["dimension"]
    yield call("jnp.concatenate", list(parts), **({"axis": axis} if axis else {}))
    yield call("lax.concatenate", list(parts), axis)


@rule(python_rules, "stack", "unstack")
def _stack(eqn: JaxprEqn, *parts: Slot) -> Iterator[Proposal]:
    name, axis = eqn.primitive.name, eqn.params["axis"]
    what = list(parts) if name == "stack" else parts[0]
    yield call(f"jnp.{name}", what, axis=axis)
    yield call(f"lax.{name}", what, axis)


@rule(python_rules, "split")
def _split(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    sizes, axis = ints(eqn.params["sizes"]), eqn.params["axis"]
    if len(set(sizes)) == 1:
        yield call("jnp.split", x, len(sizes), **({"axis": axis} if axis else {}))
    yield call("lax.split", x, sizes, axis)


@rule(python_rules, "tile")
def _tile(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    yield call("jnp.tile", x, ints(eqn.params["reps"]))
    yield call("lax.tile", x, ints(eqn.params["reps"]))


@rule(python_rules, "pad")
def _pad(eqn: JaxprEqn, x: Slot, value: Slot) -> Iterator[Proposal]:
    yield call("lax.pad", x, value, tuple(map(ints, eqn.params["padding_config"])))


@rule(python_rules, "iota")
def _iota(eqn: JaxprEqn, *sizes: Slot) -> Iterator[Proposal]:
    shape, dtype = eqn.params["shape"], dtype_name(eqn.params["dtype"])
    dimension = eqn.params["dimension"]
    if len(shape) == 1:
        yield call("jnp.arange", shape[0])
        yield call("jnp.arange", shape[0], dtype=dtype)
        yield call("lax.iota", dtype, shape[0])
    yield from with_out_sharding(call("lax.broadcasted_iota", dtype, shape, dimension), eqn.params)


@rule(python_rules, "dim_as_value")
def _dim_as_value(eqn: JaxprEqn) -> Iterator[Proposal]:
    yield call("jnp.asarray", eqn.params["dim"])


@rule(python_rules, "empty", "empty2")
def _empty(eqn: JaxprEqn) -> Iterator[Proposal]:
    shape, dtype = eqn.outvars[0].aval.shape, dtype_name(eqn.params["dtype"])
    # The parameter has the user's form: a class, a dtype or a name.
    param = eqn.params["dtype"]
    exact = param if isinstance(param, str) else call("jnp.dtype", jnp.dtype(param).name)
    for argument in (dtype, exact):
        yield from with_out_sharding(call("jnp.empty", shape, argument), eqn.params, "out_sharding")
        yield from with_out_sharding(call("lax.empty", shape, argument), eqn.params, "out_sharding")


@rule(python_rules, "device_put")
def _device_put(eqn: JaxprEqn, *xs: Slot) -> Iterator[Proposal]:
    if len(xs) == 1:
        yield call("jax.device_put", xs[0], *[d for d in eqn.params["devices"] if d is not None])
        yield call("jnp.array", xs[0])
    yield call("jax.device_put", list(xs), list(eqn.params["devices"]))


# --- dynamic slices and indices ---------------------------------------------------------------


@rule(python_rules, "dynamic_slice", "dynamic_update_slice")
def _dynamic_slice(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    if eqn.primitive.name == "dynamic_slice":
        sizes = ints(eqn.params["slice_sizes"])
        expression = call("lax.dynamic_slice", operands[0], operands[1:], sizes)
    else:
        expression = call("lax.dynamic_update_slice", *operands[:2], operands[2:])
    yield expression
    # Negative starts are not normalized by further equations.
    yield replace(expression, kwargs={"allow_negative_indices": False})


#: The lax names of the modes for out-of-bounds indices.
_MODES = {"FILL_OR_DROP": "fill", "CLIP": "clip", "PROMISE_IN_BOUNDS": "promise_in_bounds"}


def _index_options(eqn: JaxprEqn) -> dict[str, object]:
    """Return the keyword arguments common to gather and scatter."""
    mode = eqn.params["mode"]
    keywords = {"mode": _MODES.get(getattr(mode, "name", ""), mode)}
    return keywords | nondefault_params(eqn.params, indices_are_sorted=False, unique_indices=False)


@rule(python_rules, "gather")
def _gather(eqn: JaxprEqn, x: Slot, indices: Slot) -> Iterator[Proposal]:
    p, more = eqn.params, _index_options(eqn)
    sizes = ints(p["slice_sizes"])
    yield call("lax.gather", x, indices, p["dimension_numbers"], sizes, **more)
    more["fill_value"] = p["fill_value"]
    yield call("lax.gather", x, indices, p["dimension_numbers"], sizes, **more)


@rule(
    python_rules,
    "scatter",
    "scatter-add",
    "scatter-mul",
    "scatter-min",
    "scatter-max",
    "scatter-sub",
)
def _scatter(eqn: JaxprEqn, x: Slot, indices: Slot, updates: Slot) -> Iterator[Proposal]:
    name = eqn.primitive.name.replace("-", "_")
    numbers = eqn.params["dimension_numbers"]
    yield call(f"lax.{name}", x, indices, updates, numbers, **_index_options(eqn))


# --- elementwise ----------------------------------------------------------------------------------
# Rules for operators, functions without parameters, and conversions.

_INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "pow": "**",
    "and": "&",
    "or": "|",
    "xor": "^",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "shift_left": "<<",
    "shift_right_arithmetic": ">>",
    "shift_right_logical": ">>",
}
_PREFIX = {"neg": "-", "not": "~"}

#: Primitives with a function of the same name and operands in `jnp`, in `lax`, and in other
#: modules.
_JNP = """
    abs cbrt ceil conj copy cos cosh exp exp2 expm1 floor imag log log1p nextafter real sign sin
    sinh sqrt square tan tanh
"""
_LAX = """
    abs acos acosh add asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz
    complex conj cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
    igamma_grad_a igammac imag is_finite le lgamma log log1p logistic lt max min mul mulhi ne
    neg nextafter polygamma population_count pow random_gamma_grad real rem rsqrt shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan
    tanh zeta optimization_barrier dce_sink reduce_precision
"""
_LINALG = """
    eig svd qr lu schur hessenberg tridiagonal tridiagonal_solve householder_product
    lu_pivots_to_permutation cholesky_update symmetric_product
"""

#: The functions of each primitive, most readable first.
_FUNCTIONS: dict[str, list[str]] = defaultdict(list)
for _home, _names in (("jnp", _JNP), ("lax", _LAX), ("lax.linalg", _LINALG)):
    for _name in _names.split():
        _FUNCTIONS[_name].append(f"{_home}.{_name}")

#: Primitives whose functions have other names.
for _name, _path in {
    "acos": "jnp.arccos",
    "acosh": "jnp.arccosh",
    "add_any": "add_any",
    "and": "lax.bitwise_and",
    "asin": "jnp.arcsin",
    "asinh": "jnp.arcsinh",
    "atan": "jnp.arctan",
    "atan2": "jnp.arctan2",
    "atanh": "jnp.arctanh",
    "free_ref": "jax.ref.free_ref",
    "freeze": "jax.ref.freeze",
    "is_finite": "jnp.isfinite",
    "logistic": "jax.nn.sigmoid",
    "max": "jnp.maximum",
    "min": "jnp.minimum",
    "new_ref": "jax.new_ref",
    "not": "lax.bitwise_not",
    "or": "lax.bitwise_or",
    "population_count": "jnp.bitwise_count",
    "random_clone": "jax.random.clone",
    "random_fold_in": "jax.random.fold_in",
    "random_unwrap": "jax.random.key_data",
    "regularized_incomplete_beta": "lax.betainc",
    "threefry2x32": "rng.threefry2x32_p.bind",
    "xor": "lax.bitwise_xor",
}.items():
    _FUNCTIONS[_name].insert(0, _path)


@rule(python_rules, *_INFIX, *_PREFIX, *_FUNCTIONS)
def _function(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    name = eqn.primitive.name
    if name in _INFIX:
        yield BinaryOperation(_INFIX[name], *operands)
    if name in _PREFIX:
        yield UnaryOperation(_PREFIX[name], operands[0])
    for path in _FUNCTIONS[name]:
        yield call(path, *operands)
    if extra := {k: v for k, v in eqn.params.items() if v is not None}:
        yield call(_FUNCTIONS[name][-1], *operands, **extra)


@rule(python_rules, "integer_pow")
def _integer_pow(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    yield BinaryOperation("**", x, eqn.params["y"])
    yield call("lax.integer_pow", x, eqn.params["y"])


@rule(python_rules, "round")
def _round(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    yield call("jnp.round", x)
    yield call("lax.round", x, eqn.params["rounding_method"])


@rule(python_rules, "convert_element_type")
def _convert(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    dtype = dtype_name(eqn.params["new_dtype"])
    if eqn.invars[0].aval.shape:  # a scalar may be a Python number
        yield method(x, "astype", dtype)
    yield call("jnp.astype", x, dtype)
    yield call("lax.convert_element_type", x, dtype)
    yield call("jnp.asarray", x, dtype)
    python = {"b": "bool", "i": "int", "f": "float", "c": "complex"}
    if eqn.params["weak_type"]:
        yield call("lax.convert_element_type", x, Name(python[eqn.params["new_dtype"].kind]))


@rule(python_rules, "bitcast_convert_type")
def _bitcast(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    yield call("lax.bitcast_convert_type", x, dtype_name(eqn.params["new_dtype"]))


@rule(python_rules, "select_n")
def _select(eqn: JaxprEqn, which: Slot, *cases: Slot) -> Iterator[Proposal]:
    if len(cases) == 2:
        yield call("jnp.where", which, cases[1], cases[0])
        yield call("lax.select", which, cases[1], cases[0])
    yield call("lax.select_n", which, *cases)


# --- numerics -------------------------------------------------------------------------------------
# Rules for reductions, cumulative sums, sorting, matrix products, convolutions, transforms.

# --- reductions -------------------------------------------------------------------------------

_REDUCTIONS = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "prod",
    "reduce_and": "all",
    "reduce_or": "any",
    "reduce_xor": "bitwise_xor.reduce",
}


@rule(python_rules, *_REDUCTIONS)
def _reduction(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    name, axes = eqn.primitive.name, ints(eqn.params["axes"])
    whole = axes == tuple(range(len(eqn.invars[0].aval.shape)))
    if axes and name != "reduce_xor":
        yield call(f"jnp.{_REDUCTIONS[name]}", x, **({} if whole else {"axis": one_or_all(axes)}))
    yield from with_out_sharding(call(f"lax.{name}", x, axes), eqn.params, "out_sharding")


@rule(python_rules, "argmax", "argmin")
def _arg_reduction(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    (axis,) = eqn.params["axes"]
    yield call(f"jnp.{eqn.primitive.name}", x, axis=axis)
    yield call(f"lax.{eqn.primitive.name}", x, axis, dtype_name(eqn.params["index_dtype"]))


@rule(python_rules, "reduce")
def _reduce(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    yield call("lax.reduce", *_combined(eqn, operands), ints(eqn.params["dimensions"]))


def _combined(eqn: JaxprEqn, operands: tuple[Slot, ...]) -> tuple[Any, Any, PythonFunction]:
    """Return the arrays, the initial values and the function of a reduction by a jaxpr."""
    count, body = len(operands) // 2, eqn.params["jaxpr"]
    if count == 1:
        return operands[0], operands[1], PythonFunction(body, "combine", (0, 1), 0)
    left, right = tuple(range(count)), tuple(range(count, 2 * count))
    combine = PythonFunction(body, "combine", (left, right), left, ("left", "right"))
    return operands[:count], operands[count:], combine


@rule(python_rules, "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    reverse = nondefault_params(eqn.params, reverse=False)
    yield call(f"lax.{eqn.primitive.name}", x, axis=eqn.params["axis"], **reverse)


# --- windows ----------------------------------------------------------------------------------

_WINDOWS: dict[str, tuple[float | None, str]] = {
    "reduce_window_sum": (0, "lax.add"),
    "reduce_window_max": (None, "lax.max"),
    "reduce_window_min": (None, "lax.min"),
}


@rule(python_rules, *_WINDOWS)
def _window(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    start, combine = _WINDOWS[eqn.primitive.name]
    lowest = eqn.primitive.name.endswith("max")
    starts = _ends(eqn.invars[0].aval.dtype, lowest) if start is None else [start]
    for first in starts:
        yield from _windowed(eqn, x, first, Name(combine))


def _ends(dtype: np.dtype, lowest: bool) -> Iterator[object]:
    """Yield the Python numbers that may be the initial value of a maximum or minimum."""
    if dtype.kind == "b":
        yield not lowest
    elif dtype.kind in "iu":
        info = jnp.iinfo(dtype)
        end = int(info.min if lowest else info.max)
        yield from (end, call(f"np.{dtype.name}", end))
    else:
        infinity = float("-inf") if lowest else float("inf")
        yield from (infinity, call("np.array", infinity, dtype_name(dtype)))


@rule(python_rules, "reduce_window")
def _reduce_window(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    yield from _windowed(eqn, *_combined(eqn, operands))


def _windowed(eqn: JaxprEqn, *values: object) -> Iterator[Proposal]:
    """Yield the reduction over a window, for each way to write the padding."""
    p = eqn.params
    sizes = ints(p["window_dimensions"]), ints(p["window_strides"])
    dilations = _dilations(p, "base_dilation", "window_dilation")
    for padding in ("VALID", "SAME", tuple(map(ints, p["padding"]))):
        yield call("lax.reduce_window", *values, *sizes, padding, **dilations)


def _dilations(params: Mapping[str, Any], *names: str) -> dict[str, object]:
    """Return the dilations with these names that are not all 1."""
    return {name: ints(params[name]) for name in names if any(n != 1 for n in params[name])}


# --- sorting ----------------------------------------------------------------------------------


@rule(python_rules, "sort")
def _sort(eqn: JaxprEqn, *xs: Slot) -> Iterator[Proposal]:
    more = nondefault_params(eqn.params, is_stable=True, num_keys=1)
    yield call("lax.sort", one_or_all(xs), dimension=eqn.params["dimension"], **more)


@rule(python_rules, "top_k")
def _top_k(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    yield call("lax.top_k", x, eqn.params["k"])
    yield call("lax.top_k", x, eqn.params["k"], axis=eqn.params["axis"])


@rule(python_rules, "approx_top_k")
def _approx_top_k(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    p = eqn.params
    rest = {k: v for k, v in p.items() if k not in ("k", "is_max_k")}
    yield call(f"lax.approx_{'max' if p['is_max_k'] else 'min'}_k", x, p["k"], **rest)


# --- products ---------------------------------------------------------------------------------


@rule(python_rules, "dot_general")
def _dot_general(eqn: JaxprEqn, x: Slot, y: Slot) -> Iterator[Proposal]:
    p = eqn.params
    contract, batch = (tuple(map(ints, pair)) for pair in p["dimension_numbers"])
    out = p["preferred_element_type"]
    more = nondefault_params(p, precision=None)
    more |= {} if out is None else {"preferred_element_type": dtype_name(out)}
    left, right = (v.aval.shape for v in eqn.invars)
    yield BinaryOperation("@", x, y)
    ranks = len(left), len(right)
    if max(ranks) <= 8:
        subscripts = _einsum(ranks, contract, batch)
        yield call("jnp.einsum", subscripts, x, y)
        yield call("jnp.einsum", subscripts, x, y, **more)
    expression = call("lax.dot_general", x, y, (contract, batch), **more)
    yield from with_out_sharding(expression, p, "out_sharding")


def _einsum(
    ranks: tuple[int, int], contract: Sequence[Sequence[int]], batch: Sequence[Sequence[int]]
) -> str:
    """Return the subscripts of a dot_general, as in `"bij,bjk->bik"`."""
    letters = iter(ascii_lowercase)
    left = [next(letters) for _ in range(ranks[0])]
    shared = {b: left[a] for pair in (contract, batch) for a, b in zip(*pair, strict=True)}
    right = [shared.get(i) or next(letters) for i in range(ranks[1])]
    free = [c for i, c in enumerate(left) if i not in contract[0] and i not in batch[0]]
    free += [c for i, c in enumerate(right) if i not in contract[1] and i not in batch[1]]
    return f"{''.join(left)},{''.join(right)}->{''.join(left[i] for i in batch[0])}{''.join(free)}"


@rule(python_rules, "conv_general_dilated")
def _convolution(eqn: JaxprEqn, x: Slot, kernel: Slot) -> Iterator[Proposal]:
    p = eqn.params
    dilations = _dilations(p, "lhs_dilation", "rhs_dilation")
    more = nondefault_params(p, feature_group_count=1, batch_group_count=1, precision=None)
    if p["preferred_element_type"] is not None:
        more["preferred_element_type"] = dtype_name(p["preferred_element_type"])
    strides = ints(p["window_strides"])
    for numbers in (_layouts(p["dimension_numbers"]), p["dimension_numbers"]):
        rest = {**dilations, "dimension_numbers": numbers, **more}
        for padding in ("SAME", "VALID", tuple(map(ints, p["padding"]))):
            yield call("lax.conv_general_dilated", x, kernel, strides, padding, **rest)


def _layouts(numbers: lax.ConvDimensionNumbers) -> tuple[str, str, str]:
    """Return convolution dimension numbers as three strings: `("NHWC", "HWIO", "NHWC")`."""

    def text(spec: Sequence[int], ends: str) -> str:
        space = "HW" if len(spec) == 4 else "0123456"[: len(spec) - 2]
        letters = dict(zip(spec, ends + space, strict=True))
        return "".join(letters[i] for i in range(len(spec)))

    lhs, rhs, out = numbers
    return text(lhs, "NC"), text(rhs, "OI"), text(out, "NC")


@rule(python_rules, "fft")
def _fft(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    yield call("lax.fft", x, eqn.params["fft_type"], ints(eqn.params["fft_lengths"]))


@rule(python_rules, "ragged_dot_general")
def _ragged_dot(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    p = eqn.params
    rest = {k: v for k, v in p.items() if v is not None and k != "ragged_dot_dimension_numbers"}
    yield call("lax.ragged_dot", *operands)
    numbers = p["ragged_dot_dimension_numbers"]
    yield call("lax.ragged_dot_general", *operands, ragged_dot_dimension_numbers=numbers, **rest)


# --- linear algebra ---------------------------------------------------------------------------


@rule(python_rules, "geqrf")
def _geqrf(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    yield MultiResult(CallExpression(GEQRF, (x,)), (0, 1))


@rule(python_rules, "cholesky", "eigh")
def _of_symmetric(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    extra = {k: v for k, v in eqn.params.items() if v is not None}
    for more in ({}, extra):
        yield call(f"lax.linalg.{eqn.primitive.name}", x, **more, symmetrize_input=False)


@rule(python_rules, "triangular_solve")
def _triangular_solve(eqn: JaxprEqn, a: Slot, b: Slot) -> Iterator[Proposal]:
    params = {k: v for k, v in eqn.params.items() if v}
    yield call("lax.linalg.triangular_solve", a, b, **params)


# --- effects --------------------------------------------------------------------------------------
# Rules for equations with effects: refs, printing, callbacks, and sown values.


@rule(python_rules, "empty_ref")
def _empty_ref(eqn: JaxprEqn) -> Iterator[Proposal]:
    yield call("jax.ref.empty_ref", eqn.params["ty"])


@rule(python_rules, "get")
def _get(eqn: JaxprEqn, ref: Slot, *rest: Slot) -> Iterator[Proposal]:
    for key in _keys(eqn, rest):
        yield Subscript(ref, key)


@rule(python_rules, "swap")
def _swap(eqn: JaxprEqn, ref: Slot, value: Slot, *rest: Slot) -> Iterator[Proposal]:
    for key in _keys(eqn, rest):
        if isinstance(eqn.outvars[0], DropVar):
            yield Assignment(Subscript(ref, key), value)
        yield call("jax.ref.swap", ref, _index(key), value)


@rule(python_rules, "addupdate")
def _addupdate(eqn: JaxprEqn, ref: Slot, value: Slot, *rest: Slot) -> Iterator[Proposal]:
    for key in _keys(eqn, rest):
        yield call("jax.ref.addupdate", ref, _index(key), value)


def _keys(eqn: JaxprEqn, rest: tuple[Slot, ...]) -> Iterator[tuple[object, ...]]:
    """Yield the subscripts of a ref that an equation reads or writes."""
    transforms = jax.tree.unflatten(eqn.params["tree"], rest)
    if not transforms:
        yield (...,)
    elif len(transforms) == 1 and isinstance(transforms[0], jaxcompat.NDIndexer):
        yield tuple(map(_subscript, transforms[0].indices))


def _subscript(index: Any) -> object:
    """Return one dimension's subscript: a slice if its start and size are static, else as it is."""
    if not isinstance(index, jaxcompat.IndexSlice):
        return index
    if not isinstance(index.start, int):
        return call("jax.ds", index.start, index.size)
    stop = index.start + (index.size - 1) * index.stride + 1
    return slice(index.start, stop, None if index.stride == 1 else index.stride)


def _index(key: tuple[object, ...]) -> object:
    """Return a key as an argument."""
    return ... if key == (...,) else key


# --- printing ---------------------------------------------------------------------------------


@rule(python_rules, "debug_print")
def _print(eqn: JaxprEqn, *values: Slot) -> Iterator[Proposal]:
    p = eqn.params
    args, kwargs = jax.tree.unflatten(p["in_tree"], values)
    more = nondefault_params(p, ordered=False, partitioned=False)
    yield call("jax.debug.print", p["fmt"], *args, **more, **kwargs)


# --- callbacks --------------------------------------------------------------------------------

# Missing Python functions are replaced by functions that raise.


@rule(python_rules, "pure_callback")
def _pure_callback(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    more = nondefault_params(eqn.params, sharding=None, vmap_method=None)
    yield _with_results("jax.pure_callback", eqn, operands, more)


@rule(python_rules, "io_callback")
def _io_callback(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    more = nondefault_params(eqn.params, sharding=None, ordered=False)
    yield _with_results("io_callback", eqn, operands, more)


@rule(python_rules, "debug_callback")
def _debug_callback(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    more = nondefault_params(eqn.params, partitioned=False)
    if eqn.params["effect"] == jaxcompat.DEBUG_EFFECTS["OrderedDebugEffect"]:
        more["ordered"] = True
    yield MultiResult(call("jax.debug.callback", _stub(eqn), *operands, **more), None)


def _with_results(
    path: str, eqn: JaxprEqn, operands: tuple[Slot, ...], more: dict[str, object]
) -> MultiResult:
    types = tuple(
        call("jax.ShapeDtypeStruct", v.aval.shape, dtype_name(v.aval.dtype)) for v in eqn.outvars
    )
    return MultiResult(call(path, _stub(eqn), types, *operands, **more), tuple(range(len(types))))


@rule(python_rules, "custom_vmap_call")
def _custom_vmap(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    stub, body = eqn.params["rule"], eqn.params["call"]
    if not isinstance(stub, Stub):
        error = unsupported(eqn, f"it holds {batching_rule(eqn)}")
        error.hint = BATCHING_HINT
        raise error
    yield local_call(
        eqn,
        body,
        operands,
        decorators=(Name("jax.custom_batching.custom_vmap"),),
        rules=(("def_vmap", (_raising(stub),), {}),),
        kept=True,
        key=(jaxcompat.open_jaxpr(body), stub),
    )


def _stub(eqn: JaxprEqn) -> PythonFunction:
    """Return the stub for an equation's callback. Raises UnsupportedError."""
    stub = eqn.params["callback"]
    if not isinstance(stub, Stub):
        error = unsupported(eqn, f"it calls a Python function ({callback_name(stub)})")
        error.hint = HINT
        raise error
    return _raising(stub)


def _raising(stub: Stub) -> PythonFunction:
    return PythonFunction(
        None,
        identifier(stub.name.rpartition(".")[2]),
        (),
        None,
        ("*operands",),
        kept=True,
        renamed=False,
        key=("stub", stub.name),
        raises=call("RuntimeError", stub.message),
    )


# --- sown values ------------------------------------------------------------------------------


@rule(python_rules, "sow")
def _sow(eqn: JaxprEqn, *operands: Slot) -> Iterator[Proposal]:
    p = eqn.params
    if unknown := _unknown(describe(p["tree"])):
        raise unsupported(eqn, f"its value has a node of type {unknown}")
    count = p["tree"].num_leaves
    value, key = jax.tree.unflatten(p["tree"], operands[:count]), operands[count:]
    if (p["tag"], p["mode"], key) == (VARIABLE, "strict", ()):
        sown = call("jaxprtool.variable", value, name=p["name"])
    else:
        more: dict[str, object] = {} if p["mode"] == "strict" else {"mode": p["mode"]}
        more |= {"key": key[0] if len(key) == 1 else key} if key else {}
        sown = call("jaxprtool.sow", value, tag=p["tag"], name=p["name"], **more)
    yield sown
    yield call("jax.tree.leaves", sown)


def _unknown(tree: Tree) -> str | None:
    """Return the type of a node in a structure that is not a Python container, or None."""
    if tree.kind in ("custom", "OrderedDict"):
        return tree.type_name or tree.kind
    return next(filter(None, map(_unknown, tree.children)), None)


# --- randomness -----------------------------------------------------------------------------------
# Rules for random keys and bits, and for collectives.

_KEY_FUNCTIONS = {"random_seed": "jax.random.key", "random_wrap": "jax.random.wrap_key_data"}


@rule(python_rules, *_KEY_FUNCTIONS)
def _key(eqn: JaxprEqn, data: Slot) -> Iterator[Proposal]:
    yield call(_KEY_FUNCTIONS[eqn.primitive.name], data)
    yield call(_KEY_FUNCTIONS[eqn.primitive.name], data, impl=eqn.params["impl"].name)


@rule(python_rules, "random_bits")
def _bits(eqn: JaxprEqn, key: Slot) -> Iterator[Proposal]:
    shape, dtype = eqn.params["shape"], eqn.outvars[0].aval.dtype
    yield call("jax.random.bits", key, shape)
    yield call("jax.random.bits", key, shape, dtype_name(dtype))


@rule(python_rules, "random_split")
def _random_split(eqn: JaxprEqn, key: Slot) -> Iterator[Proposal]:
    shape = eqn.params["shape"]
    if shape == (2,):
        yield call("jax.random.split", key)
    yield call("jax.random.split", key, one_or_all(shape))


@rule(python_rules, "rng_bit_generator")
def _bit_generator(eqn: JaxprEqn, key: Slot) -> Iterator[Proposal]:
    p = eqn.params
    shape, dtype = p["shape"], dtype_name(p["dtype"])
    yield call("lax.rng_bit_generator", key, shape, dtype)
    yield call("lax.rng_bit_generator", key, shape, dtype, p["algorithm"])


@rule(python_rules, "rng_uniform")
def _uniform(eqn: JaxprEqn, low: Slot, high: Slot) -> Iterator[Proposal]:
    yield call("lax.rng_uniform", low, high, eqn.params["shape"])


# --- collectives ------------------------------------------------------------------------------


@rule(python_rules, "psum", "psum_invariant", "pmax", "pmin")
def _all_reduce(eqn: JaxprEqn, *xs: Slot) -> Iterator[Proposal]:
    name = eqn.primitive.name.removesuffix("_invariant")
    more = nondefault_params(eqn.params, axis_index_groups=None)
    yield call(f"lax.{name}", one_or_all(xs), _axes(eqn.params["axes"]), **more)


@rule(python_rules, "pvary")
def _vary(eqn: JaxprEqn, *xs: Slot) -> Iterator[Proposal]:
    yield call("lax.pcast", one_or_all(xs), _axes(eqn.params["axes"]), to="varying")


@rule(python_rules, "reshard", "sharding_constraint")
def _reshard(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    to = eqn.params.get("dst_sharding") or eqn.params.get("sharding")
    if eqn.primitive.name == "reshard":
        yield call("jax.sharding.reshard", x, to)
    yield call("lax.with_sharding_constraint", x, to)


@rule(python_rules, "ppermute")
def _permute(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    pairs = [ints(pair) for pair in eqn.params["perm"]]
    yield call("lax.ppermute", x, _axes(eqn.params["axis_name"]), pairs)


@rule(python_rules, "all_gather")
def _all_gather(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    p = eqn.params
    more = nondefault_params(p, axis_index_groups=None)
    if p["all_gather_dimension"]:
        more["axis"] = p["all_gather_dimension"]
    more |= nondefault_params(p, tiled=False)
    yield call("lax.all_gather", x, _axes(p["axis_name"]), **more)


@rule(python_rules, "reduce_scatter")
def _reduce_scatter(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    more = {k: eqn.params[k] for k in ("scatter_dimension", "axis_index_groups", "tiled")}
    yield call("lax.psum_scatter", x, _axes(eqn.params["axis_name"]), **more)


@rule(python_rules, "all_to_all")
def _all_to_all(eqn: JaxprEqn, x: Slot) -> Iterator[Proposal]:
    p = eqn.params
    axes = _axes(p["axis_name"]), p["split_axis"], p["concat_axis"]
    yield call("lax.all_to_all", x, *axes, **nondefault_params(p, tiled=False))


@rule(python_rules, "axis_index")
def _axis_index(eqn: JaxprEqn) -> Iterator[Proposal]:
    yield call("lax.axis_index", _axes(eqn.params["axis_name"]))


def _axes(names: object) -> object:
    """Return an axis name without its tuple if it is the only one."""
    return one_or_all(names) if isinstance(names, tuple | list) else names
