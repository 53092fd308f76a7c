"""Calls that XLA is to keep: their marks, which are metadata of the equation.

A call that is marked is not inlined by XLA. As a *unit* it is compiled by itself as well, once for
all calls of equal bodies. JAX writes the marks on the call as attributes for XLA, and they stay
with it under its transformations. What JAX is given instead is in `marked_calls`, what becomes of
the marks in the end in `marked_lowering`.
"""

from __future__ import annotations

from typing import Any, Literal

from jax.extend.core import JaxprEqn, jaxprs_in_params
from jax.extend.core.primitives import conv_general_dilated_p, jit_p

from jaxprtool.jaxcompat.aliases import AnyJaxpr
from jaxprtool.jaxcompat.values import with_metadata

#: How a call is marked: not at all, as one that is not inlined, or as a unit.
Mark = Literal["plain", "call", "unit"]

#: From least to most: with each, XLA is told of one key more.
MARKS: tuple[Mark, ...] = ("plain", "call", "unit")
_KEYS = "inlineable", "compilation_unit"

#: The key under which a marked call has its body's name, by which it is known for one of ours.
_OUTLINED = "outlined"


class MarkedName(str):
    """The name of a jit that JAX is given as a marked call: it goes where the call's name goes.

    JAX's transformations hand it on as it is, to the calls that become of this one alone.
    """

    mark: Mark
    body: str

    def __new__(cls, name: str, mark: Mark, body: str) -> MarkedName:
        """Return the name of a call with this mark, of the body of this name."""
        made = super().__new__(cls, name)
        made.mark, made.body = mark, body
        return made


def marked(context: Any, mark: Mark, name: str) -> Any:
    """Return the context of an equation as that of a call with this mark, of the body of this name.

    Bodies that call one another have different names; XLA tells bodies apart by what they compute.
    """
    others = dict.fromkeys([*_KEYS, _OUTLINED])
    return with_metadata(context, {**others, **metadata_of(mark, name)})


def metadata_of(mark: Mark, name: str) -> dict[str, str]:
    """Return the metadata of a call with this mark, of the body of this name."""
    return {} if mark == "plain" else {**told(mark, name), _OUTLINED: name}


def told(mark: Mark, name: str) -> dict[str, str]:
    """Return what of it is for XLA."""
    return dict(list(zip(_KEYS, ("false", name), strict=True))[: MARKS.index(mark)])


def mark_of(eqn: JaxprEqn) -> Mark:
    """How `marked` has marked a call; "plain" for one that it has not, and for what is no jit.

    JAX's transformations mark what they write within a call like the call.
    """
    return mark_in(eqn.ctx) if eqn.primitive is jit_p else "plain"


def marked_name(eqn: JaxprEqn) -> str | None:
    """The name of the body that `marked` has marked an equation with; None for one without."""
    return name_in(eqn.ctx)


def convolves(jaxpr: AnyJaxpr, *, in_units: bool = True) -> bool:
    """Return whether a body holds a convolution, at any depth; or at any but within units."""
    return any(
        eqn.primitive is conv_general_dilated_p
        or any(convolves(body, in_units=in_units) for body in jaxprs_in_params(eqn.params))
        for eqn in jaxpr.eqns
        if in_units or mark_of(eqn) != "unit"
    )


def name_in(context: Any) -> str | None:
    """Return the name of the body that the context of an equation is marked with."""
    return (context.xla_metadata or {}).get(_OUTLINED)


def mark_in(context: Any) -> Mark:
    """Return the mark of a call with this context."""
    if name_in(context) is None:
        return "plain"
    return "unit" if "compilation_unit" in context.xla_metadata else "call"
