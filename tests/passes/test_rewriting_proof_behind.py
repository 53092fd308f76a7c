"""batch and unzip after rewriting equal batch and unzip of the originals.

The result of `-O2` is batched, and compared with `jax.vmap` of the original. Programs with
variables are unzipped after it, which must find the remaining variables, with the same values.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.program import Program, type_check
from jaxprtool.passes import Pipeline
from jaxprtool.passes.unzip import Unzip, UnzipError
from jaxprtool.primitives import VARIABLE
from tests.programs import Case, harness_programs
from tests.programs.corpus import prove_corpus, wasteful_corpus
from tests.programs.init_apply import prove_unzip
from tests.programs.mapped import flat, mappings, ours, same_programs, theirs
from tests.programs.random_programs import wasteful_programs
from tests.programs.rewriting import prove_all
from tests.programs.same import lasting_effects
from tests.programs.sowing import sown
from tests.programs.stepwise import evaluate
from tests.programs.values import bits_agree, first_value_difference
from tests.programs.variables import KEY, LATE, flow
from tests.programs.waste import WASTE, wasteful
from tests.share import share
from tests.sweep.corpora import Harnesses, RandomPrograms, Samples
from tests.sweep.parts import Part

CHUNKS = 2
O2 = Pipeline.parse("-O2")


def rewritten(program: Program) -> Program:
    after = O2(program)
    assert isinstance(after, Program)
    return after


# --- batch ------------------------------------------------------------------------------------


def prove_batch(case: Any, rng: random.Random) -> Counter[str]:
    """Batch the rewritten program of a case as JAX maps the original, in one random way."""
    with case.setting():
        before, args = flat(case.program()), case.arguments()
        if lasting_effects(before.jaxpr):
            # An effect that no longer depends on the mapped axis happens once, not per batch
            # element.
            return Counter({"not mapped: it has effects": 1})
        after = rewritten(before)
        (mapping,) = mappings(before, rng, 1)
        try:
            reference, _ = theirs(before, mapping)
        except Exception as error:  # a fault of JAX or of the mapping: see `test_proof`
            return Counter({f"not mapped by JAX: {type(error).__name__}": 1})
        result = ours(after, mapping)
        type_check(result)
        try:
            how = same_programs(result, reference, mapping.stack(args))
        except Exception as error:
            error.add_note(f"mapped by {mapping}")
            raise
        return Counter({f"batched: {how}": 1})


# --- unzip ------------------------------------------------------------------------------------


def prove_unzipped(case: Any, rng: random.Random) -> Counter[str]:
    """Sow values in a case, and unzip it before and after rewriting."""
    with case.setting():
        program, args = case.program(), case.arguments()
        positional, _ = jax.tree.unflatten(program.in_tree, range(len(args)))
        if not positional:
            return Counter({"no arguments": 1})
        key = rng.randrange(len(positional))
        early = jax.tree.leaves(positional[key])
        before = sown(program, early, rng)
        facts = [KEY if i in early else LATE for i in range(len(args))]
        try:
            expected = Unzip(key_args=key)(before)["init"]
        except UnsupportedError:
            return Counter({"not unzipped": 1})
        except UnzipError:
            # A ref cannot be sown, so nothing cuts one that is made from a key and written late.
            assert not flow(before.jaxpr, facts, VARIABLE).is_cut
            return Counter({"not cut": 1})
        after = rewritten(before)
        proof = prove_unzip(after, key, args, gradients=False, compiled=False)
        keys = [args[i] for i in early]
        values = dict(zip(expected.out_names, evaluate(expected.jaxpr, keys), strict=True))
        # A value that became constant is known early, and may be an additional variable.
        if not set(proof.init.out_names) <= values.keys():
            return Counter({"unzipped, with more variables": 1, "variables": proof.variables})
        # Unused variables may be removed, such as those of empty arrays.
        wanted = [values[name] for name in proof.init.out_names]
        got = evaluate(proof.init.jaxpr, keys)
        fault = first_value_difference(wanted, got, bits_agree, proof.init.out_names)
        assert fault is None, fault
        return Counter({"unzipped": 1, "variables": proof.variables})


def test_a_ref_that_is_made_from_a_key_and_written_late_is_not_cut():
    def fun(x, key):
        ref = jax.new_ref(key)
        ref[...] += x
        return ref[...]

    case = Case("ref", fun, (jnp.float32(1.0), jnp.float32(2.0)))
    chosen = next(seed for seed in range(9) if random.Random(seed).randrange(2) == 1)
    assert prove_unzipped(case, random.Random(chosen)) == {"not cut": 1}


# --- programs ---------------------------------------------------------------------------------


def prove(number: int, case: Any) -> Counter[str]:
    """Unzip each third program, and batch the others."""
    return (prove_unzipped if number % 3 == 0 else prove_batch)(case, random.Random(number))


def prove_harness(number: int, case: Any) -> Counter[str]:
    """Prove a program wrapped in wasteful code."""
    return prove(number, wasteful(case, list(WASTE)[number % len(WASTE)]))


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_some_harnesses_batch_and_unzip_after_o2(chunk):
    cases = share(harness_programs(1)[::311])[chunk::CHUNKS]
    numbered = ((i + chunk, case) for i, case in enumerate(cases))
    assert prove_all(numbered, prove_harness).total() >= 4


def test_random_programs_batch_and_unzip_after_o2():
    outcomes = prove_corpus(5, prove, wasteful_corpus)
    assert outcomes.total() >= 5


def prove_sample(number: int, case: Any) -> Counter[str]:
    return prove_batch(case, random.Random(number))


REFUSALS = ("not mapped", "not unzipped", "not cut", "no arguments")
SWEEP = [
    Part(
        "behind -O2: harnesses",
        Harnesses(every=3),
        prove_harness,
        refusals=REFUSALS,
        expected=lambda n: n.total() > 1200,
    ),
    Part(
        "behind -O2: random programs",
        RandomPrograms(400, programs=wasteful_programs),
        prove,
        refusals=REFUSALS,
    ),
    Part("behind -O2: samples", Samples(), prove_sample, refusals=REFUSALS),
]
