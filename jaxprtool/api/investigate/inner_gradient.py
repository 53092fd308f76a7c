"""Split a training step, which has its gradient inside, into a forward and a backward part.

JAX marks the equations of a backward pass in their name stacks: `transpose(jvp(…))`. The values
that they read from other equations are the residuals.
"""

from __future__ import annotations

from jaxprtool import jaxcompat
from jaxprtool.ir.core.equations import free_variables
from jaxprtool.ir.programs.program import Program, Programs
from jaxprtool.ir.programs.trees import structure
from jaxprtool.ir.source.scopes import is_backward
from jaxprtool.passes.cleanup.inline import Inline


def halves_inside(program: Program) -> Programs | None:
    """Return the forward and the backward part of a gradient in a program; None without one.

    The forward part is the whole program, with the residuals as its only results. The backward part
    takes the residuals, like that of the pass `vjp`.
    """
    inlined = Inline()(program)
    jaxpr = inlined.jaxpr
    eqns = [eqn for eqn in jaxpr.eqns if is_backward(eqn)]
    if not eqns:
        return None
    constants = set(jaxcompat.open_jaxpr(jaxpr).constvars)
    held = [v for v in free_variables(eqns) if v not in constants]
    named = {f"{position:06}": 0 for position in range(len(held))}
    outs = [v for eqn in eqns for v in eqn.outvars]
    debug = jaxcompat.open_jaxpr(jaxpr).debug_info
    consts = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    backward = jaxcompat.new_jaxpr(list(consts), list(consts.values()), held, outs, eqns, debug)
    forward = inlined.replace(
        jaxpr=jaxcompat.replace_jaxpr(jaxpr, outvars=held),
        out_tree=structure(((), named)),
        out_names=tuple(named),
    )
    late = inlined.replace(
        jaxpr=backward,
        in_tree=structure(((named,), {})),
        arg_names=tuple(named),
        out_tree=structure([0] * len(outs)),
        out_names=tuple(f"result[{i}]" for i in range(len(outs))),
    )
    return Programs({"forward": forward, "backward": late})
