"""Check passes that replace repeated code by one body: `outline` and `roll`.

In addition to the checks of every rewriting pass, undoing such a pass must return the original
program, except for the order of independent equations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.equations import equations
from jaxprtool.ir.equivalence import structural_difference
from jaxprtool.ir.program import Program, type_check
from jaxprtool.ir.rewrite import map_equations
from jaxprtool.jaxcompat import JaxprEqn
from jaxprtool.passes import Pipeline
from jaxprtool.passes.cleanup.inline import Inline
from jaxprtool.passes.loops.roll import Roll
from tests.programs.case import Case
from tests.programs.ordering import difference_but_for_order
from tests.programs.recorder import recording
from tests.programs.same import Original, lasting_effects
from tests.programs.stepwise import evaluate
from tests.programs.values import bits_agree, flushed_bits_agree, on_device
from tests.programs.values import first_value_difference as difference_of_values

#: Longer loops are not unrolled for the comparison.
MOST_ROUNDS = 64

Rewrite = Callable[[Program], Program]


def prove_outlining(
    case: Case, outline: Rewrite, *, mark: str = "unit", deep: bool = False
) -> Counter[str]:
    """Outline a case and return the outcome. Raise AssertionError if the result is wrong.

    Programs are compared one equation at a time, bitwise. If `deep`, also as JAX's evaluator runs
    them, and their derivatives.
    """
    with case.setting():
        before, args = case.program(), case.arguments()
        after = outline(before)
        if after.jaxpr is before.jaxpr:
            return Counter({"no repetition": 1})
        type_check(after)
        outcomes = Counter({"outlined": 1})
        assert lasting_effects(opened(after).jaxpr) == lasting_effects(opened(before).jaxpr)
        outcomes[f"inlined: {undone(after, before)}"] += 1
        outcomes[f"outlined again: {_again(outline, after, mark)}"] += 1
        original = Original(before, args, fewer_effects=True)
        return outcomes + _same(original, after, deep) + _shared(before, after, mark)


def prove_rolling(case: Case, *, deep: bool = False) -> Counter[str]:
    """Roll a case and return the outcome. Raise AssertionError if the result is wrong."""
    with case.setting():
        before, args = case.program(), case.arguments()
        after = Roll()(before)
        if after.jaxpr is before.jaxpr:
            return Counter({"nothing to roll": 1})
        type_check(after)
        outcomes = Counter({"rolled": 1})
        outcomes[f"unrolled: {_unrolled(after, before)}"] += 1
        original = Original(before, args, fewer_effects=True)
        return outcomes + _same(original, after, deep) + _stacked(original)


def _same(original: Original, after: Program, deep: bool) -> Counter[str]:
    """Compare a program with its rewritten form, and return what was differentiated."""
    original.same_steps(after)
    if not deep:
        return Counter()
    original.same(after, gradients=False)
    # JAX can differentiate some programs with refs only with their calls.
    found = Original(Inline()(original.program), original.args).same_gradients(after)
    return Counter({f"gradients: {found.split(':')[0]}": 1})


_UNROLL = Pipeline.parse(f"inline(force=True), unroll(max_length={MOST_ROUNDS}), simplify, dce")


def _unrolled(after: Program, before: Program) -> str:
    """Return how a program differs from another one with its loops unrolled."""
    programs = _UNROLL(before), _UNROLL(after)
    if structural_difference(*programs) is None:
        return "equivalent"
    return "other equations" if difference_but_for_order(*programs) else "in a different order"


def _stacked(original: Original) -> Counter[str]:
    """Prove the programs that take stacked arguments, on the stacked original arguments."""
    before, args = original.program, original.args
    try:
        made = Roll(stack="arguments")(before)
    except UnsupportedError as error:
        return Counter({f"refused: {error.message.rpartition(' is ')[2][:40]}": 1})
    if isinstance(made, Program):
        return Counter({"no arguments to stack": 1})
    for program in made.values():
        type_check(program)
    rolled, stack, unstack = (made[name] for name in ("rolled", "stack", "unstack"))
    known = dict(zip(before.arg_names, args, strict=True))
    given = [on_device(known[name]) for name in stack.arg_names]
    stacks = evaluate(stack.jaxpr, given)
    fault = difference_of_values(given, evaluate(unstack.jaxpr, stacks), bits_agree)
    assert fault is None, f"unstacked: {fault}"
    known.update(zip(unstack.arg_names, stacks, strict=True))
    with recording():
        results = evaluate(rolled.jaxpr, [known[name] for name in rolled.arg_names])
    if len(results) != len(original.steps[0]):
        return Counter({"stacked arguments and results": 1})
    fault = difference_of_values(original.steps[0], results, flushed_bits_agree)
    assert fault is None, f"of stacked arguments: {fault}"
    return Counter({"stacked arguments": 1})


def opened(program: Program) -> Program:
    """Return a program with all calls inlined. Donation, which may block inlining, is removed."""

    def rule(eqn: JaxprEqn) -> list[JaxprEqn] | None:
        if not any(eqn.params.get("donated_invars", ())):
            return None
        nothing = (False,) * len(eqn.invars)
        return [eqn.replace(params={**eqn.params, "donated_invars": nothing})]

    kept = program.replace(jaxpr=map_equations(program.jaxpr, rule))
    return Inline(force=True)(kept)


def undone(after: Program, before: Program) -> str:
    """Return how a program differs from another one with its calls inlined."""
    programs = opened(before), opened(after)
    if structural_difference(*programs) is None:
        return "equivalent"
    found = difference_but_for_order(*programs)
    assert found is None, f"inlined again: {found}"
    return "equivalent, in a different order"


def size(program: Program) -> int:
    """Count the equations of a program, those of a shared body once."""
    return sum(1 for _ in equations(jaxcompat.open_jaxpr(program.jaxpr)))


def _shared(before: Program, after: Program, mark: str) -> Counter[str]:
    """Count the shared bodies that a pass has made, and check that they reduce the program."""
    found = _called(after, marked=mark != "plain")
    assert found and max(found.values()) > 1
    assert size(after) < size(Inline()(before))
    return Counter({"bodies": len(found), "bodies called once": list(found.values()).count(1)})


def _called(program: Program, *, marked: bool) -> Counter[Any]:
    """Return the called bodies and the number of calls of each, once per shared body."""
    return Counter(
        jaxcompat.open_jaxpr(eqn.params["jaxpr"])
        for eqn in equations(jaxcompat.open_jaxpr(program.jaxpr))
        if eqn.primitive.name == "jit" and (jaxcompat.mark_of(eqn) != "plain" or not marked)
    )


def _again(outline: Rewrite, after: Program, mark: str) -> str:
    """Outline again and return what this still finds, which must be little."""
    again = outline(after)
    if again.jaxpr is after.jaxpr:
        return "nothing"
    if structural_difference(again, after) is None:
        return "the same"
    # Plain calls are inlined first, so that the second run chooses anew.
    assert size(again) <= size(after if mark != "plain" else Inline()(after))
    return "other equations"
