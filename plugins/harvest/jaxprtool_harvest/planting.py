"""Planting: sown values are replaced by arguments of the body, passed in from outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from jax.extend.core import primitives

from jaxprtool import extend
from jaxprtool.errors import UnsupportedError
from jaxprtool.extend import (
    Atom,
    CustomJVP,
    JaxprEqn,
    JVPRule,
    Regions,
    ShardMap,
    Var,
    jvp_params,
    named,
    replace_jaxpr,
)
from jaxprtool_harvest.harvester import (
    Harvester,
    Work,
    fresh,
    has_stacks,
    out_of_reach,
    reshaped,
    shard_axes,
    shard_specs,
    zeros,
)
from jaxprtool_harvest.sites import (
    HarvestError,
    Path,
    Settings,
    Site,
    Sites,
    check_branches,
    check_in_loop,
    duplicate,
    keyed,
    shared_out,
    types,
)


class Planter(Harvester):
    """Rewrites bodies to take the flat values of their live sites before their arguments.

    Sites are live if `planted` returns True for their path. The others stay sown, and are checked
    in the same way.
    """

    def __init__(self, settings: Settings, planted: Callable[[Path], bool]):
        super().__init__(settings)
        self.planted = planted

    def _border(self, invars: list[Var], outvars: list[Atom], flat: list[Any]) -> tuple:
        return [*flat, *invars], outvars

    def _harvest(self, eqn: JaxprEqn, site: Site, work: Work) -> Sequence[Atom]:
        if self.planted(site.path):
            return _values(site, work)
        _values(replace(site, live=False), work)
        work.eqns.append(eqn)
        return eqn.outvars

    def _call(
        self, inside: Regions, number: int, bodies: list[Any], sites: Sites, work: Work
    ) -> None:
        field = inside.regions[number].groups[0]
        given = {field: _all_values(sites, work)}
        work.eqns.append(inside.rebuild(bodies, more=given, first=True))

    def _loop(
        self, inside: Regions, number: int, bodies: list[Any], sites: Sites, work: Work
    ) -> None:
        """Pass one value per iteration in mode "append", and one for all in mode "clobber"."""
        stacks = has_stacks(inside)
        check_in_loop(sites, stacks)
        region, body = inside.regions[number], bodies[number]
        fields = {"append": inside.edges.sliced[0] if stacks else "", "clobber": region.constants}
        places: dict[str, list[Any]] = {}
        operands: dict[str, list[Any]] = {}
        for site, inner in shared_out(sites, body.invars):
            field = fields[site.mode]
            if field is None:
                raise out_of_reach(inside.eqn)
            if site.mode == "append":
                length = inside.view.trips
                site = site.typed([extend.stacked_aval(length, a) for a in site.avals])
            places.setdefault(field, []).extend(inner)
            operands.setdefault(field, []).extend(_values(site, work))
        own = body.invars[sum(site.count for site in sites) :]
        invars = inside.arguments(region, own, places, first=True)
        bodies[number] = replace_jaxpr(body, invars=invars)
        work.eqns.append(inside.rebuild(bodies, more=operands, first=True))

    def _branch(self, inside: Regions, branches: list[tuple[Any, Sites]], work: Work) -> None:
        """Pass the values to all branches."""
        # A recomputed branch may lack sows of values that the gradient does not need.
        kept = keyed(branches[0][1])
        if work.again:
            kept = {key: site for _, sites in branches for key, site in keyed(sites).items()}
        else:
            check_branches([sites for _, sites in branches], inside.eqn)
        bodies = []
        for body, sites in branches:
            groups = [places for _, places in shared_out(sites, body.invars)]
            given = dict(zip(keyed(sites), groups, strict=True))
            own = body.invars[sum(map(len, groups)) :]
            places = [given[key] if key in given else fresh(types([s])) for key, s in kept.items()]
            bodies.append(replace_jaxpr(body, invars=[*chain(*places), *own]))
        values = {inside.regions[0].groups[0]: _all_values(tuple(kept.values()), work)}
        work.eqns.append(inside.rebuild(bodies, more=values, first=True))

    def _shard_map(self, shards: ShardMap, body: Any, sites: Sites, work: Work) -> None:
        """Pass values that differ between shards with a leading axis of shards, in mesh order."""
        inside = shards.body.eqns[0]
        axes = shard_axes(shards, types(sites))
        specs = shard_specs(axes)
        invars, eqns = list(body.invars), []
        for i, each in enumerate(axes):
            if each:
                outer = Var(extend.stacked_aval(1, invars[i].aval))
                eqns.append(reshaped(outer, invars[i], inside))
                invars[i] = outer
        # The types of the operands are those of the results of a shard_map with these specs.
        given = [v.aval for v in invars[: len(axes)]]
        giving = shards.rebuild(
            operands=(), in_specs=(), outs=fresh(given), out_specs=specs, body=zeros(given, inside)
        )
        with extend.setting_of(shards.eqn):
            avals, _ = extend.inferred_types(giving.primitive, giving.params, ())
        outer_sites = [s.typed(each) if s.live else s for s, each in shared_out(sites, avals)]
        new = shards.rebuild(
            operands=(*_all_values(outer_sites, work), *shards.operands),
            in_specs=specs + shards.in_specs,
            body=replace_jaxpr(body, invars=invars, eqns=[*eqns, *body.eqns]),
        )
        work.eqns.append(new)

    def _custom(self, call: CustomJVP, work: Work) -> None:
        """Pass the planted values to the call, which then raises if it is differentiated.

        Its rule belongs to the function that computes the replaced values.
        """
        body, sites = self.body(call.body, work.scope, work.again)
        values = _all_values(sites, work)
        if not values:
            work.eqns.append(call.rebuild(body=body))
            return
        where = f"a value is planted inside {named(call.eqn)}, whose rule does not use it"
        name = body.debug_info.func_name
        raised = f"UnsupportedError: {where}"

        def rule() -> JVPRule:
            everything = (True,) * len(body.invars)
            return JVPRule(name, None, (False,) * len(body.outvars), everything, raised)

        new = extend.new_jaxpr_eqn(
            [*values, *call.operands],
            list(call.outs),
            primitives.custom_jvp_call_p,
            jvp_params(body, name, rule),
            extend.operand_effects(body, (*values, *call.operands)),
            call.eqn.source_info,
            call.eqn.ctx,
        )
        work.eqns.append(new)


def _all_values(sites: Sequence[Site], work: Work) -> tuple[Var, ...]:
    return tuple(value for site in sites for value in _values(site, work))


def _values(site: Site, work: Work) -> tuple[Any, ...]:
    """Return the variables with the planted values of a site; none if it is not live."""
    group = work.found.setdefault(site.path, [])
    if group and site.live:
        first, values = group[0]
        if site.again or site.mode == first.mode == "clobber":
            _check_same(site, [each for each, _ in group])
            return values
        if site.mode == "strict" or site.mode != first.mode:
            raise duplicate(first, site, "planted")
    values = fresh(site.avals) if site.live else ()
    group.append((site, values))
    return values


def _check_same(site: Site, before: Sequence[Site]) -> None:
    """Refuse a site that shares the value of an earlier one if it may not be the same value."""
    first = before[0]
    if site.mode == "append" and (len(before) > 1 or first.again or not site.may_be(first)):
        raise UnsupportedError(
            f"'{site.name}' is planted more than once and recomputed for a gradient, so its "
            f"occurrences cannot be told apart ({named(site.eqn)})"
        )
    if not site.fits(first):
        places = f"{named(first.eqn)}, then {named(site.eqn)}"
        raise HarvestError(f"'{site.name}' is sown with two types ({places})")


def plant_jaxpr(
    jaxpr: Any, settings: Settings, planted: Callable[[Path], bool]
) -> tuple[Any, Sites]:
    """Return a closed jaxpr that takes the flat values of the live sites first, and all sites.

    `planted` returns True for the paths at which a value is planted; other sites stay sown.
    """
    return Planter(settings, planted).body(jaxpr)
