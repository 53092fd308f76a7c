"""The common traversal of reaping and planting: rewrite every body that sows a value.

A `Harvester` rewrites a body so that its sown values become additional results or arguments;
`Reaper` and `Planter` define this for `sow` and for each kind of loop, branch and call. A harvested
`sow` equation is removed, and its results are replaced in all readers. A body that several
equations share is rewritten once for each scope that it is in. Bodies and equations that sow
nothing stay the same objects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
    CustomJVP,
    JaxprEqn,
    Literal,
    Regions,
    ShardMap,
    Var,
    holds_jaxpr,
    named,
    regions,
    replace_jaxpr,
    scope_of,
    sow_p,
    sub_jaxprs,
)
from jaxprtool_harvest.sites import Path, Settings, Site, Sites

#: A site with the atoms of its values in the current body.
Found = tuple[Site, tuple[Atom, ...]]


@dataclass
class Work:
    """One body while it is rewritten: its new equations, the replacements of variables, its sites.

    `again` is True in bodies that a gradient recomputes (see `Site`).
    """

    scope: Path
    again: bool
    eqns: list[JaxprEqn] = field(default_factory=list)
    replaced: dict[Var, Atom] = field(default_factory=dict)
    found: dict[Path, list[Found]] = field(default_factory=dict)

    def atom(self, atom: Atom) -> Atom:
        return atom if type(atom) is Literal else self.replaced.get(atom, atom)

    def updated(self, eqn: JaxprEqn) -> JaxprEqn:
        """Return the equation with its operands after the rewriting so far."""
        operands = list(map(self.atom, eqn.invars))
        if all(new is old for new, old in zip(operands, eqn.invars, strict=True)):
            return eqn
        return eqn.replace(invars=operands)

    @property
    def sites(self) -> list[Found]:
        return [each for group in self.found.values() for each in group]


class Harvester(ABC):
    """The base class of reaping and planting; a subclass has a rule for each kind of equation."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self._rewritten: dict[Any, tuple[Any, Sites]] = {}
        self._sows: dict[Any, bool] = {}

    def body(self, body: Any, scope: Path = (), again: bool = False) -> tuple[Any, tuple]:
        """Return the rewritten closed jaxpr, and its sites, in the order of their flat values.

        Raises HarvestError for conflicting sown values, and UnsupportedError for values sown where
        they cannot be reached.
        """
        if not self._sows_within(body):
            return body, ()
        # In JAX 0.10 an open body is closed again whenever it is viewed: only the open one
        # persists.
        key = body if body.consts else extend.open_jaxpr(body), scope, again
        if key not in self._rewritten:
            self._rewritten[key] = self._rewrite(body, Work(scope, again))
        return self._rewritten[key]

    def _sows_within(self, body: Any) -> bool:
        """Return True if a body has a sow to rewrite, at any depth."""
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
        new = replace_jaxpr(body, invars=invars, outvars=outvars, eqns=work.eqns)
        return new, tuple(site for site, _ in found)

    def _sow(self, eqn: JaxprEqn, work: Work) -> None:
        path = (*work.scope, eqn.params["name"])
        if self.settings.take(eqn, path):
            values = self._harvest(eqn, Site.of(eqn, work.scope, work.again), work)
        else:
            values = eqn.invars[: len(eqn.outvars)]
        work.replaced.update(zip(eqn.outvars, values, strict=True))

    def _structured(self, eqn: JaxprEqn, work: Work) -> None:
        inside = regions(eqn)
        if inside is None:
            raise out_of_reach(eqn)
        if isinstance(inside.view, CustomJVP):
            return self._custom(inside.view, work)
        scope = scope_of(eqn)
        path = work.scope if scope is None else (*work.scope, scope)
        again = work.again or eqn.params.get("differentiated", False)
        pairs = [self.body(body, path, again) for body in inside.bodies]
        bodies, found = [body for body, _ in pairs], [sites for _, sites in pairs]
        for region, sites in zip(inside.regions, found, strict=True):
            if sites and region.is_predicate:
                raise UnsupportedError(
                    f"'{sites[0].name}' is sown in the condition of a while loop: "
                    f"{named(sites[0].eqn)}"
                )
        if inside.kind == "branch":
            return self._branch(inside, pairs, work)
        # Only one body may sow values.
        number, *others = [n for n, sites in enumerate(found) if sites] or [len(found) - 1]
        if others or (inside.edges.has_rule and found[number]):
            raise out_of_reach(eqn)
        if isinstance(inside.view, ShardMap):
            self._shard_map(inside.view, bodies[0], found[0], work)
        elif inside.kind == "loop":
            self._loop(inside, number, bodies, found[number], work)
        else:
            self._call(inside, number, bodies, found[number], work)

    # Defined by subclasses. Each method appends the equations that replace one equation.

    @abstractmethod
    def _border(self, invars: list[Var], outvars: list[Atom], flat: list[Any]) -> tuple:
        """Return the arguments and results of a body, with the flat values of its sites."""

    @abstractmethod
    def _harvest(self, eqn: JaxprEqn, site: Site, work: Work) -> Sequence[Atom]:
        """Return the atoms that replace the results of a harvested `sow`."""

    @abstractmethod
    def _call(
        self, inside: Regions, number: int, bodies: list[Any], sites: Sites, work: Work
    ) -> None:
        """Rewrite a call whose body of this number sows values."""

    @abstractmethod
    def _loop(
        self, inside: Regions, number: int, bodies: list[Any], sites: Sites, work: Work
    ) -> None:
        """Rewrite a loop whose body of this number sows values."""

    @abstractmethod
    def _branch(self, inside: Regions, branches: list[tuple[Any, Sites]], work: Work) -> None:
        """Rewrite a branch, some of whose bodies sow values."""

    @abstractmethod
    def _shard_map(self, shards: ShardMap, body: Any, sites: Sites, work: Work) -> None:
        """Rewrite a shard_map whose body sows values."""

    @abstractmethod
    def _custom(self, call: CustomJVP, work: Work) -> None:
        """Rewrite a call of a function with custom derivatives."""


def has_stacks(inside: Regions) -> bool:
    """Return True if a loop can slice operands and stack results, and its trip count is known."""
    edges = inside.edges
    return bool(edges.sliced and edges.stacked) and inside.view.trips is not None


def out_of_reach(eqn: JaxprEqn) -> UnsupportedError:
    """Return the error for an equation with a sown value that cannot be reached."""
    return UnsupportedError(f"a value is sown inside {named(eqn)}, where it cannot be reached")


# --- pieces of jaxprs ---------------------------------------------------------------------------


def _bodies(eqn: JaxprEqn) -> Iterator[Any]:
    """Yield the jaxprs that an equation holds, also in objects among its parameters.

    Such an object, as JAX's CustomRoot, has parameters like an equation.
    """
    for holder in (eqn, *eqn.params.values()):
        params = getattr(holder, "params", None)
        if isinstance(params, dict) and holds_jaxpr(params.values()):
            yield from (body for _, body in sub_jaxprs(holder))


def fresh(avals: Sequence[Any]) -> tuple[Var, ...]:
    """Return new variables of these types."""
    return tuple(map(Var, avals))


def zeros(avals: Sequence[Any], like: JaxprEqn) -> Any:
    """Return a closed jaxpr without arguments or constants that returns zeros of these types."""
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
    """Return, for each type, the manual axes of this `shard_map` over which a value may vary."""
    params = shards.eqn.params
    result = []
    for aval in avals:
        over = params["newly_manual_axes"]
        if params["check_vma"]:
            over = over & extend.varying_axes(aval)
        result.append(tuple(axis for axis in shards.mesh.axis_names if axis in over))
    return result


def shard_specs(axes: Sequence[tuple[Any, ...]]) -> tuple[PartitionSpec, ...]:
    """Return the specs of values whose shards, if they differ, are on a new leading axis."""
    return tuple(PartitionSpec(each) if each else PartitionSpec() for each in axes)


def reshaped(operand: Atom, result: Var, like: JaxprEqn) -> JaxprEqn:
    """Return the equation that adds a leading axis of length one, or removes it."""
    made = extend.traced_like(
        like, lambda x: [lax.reshape(x, result.aval.shape)], [Var(operand.aval)]
    )
    (eqn,) = made.eqns
    return eqn.replace(invars=[operand], outvars=[result])
