"""Reaping: sown values become results of the body that sows them, up to the whole program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from jaxprtool import extend
from jaxprtool.errors import UnsupportedError
from jaxprtool.extend import (
    Atom,
    CustomJVP,
    JaxprEqn,
    Regions,
    ShardMap,
    Var,
    dce_body,
    has_lasting_effect,
    keep,
    named,
    replace_jaxpr,
)
from jaxprtool.extend import call as call_of
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


class Reaper(Harvester):
    """Rewrites bodies to return the flat values of their sites after their results.

    Values that a gradient recomputes are reaped only where they are computed first: `taken` are the
    reaped sites, `passed` the recomputed ones.
    """

    def __init__(self, settings: Settings):
        super().__init__(settings)
        self.taken: list[Site] = []
        self.passed: list[Site] = []

    def _border(self, invars: list[Var], outvars: list[Atom], flat: list[Any]) -> tuple:
        return invars, [*outvars, *flat]

    def _harvest(self, eqn: JaxprEqn, site: Site, work: Work) -> Sequence[Atom]:
        values = eqn.invars[: len(eqn.outvars)]
        if site.again:
            self.passed.append(site)
        else:
            self.taken.append(site)
            _add(work, site, values)
        return values

    def _call(
        self, inside: Regions, number: int, bodies: list[Any], sites: Sites, work: Work
    ) -> None:
        outs = fresh(types(sites))
        field = inside.regions[number].result_fields[-1]
        work.eqns.append(inside.rebuild(bodies, more_results={field: outs}))
        _add_all(work, sites, outs)

    def _loop(
        self, inside: Regions, number: int, bodies: list[Any], sites: Sites, work: Work
    ) -> None:
        """Stack the values of all iterations; in mode "clobber", carry the last one."""
        stacks, length = has_stacks(inside), inside.view.trips
        check_in_loop(sites, stacks)
        runs = isinstance(length, int) and length > 0  # a symbolic length may be 0
        kept = [replace(s, sure=s.sure and runs) for s in sites if s.mode == "clobber"]
        kept, starts = _starts(kept, inside.eqn, work)
        all_of = [
            s.typed([extend.stacked_aval(length, a) for a in s.avals])
            for s in sites
            if s.mode == "append"
        ]
        if kept and not inside.edges.carried:
            raise out_of_reach(inside.eqn)
        carry, ends = inside.edges.carried[0] if inside.edges.carried else ("", "")
        stacked = inside.edges.stacked[0] if stacks else ""
        last = [s.mode == "clobber" for s in sites for _ in s.avals]
        for n, (body, region) in enumerate(zip(bodies, inside.regions, strict=True)):
            results, values = body.outvars[: len(region.outs)], body.outvars[len(region.outs) :]
            more = {}
            if n == number:
                more = {ends: keep(values, last), stacked: keep(values, [not f for f in last])}
            invars = inside.arguments(region, body.invars, {carry: fresh(types(kept))})
            outvars = inside.outcomes(region, results, more)
            bodies[n] = replace_jaxpr(body, invars=invars, outvars=outvars)
        outs = {ends: fresh(types(kept)), stacked: fresh(types(all_of))}
        work.eqns.append(inside.rebuild(bodies, more={carry: starts}, more_results=outs))
        _add_all(work, kept, outs[ends], started=True)
        _add_all(work, all_of, outs[stacked])

    def _branch(self, inside: Regions, branches: list[tuple[Any, Sites]], work: Work) -> None:
        """Return the values of the same sites, in the same order, from all branches."""
        check_branches([sites for _, sites in branches], inside.eqn)
        own, bodies = len(inside.eqn.outvars), []
        order = keyed(branches[0][1])
        for body, sites in branches:
            groups = [values for _, values in shared_out(sites, body.outvars[own:])]
            given = dict(zip(keyed(sites), groups, strict=True))
            values = chain(*(given[key] for key in order))
            bodies.append(replace_jaxpr(body, outvars=[*body.outvars[:own], *values]))
        found = [
            replace(site, sure=all(keyed(sites)[key].sure for _, sites in branches))
            for key, site in order.items()
        ]
        outs = fresh(types(found))
        field = inside.regions[0].result_fields[-1]
        work.eqns.append(inside.rebuild(bodies, more_results={field: outs}))
        _add_all(work, found, outs)

    def _shard_map(self, shards: ShardMap, body: Any, sites: Sites, work: Work) -> None:
        """Return values that differ between shards with a leading axis of shards, in mesh order."""
        own = len(shards.outs)
        axes = shard_axes(shards, types(sites))
        outvars, eqns = list(body.outvars), list(body.eqns)
        for i, each in enumerate(axes, start=own):
            if each:
                outer = Var(extend.stacked_aval(1, outvars[i].aval))
                eqns.append(reshaped(outvars[i], outer, shards.body.eqns[0]))
                outvars[i] = outer
        new = shards.rebuild(
            outs=(*shards.outs, *fresh(types(sites))),
            body=replace_jaxpr(body, outvars=outvars, eqns=eqns),
            out_specs=shards.out_specs + shard_specs(axes),
        )
        with extend.setting_of(shards.eqn):
            avals, _ = extend.inferred_types(new.primitive, new.params, new.invars)
        outs = fresh(avals[own:])
        work.eqns.append(new.replace(outvars=[*shards.outs, *outs]))
        for site, values in shared_out(sites, outs):
            _add(work, site.typed([v.aval for v in values]), values)

    def _custom(self, call: CustomJVP, work: Work) -> None:
        """Keep the call with its rule, and compute its sown values by separate equations.

        The rule then differentiates the function's own results, as before, and JAX the sown values.
        """
        nothing = Reaper(replace(self.settings, allowlist=frozenset()))
        work.eqns.append(call.rebuild(body=nothing.body(call.body)[0]))
        alone = Reaper(replace(self.settings, exclusive=True))
        body, sites = alone.body(call.body, work.scope, work.again)
        self.taken += alone.taken
        self.passed += alone.passed
        if not sites:
            return
        wanted = [i >= len(call.outs) for i in range(len(body.outvars))]
        body, used = dce_body(body, wanted)
        if any(map(has_lasting_effect, body.eqns)):
            raise UnsupportedError(
                f"'{sites[0].name}' is sown inside {named(call.eqn)}, which has an effect that "
                f"would happen twice ({named(sites[0].eqn)})"
            )
        outs = fresh(types(sites))
        work.eqns.append(call_of(body, keep(call.operands, used), outs, call.eqn))
        _add_all(work, sites, outs)


def _add_all(
    work: Work, sites: Sequence[Site], flat: Iterable[Atom], started: bool = False
) -> None:
    for site, values in shared_out(sites, flat):
        _add(work, site, values, started)


def _add(work: Work, site: Site, values: Sequence[Atom], started: bool = False) -> None:
    """Add a site to the current body; `started` if it includes the value sown before it."""
    group = work.found.setdefault(site.path, [])
    if group:
        first = group[0][0]
        if site.mode == "strict" or site.mode != first.mode:
            raise duplicate(first, site, "reaped")
        if site.mode == "clobber":
            if not site.sure and not started:
                raise UnsupportedError(
                    f"'{site.name}' is sown twice, the second time in a loop that may run no "
                    f"iteration, in a call: {named(first.eqn)}, then {named(site.eqn)}"
                )
            group.clear()
    group.append((site, tuple(values)))


def _starts(
    sites: Sequence[Site], eqn: JaxprEqn, work: Work
) -> tuple[list[Site], tuple[Atom, ...]]:
    """Return the updated sites, and the values that a loop carries into its first iteration.

    These are the values sown under the name before, which remain if the loop runs no iteration, or
    zeros if there are none.
    """
    known: list[Site] = []
    starts: list[Atom] = []
    for site in sites:
        before = work.found.get(site.path)
        if site.sure or not before or before[0][0].mode != "clobber":
            made = zeros(site.avals, eqn)
            work.eqns += made.eqns
            starts += made.outvars
        else:
            first, values = before[0]
            if not site.fits(first):
                raise HarvestError(
                    f"'{site.name}' is sown with two types, and {named(eqn)} may run no iteration "
                    f"({named(first.eqn)}, then {named(site.eqn)})"
                )
            site = replace(site, sure=first.sure)
            starts += values
        known.append(site)
    return known, tuple(starts)


def reap_jaxpr(jaxpr: Any, settings: Settings) -> tuple[Any, Sites]:
    """Return a closed jaxpr that returns the flat values of its sites last, and these sites."""
    reaper = Reaper(settings)
    jaxpr, sites = reaper.body(jaxpr)
    for site in reaper.passed:
        if not any(map(site.may_be, reaper.taken)):
            raise UnsupportedError(
                f"'{site.name}' is sown in the gradient of a `remat`, where a recomputed value "
                f"cannot be told from the first one ({named(site.eqn)})",
                "reap inside the gradient, with has_aux, or use one `remat` less",
            )
    return jaxpr, sites
