"""Programs with symbolic sizes, each of which can also be traced at concrete sizes.

`symbolic_programs(case)` yields those of a case, such as JAX's own test programs. For arguments
`f32[3,4], f32[4]`, one symbol replaces all axes of one size, `f32[n,4], f32[4]` and `f32[3,n],
f32[n]`, or a single axis, and two symbols replace two sizes, `f32[m,n], f32[n]`. `symbolic_plans()`
draws random programs whose types, at every depth, have symbols in place of 3, of 2, or of both
(`SymbolicPlan.programs`).

Only programs that JAX can trace are yielded. Many functions need concrete sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.program import Program
from jaxprtool.loading.trace import trace
from tests.programs.build import arguments_of, function_of
from tests.programs.case import Case
from tests.programs.ops import Type, corners_alone
from tests.programs.plans import Const, Plan
from tests.programs.random_programs import random_programs
from tests.programs.values import on_host

#: A size for each symbol: a number, or the symbol itself.
Sizes = Mapping[str, Any]

#: An axis of a flat argument.
Axis = tuple[int, int]

#: The maximum number of axis choices for one case.
MOST_CHOICES = 6


@dataclass(frozen=True)
class SymbolicProgram:
    """A function traced with symbols, which can be traced and called at concrete sizes.

    `choices` has five choices of a size for each symbol. The first has the original sizes.
    `traced_at` raises what `trace` raises: JAX may not be able to trace at a size.
    """

    name: str
    program: Program
    choices: tuple[dict[str, int], ...]
    traced_at: Callable[[Sizes], Program]
    arguments: Callable[[Sizes], list[Any]]
    setting: Callable[[], AbstractContextManager[Any]]


def _symbols(names: Sequence[str]) -> dict[str, Any]:
    return dict(zip(names, jax.export.symbolic_shape(",".join(names)), strict=True))


# --- cases ------------------------------------------------------------------------------------


def symbolic_programs(case: Case) -> Iterator[SymbolicProgram]:
    """Yield the programs with symbolic sizes that JAX can trace for a case."""
    with case.setting():
        for axes in _choices(case.arguments())[:MOST_CHOICES]:
            try:
                found = symbolic_program(case, axes)
            except JaxprToolError:
                continue
            if found.program.symbols:
                yield found


def symbolic_program(case: Case, axes: dict[Axis, str]) -> SymbolicProgram:
    """Return the program of a case with symbols for the sizes of some axes."""
    found = _AtSizes(case, axes)
    program = found.traced(_symbols(list(dict.fromkeys(axes.values()))))
    leaves = case.arguments()
    return SymbolicProgram(
        f"{case.name} of {[str(v) for v in program.in_avals]}",
        program,
        _five({name: jnp.shape(leaves[i])[d] for (i, d), name in axes.items()}),
        found.traced,
        found.arguments,
        case.setting,
    )


def _choices(leaves: Sequence[Any]) -> list[dict[Axis, str]]:
    """Yield the axes to replace by symbols: those of one size, of two sizes, single ones, two."""
    by_size: dict[int, list[Axis]] = {}
    for i, leaf in enumerate(leaves):
        for axis, size in enumerate(jnp.shape(leaf)):
            if size > 0:
                by_size.setdefault(size, []).append((i, axis))
    groups = list(by_size.values())
    alone = [[axis] for axes in groups for axis in axes]
    ones = [dict.fromkeys(axes, "n") for axes in (*groups, *alone)]
    pairs = [
        dict.fromkeys(axes, "n") | dict.fromkeys(others, "m")
        for several in (groups, alone)
        for axes, others in pairwise(several)
    ]
    found: list[dict[Axis, str]] = []
    for i in range(max(len(ones), len(pairs))):
        found += [each[i] for each in (ones, pairs) if i < len(each) and each[i] not in found]
    return found


def _five(firsts: Mapping[str, int]) -> tuple[dict[str, int], ...]:
    """Return five choices of sizes. Two symbols differ in how they are paired."""
    several = [(name, (n, 1, 2, n + 1, 2 * n + 1)) for name, n in firsts.items()]
    return tuple(
        {name: sizes[(j + 2 * i * (j > 0)) % 5] for i, (name, sizes) in enumerate(several)}
        for j in range(5)
    )


@dataclass(frozen=True)
class _AtSizes:
    """A case with some axes of variable size."""

    case: Case
    axes: dict[Axis, str]

    def traced(self, sizes: Sizes) -> Program:
        leaves, tree = jax.tree.flatten((self.case.args, self.case.kwargs))
        for i in {i for i, _ in self.axes}:
            aval = jax.typeof(leaves[i])
            shape = [sizes.get(self.axes.get((i, d), ""), n) for d, n in enumerate(aval.shape)]
            weak = getattr(aval, "weak_type", False)
            leaves[i] = jax.ShapeDtypeStruct(tuple(shape), aval.dtype, weak_type=weak)
        args, kwargs = jax.tree.unflatten(tree, leaves)
        with self.case.setting():
            return trace(self.case.fun, *args, **kwargs)

    def arguments(self, sizes: Sizes) -> list[Any]:
        """Return the case's arguments, with rows repeated or left out."""
        leaves = list(self.case.arguments())
        for (i, axis), name in self.axes.items():
            rows = np.arange(sizes[name]) % jnp.shape(leaves[i])[axis]
            leaves[i] = _taken(on_host(leaves[i]), rows, axis)
        return leaves


def _taken(x: Any, rows: np.ndarray, axis: int) -> Any:
    """Return rows of an array, by NumPy if possible, since XLA compiles once per shape."""
    return (np if isinstance(x, np.ndarray) else jnp).take(x, rows, axis)


# --- random programs ----------------------------------------------------------------------------

_SIZES = ((3, 2), (1, 4), (2, 1), (4, 3), (7, 5))


def symbolic_plans() -> st.SearchStrategy[SymbolicPlan]:
    """Random programs, to be traced with symbols in place of some sizes."""
    return random_programs().map(lambda drawn: SymbolicPlan(drawn.plan))


@dataclass(frozen=True)
class SymbolicPlan:
    """A drawn plan, whose types may have symbols in place of sizes."""

    plan: Plan

    def case(self) -> SymbolicPlan:
        """Return what a proof over random programs takes."""
        return self

    def programs(self) -> Iterator[SymbolicProgram]:
        """Yield those that JAX can trace with a symbol n for 3, m for 2, or both."""
        for places in ({3: "n"}, {2: "m"}, {3: "n", 2: "m"}):
            names = list(places.values())
            try:
                program = self._traced(places, _symbols(names))
            except JaxprToolError:
                continue
            if len(program.symbols) == len(names):
                yield SymbolicProgram(
                    f"random: {[str(v) for v in program.in_avals]}",
                    program,
                    tuple({name: {"n": n, "m": m}[name] for name in names} for n, m in _SIZES),
                    lambda sizes, places=places: self._traced(places, sizes),
                    lambda sizes, places=places: list(arguments_of(self._plan(places, sizes))),
                    self._case(self.plan).setting,
                )

    def _plan(self, places: Mapping[int, str], sizes: Sizes) -> Plan:
        return with_sizes(self.plan, {n: sizes[name] for n, name in places.items()})

    def _case(self, plan: Plan) -> Case:
        return Case("random", function_of(plan), (), x64=plan.x64)

    def _traced(self, places: Mapping[int, str], sizes: Sizes) -> Program:
        plan = self._plan(places, sizes)
        case = self._case(plan)
        key = jax.random.key(0).dtype
        with corners_alone(), case.setting():
            types = [
                jax.ShapeDtypeStruct(t.shape, key if t.kind == "k" else t.jax_dtype)
                for t in plan.body.inputs
            ]
            return trace(case.fun, *types)


def with_sizes(plan: Plan, sizes: Mapping[int, Any]) -> Plan:
    """Return a plan with other sizes, maybe symbols, at every depth. Its constants are scalars."""

    def mapped(value: Any) -> Any:
        if isinstance(value, Const):
            return replace(value, type=Type(value.type.dtype))
        if isinstance(value, Type):
            return Type(value.dtype, tuple(sizes.get(n, n) for n in value.shape))
        if isinstance(value, tuple):
            return tuple(map(mapped, value))
        if is_dataclass(value) and not isinstance(value, type):
            changes = {f.name: mapped(getattr(value, f.name)) for f in fields(value)}
            return replace(value, **changes)
        return value

    new = mapped(plan)
    assert isinstance(new, Plan)
    return new
