"""Checks of an equation's jaxprs in a `.jaxpr` file that JAX's type checker leaves out.

JAX's type checker compares the operands of a scan or a branch with its body, but not those of other
calls and loops, and does not check the rules of custom derivatives. Without these checks, an
invalid program would fail only when it is run or differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxprtool import jaxcompat
from jaxprtool.ir.core.equations import type_of
from jaxprtool.ir.core.structured import Call, CustomJVP, CustomVJP, While, view
from jaxprtool.ir.rewriting.custom_rules import jvp_rule, vjp_rule
from jaxprtool.jaxcompat import Atom, Aval, JaxprEqn

_CHECKED = {c for v in (Call, CustomJVP, CustomVJP, While) for c in v.primitives}


def check_bodies(eqn: JaxprEqn) -> None:
    """Raise ValueError if the bodies of a call or a loop do not accept its operands."""
    match view(eqn) if eqn.primitive.name in _CHECKED else None:
        case Call() | CustomJVP() | CustomVJP() as call:
            _fit("the body takes", _types(call.body.invars), _types(call.operands))
        case While() as loop:
            carry = _types(loop.carry)
            _fit("cond_jaxpr takes", _types(loop.cond.invars), _types(loop.cond_consts) + carry)
            _fit("body_jaxpr takes", _types(loop.body.invars), _types(loop.body_consts) + carry)
            _fit("body_jaxpr returns", _types(loop.body.outvars), carry)
            # The predicate is a bool, or under vmap one bool per batch element.
            gives = [type_of(aval) for aval in _types(loop.cond.outvars)]
            if len(gives) != 1 or not gives[0].startswith("bool["):
                raise ValueError(f"cond_jaxpr returns {' '.join(gives) or 'nothing'}, not a bool")


# --- the rules of custom derivatives --------------------------------------------------------------


def _check_jvp(eqn: JaxprEqn) -> None:
    rule = jvp_rule(eqn)
    if rule.raises is not None:
        return
    primals, results = _primals(eqn), _types(eqn.outvars)
    tangents = [aval.to_tangent_aval() for aval in primals]
    out_tangents = [aval.to_tangent_aval() for aval in _nonzero(results, rule.out_zeros)]
    _fit("jvp takes", _types(rule.jaxpr.invars), [*primals, *tangents], _alike)
    _fit("jvp returns", _types(rule.jaxpr.outvars), [*results, *out_tangents], _alike)


def _check_vjp(eqn: JaxprEqn) -> None:
    rule = vjp_rule(eqn)
    primals, results = _primals(eqn), _types(eqn.outvars)
    fwd, bwd, gives = rule.fwd, rule.bwd, _types(rule.fwd.outvars)
    if len(rule.forwarded) != len(bwd.invars) - len(results):
        raise ValueError(
            f"bwd takes {len(bwd.invars)} operands, which are not residuals and cotangents"
        )
    new = iter(gives[: len(gives) - len(results)])
    residuals = [next(new, None) if i is None else primals[i] for i in rule.forwarded]
    if None in residuals or any(True for _ in new):
        raise ValueError("the numbers of residuals of fwd and bwd differ")
    cotangents = [aval.to_ct_aval() for aval in results]
    wanted = [aval.to_ct_aval() for aval in _nonzero(primals, rule.in_zeros)]
    _fit("fwd takes", _types(fwd.invars), primals, _alike)
    _fit("fwd returns", gives[len(gives) - len(results) :], results, _alike)
    _fit("bwd takes", _types(bwd.invars), [*residuals, *cotangents], _alike)
    _fit("bwd returns", _types(bwd.outvars), wanted, _alike)


#: Functions that raise ValueError if the rules of a custom derivative do not fit the equation.
RULE_CHECKS: dict[str, Callable[[JaxprEqn], None]] = {
    "custom_jvp_call": _check_jvp,
    "custom_vjp_call": _check_vjp,
}


def _types(atoms: Sequence[Atom]) -> list[Aval]:
    return [atom.aval for atom in atoms]


def _primals(eqn: JaxprEqn) -> list[Aval]:
    return _types(eqn.invars[eqn.params["num_consts"] :])


def _nonzero(avals: Sequence[Aval], zeros: Sequence[bool]) -> list[Aval]:
    return [aval for aval, zero in zip(avals, zeros, strict=True) if not zero]


def _fit(
    what: str,
    found: Sequence[Aval],
    wanted: Sequence[Aval],
    fits: Callable[[Aval, Aval], bool] = jaxcompat.fits,
) -> None:
    if len(found) != len(wanted):
        raise ValueError(f"{what} {len(found)} values, not {len(wanted)}")
    for aval, other in zip(found, wanted, strict=True):
        if not fits(aval, other):
            raise ValueError(f"{what} {type_of(aval)}, not {type_of(other)}")


def _alike(aval: Aval, other: Aval) -> bool:
    """Return True if dtypes and shapes match; other parts may differ in a derivative."""
    return all(getattr(aval, k, None) == getattr(other, k, None) for k in ("shape", "dtype"))
