"""Batching rules, traced once for all similar equations to templates (`domains.templates`).

Templates are kept for the process (in domains, and in `_of_bodies`), which makes `jaxprtool.vmap`
and the next program of a kind fast; `jaxprtool.clear_caches` drops them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import jax

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.caches import JaxprCache
from jaxprtool.ir.core.structured import holds_jaxpr, sub_jaxprs
from jaxprtool.jaxcompat import Aval, JaxprEqn
from jaxprtool.passes.mapping.batch.axis import Dim
from jaxprtool.passes.mapping.batch.table import Operands, batch_rules, jaxs_rule
from jaxprtool.passes.mapping.domains.templates import Template, has_float

if TYPE_CHECKING:
    from jaxprtool.passes.mapping.batch.body import BatchDomain

#: Templates of equations that hold jaxprs, by the first of these jaxprs.
_of_bodies = JaxprCache()


def template_of(
    eqn: JaxprEqn,
    avals: Sequence[Aval],
    dims: Sequence[Dim],
    aval_ids: Sequence[int],
    domain: BatchDomain,
) -> Template:
    """Return the template of an equation, traced once for all with the same signature.

    The template of an equation that holds jaxprs is kept with the first of them, weakly.

    Args:
        eqn: The equation.
        avals: The types of its operands.
        dims: The batch dimensions of its operands.
        aval_ids: The ids of its operands; see `Domain.aval_id`.
        domain: The domain that keeps the template.

    Raises:
        Exception: If its rule raises.
    """
    known, like = domain.templates, eqn
    key: tuple[Hashable, ...] = ()
    held = [body for _, body in sub_jaxprs(eqn)]
    if held:
        known, key = _of_bodies.of(held[0]), (domain,)
        like = eqn.replace(params={name: _weak(value) for name, value in eqn.params.items()})
    if any(map(has_float, like.params.values())):
        domain.with_floats.add(eqn.primitive)
    key += domain.key(like, aval_ids)
    try:
        template = known.get(key)
    except TypeError:  # a parameter that is not hashable
        return _trace_rule(eqn, avals, dims, domain)
    if template is None:
        template = _trace_rule(eqn, avals, dims, domain)
        if not held or not any(
            body is held[0] for step in template.steps for _, body in sub_jaxprs(step)
        ):
            template = known.setdefault(key, template) or template
    return template


def _trace_rule(
    eqn: JaxprEqn, avals: Sequence[Aval], dims: Sequence[Dim], domain: BatchDomain
) -> Template:
    primitive, axis = eqn.primitive, domain.axis

    def compute(_: Mapping[Any, Any], *operands: jax.Array) -> tuple[Operands, Sequence[Dim]]:
        rule = batch_rules.get(primitive.name)
        made = rule and rule(axis, primitive, operands, dims, eqn.params)
        results, out_dims = made or jaxs_rule(axis, primitive, operands, dims, eqn.params)
        return (results, out_dims) if primitive.multiple_results else ([results], [out_dims])

    return domain.traced(compute, avals, (), eqn)


def _weak(value: object) -> object:
    """Return a parameter with weak references in place of jaxprs."""
    if isinstance(value, (tuple, list)):
        return type(value), *map(_weak, value)
    return ref(value) if holds_jaxpr([value]) else value


def trace_match(aval: Aval, source: Dim, target: int, domain: BatchDomain) -> Template:
    """Trace the template that moves a value's batch dimension to `target`, or broadcasts it."""

    def compute(_: Mapping[Any, Any], x: jax.Array) -> tuple[Operands, Sequence[Dim]]:
        return [jaxcompat.match_axis(domain.axis.data, source, target, x)], [target]

    return domain.traced(compute, [aval], (), None)
