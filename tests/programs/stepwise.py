"""Evaluate a jaxpr one first-order equation at a time, at every depth.

JAX compiles the body of a loop or a branch as a whole, and XLA may then round differently when
the body holds other equations beside those that matter: it fuses, and contracts a product and a
sum into one rounding. Here loops and branches run in Python, so that each equation runs as a
kernel of its own and its result depends on its operands alone, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.ir.structured import Call, Cond, CustomJVP, Scan, While, view


def evaluate(closed: Any, args: Sequence[Any]) -> list[Any]:
    """The results of a closed jaxpr. Custom derivative rules are not looked at."""
    env = dict(zip(closed.constvars, closed.consts, strict=True))
    env.update(zip(closed.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jaxcompat.Literal) else env[atom]

    for eqn in closed.eqns:
        with eqn.ctx.manager:
            results = _equation(eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in closed.outvars]


def _equation(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    structured = view(eqn)
    match structured:
        case Scan():
            return _scan(structured, operands)
        case While():
            return _while(structured, operands)
        case Cond():
            index = min(max(int(operands[0]), 0), len(structured.branches) - 1)
            return evaluate(structured.branches[index], operands[1:])
        case Call() | CustomJVP():
            return evaluate(structured.body, operands)
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]


def _scan(scan: Scan, operands: list[Any]) -> list[Any]:
    n, k = len(scan.consts), len(scan.carry)
    consts, carry, xs = operands[:n], operands[n : n + k], operands[n + k :]
    rounds = range(scan.length)
    slices = []
    for i in reversed(rounds) if scan.reverse else rounds:
        outs = evaluate(scan.body, [*consts, *carry, *(x[i] for x in xs)])
        carry = outs[:k]
        slices.append(outs[k:])
    if scan.reverse:
        slices.reverse()
    ys = [jnp.stack(rows) for rows in zip(*slices, strict=True)]
    return [*carry, *(ys if slices else map(_empty, scan.ys))]


def _empty(var: Any) -> Any:
    """The stack of no rows at all."""
    if jnp.issubdtype(var.aval.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), var.aval.shape)
    return jnp.zeros(var.aval.shape, var.aval.dtype)


def _while(loop: While, operands: list[Any]) -> list[Any]:
    c, b = len(loop.cond_consts), len(loop.body_consts)
    cond_consts, body_consts, carry = operands[:c], operands[c : c + b], operands[c + b :]
    while evaluate(loop.cond, [*cond_consts, *carry])[0]:
        carry = evaluate(loop.body, [*body_consts, *carry])
    return carry
