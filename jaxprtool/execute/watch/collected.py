"""Values of compiled bodies: collected under tracing and returned as further results.

A loop whose values take much memory runs in chunks of iterations whose values fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.execute.stepping.effects import has_external_effect
from jaxprtool.execute.stepping.iterations import Progress, advanced, put_at
from jaxprtool.execute.stepping.shards import on_shards
from jaxprtool.ir.core.equations import named
from jaxprtool.ir.core.structured import Call, Cond, CustomJVP, Scan, ShardMap, While, view
from jaxprtool.ir.evaluation.interpret import Interpreter, LoopOperands, bind
from jaxprtool.ir.programs.meshes import mesh_of
from jaxprtool.jaxcompat import AbstractRef, Aval, ClosedJaxpr, JaxprEqn

#: The limit in bytes of the values of one chunk.
ITERATION_BYTES = 1 << 25

#: The maximum number of iterations of a while loop in a chunk, since the memory for a full chunk is
#: cleared each time.
_WHILE_ITERATIONS = 1 << 8

#: On the CPU each equation is a separate kernel, which compiles faster than fused kernels that
#: return all values. "fusion-wrapper" is disabled too, since XLA otherwise transposes some results
#: of scans.
_CPU_OPTIONS = {
    "xla_disable_hlo_passes": "fusion",
    "xla_backend_optimization_level": 0,
}


@dataclass(frozen=True)
class Site:
    """A result of an equation in a compiled body, and the place of its values.

    Attributes:
        eqn: The equation.
        result: The index of the result.
        around: The equations between the compiled body and this one, outermost first.
        place: The position of the values among the collected ones. They have an axis for each loop
            of `around`.
        taken: For each `cond` in `around`, the position of the indices of the branches taken, and
            the index of this branch.
        offset: The offset of the iteration number: 1 in the condition of a `while`, which is
            computed at the end of the previous iteration.
    """

    eqn: JaxprEqn
    result: int
    around: tuple[JaxprEqn, ...]
    place: int
    taken: tuple[tuple[int, int], ...] = ()
    offset: int = 0


#: The most nested scans of which values are collected. Arrays of NumPy have at most 64 axes.
_MOST_LOOPS = 32

#: Decides which results of equations are watched.
Wanted = Callable[[JaxprEqn, int], bool]


@dataclass
class Collector(Interpreter):
    """Evaluates a jaxpr under tracing, and collects the values of equations.

    Attributes:
        wanted: Decides which results to collect.
        around: The enclosing equations.
        sites: The sites of the collected values.
        values: The values, and the indices of branches taken.
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
        if not isinstance(view(eqn), Scan | Cond | Call | CustomJVP):
            return self.evaluate(eqn, operands)
        around, self.around = self.around, (*self.around, eqn)
        results = super().equation(eqn, operands)
        self.around = around
        return self._noted(eqn, results)

    def inside(self, body: ClosedJaxpr, arguments: Sequence[Any]) -> tuple[list[Any], Collector]:
        """Return the results of a body of the current equation, and the collector of its values."""
        inner = Collector(self.wanted, self.around)
        return inner.run(body, arguments), inner

    def scan(self, scan: Scan, operands: list[Any]) -> list[Any]:
        if sum(isinstance(view(eqn), Scan) for eqn in self.around) > _MOST_LOOPS:
            raise UnsupportedError(
                f"the {named(scan.eqn)} is inside {_MOST_LOOPS} scans or more: its values would "
                "have an axis for each"
            )
        carry, ys, inner, values = _scanned(self, scan, LoopOperands.of(scan, operands))
        self.add(inner, values)
        return [*carry, *ys]

    def branch(self, cond: Cond, operands: list[Any]) -> list[Any]:
        number, last = operands[0].astype(jnp.int32), len(cond.branches) - 1
        # As in XLA, an invalid index selects the last branch.
        index = jnp.where((number < 0) | (number > last), last, number)
        number = len(self.values)
        self.values.append(index)
        inners, traced = zip(*(self._traced(b, operands[1:]) for b in cond.branches), strict=True)
        avals = [closed.out_avals[len(cond.outs) :] for closed in traced]

        def taken(i: int) -> Callable[..., Any]:
            def branch(*given: Any) -> Any:
                results = jaxcompat.jaxpr_as_fun(traced[i])(*given)
                outs, values = results[: len(cond.outs)], results[len(cond.outs) :]
                others = [[_zeros(aval) for aval in of_branch] for of_branch in avals]
                return outs, [*others[:i], values, *others[i + 1 :]]

            return branch

        branches = [taken(i) for i in range(len(cond.branches))]
        outs, values = jax.lax.switch(index, branches, *operands[1:])
        for i, (inner, of_branch) in enumerate(zip(inners, values, strict=True)):
            self.add(inner, of_branch, ((number, i),))
        return list(outs)

    def _traced(
        self, branch: ClosedJaxpr, operands: Sequence[Any]
    ) -> tuple[Collector, ClosedJaxpr]:
        """Return the collector of a branch, and its trace: results, then the collected values.

        Each branch is traced once, so that nested ones take linear time.
        """
        inner = Collector(self.wanted, self.around)

        def alone(*given: Any) -> list[Any]:
            return [*inner.run(branch, given), *inner.values]

        closed = jax.make_jaxpr(alone)(*operands)
        return inner, closed

    def add(
        self, inner: Collector, values: Sequence[Any], taken: tuple[tuple[int, int], ...] = ()
    ) -> None:
        """Add the sites collected in a body, with their `values`."""
        first = len(self.values)
        self.values += values
        for site in inner.sites:
            branches = (*taken, *((place + first, branch) for place, branch in site.taken))
            self.sites.append(replace(site, place=site.place + first, taken=branches))


def _scanned(
    run: Collector, scan: Scan, given: LoopOperands, length: int | None = None
) -> tuple[list[Any], list[Any], Collector, list[Any]]:
    """Return the carry, the stacked results, the collector and the values of a scan."""
    inner, count = Collector(run.wanted), len(given.carry)

    def one(carry: list[Any], rows: list[Any]) -> Any:
        nonlocal inner
        outs, inner = run.inside(scan.body, [*given.consts, *carry, *rows])
        return outs[:count], (outs[count:], inner.values)

    length, unroll = (scan.length, scan.unroll) if length is None else (length, 1)
    carry, (ys, values) = jax.lax.scan(one, given.carry, given.xs, length, scan.reverse, unroll)
    return carry, ys, inner, values


def _zeros(aval: Aval) -> Any:
    zeros = jnp.zeros(aval.shape, aval.dtype)
    axes = tuple(jaxcompat.varying_axes(aval))
    return jax.lax.pcast(zeros, axes, to="varying") if axes else zeros


def is_left_out(eqn: JaxprEqn) -> bool:
    """Return True if an equation is skipped: a call without results, such as a print."""
    return has_external_effect(eqn) and not eqn.outvars and view(eqn) is None


def is_stepped(eqn: JaxprEqn) -> bool:
    """Return True if an equation must not be compiled together with others.

    These are loops without a known number of iterations, and equations with refs, meshes or
    external effects.
    """
    held = view(eqn)
    if isinstance(held, While | ShardMap):
        return True
    avals = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
    if any(isinstance(aval, AbstractRef) or mesh_of(aval) is not None for aval in avals):
        return True
    return held is None and has_external_effect(eqn) and not is_left_out(eqn)


def _compiled(function: Callable[..., Any], operands: Iterable[Any], **options: Any) -> Any:
    """Return a function compiled for the devices of its operands."""
    devices = [d for x in operands if isinstance(x, jax.Array) for d in x.devices()]
    platform = devices[0].platform if devices else jax.default_backend()
    if platform == "cpu":
        options["compiler_options"] = _CPU_OPTIONS
    return jax.jit(function, **options)


class BodyValues:
    """A body compiled as a whole.

    Attributes:
        sites: The sites of its values.
    """

    def __init__(self, body: ClosedJaxpr, wanted: Wanted, operands: Sequence[Any]):
        self._body, self._wanted = body, wanted
        self.sites: list[Site] = []
        self._run = _compiled(self._results, operands)

    def __call__(self, operands: Sequence[Any]) -> Any:
        """Return the results, and the values in order of place."""
        return self._run(operands)

    def _results(self, operands: Sequence[Any]) -> Any:
        run = Collector(self._wanted)
        results = run.run(self._body, operands)
        self.sites = run.sites
        return results, run.values


class CompiledScan:
    """Compiled iterations of a scan.

    Attributes:
        sites: The sites of their values.
    """

    def __init__(self, scan: Scan, wanted: Wanted, given: LoopOperands):
        self._scan, self._wanted = scan, wanted
        self.sites: list[Site] = []
        self._run = _compiled(self._iterations, chain(*given), static_argnums=(0,))
        shapes = jax.eval_shape(lambda given: self._iterations(1, 0, given), given)
        self._at_a_time = _at_a_time(shapes[2], scan.length)

    def __call__(self, number: int, given: LoopOperands) -> Any:
        """Run iterations from `number` on.

        Returns the number of iterations run, the carry, whether there are more, their stacked
        results, and their values in order of place.
        """
        length = self._scan.length
        count = min(self._at_a_time, length - number)
        low = length - number - count if self._scan.reverse else number
        carry, ys, values = self._run(count, low, given)
        return count, carry, number + count < length, ys, values

    def _iterations(self, count: int, low: Any, given: LoopOperands) -> Any:
        if count != self._scan.length:
            xs = [jax.lax.dynamic_slice_in_dim(x, low, count) for x in given.xs]
            given = given._replace(xs=xs)
        carry, ys, run, values = _scanned(Collector(self._wanted), self._scan, given, count)
        self.sites = run.sites
        return carry, ys, values


class CompiledWhile:
    """Compiled iterations of a while loop.

    Attributes:
        sites: The sites of their values.
    """

    def __init__(self, loop: While, wanted: Wanted, given: LoopOperands):
        self._loop, self._wanted = loop, wanted
        self.sites: list[Site] = []
        self._run = _compiled(self._iterations, chain(*given))

    def __call__(self, number: int, given: LoopOperands) -> Any:
        """Run iterations; see `CompiledScan`. There may be more values than iterations run."""
        ran, carry, more, values = self._run(given)
        return int(ran), carry, bool(more), [], values

    def _advanced(self, given: LoopOperands, before: Progress) -> tuple[Progress, list[Any]]:
        """Return the progress after one iteration, and its values."""
        whole, self.sites = Collector(self._wanted), []

        def run(body: ClosedJaxpr, arguments: list[Any]) -> list[Any]:
            inner, known = Collector(self._wanted), len(whole.sites)
            outs = inner.run(body, arguments)
            whole.add(inner, inner.values)
            offset = int(body is self._loop.cond)
            self.sites += (replace(site, offset=offset) for site in whole.sites[known:])
            return outs

        return advanced(self._loop, given, before, run), whole.values

    def _iterations(self, given: LoopOperands) -> Any:
        start = Progress(jnp.int32(0), given.carry, [], jnp.array(True))
        shapes = jax.eval_shape(self._advanced, given, start)[1]
        most = _at_a_time(shapes, _WHILE_ITERATIONS)
        kept = [jnp.zeros((most, *x.shape), x.dtype) for x in shapes]

        def one(state: Any) -> Any:
            before, kept = state
            after, values = self._advanced(given, before)
            return after, [put_at(*each, before.number) for each in zip(kept, values, strict=True)]

        end, kept = jax.lax.while_loop(
            lambda state: state[0].more & (state[0].number < most), one, (start, kept)
        )
        return end.number, end.carry, end.more, kept


def _at_a_time(shapes: Any, most: int) -> int:
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    return max(1, min(most, ITERATION_BYTES // max(size, 1)))


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

    outs, values = _compiled(on_shards(held, collecting), operands)(*operands)
    return list(outs), sites, values
