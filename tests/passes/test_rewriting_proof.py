"""Every rewriting pass on JAX's own test programs, on random programs, and on the samples.

Each pass alone, the named pipelines, and random pipelines are compared with the original by
`tests.programs.rewriting`: bits of values, callbacks, derivatives, and the number of equations.
JAX's programs are wrapped in wasteful code of each kind in turn.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest

from jaxprtool import passes as framework
from tests.programs import Case, harness_programs, sample_programs
from tests.programs.corpus import prove_corpus, wasteful_corpus
from tests.programs.random_programs import wasteful_programs
from tests.programs.rewriting import (
    LEVELS,
    PASSES,
    REWRITERS,
    TRANSFORMS,
    gradient_case,
    prove_all,
    prove_rewrites,
    random_pipeline,
)
from tests.programs.samples import sample_files
from tests.programs.waste import WASTE, wasteful
from tests.share import share
from tests.sweep.corpora import Harnesses, RandomPrograms, Samples
from tests.sweep.parts import Part

CHUNKS = 8


# --- JAX's own test programs ------------------------------------------------------------------


def prove_harness(number: int, case: Case, *, deep: int = 5) -> Counter[str]:
    """Prove a program by the named pipelines, and each second one, wrapped, by all rewriters.

    Every `deep`-th of these is also run in JAX's evaluator, and differentiated, after some of them.
    """
    rng = random.Random(number)
    outcomes = prove_rewrites(case, LEVELS)
    if number % 2:
        return outcomes
    kind = list(WASTE)[number // 2 % len(WASTE)]
    rewriters = (*REWRITERS, random_pipeline(rng))
    chosen = (REWRITERS[-1], rng.choice(rewriters)) if number // 2 % deep == 0 else ()
    return outcomes + prove_rewrites(wasteful(case, kind), rewriters, chosen)


def prove_harnesses(every: int, chunk: int, *, deep: int) -> Counter[str]:
    # Numbers differ between chunks so that each kind of program meets each kind of wrapping.
    cases = harness_programs(1)[::every][chunk::CHUNKS]
    numbered = ((i + chunk, case) for i, case in enumerate(cases))
    return prove_all(numbered, partial(prove_harness, deep=deep))


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_some_harnesses_compute_the_same(chunk):
    assert prove_harnesses(331, chunk, deep=2)["programs"] >= 2


# --- random programs --------------------------------------------------------------------------


def prove_random(number: int, case: Case) -> Counter[str]:
    """Prove a program, or for each third one its derivative, by all rewriters."""
    rng = random.Random(number)
    if number % 3 == 0:
        case = gradient_case(case) or case
    rewriters = (*REWRITERS, rng.choice(TRANSFORMS), random_pipeline(rng))
    chosen = (REWRITERS[-1], rng.choice(rewriters)) if number % 4 == 1 else ()
    return prove_rewrites(case, rewriters, chosen)


def test_random_programs_compute_the_same():
    assert prove_corpus(4, prove_random, wasteful_corpus)["programs"] >= 4


# --- samples ----------------------------------------------------------------------------------


@pytest.mark.parametrize("file", share(sample_files()))
def test_a_program_of_each_sample_computes_the_same(file):
    prove_rewrites(sample_programs(file)[0], LEVELS)


def prove_sample(number: int, case: Any) -> Counter[str]:
    """Prove a sample's function or its gradient by all rewriters and transformations."""
    rewriters = (*REWRITERS, *TRANSFORMS, random_pipeline(random.Random(number)))
    return prove_rewrites(case, rewriters, LEVELS)


SWEEP = [
    Part(
        "rewriting: harnesses",
        Harnesses(),
        prove_harness,
        expected=lambda n: n["programs"] > 7200,
    ),
    Part(
        "rewriting: random programs",
        RandomPrograms(800, programs=wasteful_programs),
        prove_random,
    ),
    Part("rewriting: samples", Samples(), prove_sample),
]


# --- coverage -------------------------------------------------------------------------------------


def test_every_rewriting_pass_is_tried():
    rewriters = (*PASSES, *TRANSFORMS)
    tried = {type(each).name for rewriter in rewriters for each in rewriter.pipeline.passes()}
    # Passes for repetition, symbols or exported calls have their own programs:
    # `test_outline_proof` and so on.
    tried |= {"outline", "roll", "specialize", "inline_exported"}
    classes = (
        framework.find_pass(name)
        for name, source in framework.available().items()
        if source.origin == "jaxprtool"
    )
    assert tried == {cls.name for cls in classes if cls.preserves and cls.keeps_checks}


@pytest.mark.parametrize("rewriter", REWRITERS, ids=str)
def test_every_rewriter_changes_something(rewriter):
    case = Case("tanh", lambda x, y: jnp.tanh(x * y) + x, (jnp.float32(0.3), jnp.arange(3.0)))
    programs = (wasteful(case, kind).program() for kind in WASTE)
    assert any(rewriter(program).jaxpr is not program.jaxpr for program in programs)
