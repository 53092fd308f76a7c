"""Convert `while` loops with a predicate batched by `vmap` to loops with a scalar predicate.

Such a loop continues while the predicate holds for any batch element; the elements for which it
does not hold keep their carry. JAX lowers the loop in this way; code that runs it one iteration at
a time needs the same as a jaxpr.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.core.equations import substitute, with_operands
from jaxprtool.ir.core.structured import While, view
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.rewriting.rewrite import map_equations
from jaxprtool.jaxcompat import Atom, JaxprEqn


def with_scalar_predicates(program: Program) -> Program:
    """Return an equivalent program in which each `while` has a scalar predicate.

    Other equations keep their identity, unless they hold such a loop. Loops with effects are not
    changed.
    """
    jaxpr = map_equations(program.jaxpr, _with_scalar_predicate)
    return program if jaxpr is program.jaxpr else replace(program, jaxpr=jaxpr)


def _with_scalar_predicate(eqn: JaxprEqn) -> list[JaxprEqn] | None:
    loop = view(eqn)
    if not isinstance(loop, While) or eqn.effects or not loop.cond.outvars[0].aval.shape:
        return None
    cond, body = loop.cond, loop.body
    cond_consts, carry = _split(cond.invars, len(loop.cond_consts))
    body_consts, own_carry = _split(body.invars, len(loop.body_consts))
    # The body computes the predicate by the same equation objects as the condition, so that a
    # message about them is shown only once.
    names = dict(zip(own_carry, carry, strict=True))
    new = substitute(body.outvars, names)
    any_eqns, any_element = _traced(eqn, _any_element, cond.outvars)
    choosing, chosen = _traced(eqn, _chosen, [*cond.outvars, *carry, *new])
    rebuilt = loop.rebuild(
        cond=jaxcompat.replace_jaxpr(cond, outvars=any_element, eqns=[*cond.eqns, *any_eqns]),
        body=jaxcompat.replace_jaxpr(
            body,
            constvars=[*cond.constvars, *body.constvars],
            consts=[*cond.consts, *body.consts],
            invars=[*cond_consts, *body_consts, *carry],
            outvars=chosen,
            eqns=[*cond.eqns, *(with_operands(each, names) for each in body.eqns), *choosing],
        ),
        body_consts=(*loop.cond_consts, *loop.body_consts),
    )
    return [rebuilt]


def _any_element(predicate: Any) -> list[Any]:
    return [lax.reduce_or(predicate, range(predicate.ndim))]


def _chosen(predicate: Any, *values: Any) -> list[Any]:
    """Select the new carry where the predicate holds, and else the old one."""
    pairs = zip(*_split(values, len(values) // 2), strict=True)
    axes = range(predicate.ndim)
    return [
        lax.select(lax.broadcast_in_dim(predicate, new.shape, axes), new, old) for old, new in pairs
    ]


def _traced(
    like: JaxprEqn, function: Callable[..., Any], operands: Sequence[Atom]
) -> tuple[list[JaxprEqn], list[Atom]]:
    """Trace a function of operands, and return its equations and results."""
    closed = jaxcompat.traced_like(like, function, operands)
    names = dict(zip(closed.invars, operands, strict=True))
    eqns = [with_operands(eqn, names) for eqn in closed.eqns]
    return eqns, substitute(closed.outvars, names)


def _split(values: Sequence[Any], count: int) -> tuple[Sequence[Any], Sequence[Any]]:
    return values[:count], values[count:]
