"""The jaxpr of the equations that lead from finite values to one equation.

The values come from one run. Calls and loops are flattened: each value is the result of the
equation that computed it, in whichever body and iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.execute.nans.states import FINITE
from jaxprtool.execute.nans.tracked import Evaluation, Tracked
from jaxprtool.jaxcompat import Atom, ClosedJaxpr, DropVar, JaxprEqn, Literal, Var

#: The maximum number of equations of a cone.
_MOST = 64


def cone_of(step: Evaluation, operands: Sequence[Tracked]) -> tuple[ClosedJaxpr, list[Any]]:
    """Return the equation of a step, and those that produced its non-finite operands.

    Args:
        step: The step.
        operands: The operands of its equation.

    Returns:
        The jaxpr, with the results of the equation, and the values of its arguments.
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
        equations: The equations, with new variables.
        arguments: The variables that they read but do not compute, with their values.
    """

    def __init__(self) -> None:
        self.equations: list[JaxprEqn] = []
        self.arguments: dict[Var, Any] = {}
        self._atoms: dict[int, Atom] = {}
        self._begun = 0

    def add(self, step: Evaluation, operands: Sequence[Tracked]) -> Sequence[Var]:
        """Add the equation of a step after those that computed its operands."""
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
            step = value.step
            if step is not None and self._begun < _MOST and _is_made_by(value, step):
                (self._atoms[id(value)],) = self.add(step, step.operands)
            else:
                self._atoms[id(value)] = new = Var(var.aval)
                self.arguments[new] = value.data
        return self._atoms[id(value)]


def _is_made_by(value: Tracked, step: Evaluation) -> bool:
    """Return True if a non-finite value is the only result of a step, not just a row of it."""
    outs = step.eqn.outvars
    is_whole = len(outs) == 1 and getattr(outs[0].aval, "shape", None) == np.shape(value.data)
    return value.state != FINITE and is_whole and len(step.operands) == len(step.eqn.invars)
