"""mixed_precision on random programs and samples, and in the sweep on JAX's test programs.

Each result is type-checked, keeps the types of the original's results, and runs. Values of random
programs are near the original's.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxprtool.ir.program import type_check
from tests.programs import sample_programs
from tests.programs.corpus import prove_corpus
from tests.sweep.corpora import Harnesses, RandomPrograms, Samples
from tests.sweep.parts import Part


def prove_narrowed(number: int, case: Any) -> str:
    """Compute a program in a narrow dtype, and return the outcome."""
    program = case.program()
    with case.setting():
        dtype = ("bfloat16", "float16")[number % 2]
        after = program.apply(f"mixed_precision(compute_dtype='{dtype}')")
        type_check(after)
        assert [str(a) for a in after.out_avals] == [str(a) for a in program.out_avals]
        if after.jaxpr is program.jaxpr:
            return "same"
        outs = jax.jit(after.flat_function())(*case.arguments())
        assert [x.dtype for x in outs] == [a.dtype for a in program.out_avals]
    return "narrow"


def test_random_programs_are_narrowed():
    assert prove_corpus(6, prove_narrowed)["narrow"] > 3


def test_a_sample_is_narrowed():
    outcomes = [prove_narrowed(i, case) for i, case in enumerate(sample_programs("branches.py"))]
    assert "narrow" in outcomes


SWEEP = [
    Part("mixed precision: harnesses", Harnesses(), prove_narrowed),
    Part("mixed precision: random programs", RandomPrograms(200), prove_narrowed),
    Part("mixed precision: samples", Samples(), prove_narrowed),
]
