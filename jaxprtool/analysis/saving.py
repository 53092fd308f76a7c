"""Choose the named values to save within a memory budget, to minimize recomputation.

The names are those of `jax.checkpoint` with `save_only_these_names`. The choice is an integer
program, a knapsack problem in which the worth of a value depends on the other saved values, as in
Checkmate (Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization",
MLSys 2020, arXiv:1910.02653):

    minimize    sum of operations[e] * run[e]
    subject to  run[e] = 1                          if e computes a residual
                run[d] >= run[e]                    if e reads a result of d
                run[d] >= run[e] - save[name]       if e is the `name` equation of a result of d
                sum of bytes * save + sum of bytes * run of arguments <= budget

`save` is 0 or 1. `run` marks the equations and arguments that are needed again; it is 0 or 1
without a constraint. SciPy's `milp` (HiGHS) solves the program by branch and bound.

An argument is kept if a recomputed equation reads it. A value in a loop counts in all iterations,
and a carried value is recomputed from the first iteration on, unless each iteration saves it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from jaxprtool.analysis.cost.by_equation import Operations
from jaxprtool.analysis.cost.trip_counts import runs_of
from jaxprtool.ir.basics.reachability import reachable
from jaxprtool.ir.core.equations import size_of
from jaxprtool.ir.core.regions import regions
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.dataflow.dataflow import DataFlow, Value
from jaxprtool.jaxcompat import Atom, Jaxpr, JaxprEqn, Literal

#: Small costs, as fractions of all operations: of saving all values, of a name that the program
#: has, and of a new name. They break ties, so that a value is only named if that saves something.
_ALL_BYTES, _ONE_NAME, _NEW_NAME = 1e-2, 1e-3, 2e-3

#: The relative gap to the optimum at which the search stops, and the maximum number of nodes that
#: it visits. A time limit would make the choice depend on the machine.
_GAP, _NODES = 1e-3, 500


class Saving:
    """The integer program of the named values to save.

    Args:
        jaxpr: The open jaxpr of the forward pass, with `name` equations.
        residuals: Its results that the backward pass reads.
        given: The names that the user's program has.
    """

    def __init__(self, jaxpr: Jaxpr, residuals: list[Atom], given: Collection[str] = ()) -> None:
        self._given = given
        self._flow, self._operations = DataFlow(jaxpr), Operations()
        self._times = {jaxpr: 1}
        self._numbers: dict[Any, int] = {}
        self._work: list[int] = []
        #: The edges: a reader, the node it reads, and the name that cuts the edge if saved, or -1.
        self._edges: list[tuple[int, int, int]] = []
        self._arguments: dict[int, int] = {}
        #: The bytes that saving each name takes.
        self.bytes: dict[str, int] = {}
        self._order: dict[str, int] = {}
        self._todo: list[tuple[int, Value]] = []
        seeds = [self._number(jaxpr, atom) for atom in residuals if type(atom) is not Literal]
        self._seeds = [seed for seed in seeds if seed is not None]
        for number, (body, var) in self._todo:
            self._expand(number, body, var)

    def choose(self, budget: int) -> tuple[str, ...] | None:
        """Return the names to save within a budget in bytes, or None if no choice fits."""
        count, names = len(self._work), len(self._order)
        whole, sizes = sum(self._work) or 1, self._sizes()
        cost = np.concatenate([np.array(self._work, float) / whole, np.zeros(names)])
        cost += sizes / (sizes.sum() or 1) * _ALL_BYTES
        cost[count:] += [_ONE_NAME if name in self._given else _NEW_NAME for name in self._order]
        return self._solve(cost, budget)

    def least(self) -> tuple[str, ...]:
        """Return the names to save so that as few bytes as possible are kept."""
        sizes = self._sizes()
        found = self._solve(sizes / (sizes.sum() or 1), None)
        assert found is not None
        return found

    def kept(self, names: tuple[str, ...]) -> int:
        """Return the bytes that are kept if some names are saved: of values and arguments."""
        cut = {self._order[name] for name in names}
        after: dict[int, list[int]] = {}
        for reader, read, name in self._edges:
            if name not in cut:
                after.setdefault(reader, []).append(read)
        needed = set(reachable(self._seeds, lambda number: after.get(number, ())))
        arguments = sum(size for number, size in self._arguments.items() if number in needed)
        return arguments + sum(self.bytes[name] for name in names)

    # --- the dataflow graph -----------------------------------------------------------------------

    def _number(self, jaxpr: Jaxpr, atom: Atom) -> int | None:
        """Return the number of a value's node: an equation, an argument, or a result of a body.

        Returns None for a literal. A new node is queued for `_expand`.
        """
        if type(atom) is Literal:
            return None
        position = self._flow.definition(jaxpr, atom)
        eqn = None if position is None else jaxpr.eqns[position]
        plain = eqn is not None and regions(eqn) is None
        key = id(eqn) if plain else atom
        if key not in self._numbers:
            self._numbers[key] = len(self._work)
            work = self._operations.of(eqn) * self._runs(jaxpr) if eqn is not None and plain else 0
            self._work.append(work)
            self._todo.append((self._numbers[key], (jaxpr, atom)))
        return self._numbers[key]

    def _expand(self, number: int, jaxpr: Jaxpr, var: Any) -> None:
        """Add the edges from a node to the values that it reads."""
        position = self._flow.definition(jaxpr, var)
        if position is None:
            self._expand_argument(number, jaxpr, var)
            return
        eqn, name = jaxpr.eqns[position], -1
        if traits(eqn).names_value and "name" in eqn.params:
            label = str(eqn.params["name"])
            name = self._order.setdefault(label, len(self._order))
            size = size_of(var.aval, 0) * self._runs(jaxpr)
            self.bytes[label] = self.bytes.get(label, 0) + size
        self._read(number, self._sources(jaxpr, eqn, var), name)

    def _expand_argument(self, number: int, jaxpr: Jaxpr, var: Any) -> None:
        place = self._flow.argument(jaxpr, var)
        if place is None:
            return  # a constant
        if jaxpr is self._flow.top:
            self._arguments[number] = size_of(var.aval, 0)
            return
        for holder in self._flow.holders[jaxpr]:
            self._read(number, self._flow.origins(holder, place))

    def _sources(self, jaxpr: Jaxpr, eqn: JaxprEqn, var: Any) -> Iterator[tuple[Jaxpr, Atom]]:
        """Yield the values that a result of an equation is computed from."""
        held = regions(eqn)
        if held is None:
            yield from ((jaxpr, atom) for atom in eqn.invars)
            return
        yield from ((jaxpr, eqn.invars[i]) for i in held.predicates)
        for number, atom in held.sources()[eqn.outvars.index(var)]:
            yield held.jaxprs[number], atom

    def _read(self, reader: int, values: Any, name: int = -1) -> None:
        for jaxpr, atom in values:
            read = self._number(jaxpr, atom)
            if read is not None:
                self._edges.append((reader, read, name))

    def _runs(self, jaxpr: Jaxpr) -> int:
        """Return the number of times that a body runs; an unknown trip count counts as one."""
        if jaxpr not in self._times:
            times = 0
            for holder in self._flow.holders[jaxpr]:
                times += self._runs(holder.jaxpr) * runs_of(regions(holder.eqn))
            self._times[jaxpr] = times
        return self._times[jaxpr]

    # --- the integer program ----------------------------------------------------------------------

    def _sizes(self) -> Any:
        """Return the bytes of each variable of the program; only arguments and names have any."""
        sizes = np.zeros(len(self._work) + len(self._order))
        for number, size in self._arguments.items():
            sizes[number] = size
        for name, place in self._order.items():
            sizes[len(self._work) + place] = self.bytes[name]
        return sizes

    def _solve(self, cost: Any, budget: int | None) -> tuple[str, ...] | None:
        # Imported here because it is slow and seldom needed.
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        count, names = len(self._work), len(self._order)
        lower = np.zeros(count + names)
        lower[self._seeds] = 1
        is_integer = np.concatenate([np.zeros(count), np.ones(names)])
        constraints = []
        if self._edges:
            readers, read, cuts = np.array(self._edges).T
            rows = np.arange(len(self._edges))
            cut = cuts >= 0
            entries = np.concatenate([np.ones(len(rows)), -np.ones(len(rows)), np.ones(cut.sum())])
            places = (
                np.concatenate([rows, rows, rows[cut]]),
                np.concatenate([read, readers, count + cuts[cut]]),
            )
            edges = coo_array((entries, places), shape=(len(rows), count + names)).tocsr()
            constraints.append(LinearConstraint(edges, 0, np.inf))
        if budget is not None:
            unit = max(budget, 1)
            constraints.append(LinearConstraint(self._sizes()[None] / unit, -np.inf, budget / unit))
        options = {"mip_rel_gap": _GAP, "node_limit": _NODES}
        found = milp(
            cost,
            integrality=is_integer,
            bounds=Bounds(lower, 1),
            constraints=constraints,
            options=options,
        )
        if found.x is None:
            return None
        return tuple(name for name, place in self._order.items() if found.x[count + place] > 0.5)
