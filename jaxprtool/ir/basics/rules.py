"""Open tables of rules by primitive, and `rule`, the one decorator that adds to them.

    @rule("dce", "my_primitive")
    def _(used_outputs, live_inputs, eqn): ...

Each table defines the arguments of its rules. A rule that is added later replaces an existing
one.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from jaxprtool.errors import PluginError, did_you_mean
from jaxprtool.ir.basics.caches import clear_caches
from jaxprtool.ir.basics.plugins import load_rules_of

R = TypeVar("R")

#: Where each table is: the module that fills it, and its name there.
TABLES: dict[str, tuple[str, str]] = {
    "batch": ("jaxprtool.passes.mapping.batch", "batch_rules"),
    "batch_bodies": ("jaxprtool.passes.mapping.batch", "structured_rules"),
    "cost": ("jaxprtool.analysis.cost.rules", "cost_rules"),
    "dce": ("jaxprtool.passes.cleanup.dce", "dce_rules"),
    "equivalence": ("jaxprtool.ir.equality.equivalence", "readable_params"),
    "expand": ("jaxprtool.ir.rewriting.expansions", "expansion_rules"),
    "jaxpr": ("jaxprtool.formats.jaxpr.params", "forms"),
    "mask": ("jaxprtool.passes.mapping.mask", "mask_rules"),
    "mask_bodies": ("jaxprtool.passes.mapping.mask", "structured_mask_rules"),
    "memory": ("jaxprtool.analysis.memory.workspaces", "workspace_rules"),
    "python": ("jaxprtool.formats.python.emit", "python_rules"),
    "ragged": ("jaxprtool.passes.mapping.ragged", "ragged_rules"),
    "ragged_bodies": ("jaxprtool.passes.mapping.ragged", "structured_ragged_rules"),
    "unzip": ("jaxprtool.passes.unzip", "unzip_rules"),
    "view": ("jaxprtool.ir.core.structured", "views"),
}


class RuleTable(dict[str, R]):
    """The rules of one pass or format, by the name of the primitive.

    If a rule is added for a primitive that may have been looked up before, with or without a rule,
    jaxprtool's caches are cleared.
    """

    def __init__(self) -> None:
        super().__init__()
        self._missed: set[str] = set()

    def get(self, primitive: str, default: Any = None) -> Any:
        """Return the rule of a primitive, or `default` if there is none.

        The installed plug-in that has rules for the primitive is imported first.

        Raises:
            PluginError: If it cannot be imported.
        """
        found = super().get(primitive)
        if found is None:
            load_rules_of(primitive)
            found = super().get(primitive)
            if found is None:
                self._missed.add(primitive)
                return default
        return found

    def __setitem__(self, primitive: str, function: R) -> None:
        if primitive in self or primitive in self._missed:
            clear_caches()
        super().__setitem__(primitive, function)


def table_named(name: str) -> RuleTable[Any]:
    """Return the filled table with a name, one of `TABLES`. Raises PluginError."""
    if name not in TABLES:
        hint = did_you_mean(name, TABLES) or f"available: {', '.join(TABLES)}"
        raise PluginError(f"unknown table of rules '{name}'", hint)
    module, variable = TABLES[name]
    return getattr(import_module(module), variable)


def rule(table: RuleTable[R] | str, *primitives: str) -> Callable[[R], R]:
    """Return a decorator that adds a rule to a table.

    Args:
        table: The table, or its name: one of `TABLES`, whose module is then imported.
        primitives: The names of the primitives that the rule is for.

    Returns:
        A function that puts its argument in the table, and returns it as it is.

    Raises:
        PluginError: If there is no table of this name.
    """
    rules: RuleTable[R] = table_named(table) if isinstance(table, str) else table

    def add(function: R) -> R:
        for primitive in primitives:
            rules[primitive] = function
        return function

    return add
