"""How structured equations are split: a rule for each kind of loop, branch and call.

A call that holds variables becomes two, named NAME_init and NAME_apply. A loop's variables are
stacked: results of init's loop, and in apply's loop, among what is scanned over. Of a branch, init
computes the variables of all sides, whichever is taken. A call without variables stays one call in
each program that needs it, and there keeps only what that program can have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.equations import named
from jaxprtool.ir.structured import Call, Cond, Scan, ShardMap, While, call, keep
from jaxprtool.jaxcompat import JaxprEqn, Var
from jaxprtool.passes.dce import has_lasting_effect
from jaxprtool.passes.unzip.known import Context, Known, Outcome, Rule, meet, unzip_rules, whole
from jaxprtool.passes.unzip.loops import as_scan
from jaxprtool.passes.unzip.split import Split, equation_of, reordered, split
from jaxprtool.passes.unzip.variables import Variable
from jaxprtool.primitives import scope_of


def rule(*primitives: str) -> Callable[[Rule], Rule]:
    """Register the rule of these primitives, asked where an equation may have to be split."""

    def register(function: Rule) -> Rule:
        def asked(eqn: JaxprEqn, known: Sequence[Known], context: Context) -> Outcome:
            results = meet(known)
            if context.sows.inside(eqn):
                return function(eqn, known, context)
            if all(results) and not has_lasting_effect(eqn):
                return whole(eqn, known, context)
            outcome = function(eqn, known, context)
            # What writes to a ref of its own, say, can be had by one program if not by two.
            stuck = any(part.stuck for part in outcome.parts)
            return whole(eqn, known, context) if stuck and any(results) else outcome

        unzip_rules.update(dict.fromkeys(primitives, asked))
        return function

    return register


def _early(known: Sequence[Known]) -> list[bool]:
    return [v.early for v in known]


def _ready(known: Sequence[Known]) -> list[bool]:
    return [v.ready for v in known]


def _fresh(avals: Sequence[Any]) -> tuple[Var, ...]:
    return tuple(map(Var, avals))


def _avals(variables: Sequence[Variable]) -> list[Any]:
    return [aval for variable in variables for aval in variable.avals]


# --- calls ------------------------------------------------------------------------------------


@rule(*Call.primitives)
def _call(eqn: JaxprEqn, known: Sequence[Known], context: Context) -> Outcome:
    call, scope = Call.of(eqn), scope_of(eqn)
    context.scopes += [] if scope is None else [scope]
    part = split(call.body, known, context)
    del context.scopes[len(context.scopes) - (scope is not None) :]
    variables = tuple(v if scope is None else v.under(scope) for v in part.variables)
    if eqn.params.get("differentiated"):
        variables = _computed_again(eqn, variables)
    values, places = _fresh(_avals(variables)), _fresh(_avals(variables))
    outs = part.outs
    init = apply = None
    if variables or any(_early(outs)) or part.early.effects:
        init = eqn
        if variables or part.ready.effects or not all(_early((*known, *outs))):
            body = part.init(_early(outs))
            init = call.filtered(_early(known), _early(outs), body, (), values)
    if variables or any(_ready(outs)) or part.ready.effects:
        apply = eqn
        if variables or not all(_ready((*known, *outs))):
            body = part.apply(_ready(outs))
            apply = call.filtered(_ready(known), _ready(outs), body, places)
    if variables and (scope is None or not (part.passes_on or context.sows_otherwise(call.body))):
        # A `nest` in which values are still sown stays one, under its own name.
        init, apply = _named(init, scope, "init"), _named(apply, scope, "apply")
    return Outcome(outs, _some(init), _some(apply), variables, values, places, (part,))


def _some(eqn: JaxprEqn | None) -> tuple[JaxprEqn, ...]:
    return () if eqn is None else (eqn,)


def _named(eqn: JaxprEqn, scope: str | None, half: str) -> JaxprEqn:
    """One half of a call, under its name."""
    if "name" not in eqn.params:
        return eqn
    return eqn.replace(params={**eqn.params, "name": f"{scope or eqn.params['name']}_{half}"})


def _computed_again(eqn: JaxprEqn, variables: Sequence[Variable]) -> tuple[Variable, ...]:
    """The variables of a remat that JAX has differentiated, which computes its values again."""
    for variable in variables:
        if variable.mode != "strict":
            raise UnsupportedError(
                f"variable '{variable.path[-1]}' is sown in mode \"{variable.mode}\" inside "
                f"{named(eqn)}, which computes it again: which of them it is cannot be told"
            )
    return tuple(replace(variable, again=True) for variable in variables)


# --- loops ------------------------------------------------------------------------------------


@rule("scan")
def _scan(eqn: JaxprEqn, known: Sequence[Known], context: Context) -> Outcome:
    scan = Scan.of(eqn)
    n, k = len(scan.consts), len(scan.carry)
    consts, carry, xs = known[:n], list(known[n : n + k]), known[n + k :]
    while True:
        part = split(scan.body, [*consts, *carry, *xs], context)
        met = [meet(pair) for pair in zip(carry, part.outs[:k], strict=True)]
        if met == carry:
            break
        carry = met
    _check_loop(eqn, [part])
    outs = (*carry, *part.outs[k:])
    variables = tuple(v.stacked(scan.length) for v in part.variables)
    values, places = _fresh(_avals(variables)), _fresh(_avals(variables))

    def half(marks: Callable, body: Any, given: Sequence[Var], made: Sequence[Var]) -> JaxprEqn:
        return scan.rebuild(
            consts=keep(scan.consts, marks(consts)),
            carry=keep(scan.carry, marks(carry)),
            xs=(*given, *keep(scan.xs, marks(xs))),
            carry_outs=keep(scan.carry_outs, marks(carry)),
            ys=(*keep(scan.ys, marks(outs[k:])), *made),
            body=body,
        )

    init = half(_early, part.init(_early(outs)), (), values)
    if not variables and all(_ready((*known, *outs))):
        apply = eqn
    else:
        before_xs = sum(_ready((*consts, *carry)))
        apply = half(_ready, part.apply(_ready(outs), before_xs), places, ())
    return Outcome(outs, (init,), (apply,), variables, values, places, (part,))


@rule("while")
def _while(eqn: JaxprEqn, known: Sequence[Known], context: Context) -> Outcome:
    if context.sows.inside(eqn):
        scan = as_scan(eqn, context)
        return unzip_rules["scan"](scan, known[-len(scan.invars) :], context)
    loop = While.of(eqn)
    c, b = len(loop.cond_consts), len(loop.body_consts)
    cond_consts, body_consts, carry = known[:c], list(known[c : c + b]), list(known[c + b :])
    while True:
        (going,) = split(loop.cond, [*cond_consts, *carry], context).outs
        # How often the body runs is known where the condition is, and nothing of it elsewhere.
        body_consts = [meet((each, going)) for each in body_consts]
        with context.under(going):
            cond = split(loop.cond, [*cond_consts, *carry], context)
            body = split(loop.body, [*body_consts, *carry], context)
        met = [meet((*pair, *cond.outs)) for pair in zip(carry, body.outs, strict=True)]
        if met == carry:
            break
        carry = met
    _check_loop(eqn, [cond, body])

    def half(marks: Callable, cond_half: Any, body_half: Any) -> tuple[JaxprEqn, ...]:
        if not all(marks(cond.outs)):
            return ()
        new = loop.rebuild(
            cond_consts=keep(loop.cond_consts, marks(cond_consts)),
            body_consts=keep(loop.body_consts, marks(body_consts)),
            carry=keep(loop.carry, marks(carry)),
            outs=keep(loop.outs, marks(carry)),
            cond=cond_half,
            body=body_half,
        )
        return (new,)

    init = half(_early, cond.init(_early(cond.outs)), body.init(_early(carry)))
    apply: tuple[JaxprEqn, ...] = (eqn,)
    if not all(_ready((*known, *carry))):
        apply = half(_ready, cond.apply(_ready(cond.outs)), body.apply(_ready(carry)))
    return Outcome(tuple(carry), init, apply, parts=(cond, body))


def _check_loop(eqn: JaxprEqn, parts: Sequence[Split]) -> None:
    if reordered(parts):
        raise UnsupportedError(
            f"{named(eqn)} has ordered effects of init's and of apply's in each iteration"
        )
    for variable in parts[-1].variables:
        if variable.mode == "clobber":
            raise UnsupportedError(
                f"variable '{variable.path[-1]}' is sown in mode \"clobber\" inside {named(eqn)}: "
                "the last iteration's value would be kept, and apply needs those of all",
                'mode "strict" stacks them',
            )


# --- branches ---------------------------------------------------------------------------------


@rule("cond")
def _cond(eqn: JaxprEqn, known: Sequence[Known], context: Context) -> Outcome:
    cond = Cond.of(eqn)
    index, operands = known[0], list(known[1:])
    if not any(map(context.sows, cond.branches)):
        operands = [meet((index, each)) for each in operands]
    with context.under(index):
        parts = tuple(split(branch, operands, context) for branch in cond.branches)
    outs = tuple(meet((index, *each)) for each in zip(*(p.outs for p in parts), strict=True))
    variables = tuple(v for part in parts for v in part.variables)
    for part in parts:
        if part.early.effects and (part.variables or not index.early):
            raise UnsupportedError(
                f"a branch of {named(eqn)} has an effect that belongs to init, "
                "which cannot know whether the branch will be taken"
            )
    init, values = _variables_of_branches(cond, parts, operands)
    if index.early:
        bodies = [part.init(_early(outs), variables=False) for part in parts]
        init += (_branch(cond, operands, outs, _early, bodies),)
    places = _fresh(_avals(variables))
    apply: tuple[JaxprEqn, ...] = ()
    if index.ready and not variables and all(_ready((*known, *outs))):
        apply = (eqn,)
    elif index.ready:
        bodies = [_widened(p.apply(_ready(outs)), i, parts) for i, p in enumerate(parts)]
        apply = (_branch(cond, operands, outs, _ready, bodies, places),)
    return Outcome(outs, init, apply, variables, values, places, parts)


def _branch(
    cond: Cond,
    operands: Sequence[Known],
    outs: Sequence[Known],
    marks: Callable,
    branches: Sequence[Any],
    places: Sequence[Var] = (),
) -> JaxprEqn:
    return cond.rebuild(
        operands=(*places, *keep(cond.operands, marks(operands))),
        outs=keep(cond.outs, marks(outs)),
        branches=tuple(branches),
    )


def _variables_of_branches(
    cond: Cond, parts: Sequence[Split], operands: Sequence[Known]
) -> tuple[tuple[JaxprEqn, ...], tuple[Var, ...]]:
    """Calls that compute the variables of each branch, whichever will be taken."""
    calls: list[JaxprEqn] = []
    values: list[Var] = []
    given = keep(cond.operands, _early(operands))
    for part in parts:
        if part.variables:
            outs = _fresh(_avals(part.variables))
            body = part.init([False] * len(part.outs))
            calls.append(call(body, given, outs, cond.eqn))
            values += outs
    return tuple(calls), tuple(values)


def _widened(body: Any, position: int, parts: Sequence[Split]) -> Any:
    """The apply of one branch, made to take the variables of all branches, in order."""
    own = len(parts[position].places)
    before, after = (
        _fresh([v.aval for part in group for v in part.places])
        for group in (parts[:position], parts[position + 1 :])
    )
    invars = [*before, *body.invars[:own], *after, *body.invars[own:]]
    return jaxcompat.new_jaxpr(
        body.constvars, body.consts, invars, body.outvars, body.eqns, body.debug_info
    )


# --- shards -----------------------------------------------------------------------------------


@rule("shard_map")
def _shard_map(eqn: JaxprEqn, known: Sequence[Known], context: Context) -> Outcome:
    """A variable that differs between shards has them on a new leading axis, in mesh order."""
    shards = ShardMap.of(eqn)
    part = split(shards.body, known, context)
    axes = [_axes(shards, aval) for aval in _avals(part.variables)]
    specs = tuple(PartitionSpec(each) if each else PartitionSpec() for each in axes)
    outs = part.outs
    init_body = _with_shard_axes(part.init(_early(outs)), "outvars", axes)
    init = shards.rebuild(
        operands=keep(shards.operands, _early(known)),
        outs=(),
        body=init_body,
        in_specs=keep(shards.in_specs, _early(known)),
        out_specs=keep(shards.out_specs, _early(outs)) + specs,
    )
    types, _ = jaxcompat.inferred_types(init.primitive, init.params, init.invars)
    values = _fresh(types[sum(_early(outs)) :])
    init = init.replace(outvars=[*keep(shards.outs, _early(outs)), *values])
    places = _fresh([v.aval for v in values])
    if not part.variables and all(_ready((*known, *outs))):
        apply = eqn
    else:
        apply = shards.rebuild(
            operands=(*places, *keep(shards.operands, _ready(known))),
            outs=keep(shards.outs, _ready(outs)),
            body=_with_shard_axes(part.apply(_ready(outs)), "invars", axes),
            in_specs=specs + keep(shards.in_specs, _ready(known)),
            out_specs=keep(shards.out_specs, _ready(outs)),
        )
    types = [v.aval for v in values]
    variables = []
    for variable in part.variables:
        count = len(variable.avals)
        variables.append(replace(variable, avals=tuple(types[:count])))
        types = types[count:]
    return Outcome(outs, (init,), (apply,), tuple(variables), values, places, (part,))


def _axes(shards: ShardMap, aval: Any) -> tuple[Any, ...]:
    """The mesh axes, of those that the shard_map makes manual, over which a value may differ."""
    p = shards.eqn.params
    varying = p["newly_manual_axes"]
    if p["check_vma"]:
        varying &= jaxcompat.varying_axes(aval)
    return tuple(axis for axis in shards.mesh.axis_names if axis in varying)


def _with_shard_axes(body: Any, side: str, axes: Sequence[tuple[Any, ...]]) -> Any:
    """A body whose variables, its first arguments or last results, have an axis of shards."""
    atoms = list(getattr(body, side))
    first = 0 if side == "invars" else len(atoms) - len(axes)
    eqns = []
    for i, each in enumerate(axes, start=first):
        if each:
            outer = Var(jaxcompat.stacked_aval(1, atoms[i].aval))
            operand, result = (outer, atoms[i]) if side == "invars" else (atoms[i], outer)
            reshape = partial(jnp.reshape, shape=result.aval.shape)
            eqns.append(equation_of(reshape, operand, result))
            atoms[i] = outer
    parts = {"invars": body.invars, "outvars": body.outvars, side: atoms}
    eqns = [*eqns, *body.eqns] if side == "invars" else [*body.eqns, *eqns]
    return jaxcompat.new_jaxpr(
        body.constvars, body.consts, eqns=eqns, debug_info=body.debug_info, **parts
    )
