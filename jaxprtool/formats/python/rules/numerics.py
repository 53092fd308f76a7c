"""Rules for reductions, cumulative sums, sorting, matrix products, convolutions, transforms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from string import ascii_lowercase
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxprtool.formats.python.expressions import (
    CallExpression,
    Infix,
    MultiResult,
    Name,
    Proposal,
    PythonFunction,
    Slot,
    call,
)
from jaxprtool.formats.python.helpers import GEQRF
from jaxprtool.formats.python.rules.arrays import ints, one_or_all, placed
from jaxprtool.formats.python.rules.table import options, python_rules
from jaxprtool.formats.python.values import dtype_name
from jaxprtool.ir.basics.rules import rule
from jaxprtool.jaxcompat import JaxprEqn

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
    yield from placed(call(f"lax.{name}", x, axes), eqn.params, "out_sharding")


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
    reverse = options(eqn.params, reverse=False)
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
    more = options(eqn.params, is_stable=True, num_keys=1)
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
    more = options(p, precision=None)
    more |= {} if out is None else {"preferred_element_type": dtype_name(out)}
    left, right = (v.aval.shape for v in eqn.invars)
    yield Infix("@", x, y)
    ranks = len(left), len(right)
    if max(ranks) <= 8:
        subscripts = _einsum(ranks, contract, batch)
        yield call("jnp.einsum", subscripts, x, y)
        yield call("jnp.einsum", subscripts, x, y, **more)
    made = call("lax.dot_general", x, y, (contract, batch), **more)
    yield from placed(made, p, "out_sharding")


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
    more = options(p, feature_group_count=1, batch_group_count=1, precision=None)
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
    given = {k: v for k, v in eqn.params.items() if v}
    yield call("lax.linalg.triangular_solve", a, b, **given)
