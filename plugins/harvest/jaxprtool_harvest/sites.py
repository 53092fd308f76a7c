"""What is sown where: the sites of a function, which of them are asked for, and what a name means.

A site stands for the values that one `sow` equation gives, as they are seen from the outside of
the loops and calls around it. Sites are known by their path: the scopes of `nest`, then the name.
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


#: What makes values of one type, but for weak types, which JAX lets differ.
_TYPE: dict[str, Callable[[Any], Any]] = {
    "shape": lambda aval: aval.shape,
    "dtype": lambda aval: aval.dtype,
    "mesh axes": extend.varying_axes,
}


class HarvestError(JaxprToolError, ValueError):
    """Sown values that do not fit the function, each other, or the values planted for them."""


@dataclass(frozen=True)
class Settings:
    """Which sown values are asked for: those under `tag` that the lists of names let through.

    A list has a value if it has the value's name or that of a scope around it.
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
        """The settings with these lists of names; a string is a list of one."""
        if not isinstance(tag, str):
            raise TypeError(f"the tag of sown values is a string, not {tag!r}")
        allowed, blocked = (
            None if names is None else frozenset([names] if isinstance(names, str) else names)
            for names in (allowlist, blocklist)
        )
        return cls(tag, allowed, blocked or frozenset(), exclusive)

    def concern(self, eqn: JaxprEqn) -> bool:
        """Whether a `sow` equation does not stay as it is."""
        return self.exclusive or eqn.params["tag"] == self.tag

    def take(self, eqn: JaxprEqn, path: Path) -> bool:
        """Whether the value of a `sow` equation is asked for."""
        if eqn.params["tag"] != self.tag or not self.blocklist.isdisjoint(path):
            return False
        return self.allowlist is None or not self.allowlist.isdisjoint(path)


@dataclass(frozen=True, eq=False)
class Site:
    """The values of one `sow` equation: `avals` are the types of their leaves.

    `live` says whether the values are taken out, or put in: a site that nothing is planted at is
    known, and not live. `sure` is False inside a loop that might run no iteration. `again` is True
    in a `remat` that was differentiated: there a gradient computes anew, nearly always, what the
    function has sown before.
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
        """The site of a `sow` equation inside these scopes. Raises HarvestError without a name."""
        name, mode, tree = (eqn.params[k] for k in ("name", "mode", "tree"))
        if name is None:
            raise HarvestError(f"Must provide name for sown value. It is the {named(eqn)}")
        return cls((*scope, name), mode, tree, tuple(v.aval for v in eqn.outvars), eqn, again=again)

    @property
    def name(self) -> str:
        return "/".join(self.path)

    @property
    def count(self) -> int:
        """How many flat values stand for the site."""
        return len(self.avals) if self.live else 0

    def may_be(self, other: Site) -> bool:
        """Whether two sites may be of one `sow` in the source."""
        return self.path == other.path and named(self.eqn) == named(other.eqn)

    def typed(self, avals: Sequence[Any]) -> Site:
        """The site with values of other types."""
        return replace(self, avals=tuple(avals))

    def fits(self, other: Site) -> bool:
        """Whether the values of two sites are of one type."""
        return self.tree == other.tree and all(
            all(of(a) == of(b) for of in _TYPE.values())
            for a, b in zip(self.avals, other.avals, strict=True)
        )


Sites = tuple[Site, ...]


def shared_out(sites: Sequence[Site], values: Iterable[Any]) -> Iterator[tuple[Site, tuple]]:
    """Each site with those of the flat values that are its own."""
    flat = iter(values)
    for site in sites:
        yield site, tuple(islice(flat, site.count))


def types(sites: Iterable[Site]) -> list[Any]:
    """The types of the flat values of sites."""
    return [aval for site in sites if site.live for aval in site.avals]


# --- checks -----------------------------------------------------------------------------------

_WAYS = "mode='append' keeps all values, mode='clobber' the last"


def duplicate(first: Site, second: Site, done: str) -> HarvestError:
    """The error of two sites with one name; `done` is "reaped" or "planted"."""
    where = f"{named(first.eqn)}, then {named(second.eqn)}"
    if first.mode != second.mode:
        where = f"{first.mode}: {named(first.eqn)}, then {second.mode}: {named(second.eqn)}"
    return HarvestError(f"Variable has already been {done}: {second.name} ({where})", _WAYS)


def check_in_loop(sites: Iterable[Site], stacks: bool) -> None:
    """Refuse sites of a loop that sows them more than once without saying what that means.

    Of a loop without `stacks`, whose length is not known, there would be an unknown number of
    values.
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
                "a fori_loop between constants and a scan also take mode='append'",
            )


def keyed(sites: Sequence[Site]) -> dict[tuple[Path, int], Site]:
    """Sites by path, and by how many of that path come before."""
    count: dict[Path, int] = {}
    result = {}
    for site in sites:
        number = count.get(site.path, 0)
        count[site.path] = number + 1
        result[site.path, number] = site
    return result


def check_branches(branches: Sequence[Sequence[Site]], eqn: JaxprEqn) -> None:
    """Refuse branches of an equation that do not all sow the same names and types."""
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
    """The flat values of sites as nested dicts of this kind, in the order in which they are sown.

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
                raise HarvestError(f"'{'/'.join(path[:depth])}' is a sown value, and a scope too")
            level = level.setdefault(path[depth - 1], kind())
        level[path[-1]] = group[0] if len(group) == 1 else group
    return root


def find(plants: Mapping[str, Any], path: Path) -> list[Any]:
    """What is to be planted at a path: a list of that one value, or an empty one.

    Raises HarvestError if what stands in place of a scope is no mapping.
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
    """A site's types for a message: `f32[3]`, and the tree where there is one."""
    kinds = ", ".join(map(type_of, site.avals))
    return kinds if jax.tree_util.treedef_is_leaf(site.tree) else f"{site.tree} of {kinds}"
