"""Evaluate jaxprs like `interpreter`, with simple equations in NumPy, which compiles nothing.

XLA takes 10 ms to compile an addition of two numbers. NumPy's addition is bitwise equal, and so is
each operation in `RULES` on the values that it accepts. Division is not among them, since XLA
multiplies by the reciprocal of a scalar. Equations that might differ are evaluated by JAX:
arithmetic with NaN or subnormal numbers, a maximum of zeros, dtypes that NumPy does not have,
values on several devices. Results are never weakly typed. `test_stepwise.py` compares the two.

`interpret` does the same in front of StableHLO's interpreter, whose results are NumPy arrays too.
It neither flushes subnormal numbers nor distinguishes NaNs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from tests.programs import interpreter, stablehlo_interpreter

_FLOATS = frozenset(map(np.dtype, ("float32", "float64")))
_DTYPES = _FLOATS | {np.dtype(bool)}
_DTYPES |= {np.dtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
#: Primitives that move data and compute nothing.
_MOVED = _DTYPES | set(map(np.dtype, ("float16", jnp.bfloat16, "complex64", "complex128")))

Rule = Callable[..., Any]


def evaluate(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """Return the results of a closed jaxpr, one equation at a time."""
    return interpreter.evaluate(jaxpr, args, bind)


def bind(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Return the results of an equation on its own, bitwise equal to JAX's."""
    results = in_numpy(eqn, operands)
    if results is None:
        return interpreter.bind(eqn, operands)
    return list(map(jax.device_put, results))


def interpret(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Return the results of an equation, equal to those of StableHLO's interpreter."""
    results = in_numpy(eqn, operands, exact=False)
    return stablehlo_interpreter.interpret(eqn, operands) if results is None else results


def in_numpy(eqn: Any, operands: Sequence[Any], *, exact: bool = True) -> list[np.ndarray] | None:
    """Return the results of an equation by NumPy. None if they might differ from JAX's.

    Unless `exact`, subnormal numbers and signs of NaN may differ.
    """
    name = eqn.primitive.name
    rule = RULES.get(name)
    if rule is None:
        return None
    dtypes = _MOVED if name in _MOVES else _DTYPES
    exact = exact and name not in _MOVES
    arrays = []
    for atom, x in zip(eqn.invars, operands, strict=True):
        array = _array(atom, x, dtypes)
        if array is None or (exact and _is_delicate(array, name in _TESTS)):
            return None
        arrays.append(array)
    with np.errstate(all="ignore"):
        results = rule(eqn.params, *arrays)
    if results is None:
        return None
    results = list(results) if eqn.primitive.multiple_results else [results]
    for var, x in zip(eqn.outvars, results, strict=True):
        if x.shape != var.aval.shape or x.dtype != var.aval.dtype:
            return None
        if exact and _is_delicate(x):
            return None
    return [np.array(x, order="C") for x in results]


def _array(atom: Any, x: Any, dtypes: Set[Any]) -> np.ndarray | None:
    """Return an operand as a NumPy array. None if it is not an array on one device."""
    dtype = getattr(atom.aval, "dtype", None)
    if not isinstance(dtype, np.dtype) or dtype not in dtypes:
        return None
    if isinstance(atom, Literal):
        return np.asarray(x).astype(dtype)
    if isinstance(x, jax.core.Tracer) or getattr(x, "dtype", None) != dtype:
        return None
    if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1:
        return None
    return np.asarray(x)


def _is_delicate(x: np.ndarray, nan: bool = False) -> bool:
    """Return True for NaN, whose sign is arbitrary, and subnormals, which XLA may flush.

    With `nan`, NaN is accepted.
    """
    if x.dtype not in _FLOATS:
        return False
    tiny = np.finfo(x.dtype).tiny
    with np.errstate(all="ignore"):
        return not np.all((np.abs(x) >= tiny) | (x == 0) | (nan and np.isnan(x)))


# --- the rules ----------------------------------------------------------------------------------


def _elementwise(function: Callable[..., Any]) -> Rule:
    return lambda params, *xs: np.asarray(function(*xs))


def _integers(function: Callable[..., Any]) -> Rule:
    """Restrict a rule to integers and booleans."""
    return lambda params, *xs: None if xs[0].dtype in _FLOATS else np.asarray(function(*xs))


def _extremum(function: Callable[..., Any]) -> Rule:
    def rule(params: Any, x: np.ndarray, y: np.ndarray) -> Any:
        if x.dtype in _FLOATS and ((x == 0) & (y == 0)).any():  # the result may be -0 or 0
            return None
        return np.asarray(function(x, y))

    return rule


def _reduction(function: Callable[..., Any], *, floats: bool = False) -> Rule:
    def rule(params: Any, x: np.ndarray) -> Any:
        if x.size == 0 or _is_sharded(params):
            return None
        if x.dtype in _FLOATS and not (floats and (x != 0).all()):
            return None
        return np.asarray(function(x, axis=tuple(params["axes"]))).astype(x.dtype)

    return rule


def _mul(x: np.ndarray, y: np.ndarray) -> Any:
    return np.logical_and(x, y) if x.dtype == bool else x * y


def _integer_pow(params: Any, x: np.ndarray) -> Any:
    return np.asarray(x * x) if params["y"] == 2 else None


def _convert(params: Any, x: np.ndarray) -> Any:
    new = np.dtype(params["new_dtype"])
    if _is_sharded(params) or (x.dtype in _FLOATS and new not in _FLOATS and new.kind != "b"):
        return None
    return x != 0 if new.kind == "b" else x.astype(new)


def _select_n(params: Any, which: np.ndarray, *cases: np.ndarray) -> Any:
    if len(cases) != 2 or which.dtype != bool:
        return None
    return np.where(which, cases[1], cases[0])


def _broadcast_in_dim(params: Any, x: np.ndarray, *sizes: Any) -> Any:
    if sizes or _is_sharded(params):
        return None
    shape = [1] * len(params["shape"])
    for size, at in zip(x.shape, params["broadcast_dimensions"], strict=True):
        shape[at] = size
    return np.broadcast_to(x.reshape(shape), params["shape"])


def _reshape(params: Any, x: np.ndarray, *sizes: Any) -> Any:
    if sizes or params["dimensions"] is not None or _is_sharded(params):
        return None
    return x.reshape(params["new_sizes"])


def _slice(params: Any, x: np.ndarray) -> Any:
    strides = params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


def _window(x: np.ndarray, sizes: Sequence[int], starts: Sequence[np.ndarray]) -> Any:
    """Return the indices of a slice whose start is clamped into the array."""
    at = [min(max(int(i), 0), n - k) for i, n, k in zip(starts, x.shape, sizes, strict=True)]
    return tuple(slice(i, i + k) for i, k in zip(at, sizes, strict=True))


def _dynamic_slice(params: Any, x: np.ndarray, *starts: np.ndarray) -> Any:
    sizes = params["slice_sizes"]
    return x[_window(x, sizes, starts)] if len(starts) == x.ndim else None


def _dynamic_update_slice(params: Any, x: np.ndarray, new: np.ndarray, *starts: np.ndarray) -> Any:
    result = x.copy()
    result[_window(x, new.shape, starts)] = new
    return result


def _pad(params: Any, x: np.ndarray, value: np.ndarray) -> Any:
    config = params["padding_config"]
    if any(low < 0 or high < 0 or between for low, high, between in config):
        return None
    return np.pad(x, [(low, high) for low, high, _ in config], constant_values=value)


def _iota(params: Any, *sizes: Any) -> Any:
    if sizes or _is_sharded(params):
        return None
    shape, at = params["shape"], params["dimension"]
    row = np.arange(shape[at]).astype(params["dtype"])
    return np.broadcast_to(row.reshape([-1 if i == at else 1 for i in range(len(shape))]), shape)


def _split(params: Any, x: np.ndarray) -> Any:
    return np.split(x, np.cumsum(params["sizes"])[:-1], params["axis"])


def _is_sharded(params: Any) -> bool:
    return params.get("sharding") is not None or params.get("out_sharding") is not None


#: By primitive: a function of parameters and operands to the results; None if they might differ.
RULES: dict[str, Rule] = {
    "add": _elementwise(lambda x, y: x | y if x.dtype == bool else x + y),
    "sub": _elementwise(np.subtract),
    "mul": lambda params, x, y: None if params.get("out_dtype") else np.asarray(_mul(x, y)),
    "neg": _elementwise(np.negative),
    "abs": _elementwise(np.abs),
    "square": _elementwise(lambda x: x * x),
    "integer_pow": _integer_pow,
    "max": _extremum(np.maximum),
    "min": _extremum(np.minimum),
    "and": _integers(np.bitwise_and),
    "or": _integers(np.bitwise_or),
    "xor": _integers(np.bitwise_xor),
    "not": _integers(np.invert),
    "eq": _elementwise(np.equal),
    "ne": _elementwise(np.not_equal),
    "lt": _elementwise(np.less),
    "le": _elementwise(np.less_equal),
    "gt": _elementwise(np.greater),
    "ge": _elementwise(np.greater_equal),
    "is_finite": lambda params, x: np.asarray(np.isfinite(x)),
    "select_n": _select_n,
    "convert_element_type": _convert,
    "reduce_max": _reduction(np.max, floats=True),
    "reduce_min": _reduction(np.min, floats=True),
    "reduce_sum": _reduction(np.sum),
    "reduce_and": _reduction(np.bitwise_and.reduce),
    "reduce_or": _reduction(np.bitwise_or.reduce),
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "squeeze": lambda params, x: x.squeeze(tuple(params["dimensions"])),
    "transpose": lambda params, x: x.transpose(params["permutation"]),
    "rev": lambda params, x: np.flip(x, tuple(params["dimensions"])),
    "concatenate": lambda params, *xs: np.concatenate(xs, params["dimension"]),
    "stack": lambda params, *xs: np.stack(xs, params["axis"]),
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "pad": _pad,
    "iota": _iota,
    "split": _split,
    "tile": lambda params, x: np.tile(x, params["reps"]),
    "unstack": lambda params, x: np.moveaxis(x, params["axis"], 0),
    "copy": lambda params, x: x,
}

_TESTS = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "is_finite"))
_MOVES = frozenset(
    """
    broadcast_in_dim concatenate copy dynamic_slice dynamic_update_slice iota pad reshape rev
    select_n slice split squeeze stack tile transpose unstack
    """.split()  # noqa: SIM905
)
