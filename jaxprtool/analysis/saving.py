"""Which named values to save: those that fit into a budget and spare the most recomputation.

What `jax.checkpoint` with `save_only_these_names` does is a problem of integers, a knapsack in
which the worth of a value depends on what else is saved, as in Checkmate (Jain et al., "Checkmate:
Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020, arXiv:1910.02653):

    minimise    sum of operations[e] * run[e]
    with        run[e] = 1                          e gives a residual
                run[d] >= run[e]                    e reads what d gives
                run[d] >= run[e] - save[name]       e is the `name` equation of a value that d gives
                sum of bytes * save + sum of bytes * run of arguments <= budget

`save` is 0 or 1, and `run`, which equations and arguments are needed again, is so by itself.
SciPy's `milp`, which is HiGHS, solves it by branch and bound.

An argument is kept if something that is computed again reads it. A value in a loop counts all
rounds, and what a loop carries is needed as long as it is not saved in each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.analysis.cost.by_equation import Operations
from jaxprtool.analysis.cost.rounds import rounds_of
from jaxprtool.ir.dataflow import DataFlow, Value
from jaxprtool.ir.equations import size_of
from jaxprtool.ir.regions import regions
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import Atom, Jaxpr, JaxprEqn, Literal

#: Beside the operations that it spares: what saving all values costs, as a part of all operations,
#: and what one more name does, if it is there and if it is new. So a value is only named if that
#: spares something.
_ALL_BYTES, _ONE_NAME, _NEW_NAME = 1e-2, 1e-3, 2e-3

#: How near to the best a choice has to be, and after how many nodes of the search the best one so
#: far is taken: not after so much time, which would choose by how fast a machine is.
_GAP, _NODES = 1e-3, 500


class Saving:
    """What is computed again in the backward half of a program, by which named values are saved.

    Args:
        jaxpr: The open jaxpr of the forward half, with `name` equations.
        residuals: Its results that the backward half takes.
        given: The names that the user's program has.
    """

    def __init__(self, jaxpr: Jaxpr, residuals: list[Atom], given: Collection[str] = ()) -> None:
        self._given = given
        self._flow, self._operations = DataFlow(jaxpr), Operations()
        self._times = {jaxpr: 1}
        self._numbers: dict[Any, int] = {}
        self._work: list[int] = []
        #: For each edge its ends, and the name whose being saved cuts it, or -1.
        self._edges: list[tuple[int, int, int]] = []
        self._arguments: dict[int, int] = {}
        #: The bytes that saving each name keeps.
        self.bytes: dict[str, int] = {}
        self._order: dict[str, int] = {}
        self._todo: list[tuple[int, Value]] = []
        seeds = [self._number(jaxpr, atom) for atom in residuals if type(atom) is not Literal]
        self._seeds = [seed for seed in seeds if seed is not None]
        for number, (body, var) in self._todo:
            self._expand(number, body, var)

    def choose(self, budget: int) -> tuple[str, ...] | None:
        """Return the names to save within a number of bytes; None if no choice is."""
        count, names = len(self._work), len(self._order)
        whole, sizes = sum(self._work) or 1, self._sizes()
        cost = np.concatenate([np.array(self._work, float) / whole, np.zeros(names)])
        cost += sizes / (sizes.sum() or 1) * _ALL_BYTES
        cost[count:] += [_ONE_NAME if name in self._given else _NEW_NAME for name in self._order]
        return self._solve(cost, budget)

    def least(self) -> tuple[str, ...]:
        """Return the names to save so that the fewest bytes are kept."""
        sizes = self._sizes()
        found = self._solve(sizes / (sizes.sum() or 1), None)
        assert found is not None
        return found

    def kept(self, names: tuple[str, ...]) -> int:
        """Return how many bytes are kept, by this model, with some names saved."""
        cut = {self._order[name] for name in names}
        after: dict[int, list[int]] = {}
        for reader, read, name in self._edges:
            if name not in cut:
                after.setdefault(reader, []).append(read)
        todo, seen = list(self._seeds), set(self._seeds)
        while todo:
            fresh = set(after.get(todo.pop(), ())) - seen
            seen |= fresh
            todo += fresh
        arguments = sum(size for number, size in self._arguments.items() if number in seen)
        return arguments + sum(self.bytes[name] for name in names)

    # --- the graph of what is read ----------------------------------------------------------------

    def _number(self, jaxpr: Jaxpr, atom: Atom) -> int | None:
        """Return the number of what gives a value: an equation, an argument, the end of a body."""
        if type(atom) is Literal:
            return None
        position = self._flow.binder(jaxpr, atom)
        eqn = None if position is None else jaxpr.eqns[position]
        plain = eqn is not None and regions(eqn) is None
        key = id(eqn) if plain else atom
        if key not in self._numbers:
            self._numbers[key] = len(self._work)
            work = (
                self._operations.of(eqn) * self._rounds(jaxpr) if eqn is not None and plain else 0
            )
            self._work.append(work)
            self._todo.append((self._numbers[key], (jaxpr, atom)))
        return self._numbers[key]

    def _expand(self, number: int, jaxpr: Jaxpr, var: Any) -> None:
        position = self._flow.binder(jaxpr, var)
        if position is None:
            self._expand_argument(number, jaxpr, var)
            return
        eqn, name = jaxpr.eqns[position], -1
        if traits(eqn).names_value and "name" in eqn.params:
            label = str(eqn.params["name"])
            name = self._order.setdefault(label, len(self._order))
            size = size_of(var.aval, 0) * self._rounds(jaxpr)
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
        """Yield what a value is computed from."""
        held = regions(eqn)
        if held is None:
            yield from ((jaxpr, atom) for atom in eqn.invars)
            return
        yield from ((jaxpr, eqn.invars[i]) for i in held.deciding)
        for number, atom in held.sources()[eqn.outvars.index(var)]:
            yield jaxcompat.open_jaxpr(held.bodies[number]), atom

    def _read(self, reader: int, values: Any, name: int = -1) -> None:
        for jaxpr, atom in values:
            read = self._number(jaxpr, atom)
            if read is not None:
                self._edges.append((reader, read, name))

    def _rounds(self, jaxpr: Jaxpr) -> int:
        """Return how often a body runs in all; loops whose rounds are not known count one."""
        if jaxpr not in self._times:
            times = 0
            for holder in self._flow.holders[jaxpr]:
                held = regions(holder.eqn)
                rounds = None if held is None else rounds_of(held)
                times += self._rounds(holder.jaxpr) * (1 if rounds is None else rounds)
            self._times[jaxpr] = times
        return self._times[jaxpr]

    # --- the problem of integers ------------------------------------------------------------------

    def _sizes(self) -> Any:
        """Return the bytes of each variable of the problem: arguments and names have some."""
        sizes = np.zeros(len(self._work) + len(self._order))
        for number, size in self._arguments.items():
            sizes[number] = size
        for name, place in self._order.items():
            sizes[len(self._work) + place] = self.bytes[name]
        return sizes

    def _solve(self, cost: Any, budget: int | None) -> tuple[str, ...] | None:
        # Seldom needed, and slow to import.
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        count, names = len(self._work), len(self._order)
        lower = np.zeros(count + names)
        lower[self._seeds] = 1
        kinds = np.concatenate([np.zeros(count), np.ones(names)])
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
            integrality=kinds,
            bounds=Bounds(lower, 1),
            constraints=constraints,
            options=options,
        )
        if found.x is None:
            return None
        return tuple(name for name, place in self._order.items() if found.x[count + place] > 0.5)
