"""What residuals are called: by where in the user's source they are computed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from jaxprtool.ir.frames import own_frame
from jaxprtool.ir.makers import Makers
from jaxprtool.ir.paths import unique
from jaxprtool.jaxcompat import ClosedJaxpr, JaxprEqn, Var


def residual_names(
    values: Sequence[Var], jaxpr: ClosedJaxpr, arg_names: Sequence[str]
) -> dict[Var, str]:
    """A name for each variable of a closed jaxpr that is no constant, no two the same.

    An argument has its own; a value named with `checkpoint_name`, that one; others have the file,
    line and primitive that made them, `model.py:12 tanh`.
    """
    known = dict(zip(jaxpr.invars, arg_names, strict=True))
    computed = Makers(jaxpr)
    names = [_name(value, computed, known) for value in values]
    return dict(zip(values, unique(names), strict=True))


def _name(value: Var, computed: Makers, known: Mapping[Var, str]) -> str:
    places = [""]
    while value not in known:
        eqn, around, operand = computed.of(value)
        places += [place for each in (*around, eqn) if (place := _place(each))]
        if not isinstance(operand, Var):
            if eqn.primitive.name == "name":
                return str(eqn.params["name"])
            return f"{places[-1]} {eqn.primitive.name}".strip()
        value = operand
    return known[value]


def _place(eqn: JaxprEqn) -> str:
    frame = own_frame(eqn)
    return f"{os.path.basename(frame[0])}:{frame[1]}" if frame else ""
