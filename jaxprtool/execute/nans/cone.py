"""The equations that lead from finite values to one equation, as a jaxpr of their own.

Values are those of one run. Calls and loops between them are left out: a value is what the equation
gave that computed it, in whichever body and iteration that was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.execute.nans.states import FINITE
from jaxprtool.execute.nans.tracked import Evaluation, Tracked
from jaxprtool.jaxcompat import Atom, ClosedJaxpr, DropVar, JaxprEqn, Literal, Var

#: The most equations of a cone: an infinity may come from far away.
_MOST = 64


def cone_of(step: Evaluation, operands: Sequence[Tracked]) -> tuple[ClosedJaxpr, list[Any]]:
    """Return the equation of a step, and those that make what is not finite among its operands.

    Args:
        step: The step.
        operands: What its equation was given.

    Returns:
        The jaxpr, whose results are those of the equation, and the values of its arguments.
    """
    cone = _Cone()
    outs = cone.add(step, operands)
    jaxpr = jaxcompat.replace_jaxpr(
        jaxcompat.trace_in_setting(list, [], step.eqn),
        invars=list(cone.arguments),
        outvars=[v for v in outs if type(v) is not DropVar],
        eqns=cone.equations,
    )
    return jaxpr, list(cone.arguments.values())


class _Cone:
    """The equations that lead from finite values to one equation, in order.

    Attributes:
        equations: The equations, with variables of their own.
        arguments: The variables that they read and do not make, with their values.
    """

    def __init__(self) -> None:
        self.equations: list[JaxprEqn] = []
        self.arguments: dict[Var, Any] = {}
        self._atoms: dict[int, Atom] = {}
        self._begun = 0

    def add(self, step: Evaluation, operands: Sequence[Tracked]) -> Sequence[Var]:
        """Add the equation of a step, after those that its operands come from."""
        self._begun += 1
        eqn = step.eqn
        pairs = zip(eqn.invars, operands, strict=True)
        invars = [v if type(v) is Literal else self._atom(v, x) for v, x in pairs]
        outvars = [v if type(v) is DropVar else Var(v.aval) for v in eqn.outvars]
        source = eqn.source_info
        for call in reversed(step.around):
            source = jaxcompat.source_under(call)(source)
        self.equations.append(eqn.replace(invars=invars, outvars=outvars, source_info=source))
        return outvars

    def _atom(self, var: Atom, value: Tracked) -> Atom:
        if id(value) not in self._atoms:
            maker = value.step
            if maker is not None and self._begun < _MOST and _is_made_by(value, maker):
                (self._atoms[id(value)],) = self.add(maker, maker.operands)
            else:
                self._atoms[id(value)] = new = Var(var.aval)
                self.arguments[new] = value.data
        return self._atoms[id(value)]


def _is_made_by(value: Tracked, step: Evaluation) -> bool:
    """Return True if a value that is not finite is the one result of a step: a row of it is not."""
    outs = step.eqn.outvars
    is_whole = len(outs) == 1 and getattr(outs[0].aval, "shape", None) == np.shape(value.data)
    return value.state != FINITE and is_whole and len(step.operands) == len(step.eqn.invars)
