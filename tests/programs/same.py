"""Check that two programs compute the same.

`same(before, after, args)` compares what the programs declare (types, trees, names, effects), the
values and the order of effects of a run, and their gradients. Values are compared as follows:

*   Both are run by JAX's own evaluator of jaxprs, compiled as a whole unless they have effects.
    They are equal if all bits agree. NaNs are equal to NaNs; zeros of different sign are not equal.
*   XLA may round differently when dead code next to the live code is gone. So if bits differ and
    `exact=True`, both are also evaluated one equation at a time at every depth
    (`stepwise.evaluate`), and those results must be bitwise equal. Subnormal numbers are equal to
    zero, since arithmetic flushes them and a pass may remove `x * 1`, for example. The results of
    JAX's evaluator may then differ by the tolerance of the dtype, or by more if JAX's evaluator and
    the stepwise one differ by more on the *original* too, which is then ill-conditioned.
*   If XLA cannot compile one of them because of a bug (`gradients.XLA_FAULT`), only the stepwise
    results are compared.
*   With `exact=False`, only the tolerance of the dtype counts.
*   Derivatives are compared by the tolerance of the dtype. If it is exceeded, both are computed one
    equation at a time, and may differ as much as rounding changes the original's.

Callbacks must receive the same values: the ordered ones in order, the others in any order, and all
of them in the program's order when evaluated one equation at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.ir.program import Program, type_check
from tests.programs import stepwise
from tests.programs.case import Case
from tests.programs.gradients import (
    XLA_FAULT,
    Gradients,
    gradients_of,
    is_xla_fault,
    stepwise_gradients,
)
from tests.programs.interpreter import bodies
from tests.programs.recorder import Event, Recording, recording
from tests.programs.rounding import differences_but_for_rounding
from tests.programs.values import (
    Comparison,
    ValueDifference,
    bits_agree,
    first_value_difference,
    flushed_bits_agree,
    value_difference,
    values_agree,
)

__all__ = [
    "Original",
    "Verdict",
    "count_equations",
    "lasting_effects",
    "prove",
    "same",
    "without_ref_writes",
]


@dataclass(frozen=True)
class Verdict:
    """How two programs were found to compute the same.

    `stepwise` is True if bits differed under JAX's evaluator and agreed step by step. `gradients`
    is "reverse", "forward", or why there were none to compare.
    """

    stepwise: bool
    gradients: str


def prove(
    case: Case,
    rewrite: Callable[[Program], Program],
    *,
    exact: bool = True,
    gradients: bool = True,
    compiled: bool = True,
) -> tuple[Program, Program, Verdict | None]:
    """Trace the case, rewrite it, type-check the result and compare it with the original.

    With `compiled=False`, the programs only run one equation at a time, which compiles no loop.
    Gradients are compared in any case. Returns both programs and the verdict, which is None if the
    rewrite returned the original jaxpr. Raises AssertionError if they differ, CheckError if the
    result is not well typed.
    """
    with case.setting():
        before = case.program()
        after = rewrite(before)
        if after.jaxpr is before.jaxpr:
            return before, after, None
        type_check(after)
        original = Original(before, case.arguments())
        if compiled:
            verdict = original.same(after, exact=exact, gradients=gradients)
        else:
            original.same_steps(after, exact=exact)
            kind = original.same_gradients(after) if gradients else "not asked for"
            verdict = Verdict(True, kind)
    return before, after, verdict


def same(
    before: Program,
    after: Program,
    args: Sequence[Any],
    *,
    exact: bool = True,
    gradients: bool = True,
) -> Verdict:
    """Raise AssertionError with the difference unless both compute the same on flat `args`.

    See the module's docstring. Gradients of all inexact results with respect to all inexact
    arguments are compared by tolerance: in reverse mode, in forward mode if the original has no
    reverse mode, or not at all if it is not differentiable (see the verdict).
    """
    return Original(before, args).same(after, exact=exact, gradients=gradients)


class Original:
    """A program and arguments, run at most once each way, to compare with many rewritten programs.

    With `fewer_effects`, a rewritten program may declare fewer effects than the original, for
    example if branches that are never taken were removed.
    """

    def __init__(self, program: Program, args: Sequence[Any], *, fewer_effects: bool = False):
        self.program, self.args, self._fewer_effects = program, args, fewer_effects

    def same(self, after: Program, *, exact: bool = True, gradients: bool = True) -> Verdict:
        """Compare another program with this one, like `same`."""
        _same_declarations(self.program, after, self._fewer_effects)
        stepwise = self._same_values(after.jaxpr, exact=exact)
        kind = self.same_gradients(after) if gradients else "not asked for"
        return Verdict(stepwise, kind)

    def same_steps(self, after: Program, *, exact: bool = True) -> None:
        """Compare the programs one equation at a time only, which compiles no loop."""
        _same_declarations(self.program, after, self._fewer_effects)
        self._same_steps(after.jaxpr, exact=exact)

    @cached_property
    def compiled(self) -> Run | None:
        return _compiled(self.program.jaxpr, self.args)

    @cached_property
    def steps(self) -> Run:
        return _run(stepwise.evaluate, self.program.jaxpr, self.args)

    @cached_property
    def gradients(self) -> Gradients | str:
        return gradients_of(self.program.jaxpr, self.args)

    def _same_values(self, after: Any, *, exact: bool) -> bool:
        """Compare a run of each. Return True if this had to be done step by step."""
        old, new = self.compiled, _compiled(after, self.args)
        if old is None or new is None:
            self._same_steps(after)
            return True
        if _tags(old[1]) != _tags(new[1]) and _tags(old[1]) != _tags(self.steps[1]):
            self._same_steps(after, exact=exact)  # JAX itself loses callbacks of the original
            return True
        _same_events(old[1], new[1])
        fault = first_value_difference(old[0], new[0], bits_agree if exact else values_agree)
        if not exact:
            _fail("results", fault)
        if fault is None and not (exact and old[1].events):
            return False
        self._same_steps(after)
        fault = first_value_difference(old[0], new[0], values_agree)
        if (
            fault is not None
            and first_value_difference(old[0], self.steps[0], values_agree) is None
        ):
            _fail("results, compiled", fault)
        return True

    def _same_steps(self, after: Any, *, exact: bool = True) -> None:
        old, new = self.steps, _run(stepwise.evaluate, after, self.args)
        agree = flushed_bits_agree if exact else values_agree
        _fail("results, step by step", first_value_difference(old[0], new[0], agree))
        _same_order(old[1].events, new[1].events, agree)
        _same_declaration("text printed", old[1].printed.getvalue(), new[1].printed.getvalue())

    def same_gradients(self, after: Program) -> str:
        """Compare derivatives. Return their mode, or why there is none."""
        old = self.gradients
        if not isinstance(old, Gradients):
            return old
        new = gradients_of(after.jaxpr, self.args, old.mode)
        if new == XLA_FAULT:
            return XLA_FAULT
        if not isinstance(new, Gradients):
            raise AssertionError(f"{old.mode} gradients: lost: {new}")
        if first_value_difference(old.values, new.values, values_agree) is not None:
            self._same_gradient_steps(after, old.mode)
        return old.mode

    def _same_gradient_steps(self, after: Program, mode: str) -> None:
        """Compare derivatives computed one equation at a time, up to rounding."""

        def evaluate(apply: Any) -> list[Any]:
            return stepwise_gradients(self.program.jaxpr, self.args, mode, apply)

        old = evaluate(stepwise.bind)
        new = stepwise_gradients(after.jaxpr, self.args, mode)
        if first_value_difference(old, new, values_agree) is None:
            return
        for i in differences_but_for_rounding(evaluate, old, new):
            fault = value_difference(f"value {i}", old[i], new[i], values_agree)
            _fail(f"{mode} gradients", fault)


# --- what the programs declare ----------------------------------------------------------------


def _same_declarations(before: Program, after: Program, fewer_effects: bool) -> None:
    for what, name in (
        ("structure of the arguments", "in_tree"),
        ("structure of the results", "out_tree"),
        ("argument names", "arg_names"),
        ("result names", "out_names"),
    ):
        _same_declaration(what, getattr(before, name), getattr(after, name))
    for what, name in (("argument", "in_avals"), ("result", "out_avals")):
        old, new = getattr(before, name), getattr(after, name)
        _same_declaration(f"number of {what}s", len(old), len(new))
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            _same_declaration(f"type of {what} {i}", _type(a), _type(b))
    kinds, left = _effect_kinds(before.jaxpr), _effect_kinds(after.jaxpr)
    if not (fewer_effects and set(left) <= set(kinds)):
        _same_declaration("effects", kinds, left)


def _same_declaration(what: str, before: Any, after: Any) -> None:
    if before != after:
        raise AssertionError(f"{what}: {before} before, {after} after")


def _type(aval: Any) -> str:
    weak = ", weakly typed" if getattr(aval, "weak_type", False) else ""
    return f"{aval.str_short(short_dtypes=True)}{weak}"


def _effect_kinds(closed: Any) -> list[str]:
    lasting = (e for e in closed.effects if not jaxcompat.is_removable_effect(e))
    return sorted({str(effect) for effect in lasting})


def lasting_effects(jaxpr: Any) -> Counter[tuple[str, ...]]:
    """Count the equations with an effect that must stay, by their path of primitives.

    Equations inside an equation without such an effect are not counted: a loop that writes only to
    a ref of its own may be removed.
    """
    found: Counter[tuple[str, ...]] = Counter()
    for eqn in jaxpr.eqns:
        if all(map(jaxcompat.is_removable_effect, eqn.effects)):
            continue
        name = eqn.primitive.name
        inside = list(bodies(eqn))
        if not inside:
            found[(name,)] += 1
        for body in inside:
            for path, count in lasting_effects(body).items():
                found[(name, *path)] += count
    return found


def without_ref_writes(effects: Counter[tuple[str, ...]]) -> Counter[tuple[str, ...]]:
    """Remove writes to refs from lasting effects, since `dce` removes writes that nothing reads."""
    return Counter({k: n for k, n in effects.items() if k[-1] not in ("swap", "addupdate")})


def count_equations(jaxpr: Any) -> int:
    """Count the equations of a jaxpr and of its nested jaxprs, shared ones once per use."""
    inside = (count_equations(body) for eqn in jaxpr.eqns for body in bodies(eqn))
    return len(jaxpr.eqns) + sum(inside)


# --- runs -----------------------------------------------------------------------------------------

Run = tuple[list[Any], Recording]


def _run(evaluate: Callable[[Any, Sequence[Any]], Any], closed: Any, args: Sequence[Any]) -> Run:
    with recording() as record:
        outs = jax.block_until_ready(list(evaluate(closed, args)))
    return outs, record


def _compiled(closed: Any, args: Sequence[Any]) -> Run | None:
    """Run by JAX's evaluator. None if XLA cannot compile a body because of its bug.

    The program is compiled as a whole, which is faster than one equation at a time. With effects,
    it runs one equation at a time, since XLA's CSE could change their order.
    """
    function = jaxcompat.jaxpr_as_fun(closed)
    if not closed.effects:
        function = jax.jit(function)
    try:
        return _run(lambda closed, args: function(*args), closed, args)
    except jax.errors.JaxRuntimeError as error:
        if not is_xla_fault(error):
            raise
        return None


def _fail(what: str, fault: ValueDifference | None) -> None:
    if fault is not None:
        details = "".join(f", {name} {text}" for name, text in fault.details)
        raise AssertionError(f"{what}: {fault}{details}")


def _same_events(old: Recording, new: Recording) -> None:
    """Compare callbacks, ordered ones in order. Their values are compared later."""
    for kind in sorted({e.kind for e in old.events + new.events}):
        ordered = ([e.tag for e in r.events if e.ordered and e.kind == kind] for r in (old, new))
        _same_declaration("ordered callbacks", *ordered)
    others = ([e.tag for e in r.events if not e.ordered] for r in (old, new))
    _same_declaration("unordered callbacks", *(sorted(tags) for tags in others))
    lines = [sorted(r.printed.getvalue().splitlines()) for r in (old, new)]
    _same_declaration("number of lines printed", *map(len, lines))


def _tags(recording: Recording) -> list[int]:
    return sorted(event.tag for event in recording.events)


def _same_order(old: Sequence[Event], new: Sequence[Event], agree: Comparison) -> None:
    _same_declaration("callbacks in order", [e.tag for e in old], [e.tag for e in new])
    for a, b in zip(old, new, strict=True):
        fault = first_value_difference([a.value], [b.value], agree)
        _fail(f"what callback {a.tag} saw", fault)
