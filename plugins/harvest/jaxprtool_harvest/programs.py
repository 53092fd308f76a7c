"""The passes: Programs that return or take sown values, by readable names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import jax

from jaxprtool import Program
from jaxprtool.errors import did_you_mean
from jaxprtool.extend import dce_body, equations, replace_jaxpr, sow_p, top_jaxpr
from jaxprtool_harvest.planting import plant_jaxpr
from jaxprtool_harvest.reaping import reap_jaxpr
from jaxprtool_harvest.sites import HarvestError, Settings, Site, as_tree, types


def reaped(program: Program, settings: Settings, keep_results: bool) -> Program:
    """Return the program that returns the sown values, after its results or instead of them.

    Raises HarvestError if there are none.
    """
    jaxpr, sites = reap_jaxpr(program.jaxpr, settings)
    _require(sites, program, settings)
    count = len(program.out_names)
    results, values = jaxpr.outvars[:count], jaxpr.outvars[count:]
    # JAX sorts the keys of a dict; in a listing, program order is more readable.
    reaps = as_tree(sites, range(len(values)), OrderedDict)
    paths, tree = jax.tree_util.tree_flatten_with_path(reaps)
    order = [position for _, position in paths]
    names = tuple("reaps" + jax.tree_util.keystr(path) for path, _ in paths)
    jaxpr = replace_jaxpr(jaxpr, outvars=[*results, *(values[i] for i in order)])
    if keep_results:
        out_tree = jax.tree_util.treedef_tuple([program.out_tree, tree])
        return program.replace(jaxpr=jaxpr, out_tree=out_tree, out_names=program.out_names + names)
    jaxpr, _ = dce_body(jaxpr, [i >= count for i in range(len(jaxpr.outvars))], instantiate=True)
    return program.replace(jaxpr=jaxpr, out_tree=tree, out_names=names)


def planted(program: Program, settings: Settings) -> Program:
    """Return the program with a new first argument: a dict of all values that are sown.

    Raises HarvestError if there are none.
    """
    jaxpr, sites = plant_jaxpr(program.jaxpr, settings, lambda path: True)
    _require(sites, program, settings)
    count = len(types(sites))
    paths, tree = jax.tree_util.tree_flatten_with_path(as_tree(sites, range(count)))
    names = tuple("plants" + jax.tree_util.keystr(path) for path, _ in paths)
    invars = [*(jaxpr.invars[i] for _, i in paths), *jaxpr.invars[count:]]
    args, kwargs = program.in_tree.children()
    new_args = jax.tree_util.treedef_tuple([tree, *args.children()])
    return program.replace(
        jaxpr=replace_jaxpr(jaxpr, invars=invars),
        in_tree=jax.tree_util.treedef_tuple([new_args, kwargs]),
        arg_names=names + program.arg_names,
    )


def _require(sites: Sequence[Site], program: Program, settings: Settings) -> None:
    """Refuse a program that sows nothing under the tag, which may be misspelled."""
    if sites:
        return
    sown = {e.params["tag"] for e in equations(top_jaxpr(program)) if e.primitive is sow_p}
    if settings.tag in sown:
        raise HarvestError(f"allowlist and blocklist exclude everything that {program.name} sows")
    tags = ", ".join(map(repr, sorted(sown)))
    hint = did_you_mean(settings.tag, sown) or (f"available: {tags}" if sown else None)
    raise HarvestError(f"{program.name} sows nothing under the tag '{settings.tag}'", hint)
