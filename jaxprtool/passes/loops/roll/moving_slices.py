"""Slices of an array that is updated in a loop, as `x = x.at[i].set(f(x[i - 1]))`.

JAX traces `x[3]` to a `slice`, whose position is a parameter, so that the iterations of an unrolled
loop differ. As a `dynamic_slice` its position is an operand, which can be stacked like any other.
A slice that does not become a part of a loop, or whose position is the same in all iterations, is
written as a `slice` again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.core.equations import equations
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.rewriting.rewrite import RewriteRule, Writer, rewrite
from jaxprtool.jaxcompat import AnyJaxpr, Atom, JaxprEqn, Literal


class MovingSlices:
    """The slices of a program that are temporarily dynamic."""

    def __init__(self) -> None:
        #: The literals that are positions of these slices, by their ids.
        self._positions: dict[int, Literal] = {}

    def made_dynamic(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        """Return a jaxpr whose slices of updated arrays are dynamic."""
        updated = {
            eqn.invars[0]
            for eqn in equations(jaxcompat.open_jaxpr(jaxpr))
            if traits(eqn).updates and type(eqn.invars[0]) is not Literal
        }

        def visitor(writer: Writer) -> RewriteRule:
            def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
                if eqn.primitive.name != "slice" or not _is_block(eqn):
                    return None
                (x,), shape = eqn.invars, eqn.outvars[0].aval.shape
                if type(x) is Literal or x not in updated:
                    return None
                starts = [np.int32(start) for start in eqn.params["start_indices"]]
                outs = writer.trace(lambda x: [lax.dynamic_slice(x, starts, shape)], [x], eqn)
                self._positions.update((id(v), v) for v in writer.eqns[-1].invars[1:])
                return outs

            return rule

        return rewrite(jaxpr, visitor) if updated else jaxpr

    def made_static(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        """Return a jaxpr in which these slices are static again if their positions are known."""

        def visitor(writer: Writer) -> RewriteRule:
            def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
                starts = eqn.invars[1:]
                if eqn.primitive.name != "dynamic_slice" or not all(map(self._is_own, starts)):
                    return None
                first = [int(v.val) for v in starts]
                last = [i + n for i, n in zip(first, eqn.params["slice_sizes"], strict=True)]
                return writer.trace(lambda x: [lax.slice(x, first, last)], eqn.invars[:1], eqn)

            return rule

        return rewrite(jaxpr, visitor) if self._positions else jaxpr

    def _is_own(self, atom: Atom) -> bool:
        return id(atom) in self._positions


def _is_block(eqn: JaxprEqn) -> bool:
    """Return True if a slice has known positions, of 32 bits, and no strides."""
    numbers = (*eqn.params["start_indices"], *eqn.outvars[0].aval.shape)
    strides = eqn.params["strides"] or ()
    return all(type(n) is int and n < 1 << 31 for n in numbers) and all(n == 1 for n in strides)
