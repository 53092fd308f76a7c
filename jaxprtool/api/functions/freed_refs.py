"""Refs that `jax.freeze` or `jax.free_ref` has ended, and that cannot be read any more."""

from __future__ import annotations

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.core.equations import named
from jaxprtool.ir.core.traits import traits
from jaxprtool.jaxcompat import ClosedJaxpr, Var


class FreedRefError(UnsupportedError, ValueError):
    """A ref is read, or freed again, after it was freed."""


def check_freed_refs(closed: ClosedJaxpr) -> None:
    """Check that no equation reads, writes or frees a ref that an earlier equation has freed.

    JAX checks this when it lowers a program, after dead code elimination. By then a pass may have
    replaced the read by the ref's value, and the error would go unnoticed.

    Raises:
        FreedRefError: If there is such an equation; the message names the first.
    """
    if not any(traits(eqn).ends_ref for eqn in closed.eqns):
        return
    left, *_ = jaxcompat.jax_dce_jaxpr(jaxcompat.open_jaxpr(closed), [True] * len(closed.outvars))
    freed: set[Var] = set()
    for eqn in left.eqns:
        ended = set(eqn.invars[:1]) if traits(eqn).ends_ref else set()
        used = ended | {jaxcompat.ref_of(effect) for effect in eqn.effects}
        if not used.isdisjoint(freed):
            raise FreedRefError(f"the {named(eqn)} uses a ref that has been freed")
        freed |= ended
