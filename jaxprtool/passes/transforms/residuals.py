"""What residuals are called: by where in the user's source they are computed.

A value that a call, a loop or a branch gives is followed to the equation inside that computes it,
and through what JAX adds to a value that a policy of `jax.checkpoint` saves or offloads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.ir.frames import own_frame
from jaxprtool.ir.paths import unique
from jaxprtool.ir.regions import regions
from jaxprtool.jaxcompat import AnyJaxpr, Atom, ClosedJaxpr, JaxprEqn, Literal, Var


def residual_names(
    values: Sequence[Var], jaxpr: ClosedJaxpr, arg_names: Sequence[str]
) -> dict[Var, str]:
    """A name for each variable of a closed jaxpr that is no constant, no two the same.

    An argument has its own; a value named with `checkpoint_name`, that one; others have the file,
    line and primitive that made them, `model.py:12 tanh`.
    """
    known = dict(zip(jaxpr.invars, arg_names, strict=True))
    makers = _makers(jaxpr)
    names = [_name(value, makers, known) for value in values]
    return dict(zip(values, unique(names), strict=True))


def _makers(jaxpr: AnyJaxpr) -> dict[Var, JaxprEqn]:
    return {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}


def _name(value: Var, makers: dict[Var, JaxprEqn], known: dict[Var, str]) -> str:
    place = ""
    while value not in known:
        eqn = makers[value]
        eqn, place, operand = _innermost(eqn, eqn.outvars.index(value), place, makers)
        if not isinstance(operand, Var):
            if eqn.primitive.name == "name":
                return str(eqn.params["name"])
            return f"{place} {eqn.primitive.name}".strip()
        value = operand
    return known[value]


def _innermost(
    eqn: JaxprEqn, index: int, place: str, makers: dict[Var, JaxprEqn]
) -> tuple[JaxprEqn, str, Atom | None]:
    """The equation, at any depth, that computes a result of `eqn`, and its source line.

    If a body only hands on what it is given, also the operand of `eqn` that this is.
    """
    inside = False
    while True:
        if _is_added(eqn):
            operand = eqn.invars[index]
            maker = makers.get(operand) if isinstance(operand, Var) else None
            if maker is not None:
                eqn, index = maker, maker.outvars.index(operand)
                continue
            if not inside:
                return eqn, place, operand
        place = _place(eqn) or place
        called = regions(eqn)
        if called is None:
            return eqn, place, None
        for number, atom in called.sources()[index]:
            body, region = called.bodies[number], called.regions[number]
            within = _makers(body)
            inner = None if isinstance(atom, Literal) else within.get(atom)
            if inner is not None and not (called.deciding and _is_filler(inner, within)):
                eqn, index, makers, inside = inner, inner.outvars.index(atom), within, True
                break
            if not inside and len(called.bodies) == 1 and atom in body.invars:
                operand = region.ins[body.invars.index(atom)]
                if operand not in region.back:
                    return eqn, place, eqn.invars[operand]
        else:
            return eqn, place, None


def _is_added(eqn: JaxprEqn) -> bool:
    """Whether an equation is what JAX adds to residuals: rounding to their own precision, a move.

    See https://github.com/jax-ml/jax/pull/22244; moves that JAX adds have no line in the source.
    """
    if eqn.primitive.name == "device_put":
        return jaxcompat.user_frame(eqn) is None
    if eqn.primitive.name != "reduce_precision":
        return False
    own = jnp.finfo(eqn.outvars[0].aval.dtype)
    return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (own.nexp, own.nmant)


def _is_filler(eqn: JaxprEqn, makers: dict[Var, JaxprEqn]) -> bool:
    """Whether an equation only fills an array, as a branch does that has no such residual."""
    if eqn.primitive.name == "broadcast_in_dim":
        atom = eqn.invars[0]
        return isinstance(atom, Literal) or (atom in makers and _is_filler(makers[atom], makers))
    return eqn.primitive.name == "empty2"


def _place(eqn: JaxprEqn) -> str:
    frame = own_frame(eqn)
    return f"{os.path.basename(frame[0])}:{frame[1]}" if frame else ""
