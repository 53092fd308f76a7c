"""Splitting of structured equations: a rule for each kind of loop, branch and call.

A call that holds variables becomes two, named NAME_init and NAME_apply. A loop's variables are
stacked: results of init's loop, and `xs` of apply's loop. For a branch, init computes the variables
of all branches, whichever is taken. A call without variables stays one call in each program that
needs it, with only the equations that this program can have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.custom_rules import following, jvp_rule, rule_key, vjp_rule, vjp_rule_that_raises
from jaxprtool.ir.dtypes import is_float0
from jaxprtool.ir.equations import named
from jaxprtool.ir.regions import Region, Regions, ShardMap, While, call, keep, regions
from jaxprtool.ir.rules import rule
from jaxprtool.jaxcompat import Atom, Aval, ClosedJaxpr, JaxprEqn, JVPRule, Literal, Var, VJPRule
from jaxprtool.passes.cleanup.dce import dce_body, has_lasting_effect
from jaxprtool.passes.unzip.split import (
    READY,
    BindingTime,
    Context,
    Outcome,
    Rule,
    Split,
    Variable,
    as_scan,
    equation_of,
    kind_rules,
    meet,
    no_rule,
    reordered,
    split_body,
    unzip_rules,
    whole,
)
from jaxprtool.primitives import scope_of

#: A function from binding times to flags: the values that init, or that apply, can have.
Marks = Callable[[Sequence[BindingTime]], list[bool]]

_NONE: Mapping[str, Sequence[Var]] = {}


def _split_if_needed(split_rule: Rule) -> Rule:
    """Decorate a rule that is called only where an equation may have to be split."""

    def asked(eqn: JaxprEqn, times: Sequence[BindingTime], context: Context) -> Outcome:
        results = meet(times)
        if context.sows.inside(eqn):
            return split_rule(eqn, times, context)
        if all(results) and not has_lasting_effect(eqn):
            return whole(eqn, times, context)
        outcome = split_rule(eqn, times, context)
        # An equation that writes to a ref of its own, for example, must be in one program.
        stuck = any(part.stuck for part in outcome.parts)
        return whole(eqn, times, context) if stuck and any(results) else outcome

    return asked


def _early(times: Sequence[BindingTime]) -> list[bool]:
    return [v.early for v in times]


def _ready(times: Sequence[BindingTime]) -> list[bool]:
    return [v.ready for v in times]


def _fresh(avals: Sequence[Aval]) -> tuple[Var, ...]:
    return tuple(map(Var, avals))


def _avals(variables: Sequence[Variable]) -> list[Aval]:
    return [aval for variable in variables for aval in variable.avals]


# --- bodies of all kinds of equations -----------------------------------------------------------


@dataclass(frozen=True)
class _Parts:
    """The split bodies of an equation, and the binding times of its operands and results."""

    inside: Regions
    splits: tuple[Split, ...]
    ins: list[BindingTime]
    outs: list[BindingTime]

    @property
    def predicates(self) -> list[BindingTime]:
        """The binding times of the loop conditions."""
        pairs = zip(self.splits, self.inside.regions, strict=True)
        return [part.outs[0] for part, region in pairs if region.is_predicate]

    def rebuild(
        self,
        marks: Marks,
        bodies: Sequence[ClosedJaxpr],
        arguments: Mapping[str, Sequence[Var]] = _NONE,
        values: Mapping[str, Sequence[Var]] = _NONE,
    ) -> JaxprEqn:
        """Return the equation of init or apply, variables as first operands or last results."""
        outs = marks(self.outs)
        return self.inside.rebuild(bodies, marks(self.ins), outs, arguments, values, first=True)

    def applied(self, marks: Sequence[bool], fields: Sequence[str]) -> list[ClosedJaxpr]:
        """Return the bodies of apply, with variables before the arguments of the first field."""
        bodies = []
        for part, region in zip(self.splits, self.inside.regions, strict=True):
            earlier = itertools.takewhile(lambda name: name not in fields, region.groups)
            positions = {i for name in earlier for i in self.inside.operands[name]}
            ready = zip(region.ins, part.ins, strict=True)
            at = sum(1 for i, times in ready if i in positions and times.ready)
            bodies.append(part.apply(self._results(region, marks), at))
        return bodies

    def initial(self, marks: Sequence[bool], variables: bool = True) -> list[ClosedJaxpr]:
        """Return the bodies of init, which return the variables last."""
        return [
            part.init(self._results(region, marks), variables)
            for part, region in zip(self.splits, self.inside.regions, strict=True)
        ]

    def _results(self, region: Region, marks: Sequence[bool]) -> list[bool]:
        return [out is None or marks[out] for out in region.outs]

    def outcome(
        self,
        init: JaxprEqn | None,
        apply: JaxprEqn | None,
        variables: tuple[Variable, ...],
        values: tuple[Var, ...],
        arguments: tuple[Var, ...],
    ) -> Outcome:
        outs = tuple(self.outs)
        return Outcome(outs, _some(init), _some(apply), variables, values, arguments, self.splits)


def _parts(
    eqn: JaxprEqn, times: Sequence[BindingTime], context: Context, together: bool = True
) -> _Parts:
    """Split the bodies of an equation, by the binding times that hold in every iteration.

    A value is at most as early and ready as the predicate that selects it. With
    `together=False` the bodies themselves are split without regard to conditions.
    """
    inside = regions(eqn)
    assert inside is not None
    splits: dict[int, Split] = {}
    predicates = [times[i] for i in inside.predicates]

    def through(number: int, facts: list[BindingTime]) -> tuple[BindingTime, ...]:
        body, region = inside.bodies[number], inside.regions[number]
        if region.is_predicate:
            predicates[:] = split_body(body, facts, context).outs
        going = meet(predicates)
        if predicates and together and not region.is_predicate:
            facts = [meet((fact, going)) for fact in facts]
        with context.under(going):
            splits[number] = split_body(body, facts, context)
        return splits[number].outs

    _, outs = inside.forward(times, through, lambda a, b: meet((a, b)), control=True)
    parts = tuple(splits[number] for number in range(len(inside.bodies)))
    ins = list(times)
    for part, region in zip(parts, inside.regions, strict=True):
        for i, fact in zip(region.ins, part.ins, strict=True):
            ins[i] = fact
    return _Parts(inside, parts, ins, outs)


# --- calls ------------------------------------------------------------------------------------


@rule(kind_rules, "call")
@_split_if_needed
def _call(eqn: JaxprEqn, times: Sequence[BindingTime], context: Context) -> Outcome:
    scope = scope_of(eqn)
    context.scopes += [] if scope is None else [scope]
    parts = _parts(eqn, times, context)
    del context.scopes[len(context.scopes) - (scope is not None) :]
    (part,), (region,), edges = parts.splits, parts.inside.regions, parts.inside.edges
    first = region.groups[:1]
    variables = tuple(v if scope is None else v.under(scope) for v in part.variables)
    if eqn.params.get("differentiated"):
        variables = _computed_again(eqn, variables)
    values, arguments = _fresh(_avals(variables)), _fresh(_avals(variables))
    outs = part.outs
    init = apply = None
    if variables or any(_early(outs)) or part.early.effects:
        init = eqn
        if variables or part.ready.effects or not all(_early((*times, *outs))):
            bodies = parts.initial(_early(outs))
            init = parts.rebuild(_early, bodies, values={edges.results[-1]: values})
    if variables or any(_ready(outs)) or part.ready.effects:
        apply = eqn
        if variables or not all(_ready((*times, *outs))):
            apply = parts.rebuild(_ready, parts.applied(_ready(outs), first), {first[0]: arguments})
    if variables and (scope is None or not (part.passes_on or context.sows_otherwise(part.body))):
        # A `nest` in which values are still sown stays one, under its own name.
        init, apply = _named(init, scope, "init"), _named(apply, scope, "apply")
    return parts.outcome(init, apply, variables, values, arguments)


def _some(eqn: JaxprEqn | None) -> tuple[JaxprEqn, ...]:
    return () if eqn is None else (eqn,)


def _named(eqn: JaxprEqn, scope: str | None, suffix: str) -> JaxprEqn:
    """Return the call of init or apply with its name."""
    if "name" not in eqn.params:
        return eqn
    return eqn.replace(params={**eqn.params, "name": f"{scope or eqn.params['name']}_{suffix}"})


def _computed_again(eqn: JaxprEqn, variables: Sequence[Variable]) -> tuple[Variable, ...]:
    """Return the variables of a differentiated remat, which recomputes its values."""
    for variable in variables:
        if variable.mode != "strict":
            raise UnsupportedError(
                f"variable '{variable.path[-1]}' is sown in mode \"{variable.mode}\" inside "
                f"{named(eqn)}, which recomputes it, so its occurrences cannot be told apart"
            )
    return tuple(replace(variable, again=True) for variable in variables)


# --- loops ------------------------------------------------------------------------------------


@rule(kind_rules, "loop")
@_split_if_needed
def _loop(eqn: JaxprEqn, times: Sequence[BindingTime], context: Context) -> Outcome:
    """Split a loop: init stacks its variables, and each iteration of apply takes a row of them."""
    if eqn.primitive.name in While.primitives and context.sows.inside(eqn):
        scan = as_scan(eqn, context)
        return _loop(scan, times[-len(scan.invars) :], context)
    parts = _parts(eqn, times, context)
    _check_loop(eqn, parts.splits)
    edges, trips = parts.inside.edges, parts.inside.view.trips
    sowing = [part for part in parts.splits if part.variables]
    rows, stacks = edges.sliced[:1], edges.stacked[:1]
    if sowing and (len(sowing) > 1 or trips is None or not (rows and stacks)):
        raise no_rule(eqn)
    variables = tuple(v.stacked(trips) for part in sowing for v in part.variables)
    values, arguments = _fresh(_avals(variables)), _fresh(_avals(variables))
    init = apply = None
    if all(_early(parts.predicates)):
        bodies = parts.initial(_early(parts.outs))
        init = parts.rebuild(_early, bodies, values=dict.fromkeys(stacks, values))
    if not variables and all(_ready((*times, *parts.outs))):
        apply = eqn
    elif all(_ready(parts.predicates)):
        bodies = parts.applied(_ready(parts.outs), rows)
        apply = parts.rebuild(_ready, bodies, dict.fromkeys(rows, arguments))
    return parts.outcome(init, apply, variables, values, arguments)


def _check_loop(eqn: JaxprEqn, parts: Sequence[Split]) -> None:
    if reordered(parts):
        raise UnsupportedError(
            f"{named(eqn)} has ordered effects of both init and apply in each iteration"
        )
    for variable in parts[-1].variables:
        if variable.mode == "clobber":
            raise UnsupportedError(
                f"variable '{variable.path[-1]}' is sown in mode \"clobber\" inside "
                f"{named(eqn)}: it would keep the last iteration's value, but apply needs those "
                "of all iterations",
                'mode "strict" stacks them',
            )


# --- branches ---------------------------------------------------------------------------------


@rule(kind_rules, "branch")
@_split_if_needed
def _branch(eqn: JaxprEqn, times: Sequence[BindingTime], context: Context) -> Outcome:
    inside = regions(eqn)
    assert inside is not None
    sows = any(map(context.sows, inside.bodies))
    parts = _parts(eqn, times, context, together=not sows)
    predicate, outs, splits = meet(times[i] for i in inside.predicates), parts.outs, parts.splits
    variables = tuple(v for part in splits for v in part.variables)
    for part in splits:
        if part.early.effects and (part.variables or not predicate.early):
            raise UnsupportedError(
                f"a branch of {named(eqn)} has an effect that belongs to init, but init cannot "
                "know whether the branch is taken"
            )
    calls, values = _variables_of_branches(parts)
    init: tuple[JaxprEqn, ...] = calls
    if predicate.early:
        init += (parts.rebuild(_early, parts.initial(_early(outs), variables=False)),)
    arguments = _fresh(_avals(variables))
    apply = None
    if predicate.ready and not variables and all(_ready((*times, *outs))):
        apply = eqn
    elif predicate.ready:
        first = inside.regions[0].groups[:1]
        bodies = parts.applied(_ready(outs), first)
        bodies = [_widened(body, i, splits) for i, body in enumerate(bodies)]
        apply = parts.rebuild(_ready, bodies, {first[0]: arguments})
    return Outcome(tuple(outs), init, _some(apply), variables, values, arguments, splits)


def _variables_of_branches(parts: _Parts) -> tuple[tuple[JaxprEqn, ...], tuple[Var, ...]]:
    """Return calls that compute the variables of each branch, whichever will be taken."""
    calls: list[JaxprEqn] = []
    values: list[Var] = []
    eqn = parts.inside.eqn
    for part, region in zip(parts.splits, parts.inside.regions, strict=True):
        if part.variables:
            outs = _fresh(_avals(part.variables))
            early_operands = keep([eqn.invars[i] for i in region.ins], _early(part.ins))
            calls.append(call(part.init([False] * len(part.outs)), early_operands, outs, eqn))
            values += outs
    return tuple(calls), tuple(values)


def _widened(body: ClosedJaxpr, position: int, parts: Sequence[Split]) -> ClosedJaxpr:
    """Return the apply of one branch with the variables of all branches as arguments, in order."""
    count = len(parts[position].arguments)
    before, after = (
        _fresh([v.aval for part in group for v in part.arguments])
        for group in (parts[:position], parts[position + 1 :])
    )
    invars = [*before, *body.invars[:count], *after, *body.invars[count:]]
    return jaxcompat.replace_jaxpr(body, invars=invars)


# --- shards -----------------------------------------------------------------------------------


@rule(unzip_rules, "shard_map")
@_split_if_needed
def _shard_map(eqn: JaxprEqn, times: Sequence[BindingTime], context: Context) -> Outcome:
    """Split a shard_map. Variables that vary between shards are stacked, in mesh order."""
    parts = _parts(eqn, times, context)
    (part,), outs, shards = parts.splits, parts.outs, ShardMap.of(eqn)
    axes = [_axes(shards, aval) for aval in _avals(part.variables)]
    specs = tuple(PartitionSpec(names) if names else PartitionSpec() for names in axes)
    body = _with_shard_axes(part.init(_early(outs)), "outvars", axes)
    init_outs = {"outs": _fresh(_avals(part.variables))}
    sharded = ShardMap.of(parts.rebuild(_early, [body], values=init_outs))
    kept = len(sharded.outs) - len(specs)
    init = sharded.rebuild(out_specs=sharded.out_specs[:kept] + specs)
    types, _ = jaxcompat.inferred_types(init.primitive, init.params, init.invars)
    values, arguments = _fresh(types[kept:]), _fresh(types[kept:])
    init = init.replace(outvars=[*sharded.outs[:kept], *values])
    apply = eqn
    if part.variables or not all(_ready((*times, *outs))):
        body = _with_shard_axes(part.apply(_ready(outs)), "invars", axes)
        sharded = ShardMap.of(parts.rebuild(_ready, [body], {"operands": arguments}))
        apply = sharded.rebuild(in_specs=specs + sharded.in_specs[len(specs) :])
    avals = iter(types[kept:])
    variables = tuple(
        replace(v, avals=tuple(itertools.islice(avals, len(v.avals)))) for v in part.variables
    )
    return parts.outcome(init, apply, variables, values, arguments)


def _axes(shards: ShardMap, aval: Aval) -> tuple[Hashable, ...]:
    """Return the mesh axes, among those the shard_map makes manual, over which a value may vary."""
    p = shards.eqn.params
    varying = p["newly_manual_axes"]
    if p["check_vma"]:
        varying &= jaxcompat.varying_axes(aval)
    return tuple(axis for axis in shards.mesh.axis_names if axis in varying)


def _with_shard_axes(
    body: ClosedJaxpr, side: str, axes: Sequence[tuple[Hashable, ...]]
) -> ClosedJaxpr:
    """Return a body whose variables, first arguments or last results, have an axis of shards."""
    first = side == "invars"
    atoms = list(body.invars if first else body.outvars)
    eqns = []
    for i, names in enumerate(axes, start=0 if first else len(atoms) - len(axes)):
        if names:
            outer = Var(jaxcompat.stacked_aval(1, atoms[i].aval))
            operand, result = (outer, atoms[i]) if first else (atoms[i], outer)
            reshape = partial(jnp.reshape, shape=result.aval.shape)
            eqns.append(equation_of(reshape, operand, result))
            atoms[i] = outer
    if first:
        return jaxcompat.replace_jaxpr(body, invars=atoms, eqns=[*eqns, *body.eqns])
    return jaxcompat.replace_jaxpr(body, outvars=atoms, eqns=[*body.eqns, *eqns])


# --- custom derivatives ---------------------------------------------------------------------------
# Splitting of calls with custom derivatives that declare variables inside.
#
# The user's rules describe how the function depends on its operands, but not on its variables,
# which were internal. In apply they are operands, and the derivative is the sum of two: with
# respect to the operands by the user's rules, in which the variables are substituted as well, and
# with respect to the variables as JAX differentiates the function's body.


@rule(unzip_rules, "custom_jvp_call", "custom_vjp_call")
def _custom(eqn: JaxprEqn, times: Sequence[BindingTime], context: Context) -> Outcome:
    if not context.sows(eqn.params["call_jaxpr"]):
        return whole(eqn, times, context)
    part = split_body(jaxcompat.close_jaxpr(eqn.params["call_jaxpr"]), times, context)
    if any(v.mode != "strict" for v in part.variables):
        raise _refused(eqn, 'only mode "strict" is supported there')
    _check_independent(eqn, part)
    types = [v.aval for v in part.arguments]
    values, arguments = tuple(map(Var, types)), tuple(map(Var, types))
    early_operands = keep(eqn.invars, [v.early for v in times])
    init = [call(part.init([False] * len(part.outs)), early_operands, values, eqn)]
    ready = all(v.ready for v in part.outs)
    early = ready and all(v.early for v in times)
    apply = []
    if ready:
        params = _substituted_params(eqn, part, context)
        operands = keep(eqn.invars, [v.ready for v in times])
        apply.append(_equation(eqn, (*arguments, *operands), params))
        if early:
            init.append(_equation(eqn, (*values, *operands), params))
    outs = (BindingTime(early, ready),) * len(eqn.outvars)
    return Outcome(
        outs, tuple(init), tuple(apply), tuple(part.variables), values, arguments, parts=(part,)
    )


def _check_independent(eqn: JaxprEqn, part: Split) -> None:
    """Refuse variables that depend on differentiable operands which apply has.

    The user's rules include the derivative through the variable, from which it cannot be separated.
    """
    init = part.init([False] * len(part.outs))
    _, used = dce_body(init, [True] * len(init.outvars))
    early = [i for i, times in enumerate(part.ins) if times.early]
    for i in compress(early, used):
        atom = eqn.invars[i]
        constant = i < eqn.params["num_consts"] or isinstance(atom, Literal)
        if part.ins[i].ready and not (constant or is_float0(atom.aval.to_tangent_aval())):
            raise _refused(eqn, "one of them depends on an operand that is not a key")


def _equation(eqn: JaxprEqn, operands: Sequence[Atom], params: dict[str, Any]) -> JaxprEqn:
    effects = jaxcompat.operand_effects(params["call_jaxpr"], operands)
    return eqn.replace(invars=list(operands), params={**eqn.params, **params}, effects=effects)


def _substituted_params(eqn: JaxprEqn, part: Split, context: Context) -> dict[str, Any]:
    """Return the parameters of the call that takes variables, then the operands that are ready.

    Values that the call closes over are among its operands; its rules see them as constants, as in
    JAX. A rule that calls its own function holds the same call, which has the same rule.
    """
    request = rule_key(eqn), part.ins
    params = context.custom_calls.get(request)
    if params is None:
        rules: list[Any] = []
        body = part.apply([True] * len(part.outs))
        params = context.custom_calls[request] = following(eqn, body, lambda: rules[0])
        jvp = eqn.primitive.name == "custom_jvp_call"
        rules.append((_substituted_jvp if jvp else _substituted_vjp)(eqn, part, body, context))
        # With symbolic zeros, JAX passes which operands are differentiated.
        params["symbolic_zeros"] = not all(rules[0].perturbed)
    return params


class _RuleWithVariables:
    """A jaxpr of a rule, with the function's variables substituted where it declares them too."""

    def __init__(
        self,
        eqn: JaxprEqn,
        jaxpr: ClosedJaxpr,
        ins: Sequence[BindingTime],
        part: Split,
        context: Context,
    ):
        if any(isinstance(const, jax.core.Tracer) for const in jaxpr.consts):
            raise _refused(eqn, "its rule closes over traced values")
        self.part = split_body(jaxpr, ins, context)
        self.outs = [v.ready for v in self.part.outs]
        if self.part.stuck or self.part.early.effects:
            raise _refused(eqn, "its rule has an effect that needs a key")
        first = {v.path: i for i, v in enumerate(part.variables)}
        starts = np.cumsum([0, *(len(v.avals) for v in part.variables)])
        self.order: list[int] = []
        for variable in self.part.variables:
            number = first.get(variable.path)
            if number is None:
                raise _refused(
                    eqn, f"its rule declares '{variable.path[-1]}', but the function does not"
                )
            self.order += range(starts[number], starts[number + 1])

    def __call__(self, values: Sequence[Any], operands: Sequence[Any]) -> dict[int, Any]:
        """Return the results that are ready, by number; reads only the ready `operands`."""
        ready_operands = keep(operands, [v.ready for v in self.part.ins])
        apply = jaxcompat.jaxpr_as_fun(self.part.apply(self.outs))
        results = apply(*(values[i] for i in self.order), *ready_operands)
        numbers = (i for i, ready in enumerate(self.outs) if ready)
        return dict(zip(numbers, results, strict=True))


def _spread(values: Sequence[Any], marks: Sequence[bool], other: Any) -> list[Any]:
    """Return `values` at the marked positions, and `other` elsewhere."""
    rest = iter(values)
    return [next(rest) if mark else other for mark in marks]


def _substituted_jvp(eqn: JaxprEqn, part: Split, body: ClosedJaxpr, context: Context) -> JVPRule:
    rule = jvp_rule(eqn)
    count, num_values, n = len(eqn.outvars), len(part.arguments), eqn.params["num_consts"]
    if rule.raises is not None:
        everything = (True,) * len(body.invars)
        return JVPRule(rule.name, None, (False,) * count, everything, rule.raises)
    if not all(rule.perturbed):
        raise _refused(eqn, "its rule can differentiate only with respect to some of its operands")
    ins = part.ins[n:]
    substituted = _RuleWithVariables(eqn, rule.jaxpr, [*ins, *[READY] * len(ins)], part, context)
    if not all(substituted.outs):
        raise _refused(eqn, "its rule uses a key that does not pass through a variable")
    marks = [v.ready for v in part.ins]
    nonzero = [i for i, zero in enumerate(rule.out_zeros) if not zero]

    def jvp(with_variables: bool, *args: Any) -> list[Any]:
        primals, tangents = args[: len(args) // 2], args[len(args) // 2 :]
        values, operands = primals[:num_values], primals[num_values:]
        # Operands that apply does not have get zero tangents.
        dots_in = [
            _zeros(v.aval.to_tangent_aval()) if t is None else t
            for v, t in zip(eqn.invars, _spread(tangents[num_values:], marks, None), strict=True)
        ]
        results = substituted(values, [*_spread(operands, marks, None)[n:], *dots_in[n:]])
        dots = {i: results[count + k] for k, i in enumerate(nonzero)}
        if with_variables:
            _, by_values = jax.jvp(
                lambda *v: jaxcompat.jaxpr_as_fun(body)(*v, *operands),
                values,
                tangents[:num_values],
            )
            for i, dot in enumerate(by_values):
                times = dot.dtype != jax.dtypes.float0 and i in dots
                dots[i] = dots[i] + dot if times else dot
        return [*(results[i] for i in range(count)), *(dots[i] for i in sorted(dots))]

    avals = [v.aval for v in body.invars]
    types = [*avals, *(aval.to_tangent_aval() for aval in avals)]
    jaxpr, by_variables = _traced(eqn, jvp, rule.name, types)
    zeros = tuple(not (by_variables or i in nonzero) for i in range(count))
    perturbed = (*[by_variables] * num_values, *[True] * (len(avals) - num_values))
    return JVPRule(rule.name, jaxpr, zeros, perturbed)


def _substituted_vjp(eqn: JaxprEqn, part: Split, body: ClosedJaxpr, context: Context) -> VJPRule:
    rule = vjp_rule(eqn)
    if rule.raises is not None:
        names = rule.fwd_name, rule.bwd_name
        return vjp_rule_that_raises(*names, rule.raises, len(body.invars))
    if not all(rule.perturbed):
        raise _refused(eqn, "its rules can differentiate only with respect to some of its operands")
    num_given, n = rule.forwarded.count(None), eqn.params["num_consts"]
    fwd = _RuleWithVariables(eqn, rule.fwd, part.ins[n:], part, context)
    if not all(fwd.outs):
        raise _refused(eqn, "its forward rule uses a key that does not pass through a variable")
    residual_times = [READY if i is None else part.ins[n + i] for i in rule.forwarded]
    bwd = _RuleWithVariables(
        eqn, rule.bwd, [*residual_times, *[READY] * len(eqn.outvars)], part, context
    )
    marks, num_values = [v.ready for v in part.ins], len(part.arguments)
    numbers = {i: k for k, i in enumerate(i for i, zero in enumerate(rule.in_zeros) if not zero)}
    wanted = [numbers.get(i) for i, ready in enumerate(marks, start=-n) if ready]
    if not all(k is None or bwd.outs[k] for k in wanted):
        raise _refused(eqn, "its backward rule uses a key that does not pass through a variable")
    avals = [v.aval for v in body.invars]
    discrete = [is_float0(aval.to_tangent_aval()) for aval in avals[:num_values]]

    def forward(*args: Any) -> list[Any]:
        values, operands = args[:num_values], args[num_values:]
        results = fwd(values, _spread(operands, marks, None)[n:])
        return [results[i] for i in range(len(results))]

    def backward(with_variables: bool, *args: Any) -> list[Any]:
        saved, primals = iter(args[:num_given]), args[num_given : num_given + len(avals)]
        values, operands = primals[:num_values], primals[num_values:]
        cotangents = list(args[num_given + len(avals) :])
        full = _spread(operands, marks, None)
        residuals = [next(saved) if i is None else full[n + i] for i in rule.forwarded]
        results = bwd(values, [*residuals, *cotangents])
        by_operands = [results[k] for k in wanted if k is not None]
        if not with_variables:
            return by_operands
        _, pull = jax.vjp(lambda *v: jaxcompat.jaxpr_as_fun(body)(*v, *operands), *values)
        by_values = zip(pull(cotangents), discrete, strict=True)
        return [*(ct for ct, zero in by_values if not zero), *by_operands]

    residual_types = [v.aval for v in rule.fwd.outvars[:num_given]]
    cotangent_types = [v.aval.to_ct_aval() for v in eqn.outvars]
    types = [*residual_types, *avals, *cotangent_types]
    with jaxcompat.setting_of(eqn):
        forward_jaxpr = jaxcompat.trace_flat(forward, rule.fwd_name, avals)
    backward_jaxpr, by_variables = _traced(eqn, backward, rule.bwd_name, types)
    zeros = discrete if by_variables else [True] * num_values
    return VJPRule(
        rule.fwd_name,
        rule.bwd_name,
        forward_jaxpr,
        backward_jaxpr,
        (*[None] * num_given, *range(len(avals))),
        (*zeros, *(k is None for k in wanted)),
        (*[by_variables] * num_values, *[True] * len(wanted)),
    )


def _traced(
    eqn: JaxprEqn, rule: Callable[..., list[Any]], name: str, avals: Sequence[Aval]
) -> tuple[ClosedJaxpr, bool]:
    """Trace `rule(True, *args)`, or `rule(False, *args)` if that raises, and return which."""
    with jaxcompat.setting_of(eqn):
        try:
            return jaxcompat.trace_flat(partial(rule, True), name, avals), True
        except Exception:  # JAX raises various errors for a body that it cannot differentiate
            return jaxcompat.trace_flat(partial(rule, False), name, avals), False


def _zeros(aval: Aval) -> Any:
    return (np if is_float0(aval) else jnp).zeros(aval.shape, aval.dtype)


def _refused(eqn: JaxprEqn, why: str) -> UnsupportedError:
    return UnsupportedError(f"variables are sown inside {named(eqn)}: {why}")
