"""The names of residuals: the source locations where they are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxprtool.ir.basics.paths import unique
from jaxprtool.ir.dataflow.defining_equations import DefiningEquations
from jaxprtool.ir.source import source_text
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
    locations = short_paths([each.location for each in origins])
    names = [
        f"{location} {each.name}".strip() for location, each in zip(locations, origins, strict=True)
    ]
    return dict(zip(values, unique(names), strict=True))


class _Origin(NamedTuple):
    """The name of a value, and its source location with the full path; "" if not used."""

    name: str
    location: str = ""


def _origin(value: Var, computed: DefiningEquations, known: Mapping[Var, str]) -> _Origin:
    locations = [""]
    while value not in known:
        eqn, around, operand = computed.of(value)
        locations += [location for each in (*around, eqn) if (location := _location(each))]
        if not isinstance(operand, Var):
            if eqn.primitive.name == "name":
                return _Origin(str(eqn.params["name"]))
            return _Origin(str(eqn.primitive.name), locations[-1])
        value = operand
    return _Origin(known[value])


def _location(eqn: JaxprEqn) -> str:
    frame = own_frame(eqn)
    return f"{source_text.path(frame.file)}:{frame.line}" if frame else ""
