"""unzip: a function that declares variables becomes two, `init` and `apply`.

    def net(key, x):
        w = variable(jax.random.normal(key, (3, 8)), name="w")
        return jnp.tanh(x @ w)

    init, apply = unzip(net)(key, x)
    variables = init(key)              # {"w": ...}
    y = apply(variables, x)            # net(key, x), and takes no key

Arguments named by `key_args` are keys: the first, or with `auto` all that are keys by type. A value
that is computed from keys and constants alone, and sown under the tag, is a variable: a result of
init and an argument of apply. No other path may lead from a key to a result. Loops stack their
variables, scopes nest them (see `split_body` and `rules`).

The contract is that of Oryx's `unzip` (2020-2023), on jaxprs instead of tracers, and extended
to loops, branches and custom derivatives.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, compress, groupby
from typing import Any, ClassVar

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError, UnsupportedError, did_you_mean
from jaxprtool.ir.custom_rules import (
    following,
    jvp_rule,
    rule_key,
    rules_followed,
    vjp_rule,
    vjp_rule_that_raises,
)
from jaxprtool.ir.dataflow import DefUse
from jaxprtool.ir.dtypes import is_float0
from jaxprtool.ir.equations import equations, named, type_of
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.program import Program, Programs, top_jaxpr, type_check
from jaxprtool.ir.regions import Call, Region, Regions, ShardMap, While, call, keep, regions
from jaxprtool.ir.rules import rule
from jaxprtool.ir.trees import filled, leaf_paths, structure
from jaxprtool.jaxcompat import Atom, Aval, ClosedJaxpr, JaxprEqn, JVPRule, Literal, Var, VJPRule
from jaxprtool.passes import Pass
from jaxprtool.passes.cleanup.dce import Dce, dce_body, has_lasting_effect
from jaxprtool.passes.unzip.auto import sow_cut
from jaxprtool.passes.unzip.split import (
    CHOSEN,
    EARLY,
    READY,
    Arguments,
    BindingTime,
    Context,
    Outcome,
    Rule,
    Split,
    UnzipError,
    Variable,
    as_scan,
    at_positions,
    by_type,
    equation_of,
    is_of,
    kind_rules,
    leaf_tree,
    meet,
    no_rule,
    reordered,
    replaced,
    split_body,
    unzip_rules,
    whole,
)
from jaxprtool.primitives import VARIABLE, scope_of, sow_p

__all__ = [
    "BindingTime",
    "Context",
    "Outcome",
    "Unzip",
    "UnzipError",
    "Unzipped",
    "Variable",
    "unzip_rules",
    "whole",
]

# --- rules ----------------------------------------------------------------------------------------
# Splitting of structured equations: a rule for each kind of loop, branch and call.
#
# A call that holds variables becomes two, named NAME_init and NAME_apply. A loop's variables are
# stacked: results of init's loop, and `xs` of apply's loop. For a branch, init computes the
# variables of all branches, whichever is taken. A call without variables stays one call in each
# program that needs it, with only the equations that this program can have.

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


# --- unzip ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unzip(Pass):
    """Split a function that declares variables into `init`, which computes them, and `apply`.

    A value that is computed from keys and constants alone, and named by `jaxprtool.variable`,
    is a variable: a result of `init` and an argument of `apply`, which takes no key. Loops
    stack their variables, scopes nest them.

    Args:
        tag: The tag that variables are sown under.
        key_args: The positional arguments that are keys. "auto": the first, or with `auto=True` all
            arguments that are keys by type.
        auto: Choose the variables: the values with the fewest bytes that cut the keys off from the
            results.
        known: Choose the variables for partial evaluation, with these arguments known before the
            others.

    Raises:
        UnsupportedError: If there is another path from a key to a result, which the message shows;
            if variables are sown an unknown number of times, as in a while loop; or if ordered
            effects belong to both programs.

    Note:
        `jaxprtool unzip TARGET` does the same, and lists the variables.

    Example:
        def f(key, x):
            w = jaxprtool.variable(jax.random.bits(key, (3,)), name="w")
            return w * x

        $ jaxprtool opt f.py:f --args "key(0), u32[3]" -p unzip
        # init
        { lambda ; a:key<fry>[]. let
            b:u32[3] = random_bits[bit_width=32 shape=(3,)] a
          in (b,) }

        # apply
        { lambda ; a:u32[3] b:u32[3]. let c:u32[3] = mul a b in (c,) }
    """

    name: ClassVar[str] = "unzip"
    group: ClassVar[str] = "split"
    preserves: ClassVar[bool] = False

    tag: str | None = VARIABLE
    key_args: int | tuple[int, ...] | str | None = "auto"
    auto: bool = False
    known: int | tuple[int, ...] | None = None

    def __call__(self, program: Program) -> Programs:
        parts = self.unzipped(program)
        return Programs({"init": parts.init, "apply": parts.apply})

    @rules_followed()
    def unzipped(self, program: Program) -> Unzipped:
        """Return init and apply, and the variables between them.

        Raises UnzipError if the variables do not cut keys from the results, if their names are
        missing or not unique, or if no argument is a key; ArgumentsError for unknown `key_args`;
        and UnsupportedError, which names the equation, for variables that cannot be extracted.
        """
        if self.tag is None:
            raise UnzipError("Must provide a tag to unzip.")
        if self.auto and self.known is not None:
            raise ArgumentsError(
                "auto and known exclude each other: auto chooses variables for keys, known for "
                "other arguments"
            )
        arguments = self._arguments(program)
        if not self.auto and self.known is None:
            return unzipped(program, self.tag, arguments)
        sown = sow_cut(program, arguments.marks, CHOSEN, self.known is not None)
        return unzipped(sown, CHOSEN, arguments)

    def _arguments(self, program: Program) -> Arguments:
        """Return the arguments that init takes, and the others."""
        early = self.key_args if self.known is None else self.known
        if isinstance(early, str):
            if early != "auto":
                raise ArgumentsError(
                    f"key_args must be a position, positions or 'auto', not {early!r}"
                )
            if self.auto:
                return by_type(program)
            early = 0
        return at_positions(program, (early,) if isinstance(early, int) else early or ())


# --- programs -------------------------------------------------------------------------------------
# init and apply as Programs, from a program and its split.


@dataclass(frozen=True, eq=False)
class VariableLeaf:
    """An array among the variables: its path, its type, and the equation that sows it."""

    path: str
    aval: Aval
    eqn: JaxprEqn


@dataclass(frozen=True, eq=False)
class Unzipped:
    """The result of unzipping a program; the variables are in the order of their declaration."""

    init: Program
    apply: Program
    variables: tuple[Variable, ...]

    def leaves(self) -> list[VariableLeaf]:
        """Return the arrays among the variables, in the order of their declaration."""
        order = jax.tree.leaves(leaf_tree(self.variables))
        paths = leaf_paths(self.init.out_tree)
        eqns = [variable.eqn for variable in self.variables for _ in variable.avals]
        leaves = zip(order, paths, self.init.out_avals, strict=True)
        return [
            VariableLeaf(path, aval, eqns[i])
            for i, path, aval in sorted(leaves, key=lambda leaf: leaf[0])
        ]


def unzipped(program: Program, tag: str, arguments: Arguments) -> Unzipped:
    """Split a program, with its arguments, at the variables sown under `tag`.

    Raises UnzipError and UnsupportedError; see `Unzip`.
    """
    part = _split(program, arguments.marks, tag)
    check_cut(part, tag, program.arg_names, program.out_names)
    tree = leaf_tree(part.variables)
    leaves, out_tree = jax.tree.flatten(tree)
    root, taken = "variables", {re.split(r"\W", name)[0] for name in program.arg_names}
    while root in taken:
        root += "_"
    paths = jax.tree.leaves_with_path(tree)
    names = tuple(root + jax.tree_util.keystr(path) for path, _ in paths)
    jaxpr = part.init([False] * len(part.outs))
    order, in_tree = jax.tree.flatten(arguments.early)
    early = dict(zip(sorted(order), jaxpr.invars, strict=True))
    init = _pruned(
        program.replace(
            name=f"{program.name}_init",
            in_tree=in_tree,
            out_tree=out_tree,
            arg_names=tuple(program.arg_names[i] for i in order),
            out_names=names,
        ),
        jaxpr,
        [early[i] for i in order],
        [jaxpr.outvars[i] for i in leaves],
    )
    jaxpr = part.apply([True] * len(part.outs))
    others, kwargs = arguments.late
    apply = _pruned(
        program.replace(
            name=f"{program.name}_apply",
            in_tree=structure(((tree, *others), kwargs)),
            arg_names=(*names, *(program.arg_names[i] for i in jax.tree.leaves(arguments.late))),
        ),
        jaxpr,
        [*(jaxpr.invars[i] for i in leaves), *jaxpr.invars[len(leaves) :]],
        jaxpr.outvars,
    )
    return Unzipped(init, apply, tuple(part.variables))


def _split(program: Program, early: Sequence[bool], tag: str) -> Split:
    ins = [EARLY if flag else READY for flag in early]
    part = split_body(program.jaxpr, ins, Context(tag))
    if again := replaced(part.variables):
        part = split_body(program.jaxpr, ins, Context(tag, again))
    return part


def _pruned(
    program: Program, body: ClosedJaxpr, invars: Sequence[Var], outvars: Sequence[Atom]
) -> Program:
    """Return a program with a new body and without dead code; its names and trees are set."""
    debug = body.debug_info._replace(
        func_src_info=program.name, arg_names=program.arg_names, result_paths=program.out_names
    )
    jaxpr = jaxcompat.new_jaxpr(body.constvars, body.consts, invars, outvars, body.eqns, debug)
    return Dce()(program.replace(jaxpr=jaxpr))


# --- request --------------------------------------------------------------------------------------
# The split for the command line, which also explains likely mistakes.
#
# It gives the programs of `jaxprtool.unzip`, which follows Oryx's contract: an argument of any type
# may be used as a key.

_HINT = "name the arguments that are keys with --key-args"


@dataclass(frozen=True)
class UnzipRequest:
    """The requested options; None for unspecified ones. Positions are those of the function.

    Attributes:
        key_args: The positions of keys.
        tag: The tag that variables are sown under.
        auto: True to choose the variables, instead of those that are sown.
        known: Instead of keys, the positions of the arguments that init takes.
    """

    key_args: tuple[int, ...] | None
    tag: str | None
    auto: bool
    known: tuple[int, ...] | None

    def split(self, program: Program, position: Callable[[int], int]) -> Unzipped:
        """Return init and apply, and the variables between them.

        Args:
            program: The program of the function.
            position: Converts the function's position of an argument to the program's.

        Raises:
            ArgumentsError: For positions of no argument, and for a tag under which nothing is sown.
            UnzipError: As `Unzip` does.
        """
        if self.known is not None:
            parts = Unzip(known=tuple(map(position, self.known))).unzipped(program)
        elif self.auto:
            keys = "auto" if self.key_args is None else self._keys(program, position)
            parts = Unzip(key_args=keys, auto=True).unzipped(program)
        else:
            parts = self._split_at_sown(program, self._keys(program, position))
        for part in (parts.init, parts.apply):
            type_check(part, program)
        return parts

    def _split_at_sown(self, program: Program, keys: tuple[int, ...]) -> Unzipped:
        eqns = equations(top_jaxpr(program))
        tags = {eqn.params["tag"] for eqn in eqns if eqn.primitive is sow_p}
        if self.tag is not None and self.tag not in tags:
            there = f"available: {', '.join(sorted(tags))}" if tags else None
            message = f"{program.name} sows nothing under the tag '{self.tag}'"
            raise ArgumentsError(message, did_you_mean(self.tag, tags) or there)
        try:
            return Unzip(tag=self.tag or VARIABLE, key_args=keys).unzipped(program)
        except UnzipError as error:
            hint = error.hint or self._hint(program, keys)
            if self.tag is None and VARIABLE not in tags:
                hint = "--auto chooses variables where none are declared"
            raise UnzipError(error.message, hint) from error

    def _keys(self, program: Program, position: Callable[[int], int]) -> tuple[int, ...]:
        """Return the positional arguments of the program that are keys. Raises ArgumentsError."""
        args, _ = _positions(program)
        key_args = self.key_args
        if key_args is None:
            key_args = (0,) if args else ()
        try:
            return tuple(map(position, key_args))
        except ArgumentsError as error:
            raise ArgumentsError(error.message, _HINT) from None

    def _hint(self, program: Program, keys: tuple[int, ...]) -> str | None:
        """Return a hint that names an argument that cannot be a key, if none was asked for."""
        args, _ = _positions(program)
        for leaf in jax.tree.leaves([args[key] for key in keys if self.key_args is None]):
            aval = program.in_avals[leaf]
            # Keys of both types, and integers from which keys are created.
            if not (is_of(aval, jax.dtypes.prng_key) or is_of(aval, jnp.integer)):
                return f"'{program.arg_names[leaf]}' is {type_of(aval)}, not a key: {_HINT}"
        return None


def _positions(program: Program) -> Any:
    return filled(program.in_tree, range(len(program.in_avals)))


# --- paths ----------------------------------------------------------------------------------------
# Report why variables do not cut off the keys: a path from a key to its use in apply.

#: The number of lines, and of equations of a line, shown at either end of a long path.
SHOWN = 5


def check_cut(part: Split, tag: str, in_names: Sequence[str], out_names: Sequence[str]) -> None:
    """Raise UnzipError, with the path, if apply needs a key that passes through no variable.

    The path leads from the key to a result, or to an equation whose effect needs keys and other
    arguments.
    """
    for atom, binding_time, name in zip(part.body.outvars, part.outs, out_names, strict=True):
        if not binding_time.ready:
            raise _uncut(tag, *_path(part, atom), in_names, [name])
    if part.stuck:
        raise _uncut(tag, *_path_of(part, part.stuck[0]), in_names, [])


def _uncut(
    tag: str, start: int, steps: list[JaxprEqn], in_names: Sequence[str], end: list[str]
) -> UnzipError:
    shown = _ends([_line(place, list(eqns)) for place, eqns in groupby(steps, _place)])
    path = " -> ".join([in_names[start], *shown, *end])
    hint = None
    for eqn in steps:
        if eqn.primitive.name == "sow" and eqn.params["tag"] == tag:
            hint = f"the {named(eqn)} is not a variable: it depends on more than keys"
    return UnzipError(f"Variables do not cut dependence graph. {path}", hint)


def _place(eqn: JaxprEqn) -> str | None:
    """Return the line of the user's own source that an equation comes from."""
    return next(iter(frames_now().texts(eqn)), None)


def _line(place: str | None, eqns: Sequence[JaxprEqn]) -> str:
    """Return the equations of one line as text; calls by the names of their functions."""
    names = [eqn.params["name"] if eqn.primitive.name == "jit" else eqn.primitive for eqn in eqns]
    return ", ".join(_ends(list(map(str, names)))) + ("" if place is None else f" at {place}")


def _ends(steps: list[str]) -> list[str]:
    """Return the first and last steps, with the number of those between them."""
    if len(steps) <= 2 * SHOWN + 1:
        return steps
    return [*steps[:SHOWN], f"({len(steps) - 2 * SHOWN} more)", *steps[-SHOWN:]]


def _path(part: Split, atom: Atom) -> tuple[int, list[JaxprEqn]]:
    """Return the argument that a value that is not ready comes from, and the path's equations."""
    invars = {v: i for i, v in enumerate(part.body.invars)}
    definitions = DefUse(part.body.eqns).definitions
    steps: list[list[JaxprEqn]] = []
    while atom not in invars:
        atom, inner = _before(part, definitions[atom][0], atom)
        steps.append(inner)
    return invars[atom], list(chain.from_iterable(reversed(steps)))


def _path_of(part: Split, eqn: JaxprEqn) -> tuple[int, list[JaxprEqn]]:
    """Return the path to an equation with an effect, into the body that holds the effect."""
    position = next(i for i, e in enumerate(part.body.eqns) if e is eqn)
    inner: list[JaxprEqn] = [eqn]
    operand = _unready(part, eqn)
    for body in part.parts.get(position, ()):
        if body.stuck and eqn.primitive.name in Call.primitives:
            index, inner = _path_of(body, body.stuck[0])
            operand = eqn.invars[index]
    start, steps = _path(part, operand)
    return start, [*steps, *inner]


def _before(part: Split, position: int, atom: Var) -> tuple[Var, list[JaxprEqn]]:
    """Return the operand that keeps a result from being ready, and the equations between."""
    eqn = part.body.eqns[position]
    if position in part.parts and eqn.primitive.name in Call.primitives:
        (body,) = part.parts[position]
        index, steps = _path(body, body.body.outvars[eqn.outvars.index(atom)])
        # Equations inside a library's own call have no line of user code.
        is_user_code = any(jaxcompat.user_frame(step) for step in steps)
        return eqn.invars[index], steps if is_user_code else [eqn]
    return _unready(part, eqn), [eqn]


def _unready(part: Split, eqn: JaxprEqn) -> Var:
    for atom in eqn.invars:
        if not isinstance(atom, Literal) and not part.times[atom].ready:
            return atom
    raise AssertionError(f"all operands of {named(eqn)} are ready")
