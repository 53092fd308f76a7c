"""Marked calls after JAX's transformations, which mark all that they write within one like it."""

from __future__ import annotations

from jaxprtool import jaxcompat
from jaxprtool.ir.caches import anchor
from jaxprtool.ir.rewrite import with_bodies
from jaxprtool.ir.structured import holds_jaxpr
from jaxprtool.jaxcompat import AnyJaxpr, ClosedJaxpr, JaxprEqn


def with_own_marks(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Leave the marks of outlined calls to these alone.

    Returns:
        The jaxpr without the marks of equations that bear the name of the marked call around them;
        the same object if there are none. Bodies that were shared are.
    """
    written: dict[tuple[AnyJaxpr, type, str | None], AnyJaxpr] = {}

    def body(held: AnyJaxpr, around: str | None) -> AnyJaxpr:
        key = anchor(held), type(held), around
        if key not in written:
            old = jaxcompat.open_jaxpr(held).eqns
            new = [equation(eqn, around) for eqn in old]
            same = all(a is b for a, b in zip(new, old, strict=True))
            written[key] = held if same else jaxcompat.replace_jaxpr(held, eqns=new)
        return written[key]

    def equation(eqn: JaxprEqn, around: str | None) -> JaxprEqn:
        name = jaxcompat.marked_name(eqn)
        if name is not None and name == around:
            eqn = eqn.replace(ctx=jaxcompat.marked(eqn.ctx, "plain", name))
        if not holds_jaxpr(eqn.params.values()):
            return eqn
        return with_bodies(eqn, lambda held: body(held, name or around))

    return body(jaxpr, None)
