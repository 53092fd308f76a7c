"""Batching rules traced once for all equations that are alike, to templates (`ir.templates`).

Templates are kept for the process (`_templates`, `_of_bodies`), which makes a second program of a
kind, and `jaxprtool.vmap`, fast; `jaxprtool.clear_caches` drops them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count
from weakref import ref

import jax

from jaxprtool import jaxcompat
from jaxprtool.ir.caches import JaxprCache, process_cache
from jaxprtool.ir.structured import holds_jaxpr, sub_jaxprs
from jaxprtool.ir.templates import Template, has_float, signature, template_of_jaxpr
from jaxprtool.jaxcompat import Aval, JaxprEqn, Primitive
from jaxprtool.passes.batch.axis import Axis, Dim
from jaxprtool.passes.batch.table import Operands, batch_rules, jaxs_rule
from jaxprtool.passes.dce import dce_body

#: Templates of equations that hold jaxprs, by the first that they hold.
_of_bodies = JaxprCache()


def template_of(
    eqn: JaxprEqn,
    avals: Sequence[Aval],
    dims: Sequence[Dim],
    kinds: Sequence[int],
    templates: Templates,
) -> Template:
    """Return the template of an equation, traced once for all that are alike.

    The template of one that holds jaxprs is kept with the first of them, to keep none alive.

    Args:
        eqn: The equation.
        avals: The types of its operands.
        dims: Where these are mapped.
        kinds: The kinds of its operands.
        templates: Those of the axis.

    Raises:
        Exception: What its rule raises.
    """
    known, like = templates.known, eqn
    key: tuple[Hashable, ...] = ()
    held = [body for _, body in sub_jaxprs(eqn)]
    if held:
        known, key = _of_bodies.of(held[0]), (templates,)
        like = eqn.replace(params={name: _weak(value) for name, value in eqn.params.items()})
    if any(map(has_float, like.params.values())):
        templates.with_floats.add(eqn.primitive)
    key += templates.key(like, kinds)
    try:
        template = known.get(key)
    except TypeError:  # a parameter that cannot be hashed
        return _trace_rule(eqn, avals, dims, templates)
    if template is None:
        template = _trace_rule(eqn, avals, dims, templates)
        if not held or not any(
            body is held[0] for step in template.steps for _, body in sub_jaxprs(step)
        ):
            template = known.setdefault(key, template)
    return template


def _trace_rule(
    eqn: JaxprEqn, avals: Sequence[Aval], dims: Sequence[Dim], templates: Templates
) -> Template:
    primitive, axis = eqn.primitive, templates.axis

    def call(*operands: jax.Array) -> tuple[Operands, Sequence[Dim]]:
        rule = batch_rules.get(primitive.name)
        made = rule and rule(axis, primitive, operands, dims, eqn.params)
        results, out_dims = made or jaxs_rule(axis, primitive, operands, dims, eqn.params)
        return (results, out_dims) if primitive.multiple_results else ([results], [out_dims])

    return _traced(call, avals, templates, eqn)


def _weak(value: object) -> object:
    """Return a parameter with weak references in place of jaxprs."""
    if isinstance(value, (tuple, list)):
        return type(value), *map(_weak, value)
    return ref(value) if holds_jaxpr([value]) else value


def trace_match(aval: Aval, source: Dim, target: int, templates: Templates) -> Template:
    """Trace the template that moves a value's batch dimension to `target`, or broadcasts it."""

    def call(x: jax.Array) -> tuple[Operands, Sequence[Dim]]:
        return [jaxcompat.match_axis(templates.axis.data, source, target, x)], [target]

    return _traced(call, [aval], templates, None)


def _traced(
    call: Callable[..., tuple[Operands, Sequence[Dim]]],
    avals: Sequence[Aval],
    templates: Templates,
    eqn: JaxprEqn | None,
) -> Template:
    dims: list[Dim] = []

    def fun(*operands: jax.Array) -> list[jax.Array]:
        results, out_dims = call(*operands)
        dims.extend(out_dims)
        return list(results)

    with jaxcompat.axis_mapped(templates.axis.data):
        jaxpr = jaxcompat.trace_in_setting(fun, avals, eqn)
    jaxpr, _ = dce_body(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    kinds = [templates.kind(v.aval, dim) for v, dim in zip(jaxpr.outvars, dims, strict=True)]
    return template_of_jaxpr(jaxpr, kinds)


# --- signatures -------------------------------------------------------------------------------


@dataclass(eq=False)
class Templates:
    """The templates of one axis in one tracing context, by signature.

    The signature of an equation is its primitive, parameters and context, and the *kind* of each
    operand: a number for its type and its batch dimension. Types are slow to hash and to compare,
    and a signature is made for every equation.
    """

    axis: Axis
    known: dict[Hashable, Template] = field(default_factory=dict)
    kinds: dict[tuple[Aval, Dim], int] = field(default_factory=dict)
    dims: dict[int, Dim] = field(default_factory=dict)
    #: The primitives that may have floats among their parameters: signatures are compared, and 0.0
    #: and -0.0 are equal, so that theirs hold the parameters in words too.
    with_floats: set[Primitive] = field(default_factory=set)

    def kind(self, aval: Aval, dim: Dim) -> int:
        """Return the number of values of this type that are mapped along this dimension."""
        number = self.kinds.get((aval, dim))
        if number is None:
            number = next(_new_number)
            self.dims[number] = dim
            number = self.kinds.setdefault((aval, dim), number)
        return number

    def key(self, eqn: JaxprEqn, kinds: Sequence[int]) -> tuple[Hashable, ...]:
        """Return the signature of an equation whose operands are of these kinds."""
        return signature(eqn, kinds, self.with_floats)


#: Numbers of kinds: no other thread is given the same, and none is given twice.
_new_number = count()


#: The templates of all axes and tracing contexts; all are dropped when there are too many.
_templates: dict[Hashable, Templates] = process_cache({})
_MOST_AXES, _MOST_TEMPLATES = 256, 100_000


def templates_of(axis: Axis) -> Templates:
    """Return the templates for an axis in the present tracing context."""
    count = sum(len(each.known) + len(each.kinds) for each in [*_templates.values()])
    if len(_templates) > _MOST_AXES or count > _MOST_TEMPLATES:
        _templates.clear()
    return _templates.setdefault((axis, jaxcompat.tracing_context()), Templates(axis))
