"""The fallback rule, which computes an equation example by example.

The masking rule of the equation computes one padded example, and is then batched over all examples.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.rules import rule
from jaxprtool.ir.core.weak_types import is_weak, keep_weak_types
from jaxprtool.jaxcompat import Atom, ClosedJaxpr, JaxprEqn, Var
from jaxprtool.passes.mapping.batch.axis import Axis
from jaxprtool.passes.mapping.batch.body import batch_body
from jaxprtool.passes.mapping.domains.templates import Template, signature, template_of_jaxpr
from jaxprtool.passes.mapping.mask.values import Facts, fill, is_number
from jaxprtool.passes.mapping.ragged.body import (
    BY_EXAMPLE,
    RaggedBodyBuilder,
    RaggedDomain,
    structured_ragged_rules,
)
from jaxprtool.passes.mapping.ragged.values import (
    Batched,
    Kind,
    Packed,
    Pairs,
    Shared,
    Sizes,
    Stacked,
)


class ByExample(NamedTuple):
    """The equations that replace one equation.

    Attributes:
        symbols: The ragged symbols whose lengths the template needs.
        template: The equations. Their operands are the lengths, then the operands of the equation.
        kinds: The layouts of the results.
    """

    symbols: tuple[str, ...]
    template: Template
    kinds: tuple[Kind, ...]


@rule(structured_ragged_rules, BY_EXAMPLE)
def _by_example(builder: RaggedBodyBuilder, eqn: JaxprEqn) -> bool:
    """Write an equation for each padded example, by its masking rule."""
    domain = builder.domain
    kinds = [_operand_kind(builder, atom) for atom in eqn.invars]
    facts = [
        kind.facts if isinstance(kind, Stacked) else Facts.of(atom, active=True)
        for atom, kind in zip(eqn.invars, kinds, strict=True)
    ]
    operands = [builder.held(atom, kind) for atom, kind in zip(eqn.invars, kinds, strict=True)]
    outs = tuple(v.aval for v in eqn.outvars)
    types = tuple(zip((a.aval for a in operands), kinds, facts, strict=True))
    key: Hashable = ByExample, signature(eqn, (), domain.with_floats), types, outs
    try:
        made = domain.by_example.get(key)
    except TypeError:  # a parameter that is not hashable
        key, made = id(eqn), None
    if made is None:
        domain.by_example[key] = made = _masked_and_batched(domain, eqn, kinds, facts)
    lengths: list[Atom] = [builder.extra(name) for name in made.symbols]
    results = builder.instantiate(made.template, [*lengths, *operands], eqn.source_info)
    for var, kind, atom in zip(eqn.outvars, made.kinds, results, strict=True):
        builder.bind(var, kind, atom)
    return True


def _masked_and_batched(
    domain: RaggedDomain, eqn: JaxprEqn, kinds: Sequence[Kind], facts: Sequence[Facts]
) -> ByExample:
    sizes = domain.sizes
    operands, outs = [Var(a.aval) for a in eqn.invars], [Var(v.aval) for v in eqn.outvars]
    body = jaxcompat.replace_jaxpr(
        jaxcompat.trace_in_setting(list, [], None),
        invars=operands,
        outvars=outs,
        eqns=[eqn.replace(invars=operands, outvars=outs)],
    )
    masked = domain.masks.masked(body, facts)
    dims: list[int | None] = [0] * len(masked.extras)
    dims += [None if isinstance(kind, Shared) else 0 for kind in kinds]
    axis = Axis(None, sizes.batch_size)
    wanted: list[int | None] = [0 if _axes(sizes, var) else None for var in outs]
    batched, found = batch_body(masked.jaxpr, dims, axis, wanted)
    if any(dim not in (None, 0) for dim in found):  # examples must be axis 0: batch again
        wanted = [None if dim is None else 0 for dim in found]
        batched, found = batch_body(masked.jaxpr, dims, axis, wanted)
    results = [
        Stacked(known) if _axes(sizes, var) else Shared() if dim is None else Batched()
        for var, dim, known in zip(outs, found, masked.kinds, strict=True)
    ]
    batched = _as_weak(batched, outs, eqn)
    return ByExample(masked.extras, template_of_jaxpr(batched, ()), tuple(results))


def _as_weak(batched: ClosedJaxpr, variables: Sequence[Var], eqn: JaxprEqn) -> ClosedJaxpr:
    """Return a jaxpr whose results are as weakly typed as these variables.

    JAX turns updates into scatters, which are weakly typed if the array alone is.
    """
    avals = [var.aval for var in variables]
    if all(is_weak(a) == is_weak(b.aval) for a, b in zip(avals, batched.outvars, strict=True)):
        return batched
    return jaxcompat.trace_in_setting(
        lambda *args: keep_weak_types(jaxcompat.jaxpr_as_fun(batched), args, avals, eqn) or [],
        [v.aval for v in batched.invars],
        eqn,
    )


def _axes(sizes: Sizes, atom: Atom) -> tuple[int, ...]:
    return sizes.axes(getattr(atom.aval, "shape", ()))


def _operand_kind(builder: RaggedBodyBuilder, atom: Atom) -> Kind:
    """Return the layout of an operand of an equation that is computed example by example."""
    kind = builder.kind(atom)
    if not isinstance(kind, Packed | Pairs):
        return kind
    stacked = [each for each in builder.forms[atom] if isinstance(each, Stacked)]
    return stacked[0] if stacked else Stacked(_zero_padded(atom, kind))


def _zero_padded(atom: Atom, kind: Packed | Pairs) -> Facts:
    """Return the facts of a packed value or pairs when padded with zeros."""
    shape = tuple(atom.aval.shape)
    zero = fill(0, atom.aval.dtype) if is_number(atom.aval) else None
    axes = (kind.axis,) if isinstance(kind, Packed) else kind.axes
    fills = tuple(zero if i in axes else None for i in range(len(shape)))
    return Facts(shape, fills, Facts.of(atom, active=True).active)
