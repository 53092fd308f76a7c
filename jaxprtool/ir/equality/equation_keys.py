"""Number equations, values and jaxprs so that equal ones of two programs have equal numbers.

The two programs may come from different processes, files or releases of JAX. Equations are equal as
defined in `ir.equality.equivalence`, whatever their calls are named. (`ir.equality.structural_key`
is for the bodies of one program; it is faster, and compares by identity where it must.) The keys
are numbers, so that keys made of keys stay small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.records import fields_of
from jaxprtool.ir.core.structured import holds_jaxpr
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.equality.equivalence import readable_params, same_rules
from jaxprtool.ir.equality.function_keys import parameter_key
from jaxprtool.ir.equality.value_keys import (
    array_digest,
    effect_kinds,
    literal_key,
    type_key,
)
from jaxprtool.ir.programs.trees import same_tree
from jaxprtool.ir.rewriting.custom_rules import has_rule, rule_key
from jaxprtool.ir.rewriting.high import without_live_objects
from jaxprtool.jaxcompat import AnyJaxpr, Aval, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Params, Var


class MatchLevel(IntEnum):
    """The degree of similarity of two equations.

    Attributes:
        SAME: They compute the same on operands of the same types, and so do their bodies.
        SIMILAR: They are the same except for dtypes, constants and the contents of their bodies.
        KIND: They have the same primitive.
    """

    SAME = 0
    SIMILAR = 1
    KIND = 2


#: Parameters that only name the body of an equation, and do not affect its results.
_LABELS = frozenset({"name", "name_and_src_info", "debug_info"})


def is_label(eqn: JaxprEqn, parameter: str) -> bool:
    """Return True if a parameter of an equation with a body only names the body."""
    return parameter in _LABELS and holds_jaxpr(eqn.params.values())


def is_dtype(value: object) -> bool:
    """Return True if the value of a parameter is a dtype or None, which means the default."""
    return (
        value is None
        or isinstance(value, np.dtype)
        or (isinstance(value, type) and issubclass(value, np.generic))
    )


def is_cast(eqn: JaxprEqn) -> bool:
    """Return True if an equation casts its operand to another dtype or weak type."""
    if traits(eqn).gives != "cast" or len(eqn.invars) != 1:
        return False
    dtypes = [(v.aval.dtype, v.aval.weak_type) for v in (eqn.invars[0], eqn.outvars[0])]
    return dtypes[0] != dtypes[1]


def parameters(eqn: JaxprEqn) -> Params:
    """Return an equation's parameters as plain data; see `equivalence.readable_params`."""
    read = readable_params.get(eqn.primitive.name)
    return eqn.params if read is None else read(eqn)


class EquationKeys:
    """A numbering of types, values, equations and jaxprs: equal ones have the same number.

    Objects are cached by `id`, so they must outlive this, or be given to `keep`.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._types: dict[int, tuple[int, int]] = {}
        self._literals: dict[int, int] = {}
        self._jaxprs: dict[int, int] = {}
        self._own: list[dict[int, int]] = [{}, {}, {}]
        self._trees: list[PyTreeDef] = []
        self._rules: dict[Hashable, int] = {}
        self._with_rules: dict[Hashable, list[tuple[JaxprEqn, int]]] = {}
        self._kept: list[object] = []

    def keep(self, numbered: object) -> None:
        """Keep an object alive as long as its number, which is cached by `id`."""
        self._kept.append(numbered)

    def number(self, key: Hashable) -> int:
        """Return the number that represents a key."""
        return self._numbers.setdefault(key, len(self._numbers))

    # --- types and values -------------------------------------------------------------------------

    def type_number(self, aval: Aval, shape_only: bool = False) -> int:
        """Return the number of an aval, or of its shape. Symbolic dimensions compare by name."""
        found = self._types.get(id(aval))
        if found is None:
            shape = tuple(map(str, getattr(aval, "shape", ())))
            found = self.number(("type", type_key(aval))), self.number(("shape", shape))
            self._types[id(aval)] = found
        return found[shape_only]

    def literal(self, literal: Literal) -> int:
        """Return the number of a literal, by its type and value."""
        found = self._literals.get(id(literal))
        if found is None:
            found = self._literals[id(literal)] = self.number(("literal", literal_key(literal)))
        return found

    def value(self, value: Any) -> Hashable:
        """Return a key for the value of a parameter or constant, the same in every process.

        The few values that have no such key are compared by identity.
        """
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, Jaxpr | ClosedJaxpr):
            return "jaxpr", self.jaxpr(value)
        if isinstance(value, PyTreeDef):
            return "tree", self._tree(value)
        if isinstance(value, tuple | list):
            return "sequence", *map(self.value, value)
        if isinstance(value, Mapping):
            return "mapping", *sorted((str(k), self.value(v)) for k, v in value.items())
        if isinstance(value, np.ndarray | jax.Array):
            digest = array_digest(value)
            return ("object", id(value)) if digest is None else ("array", *digest)
        if isinstance(value, jaxcompat.AbstractRef):
            return "type", type_key(value)
        if (record := fields_of(value)) is not None:
            return "record", record[0], self.value(record[1])
        key = parameter_key(value)
        return ("object", id(value)) if key is None else key

    def value_or_bodies(self, value: Any) -> Hashable:
        """Return a key for the value of a parameter in which all jaxprs count as equal."""
        if isinstance(value, Jaxpr | ClosedJaxpr):
            return "jaxpr"
        if isinstance(value, tuple | list):
            return "sequence", *map(self.value_or_bodies, value)
        return self.value(value)

    def _tree(self, tree: PyTreeDef) -> int:
        for i, known in enumerate(self._trees):
            if same_tree(known, tree):
                return i
        self._trees.append(tree)
        return len(self._trees) - 1

    # --- equations --------------------------------------------------------------------------------

    def equation(self, eqn: JaxprEqn, level: MatchLevel) -> int:
        """Return the number of an equation, equal for equations that have this much in common.

        Operands do not count, except that literals must be equal for equations to be the SAME.
        """
        known = self._own[level]
        found = known.get(id(eqn))
        if found is None:
            key = (self._same, self._similar, self._kind)[level](eqn)
            found = known[id(eqn)] = self.number((level, *key))
        return found

    def _kind(self, eqn: JaxprEqn) -> tuple[Hashable, ...]:
        return (eqn.primitive.name,)

    def _similar(self, eqn: JaxprEqn) -> tuple[Hashable, ...]:
        if is_cast(eqn):
            return "cast", self.type_number(eqn.outvars[0].aval, shape_only=True)
        own = [
            (name, self.value(value))
            for name, value in sorted(parameters(eqn).items())
            if not (is_label(eqn, name) or is_dtype(value) or holds_jaxpr((value,)))
        ]
        shapes = [self.type_number(v.aval, shape_only=True) for v in (*eqn.invars, *eqn.outvars)]
        return eqn.primitive.name, len(eqn.invars), *own, *shapes

    def _same(self, eqn: JaxprEqn) -> tuple[Hashable, ...]:
        eqn = without_live_objects(eqn)
        # To JAX, a parameter that is None is the same as one left out.
        own = [
            (name, value if type(value) is str else self.value(value))
            for name, value in sorted(parameters(eqn).items())
            if value is not None and not is_label(eqn, name)
        ]
        atoms = [
            self.literal(v) if type(v) is Literal else self.type_number(v.aval) for v in eqn.invars
        ]
        results = [self.type_number(v.aval) for v in eqn.outvars]
        return (
            eqn.primitive.name,
            tuple(own),
            tuple(atoms),
            tuple(results),
            effect_kinds(eqn),
            id(eqn.ctx),
            self._rule(eqn) if has_rule(eqn) else None,
        )

    def _rule(self, eqn: JaxprEqn) -> int:
        """Return the number of the rules of a custom call. They are compared as jaxprs."""
        key = rule_key(eqn)
        if key not in self._rules:
            types = [self.type_number(v.aval) for v in (*eqn.invars, *eqn.outvars)]
            call = self.value(parameters(eqn)["call_jaxpr"])
            alike = self._with_rules.setdefault((eqn.primitive.name, call, *types), [])
            number = next((n for other, n in alike if same_rules(other, eqn)), None)
            if number is None:
                number = self.number(("rule", len(self._rules)))
                alike.append((eqn, number))
            self._rules[key] = number
        return self._rules[key]

    # --- jaxprs -----------------------------------------------------------------------------------

    def jaxpr(self, jaxpr: AnyJaxpr) -> int:
        """Return the number of a jaxpr, equal for jaxprs that differ only in names and order."""
        found = self._jaxprs.get(id(jaxpr))
        if found is None:
            body = jaxcompat.open_jaxpr(jaxpr)
            origins = Origins(self, jaxpr, [("argument", i) for i in range(len(body.invars))])
            types = tuple(self.type_number(v.aval) for v in (*body.constvars, *body.invars))
            results = tuple(map(origins.atom, body.outvars))
            each = frozenset(Counter(origins.equations).items())
            found = self.number(("body", types, results, origins.effects, each))
            self._jaxprs[id(jaxpr)] = found
        return found

    def constants(self, jaxpr: AnyJaxpr) -> list[Hashable]:
        """Return a key for each constant of a jaxpr: its value, or its position if unknown."""
        body = jaxcompat.open_jaxpr(jaxpr)
        held = tuple(getattr(jaxpr, "consts", ()))
        if len(held) != len(body.constvars):
            return [("constant", i) for i in range(len(body.constvars))]
        return [
            ("value", self.type_number(var.aval), self.value(value))
            for var, value in zip(body.constvars, held, strict=True)
        ]


class Origins:
    """Value numbering of a jaxpr: each value is numbered by how it is computed.

    With `MatchLevel.SAME`, values with the same number are equal.

    Args:
        keys: The numbering of equations.
        jaxpr: The jaxpr, open or closed.
        arguments: A key for each argument.
        level: Which equations have the same number if their operands do.

    Attributes:
        equations: The number of each equation.
        values: The numbers of variables, by `id`.
        effects: The number of the whole sequence of effects.
    """

    def __init__(
        self,
        keys: EquationKeys,
        jaxpr: AnyJaxpr,
        arguments: Sequence[Hashable],
        level: MatchLevel = MatchLevel.SAME,
    ):
        self._keys = keys
        number, body = keys.number, jaxcompat.open_jaxpr(jaxpr)
        same = level is MatchLevel.SAME
        names = keys.constants(jaxpr) if same else [("constant",)] * len(body.constvars)
        borders = [
            *zip(body.constvars, names, strict=True),
            *zip(body.invars, arguments, strict=True),
        ]
        self.values: dict[int, int] = {id(var): number(name) for var, name in borders}
        self.equations: list[int] = []
        self.effects = 0
        values = self.values
        for eqn in body.eqns:
            operands = [
                None if type(v) is Literal else values.get(id(v), id(v)) for v in eqn.invars
            ]
            parts: tuple[Any, ...] = (keys.equation(eqn, level), *operands)
            if same and eqn.effects and not jaxcompat.only_names_axes(eqn.effects):
                self.effects = number(("effect", self.effects, parts))
                parts = (*parts, "after", self.effects)
            key = number(parts)
            self.equations.append(key)
            if not same and operands and operands[0] is not None and is_cast(eqn):
                values[id(eqn.outvars[0])] = operands[0]  # a cast keeps the value
                continue
            for i, var in enumerate(eqn.outvars):
                values[id(var)] = number((key, "result", i)) if i else key

    def atom(self, atom: Var | Literal) -> int:
        """Return the number of a variable or literal."""
        if type(atom) is Literal:
            return self._keys.literal(atom)
        return self.values.get(id(atom), id(atom))
