"""Parts of programs as patterns: a rewrite must find each part in its own program."""

from __future__ import annotations

import random
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.errors import PluginError
from jaxprtool.ir.program import Program
from jaxprtool.jaxcompat import JaxprEqn, Literal, Var
from jaxprtool.passes.cleanup.inline import Inline
from jaxprtool.passes.patterns import Rewrite, rewrite
from jaxprtool.primitives import sow_p

MOST_EQUATIONS = 6


def rewrite_of_a_part(program: Program, rng: random.Random) -> Rewrite | None:
    """Return a rewrite of some connected equations by themselves. None if there are none."""
    eqns = list(Inline()(program).jaxpr.eqns)
    made = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    roots = [i for i, eqn in enumerate(eqns) if is_pure(eqn) and is_used(eqns, program, i)]
    if not roots:
        return None
    part = {rng.choice(roots)}
    for _ in range(rng.randrange(MOST_EQUATIONS)):
        inputs = {v for i in part for v in eqns[i].invars if type(v) is not Literal and v in made}
        more = sorted({made[v] for v in inputs} - part)
        more = [i for i in more if is_pure(eqns[i])]
        if more:
            part.add(rng.choice(more))
    if not is_convex(eqns, made, part) or is_used_before_its_end(eqns, part):
        return None
    return rewrite_of([eqns[i] for i in sorted(part)], eqns, part, program)


def is_pure(eqn: JaxprEqn) -> bool:
    """Return True if an equation may be in a part.

    A custom call that closes over values changes when JAX evaluates it: they become arguments.
    """
    closes_over = eqn.primitive.name.startswith("custom_") and eqn.params.get("num_consts")
    if eqn.effects or eqn.primitive is sow_p or closes_over:
        return False
    return all(hasattr(v.aval, "shape") for v in eqn.outvars)


def is_used(eqns: list[JaxprEqn], program: Program, i: int) -> bool:
    return i not in dead_places(eqns, Inline()(program).jaxpr.outvars)


def dead_places(eqns: list[JaxprEqn], outvars: list[Any]) -> set[int]:
    live = {v for v in outvars if type(v) is not Literal}
    dead = set()
    for i in reversed(range(len(eqns))):
        if eqns[i].effects or live & set(eqns[i].outvars):
            live |= {v for v in eqns[i].invars if type(v) is not Literal}
        else:
            dead.add(i)
    return dead


def is_convex(eqns: list[JaxprEqn], made: dict[Any, int], part: set[int]) -> bool:
    """Return True if no argument of the part depends on a result of it."""
    after: set[Any] = set()
    for i, eqn in enumerate(eqns):
        depends = any(v in after for v in eqn.invars if type(v) is not Literal)
        if i in part or depends:
            after.update(eqn.outvars)
    inputs = {v for i in part for v in eqns[i].invars if type(v) is not Literal}
    return not any(v in after and made[v] not in part for v in inputs)


def is_used_before_its_end(eqns: list[JaxprEqn], part: set[int]) -> bool:
    """Return True if another equation reads a result before the last equation of the part."""
    results = {v for i in part for v in eqns[i].outvars}
    between = [eqns[i] for i in range(max(part)) if i not in part]
    return any(v in results for eqn in between for v in eqn.invars if type(v) is not Literal)


def rewrite_of(
    taken: list[JaxprEqn], eqns: list[JaxprEqn], part: set[int], program: Program
) -> Rewrite | None:
    defined = {v for eqn in taken for v in eqn.outvars}
    used = {v for eqn in taken for v in eqn.invars if type(v) is not Literal}
    inputs = [v for v in used if v not in defined]
    if not inputs or any(isinstance(v.aval, jaxcompat.AbstractRef) for v in inputs):
        return None
    elsewhere = {v for i, eqn in enumerate(eqns) if i not in part for v in eqn.invars if is_var(v)}
    elsewhere |= {v for v in Inline()(program).jaxpr.outvars if is_var(v)}
    outs = [v for eqn in taken for v in eqn.outvars if v in elsewhere]
    debug = jaxcompat.DebugInfo("part", "part", None, None)
    closed = jaxcompat.new_jaxpr([], [], inputs, outs, taken, debug)
    function = jaxcompat.jaxpr_as_fun(closed)

    def pattern(*args: Any) -> list[Any]:
        return function(*args)

    try:
        return rewrite(pattern, pattern, *(v.aval for v in inputs), name="part")
    except PluginError as error:
        assert "depends on" in str(error) or "computes nothing" in str(error), error
        return None


def is_var(atom: Any) -> bool:
    return isinstance(atom, Var)
