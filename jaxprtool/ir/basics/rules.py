"""Open tables of rules by primitive, and `rule`, the one decorator that adds to them.

    @rule(dce_rules, "my_primitive")
    def _(used_outputs, live_inputs, eqn): ...

Each table defines the arguments of its rules. A rule that is added later replaces an existing
one. Extensions name the table: see `jaxprtool.extend.rule`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from jaxprtool.ir.basics.caches import clear_caches
from jaxprtool.ir.basics.plugins import load_rules_of

R = TypeVar("R")


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


def rule(table: RuleTable[R], *primitives: str) -> Callable[[R], R]:
    """Return a decorator that adds a rule to a table.

    Args:
        table: The table.
        primitives: The names of the primitives that the rule is for.

    Returns:
        A function that puts its argument in the table, and returns it as it is.
    """

    def add(function: R) -> R:
        for primitive in primitives:
            table[primitive] = function
        return function

    return add
