"""The variables that a function declares, and the pytree in which init returns them.

A variable is one sown value. In that pytree, scopes are nested dicts and a name is the key of the
value; values sown several times in mode "append" are a list, in program order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.core.equations import named
from jaxprtool.ir.programs.trees import filled
from jaxprtool.jaxcompat import Aval, JaxprEqn

#: The tag under which unzip sows variables that it chooses itself, and the separator between scopes
#: and name in their names.
CHOSEN, SEPARATOR = "unzip.chosen", "/"


class UnzipError(JaxprToolError, ValueError):
    """A function that cannot be unzipped: its variables are invalid, or do not cut the keys off."""


@dataclass(frozen=True, eq=False)
class Variable:
    """A value that was sown.

    Attributes:
        path: Its scopes, and its name.
        mode: The mode of the sow: "strict", "clobber" or "append".
        tree: The pytree of the value.
        avals: The types of its leaves in init, with an additional axis for each loop around the
            equation.
        eqn: The equation that sows it.
        again: True if it may be an earlier variable, recomputed by JAX for a `remat`.
    """

    path: tuple[str, ...]
    mode: str
    tree: PyTreeDef
    avals: tuple[Aval, ...]
    eqn: JaxprEqn
    again: bool = False

    @classmethod
    def of(cls, eqn: JaxprEqn, tree: PyTreeDef, avals: Sequence[Aval]) -> Variable:
        """Return the variable that an equation declares, under the name in its parameters.

        Raises UnzipError if it has no name.
        """
        name, mode = eqn.params["name"], eqn.params.get("mode", "strict")
        if name is None:
            raise UnzipError(f"Must provide name for variable. It is the {named(eqn)}")
        chosen = eqn.params.get("tag") == CHOSEN
        path = tuple(name.split(SEPARATOR)) if chosen else (name,)
        return cls(path, mode, tree, tuple(avals), eqn)

    def under(self, scope: str) -> Variable:
        """Return the variable with its path outside a `nest` with this scope."""
        return replace(self, path=(scope, *self.path))

    def stacked(self, length: int) -> Variable:
        """Return the variable outside a loop, with the values of all iterations stacked."""
        avals = tuple(jaxcompat.stacked_aval(length, aval) for aval in self.avals)
        return replace(self, avals=avals)


def replaced(variables: Sequence[Variable]) -> dict[tuple[str, ...], int]:
    """Return, by path, the number of values sown in mode "clobber" that a later one replaces."""
    counts = Counter(v.path for v in variables if v.mode == "clobber")
    return {path: count - 1 for path, count in counts.items() if count > 1}


def leaf_tree(variables: Sequence[Variable]) -> dict[str, Any]:
    """Return the pytree of variables with, for each leaf, its number in the order of declaration.

    Raises UnzipError if two variables have the same name, or a name is also that of a scope.
    """
    tree: dict[str, Any] = {}
    names: dict[tuple[str, ...], Variable] = {}
    scopes: dict[tuple[str, ...], Variable] = {}
    count = 0
    for variable in variables:
        leaves = range(count, count + len(variable.avals))
        count += len(variable.avals)
        value = filled(variable.tree, leaves)
        path, level = variable.path, tree
        for depth, scope in enumerate(path[:-1], start=1):
            _check(variable, path[:depth], names.get(path[:depth]))
            scopes.setdefault(path[:depth], variable)
            level = level.setdefault(scope, {})
        before = names.get(path)
        if before is not None and before.mode == variable.mode == "append":
            level[path[-1]].append(value)
            continue
        _check(variable, path, before or scopes.get(path))
        names[path] = variable
        level[path[-1]] = [value] if variable.mode == "append" else value
    return tree


def _check(variable: Variable, path: tuple[str, ...], before: Variable | None) -> None:
    """Refuse a variable if its name, or one of its scopes, is the name of another one."""
    if before is not None:
        both = f"{named(before.eqn)} and {named(variable.eqn)}"
        raise UnzipError(f"Cannot use duplicate variable name: {'/'.join(path)} ({both})")
