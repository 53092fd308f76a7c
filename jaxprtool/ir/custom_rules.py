"""The rules of custom_jvp and custom_vjp calls as jaxprs, and calls made from such jaxprs.

JAX keeps these rules as Python closures. Whoever wants to write a program down, to compare it or
to emit it as source needs what they compute. Here each is traced to a jaxpr, with all of the
call's differentiable operands perturbed, and a jaxpr becomes a rule that JAX can call.

A rule that was defined with `symbolic_zeros=True` is traced without any: its derivatives are the
same, and symbolic zeros that it is given later are made into arrays of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
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


def rule_key(eqn: JaxprEqn) -> Hashable:
    """A key that two custom calls have in common if they follow the same rules at the same types.

    A rule's own jaxpr often holds the call that the rule belongs to, since rules like to call
    their function; that inner call has the key of the outer one. Whoever follows rules into their
    jaxprs stops at a key that it has seen.
    """
    params = eqn.params
    live = [params[k] for k in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd") if k in params]
    primals = tuple(v.aval for v in eqn.invars[params["num_consts"] :])
    results = tuple(v.aval for v in eqn.outvars)
    return primals, results, params["symbolic_zeros"], *map(jaxcompat.live_key, live)


def jvp_params(
    call_jaxpr: Any,
    name: str,
    rule: Callable[[], JVPRule],
    num_consts: int = 0,
    symbolic_zeros: bool = False,
) -> dict[str, Any]:
    """The parameters of a custom_jvp call of the closed jaxpr `call_jaxpr`.

    `rule()` is called when the call is differentiated, so that a rule may hold calls that follow
    it. Calls that are given the same `rule` have one `rule_key`, at the same types.
    """

    def parts() -> tuple[Any, ...]:
        made = rule()
        return made.jaxpr, made.out_zeros

    return {
        "call_jaxpr": call_jaxpr,
        "num_consts": num_consts,
        "symbolic_zeros": symbolic_zeros,
        **jaxcompat.custom_jvp_rule_param(name, parts),
    }


def vjp_params(
    call_jaxpr: Any,
    names: tuple[str, str],
    rule: Callable[[], VJPRule],
    num_consts: int = 0,
    symbolic_zeros: bool = False,
) -> dict[str, Any]:
    """The parameters of a custom_vjp call, whose rules have these names; see `jvp_params`."""

    def parts() -> tuple[Any, ...]:
        made = rule()
        return made.fwd, made.bwd, made.forwarded, made.in_zeros

    return {
        "call_jaxpr": call_jaxpr,
        "num_consts": num_consts,
        "symbolic_zeros": symbolic_zeros,
        **jaxcompat.custom_vjp_rule_params(
            names, parts, [v.aval for v in call_jaxpr.invars[num_consts:]]
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
