"""Dead-code elimination: remove every equation, at every depth, whose results are unused.

Liveness flows backwards: an equation stays if one of its results is used or if it has an effect
that is visible from outside, and then its operands are used. Into bodies, liveness follows their
edges (see `ir.regions`): dead code inside is removed, with the operands and results that only
it needed; the used carries of a loop are found by a fixed point.

The contract of `dce_jaxpr` and of the rules is that of JAX's `jax.interpreters.partial_eval`. In
addition, while loops are entered in every JAX release, unused constants are removed, and the bodies
of primitives without a rule are cleaned too. Equations whose only effect is to read a ref or to
name an axis may be removed; prints, callbacks and every other effect stay, in order. A write to a
ref stays if the ref may be read later: by an equation that stays or, if the ref is an input, by the
caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import is_not
from typing import ClassVar

from jaxprtool import jaxcompat
from jaxprtool.ir.backends import JaxprCache
from jaxprtool.ir.equations import is_flat
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import called_body, holds_jaxpr, keep, regions, views
from jaxprtool.ir.rewrite import with_bodies
from jaxprtool.ir.rules import RuleTable, rule
from jaxprtool.ir.trees import filled, structure
from jaxprtool.jaxcompat import AnyJaxpr, Atom, ClosedJaxpr, JaxprEqn, Literal, Primitive, Var
from jaxprtool.passes import Pass

#: `rule(used_outputs, live_inputs, eqn) -> (used_inputs, new_eqn)`. It is called only if a result
#: is used or the equation has an effect that must stay. `live_inputs` marks the operands that may
#: be read after the equation; it is False only for refs. `new_eqn` takes the used inputs and
#: returns the used outputs (or more, if it must); None removes the equation after all.
DceRule = Callable[[Sequence[bool], Sequence[bool], JaxprEqn], tuple[list[bool], JaxprEqn | None]]

#: The open table: a plug-in adds its primitive's rule by name. A primitive whose regions are known
#: needs none.
dce_rules: RuleTable[DceRule] = RuleTable()


@dataclass(frozen=True)
class Dce(Pass):
    """Remove every equation whose results are unused, at every depth.

    Dead code inside loops, branches and calls is removed too, with the operands, carries and
    results that only it needed. Equations with effects stay: prints, callbacks, and writes to a ref
    that is read later.

    Args:
        drop_inputs: Also remove the program's own unused arguments: each becomes None in its
            pytree.

    Example:
        def f(x):
            unused = jnp.exp(x)
            return jnp.sin(x)

        $ jaxprtool opt f.py:f --args "f32[3]" -p dce
        { lambda ; a:f32[3]. let b:f32[3] = sin a in (b,) }
    """

    name: ClassVar[str] = "dce"
    group: ClassVar[str] = "clean up"

    drop_inputs: bool = False

    def __call__(self, program: Program) -> Program:
        used_outputs = [True] * len(program.jaxpr.outvars)
        jaxpr, used = dce_body(program.jaxpr, used_outputs, not self.drop_inputs)
        if all(used):
            return program.replace(jaxpr=jaxpr)
        marks = [0 if flag else None for flag in used]
        return program.replace(
            jaxpr=jaxpr,
            in_tree=structure(filled(program.in_tree, marks)),
            arg_names=keep(program.arg_names, used),
        )


def dce_jaxpr(
    jaxpr: AnyJaxpr,
    used_outputs: bool | Sequence[bool],
    instantiate: bool | Sequence[bool] = False,
    live_inputs: bool | Sequence[bool] = True,
) -> tuple[AnyJaxpr, list[bool]]:
    """Remove dead code from a jaxpr, as JAX's internal function of the same name does.

    A bool represents a sequence of that value.

    Args:
        jaxpr: A jaxpr, open or closed. Its constvars stay, used or not.
        used_outputs: Which results are wanted.
        instantiate: Which inputs stay even if they are unused.
        live_inputs: For each input that is a ref, True if it may be read after the jaxpr has run.
            A write to another ref is removed if nothing in the jaxpr reads it. Flags of other
            inputs are ignored.

    Returns:
        The jaxpr from the used inputs to the used outputs, which is `jaxpr` itself if nothing is
        dead, and the flags of the used inputs.

    Raises:
        ValueError: If the length of a sequence does not match the jaxpr.
    """
    outputs = _flags(used_outputs, len(jaxpr.outvars), "used_outputs", "results")
    inputs = _flags(instantiate, len(jaxpr.invars), "instantiate", "inputs")
    at_exit = _flags(live_inputs, len(jaxpr.invars), "live_inputs", "inputs")
    return _dce(jaxpr, outputs, inputs, at_exit, constants=True)


def _flags(flags: bool | Sequence[bool], count: int, argument: str, what: str) -> list[bool]:
    if isinstance(flags, bool):
        return [flags] * count
    if len(flags) != count:
        raise ValueError(f"{argument} has {len(flags)} flags for the jaxpr's {count} {what}")
    return list(flags)


# --- the pass over one jaxpr ------------------------------------------------------------------

# Cleaned bodies by their original body, so that a body shared by many equations is cleaned once
# for each pattern of used results and stays shared. None means unchanged: a strong reference to the
# key would keep it alive forever.
_cleaned = JaxprCache()


def dce_body(
    body: AnyJaxpr,
    used_outputs: Sequence[bool],
    instantiate: bool | Sequence[bool] = False,
    live_inputs: bool | Sequence[bool] = True,
) -> tuple[AnyJaxpr, list[bool]]:
    """Remove dead code, and unused constants, from a closed jaxpr.

    Arguments are those of `dce_jaxpr`. Returns the same object if nothing is dead, and the same new
    one for the same request.
    """
    count = len(body.invars)
    inputs = _flags(instantiate, count, "instantiate", "inputs")
    at_exit = _flags(live_inputs, count, "live_inputs", "inputs")
    results = _cleaned.of(body)
    request = tuple(used_outputs), tuple(inputs), tuple(at_exit)
    if request not in results:
        new, used = _dce(body, used_outputs, inputs, at_exit, constants=False)
        results[request] = (None if new is body else new, used)
    new, used = results[request]
    return (body if new is None else new), list(used)


def _dce(
    jaxpr: AnyJaxpr,
    used_outputs: Sequence[bool],
    instantiate: Sequence[bool],
    live_inputs: Sequence[bool],
    *,
    constants: bool,
) -> tuple[AnyJaxpr, list[bool]]:
    """Remove dead code; unused constants stay if `constants` is True."""
    live, eqns = _live_equations(jaxpr, used_outputs, live_inputs)
    used = [flag or v in live for v, flag in zip(jaxpr.invars, instantiate, strict=True)]
    used_consts = [constants or v in live for v in jaxpr.constvars]
    same = len(eqns) == len(jaxpr.eqns) and not any(map(is_not, eqns, jaxpr.eqns))
    if same and all((*used_outputs, *used, *used_consts)):
        return jaxpr, used
    new = jaxcompat.replace_jaxpr(
        jaxpr,
        constvars=keep(jaxpr.constvars, used_consts),
        consts=tuple(compress(getattr(jaxpr, "consts", ()), used_consts)),
        invars=keep(jaxpr.invars, used),
        outvars=keep(jaxpr.outvars, used_outputs),
        eqns=eqns,
        debug_info=jaxcompat.filter_debug_info(jaxpr.debug_info, used, used_outputs),
    )
    return new, used


def _live_equations(
    jaxpr: AnyJaxpr, used_outputs: Iterable[bool], live_inputs: Sequence[bool]
) -> tuple[set[Var], list[JaxprEqn]]:
    """Return the variables that are read, and the equations that stay, in order."""
    live = {
        v
        for v, flag in zip(jaxpr.outvars, used_outputs, strict=True)
        if flag and type(v) is not Literal
    }
    refs = _Refs.of(jaxpr, live_inputs, live)
    jax_rules, kept = jaxcompat.jax_dce_rules, list[JaxprEqn]()
    is_nested = not is_flat(jaxcompat.open_jaxpr(jaxpr))
    # Looked up once per primitive: the tables load plug-ins.
    rules: dict[Primitive, tuple[DceRule | None, bool]] = {}
    plain: set[Primitive] = set()
    read_by_none, keep_eqn, read_var = live.isdisjoint, kept.append, live.add
    for eqn in reversed(jaxpr.eqns):  # written for speed: most equations have no rule
        outs, primitive = eqn.outvars, eqn.primitive
        if primitive in plain and not eqn.effects:
            if not read_by_none(outs):
                keep_eqn(eqn)
                for v in eqn.invars:
                    if type(v) is not Literal:
                        read_var(v)
            continue
        if primitive not in rules:
            rule = _rule_of(primitive.name)
            rules[primitive] = rule, rule is None and primitive in jax_rules
            if rules[primitive] == (None, False) and not is_nested:
                plain.add(primitive)
        rule, asks_jax = rules[primitive]
        # A rule of JAX may keep an equation without effects: that of `free_ref` does.
        dead = () if asks_jax or not eqn.effects else refs.dead(eqn)
        unused = not asks_jax and live.isdisjoint(outs)
        if unused and not (eqn.effects and has_lasting_effect(eqn, dead)):
            continue
        read: Iterable[Atom] = eqn.invars
        if rule is not None or asks_jax or (is_nested and holds_jaxpr(eqn.params.values())):
            used, new = (rule or _fallback)([v in live for v in outs], refs.live(eqn), eqn)
            if new is None or (unused and not has_lasting_effect(new, dead)):
                continue
            read, eqn = compress(eqn.invars, used), new
        kept.append(eqn)
        for v in read:
            if type(v) is not Literal:
                live.add(v)
    kept.reverse()
    return live, kept


def _rule_of(primitive: str) -> DceRule | None:
    """Return the rule of a primitive; if its regions are known, the default is `dce_regions`."""
    rule, structured = dce_rules.get(primitive), views.get(primitive)
    has_edges = structured is not None and structured.edges is not None
    return dce_regions if rule is None and has_edges else rule


@dataclass(frozen=True)
class _Refs:
    """The refs that may be read after an equation, while a jaxpr is traversed backwards.

    `at_exit` are those that may be read after the jaxpr, `read` those that equations read. With
    `all_live`, the jaxpr allocates no refs of its own, and all others are read after it.
    """

    at_exit: frozenset[Var]
    read: set[Var]
    all_live: bool

    @classmethod
    def of(cls, jaxpr: AnyJaxpr, live_inputs: Sequence[bool], read: set[Var]) -> _Refs:
        if all(live_inputs) and not jaxcompat.allocates_refs(jaxpr):
            return cls(frozenset(), read, True)
        pairs = zip(jaxpr.invars, live_inputs, strict=True)
        return cls(frozenset((*jaxpr.constvars, *(v for v, f in pairs if f))), read, False)

    def live(self, eqn: JaxprEqn) -> list[bool]:
        """Return which operands may be read after an equation; True for all that are not refs."""
        if self.all_live:
            return [True] * len(eqn.invars)
        return [
            type(v) is Literal
            or v in self.read
            or v in self.at_exit
            or not isinstance(v.aval, jaxcompat.AbstractRef)
            for v in eqn.invars
        ]

    def dead(self, eqn: JaxprEqn) -> tuple[Var, ...]:
        """Return the refs among an equation's operands that nothing reads after it."""
        if self.all_live:
            return ()
        return tuple(v for v, flag in zip(eqn.invars, self.live(eqn), strict=True) if not flag)


def has_lasting_effect(eqn: JaxprEqn, dead_refs: Sequence[Var] = ()) -> bool:
    """Return True if an equation must stay even if none of its results is used.

    Args:
        eqn: The equation.
        dead_refs: Refs that nothing reads after the equation. Effects on these do not count.
    """
    return not all(
        jaxcompat.is_removable_effect(effect) or jaxcompat.ref_of(effect) in dead_refs
        for effect in eqn.effects
    )


# --- rules ------------------------------------------------------------------------------------


def dce_regions(
    used_outputs: Sequence[bool], live_inputs: Sequence[bool], eqn: JaxprEqn
) -> tuple[list[bool], JaxprEqn | None]:
    """Apply the rule of every equation whose regions are known.

    An operand is used if a body reads it. A result of a body is used if the value it becomes, or
    the carry it replaces in the next iteration, is used. Iterates to a fixed point.
    """
    if (called := called_body(eqn)) is not None:  # no fixed point, and often no change
        body, flags = dce_body(called, used_outputs, live_inputs=live_inputs)
        if body is called and all(used_outputs) and all(flags):
            return flags, eqn
    inside = regions(eqn)
    if inside is None:
        return _fallback(used_outputs, live_inputs, eqn)
    keeps_all = inside.edges.has_rule  # the user's rule may read operands that the body does not
    used, kept, live = [keeps_all] * len(eqn.invars), list(used_outputs), live_inputs
    for i in inside.predicates:
        used[i] = True
    several = inside.carried or len(inside.regions) > 1
    grows = True
    while grows:
        for i, out in inside.carried:
            used[i] = kept[out] = used[i] or kept[out]
        new: list[ClosedJaxpr] = []
        reads: list[tuple[int, bool]] = []
        for body, region in zip(inside.bodies, inside.regions, strict=True):
            wanted = [out is None or kept[out] for out in region.outs]
            stay = [used[i] for i in region.ins]
            alive = keeps_all or [live[i] for i in region.ins]
            body, flags = dce_body(body, wanted, stay, alive)
            new.append(body)
            reads += zip(region.ins, flags, strict=True)
        for i, flag in reads:
            if flag:
                used[i] = True
        grows = bool(several) and (
            any(used[i] and not kept[out] for i, out in inside.carried)
            or any(used[i] and not flag for i, flag in reads)
        )
        if not all(live) and inside.repeats:
            # A ref that any iteration reads may be read after each of them, in every body.
            read = {id(v) for v, flag in zip(eqn.invars, used, strict=True) if flag}
            still = [flag or id(v) in read for v, flag in zip(eqn.invars, live, strict=True)]
            grows, live = grows or still != live, still
    if not any(map(is_not, new, inside.bodies)) and all(used) and all(kept):
        return used, eqn
    return used, inside.rebuild(new, used, kept)


def _fallback(
    used_outputs: Sequence[bool], live_inputs: Sequence[bool], eqn: JaxprEqn
) -> tuple[list[bool], JaxprEqn | None]:
    """Apply JAX's rule, if it has one; then clean the bodies, whose signatures stay."""
    used, new = [True] * len(eqn.invars), eqn
    if eqn.primitive in jaxcompat.jax_dce_rules:
        used, new = jaxcompat.apply_jax_dce_rule(used_outputs, eqn, live_inputs)
        if new is not None and _holds_the_same(new, eqn):  # JAX 0.11 makes a new equation each time
            new = eqn
    return used, None if new is None else with_bodies(new, _clean)


@rule(dce_rules, "pallas_call")
def _dce_kernel(
    used_outputs: Sequence[bool], live_inputs: Sequence[bool], eqn: JaxprEqn
) -> tuple[list[bool], JaxprEqn | None]:
    """Remove the unused results of a kernel that it does not read, and inputs that it never reads.

    What is written to scratch stays: it may be a semaphore, or memory that a copy in flight reads.
    """
    from jaxprtool.ir.kernel_calls import kernel_call  # few programs have kernels

    used, new = _fallback(used_outputs, live_inputs, eqn)
    kernel = None if new is None or jaxcompat.is_opaque(new) else kernel_call(new)
    if kernel is None or not kernel.selects_blocks:
        return used, new
    aliased = {*kernel.aliases.values()}
    gone = [e.result is not None and not used_outputs[e.result] for e in kernel.edges]
    stays = [
        not out and (e.result is not None or e.operand in aliased or e.operand is None)
        for e, out in zip(kernel.edges, gone, strict=True)
    ]
    first = len(kernel.prefetched)
    stays[:first] = [True] * first
    body, flags = dce_body(kernel.body, (), stays, [not out for out in gone])
    if all(flags):
        return used, new
    middle = first + len(kernel.inputs)
    kept = flags[first:middle], flags[middle : middle + len(kernel.outputs)]
    used[len(used) - len(kernel.inputs) :] = kept[0]
    return used, kernel.rebuild(body, *kept)


def _holds_the_same(new: JaxprEqn, old: JaxprEqn) -> bool:
    """Return True if an equation has the operands, results and parameters of another one."""
    values = [(eqn.invars, eqn.outvars, eqn.params.values()) for eqn in (new, old)]
    return new.params.keys() == old.params.keys() and all(
        len(a) == len(b) and not any(map(is_not, a, b)) for a, b in zip(*values, strict=True)
    )


def _clean(jaxpr: AnyJaxpr) -> AnyJaxpr:
    if jaxpr.constvars and not isinstance(jaxpr, jaxcompat.ClosedJaxpr):
        return jaxpr  # an open jaxpr whose constants its primitive passes in its own way
    closed = jaxcompat.close_jaxpr(jaxpr)
    new, _ = dce_body(closed, [True] * len(closed.outvars), instantiate=True)
    # The effects of the equation were computed from those of its bodies: they must not change.
    if new is closed or new.effects != closed.effects:
        return jaxpr
    return new if isinstance(jaxpr, jaxcompat.ClosedJaxpr) else jaxcompat.open_jaxpr(new)
