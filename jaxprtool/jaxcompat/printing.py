"""JAX's own printing rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax._src import core
from jax.extend.core import Jaxpr, JaxprEqn, Primitive, jaxprs_in_params

from jaxprtool.jaxcompat.aliases import Params
from jaxprtool.jaxcompat.jaxprs import open_jaxpr
from jaxprtool.jaxcompat.values import UNSPECIFIED


def printing_rule(primitive: Primitive) -> str | None:
    """Return the name of JAX's printing function for equations of `primitive`, or None."""
    rule = core.pp_eqn_rules.get(primitive)
    return None if rule is None else getattr(rule, "__name__", repr(rule))


def add_printing_rule(
    primitive: Primitive, name: str, shown: Callable[[Params], list[tuple[str, Any]]]
) -> None:
    """Make JAX print the parameters of `primitive` that `shown` returns, by a rule `name`."""

    def rule(eqn: JaxprEqn, context: object, settings: Any) -> Any:
        params = dict(shown(eqn.params))
        return core._pp_eqn(eqn.replace(params=params), context, settings, list(params))

    rule.__name__ = name
    core.pp_eqn_rules[primitive] = rule


def print_with_rule(
    eqn: JaxprEqn, var_names: Any, shared: dict[Jaxpr, str], types: bool
) -> Callable[[int, int | None], str]:
    """Return a function from an indentation and a width to `eqn` printed by JAX's own rule.

    Without a width, all of it is on one line. Lines after the first are indented by that many
    columns. The first line is laid out for the same indentation, which is left out. `var_names`
    maps variables to names, and names new ones; `shared` maps jaxprs that are printed elsewhere to
    their names.
    """
    context = core.JaxprPpContext()
    context.var_names = var_names
    context.shared_jaxprs = shared
    settings = core.JaxprPpSettings(print_shapes=types)
    doc = core.pp_eqn_rules[eqn.primitive](eqn, context, settings)

    def text(indent: int, width: int | None) -> str:
        if width is None:
            return core.pp.group(doc).format(1 << 30, use_color=False)
        margin = core.pp.text(" " * indent)
        lines = core.pp.nest(indent, core.pp.concat([margin, doc]))
        return lines.format(width, use_color=False)[indent:]

    return text


def printed_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Return the jaxprs, open, that JAX prints separately if it meets them twice."""
    rule = getattr(core, "pp_subjaxprs_rules", {}).get(eqn.primitive)
    if rule is not None:
        return [open_jaxpr(jaxpr) for _, jaxpr in rule(eqn)]
    return list(jaxprs_in_params(eqn.params))


def is_unspecified(sharding: object) -> bool:
    """Return True if a jit's sharding is unspecified."""
    return sharding is UNSPECIFIED
