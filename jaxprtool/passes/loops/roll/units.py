"""Replace an iteration of a loop by one call of a unit, which XLA compiles separately.

XLA uses its fast convolutions for the CPU only at the top level of a module. A loop's body is not a
module, but a unit that it calls is: without the unit, an iteration with a convolution is twenty
times slower.
"""

from __future__ import annotations

from jaxprtool import jaxcompat
from jaxprtool.ir.core.equations import substitute
from jaxprtool.ir.core.structured import call
from jaxprtool.jaxcompat import ClosedJaxpr, DebugInfo, JaxprEqn, Literal, Var


def as_unit(body: ClosedJaxpr, name: str, like: JaxprEqn) -> ClosedJaxpr:
    """Return a body that calls a unit with the computation of a body.

    Values that the body only forwards, which the unit would copy at every call, bypass it.

    Args:
        body: The body.
        name: The name of the unit. Units that call one another have different names.
        like: An equation, whose context and source location the call gets.
    """
    old = jaxcompat.open_jaxpr(body)
    invars = [Var(v.aval) for v in old.invars]
    atoms = dict(zip(old.invars, invars, strict=True))
    made = dict.fromkeys(v for v in old.outvars if type(v) is not Literal and v not in atoms)
    atoms |= {v: Var(v.aval) for v in made}
    debug = DebugInfo("jit", name, ("",) * len(invars), None)
    unit = jaxcompat.replace_jaxpr(body, outvars=list(made), debug_info=debug)
    eqn = call(unit, invars, [atoms[v] for v in made], like)
    eqn = eqn.replace(ctx=jaxcompat.marked(like.ctx, "unit", name), effects=unit.effects)
    outvars = substitute(old.outvars, atoms)
    return jaxcompat.new_jaxpr((), (), invars, outvars, [eqn], debug)
