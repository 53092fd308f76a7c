"""Removal of checks, at every depth: equations that inspect values and have no results.

*   Checks of `checkify`, and callbacks and prints for debugging: equations without results whose
    only effects are those of checks or of debugging.

*   Equinox's `error_if`, which forwards its operand. In a jaxpr it is a cond, in a `custom_jvp`
    whose rule forwards the tangent. One branch only calls a function that raises, the other
    returns the operand. The function is recognized by its module and name, the branch by its
    results, which need the call; so a `pure_callback` whose value is used is never mistaken for it.

Equations that only checks needed are removed too. Rules of custom derivatives are traced: if one
holds a check, the call gets the rule's jaxpr without it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.custom_rules import (
    CustomRule,
    callback_name,
    custom_rule,
    following,
    has_rule,
    is_check,
    map_rule,
    rule_jaxprs,
    rule_key,
    rules_followed,
)
from jaxprtool.ir.dtypes import is_float0
from jaxprtool.ir.equations import equations, needed_equations, substitute
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import Cond, CustomJVP, CustomVJP, view
from jaxprtool.ir.rewrite import RewriteRule, Writer, rewrite
from jaxprtool.jaxcompat import AnyJaxpr, Atom, ClosedJaxpr, JaxprEqn, JVPRule, Literal, Var
from jaxprtool.passes import Pass
from jaxprtool.passes.cleanup.dce import dce_body
from jaxprtool.passes.cleanup.inline import has_own_settings

#: The functions with which Equinox's `error_if` raises, and opens a debugger.
_RAISING = frozenset(
    f"equinox._errors._error.<locals>.{name}" for name in ("raises", "display_msg")
)

#: The name of the jit of `error_if`.
_ERROR_IF = "branched_error_if_impl"

#: The maximum nesting depth of rules of custom derivatives.
_DEEPEST_RULES = 8


@dataclass(frozen=True)
class DropChecks(Pass):
    """Remove runtime checks (Equinox's error_if, checkify's), debugging prints and callbacks.

    Equations that only they needed are removed too. `pure_callback` and `io_callback` stay, since
    their values or effects are part of what the program computes.

    Example:
        def f(x):
            jax.debug.print("x is {}", x)
            return jnp.sin(x)

        $ jaxprtool opt f.py:f --args "f32[]" -p drop_checks
        { lambda ; a:f32[]. let b:f32[] = sin a in (b,) }
    """

    name: ClassVar[str] = "drop_checks"
    group: ClassVar[str] = "clean up"

    keeps_checks: ClassVar[bool] = False

    def __call__(self, program: Program) -> Program:
        with rules_followed():
            return program.replace(jaxpr=_Dropper().cleaned(program.jaxpr))


class _Dropper:
    """The state of one run: the rules of custom derivatives by key, and their properties."""

    def __init__(self) -> None:
        self._rules: dict[Hashable, CustomRule | None] = {}
        self._checked: dict[Hashable, bool] = {}
        self._forwarding: dict[Hashable, bool] = {}
        self._unchecked: dict[Hashable, Callable[[], Any]] = {}

    def cleaned(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        """Return the jaxpr without checks and code that only they needed; itself if it has none."""
        left = rewrite(jaxpr, self._visitor)
        return left if left is jaxpr else dce_body(left, [True] * len(left.outvars), True)[0]

    def _visitor(self, writer: Writer) -> RewriteRule:
        def rule(eqn: JaxprEqn) -> Sequence[Atom] | None:
            if is_check(eqn):
                return []
            structured = view(eqn)
            if isinstance(structured, Cond):
                return _without_failing(structured, writer)
            if has_rule(eqn):
                return self._custom(eqn, structured, writer)
            named = eqn.primitive.name == "jit" and eqn.params["name"] == _ERROR_IF
            if named and not has_own_settings(eqn):
                return _forwarded(structured.body, eqn.invars)
            return None

        return rule

    # --- custom derivatives -----------------------------------------------------------------------

    def _custom(
        self, eqn: JaxprEqn, call: CustomJVP | CustomVJP, writer: Writer
    ) -> Sequence[Atom] | None:
        if not self._has_checks(eqn):
            return None
        results = _forwarded(call.body, eqn.invars)
        if results is not None and self._forwards(eqn, call):
            return results
        return writer.add(self._following(eqn))

    def _rule(self, eqn: JaxprEqn) -> CustomRule | None:
        """Return the rule of a custom call; None if it cannot be traced."""
        key = rule_key(eqn)
        if key not in self._rules:
            try:
                self._rules[key] = custom_rule(eqn)
            except UnsupportedError:
                self._rules[key] = None
        return self._rules[key]

    def _has_checks(self, eqn: JaxprEqn) -> bool:
        """Return True if the rule of a custom call, or of calls in it, holds a check."""
        key = rule_key(eqn)
        if key not in self._checked:
            self._checked[key] = self._finds_check(eqn)
        return self._checked[key]

    def _finds_check(self, eqn: JaxprEqn) -> bool:
        calls, seen = [eqn], {rule_key(eqn)}
        for _ in range(_DEEPEST_RULES):
            rules = [rule for call in calls if (rule := self._rule(call)) is not None]
            rule_bodies = (body for rule in rules for body in rule_jaxprs(rule).values())
            inside = [eqn for body in rule_bodies for eqn in equations(jaxcompat.open_jaxpr(body))]
            if any(map(_is_dropped, inside)):
                return True
            by_key = {rule_key(call): call for call in inside if has_rule(call)}
            calls = [call for key, call in by_key.items() if key not in seen]
            seen.update(by_key)
        return False

    def _forwards(self, eqn: JaxprEqn, call: CustomJVP | CustomVJP) -> bool:
        """Return True if the rule of a call that forwards its operands forwards their tangents."""
        key = rule_key(eqn)
        if key not in self._forwarding:
            previous = dict(self._forwarding)
            self._forwarding[key] = True  # assume it for calls in the rule: a proof by induction
            if not self._rule_forwards(eqn, call):
                self._forwarding = {**previous, key: False}
        return self._forwarding[key]

    def _rule_forwards(self, eqn: JaxprEqn, call: CustomJVP | CustomVJP) -> bool:
        rule = self._rule(eqn)
        if not isinstance(rule, JVPRule) or rule.jaxpr is None:
            return False
        if not all(rule.perturbed) or eqn.params["num_consts"]:
            return False
        body, outs = rewrite(rule.jaxpr, self._visitor), len(call.outs)
        if body.effects or not all(isinstance(v, Var) for v in call.body.outvars):
            return False
        primals, tangents = body.invars[: len(call.operands)], body.invars[len(call.operands) :]
        out_tangents = iter(body.outvars[outs:])
        for i, (var, zero) in enumerate(zip(call.body.outvars, rule.out_zeros, strict=True)):
            source = call.body.invars.index(var)
            if body.outvars[i] is not primals[source]:
                return False
            # The tangent of an integer has the type float0, and no information.
            if is_float0(var.aval.to_tangent_aval()):
                zero or next(out_tangents)
            elif zero or next(out_tangents) is not tangents[source]:
                return False
        return True

    def _following(self, eqn: JaxprEqn) -> JaxprEqn:
        """Return the call with its rule replaced by the one without checks."""
        key, p, original = rule_key(eqn), eqn.params, self._rule(eqn)
        assert original is not None
        rule = self._unchecked.setdefault(key, cache(partial(map_rule, self.cleaned, original)))
        rest = rule, p["num_consts"], p["symbolic_zeros"]
        return eqn.replace(params=following(eqn, p["call_jaxpr"], *rest))


def _is_dropped(eqn: JaxprEqn) -> bool:
    structured = view(eqn)
    branching = isinstance(structured, Cond) and _passing_branch(structured) is not None
    return branching or is_check(eqn)


def _without_failing(cond: Cond, writer: Writer) -> Sequence[Atom] | None:
    """Return the results of a cond without its failing `error_if` branch; None for other conds."""
    passing = _passing_branch(cond)
    if passing is not None and writer.can_hold(passing):
        return writer.splice(passing, cond.operands, cond.eqn)
    if not any(map(jaxcompat.is_check_effect, cond.eqn.effects)):
        return None
    # JAX gives each branch the effects of all: those of checks in other branches are removed.
    branches = tuple(jaxcompat.replace_jaxpr(b, eqns=b.eqns) for b in cond.branches)
    return writer.add(cond.rebuild(branches=branches))


def _passing_branch(cond: Cond) -> ClosedJaxpr | None:
    """Return the branch of Equinox's `error_if` for passing checks; None for other conds."""
    if len(cond.branches) != 2:
        return None
    failing = [_does_nothing_but_raise(branch) for branch in cond.branches]
    return cond.branches[failing.index(False)] if sum(failing) == 1 else None


def _does_nothing_but_raise(branch: ClosedJaxpr) -> bool:
    """Return True if a branch's results need a call of a function that always raises."""
    return any(
        eqn.primitive.name == "pure_callback" and callback_name(eqn.params["callback"]) in _RAISING
        for eqn in needed_equations(branch.eqns, branch.outvars)
    )


def _forwarded(body: ClosedJaxpr, operands: Sequence[Atom]) -> Sequence[Atom] | None:
    """Return the results of a call whose body only forwards operands and literals; else None."""
    env = dict(zip(body.invars, operands, strict=True))
    if body.effects or any(not isinstance(v, Literal) and v not in env for v in body.outvars):
        return None
    return substitute(body.outvars, env)
