"""Whether the jaxprs that a `.jaxpr` file gives an equation fit it, where JAX does not look.

JAX's type checker compares the operands of a scan or a branch with its body, but not those of
other calls and loops, and it does not look at the rules of custom derivatives. A program in which
these do not fit would fail when it is run or differentiated, far from the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.ir.equations import type_of
from jaxprtool.ir.structured import Call, CustomJVP, CustomVJP, While, view
from jaxprtool.jaxcompat import JaxprEqn


def check_bodies(eqn: JaxprEqn) -> None:
    """Raise ValueError if the bodies of a call or a loop do not take its operands."""
    check = _BODY_CHECKS.get(eqn.primitive.name)
    if check is not None:
        check(view(eqn))


def _check_call(call: Any) -> None:
    _fit("the body takes", call.body.invars, call.operands)


def _check_while(loop: Any) -> None:
    _fit("cond_jaxpr takes", loop.cond.invars, (*loop.cond_consts, *loop.carry))
    _fit("body_jaxpr takes", loop.body.invars, (*loop.body_consts, *loop.carry))
    _fit("body_jaxpr gives", loop.body.outvars, loop.carry)
    # A bool, or, of a loop under vmap, one for each of the batch.
    gives = [type_of(atom.aval) for atom in loop.cond.outvars]
    if len(gives) != 1 or not gives[0].startswith("bool["):
        raise ValueError(f"cond_jaxpr gives {' '.join(gives) or 'nothing'}, not a bool")


def _fit(what: str, atoms: Sequence[Any], others: Sequence[Any]) -> None:
    if len(atoms) != len(others):
        raise ValueError(f"{what} {len(atoms)} values, not {len(others)}")
    for atom, other in zip(atoms, others, strict=True):
        if not jaxcompat.fits(atom.aval, other.aval):
            raise ValueError(f"{what} {type_of(atom.aval)}, not {type_of(other.aval)}")


_CALLS = (*Call.primitives, *CustomJVP.primitives, *CustomVJP.primitives)
_BODY_CHECKS: dict[str, Callable[[Any], None]] = {
    **dict.fromkeys(_CALLS, _check_call),
    **dict.fromkeys(While.primitives, _check_while),
}


# --- the rules of custom derivatives --------------------------------------------------------------

#: What raises ValueError if the rules in the parameters do not fit the equation, by primitive.
#: The parameters are those that the file gives.
RULE_CHECKS: dict[str, Callable[[JaxprEqn, Mapping[str, Any]], None]] = {}


def _check_jvp(eqn: JaxprEqn, given: Mapping[str, Any]) -> None:
    if "raises" in given:
        if not isinstance(given["jvp"], str) or not isinstance(given["raises"], str):
            raise ValueError("a rule that raises has two texts: its name, and what it raises")
        return
    primals, results = _primals(eqn, given), _types(eqn.outvars)
    _same_number("perturbed", given.get("perturbed", (True,) * len(primals)), primals)
    zeros = given.get("out_zeros", (False,) * len(results))
    _same_number("out_zeros", zeros, results)
    tangents = [aval.to_tangent_aval() for aval in primals]
    out_tangents = [aval.to_tangent_aval() for aval in _kept(results, zeros)]
    jaxpr = given["jvp"].jaxpr()
    _same("jvp takes", _types(jaxpr.invars), [*primals, *tangents])
    _same("jvp gives", _types(jaxpr.outvars), [*results, *out_tangents])


def _check_vjp(eqn: JaxprEqn, given: Mapping[str, Any]) -> None:
    primals, results = _primals(eqn, given), _types(eqn.outvars)
    fwd, bwd = given["fwd"].jaxpr(), given["bwd"].jaxpr()
    count = len(bwd.invars) - len(results)
    forwarded = given.get("forwarded", (None,) * max(count, 0))
    zeros = given.get("in_zeros", (False,) * len(primals))
    _same_number("in_zeros", zeros, primals)
    _same_number("perturbed", given.get("perturbed", (True,) * len(primals)), primals)
    if len(forwarded) != count:
        raise ValueError(f"bwd takes {len(bwd.invars)} operands: not residuals and cotangents")
    new = iter(_types(fwd.outvars)[: len(fwd.outvars) - len(results)])
    residuals = [next(new, None) if i is None else primals[i] for i in forwarded]
    if None in residuals or any(True for _ in new):
        raise ValueError("fwd gives another number of residuals than bwd takes")
    _same("fwd takes", _types(fwd.invars), primals)
    _same("fwd gives", _types(fwd.outvars)[len(fwd.outvars) - len(results) :], results)
    cotangents = [aval.to_ct_aval() for aval in results]
    _same("bwd takes", _types(bwd.invars), [*residuals, *cotangents])
    wanted = [aval.to_ct_aval() for aval in _kept(primals, zeros)]
    _same("bwd gives", _types(bwd.outvars), wanted)


RULE_CHECKS["custom_jvp_call"] = _check_jvp
RULE_CHECKS["custom_vjp_call"] = _check_vjp


def _types(atoms: Sequence[Any]) -> list[Any]:
    return [atom.aval for atom in atoms]


def _primals(eqn: JaxprEqn, given: Mapping[str, Any]) -> list[Any]:
    return _types(eqn.invars[given.get("num_consts", 0) :])


def _kept(avals: Sequence[Any], zeros: Sequence[bool]) -> list[Any]:
    return [aval for aval, zero in zip(avals, zeros, strict=True) if not zero]


def _same_number(what: str, mask: Any, avals: Sequence[Any]) -> None:
    if not isinstance(mask, tuple) or len(mask) != len(avals):
        raise ValueError(f"{what} has not one entry for each of {len(avals)} values")


def _same(what: str, found: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Compare by shape and dtype: all else may differ between a value and its derivative."""
    if len(found) != len(wanted):
        raise ValueError(f"{what} {len(found)} values where {len(wanted)} are needed")
    for aval, other in zip(found, wanted, strict=True):
        if any(getattr(aval, k, None) != getattr(other, k, None) for k in ("shape", "dtype")):
            raise ValueError(f"{what} {type_of(aval)} where {type_of(other)} is needed")
