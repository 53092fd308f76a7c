"""Dead-code elimination: remove every equation, at every depth, whose results nobody uses.

Liveness flows backwards: an equation stays if one of its results is used or if it has an effect
that something outside could see, and then the operands it needs are used. A primitive that holds
jaxprs has a rule in `dce_rules` that removes what is dead inside it, and with that operands and
results that only the dead code needed: scan and while find their used carries by fixed point.

The contract of `dce_jaxpr` and of the rules is that of JAX's `jax.interpreters.partial_eval`; what
is more here: while loops are entered on every JAX, constants that nobody reads go, and the bodies
of primitives that no rule knows are cleaned too. Reads of a ref and named axes leave no trace and
may go; prints, callbacks and every other effect stay, in order. A write to a ref stays if something
may read the ref later: an equation that stays or, if the ref comes from outside, the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import jax

from jaxprtool import jaxcompat
from jaxprtool.ir.program import Program
from jaxprtool.ir.rewrite import with_bodies
from jaxprtool.ir.rules import RuleTable
from jaxprtool.ir.structured import (
    Call,
    Cond,
    CustomJVP,
    CustomVJP,
    Scan,
    ShardMap,
    While,
    holds_jaxpr,
    keep,
)
from jaxprtool.jaxcompat import JaxprEqn, Literal, Var
from jaxprtool.passes.base import Pass

#: `rule(used_outputs, live_inputs, eqn) -> (used_inputs, new_eqn)`. It is asked only if a result is
#: used or the equation has an effect that must stay. `live_inputs` says which operands may be read
#: after the equation; it is False for refs alone. `new_eqn` takes the used inputs and gives the
#: used outputs (more, if it must); None removes the equation after all.
Rule = Callable[[list[bool], list[bool], JaxprEqn], tuple[list[bool], JaxprEqn | None]]

#: The open table: a plug-in adds its primitive's rule by name.
dce_rules: RuleTable[Rule] = RuleTable()


@dataclass(frozen=True)
class Dce(Pass):
    """Remove every equation, at every depth, whose results nobody uses."""

    name: ClassVar[str] = "dce"

    #: Also remove the program's own unused arguments: each becomes None in its pytree.
    drop_inputs: bool = False

    def __call__(self, program: Program) -> Program:
        used_outputs = [True] * len(program.jaxpr.outvars)
        jaxpr, used = dce_body(program.jaxpr, used_outputs, not self.drop_inputs)
        if all(used):
            return program.replace(jaxpr=jaxpr)
        marks = [0 if flag else None for flag in used]
        return program.replace(
            jaxpr=jaxpr,
            in_tree=jax.tree.structure(jax.tree.unflatten(program.in_tree, marks)),
            arg_names=keep(program.arg_names, used),
        )


def dce_jaxpr(
    jaxpr: Any,
    used_outputs: bool | Sequence[bool],
    instantiate: bool | Sequence[bool] = False,
    live_inputs: bool | Sequence[bool] = True,
) -> tuple[Any, list[bool]]:
    """Remove dead code from a jaxpr, as JAX's internal function of the same name does.

    A bool stands for a sequence of it.

    Args:
        jaxpr: A jaxpr, open or closed. Its constvars stay, used or not.
        used_outputs: Which results are wanted.
        instantiate: Which inputs stay even if they are unused.
        live_inputs: Of each input that is a ref, whether it may be read after the jaxpr has run.
            A write to one that may not goes if nothing in the jaxpr reads it. What is said of
            other inputs is ignored.

    Returns:
        The jaxpr that takes the used inputs and gives the used outputs, which is `jaxpr` itself
        if nothing is dead, and the flags of the used inputs.

    Raises:
        ValueError: If a sequence's length is not the jaxpr's.
    """
    outputs = _flags(used_outputs, len(jaxpr.outvars), "used_outputs", "results")
    inputs = _flags(instantiate, len(jaxpr.invars), "instantiate", "inputs")
    at_exit = _flags(live_inputs, len(jaxpr.invars), "live_inputs", "inputs")
    live, eqns = _live_equations(jaxpr, outputs, at_exit)
    used = [flag or v in live for v, flag in zip(jaxpr.invars, inputs, strict=True)]
    if all(outputs) and all(used) and _same(eqns, jaxpr.eqns):
        return jaxpr, used
    consts = getattr(jaxpr, "consts", ())
    return _replace(jaxpr, jaxpr.constvars, consts, used, outputs, eqns), used


def _flags(flags: bool | Sequence[bool], count: int, argument: str, what: str) -> list[bool]:
    if isinstance(flags, bool):
        return [flags] * count
    if len(flags) != count:
        raise ValueError(f"{argument} has {len(flags)} flags for the jaxpr's {count} {what}")
    return list(flags)


# --- the pass over one jaxpr ------------------------------------------------------------------

# Cleaned bodies by the body they came from, so that a body shared by many equations is cleaned
# once for each pattern of used results and stays shared. None stands for "as it was": a strong
# reference to the key would keep it alive for ever.
_cleaned: WeakKeyDictionary[Any, dict[tuple, tuple[Any, list[bool]]]] = WeakKeyDictionary()


def dce_body(
    body: Any,
    used_outputs: Sequence[bool],
    instantiate: bool | Sequence[bool] = False,
    live_inputs: bool | Sequence[bool] = True,
) -> tuple[Any, list[bool]]:
    """`dce_jaxpr` for a closed jaxpr whose unused constants may go as well.

    Gives the same object back if nothing is dead, and the same new one for the same request.
    """
    if isinstance(instantiate, bool):
        instantiate = [instantiate] * len(body.invars)
    if isinstance(live_inputs, bool):
        live_inputs = [live_inputs] * len(body.invars)
    # In JAX 0.10 an open body is closed anew whenever it is viewed: what lasts is the open one.
    anchor = body if body.consts else jaxcompat.open_jaxpr(body)
    known = _cleaned.setdefault(anchor, {})
    request = (tuple(used_outputs), tuple(instantiate), tuple(live_inputs))
    if request not in known:
        new, used = _dce_body(body, *map(list, request))
        known[request] = (None if new is body else new, used)
    new, used = known[request]
    return (body if new is None else new), list(used)


def _dce_body(
    body: Any, used_outputs: list[bool], instantiate: list[bool], live_inputs: list[bool]
) -> tuple[Any, list[bool]]:
    live, eqns = _live_equations(body, used_outputs, live_inputs)
    used = [flag or v in live for v, flag in zip(body.invars, instantiate, strict=True)]
    used_consts = [v in live for v in body.constvars]
    if all(used_outputs) and all(used) and all(used_consts) and _same(eqns, body.eqns):
        return body, used
    constvars, consts = keep(body.constvars, used_consts), keep(body.consts, used_consts)
    return _replace(body, constvars, consts, used, used_outputs, eqns), used


def _same(new: Sequence[JaxprEqn], old: Sequence[JaxprEqn]) -> bool:
    return len(new) == len(old) and all(a is b for a, b in zip(new, old, strict=True))


def _replace(
    jaxpr: Any,
    constvars: Sequence[Var],
    consts: Sequence[Any],
    used: list[bool],
    used_outputs: list[bool],
    eqns: list[JaxprEqn],
) -> Any:
    return jaxcompat.replace_jaxpr(
        jaxpr,
        constvars=constvars,
        consts=consts,
        invars=keep(jaxpr.invars, used),
        outvars=keep(jaxpr.outvars, used_outputs),
        eqns=eqns,
        debug_info=jaxcompat.filter_debug_info(jaxpr.debug_info, used, used_outputs),
    )


def _live_equations(
    jaxpr: Any, used_outputs: Iterable[bool], live_inputs: Sequence[bool]
) -> tuple[set[Var], list[JaxprEqn]]:
    """The variables that are read, and the equations that stay, in order."""
    live = {
        v
        for v, flag in zip(jaxpr.outvars, used_outputs, strict=True)
        if flag and type(v) is not Literal
    }
    refs = _Refs.of(jaxpr, live_inputs, live)
    rules, jax_rules, kept = dce_rules, jaxcompat.jax_dce_rules(), []
    for eqn in reversed(jaxpr.eqns):
        outs = eqn.outvars
        rule = rules.get(eqn.primitive.name)
        asks_jax = rule is None and eqn.primitive in jax_rules
        # JAX's own rules decide themselves: that of `free_ref`, which has no effect, keeps it.
        dead = () if asks_jax or not eqn.effects else refs.dead(eqn)
        unused = not asks_jax and live.isdisjoint(outs)
        if unused and not (eqn.effects and has_lasting_effect(eqn, dead)):
            continue
        if rule is None and not (asks_jax or holds_jaxpr(eqn.params.values())):
            kept.append(eqn)
            for v in eqn.invars:
                if type(v) is not Literal:
                    live.add(v)
            continue
        used, new = (rule or _fallback)([v in live for v in outs], refs.live(eqn), eqn)
        if new is None or (unused and not has_lasting_effect(new, dead)):
            continue
        kept.append(new)
        for v, flag in zip(eqn.invars, used, strict=True):
            if flag and type(v) is not Literal:
                live.add(v)
    kept.reverse()
    return live, kept


@dataclass(frozen=True)
class _Refs:
    """Which refs may be read after an equation of a jaxpr that is gone through backwards.

    `at_exit` are those that may be read after the jaxpr, `read` those that equations read. With
    `all_live`, the jaxpr makes no refs of its own, and all others are read after it.
    """

    at_exit: frozenset[Var]
    read: set[Var]
    all_live: bool

    @classmethod
    def of(cls, jaxpr: Any, live_inputs: Sequence[bool], read: set[Var]) -> _Refs:
        if all(live_inputs) and not jaxcompat.allocates_refs(jaxpr):
            return cls(frozenset(), read, True)
        pairs = zip(jaxpr.invars, live_inputs, strict=True)
        return cls(frozenset((*jaxpr.constvars, *(v for v, f in pairs if f))), read, False)

    def live(self, eqn: JaxprEqn) -> list[bool]:
        """Which operands may be read after an equation; True for all that are no refs."""
        if self.all_live:
            return [True] * len(eqn.invars)
        return [
            type(v) is Literal
            or v in self.read
            or v in self.at_exit
            or not isinstance(v.aval, jaxcompat.AbstractRef)
            for v in eqn.invars
        ]

    def dead(self, eqn: JaxprEqn) -> tuple[Any, ...]:
        """The refs among an equation's operands that nothing reads after it."""
        if self.all_live:
            return ()
        return tuple(v for v, flag in zip(eqn.invars, self.live(eqn), strict=True) if not flag)


def has_lasting_effect(eqn: JaxprEqn, dead_refs: Sequence[Var] = ()) -> bool:
    """Whether an equation must stay even if none of its results is used.

    What happens to `dead_refs`, which nothing reads afterwards, does not count.
    """
    return not all(
        jaxcompat.is_removable_effect(effect) or jaxcompat.ref_of(effect) in dead_refs
        for effect in eqn.effects
    )


# --- rules ------------------------------------------------------------------------------------


def _call(
    used_outputs: list[bool], live_inputs: list[bool], eqn: JaxprEqn
) -> tuple[list[bool], JaxprEqn | None]:
    call = Call.of(eqn)
    body, used = dce_body(call.body, used_outputs, live_inputs=live_inputs)
    if body is call.body and all(used) and all(used_outputs):
        return used, eqn
    return used, call.filtered(used, used_outputs, body)


for _name in Call.primitives:
    dce_rules[_name] = _call


def _scan(
    used_outputs: list[bool], live_inputs: list[bool], eqn: JaxprEqn
) -> tuple[list[bool], JaxprEqn | None]:
    scan, live = Scan.of(eqn), live_inputs
    n, k = len(scan.consts), len(scan.carry)
    carry, ys = used_outputs[:k], used_outputs[k:]
    while True:
        stay = [*[False] * n, *carry, *[False] * len(scan.xs)]
        body, used = dce_body(scan.body, [*carry, *ys], stay, live)
        # A ref that any round reads may be read after each of them.
        still_live = [flag or read for flag, read in zip(live, used, strict=True)]
        if used[n : n + k] == carry and still_live == live:
            break
        carry, live = used[n : n + k], still_live
    if body is scan.body and all(used) and all(carry) and all(ys):
        return used, eqn
    new = scan.rebuild(
        consts=keep(scan.consts, used[:n]),
        carry=keep(scan.carry, carry),
        xs=keep(scan.xs, used[n + k :]),
        carry_outs=keep(scan.carry_outs, carry),
        ys=keep(scan.ys, ys),
        body=body,
    )
    return used, new


dce_rules["scan"] = _scan


def _while(
    used_outputs: list[bool], live_inputs: list[bool], eqn: JaxprEqn
) -> tuple[list[bool], JaxprEqn | None]:
    loop = While.of(eqn)
    c, b = len(loop.cond_consts), len(loop.body_consts)
    consts = eqn.invars[: c + b]
    # The condition and the body may have a ref in common: what one reads is live in the other.
    live, carry = live_inputs[: c + b], used_outputs
    while True:
        _, cond_used = dce_body(loop.cond, [True], False, [*live[:c], *[True] * len(carry)])
        carry = [u or r for u, r in zip(carry, cond_used[c:], strict=True)]
        stay = [*[False] * b, *carry]
        body, used = dce_body(loop.body, carry, stay, [*live[c:], *[True] * len(carry)])
        read = {id(v) for v, r in zip(consts, cond_used[:c] + used[:b], strict=True) if r}
        still_live = [flag or id(v) in read for flag, v in zip(live, consts, strict=True)]
        if used[b:] == carry and still_live == live:
            break
        carry, live = used[b:], still_live
    stay = [*[False] * c, *carry]
    cond, cond_used = dce_body(loop.cond, [True], stay, [*live[:c], *[True] * len(carry)])
    all_used = [*cond_used[:c], *used]
    if cond is loop.cond and body is loop.body and all(all_used):
        return all_used, eqn
    new = loop.rebuild(
        cond_consts=keep(loop.cond_consts, cond_used[:c]),
        body_consts=keep(loop.body_consts, used[:b]),
        carry=keep(loop.carry, carry),
        outs=keep(loop.outs, carry),
        cond=cond,
        body=body,
    )
    return all_used, new


dce_rules["while"] = _while


def _cond(
    used_outputs: list[bool], live_inputs: list[bool], eqn: JaxprEqn
) -> tuple[list[bool], JaxprEqn | None]:
    cond, live = Cond.of(eqn), live_inputs[1:]
    reads = [dce_body(branch, used_outputs, False, live)[1] for branch in cond.branches]
    used = [any(flags) for flags in zip(*reads, strict=True)]
    branches = tuple(dce_body(branch, used_outputs, used, live)[0] for branch in cond.branches)
    unchanged = all(new is old for new, old in zip(branches, cond.branches, strict=True))
    if unchanged and all(used) and all(used_outputs):
        return [True, *used], eqn
    new = cond.rebuild(
        operands=keep(cond.operands, used), outs=keep(cond.outs, used_outputs), branches=branches
    )
    return [True, *used], new


dce_rules["cond"] = _cond


def _custom_derivative(
    used_outputs: list[bool], live_inputs: list[bool], eqn: JaxprEqn
) -> tuple[list[bool], JaxprEqn | None]:
    # The user's rules may read operands that the function itself does not: all of them stay.
    cls = CustomJVP if eqn.primitive.name in CustomJVP.primitives else CustomVJP
    call = cls.of(eqn).with_outputs(used_outputs)
    body, used = dce_body(call.body, [True] * len(call.outs), instantiate=True)
    return used, call.eqn if body is call.body else call.rebuild(body=body)


for _name in (*CustomJVP.primitives, *CustomVJP.primitives):
    dce_rules[_name] = _custom_derivative


def _shard_map(
    used_outputs: list[bool], live_inputs: list[bool], eqn: JaxprEqn
) -> tuple[list[bool], JaxprEqn | None]:
    call = ShardMap.of(eqn)
    body, used = dce_body(call.body, used_outputs, live_inputs=live_inputs)
    if body is call.body and all(used) and all(used_outputs):
        return used, eqn
    new = call.rebuild(
        operands=keep(call.operands, used),
        outs=keep(call.outs, used_outputs),
        body=body,
        in_specs=keep(call.in_specs, used),
        out_specs=keep(call.out_specs, used_outputs),
    )
    return used, new


dce_rules["shard_map"] = _shard_map


def _fallback(
    used_outputs: list[bool], live_inputs: list[bool], eqn: JaxprEqn
) -> tuple[list[bool], JaxprEqn | None]:
    """JAX's rule, if it has one; then the bodies are cleaned behind an unchanged signature."""
    used, new = [True] * len(eqn.invars), eqn
    if eqn.primitive in jaxcompat.jax_dce_rules():
        used, new = jaxcompat.apply_jax_dce_rule(used_outputs, eqn, live_inputs)
    return used, None if new is None else with_bodies(new, _clean)


def _clean(held: Any) -> Any:
    if held.constvars and not isinstance(held, jaxcompat.ClosedJaxpr):
        return held  # an open jaxpr whose constants its primitive passes in its own way
    closed = jaxcompat.close_jaxpr(held)
    new, _ = dce_body(closed, [True] * len(closed.outvars), instantiate=True)
    # The equation's effects were computed from its bodies': a body that loses one stays as it is.
    if new is closed or new.effects != closed.effects:
        return held
    return new if isinstance(held, jaxcompat.ClosedJaxpr) else jaxcompat.open_jaxpr(new)
