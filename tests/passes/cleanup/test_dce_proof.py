"""dce on JAX's own test programs, on random programs, and on the samples and their gradients.

Each result is type-checked and compared with the original by `tests.programs.same`. It keeps every
lasting effect and has no more equations than after JAX's own dead-code elimination.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from itertools import product

import jax.numpy as jnp
import pytest

from jaxprtool import jaxcompat
from jaxprtool.ir.program import Program, type_check
from jaxprtool.loading.trace import trace
from jaxprtool.passes.cleanup.dce import Dce, dce_jaxpr
from tests.programs import (
    Case,
    harness_share,
    prove,
    same,
    sample_programs,
)
from tests.programs.corpus import prove_corpus
from tests.programs.dead_code import DEAD_CODE, with_dead_code
from tests.programs.rewriting import prove_all
from tests.programs.same import Verdict, count_equations, lasting_effects, without_ref_writes
from tests.programs.samples import sample_files
from tests.share import share
from tests.sweep.corpora import Harnesses, RandomPrograms, Samples
from tests.sweep.parts import Part

CHUNKS = 4


def prove_dce(
    case, *, gradients: bool = True, compiled: bool = True
) -> tuple[Program, Program, Verdict | None]:
    before, after, verdict = prove(case, Dce(), gradients=gradients, compiled=compiled)
    assert_as_small_as_jax(before, after)
    return before, after, verdict


def assert_as_small_as_jax(before: Program, after: Program) -> None:
    """Assert that only dead writes are lost, and that no more equations are left than with JAX."""
    found, expected = (without_ref_writes(lasting_effects(p.jaxpr)) for p in (after, before))
    assert found == expected
    opened = jaxcompat.open_jaxpr(before.jaxpr)
    theirs, _ = jaxcompat.jax_dce_jaxpr(opened, [True] * len(opened.outvars), True)
    assert count_equations(after.jaxpr) <= count_equations(theirs)


def prove_subset(program: Program, args: list, rng: random.Random) -> bool:
    """Prove `dce_jaxpr` for some of the results. Return False if there are too few results."""
    count = len(program.jaxpr.outvars)
    if count == 0:
        return False
    used = [rng.random() < 0.5 for _ in range(count)]

    def restricted(*flat):
        outs = jaxcompat.jaxpr_as_fun(program.jaxpr)(*flat)
        return [out for out, flag in zip(outs, used, strict=True) if flag]

    before = trace(restricted, *args)
    jaxpr, kept = dce_jaxpr(program.jaxpr, used, instantiate=True)
    assert kept == [True] * len(args)
    after = before.replace(jaxpr=jaxpr)
    type_check(after)
    same(before, after, args, gradients=False)
    fewer, kept = dce_jaxpr(program.jaxpr, used)
    assert len(fewer.invars) == sum(kept)
    assert count_equations(fewer) == count_equations(jaxpr)
    return True


# --- dead code of each kind ---------------------------------------------------------------------


@pytest.mark.parametrize(("inner", "outer"), share(list(product(DEAD_CODE, repeat=2))))
def test_dead_code_is_removed_and_values_and_rules_are_kept(inner, outer):
    case = Case("tanh", lambda x, y: jnp.tanh(x * y) + x, (jnp.float32(0.3), jnp.arange(3.0)))
    case = with_dead_code(with_dead_code(case, inner), outer)
    before, after, verdict = prove_dce(case)
    assert count_equations(after.jaxpr) < count_equations(before.jaxpr)
    if "while" not in (inner, outer):
        assert verdict.gradients == "reverse"


# --- JAX's own test programs ------------------------------------------------------------------


def prove_harness(
    number: int, case: Case, *, wrapped: int = 1, gradients: int = 1, compiled: int = 1
) -> Counter[str]:
    """Prove a program as it is, and each `wrapped`-th also with each kind of dead code in turn.

    Every `gradients`-th is also differentiated. Of the wrapped ones, each `compiled`-th is compared
    in JAX's evaluator, and the others one equation at a time.
    """
    outcomes: Counter[str] = Counter()
    kinds = list(DEAD_CODE)
    variants = [case]
    if number % wrapped == 0:
        variants.append(with_dead_code(case, kinds[number // wrapped % len(kinds)]))
    for variant in variants:
        before, after, verdict = prove_dce(
            variant,
            gradients=number % gradients == 0,
            compiled=variant is case or number // wrapped % compiled == 0,
        )
        if variant is not case and count_equations(case.program().jaxpr):
            assert count_equations(after.jaxpr) < count_equations(before.jaxpr)
        outcomes[outcome(verdict)] += 1
    return outcomes


def outcome(verdict: Verdict | None) -> str:
    if verdict is None:
        return "nothing to remove"
    return f"{'step by step' if verdict.stepwise else 'equal'}, gradients: {verdict.gradients[:60]}"


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_share_of_the_harnesses_computes_the_same(chunk):
    cases = enumerate(harness_share()[chunk::CHUNKS])
    outcomes = prove_all(cases, partial(prove_harness, wrapped=2, gradients=8, compiled=3))
    assert outcomes.total() > 90


# --- random programs --------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", share(range(4)))
def test_random_programs_compute_the_same(chunk):
    prove_corpus(30, partial(prove_random, both=False), start=chunk // 2, step=2)


def prove_random(number: int, case: Case, *, both: bool = True) -> str:
    """Prove a program with all of its results, also differentiated, and with some of them.

    Unless `both`, programs are alternately differentiated or taken with some results.
    """
    is_differentiated = number // 2 % 2 == 0
    before, _, verdict = prove_dce(case, gradients=both or is_differentiated)
    if both or not is_differentiated:
        with case.setting():
            prove_subset(before, case.arguments(), random.Random(number))
    return outcome(verdict)


# --- samples ----------------------------------------------------------------------------------


@pytest.mark.parametrize("file", share(sample_files()))
def test_samples_and_their_gradients_compute_the_same(file):
    for case in sample_programs(file):
        prove_dce(case, gradients=False)


SWEEP = [
    Part("dce: harnesses", Harnesses(), prove_harness, expected=lambda n: n.total() > 9600),
    Part("dce: random programs", RandomPrograms(2500), prove_random),
    Part("dce: samples", Samples(), lambda number, case: outcome(prove_dce(case)[2])),
]
