"""The names of residuals: the places in the user's source where they are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxprtool.ir.basics.paths import unique
from jaxprtool.ir.dataflow.defining_equations import DefiningEquations
from jaxprtool.ir.source.frames import own_frame, short_paths
from jaxprtool.jaxcompat import ClosedJaxpr, JaxprEqn, Var


def residual_names(
    values: Sequence[Var], jaxpr: ClosedJaxpr, arg_names: Sequence[str]
) -> dict[Var, str]:
    """Return a unique name for each variable of a closed jaxpr that is not a constant.

    An argument has its own name; a value named with `checkpoint_name` has that one; others have the
    file, line and primitive that computed them, `model.py:12 tanh`, with as many folders as are
    needed to distinguish files.
    """
    known = dict(zip(jaxpr.invars, arg_names, strict=True))
    computed = DefiningEquations(jaxpr)
    origins = [_origin(value, computed, known) for value in values]
    places = short_paths([each.place for each in origins])
    names = [f"{place} {each.name}".strip() for place, each in zip(places, origins, strict=True)]
    return dict(zip(values, unique(names), strict=True))


class _Origin(NamedTuple):
    """The name of a value, and its source location with the full path; "" if not used."""

    name: str
    place: str = ""


def _origin(value: Var, computed: DefiningEquations, known: Mapping[Var, str]) -> _Origin:
    places = [""]
    while value not in known:
        eqn, around, operand = computed.of(value)
        places += [place for each in (*around, eqn) if (place := _place(each))]
        if not isinstance(operand, Var):
            if eqn.primitive.name == "name":
                return _Origin(str(eqn.params["name"]))
            return _Origin(str(eqn.primitive.name), places[-1])
        value = operand
    return _Origin(known[value])


def _place(eqn: JaxprEqn) -> str:
    frame = own_frame(eqn)
    return f"{frame.file}:{frame.line}" if frame else ""
