"""Rewriting a program equation by equation, at every depth: what most passes stand on.

A *rule* gets one equation and answers with the equations to put in its place, or with None to keep
it. `map_equations` tries it on every equation of a jaxpr and of the jaxprs inside it. A body that
several equations share is rewritten once and stays shared, and a body in which nothing changes
stays the very same object, so that a pass which finds little to do costs little and leaves JAX's
caches, which go by identity, warm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.ir.structured import High, map_sub_jaxprs, view
from jaxprtool.jaxcompat import JaxprEqn

#: The equations to put in an equation's place, or None to keep it. Together they must define the
#: equation's own `outvars`, with the types they have, and may define fresh variables besides.
Rule = Callable[[JaxprEqn], Sequence[JaxprEqn] | None]


def map_equations(jaxpr: Any, rule: Rule) -> Any:
    """`jaxpr` with `rule` applied to every equation, at every depth, from the inside out.

    The rule sees a loop, branch or call after its bodies have been rewritten. Arguments, results
    and constants stay as they are, of the jaxpr and of each body. Effects are computed anew. The
    Python closures of custom_jvp and custom_vjp rules are not jaxprs and are left alone.
    """
    rewritten: dict[Any, Any] = {}

    def rewrite(body: Any) -> Any:
        if body not in rewritten:
            rewritten[body] = rewrite_equations(body)
        return rewritten[body]

    def rewrite_equations(body: Any) -> Any:
        eqns: list[JaxprEqn] = []
        changed = False
        for eqn in body.eqns:
            inner = with_bodies(eqn, rewrite)
            outcome = rule(inner)
            eqns.extend([inner] if outcome is None else outcome)
            changed |= inner is not eqn or outcome is not None
        return jaxcompat.with_equations(body, eqns) if changed else body

    return rewrite(jaxpr)


def with_bodies(eqn: JaxprEqn, function: Callable[[Any], Any]) -> JaxprEqn:
    """`eqn` with `function` applied to each jaxpr it holds; `eqn` itself if none changes.

    The function must keep what each body takes and gives. An equation that has a structured view
    gets its effects anew from its bodies; another keeps those it has.
    """
    params = map_sub_jaxprs(function, eqn)
    if all(value is eqn.params[name] for name, value in params.items()):
        return eqn
    eqn = eqn.replace(params=params)
    structured = view(eqn)
    return eqn if structured is None or isinstance(structured, High) else structured.rebuild()
