"""Evaluate with NumPy the equations whose bits are the same on every backend.

These equations only move data, compute with integers, or use float operations that IEEE 754
prescribes to the bit. A backend would first have to compile a kernel for each. No rule here knows
an option of a primitive, such as `out_dtype`: an equation with one is left to the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxprtool.ir.basics.dtypes import dtype_kind
from jaxprtool.ir.core.traits import options
from jaxprtool.jaxcompat import JaxprEqn

#: Returns an equation's result by NumPy, or None if a backend might compute other bits.
Evaluation = Callable[..., np.ndarray | None]


def _on(kinds: str, function: np.ufunc) -> Evaluation:
    """Return a rule for dtypes of these kinds. Integers are computed in their own type, and wrap.

    Floats must have 32 or 64 bits, where IEEE 754 prescribes the bits. They must not be NaN, whose
    bits it does not prescribe, or subnormal, which a backend may flush to 0.
    """

    def rule(eqn: JaxprEqn, *operands: np.ndarray) -> np.ndarray | None:
        if any(dtype_kind(x.dtype) not in kinds for x in operands):
            return None
        with np.errstate(all="ignore"):
            result = np.asarray(function(*operands), eqn.outvars[0].aval.dtype)
        return result if all(map(_is_prescribed, (*operands, result))) else None

    return rule


def _is_prescribed(x: np.ndarray) -> bool:
    if x.dtype.kind != "f":
        return True
    if x.dtype.itemsize not in (4, 8) or np.isnan(x).any():
        return False
    return not ((x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny)).any()


def _divide(eqn: JaxprEqn, x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    """Return the quotient by powers of two, which is exact on every backend."""
    is_power = y.dtype.kind == "f" and (np.abs(np.frexp(y)[0]) == 0.5).all()
    return _on("f", np.divide)(eqn, x, y) if is_power else None


def _convert(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray | None:
    """Convert integers, rounding to nearest, or floats that are exact integers to integers."""
    target = eqn.outvars[0].aval.dtype
    if x.dtype.kind == "f":
        fits = (
            target.kind in "iu" and _is_prescribed(x) and (x == np.clip(x, *_range(target))).all()
        )
        return x.astype(target) if fits else None
    if x.dtype.kind not in "biu" or not (target.kind in "iu" or target in (np.float32, np.float64)):
        return None
    return x.astype(target)


def _range(dtype: np.dtype) -> tuple[int, int]:
    """Return the largest range of integers of a type that f32 represents exactly."""
    bounds = np.iinfo(dtype)
    return max(bounds.min, -(2**24)), min(bounds.max, 2**24)


def _broadcast(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray | None:
    shape, at = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    new = tuple(axis for axis in range(len(shape)) if axis not in at)
    return np.broadcast_to(np.expand_dims(x, new), shape)


def _iota(eqn: JaxprEqn) -> np.ndarray | None:
    shape, axis = eqn.params["shape"], eqn.params["dimension"]
    dtype = eqn.outvars[0].aval.dtype
    if dtype.kind not in "iu" and dtype not in (np.float32, np.float64):
        return None
    row = np.arange(shape[axis]).astype(dtype)
    others = tuple(i for i in range(len(shape)) if i != axis)
    return np.broadcast_to(np.expand_dims(row, others), shape)


def _select(eqn: JaxprEqn, which: np.ndarray, *cases: np.ndarray) -> np.ndarray | None:
    return np.where(which, cases[1], cases[0]) if which.dtype == bool and len(cases) == 2 else None


def _slice(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray | None:
    p = eqn.params
    strides = p["strides"] or (1,) * x.ndim
    bounds = zip(p["start_indices"], p["limit_indices"], strides, strict=True)
    return x[tuple(slice(*each) for each in bounds)]


def _reshape(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray:
    return x.reshape(eqn.outvars[0].aval.shape)


def _without_options(rule: Evaluation) -> Evaluation:
    """Return a rule that leaves equations with options to the backend."""

    def plain(eqn: JaxprEqn, *operands: np.ndarray) -> np.ndarray | None:
        return None if options(eqn) else rule(eqn, *operands)

    return plain


_RULES: dict[str, Evaluation] = {
    "add": _on("iuf", np.add),
    "sub": _on("iuf", np.subtract),
    "mul": _on("iuf", np.multiply),
    "div": _divide,
    "neg": _on("if", np.negative),
    "abs": _on("if", np.abs),
    "floor": _on("f", np.floor),
    "ceil": _on("f", np.ceil),
    "max": _on("biu", np.maximum),
    "min": _on("biu", np.minimum),
    "and": _on("biu", np.bitwise_and),
    "or": _on("biu", np.bitwise_or),
    "xor": _on("biu", np.bitwise_xor),
    "not": _on("biu", np.invert),
    "eq": _on("biuf", np.equal),
    "ne": _on("biuf", np.not_equal),
    "lt": _on("biuf", np.less),
    "le": _on("biuf", np.less_equal),
    "gt": _on("biuf", np.greater),
    "ge": _on("biuf", np.greater_equal),
    "convert_element_type": _convert,
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "select_n": _select,
    "slice": _slice,
    "reshape": _reshape,
    "squeeze": _reshape,
    "transpose": lambda eqn, x: x.transpose(eqn.params["permutation"]),
    "copy": lambda eqn, x: x,
    "rev": lambda eqn, x: np.flip(x, eqn.params["dimensions"]),
    "concatenate": lambda eqn, *xs: np.concatenate(xs, eqn.params["dimension"]),
}

#: Rules by primitive.
RULES = {name: _without_options(rule) for name, rule in _RULES.items()}


def evaluate_exactly(eqn: JaxprEqn, operands: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return the result of an equation, or None if a backend might compute other bits."""
    rule = RULES.get(eqn.primitive.name)
    result = None if rule is None else rule(eqn, *operands)
    return None if result is None else np.array(result, order="C")
