"""Templates: equations that replace one equation, traced once for all equations that are alike.

The equations of a program have few signatures: all of an equation except the names of its operands
and its source location. A pass traces its rule once for each signature, to a *template*, and
rewrites an equation by looking up its template and instantiating it with the equation's operands.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.jaxcompat import (
    Atom,
    Aval,
    ClosedJaxpr,
    Effect,
    JaxprEqn,
    Literal,
    Params,
    Primitive,
    Var,
)

#: A value in a template: a literal, or the index of one.
TemplateAtom: TypeAlias = Literal | int


@dataclass(frozen=True, eq=False, slots=True)
class TemplateEquation:
    """An equation of a template.

    Attributes:
        inputs: Literals, or indices of values: of the operands, then of the constants, then of the
            results of the steps in order.
        avals: The types of the results.
        single: True if it has one result.
    """

    primitive: Primitive
    params: Params
    effects: set[Effect]
    ctx: Any
    inputs: tuple[TemplateAtom, ...]
    avals: tuple[Aval, ...]
    single: bool


@dataclass(frozen=True, eq=False, slots=True)
class Template:
    """The equations that replace an equation.

    Attributes:
        consts: Constants that the rule closes over.
        outs: The results, as the `inputs` of a step.
        kinds: The kinds of the results, as the pass defines them.
        binders: The variables that effects on refs name.
        only_step: The only step, if it takes the operands as they are and its results are the
            template's.
        used: The operands that its steps and its results read.
    """

    consts: tuple[Any, ...]
    steps: tuple[TemplateEquation, ...]
    outs: tuple[TemplateAtom, ...]
    kinds: tuple[Any, ...]
    binders: tuple[Var, ...]
    only_step: TemplateEquation | None
    used: frozenset[int]


def template_of_jaxpr(jaxpr: ClosedJaxpr, kinds: Sequence[Any]) -> Template:
    """Return the template that writes the equations of a jaxpr, in terms of its arguments."""
    values = [*jaxpr.invars, *jaxpr.constvars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    numbers: dict[Var, int] = {v: i for i, v in enumerate(values)}

    def numbered(atoms: Sequence[Atom]) -> tuple[TemplateAtom, ...]:
        return tuple(atom if type(atom) is Literal else numbers[atom] for atom in atoms)

    steps = tuple(
        TemplateEquation(
            eqn.primitive,
            {name: _without_numpy(value) for name, value in eqn.params.items()},
            eqn.effects,
            eqn.ctx,
            numbered(eqn.invars),
            tuple(v.aval for v in eqn.outvars),
            len(eqn.outvars) == 1,
        )
        for eqn in jaxpr.eqns
    )
    outs = numbered(jaxpr.outvars)
    only_step = None
    if len(steps) == 1 and not (steps[0].effects or jaxpr.consts):
        whole = [*jaxpr.eqns[0].invars, *jaxpr.eqns[0].outvars]
        only_step = steps[0] if whole == [*jaxpr.invars, *jaxpr.outvars] else None
    read = {i for i in chain(outs, *(step.inputs for step in steps)) if type(i) is int}
    used = frozenset(read.intersection(range(len(jaxpr.invars))))
    return Template(tuple(jaxpr.consts), steps, outs, tuple(kinds), tuple(values), only_step, used)


def _without_numpy(value: Any) -> Any:
    """Replace NumPy's integers, which JAX's rules leave in dimensions and shapes, by Python's."""
    if isinstance(value, np.integer):
        return int(value)
    if type(value) in (tuple, list):
        return type(value)(map(_without_numpy, value))
    return value


def instantiated(
    template: Template, operands: Sequence[Atom], source: Any
) -> tuple[list[JaxprEqn], list[Atom]]:
    """Return the equations of a template for operands, and its results.

    Args:
        template: The template.
        operands: The operands, followed by a variable for each constant of the template.
        source: The source information for the equations.
    """
    values = list(operands)
    eqns: list[JaxprEqn] = []
    for step in template.steps:
        ins = [values[i] if type(i) is int else i for i in step.inputs]
        outs = [Var(aval) for aval in step.avals]
        effs = step.effects
        if effs:
            effs = jaxcompat.renamed_effects(
                effs, dict(zip(template.binders, values, strict=False))
            )
        eqns.append(JaxprEqn(ins, outs, step.primitive, step.params, effs, source, step.ctx))
        values += outs
    return eqns, [values[i] if type(i) is int else i for i in template.outs]


# --- signatures -----------------------------------------------------------------------------------


def signature(
    eqn: JaxprEqn, aval_ids: Sequence[int], with_floats: Container[Primitive]
) -> tuple[Hashable, ...]:
    """Return the signature of an equation: its primitive, context, parameters, and kinds.

    Args:
        eqn: The equation.
        aval_ids: The ids of its operands' types and kinds (`Domain.aval_id`). Types are slow to
            hash and to compare, and every equation needs a signature.
        with_floats: The primitives that may have floats among their parameters. Their signatures
            also hold the parameters as text, since 0.0 and -0.0 are equal.
    """
    primitive, params = eqn.primitive, eqn.params
    if not params:
        return primitive, eqn.ctx, *aval_ids
    names = repr(params) if primitive in with_floats else tuple(params)
    values = params.values()
    types = [jaxcompat.nested_type(v) if isinstance(v, tuple) else type(v) for v in values]
    return primitive, eqn.ctx, names, *types, *values, *aval_ids


_FLOATS: frozenset[type] = frozenset({float, complex, np.float32, np.float64})


def has_float(value: object) -> bool:
    """Return True for a float, and for a tuple that has one at any depth."""
    return any(map(has_float, value)) if isinstance(value, tuple) else type(value) in _FLOATS
