"""The cost of one call of a Pallas kernel: operations by unit, blocks that are copied, and memory.

    cost = kernel_cost(eqn)
    cost.most.flops, cost.products                   # 17179869184, {'bf16': 17179869184}
    cost.vmem_bytes, cost.traffic                    # 3145728, (100663296, 100663296)

The body is counted once for each step of the grid (`analysis.grids`). If the predicate of a branch
depends on the step alone, as that of `pl.when(pl.program_id(2) == 0)`, the branch counts in the
steps that take it; otherwise in no step at least, and in all at most. Scalars are not counted: a
unit of their own computes them. What cannot be counted, such as a copy that the kernel itself
starts, is named, and the figures are lower bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.analysis.devices import Bound, DeviceSpec
from jaxprtool.analysis.grids import GridSteps, Scalars
from jaxprtool.commands.cost.rules import Work, cost_rules, product_of, total, trip_count, work_of
from jaxprtool.ir.equations import size_in_bytes
from jaxprtool.ir.kernel_calls import KernelCall, kernel_call
from jaxprtool.ir.regions import Cond, Regions, regions, run_jaxprs
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import Atom, Jaxpr, JaxprEqn, Var

# --- equations ------------------------------------------------------------------------------------
# The equations of a kernel's body, and how often each runs in a call.


class KernelRuns(NamedTuple):
    """How often a part of a kernel's body runs in a call.

    Attributes:
        steps: The number of steps of the grid; 1 if it is known at run time only.
        mask: Whether it runs in each step; None if it does in all of them.
        is_certain: False if it is in a branch whose predicate is unknown, so that it may not run.
        times: The runs in a step: the product of the trip counts of the loops around it.
        per_round: Whether a trip count is unknown, and counts as 1.
    """

    steps: Any
    mask: np.ndarray | None = None
    is_certain: bool = True
    times: Any = 1
    per_round: bool = False

    @property
    def most(self) -> Any:
        """The runs in a call, at most."""
        return (self.steps if self.mask is None else int(self.mask.sum())) * self.times

    @property
    def least(self) -> Any:
        """The runs in a call, at least."""
        return self.most if self.is_certain and not self.per_round else 0


class KernelEquation(NamedTuple):
    """An equation of a kernel's body, at any depth.

    Attributes:
        path: The equations around it in the body, the outermost first.
        eqn: The equation. One with bodies does not count; their equations do.
        runs: How often it runs in a call.
        refs: The Ref of the kernel that each variable of the body around it is.
    """

    path: tuple[JaxprEqn, ...]
    eqn: JaxprEqn
    runs: KernelRuns
    refs: Mapping[Var, Var]


def kernel_equations(grid: GridSteps) -> Iterator[KernelEquation]:
    """Yield the equations of a kernel's body that run, at every depth, in order."""
    runs = KernelRuns(1 if grid.steps is None else grid.steps, per_round=grid.steps is None)
    jaxpr = jaxcompat.open_jaxpr(grid.kernel.body)
    refs = {var: var for var in (*jaxpr.constvars, *jaxpr.invars)}
    yield from _equations(grid, _KernelBody(jaxpr, {}, runs, (), refs))


class _KernelBody(NamedTuple):
    """A body in a kernel: its known scalars, its runs, the equations around it, and its Refs."""

    jaxpr: Jaxpr
    scalars: Scalars
    runs: KernelRuns
    path: tuple[JaxprEqn, ...]
    refs: Mapping[Var, Var]


def _equations(grid: GridSteps, body: _KernelBody) -> Iterator[KernelEquation]:
    for eqn in body.jaxpr.eqns:
        yield KernelEquation(body.path, eqn, body.runs, body.refs)
        for inner in _bodies(grid, eqn, body):
            yield from _equations(grid, inner)
        grid.evaluate(eqn, body.scalars)


def _bodies(grid: GridSteps, eqn: JaxprEqn, around: _KernelBody) -> Iterator[_KernelBody]:
    """Yield the bodies of an equation that run."""
    path, control = (*around.path, eqn), regions(eqn)
    if control is not None:
        for number, jaxpr in enumerate(control.jaxprs):
            runs = _runs_inside(grid, control, number, around.scalars, around.runs)
            if runs.mask is None or runs.mask.any():
                operands = [eqn.invars[i] for i in control.regions[number].ins]
                scalars = _arguments(grid, control, number, around.scalars)
                refs = _refs(jaxpr.invars, operands, around.refs)
                yield _KernelBody(jaxpr, scalars, runs, path, refs)
    elif cost_rules.get(eqn.primitive.name) is None:
        for _, inner in run_jaxprs(eqn):
            jaxpr = jaxcompat.open_jaxpr(inner)
            refs = _refs((*jaxpr.constvars, *jaxpr.invars), eqn.invars, around.refs)
            yield _KernelBody(jaxpr, {}, around.runs, path, refs)


def _refs(
    arguments: Sequence[Var], operands: Sequence[Atom], refs: Mapping[Var, Var]
) -> dict[Var, Var]:
    """Return the Refs of the kernel that the arguments of a body are."""
    pairs = zip(arguments, operands, strict=False)  # the other arguments are Refs of its own
    return {var: refs[atom] for var, atom in pairs if isinstance(atom, Var) and atom in refs}


def _runs_inside(
    grid: GridSteps, control: Regions, number: int, scalars: Scalars, runs: KernelRuns
) -> KernelRuns:
    """Return how often a body of a loop, branch or call runs."""
    if control.kind == "loop":
        trips = trip_count(control)
        is_unknown = trips is None
        return runs._replace(
            times=runs.times * (1 if is_unknown else trips), per_round=runs.per_round or is_unknown
        )
    if not isinstance(control.view, Cond):
        return runs._replace(is_certain=runs.is_certain and control.kind != "branch")
    index = grid.value(control.view.index, scalars)
    if index is None:
        return runs._replace(is_certain=False)
    taken = np.clip(index.astype(np.int64), 0, len(control.bodies) - 1) == number
    return runs._replace(mask=taken if runs.mask is None else taken & runs.mask)


def _arguments(grid: GridSteps, control: Regions, number: int, scalars: Scalars) -> Scalars:
    """Return the arguments of a body that are known in each step."""
    region = control.regions[number]
    arguments = zip(control.jaxprs[number].invars, region.ins, region.loop_invariant, strict=True)
    values = {
        var: grid.value(control.eqn.invars[position], scalars)
        for var, position, is_same in arguments
        if is_same
    }
    return {var: value for var, value in values.items() if value is not None}


# --- cost -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class KernelCost:
    """The cost of one call of a kernel.

    Attributes:
        grid: The steps of the grid.
        equations: The equations of the body with a cost: the cost in a call at least and at most,
            without bytes, and the precision of a product (`rules.product_of`).
        uncounted: What is not counted: the number of equations of a primitive without a cost, and
            "grid" if its steps are not enumerated (`analysis.grids`).
    """

    grid: GridSteps
    equations: tuple[tuple[KernelEquation, Work, Work, str], ...]
    uncounted: Mapping[str, int]

    @property
    def kernel(self) -> KernelCall:
        """The kernel."""
        return self.grid.kernel

    @cached_property
    def least(self) -> Work:
        """Its operations, at least."""
        return total([Work(), *(least for _, least, _, _ in self.equations)])

    @cached_property
    def most(self) -> Work:
        """Its operations, at most, with one iteration of each loop whose trip count is unknown."""
        return total([Work(), *(most for _, _, most, _ in self.equations)])

    @cached_property
    def products(self) -> dict[str, Any]:
        """The operations of matrix products by precision, at most."""
        return self._products(False)

    @cached_property
    def least_products(self) -> dict[str, Any]:
        """The operations of matrix products by precision, at least."""
        return self._products(True)

    def _products(self, at_least: bool) -> dict[str, Any]:
        products = Counter[str]()
        for _, least, most, product in self.equations:
            if product:
                products[product] += (least if at_least else most).flops
        return dict(products)

    @cached_property
    def vector_flops(self) -> Any:
        """The operations that only the vector unit computes, at least.

        Transcendentals and casts are not among them: a TPU has other units for these.
        """
        return sum(
            least.flops
            for equation, least, _, product in self.equations
            if not product and traits(equation.eqn).gives != "cast"
        )

    @property
    def vmem_bytes(self) -> Any:
        """The bytes of all blocks and the scratch in the vector memory of a TPU, at least."""
        return self.grid.vmem_bytes

    def traffic(self, kind: str) -> tuple[Any, Any]:
        """Return the bytes that blocks of a kind are copied, at least and at most."""
        parts = [part.steps.bytes for part in self.grid.parts if part.steps and part.kind == kind]
        least, most = [n for n, _ in parts], [n for _, n in parts]
        return sum(least), None if None in most else sum(most)

    def touched(self, kind: str) -> Any:
        """Return the bytes of the parts of arrays that some block has, each counted once."""
        parts = [part.steps for part in self.grid.parts if part.steps and part.kind == kind]
        return sum(steps.touched_bytes for steps in parts)

    def bound(self, device: DeviceSpec) -> Bound:
        """Return a lower bound of the time of a call. Sizes must be numbers.

        The units compute at the same time as blocks are copied. An array that fits in the memory of
        the device's cores may be there already, and is copied once, as on a GPU, whose order of
        steps and caches are unknown.
        """
        products = self.least_products.items()
        bounds = [
            Bound(sum(flops / device.rate(name) for name, flops in products), "matrix unit"),
            Bound(self.vector_flops / device.vector, "vector unit"),
            Bound(self._copied(device) / device.bandwidth, "memory"),
        ]
        return max(bounds, key=lambda bound: bound.seconds)

    def _copied(self, device: DeviceSpec) -> Any:
        size = 0
        for part in self.grid.parts:
            if part.steps is not None:
                once, array = part.steps.touched_bytes, size_in_bytes(part.steps.block.array)
                fits = device.vmem is None or array <= device.vmem
                size += once if fits else part.steps.bytes[0]
        return size


def kernel_cost(eqn: JaxprEqn, in_order: bool | None = None) -> KernelCost | None:
    """Return the cost of a call of a kernel; None for other equations.

    Also returns None if the equation comes from a file that describes too little of it.

    Args:
        eqn: The equation.
        in_order: Whether the steps of the grid run one after another; see `GridSteps`.
    """
    kernel = kernel_call(eqn)
    if kernel is None:
        return None
    grid, uncounted = GridSteps(kernel, in_order), Counter[str]()
    equations = []
    for inner in kernel_equations(grid):
        work = _work(inner.eqn)
        if work is None:
            uncounted[inner.eqn.primitive.name] += 1
        elif work.flops or work.transcendentals or work.random_numbers:
            runs, product = inner.runs, product_of(inner.eqn)
            equations.append((inner, work.times(runs.least), work.times(runs.most), product))
    if grid.count is None:
        uncounted["grid"] += 1
    return KernelCost(grid, tuple(equations), uncounted)


def counted_kernel(eqn: JaxprEqn) -> KernelCost | None:
    """Return the cost of a call of a kernel; None if the author's estimate counts instead.

    It does if a part of the body cannot be counted, or if a file describes too little of it.
    """
    cost = kernel_cost(eqn)
    has_estimate = eqn.params.get("cost_estimate") is not None
    return None if cost is None or (cost.uncounted and has_estimate) else cost


def _work(eqn: JaxprEqn) -> Work | None:
    """Return the operations of one run of an equation; None if they are unknown."""
    has_bodies = regions(eqn) is not None
    if has_bodies or all(getattr(v.aval, "shape", None) == () for v in (*eqn.invars, *eqn.outvars)):
        return Work()
    if cost_rules.get(eqn.primitive.name) is None and any(True for _ in run_jaxprs(eqn)):
        return Work()
    work = work_of(eqn)
    return None if work is None else work._replace(bytes_read=0, bytes_written=0)
