"""Values of bodies that are compiled: collected while JAX traces, and given as further results.

A loop whose values take much memory runs so many rounds at a time that those of all of them fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxprtool.execute.effects import leaves_the_program
from jaxprtool.ir.interpret import Interpreter, bind
from jaxprtool.ir.meshes import mesh_of
from jaxprtool.ir.structured import Call, Cond, CustomJVP, Scan, ShardMap, While, view
from jaxprtool.jaxcompat import AbstractRef, ClosedJaxpr, JaxprEqn

#: The values of rounds that run at a time take no more bytes.
ROUND_BYTES = 1 << 25

#: So many rounds of a while loop run at a time: memory for the values of all is cleared for each.
_WHILE_ROUNDS = 1 << 8

#: On the CPU each equation stays a kernel of its own, which compiles faster than fused ones that
#: give all their values. Without "fusion-wrapper", too, XLA transposes some results of scans.
_CPU_OPTIONS = {
    "xla_disable_hlo_passes": "fusion",
    "xla_backend_optimization_level": 0,
}


@dataclass(frozen=True)
class Site:
    """A result of an equation of a compiled body, and where its values are.

    Attributes:
        eqn: The equation.
        result: Which of its results.
        around: The equations between the compiled body and this one, the outermost first.
        place: The position of the values among those that are collected. They have an axis for
            each loop of `around`.
        taken: Of each `cond` in `around` the position of the numbers of the branches that were
            taken, and the number of this branch.
        offset: What is added to the number of a round: 1 in the condition of a `while`, which is
            computed at the end of the round before.
    """

    eqn: JaxprEqn
    result: int
    around: tuple[JaxprEqn, ...]
    place: int
    taken: tuple[tuple[int, int], ...] = ()
    offset: int = 0


#: Decides which results of equations are watched.
Wanted = Callable[[JaxprEqn, int], bool]


@dataclass
class Collector(Interpreter):
    """Evaluates a jaxpr while JAX traces, and keeps the values of equations.

    Attributes:
        wanted: Which results of them.
        around: The equations around.
        sites: Whose values were collected.
        values: The values, and the numbers of branches that were taken.
    """

    wanted: Wanted
    around: tuple[JaxprEqn, ...] = ()
    sites: list[Site] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        if is_left_out(eqn):
            return []
        return self._noted(eqn, bind(eqn, operands))

    def _noted(self, eqn: JaxprEqn, results: Sequence[Any]) -> Sequence[Any]:
        for i, x in enumerate(results):
            if self.wanted(eqn, i):
                self.sites.append(Site(eqn, i, self.around, len(self.values)))
                self.values.append(x)
        return results

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        held = view(eqn)
        if not isinstance(held, Scan | Cond | Call | CustomJVP):
            return self.evaluate(eqn, operands)
        around, self.around = self.around, (*self.around, eqn)
        if isinstance(held, Scan):
            results = self._scanned(held, operands)
        elif isinstance(held, Cond):
            results = self._branched(held, operands)
        else:
            results = self.run(held.body, operands)
        self.around = around
        return self._noted(eqn, results)

    def inside(self, body: ClosedJaxpr, arguments: Sequence[Any]) -> tuple[list[Any], Collector]:
        """Return the results of a body in the equation that is being evaluated, and its values."""
        inner = Collector(self.wanted, self.around)
        return inner.run(body, arguments), inner

    def _scanned(self, scan: Scan, operands: list[Any]) -> list[Any]:
        n, k = len(scan.consts), len(scan.carry)
        inner = Collector(self.wanted)

        def one(carry: Any, rows: Any) -> Any:
            nonlocal inner
            outs, inner = self.inside(scan.body, [*operands[:n], *carry, *rows])
            return outs[:k], (outs[k:], inner.values)

        carry, (ys, values) = jax.lax.scan(
            one, operands[n : n + k], operands[n + k :], scan.length, scan.reverse, scan.unroll
        )
        self.add(inner, values)
        return [*carry, *ys]

    def _branched(self, cond: Cond, operands: list[Any]) -> list[Any]:
        index = jnp.clip(operands[0].astype(jnp.int32), 0, len(cond.branches) - 1)
        number = len(self.values)
        self.values.append(index)
        known: list[Collector] = []
        shapes = []
        for branch in cond.branches:

            def alone(*given: Any, branch: Any = branch) -> Any:
                outs, inner = self.inside(branch, given)
                known.append(inner)
                return outs, inner.values

            shapes.append(jax.eval_shape(alone, *operands[1:])[1])

        def taken(i: int) -> Callable[..., Any]:
            def branch(*given: Any) -> Any:
                outs, inner = self.inside(cond.branches[i], given)
                others = [[_zeros(x) for x in each] for each in shapes]
                return outs, [*others[:i], inner.values, *others[i + 1 :]]

            return branch

        branches = [taken(i) for i in range(len(cond.branches))]
        outs, values = jax.lax.switch(index, branches, *operands[1:])
        for i, (inner, of_branch) in enumerate(zip(known, values, strict=True)):
            self.add(inner, of_branch, ((number, i),))
        return list(outs)

    def add(
        self, inner: Collector, values: Sequence[Any], taken: tuple[tuple[int, int], ...] = ()
    ) -> None:
        """Take over what was collected in a body, of which `values` are the values."""
        first = len(self.values)
        self.values += values
        for site in inner.sites:
            branches = (*taken, *((place + first, branch) for place, branch in site.taken))
            self.sites.append(replace(site, place=site.place + first, taken=branches))


def _zeros(aval: Any) -> Any:
    zeros = jnp.zeros(aval.shape, aval.dtype)
    axes = tuple(getattr(aval, "vma", None) or ())
    return jax.lax.pcast(zeros, axes, to="varying") if axes else zeros


def is_left_out(eqn: JaxprEqn) -> bool:
    """Return True if an equation is a call that gives nothing, as a print: it is not made."""
    return leaves_the_program(eqn) and not eqn.outvars and view(eqn) is None


def is_stepped(eqn: JaxprEqn) -> bool:
    """Return True if an equation is not compiled together with others.

    These are loops without a known number of rounds, and what refs, meshes or a world outside of
    the program take part in.
    """
    held = view(eqn)
    if isinstance(held, While | ShardMap):
        return True
    avals = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
    if any(isinstance(aval, AbstractRef) or mesh_of(aval) is not None for aval in avals):
        return True
    return held is None and leaves_the_program(eqn) and not is_left_out(eqn)


def _compiled(function: Callable[..., Any], operands: Sequence[Any], **options: Any) -> Any:
    """Return a function that is compiled where its operands are."""
    devices = [d for x in operands if isinstance(x, jax.Array) for d in x.devices()]
    platform = devices[0].platform if devices else jax.default_backend()
    if platform == "cpu":
        options["compiler_options"] = _CPU_OPTIONS
    return jax.jit(function, **options)


class BodyValues:
    """A body that is compiled as a whole.

    Attributes:
        sites: Whose values it gives.
    """

    def __init__(self, body: ClosedJaxpr, wanted: Wanted, operands: Sequence[Any]):
        self._body, self._wanted = body, wanted
        self.sites: list[Site] = []
        self._run = _compiled(self._results, operands)

    def __call__(self, operands: Sequence[Any]) -> Any:
        """Return the results and the values, in order of place."""
        return self._run(operands)

    def _results(self, operands: Sequence[Any]) -> Any:
        run = Collector(self._wanted)
        results = run.run(self._body, operands)
        self.sites = run.sites
        return results, run.values


class ScanRounds:
    """The rounds of a scan, compiled.

    Attributes:
        sites: Whose values they give.
        at_a_time: How many rounds run at a time.
    """

    def __init__(self, scan: Scan, wanted: Wanted, operands: Sequence[Any]):
        self._scan, self._wanted = scan, wanted
        self._n, self._k = len(scan.consts), len(scan.carry)
        self._run = _compiled(self._rounds, operands, static_argnums=(0,))
        self.sites: list[Site] = []
        shapes = jax.eval_shape(lambda *given: self._rounds(1, 0, given), *operands)
        self.at_a_time = _at_a_time(shapes[2], scan.length)

    def __call__(self, number: int, first: int, operands: Sequence[Any]) -> Any:
        """Return the carry, the stacked results and the values of rounds, in order of place."""
        scan = self._scan
        low = scan.length - first - number if scan.reverse else first
        return self._run(number, low, operands)

    def _rounds(self, number: int, low: Any, operands: Sequence[Any]) -> Any:
        scan, n, k = self._scan, self._n, self._k
        carry, xs = operands[n : n + k], operands[n + k :]
        if number != scan.length:
            xs = [jax.lax.dynamic_slice_in_dim(x, low, number) for x in xs]

        def one(carry: Any, rows: Any) -> Any:
            run = Collector(self._wanted)
            outs = run.run(scan.body, [*operands[:n], *carry, *rows])
            self.sites = run.sites
            return outs[:k], (outs[k:], run.values)

        carry, (ys, values) = jax.lax.scan(
            one, list(carry), list(xs), number, reverse=scan.reverse, unroll=1
        )
        return carry, ys, values


class WhileRounds:
    """The rounds of a while loop, compiled.

    Attributes:
        sites: Whose values they give.
    """

    def __init__(self, loop: While, wanted: Wanted, operands: Sequence[Any]):
        self._loop, self._wanted = loop, wanted
        self.sites: list[Site] = []
        self._run = _compiled(self._rounds, operands)

    def __call__(self, operands: Sequence[Any]) -> Any:
        """Return how many rounds ran, the carry, whether there are more, and their values."""
        return self._run(operands)

    def _one(self, deciding: Any, consts: Any, carry: Any) -> Any:
        run = Collector(self._wanted)
        new = run.run(self._loop.body, [*consts, *carry])
        asked = Collector(self._wanted)
        (more,) = asked.run(self._loop.cond, [*deciding, *new])
        whole = Collector(self._wanted)
        whole.add(run, run.values)
        whole.add(asked, asked.values)
        count = len(run.sites)
        self.sites = whole.sites[:count]
        self.sites += (replace(site, offset=1) for site in whole.sites[count:])
        return new, more, whole.values

    def _rounds(self, operands: Sequence[Any]) -> Any:
        c, b = len(self._loop.cond_consts), len(self._loop.body_consts)
        deciding, consts, carry = operands[:c], operands[c : c + b], list(operands[c + b :])
        shapes = jax.eval_shape(self._one, deciding, consts, carry)[2]
        most = _at_a_time(shapes, _WHILE_ROUNDS)
        kept = [jnp.zeros((most, *x.shape), x.dtype) for x in shapes]

        def one(state: Any) -> Any:
            number, carry, _, kept = state
            new, more, values = self._one(deciding, consts, carry)
            kept = [
                jax.lax.dynamic_update_index_in_dim(all_, x, number, 0)
                for all_, x in zip(kept, values, strict=True)
            ]
            return number + 1, new, more, kept

        state = jnp.int32(0), carry, jnp.array(True), kept
        return jax.lax.while_loop(lambda state: state[2] & (state[0] < most), one, state)


def _at_a_time(shapes: Any, most: int) -> int:
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    return max(1, min(most, ROUND_BYTES // max(size, 1)))


def shard_map_values(
    held: ShardMap, wanted: Wanted, operands: Sequence[Any]
) -> tuple[list[Any], list[Site], list[Any]]:
    """Return the results of a `shard_map`, and the values of its equations, device by device."""
    sites: list[Site] = []

    def collecting(*shards: Any) -> Any:
        nonlocal sites
        run = Collector(wanted)
        results = run.run(held.body, shards)
        sites = run.sites
        return results, [jnp.asarray(x)[None] for x in run.values]

    everywhere = PartitionSpec(held.mesh.axis_names)
    shards = jax.shard_map(
        collecting,
        mesh=held.mesh,
        in_specs=tuple(held.in_specs),
        out_specs=(list(held.out_specs), everywhere),
        check_vma=held.eqn.params["check_vma"],
    )
    outs, values = _compiled(shards, operands)(*operands)
    return list(outs), sites, values
