"""The sites of a function at which values are sown, their selection, and the tree of their values.

A site represents the values of one `sow` equation, as seen from outside the enclosing loops and
calls. A site is identified by its path: the scopes of `nest`, then the name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import jax

from jaxprtool import extend
from jaxprtool.errors import JaxprToolError
from jaxprtool.extend import JaxprEqn, named, type_of

Path = tuple[str, ...]


#: The properties in which values of the same type agree; weak types may differ, as in JAX.
_TYPE: dict[str, Callable[[Any], Any]] = {
    "shape": lambda aval: aval.shape,
    "dtype": lambda aval: aval.dtype,
    "mesh axes": extend.varying_axes,
}


class HarvestError(JaxprToolError, ValueError):
    """Sown values that conflict with the function, each other, or the values planted for them."""


@dataclass(frozen=True)
class Settings:
    """The selection of sown values: those under `tag` that the lists of names allow.

    A list contains a value if it has its name or the name of an enclosing scope.
    """

    tag: str
    allowlist: frozenset[str] | None = None
    blocklist: frozenset[str] = frozenset()
    exclusive: bool = False

    @classmethod
    def of(
        cls,
        tag: str,
        allowlist: Iterable[str] | None = None,
        blocklist: Iterable[str] = (),
        exclusive: bool = False,
    ) -> Settings:
        """Return the settings with these lists of names; a string is a list of one name."""
        if not isinstance(tag, str):
            raise TypeError(f"the tag of sown values must be a string, not {tag!r}")
        allowed, blocked = (
            None if names is None else frozenset([names] if isinstance(names, str) else names)
            for names in (allowlist, blocklist)
        )
        return cls(tag, allowed, blocked or frozenset(), exclusive)

    def concern(self, eqn: JaxprEqn) -> bool:
        """Return True if a `sow` equation is rewritten or removed."""
        return self.exclusive or eqn.params["tag"] == self.tag

    def take(self, eqn: JaxprEqn, path: Path) -> bool:
        """Return True if the value of a `sow` equation is selected."""
        if eqn.params["tag"] != self.tag or not self.blocklist.isdisjoint(path):
            return False
        return self.allowlist is None or not self.allowlist.isdisjoint(path)


@dataclass(frozen=True, eq=False)
class Site:
    """The values of one `sow` equation: `avals` are the types of their leaves.

    `live` is True if the values are reaped or planted; a site without a planted value is recorded
    but not live. `sure` is False inside a loop that may run no iteration. `again` is True in a
    differentiated `remat`, where a gradient nearly always recomputes values that the function has
    sown before.
    """

    path: Path
    mode: str
    tree: Any
    avals: tuple[Any, ...]
    eqn: JaxprEqn
    live: bool = True
    sure: bool = True
    again: bool = False

    @classmethod
    def of(cls, eqn: JaxprEqn, scope: Path, again: bool) -> Site:
        """Return the site of a `sow` equation in a scope. Raises HarvestError without a name."""
        name, mode, tree = (eqn.params[k] for k in ("name", "mode", "tree"))
        if name is None:
            raise HarvestError(f"Must provide name for sown value. It is the {named(eqn)}")
        return cls((*scope, name), mode, tree, tuple(v.aval for v in eqn.outvars), eqn, again=again)

    @property
    def name(self) -> str:
        return "/".join(self.path)

    @property
    def count(self) -> int:
        """The number of flat values of the site."""
        return len(self.avals) if self.live else 0

    def may_be(self, other: Site) -> bool:
        """Return True if two sites may come from the same `sow` in the source."""
        return self.path == other.path and named(self.eqn) == named(other.eqn)

    def typed(self, avals: Sequence[Any]) -> Site:
        """Return the site with values of other types."""
        return replace(self, avals=tuple(avals))

    def fits(self, other: Site) -> bool:
        """Return True if the values of two sites have the same types."""
        return self.tree == other.tree and all(
            all(of(a) == of(b) for of in _TYPE.values())
            for a, b in zip(self.avals, other.avals, strict=True)
        )


Sites = tuple[Site, ...]


def shared_out(sites: Sequence[Site], values: Iterable[Any]) -> Iterator[tuple[Site, tuple]]:
    """Yield each site with its part of the flat values."""
    flat = iter(values)
    for site in sites:
        yield site, tuple(islice(flat, site.count))


def types(sites: Iterable[Site]) -> list[Any]:
    """Return the types of the flat values of sites."""
    return [aval for site in sites if site.live for aval in site.avals]


# --- checks -----------------------------------------------------------------------------------

_WAYS = "mode='append' keeps all values, mode='clobber' the last"


def duplicate(first: Site, second: Site, done: str) -> HarvestError:
    """Return the error for two sites with the same name; `done` is "reaped" or "planted"."""
    where = f"{named(first.eqn)}, then {named(second.eqn)}"
    if first.mode != second.mode:
        where = f"{first.mode}: {named(first.eqn)}, then {second.mode}: {named(second.eqn)}"
    return HarvestError(f"Variable has already been {done}: {second.name} ({where})", _WAYS)


def check_in_loop(sites: Iterable[Site], stacks: bool) -> None:
    """Refuse sites in a loop whose mode does not define how the iterations are combined.

    A loop without `stacks`, whose length is unknown, would have an unknown number of values.
    """
    for site in sites:
        if stacks and site.mode == "strict":
            raise HarvestError(
                f"Cannot use strict mode for '{site.name}' inside `scan`. ({named(site.eqn)})",
                _WAYS,
            )
        if not stacks and site.mode != "clobber":
            raise HarvestError(
                f"Must use clobber mode for '{site.name}' inside of a `while_loop`. "
                f"({named(site.eqn)})",
                "a fori_loop between constants and a scan also support mode='append'",
            )


def keyed(sites: Sequence[Site]) -> dict[tuple[Path, int], Site]:
    """Return sites by path, and by the number of earlier sites with the same path."""
    count: dict[Path, int] = {}
    result = {}
    for site in sites:
        number = count.get(site.path, 0)
        count[site.path] = number + 1
        result[site.path, number] = site
    return result


def check_branches(branches: Sequence[Sequence[Site]], eqn: JaxprEqn) -> None:
    """Refuse branches of an equation unless all sow the same names and types."""
    first, *others = map(keyed, branches)
    for branch in others:
        if len(branch) != len(first):
            raise HarvestError(f"Mismatching number of `sow`s between branches. ({named(eqn)})")
        for key, site in branch.items():
            if key not in first:
                where = f"(not of {named(site.eqn)})"
                raise HarvestError(f"Missing sow in branch: '{site.name}'. {where}")
            _check_alike(first[key], site)


def _check_alike(a: Site, b: Site) -> None:
    differs = {"mode": a.mode != b.mode, "tree": a.tree != b.tree}
    for what, of in _TYPE.items():
        differs[what] = list(map(of, a.avals)) != list(map(of, b.avals))
    for what, different in differs.items():
        if different:
            places = f"({named(a.eqn)}, {named(b.eqn)})"
            raise HarvestError(f"Mismatched {what} between branches: '{a.name}'. {places}")


# --- the pytree of sown values ------------------------------------------------------------------


def as_tree(
    sites: Sequence[Site], values: Iterable[Any], kind: type[dict] = dict
) -> dict[str, Any]:
    """Return the flat values of sites as nested dicts of this class, in the order of sowing.

    A name that was sown more than once, in mode "append", has a list of the values, in order.
    Raises HarvestError for a name that is also a scope's.
    """
    grouped: dict[Path, list[Any]] = {}
    for site, leaves in shared_out(sites, values):
        if site.live:
            grouped.setdefault(site.path, []).append(jax.tree.unflatten(site.tree, leaves))
    root: dict[str, Any] = kind()
    for path, group in grouped.items():
        level = root
        for depth in range(1, len(path)):
            if path[:depth] in grouped:
                raise HarvestError(f"'{'/'.join(path[:depth])}' is both a sown value and a scope")
            level = level.setdefault(path[depth - 1], kind())
        level[path[-1]] = group[0] if len(group) == 1 else group
    return root


def find(plants: Mapping[str, Any], path: Path) -> list[Any]:
    """Return the value to plant at a path in a list; an empty list if there is none.

    Raises HarvestError if the entry of a scope is not a mapping.
    """
    level: Any = plants
    for depth, name in enumerate(path):
        if not isinstance(level, Mapping):
            kind = type(level).__name__
            what = f"'{'/'.join(path[:depth])}' is a scope: it takes" if depth else "plants is"
            raise HarvestError(f"{what} a dict of names, not {kind}")
        if name not in level:
            return []
        level = level[name]
    return [level]


def described(site: Site) -> str:
    """Describe a site's types for a message: `f32[3]`, with the tree if there is one."""
    kinds = ", ".join(map(type_of, site.avals))
    return kinds if jax.tree_util.treedef_is_leaf(site.tree) else f"{site.tree} of {kinds}"
