"""Conversion of a `while` with a known number of iterations to a `scan`.

The number is found by running it: only the part of it that its condition depends on, on initial
values that are constants. `lax.fori_loop` creates such loops if its bounds are arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.core.equations import free_variables, named, needed_equations
from jaxprtool.ir.core.structured import Scan, While
from jaxprtool.ir.rewriting.rewrite import narrow
from jaxprtool.jaxcompat import Atom, JaxprEqn
from jaxprtool.passes.cleanup.dce import dce_regions
from jaxprtool.passes.unzip.binding_times import Context

#: The number of iterations after which a loop is considered too long.
LIMIT = 1_000_000


def as_scan(eqn: JaxprEqn, context: Context) -> JaxprEqn:
    """Return the `scan` that is equivalent to this `while`.

    Raises UnsupportedError with the reason if the number of iterations is not known.
    """
    loop = While.of(eqn)
    if context.sows(loop.cond):
        raise _refused(eqn, "a variable is sown in its condition")
    length = _length(eqn, context)
    count_to_one = partial(jax.lax.scan, lambda count, _: (count + 1, None), 0, length=1)
    jaxpr = jaxcompat.traced_like(eqn, lambda: [count_to_one()[0]], ())
    scan = Scan.of(next(each for each in jaxpr.eqns if each.primitive.name == "scan"))
    new = scan.rebuild(
        consts=loop.body_consts,
        carry=loop.carry,
        xs=(),
        carry_outs=loop.outs,
        ys=(),
        body=loop.body,
        length=length,
    )
    return new.replace(source_info=eqn.source_info)


def _length(eqn: JaxprEqn, context: Context) -> int:
    """Return how often the body runs."""
    loop = _counter(eqn)
    if any(map(context.sows, (loop.cond, loop.body))):
        raise _refused(eqn, "its condition depends on a variable")
    values = _constants(loop.eqn.invars, context)
    if values is None:
        raise _refused(eqn, "its condition depends on values that are not constant")
    c, b = len(loop.cond_consts), len(loop.cond_consts) + len(loop.body_consts)
    cond, body = map(jaxcompat.jaxpr_as_fun, (loop.cond, loop.body))

    def going(state: tuple[jax.Array, ...]) -> jax.Array:
        count, *carry = state
        return cond(*values[:c], *carry)[0] & (count < LIMIT)

    def step(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        count, *carry = state
        return count + 1, *body(*values[c:b], *carry)

    with jax.ensure_compile_time_eval():
        count = int(jax.lax.while_loop(going, step, (0, *values[b:]))[0])
    if count == LIMIT:
        raise _refused(eqn, f"it runs {LIMIT:,} or more iterations")
    return count


def _counter(eqn: JaxprEqn) -> While:
    """Return the part of a loop that its condition depends on."""
    loop = While.of(eqn)
    # dce keeps equations with effects; here they have to be read as well.
    bare = [each.replace(effects=set()) for each in loop.body.eqns]
    bare_loop = loop.rebuild(body=jaxcompat.replace_jaxpr(loop.body, eqns=bare))
    _, counter = dce_regions([False] * len(loop.outs), [True] * len(eqn.invars), bare_loop)
    part = While.of(counter)
    read = {v for each in part.body.eqns for v in each.outvars}
    if loop.cond.effects or any(
        each.effects and not read.isdisjoint(each.outvars) for each in loop.body.eqns
    ):
        raise _refused(eqn, "its condition depends on an effect")
    return part


def _constants(atoms: Sequence[Atom], context: Context) -> list[jax.Array] | None:
    """Return the values of operands in the body being split; None if not all are constant."""
    body = context.bodies[-1]
    held = zip(body.constvars, body.consts, strict=True)
    constants = {v for v, value in held if not isinstance(value, jax.core.Tracer)}
    eqns = needed_equations(body.eqns, atoms)
    if not constants.issuperset(free_variables(eqns, atoms)):
        return None
    if any(eqn.effects or context.is_sow(eqn) or context.sows.inside(eqn) for eqn in eqns):
        return None
    with jax.ensure_compile_time_eval():
        return jaxcompat.jaxpr_as_fun(narrow(body, (), atoms, eqns))()


def _refused(eqn: JaxprEqn, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"variables are sown inside {named(eqn)}, whose number of iterations is unknown: {why}",
        "sow them before the loop, or use a fixed number of iterations (lax.scan)",
    )
