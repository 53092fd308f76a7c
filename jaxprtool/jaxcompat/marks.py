"""Marks of calls that XLA must not inline: metadata of the equation.

XLA does not inline a marked call. A *unit* is also compiled separately, once for all calls of equal
bodies. JAX writes the marks on the call as attributes for XLA, and its transformations preserve
them. See `marked_calls` for the form that JAX gets, and `marked_lowering` for the lowering.
"""

from __future__ import annotations

from typing import Any, Literal

from jax.extend.core import JaxprEqn, jaxprs_in_params
from jax.extend.core.primitives import conv_general_dilated_p, jit_p

from jaxprtool.jaxcompat.aliases import AnyJaxpr
from jaxprtool.jaxcompat.values import with_metadata

#: The marks: none, a call that is not inlined, or a unit.
Mark = Literal["plain", "call", "unit"]

#: From the weakest to the strongest: each adds one key for XLA.
MARKS: tuple[Mark, ...] = ("plain", "call", "unit")
_KEYS = "inlineable", "compilation_unit"

#: The key for the name of a marked call's body, which identifies the call as ours.
_OUTLINED = "outlined"


class MarkedName(str):
    """The name of a jit that JAX gets as a marked call: it is copied wherever the call's name is.

    JAX's transformations pass it on unchanged, and only to calls derived from this one.
    """

    mark: Mark
    body: str

    def __new__(cls, name: str, mark: Mark, body: str) -> MarkedName:
        """Return the name of a call with this mark, whose body has the name `body`."""
        made = super().__new__(cls, name)
        made.mark, made.body = mark, body
        return made


def marked(context: Any, mark: Mark, name: str) -> Any:
    """Return the context of an equation with the mark of a call, whose body has the name `name`.

    Bodies that call one another have different names; XLA distinguishes bodies by their contents.
    """
    others = dict.fromkeys([*_KEYS, _OUTLINED])
    return with_metadata(context, {**others, **metadata_of(mark, name)})


def metadata_of(mark: Mark, name: str) -> dict[str, str]:
    """Return the metadata of a call with this mark, whose body has this name."""
    return {} if mark == "plain" else {**metadata_for_xla(mark, name), _OUTLINED: name}


def metadata_for_xla(mark: Mark, name: str) -> dict[str, str]:
    """Return the part of the metadata that is for XLA."""
    return dict(list(zip(_KEYS, ("false", name), strict=True))[: MARKS.index(mark)])


def mark_of(eqn: JaxprEqn) -> Mark:
    """Return the mark that `marked` has set on a call; "plain" if none, or if it is not a jit.

    JAX's transformations copy the mark of a call to the equations that they write within it.
    """
    return mark_in(eqn.ctx) if eqn.primitive is jit_p else "plain"


def marked_name(eqn: JaxprEqn) -> str | None:
    """Return the body name that `marked` has set on an equation, or None."""
    return name_in(eqn.ctx)


def convolves(jaxpr: AnyJaxpr, *, in_units: bool = True) -> bool:
    """Return True if a body holds a convolution, at any depth; optionally except within units."""
    return any(
        eqn.primitive is conv_general_dilated_p
        or any(convolves(body, in_units=in_units) for body in jaxprs_in_params(eqn.params))
        for eqn in jaxpr.eqns
        if in_units or mark_of(eqn) != "unit"
    )


def name_in(context: Any) -> str | None:
    """Return the body name in the context of an equation, or None."""
    return (context.xla_metadata or {}).get(_OUTLINED)


def mark_in(context: Any) -> Mark:
    """Return the mark of a call with this context."""
    if name_in(context) is None:
        return "plain"
    return "unit" if "compilation_unit" in context.xla_metadata else "call"
