"""The walk that reaping and planting share: through a jaxpr, into every body that sows something.

A `Harvester` rewrites a body so that its sown values leave it, or come into it, as flat values of
its own; `Reaper` and `Planter` say how, for `sow` itself and for each kind of loop, branch and
call. A `sow` equation that is harvested goes, and what it gave is replaced wherever it was used. A
body that several equations share is rewritten once for each scope that it is in, and what sows
nothing stays the very same object.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxprtool import extend
from jaxprtool.errors import UnsupportedError
from jaxprtool.extend import (
    Atom,
    Call,
    Cond,
    CustomJVP,
    JaxprEqn,
    Literal,
    Scan,
    ShardMap,
    Var,
    While,
    holds_jaxpr,
    named,
    scope_of,
    sow_p,
    sub_jaxprs,
    view,
)
from jaxprtool_harvest.sites import Path, Settings, Site, Sites

#: A site with the atoms that are its values in the body at hand.
Found = tuple[Site, tuple[Atom, ...]]


@dataclass
class Work:
    """One body while it is rewritten: its new equations, what replaces which variable, its sites.

    `again` is True in what a gradient computes anew (see `Site`).
    """

    scope: Path
    again: bool
    eqns: list[JaxprEqn] = field(default_factory=list)
    replaced: dict[Var, Atom] = field(default_factory=dict)
    found: dict[Path, list[Found]] = field(default_factory=dict)

    def atom(self, atom: Atom) -> Atom:
        return atom if type(atom) is Literal else self.replaced.get(atom, atom)

    def updated(self, eqn: JaxprEqn) -> JaxprEqn:
        """The equation with the operands that it has after the rewriting so far."""
        operands = list(map(self.atom, eqn.invars))
        if all(new is old for new, old in zip(operands, eqn.invars, strict=True)):
            return eqn
        return eqn.replace(invars=operands)

    @property
    def sites(self) -> list[Found]:
        return [each for group in self.found.values() for each in group]


class Harvester:
    """What reaping and planting have in common; a subclass has a rule for each kind of equation."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self._rewritten: dict[Any, tuple[Any, Sites]] = {}
        self._sows: dict[Any, bool] = {}

    def body(self, body: Any, scope: Path = (), again: bool = False) -> tuple[Any, tuple]:
        """A closed jaxpr rewritten, and its sites, in the order of their flat values.

        Raises HarvestError for sown values that do not fit each other, and UnsupportedError for
        those that are where we cannot reach them.
        """
        if not self._sows_within(body):
            return body, ()
        # In JAX 0.10 an open body is closed anew whenever it is viewed: what lasts is the open one.
        key = body if body.consts else extend.open_jaxpr(body), scope, again
        if key not in self._rewritten:
            self._rewritten[key] = self._rewrite(body, Work(scope, again))
        return self._rewritten[key]

    def _sows_within(self, body: Any) -> bool:
        """Whether something that concerns us is sown in a body, at any depth."""
        jaxpr = extend.open_jaxpr(body)
        if jaxpr not in self._sows:
            self._sows[jaxpr] = any(map(self._sows_at, jaxpr.eqns))
        return self._sows[jaxpr]

    def _sows_at(self, eqn: JaxprEqn) -> bool:
        if eqn.primitive is sow_p:
            return self.settings.concern(eqn)
        return any(map(self._sows_within, _bodies(eqn)))

    def _rewrite(self, body: Any, work: Work) -> tuple[Any, Sites]:
        for eqn in body.eqns:
            eqn = work.updated(eqn)
            if not self._sows_at(eqn):
                work.eqns.append(eqn)
            elif eqn.primitive is sow_p:
                self._sow(eqn, work)
            else:
                self._structured(eqn, work)
        found = work.sites
        flat = [atom for _, atoms in found for atom in atoms]
        outvars = list(map(work.atom, body.outvars))
        invars, outvars = self._border(list(body.invars), outvars, flat)
        return with_border(body, invars, outvars, work.eqns), tuple(site for site, _ in found)

    def _sow(self, eqn: JaxprEqn, work: Work) -> None:
        path = (*work.scope, eqn.params["name"])
        if self.settings.take(eqn, path):
            values = self._harvest(eqn, Site.of(eqn, work.scope, work.again), work)
        else:
            values = eqn.invars[: len(eqn.outvars)]
        work.replaced.update(zip(eqn.outvars, values, strict=True))

    def _structured(self, eqn: JaxprEqn, work: Work) -> None:
        match structured := view(eqn):
            case Call():
                scope = scope_of(eqn)
                inside = work.scope if scope is None else (*work.scope, scope)
                again = work.again or eqn.params.get("differentiated", False)
                self._call(structured, *self.body(structured.body, inside, again), work)
            case Scan():
                self._scan(structured, *self.body(structured.body, work.scope, work.again), work)
            case While():
                cond, sites = self.body(structured.cond, work.scope, work.again)
                if sites:
                    raise UnsupportedError(
                        f"'{sites[0].name}' is sown in the condition of a while loop: "
                        f"{named(sites[0].eqn)}"
                    )
                body, sites = self.body(structured.body, work.scope, work.again)
                self._while(structured, cond, body, sites, work)
            case Cond():
                branches = [self.body(b, work.scope, work.again) for b in structured.branches]
                self._cond(structured, branches, work)
            case ShardMap():
                body, sites = self.body(structured.body, work.scope, work.again)
                self._shard_map(structured, body, sites, work)
            case CustomJVP():
                self._custom(structured, work)
            case _:
                raise UnsupportedError(f"a value is sown inside {named(eqn)}, out of our reach")

    # What a subclass defines. Each appends to the work the equations that replace one.

    def _border(self, invars: list[Var], outvars: list[Atom], flat: list[Any]) -> tuple:
        """What a body takes and gives, with the flat values of its sites."""
        raise NotImplementedError

    def _harvest(self, eqn: JaxprEqn, site: Site, work: Work) -> Sequence[Atom]:
        """What takes the place of the results of a `sow` that is asked for."""
        raise NotImplementedError

    def _call(self, call: Call, body: Any, sites: Sites, work: Work) -> None:
        raise NotImplementedError

    def _scan(self, scan: Scan, body: Any, sites: Sites, work: Work) -> None:
        raise NotImplementedError

    def _while(self, loop: While, cond: Any, body: Any, sites: Sites, work: Work) -> None:
        raise NotImplementedError

    def _cond(self, cond: Cond, branches: list[tuple[Any, Sites]], work: Work) -> None:
        raise NotImplementedError

    def _shard_map(self, shards: ShardMap, body: Any, sites: Sites, work: Work) -> None:
        raise NotImplementedError

    def _custom(self, call: CustomJVP, work: Work) -> None:
        raise NotImplementedError


# --- pieces of jaxprs ---------------------------------------------------------------------------


def _bodies(eqn: JaxprEqn) -> Iterator[Any]:
    """The jaxprs that an equation holds, and those of an object that it holds.

    Such an object, JAX's CustomRoot, has parameters of its own, as an equation has.
    """
    for holder in (eqn, *eqn.params.values()):
        params = getattr(holder, "params", None)
        if isinstance(params, dict) and holds_jaxpr(params.values()):
            yield from (body for _, body in sub_jaxprs(holder))


def fresh(avals: Sequence[Any]) -> tuple[Var, ...]:
    """New variables of these types."""
    return tuple(map(Var, avals))


def with_border(
    body: Any,
    invars: Sequence[Var],
    outvars: Sequence[Atom],
    eqns: Sequence[JaxprEqn] | None = None,
) -> Any:
    """A closed jaxpr with other arguments and results, and other equations if there are any."""
    debug = body.debug_info
    if (len(invars), len(outvars)) != (len(body.invars), len(body.outvars)):
        debug = debug._replace(arg_names=None, result_paths=None)
    return extend.replace_jaxpr(
        body,
        constvars=body.constvars,
        consts=body.consts,
        invars=list(invars),
        outvars=list(outvars),
        eqns=list(body.eqns if eqns is None else eqns),
        debug_info=debug,
    )


def zeros(avals: Sequence[Any], like: JaxprEqn) -> Any:
    """A closed jaxpr without arguments or constants that gives zeros of these types."""
    varies = any(map(extend.varying_axes, avals))
    mesh = like.ctx.cur_abstract_mesh
    with extend.inside_shard_map(mesh, frozenset(), True) if varies else nullcontext():
        return extend.traced_like(like, lambda: list(map(_zero, avals)), ())


def _zero(aval: Any) -> Any:
    explicit = AxisType.Explicit in aval.sharding.mesh.axis_types
    sharding = aval.sharding if explicit else None
    value = lax.full(aval.shape, 0, aval.dtype, sharding=sharding)
    varying = extend.varying_axes(aval)
    return lax.pcast(value, tuple(varying), to="varying") if varying else value


# --- shards -------------------------------------------------------------------------------------


def shard_axes(shards: ShardMap, avals: Sequence[Any]) -> list[tuple[Any, ...]]:
    """For each type, the axes that this `shard_map` splits over and a value may differ over."""
    params = shards.eqn.params
    result = []
    for aval in avals:
        over = params["newly_manual_axes"]
        if params["check_vma"]:
            over = over & extend.varying_axes(aval)
        result.append(tuple(axis for axis in shards.mesh.axis_names if axis in over))
    return result


def shard_specs(axes: Sequence[tuple[Any, ...]]) -> tuple[PartitionSpec, ...]:
    """The specs of values that have their shards on a new leading axis, where they differ."""
    return tuple(PartitionSpec(each) if each else PartitionSpec() for each in axes)


def reshaped(operand: Atom, result: Var, like: JaxprEqn) -> JaxprEqn:
    """The equation that adds a leading axis of length one, or takes it away."""
    made = extend.traced_like(
        like, lambda x: [lax.reshape(x, result.aval.shape)], [Var(operand.aval)]
    )
    (eqn,) = made.eqns
    return eqn.replace(invars=[operand], outvars=[result])
