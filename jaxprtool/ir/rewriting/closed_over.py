"""Rules of custom derivatives that close over values of the function that calls them.

    def f(x, s):
        @jax.custom_jvp
        def noisy(x): ...
        noisy.defjvp(lambda primals, tangents: ... s ...)

`jax.grad` runs the rule while `f` is traced. A program is differentiated later, so the calls in it
take such values as operands, where they are values of the jaxpr that holds the call.
"""

from __future__ import annotations

from functools import partial

from jax.extend.core import JaxprEqn

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.basics.caches import anchor
from jaxprtool.ir.core.structured import holds_jaxpr, sub_jaxprs
from jaxprtool.ir.rewriting.rewrite import Memo, with_bodies
from jaxprtool.ir.source.frames import place_text
from jaxprtool.jaxcompat import AnyJaxpr, Var


def with_closed_over(jaxpr: AnyJaxpr) -> AnyJaxpr:
    """Return a traced jaxpr whose custom calls take the values that their rules close over."""
    return _taking(jaxpr, Memo())


def _taking(jaxpr: AnyJaxpr, memo: Memo) -> AnyJaxpr:
    body = jaxcompat.open_jaxpr(jaxpr)
    in_scope: set[Var] = {*body.constvars, *body.invars}
    eqns: list[JaxprEqn] = []
    for eqn in body.eqns:
        new = eqn
        if eqn.params and holds_jaxpr(eqn.params.values()):
            new = with_bodies(eqn, lambda body: memo(partial(_taking, body, memo), body))
        eqns += jaxcompat.with_closed_over(new, in_scope)
        in_scope.update(eqn.outvars)
    same = len(eqns) == len(body.eqns) and all(a is b for a, b in zip(eqns, body.eqns, strict=True))
    return jaxpr if same else jaxcompat.replace_jaxpr(jaxpr, eqns=eqns)


def holds_ended_tracer(jaxpr: AnyJaxpr) -> bool:
    """Return True if a rule in a jaxpr, at any depth, holds a tracer of a trace that has ended."""
    todo, seen = [jaxpr], {anchor(jaxpr)}
    for each in todo:
        if any(map(jaxcompat.has_ended, getattr(each, "consts", ()))):
            return True
        for eqn in jaxcompat.open_jaxpr(each).eqns:
            new = [body for _, body in sub_jaxprs(eqn) if anchor(body) not in seen]
            seen.update(map(anchor, new))
            todo += new
    return False


def refused(jaxpr: AnyJaxpr, what: str) -> UnsupportedError:
    """Return the error for a jaxpr with a rule that holds a value of a trace that has ended."""
    rule = _rule_with_ended_tracer(jaxpr, None) or "a custom derivative rule"
    return UnsupportedError(
        f"{what}: {rule} closes over a value of an enclosing trace",
        "pass the value to the function as an argument",
    )


def _rule_with_ended_tracer(jaxpr: AnyJaxpr, place: str | None) -> str | None:
    """Return the name of the first rule that holds such a value, and the source line of its call.

    Args:
        jaxpr: The jaxpr to search, at every depth.
        place: The source line of the equation that holds the jaxpr, for calls without one.
    """
    for eqn in jaxcompat.open_jaxpr(jaxpr).eqns:
        at = place_text(eqn) or place
        if jaxcompat.holds_ended(eqn):
            call = eqn.primitive.name + (f" at {at}" if at else "")
            return f"the rule of '{jaxcompat.custom_name(eqn)}', the {call},"
        for _, body in sub_jaxprs(eqn):
            if (found := _rule_with_ended_tracer(body, at)) is not None:
                return found
    return None
