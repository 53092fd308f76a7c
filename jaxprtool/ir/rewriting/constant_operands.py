"""Constants that the bodies of loops, branches and calls take from outside, as operands."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import jax

from jaxprtool import jaxcompat
from jaxprtool.ir.core.regions import Region, Regions
from jaxprtool.ir.core.structured import ShardMap
from jaxprtool.ir.rewriting.rewrite import Memo
from jaxprtool.jaxcompat import Aval, ClosedJaxpr, JaxprEqn, Var

#: Constants by identity and type, each with the variable of the body that represents it.
Taken: TypeAlias = dict[tuple[int, Aval], tuple[Var, Any]]


def pass_constants(
    inside: Regions, opened: Sequence[tuple[ClosedJaxpr, Taken]], taken: Taken, memo: Memo
) -> JaxprEqn:
    """Return an equation that passes to its bodies the constants that they take.

    Args:
        inside: The regions of the equation. It must not have a user-defined rule.
        opened: Each body, which takes constants after its arguments, and these constants.
        taken: The constants of the jaxpr around the equation. New ones are added to it.
        memo: The results of this run of the pass: equations that share a body share the new one.
    """
    fields = [_constants_field(inside, region) for region in inside.regions]
    wanted: dict[str, Taken] = {name: {} for name in fields}
    for name, (_, own) in zip(fields, opened, strict=True):
        wanted[name] = {**own, **wanted[name]}
    same = all(body is old for (body, _), old in zip(opened, inside.bodies, strict=True))
    if same and not any(wanted.values()):
        return inside.eqn
    bodies = [
        _with_constants(inside, region, *parts, name, wanted[name], memo)
        for region, parts, name in zip(inside.regions, opened, fields, strict=True)
    ]
    sharded = isinstance(inside.view, ShardMap)  # inside it the types are those of a shard
    more: dict[str, list[Var]] = {name: [] for name in wanted}
    for name, constants in wanted.items():
        for (number, own_type), (_, value) in constants.items():
            aval = jax.typeof(value) if sharded else own_type
            var, _ = taken.setdefault((number, aval), (Var(aval), value))
            more[name].append(var)
    return inside.rebuild(bodies, more=more)


def _constants_field(inside: Regions, region: Region) -> str:
    """Return the loop-invariant field of operands through which a body takes its constants."""
    changing = {*(name for name, _ in inside.edges.carried), *inside.edges.sliced}
    return region.constants or next(name for name in region.groups if name not in changing)


def _with_constants(
    inside: Regions,
    region: Region,
    body: ClosedJaxpr,
    own: Taken,
    name: str,
    wanted: Taken,
    memo: Memo,
) -> ClosedJaxpr:
    """Return a body that takes all `wanted` constants, in the field of operands `name`."""
    taken = {own[key][0] if key in own else Var(var.aval): key for key, (var, _) in wanted.items()}
    invars = inside.arguments(region, body.invars[: len(region.ins)], {name: list(taken)})
    if invars == list(body.invars):
        return body
    positions: dict[Var, Hashable] = {**taken, **{v: i for i, v in enumerate(body.invars)}}
    order = tuple(positions[v] for v in invars)
    return memo(lambda: jaxcompat.replace_jaxpr(body, invars=invars), body, order)
