"""Check rewriting passes: each alone, the named pipelines, and random pipelines.

`prove_rewrites(case, rewriters)` traces a case once, runs the original once, and compares the
result of each rewriter with it (`same.Original`). If a rewriter returns the original jaxpr, or one
that equals an earlier result up to names, it is not run.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.ir.program import Program
from jaxprtool.passes import Pipeline
from tests.programs.case import Case
from tests.programs.gradients import NO_DERIVATIVE, NO_DERIVATIVE_OF_REFS, has_refs, reverse
from tests.programs.interpreter import evaluate
from tests.programs.mapped import are_equivalent
from tests.programs.recorder import recording
from tests.programs.same import Original, count_equations, lasting_effects, without_ref_writes
from tests.programs.stepwise import bind


@dataclass(frozen=True)
class Rewriter:
    """A pipeline, and the expected properties of its results.

    A result may have more equations (`grows`), lose derivative rules (`drops_rules`), lose code
    that never runs, with its effects, or move it into or out of calls (`drops_effects`: only
    effects that happen are compared), lose writes to refs that nothing reads (`drops_writes`), or
    round differently (not `exact`). One that `settles` returns its own results unchanged.
    """

    text: str
    grows: bool = False
    drops_rules: bool = False
    drops_effects: bool = False
    drops_writes: bool = False
    exact: bool = True
    settles: bool = False

    def __str__(self) -> str:
        return self.text

    @cached_property
    def pipeline(self) -> Pipeline:
        return Pipeline.parse(self.text)

    def __call__(self, program: Program) -> Program:
        result = self.pipeline(program)
        assert isinstance(result, Program)
        return result


_CALLS = '("jit", "closed_call", "custom_jvp", "custom_vjp", "remat")'

PASSES: tuple[Rewriter, ...] = (
    Rewriter("inline", drops_effects=True),
    Rewriter(f"inline(calls={_CALLS})", drops_rules=True, drops_effects=True),
    Rewriter("forward", drops_effects=True),
    Rewriter("fold", drops_effects=True),
    Rewriter("simplify", drops_effects=True),
    Rewriter("simplify(fast=True)", drops_effects=True, exact=False),
    Rewriter("cse"),
    Rewriter("dce", drops_writes=True),
    Rewriter("hoist"),
    Rewriter("unroll(max_length=4)", grows=True, drops_effects=True),
    Rewriter("sink"),
    Rewriter("schedule"),
)
#: JAX transformations that keep the values. JAX cannot differentiate refs inside some of them.
TRANSFORMS: tuple[Rewriter, ...] = (
    Rewriter("checkpoint", grows=True, drops_effects=True, drops_rules=True),
    Rewriter("disable_jit", drops_effects=True),
    Rewriter("jit", grows=True, drops_effects=True, drops_rules=True),
    Rewriter('named_call("name")', grows=True, drops_effects=True, drops_rules=True),
)
LEVELS = (
    Rewriter("-O1", drops_effects=True, settles=True),
    Rewriter("-O2", drops_effects=True),
)
REWRITERS = (*PASSES, *LEVELS)


def random_pipeline(rng: random.Random) -> Rewriter:
    """Return two to five of the passes that are exact and keep derivative rules, in random order.

    Some of them follow a transformation of JAX.
    """
    chosen = rng.choices([r for r in PASSES if r.exact and not r.drops_rules], k=rng.randint(2, 5))
    if rng.random() < 0.2:
        chosen.insert(0, rng.choice(TRANSFORMS[1:]))
    return Rewriter(
        ", ".join(r.text for r in chosen),
        grows=any(r.grows for r in chosen),
        drops_rules=any(r.drops_rules for r in chosen),
        drops_effects=any(r.drops_effects for r in chosen),
        drops_writes=any(r.drops_writes for r in chosen),
    )


def prove_rewrites(
    case: Any, rewriters: Iterable[Rewriter], deep: Collection[Rewriter] = ()
) -> Counter[str]:
    """Prove each rewriter on a case, and count the outcomes.

    Programs are compared one equation at a time, bitwise. Results of `deep` rewriters are also
    compared as JAX's evaluator runs them, and by their derivatives. Raises an ExceptionGroup of the
    failures, each with a note of the rewriter.
    """
    outcomes: Counter[str] = Counter({"programs": 1})
    failures: list[Exception] = []
    with case.setting():
        proof = _Proof(Original(case.program(), case.arguments(), fewer_effects=True))
        for rewriter in rewriters:
            try:
                outcomes.update(proof.of(rewriter, rewriter in deep))
            except Exception as error:
                error.add_note(f"rewritten by {rewriter.text}")
                failures.append(error)
    if failures:
        raise ExceptionGroup(f"{case.name} rewritten", failures)
    return outcomes


class _Proof:
    """The state of the proofs for one original."""

    def __init__(self, original: Original):
        self.original = original
        self._equations = count_equations(original.program.jaxpr)
        self._proven: dict[bool, list[Program]] = {False: [], True: []}

    def of(self, rewriter: Rewriter, deep: bool) -> Iterable[str]:
        """Prove one rewriter, and return the outcome."""
        before = self.original.program
        after = rewriter(before)
        yield "rewritings"
        if after.jaxpr is before.jaxpr:
            yield "nothing to rewrite"
            return
        self._check_size(rewriter, after)
        if not rewriter.drops_effects:
            found, expected = (lasting_effects(p.jaxpr) for p in (after, before))
            if rewriter.drops_writes:
                found, expected = map(without_ref_writes, (found, expected))
            assert found == expected
        if rewriter.settles:
            assert rewriter(after).jaxpr is after.jaxpr, "a second time, it changes something"
        proven = self._proven[deep]
        if any(are_equivalent(after.jaxpr, p.jaxpr) for p in proven):
            yield "as another"
            return
        yield from self._deeply(rewriter, after) if deep else self._step_by_step(rewriter, after)
        if rewriter.exact and not rewriter.drops_rules:
            proven.append(after)

    def _check_size(self, rewriter: Rewriter, after: Program) -> None:
        if not rewriter.grows:
            equations = count_equations(after.jaxpr)
            assert equations <= self._equations, f"{self._equations} equations became {equations}"

    def _step_by_step(self, rewriter: Rewriter, after: Program) -> Iterable[str]:
        try:
            self.original.same_steps(after, exact=rewriter.exact)
        except AssertionError:
            if rewriter.exact or self._all_finite:
                raise
            yield "not finite"
        else:
            yield "step by step"

    def _deeply(self, rewriter: Rewriter, after: Program) -> Iterable[str]:
        verdict = self.original.same(after, exact=rewriter.exact, gradients=False)
        yield "compiled, then step by step" if verdict.stepwise else "compiled"
        if not rewriter.drops_rules:
            yield f"gradients: {self.original.same_gradients(after).split(':')[0]}"

    @cached_property
    def _all_finite(self) -> bool:
        """Return True if a run computes only finite numbers, which inexact rules require."""
        all_finite = True

        def apply(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
            nonlocal all_finite
            results = bind(eqn, operands)
            for x in (*operands, *results):
                if jnp.issubdtype(getattr(x, "dtype", bool), jnp.inexact):
                    all_finite &= bool(jnp.isfinite(x[...]).all())
            return results

        with recording():
            evaluate(self.original.program.jaxpr, self.original.args, apply)
        return all_finite


def gradient_case(case: Case) -> Case | None:
    """Return the gradient of a case as another case. None if it has none in reverse mode."""
    with case.setting():
        program, args = case.program(), case.arguments()
        at = [i for i, aval in enumerate(program.in_avals) if _inexact(aval)]
        outs = [i for i, aval in enumerate(program.out_avals) if _inexact(aval)]
        if not at or not outs:
            return None

        def gradient(*flat: Any) -> Any:
            def function(*xs: Any) -> list[Any]:
                full = list(flat)
                for i, x in zip(at, xs, strict=True):
                    full[i] = x
                results = jaxcompat.jaxpr_as_fun(program.jaxpr)(*full)
                return [jnp.asarray(results[i]) for i in outs]

            return reverse(function, [flat[i] for i in at])

        refs = NO_DERIVATIVE_OF_REFS if has_refs(program.jaxpr) else ()
        try:
            jax.make_jaxpr(gradient)(*args)
        except (*NO_DERIVATIVE, *refs):
            return None
    return Case(f"gradient of {case.name}", gradient, tuple(args), x64=case.x64)


def _inexact(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


# --- many cases -----------------------------------------------------------------------------------


def assert_none(failures: dict[str, BaseException]) -> None:
    """Raise all failures together, if any."""
    lines = [
        f"{name}: {' '.join(getattr(e, '__notes__', ()))}: {type(e).__name__}: {str(e)[:500]}"
        for name, group in failures.items()
        for e in (group.exceptions if isinstance(group, ExceptionGroup) else [group])
    ]
    assert not failures, f"{len(failures)} programs failed\n" + "\n".join(lines)


def prove_all(
    cases: Iterable[tuple[int, Any]], prove: Callable[[int, Any], Counter[str]]
) -> Counter[str]:
    """Prove numbered cases, and raise all failures together at the end."""
    outcomes: Counter[str] = Counter()
    failures: dict[str, BaseException] = {}
    for number, case in cases:
        try:
            outcomes.update(prove(number, case))
        except Exception as error:
            failures[case.name] = error
        if number % 200 == 199:
            jax.clear_caches()
    assert_none(failures)
    return outcomes
