"""High primitives: operations that are objects with rules of their own (`jax.experimental.hijax`).

An equation of `call_hi_primitive` holds such an object. Before JAX compiles, it replaces the
equation by the object's `expand`; until then the object defines the derivatives and batching. Since
0.12 `jnp.frexp`, `jnp.searchsorted` or `lax.custom_root` are of this kind.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

import jax
from jax._src import ad_checkpoint, hijax
from jax._src.interpreters import ad, partial_eval
from jax._src.lax.control_flow import solves
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.extend.core.primitives import name_p, remat_p
from jax.interpreters.ad import Zero, primitive_jvps

from jaxprtool.jaxcompat.custom_rules import JVPRule, VJPRule, live_key
from jaxprtool.jaxcompat.jaxprs import ONE_JAXPR_CLASS, AnyJaxpr, Aval, close_jaxpr, open_jaxpr
from jaxprtool.jaxcompat.marks import jaxpr_as_fun
from jaxprtool.jaxcompat.tracing import setting_of, trace_flat

#: The class of the objects.
HighPrimitive: type = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive

#: The name of the primitive whose equations hold them.
CALL_HIGH = hijax.call_hi_primitive_p.name

#: The objects that are differentiated by differentiating their expansion.
_TRANSPARENT: tuple[type, ...] = tuple(
    cls for cls in (getattr(solves, "_RootLinearMap", None),) if cls is not None
)

#: The attribute for an object's body, which lives as long as the object.
_BODY = "_jaxprtool_body"


def high_body(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return the expansion of a `call_hi_primitive` as a closed jaxpr, or None.

    It has none if JAX cannot expand it, or must lower types of operands or results too.
    """
    prim = eqn.params["_prim"]
    cached = prim.__dict__.get(_BODY)
    if cached is None:
        cached = prim.__dict__[_BODY] = (_expanded(prim, eqn),)
    return cached[0]


def _expanded(prim: Any, eqn: JaxprEqn) -> ClosedJaxpr | None:
    if any(aval.is_high for aval in (*prim.in_avals_flat, *prim.out_avals_flat)):
        return None
    if isinstance(prim, ad_checkpoint.RematTraced):
        return close_jaxpr(prim.jaxpr)

    def expand(*operands: Any) -> list[Any]:
        return hijax.call_hi_primitive_p.to_lojax(*operands, _prim=prim)

    try:
        with setting_of(eqn):
            return trace_flat(expand, high_name(eqn), prim.in_avals_flat)
    except Exception:  # user code may raise anything; then JAX cannot compile the equation either
        return None


def with_high_body(eqn: JaxprEqn, body: ClosedJaxpr) -> Any:
    """Return an equation's object, with its own rules, and another closed jaxpr to expand to."""
    prim = eqn.params["_prim"]
    if isinstance(prim, ad_checkpoint.RematTraced):
        changed = {**prim.params, "jaxpr": body}
        return type(prim)(**changed)
    new = copy.copy(prim)

    def expand(*args: Any) -> Any:
        outs = jaxpr_as_fun(body)(*jax.tree.leaves(args))
        return jax.tree.unflatten(prim.out_tree, outs)

    # JAX's listing shows some objects with a jaxpr, which would be the old one.
    shown = {k: v for k, v in prim.params.items() if isinstance(v, bool | int | str | tuple)}
    printed = {**shown, "expand": body}
    new.__dict__.update({"expand": expand, "pp_params": lambda: printed, _BODY: (body,)})
    return new


def high_name(eqn: JaxprEqn) -> str:
    """Return the name of the function that an object was created from, or that of its class."""
    prim = eqn.params["_prim"]
    return str(getattr(prim.params.get("traced"), "fun_name", type(prim).__name__))


def high_key(eqn: JaxprEqn) -> Hashable:
    """Return a key that two objects share if they follow the same rules at the same types."""
    prim = eqn.params["_prim"]
    params = {k: v for k, v in prim.params.items() if k != "traced"}
    types = tuple(prim.in_avals_flat), prim.in_tree, tuple(prim.out_avals_flat)
    return type(prim), types, live_key(tuple(params.values()))


# --- derivatives --------------------------------------------------------------------------------


def high_derivative(eqn: JaxprEqn) -> str:
    """Return the kind of derivative that an object has: "body", "jvp" or "vjp"."""
    prim = eqn.params["_prim"]
    if isinstance(prim, _TRANSPARENT):
        return "body"
    rules = [name for name in ("jvp", "vjp_fwd") if _overridden(prim, name)]
    only_reverse = rules == ["vjp_fwd"] or isinstance(prim, hijax.CustomVJPTraced)
    return "vjp" if only_reverse else "jvp"


def _overridden(prim: object, method: str) -> bool:
    return getattr(type(prim), method) is not getattr(HighPrimitive, method)


def _is_zero(value: object) -> bool:
    """Return True if a tangent or cotangent is None, or of a type whose only value is zero."""
    if isinstance(value, Zero | SymbolicZero):
        return True
    return bool(getattr(value, "dtype", None) == jax.dtypes.float0)


def _zero(aval: Aval) -> bool:
    return bool(getattr(aval.to_tangent_aval(), "dtype", None) == jax.dtypes.float0)


def high_jvp_rule(eqn: JaxprEqn) -> JVPRule:
    """Return an object's forward derivative. Raises the exception of the object's rule."""
    prim = eqn.params["_prim"]
    primals = prim.in_avals_flat
    tangents = [aval.to_tangent_aval() for aval in primals]
    zeros: list[bool] = []

    def rule(*args: Any) -> list[Any]:
        if all(map(_zero, prim.out_avals_flat)):  # the object's rule may need sizes to be numbers
            zeros[:] = [True] * len(prim.out_avals_flat)
            return list(hijax.call_hi_primitive_p.bind(*args[: len(primals)], _prim=prim))
        in_dots = [
            Zero(aval) if _is_zero(t) else t
            for t, aval in zip(args[len(primals) :], tangents, strict=True)
        ]
        outs, dots = primitive_jvps[hijax.call_hi_primitive_p](
            args[: len(primals)], in_dots, _prim=prim
        )
        zeros[:] = map(_is_zero, dots)
        return [*outs, *(dot for dot, zero in zip(dots, zeros, strict=True) if not zero)]

    with setting_of(eqn):
        name = f"{high_name(eqn)}_jvp"
        jaxpr = trace_flat(rule, name, [*primals, *tangents])
    return JVPRule(name, jaxpr, tuple(zeros), (True,) * len(primals))


def high_vjp_rule(eqn: JaxprEqn) -> VJPRule:
    """Return an object's reverse derivative, whose `fwd` returns all residuals.

    Raises the exceptions of the object's rules, and TypeError for rules that are more than
    functions of residuals and cotangents.
    """
    prim = eqn.params["_prim"]
    wanted = _differentiable(prim)
    trees: list[Any] = []

    def forward(*args: Any) -> list[Any]:
        asked, primals = (jax.tree.unflatten(prim.in_tree, part) for part in (wanted, args))
        out, *rest = prim.vjp_fwd(asked, *primals)
        if len(rest) > 2:
            raise TypeError("its residuals have a structure of their own")
        leaves, tree = jax.tree.flatten(rest[0])
        trees[:] = [tree]
        return [*leaves, *jax.tree.leaves(out)]

    zeros: list[bool] = []

    def backward(*args: Any) -> list[Any]:
        count = trees[0].num_leaves
        sums = [ad.ValAccum(aval.to_ct_aval()) for aval in prim.in_avals_flat]
        log = prim.vjp_bwd(
            jax.tree.unflatten(trees[0], args[:count]),
            jax.tree.unflatten(prim.out_tree, args[count:]),
            *jax.tree.unflatten(prim.in_tree, sums),
        )
        if log is not None:
            raise TypeError("its backward rule returns a log")
        cts = [accum.freeze() for accum in sums]
        zeros[:] = map(_is_zero, cts)
        return [ct for ct, zero in zip(cts, zeros, strict=True) if not zero]

    cotangents = [aval.to_ct_aval() for aval in prim.out_avals_flat]
    names = f"{high_name(eqn)}_fwd", f"{high_name(eqn)}_bwd"
    with setting_of(eqn):
        fwd = trace_flat(forward, names[0], prim.in_avals_flat)
        residuals = [atom.aval for atom in fwd.outvars[: trees[0].num_leaves]]
        bwd = trace_flat(backward, names[1], [*residuals, *cotangents])
    forwarded = (None,) * len(residuals)
    return VJPRule(*names, fwd, bwd, forwarded, tuple(zeros), (True,) * len(eqn.invars))


def _differentiable(prim: Any) -> list[bool]:
    """Return, for each operand, True if an object's reverse rule returns a cotangent for it."""
    flags = [not _zero(aval) for aval in prim.in_avals_flat]
    if isinstance(prim, hijax.CustomVJPTraced):
        closed_over = jax.tree.structure(prim.in_avals[:2]).num_leaves
        if closed_over:
            raise TypeError("it closes over traced values")
    return flags


# --- objects with an older equivalent ---------------------------------------------------------


def older_form(eqn: JaxprEqn) -> JaxprEqn | None:
    """Return an equivalent `remat2` or `name` equation for the objects that replaced these."""
    prim = eqn.params["_prim"]
    if isinstance(prim, ad_checkpoint.CheckpointName):
        return eqn.replace(primitive=name_p, params={"name": prim.name})
    if not isinstance(prim, ad_checkpoint.RematTraced):
        return None
    jaxpr = close_jaxpr(prim.jaxpr)
    if jaxpr.consts:  # a remat takes them as operands
        return None
    body = jaxpr if ONE_JAXPR_CLASS else open_jaxpr(jaxpr)
    params = {
        "jaxpr": body,
        "prevent_cse": prim.params.get("prevent_cse", True),
        "differentiated": False,
        "policy": prim.policy,
    }
    return eqn.replace(primitive=remat_p, params=params)


def lowered(jaxpr: AnyJaxpr) -> ClosedJaxpr:
    """Return a closed jaxpr in which JAX has expanded all objects, at every depth."""
    return partial_eval.lower_jaxpr2(jaxpr) if open_jaxpr(jaxpr).is_high else jaxpr
