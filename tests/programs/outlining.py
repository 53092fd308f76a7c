"""The referee of passes that make what repeats one body: `outline` and `roll`.

Beyond what holds for every rewriting pass, undoing such a pass gives the program again, but for the
order of equations that do not depend on each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.ir.equations import equations
from jaxprtool.ir.equivalence import difference
from jaxprtool.ir.program import Program, type_check
from jaxprtool.passes.inline import Inline
from tests.programs.case import Case
from tests.programs.ordering import difference_but_for_order
from tests.programs.same import Original, lasting_effects

Rewrite = Callable[[Program], Program]


def prove_outlining(
    case: Case, outline: Rewrite, *, mark: str = "unit", deep: bool = False
) -> Counter[str]:
    """Outline a case and say what came of it; raise AssertionError for what is wrong.

    Programs are compared one equation at a time, to the last bit; if `deep`, also as JAX's
    evaluator runs them, and their derivatives.
    """
    with case.setting():
        before, args = case.program(), case.arguments()
        after = outline(before)
        if after.jaxpr is before.jaxpr:
            return Counter({"nothing repeats": 1})
        type_check(after)
        outcomes = Counter({"outlined": 1})
        assert lasting_effects(opened(after).jaxpr) == lasting_effects(opened(before).jaxpr)
        outcomes[f"inlined: {undone(after, before)}"] += 1
        outcomes[f"outlined again: {_again(outline, after)}"] += 1
        original = Original(before, args, fewer_effects=True)
        original.same_steps(after)
        if deep:
            original.same(after, gradients=False)
            # JAX differentiates some programs with refs less well without their calls.
            found = Original(Inline()(before), args).same_gradients(after)
            outcomes[f"gradients: {found.split(':')[0]}"] += 1
        return outcomes + _shared(before, after, mark)


def opened(program: Program) -> Program:
    """Return a program without calls that can be inlined."""
    return Inline(force=True)(program)


def undone(after: Program, before: Program) -> str:
    """Say in what way a program is another one with its calls opened."""
    programs = opened(before), opened(after)
    if difference(*programs) is None:
        return "equivalent"
    found = difference_but_for_order(*programs)
    assert found is None, f"inlined again: {found}"
    return "equivalent, in another order"


def size(program: Program) -> int:
    """Return the number of equations of a program, those of a shared body once."""
    return sum(1 for _ in equations(jaxcompat.open_jaxpr(program.jaxpr)))


def _shared(before: Program, after: Program, mark: str) -> Counter[str]:
    """Count the bodies that a pass has made, and check that it gains by them."""
    found = _called(after, marked=mark != "plain")
    assert found and (mark == "plain" or min(found.values()) > 1)
    assert size(after) < size(Inline()(before))
    return Counter({"bodies": len(found)})


def _called(program: Program, *, marked: bool) -> Counter[Any]:
    """Return the bodies of calls, with how often each is called; in a shared body counts once."""
    return Counter(
        jaxcompat.open_jaxpr(eqn.params["jaxpr"])
        for eqn in equations(jaxcompat.open_jaxpr(program.jaxpr))
        if eqn.primitive.name == "jit" and (jaxcompat.mark_of(eqn) != "plain" or not marked)
    )


def _again(outline: Rewrite, after: Program) -> str:
    """Say what is left to outline in an outlined program, which must be little."""
    again = outline(after)
    if again.jaxpr is after.jaxpr:
        return "nothing"
    if difference(again, after) is None:
        return "the same"
    assert size(again) <= size(after)
    return "fewer equations"
