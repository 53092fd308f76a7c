"""Installed plug-ins that define how equations of other packages' primitives are written and read.

A package lists each primitive that it has rules for in the entry-point group
`jaxprtool.primitives`. Its module, which adds to the table of traits (`ir.core.traits`) and to
tables of rules (`ir.basics.rules`), is imported when a program with such a primitive is met.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

from jaxprtool.errors import PluginError, described

GROUP = "jaxprtool.primitives"

#: The packages of this repository that have rules, with their primitives.
_KNOWN = {
    "jaxprtool-equinox": (
        *("linear_solve", "maybe_set", "noinline", "nonbatchable", "nondifferentiable_backward"),
        *("nontraceable", "select_if_vmap", "unvmap_all", "unvmap_any", "unvmap_max", "vprim"),
    ),
}


@cache
def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


@cache
def load_rules_of(primitive: str) -> None:
    """Import the plug-in that has rules for a primitive, if one is installed.

    Raises PluginError if it cannot be imported.
    """
    point = _installed().get(primitive)
    if point is None:
        return
    try:
        point.load()
    except (Exception, SystemExit) as error:
        origin = point.dist.name if point.dist else point.module
        message = f"the rules of '{primitive}' in {origin} cannot be imported: {described(error)}"
        raise PluginError(message) from error


def missing_plugin(primitive: str) -> str | None:
    """Return the hint to install the plug-in for a primitive; None if that would not help."""
    if primitive in _installed():
        return None
    package = next((name for name, known in _KNOWN.items() if primitive in known), None)
    return package and f"install the plug-in {package}, which has rules for '{primitive}'"
