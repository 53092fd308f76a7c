"""The rules of custom_jvp and custom_vjp calls as jaxprs, and calls made from such jaxprs.

JAX keeps these rules as Python closures. Whoever wants to write a program down, to compare it or
to emit it as source needs what they compute. Here each is traced to a jaxpr, with all of the
call's differentiable operands perturbed, and a jaxpr becomes a rule that JAX can call.

A rule that was defined with `symbolic_zeros=True` is traced without any: its derivatives are the
same, and symbolic zeros that it is given later are made into arrays of zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError, described
from jaxprtool.jaxcompat import JaxprEqn

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class JVPRule:
    """What a custom_jvp call's rule computes.

    `jaxpr` is closed and takes (*primals, *tangents); it gives the results, then the tangents of
    those results that have False in `out_zeros`. The primals are the call's operands after its
    first `num_consts`.
    """

    name: str
    jaxpr: Any
    out_zeros: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class VJPRule:
    """What a custom_vjp call's two rules compute.

    `fwd` is closed and takes the primals; it gives residuals, then the results. `forwarded` has
    an entry for each residual: None if `fwd` gives it, else the index of the primal that it is.
    `bwd` is closed and takes (*residuals, *cotangents of the results); it gives the cotangents of
    those primals that have False in `in_zeros`.
    """

    fwd_name: str
    bwd_name: str
    fwd: Any
    bwd: Any
    forwarded: tuple[int | None, ...]
    in_zeros: tuple[bool, ...]


def jvp_rule(eqn: JaxprEqn) -> JVPRule:
    """The rule of a custom_jvp call.

    Raises UnsupportedError if the rule raises when it is traced.
    """
    return JVPRule(*_traced(jaxcompat.custom_jvp_rule, eqn))


def vjp_rule(eqn: JaxprEqn) -> VJPRule:
    """The rules of a custom_vjp call.

    Raises UnsupportedError if one of them raises when it is traced, or is more than a function
    from residuals and cotangents to cotangents.
    """
    names, *rest = _traced(jaxcompat.custom_vjp_rule, eqn)
    return VJPRule(*names, *rest)


def jvp_params(
    call_jaxpr: Any, rule: JVPRule, num_consts: int = 0, symbolic_zeros: bool = False
) -> dict[str, Any]:
    """The parameters of a custom_jvp call of the closed jaxpr `call_jaxpr` with this rule."""
    return {
        "call_jaxpr": call_jaxpr,
        "num_consts": num_consts,
        "symbolic_zeros": symbolic_zeros,
        **jaxcompat.custom_jvp_rule_param(rule.name, rule.jaxpr, rule.out_zeros),
    }


def vjp_params(
    call_jaxpr: Any, rule: VJPRule, num_consts: int = 0, symbolic_zeros: bool = False
) -> dict[str, Any]:
    """The parameters of a custom_vjp call of the closed jaxpr `call_jaxpr` with these rules."""
    primals = [v.aval for v in call_jaxpr.invars[num_consts:]]
    names = rule.fwd_name, rule.bwd_name
    return {
        "call_jaxpr": call_jaxpr,
        "num_consts": num_consts,
        "symbolic_zeros": symbolic_zeros,
        **jaxcompat.custom_vjp_rule_params(
            names, rule.fwd, rule.bwd, rule.forwarded, rule.in_zeros, primals
        ),
    }


def _traced(trace: Callable[[JaxprEqn], T], eqn: JaxprEqn) -> T:
    try:
        return trace(eqn)
    except Exception as error:  # the rule is the user's, and may raise anything
        frame = jaxcompat.user_frame(eqn)
        where = f" at {frame[0]}:{frame[1]}" if frame else ""
        raise UnsupportedError(
            f"the rule of the {eqn.primitive.name}{where} cannot be written as a jaxpr: "
            f"{described(error)}"
        ) from error
