"""The transformations `reap`, `plant`, `harvest` and `call_and_reap` of functions.

The function is traced to a jaxpr when it is called, the jaxpr is rewritten, and then evaluated: on
arrays, or under any JAX transformation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxprtool import extend
from jaxprtool.extend import dce_body, named, type_of
from jaxprtool_harvest.planting import plant_jaxpr
from jaxprtool_harvest.reaping import reap_jaxpr
from jaxprtool_harvest.sites import (
    HarvestError,
    Settings,
    Site,
    Sites,
    as_tree,
    described,
    find,
)

Names = Iterable[str] | str


def call_and_reap(
    fun: Callable[..., Any],
    *,
    tag: str,
    allowlist: Names | None = None,
    blocklist: Names = (),
    exclusive: bool = False,
) -> Callable[..., Any]:
    """Return a function that returns a pair: the result of `fun`, and the values sown under `tag`.

    Positional arguments are traced; keyword arguments are passed to `fun` unchanged.

    Args:
        fun: The function.
        tag: The tag of the values to reap. All sows under it are removed.
        allowlist: The names of the values to reap, or of scopes around them; by default all.
        blocklist: The names of values, or of scopes around them, not to reap.
        exclusive: Remove the sows under other tags too.

    Returns:
        The function. The sown values are a dict by name, with a dict for each scope of `nest`.

    Raises:
        HarvestError: When the function is called, if sown values conflict: the same name twice in
            mode "strict", branches that sow different names or types, or a mode that a loop does
            not support.
        UnsupportedError: When the function is called, if a value is sown where it cannot be
            reached.
    """
    settings = Settings.of(tag, allowlist, blocklist, exclusive)

    @functools.wraps(fun)
    def harvested(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        jaxpr, out_tree, flat = _traced(fun, args, kwargs)
        jaxpr, sites = reap_jaxpr(jaxpr, settings)
        values = extend.jaxpr_as_fun(jaxpr)(*flat)
        count = out_tree.num_leaves
        return jax.tree.unflatten(out_tree, values[:count]), as_tree(sites, values[count:])

    return harvested


def reap(
    fun: Callable[..., Any],
    *,
    tag: str,
    allowlist: Names | None = None,
    blocklist: Names = (),
    exclusive: bool = False,
) -> Callable[..., dict[str, Any]]:
    """Return a function that returns only the values that `fun` sows.

    Values that only the results of `fun` need are not computed. Arguments and errors are those of
    `call_and_reap`.
    """
    settings = Settings.of(tag, allowlist, blocklist, exclusive)

    @functools.wraps(fun)
    def reaped(*args: Any, **kwargs: Any) -> dict[str, Any]:
        jaxpr, out_tree, flat = _traced(fun, args, kwargs)
        jaxpr, sites = reap_jaxpr(jaxpr, settings)
        wanted = [i >= out_tree.num_leaves for i in range(len(jaxpr.outvars))]
        jaxpr, _ = dce_body(jaxpr, wanted, instantiate=True)
        return as_tree(sites, extend.jaxpr_as_fun(jaxpr)(*flat))

    return reaped


def plant(
    fun: Callable[..., Any],
    *,
    tag: str,
    allowlist: Names | None = None,
    blocklist: Names = (),
    exclusive: bool = False,
) -> Callable[..., Any]:
    """Return `fun` with an additional first argument: a dict of values that replace sown ones.

    The dict has the form of the result of `reap`. Sown values that it lacks are computed, and stay
    sown. Names that `fun` does not sow are ignored. Arguments are those of `call_and_reap`.

    Raises:
        HarvestError: When the function is called, if the shape, pytree or type of a value differs
            from that of the value it replaces, or as in `call_and_reap`.
        UnsupportedError: As in `call_and_reap`.
    """
    settings = Settings.of(tag, allowlist, blocklist, exclusive)

    @functools.wraps(fun)
    def planted(plants: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        jaxpr, out_tree, flat = _traced(fun, args, kwargs)
        jaxpr, sites = plant_jaxpr(jaxpr, settings, lambda path: bool(find(plants, path)))
        values = extend.jaxpr_as_fun(jaxpr)(*_planted_leaves(plants, sites), *flat)
        return jax.tree.unflatten(out_tree, values)

    del planted.__wrapped__  # type: ignore[attr-defined]  # its signature is another
    return planted


def harvest(
    fun: Callable[..., Any],
    *,
    tag: str,
    allowlist: Names | None = None,
    blocklist: Names = (),
    exclusive: bool = False,
) -> Callable[..., Any]:
    """Combine `plant` and `call_and_reap`: `harvested(plants, *args)` returns (result, reaps).

    Planted values are not reaped. Arguments and errors are those of `plant`.
    """
    given: dict[str, Any] = {
        "tag": tag,
        "allowlist": allowlist,
        "blocklist": blocklist,
        "exclusive": exclusive,
    }
    return call_and_reap(plant(fun, **given), **given)


def _traced(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any, list[Any]]:
    """Return the closed jaxpr of a call, the tree of its results, and its flat arguments."""
    # Without jit, there would be no calls to hold the scopes of `nest`.
    with jax.disable_jit(False):
        jaxpr, out = jax.make_jaxpr(functools.partial(fun, **kwargs), return_shape=True)(*args)
    return jaxpr, jax.tree.structure(out), jax.tree.leaves(args)


def _planted_leaves(plants: Mapping[str, Any], sites: Sites) -> list[Any]:
    """Return the flat values of the live sites."""
    counts: dict[tuple[str, ...], int] = {}
    for site in sites:
        counts[site.path] = counts.get(site.path, 0) + site.live
    given = {path: iter(_each(plants, path, counts[path])) for path in counts if counts[path]}
    return [leaf for site in sites if site.live for leaf in _leaves(next(given[site.path]), site)]


def _each(plants: Mapping[str, Any], path: tuple[str, ...], count: int) -> list[Any]:
    """Return the values for the sites of one path; in mode "append" there may be several."""
    (value,) = find(plants, path)
    if count == 1:
        return [value]
    if not isinstance(value, list | tuple) or len(value) != count:
        raise HarvestError(f"'{'/'.join(path)}' is sown {count} times: plant a list of as many")
    return list(value)


def _leaves(value: Any, site: Site) -> list[Any]:
    leaves, tree = jax.tree.flatten(value)
    if tree != site.tree:
        raise HarvestError(
            f"the value planted for '{site.name}' is {tree}, but the sown value is "
            f"{described(site)} ({named(site.eqn)})"
        )
    return [_fitted(leaf, aval, site) for leaf, aval in zip(leaves, site.avals, strict=True)]


def _fitted(leaf: Any, aval: Any, site: Site) -> Any:
    """Return a planted leaf as an array of the type that it replaces, if that is lossless."""
    given = jax.typeof(leaf) if hasattr(leaf, "dtype") else jax.typeof(jnp.asarray(leaf))
    if given.shape == aval.shape and _converts(leaf, given.dtype, aval.dtype):
        fits = given.dtype == getattr(leaf, "dtype", None) == aval.dtype
        return extend.as_weak_as(leaf if fits else jnp.asarray(leaf, aval.dtype), aval)
    raise HarvestError(
        f"the value planted for '{site.name}' is {type_of(given)}, but the sown value is "
        f"{described(site)} ({named(site.eqn)})"
    )


def _converts(leaf: Any, given: Any, wanted: Any) -> bool:
    """Return True if a value may be converted to another dtype: a wider one, or a narrower float.

    A concrete number may have any kind of dtype, if the conversion preserves it.
    """
    if given == wanted:
        return True
    kinds = [
        [jnp.issubdtype(dtype, kind) for dtype in (given, wanted)]
        for kind in (jax.dtypes.extended, jnp.complexfloating, jnp.inexact)
    ]
    extended, are_complex, inexact = kinds
    if any(extended) or are_complex == [True, False]:
        return False
    if all(inexact) or jnp.promote_types(given, wanted) == wanted:
        return True
    return not isinstance(leaf, jax.core.Tracer) and bool(
        jnp.all(jnp.asarray(leaf, wanted) == jnp.asarray(leaf))
    )
