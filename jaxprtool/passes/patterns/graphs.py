"""Dataflow graphs: a pattern, and a body of a program, indexed alike.

Both are lists of equations with, for each variable, the equation that defines it. Both track values
filled with one number: literals, scalar constants, and broadcasts of these. JAX moves these about,
into constants or out of loops, so they are compared by value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from itertools import compress
from typing import Any

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.caches import cached_method
from jaxprtool.ir.core.equations import free_variables, is_array, needed_equations, variables
from jaxprtool.ir.core.regions import regions
from jaxprtool.ir.core.structured import ShardMap, holds_jaxpr, sub_jaxprs
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.dataflow.def_use import DefUse
from jaxprtool.ir.equality.value_keys import same_array
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Aval, ClosedJaxpr, JaxprEqn, Literal, Var


class DataflowGraph(DefUse):
    """The equations of a jaxpr, with the definitions and uses of its variables.

    `known` has the arguments of the jaxpr that are filled with one number, with that number.
    """

    def __init__(self, jaxpr: AnyJaxpr, known: Mapping[Var, np.generic | None] | None = None):
        body = jaxcompat.open_jaxpr(jaxpr)
        super().__init__(body.eqns)
        self.inputs: list[Var] = list(body.invars)
        self.outputs: list[Atom] = list(body.outvars)
        self.results = set(variables(self.outputs))
        consts = jaxpr.consts if isinstance(jaxpr, jaxcompat.ClosedJaxpr) else ()
        #: The values of its constants; those of an open jaxpr are not known.
        self.constants: dict[Var, Any] = dict(zip(body.constvars, consts, strict=False))
        self.known: Mapping[Var, np.generic | None] = known or {}

    @cached_property
    def by_primitive(self) -> dict[str, list[int]]:
        """The positions of the equations of each primitive, in order."""
        found: dict[str, list[int]] = defaultdict(list)
        for i, eqn in enumerate(self.eqns):
            found[eqn.primitive.name].append(i)
        return dict(found)

    @cached_property
    def dead(self) -> frozenset[int]:
        """The positions of dead equations; gradients are full of them."""
        needed = set(map(id, needed_equations(self.eqns, self.outputs, _has_effects)))
        return frozenset(i for i, eqn in enumerate(self.eqns) if id(eqn) not in needed)

    def dead_after(self, removed: frozenset[int]) -> set[int]:
        """Return the dead equations that depend on results of these equations."""
        found: set[int] = set()
        todo = list(removed)
        while todo:
            for v in self.eqns[todo.pop()].outvars:
                new = [i for i in self.readers(v) if i in self.dead and i not in found]
                found.update(new)
                todo += new
        return found - removed

    def number(self, atom: Atom) -> Any:
        """Return the number that fills a value, as a NumPy scalar; None if unknown."""
        if type(atom) is Literal:
            return np.asarray(atom.val).astype(atom.aval.dtype)[()]
        return self._number(atom)

    def value(self, atom: Atom) -> Any:
        """Return the number that fills a value, or a constant array; None if unknown."""
        number = self.number(atom)
        return number if number is not None else self.constants.get(atom)

    @cached_method
    def _number(self, var: Var) -> Any:
        if var in self.known:
            return self.known[var]
        if var in self.constants:
            value = self.constants[var]
            if getattr(var.aval, "shape", None) == () and _is_plain(var.aval):
                return np.asarray(value).astype(var.aval.dtype)[()]
            return None
        eqn = self.equation(var)
        if eqn is None:
            return None
        moves = traits(eqn).gives in ("layout", "part")
        if not (moves or eqn.primitive.name == "convert_element_type") or len(eqn.invars) != 1:
            return None
        number = self.number(eqn.invars[0])
        dtype = var.aval.dtype
        if number is None or number.dtype == dtype:
            return number
        # Of conversions to another type those of integers are exact, or wrap as NumPy's do.
        integers = np.issubdtype(number.dtype, np.integer) and np.issubdtype(dtype, np.integer)
        return number.astype(dtype) if integers else None


class Pattern(DataflowGraph):
    """A pattern's graph, without equations that its results do not need.

    `root` is the equation at which a search starts: the last one.
    """

    def __init__(self, closed: ClosedJaxpr):
        super().__init__(closed)
        varying: set[Var] = set(self.inputs)
        for eqn in self.eqns:
            if any(v in varying for v in eqn.invars if type(v) is not Literal):
                varying.update(eqn.outvars)
        #: Which results are computed from arguments: the others are arguments, or constants.
        self.computed = [
            type(v) is not Literal and v in varying and v not in self.inputs for v in self.outputs
        ]
        computed = compress(self.outputs, self.computed)
        self.eqns = needed_equations(self.eqns, computed, _has_effects)
        used = free_variables(self.eqns)
        self.used_inputs = [v in used for v in self.inputs]
        self.root = len(self.eqns) - 1
        #: The equations that depend on no argument.
        self.constant_positions = [
            i for i, eqn in enumerate(self.eqns) if not any(v in varying for v in eqn.outvars)
        ]

    @cached_property
    def needed(self) -> frozenset[str]:
        """The primitives that a body must contain to have a match."""
        numbers = (i for i, eqn in enumerate(self.eqns) if self.number(eqn.outvars[0]) is None)
        return frozenset(self.eqns[i].primitive.name for i in numbers)

    @cached_property
    def skeleton(self) -> Hashable:
        """The graph without its types and parameters: a key for a first, rough search."""
        number = {v: i for i, v in enumerate(self.inputs)}
        rows = []
        for eqn in self.eqns:
            operands = [number.get(v, -1) if type(v) is not Literal else -1 for v in eqn.invars]
            rows.append((eqn.primitive.name, tuple(operands), len(eqn.outvars)))
            for v in eqn.outvars:
                number[v] = len(number)
        outs = [number[v] for v, flag in zip(self.outputs, self.computed, strict=True) if flag]
        return tuple(rows), tuple(outs)

    def is_connected(self) -> bool:
        """Return True if each equation can be reached from the root through shared values."""
        reached: set[Var] = set()
        near, left = [self.eqns[self.root]], self.eqns[: self.root]
        while near:
            reached.update(v for eqn in near for v in _variables(eqn))
            near = [eqn for eqn in left if not reached.isdisjoint(_variables(eqn))]
            left = [eqn for eqn in left if reached.isdisjoint(_variables(eqn))]
        return not left


def _variables(eqn: JaxprEqn) -> list[Var]:
    return variables((*eqn.invars, *eqn.outvars))


def _has_effects(eqn: JaxprEqn) -> bool:
    return bool(eqn.effects)


def _is_plain(aval: Aval) -> bool:
    return is_array(aval) and isinstance(aval.dtype, np.dtype)


# --- numbers passed to bodies ------------------------------------------------------------------


def known_arguments(holders: Mapping[AnyJaxpr, Sequence[JaxprEqn]]) -> dict[Var, np.generic | None]:
    """Return the arguments of bodies, each with the number that always fills it, or None.

    A loop gets its constants, and a call its operands, from outside; where these are known to be
    filled with a number, so is the argument. `holders` has the equations in each body that hold
    bodies, as `bodies_in` returns them.
    """
    known: dict[Var, np.generic | None] = {}
    changed = True
    while changed:  # a number becomes unknown if callers differ, and so do those derived from it
        changed = False
        for body, eqns in holders.items():
            graph = DataflowGraph(body, known)
            for eqn in eqns:
                for var, atom in _arguments(eqn):
                    number = None if atom is None else graph.number(atom)
                    before = known.setdefault(var, number)
                    if before is not None and not same_number(before, number):
                        known[var] = None
                        changed = True
    return known


def bodies_in(jaxpr: AnyJaxpr) -> dict[AnyJaxpr, list[JaxprEqn]]:
    """Return a jaxpr and all bodies in it, outer before inner, with their structured equations."""
    found: dict[AnyJaxpr, list[JaxprEqn]] = {}
    todo = [jaxpr]
    for body in todo:
        if body not in found:
            eqns = [e for e in body.eqns if e.params and holds_jaxpr(e.params.values())]
            found[body] = eqns
            todo += [inner for eqn in eqns for _, inner in sub_jaxprs(eqn)]
    return found


def _arguments(eqn: JaxprEqn) -> list[tuple[Var, Atom | None]]:
    """Return the arguments of an equation's bodies, with the operand each equals, or None."""
    inside = regions(eqn)
    if inside is None or isinstance(inside.view, ShardMap):
        return []
    return [
        (var, eqn.invars[i] if is_invariant else None)
        for body, region in zip(inside.bodies, inside.regions, strict=True)
        for var, i, is_invariant in zip(body.invars, region.ins, region.loop_invariant, strict=True)
    ]


def same_number(a: np.generic, b: np.generic | None) -> bool:
    """Return True if two NumPy scalars are equal to the bit; False if the second is None."""
    return b is not None and same_array(a, b)
