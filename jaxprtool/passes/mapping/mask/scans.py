"""Masking of scans of masked length: the iterations of the padding change nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.rules import rule
from jaxprtool.ir.core.equations import Contains
from jaxprtool.ir.core.regions import regions
from jaxprtool.ir.core.structured import Scan, While
from jaxprtool.ir.core.weak_types import as_weak_as
from jaxprtool.jaxcompat import ClosedJaxpr, JaxprEqn
from jaxprtool.passes.cleanup.cse import cse_body
from jaxprtool.passes.mapping.domains import Rewritten, by_edges, solve, write
from jaxprtool.passes.mapping.mask.body import (
    ITERATION,
    BodyContext,
    MaskBodyBuilder,
    structured_mask_rules,
)
from jaxprtool.passes.mapping.mask.guards import guarded, select_if
from jaxprtool.passes.mapping.mask.table import refusal
from jaxprtool.passes.mapping.mask.values import Facts, is_float

#: Return True if a jaxpr holds a while loop, at any depth.
has_while = Contains(lambda eqn: eqn.primitive.name in While.primitives)


@rule(structured_mask_rules, "scan")
def _scan(builder: MaskBodyBuilder, eqn: JaxprEqn) -> bool:
    domain, found = builder.domain, regions(eqn)
    assert found is not None
    scan = Scan.of(eqn)
    if not domain.bounds.is_masked(scan.length):
        return by_edges(builder, eqn)
    if any(isinstance(v.aval, jaxcompat.AbstractRef) for v in eqn.invars) or eqn.effects:
        raise refusal(eqn, "its iterations have effects, and their number is masked")
    guards = not has_while(scan.body)
    consts, carried = len(scan.consts), len(scan.carry)
    facts = [*map(builder.kind, eqn.invars)]
    varying = [replace(each, varies=each.varies or guards) for each in facts[consts:]]
    solution = solve(builder, found, [*facts[:consts], *varying], BodyContext(guards, in_scan=True))
    assert solution is not None
    (masked,) = solution.bodies
    names = (*(name for name in masked.extras if name != ITERATION), ITERATION)
    body = masked.taking(domain, names)
    iteration = _guarded_iteration if guards else _skipped_iteration
    step = iteration(body, len(names) - 1, len(names) + consts, carried)
    # Merge equal masks: JAX would store each of them in every iteration, for derivatives.
    body = cse_body(jaxcompat.trace_in_setting(step, [v.aval for v in body.invars], eqn))
    # Results differ between iterations of an outer scan only if the operands do.
    outer = any(each.varies for each in facts)
    solution = replace(
        solution,
        results=[replace(each, varies=outer) for each in solution.results],
        bodies=[Rewritten[Facts](body, names, masked.kinds)],
    )
    flags = {ITERATION: builder.valid(scan.length)}
    write(builder, solution, flags, length=domain.bounds.padded(scan.length))
    return True


def _guarded_iteration(
    body: ClosedJaxpr, flag_at: int, start: int, carried: int
) -> Callable[..., Any]:
    """Return one iteration of a scan, in which the carry is kept if the flag is False.

    An iteration in the padding may compute NaN, with a NaN derivative. The masked body keeps these
    out of the derivatives of loop-invariant values. This function keeps them out of the carry.

    Args:
        body: The masked body.
        flag_at: The position of the flag among its arguments.
        start: The position of the first carry.
        carried: The number of carries.
    """
    evaluate = jaxcompat.jaxpr_as_fun(body)

    def guard(flag: Any, x: Any) -> Any:
        return guarded(flag, x) if is_float(x) else x

    def step(*args: Any) -> list[Any]:
        flag, carry = args[flag_at], args[start : start + carried]
        safe = [guard(flag, x) for x in carry]
        outs = evaluate(*args[:start], *safe, *args[start + carried :])
        kept = [select_if(flag, new, old) for new, old in zip(outs, carry, strict=False)]
        return [*kept, *(guard(flag, y) for y in outs[carried:])]

    return step


def _skipped_iteration(
    body: ClosedJaxpr, flag_at: int, start: int, carried: int
) -> Callable[..., Any]:
    """Return one iteration of a scan, which is skipped if the flag is False.

    It is used for bodies with a while loop, which might not terminate in the padding. See
    `_guarded_iteration` for the arguments.
    """
    evaluate = jaxcompat.jaxpr_as_fun(body)

    def step(*args: Any) -> list[Any]:
        def skip(*args: Any) -> list[Any]:
            avals = (v.aval for v in body.outvars[carried:])
            zeros = (as_weak_as(jnp.zeros(aval.shape, aval.dtype), aval) for aval in avals)
            return [*args[start : start + carried], *zeros]

        return lax.cond(args[flag_at], lambda *each: evaluate(*each), skip, *args)

    return step
