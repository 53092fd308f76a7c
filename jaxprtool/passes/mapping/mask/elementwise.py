"""Masking of elementwise operations, which compute the padding like the other elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from jaxprtool.ir.basics.rules import rule
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.evaluation.exact_numpy import evaluate_exactly
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes.mapping.mask.table import MaskContext, mask_rules
from jaxprtool.passes.mapping.mask.values import Filled, Padded, number

#: An argument at which a function has an exact result, and this result, for functions that round.
_EXACT = {
    "asin": (0.0, 0.0),
    "asinh": (0.0, 0.0),
    "atan": (0.0, 0.0),
    "cbrt": (0.0, 0.0),
    "erf": (0.0, 0.0),
    "exp": (-np.inf, 0.0),
    "exp2": (-np.inf, 0.0),
    "expm1": (0.0, 0.0),
    "log1p": (0.0, 0.0),
    "logistic": (-np.inf, 0.0),
    "sin": (0.0, 0.0),
    "sinh": (0.0, 0.0),
    "sqrt": (0.0, 0.0),
    "tan": (0.0, 0.0),
    "tanh": (0.0, 0.0),
}


@rule(mask_rules, "elementwise")
def _elementwise(context: MaskContext, eqn: JaxprEqn, *operands: Padded) -> Any:
    if eqn.primitive.multiple_results:  # result i depends on operand i alone
        return context.bind(eqn, *operands)
    whole = eqn.outvars[0].aval.shape
    results = context.bind(eqn, *(_repeated(context, x, whole) for x in operands))
    fills = {axis: _fill(eqn, operands, axis) for axis in context.bounds.axes(whole)}
    return Filled(results, {axis: value for axis, value in fills.items() if value is not None})


def _repeated(context: MaskContext, x: Padded, shape: Sequence[Any]) -> Any:
    """Broadcast an active operand along the padded axes that it lacks, with a guard."""
    own = range(len(shape) - x.ndim, len(shape)) if x.ndim else ()
    mixed = [
        axis
        for axis in context.bounds.axes(shape)
        if axis not in own or x.shape[axis] != shape[axis]
    ]
    if not (x.active and mixed):
        return x
    whole = context.bounds.shape(shape)
    return context.apply(
        lambda array: lax.broadcast_in_dim(array, whole, tuple(own)), [x], shape, mixed=mixed
    )


def _fill(eqn: JaxprEqn, operands: Sequence[Padded], axis: int) -> np.ndarray | None:
    """Return the fill of the result along an axis, or None if that of an operand is unknown."""
    found = [_number(x, axis) for x in operands]
    known = [value for value in found if value is not None]
    if len(known) < len(found):
        return None
    exact = _EXACT.get(eqn.primitive.name)
    if exact is not None:
        return np.asarray(exact[1], known[0].dtype) if known[0] == exact[0] else None
    if traits(eqn).gives == "same":
        return known[0]
    return evaluate_exactly(eqn, known)


def _number(x: Padded, axis: int) -> np.ndarray | None:
    if x.ndim > 0:
        return x.fill(axis)
    return None if x.facts.literal is None else number(x.facts.literal, x.dtype)
