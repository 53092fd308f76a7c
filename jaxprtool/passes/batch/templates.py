"""A rule's work, done once for all equations that are alike.

The equations of a program have few signatures: what an equation is but for the names of its
operands and its place in the source. For each, the batching rule is traced once, to a *template*
of the few equations that it makes. To batch an equation is then to look its template up and to
write it down with the equation's own operands.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.ir.structured import holds_jaxpr, sub_jaxprs
from jaxprtool.jaxcompat import Atom, JaxprEqn, Literal, Primitive, Var
from jaxprtool.passes.batch.axis import Axis, Dim
from jaxprtool.passes.batch.table import batch_rules, jaxs_rule
from jaxprtool.passes.dce import dce_body


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """An equation of a template. `inputs` are literals, or numbers of values: the operands come
    first, then the constants, then the results of the steps in order."""

    primitive: Primitive
    params: dict[str, Any]
    effects: Any
    ctx: Any
    inputs: tuple[Any, ...]
    avals: tuple[Any, ...]
    #: Whether it has one result.
    single: bool


@dataclass(frozen=True, eq=False, slots=True)
class Template:
    """The equations that take an equation's place; `outs` are its results, as `inputs` of a step,
    and `kinds` those of the results. `binders` are the variables that effects on refs name. If
    the operands go to a single equation and its results are the template's, that is `alone`."""

    consts: tuple[Any, ...]
    steps: tuple[Step, ...]
    outs: tuple[Any, ...]
    kinds: tuple[int, ...]
    binders: tuple[Var, ...]
    alone: Step | None


def trace_rule(
    eqn: JaxprEqn, avals: Sequence[Any], dims: Sequence[Dim], templates: Templates
) -> Template:
    """The template of an equation, whose operands are of these types and mapped at `dims`.

    Raises what its rule raises.
    """
    primitive, axis = eqn.primitive, templates.axis

    def call(*operands: Any) -> tuple[Sequence[Any], Sequence[Dim]]:
        rule = batch_rules.get(primitive.name)
        made = rule and rule(axis, primitive, operands, dims, eqn.params)
        results, out_dims = made or jaxs_rule(axis, primitive, operands, dims, eqn.params)
        return (results, out_dims) if primitive.multiple_results else ([results], [out_dims])

    return _traced(call, avals, templates, eqn)


# Templates of equations that hold jaxprs, by the first that they hold: they live as long as it.
_of_bodies: WeakKeyDictionary[Any, dict[Hashable, Template]] = WeakKeyDictionary()


def trace_rule_once(
    eqn: JaxprEqn, avals: Sequence[Any], dims: Sequence[Dim], templates: Templates
) -> Template:
    """The template of an equation that is not told from others by a number (see `operations`)."""
    held = [body for _, body in sub_jaxprs(eqn)]
    if not held:
        return trace_rule(eqn, avals, dims, templates)
    known = _of_bodies.setdefault(held[0], {})
    params = tuple((name, _weak(value)) for name, value in eqn.params.items())
    key = templates, eqn.primitive, params, eqn.ctx, tuple(avals), tuple(dims)
    try:
        if key in known:
            return known[key]
    except TypeError:  # a parameter that cannot be hashed
        return trace_rule(eqn, avals, dims, templates)
    new = trace_rule(eqn, avals, dims, templates)
    if not any(body is held[0] for step in new.steps for _, body in sub_jaxprs(step)):
        known[key] = new
    return new


def _weak(value: Any) -> Any:
    """A parameter, with references that do not keep them alive in place of jaxprs."""
    if isinstance(value, (tuple, list)):
        return type(value), *map(_weak, value)
    return ref(value) if holds_jaxpr([value]) else value


def trace_match(aval: Any, source: Dim, target: int, templates: Templates) -> Template:
    """The template that moves or broadcasts a value of this type to be mapped at `target`."""

    def call(x: Any) -> tuple[Sequence[Any], Sequence[Dim]]:
        return [jaxcompat.match_axis(templates.axis.data, source, target, x)], [target]

    return _traced(call, [aval], templates, None)


def _traced(
    call: Callable[..., tuple[Sequence[Any], Sequence[Dim]]],
    avals: Sequence[Any],
    templates: Templates,
    eqn: JaxprEqn | None,
) -> Template:
    dims: list[Dim] = []

    def fun(*operands: Any) -> list[Any]:
        results, out_dims = call(*operands)
        dims.extend(out_dims)
        return list(results)

    with jaxcompat.axis_mapped(templates.axis.data):
        jaxpr = jaxcompat.trace_in_setting(fun, avals, eqn)
    jaxpr, _ = dce_body(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    kinds = [templates.kind(v.aval, dim) for v, dim in zip(jaxpr.outvars, dims, strict=True)]
    return _template(jaxpr, kinds)


def _template(jaxpr: Any, kinds: Sequence[int]) -> Template:
    values = [*jaxpr.invars, *jaxpr.constvars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    numbers: dict[Var, int] = {v: i for i, v in enumerate(values)}

    def numbered(atoms: Sequence[Atom]) -> tuple[Any, ...]:
        return tuple(atom if type(atom) is Literal else numbers[atom] for atom in atoms)

    steps = tuple(
        Step(
            eqn.primitive,
            {name: _plain(value) for name, value in eqn.params.items()},
            eqn.effects,
            eqn.ctx,
            numbered(eqn.invars),
            tuple(v.aval for v in eqn.outvars),
            len(eqn.outvars) == 1,
        )
        for eqn in jaxpr.eqns
    )
    outs = numbered(jaxpr.outvars)
    alone = None
    if len(steps) == 1 and not (steps[0].effects or jaxpr.consts):
        whole = [*jaxpr.eqns[0].invars, *jaxpr.eqns[0].outvars]
        alone = steps[0] if whole == [*jaxpr.invars, *jaxpr.outvars] else None
    return Template(tuple(jaxpr.consts), steps, outs, tuple(kinds), tuple(values), alone)


def _plain(value: Any) -> Any:
    """A parameter without NumPy's integers, which JAX's rules leave in dimensions and shapes."""
    if isinstance(value, np.integer):
        return int(value)
    if type(value) in (tuple, list):
        return type(value)(map(_plain, value))
    return value


# --- signatures -------------------------------------------------------------------------------


@dataclass(eq=False)
class Templates:
    """The templates of one axis in one tracing context, by signature.

    A signature is a tuple of numbers: of the operation (see `operations`) and of each operand's
    *kind*, which is its type and its mapped dimension. Types are slow to hash and to compare, and
    a signature is made for every equation.
    """

    axis: Axis
    known: dict[Hashable, Template] = field(default_factory=dict)
    kinds: dict[tuple[Any, Dim], int] = field(default_factory=dict)
    dims: dict[int, Dim] = field(default_factory=dict)

    def kind(self, aval: Any, dim: Dim) -> int:
        """The number of values of this type that are mapped along this dimension."""
        number = self.kinds.get((aval, dim))
        if number is None:
            number = next(_new_number)
            self.dims[number] = dim
            number = self.kinds.setdefault((aval, dim), number)
        return number


#: Numbers that no other thread gets, and that are not given again when all is forgotten.
_new_number = count()

#: Numbers of operations: of primitives with their parameters, in a context.
_operations: dict[Hashable, int] = {}

# The operations of the equations of jaxprs that have been batched.
_numbered: WeakKeyDictionary[Any, list[int | None]] = WeakKeyDictionary()


def operations(jaxpr: Any) -> list[int | None]:
    """A number for each equation of an open jaxpr: equal for equal primitives and parameters.

    None for an equation whose template is not to be kept: one that holds jaxprs, which would then
    live for ever, or whose parameters cannot be hashed.
    """
    if jaxpr not in _numbered:
        _numbered[jaxpr] = list(map(_operation, jaxpr.eqns))
    return _numbered[jaxpr]


def _operation(eqn: JaxprEqn) -> int | None:
    params = eqn.params
    key = eqn.primitive, _params_key(params) if params else (), eqn.ctx
    try:
        number = _operations.get(key)
        if number is None and not holds_jaxpr(params.values()):
            number = _operations.setdefault(key, next(_new_number))
    except TypeError:
        return None
    return number


_FLOATS: frozenset[type] = frozenset({float, complex, np.float32, np.float64})


def _params_key(params: dict[str, Any]) -> Hashable:
    """Equal for parameters that are the same; 0.0 and -0.0, which are equal, are not."""
    for value in params.values():
        if type(value) in _FLOATS:
            return *params.items(), repr(params)
    return tuple(params.items())


#: The templates of every axis and tracing context that has been met.
_tables: dict[Hashable, Templates] = {}

#: There may be as many of either; then all are forgotten.
_MOST_TABLES, _MOST_OPERATIONS = 256, 100_000


def templates_of(axis: Axis) -> Templates:
    """The templates for an axis in the present tracing context."""
    if len(_tables) > _MOST_TABLES or len(_operations) > _MOST_OPERATIONS:
        forget_templates()
    key = axis, jaxcompat.tracing_context()
    return _tables.setdefault(key, Templates(axis))


def forget_templates() -> None:
    """Forget all templates, as when a process begins."""
    _tables.clear()
    _operations.clear()
    _numbered.clear()
    _of_bodies.clear()
