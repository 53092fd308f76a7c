"""Any part of a program matches in this program, and can be replaced by itself.

The parts are connected equations of JAX's own test programs, of random programs and of the samples.
The results of the program must stay bitwise equal.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any

import jax

from jaxprtool.ir.program import type_check
from tests.passes.patterns.parts import rewrite_of_a_part
from tests.programs import harness_programs, same
from tests.programs.corpus import prove_corpus
from tests.sweep.corpora import Harnesses, RandomPrograms, Samples
from tests.sweep.parts import Part


def prove_part(case, rng: random.Random, *, values: bool = True) -> int:
    """Replace a part of a program by itself, and return the number of matches.

    Without `values`, the result is type-checked and not run, since compilation takes long.
    """
    with case.setting():
        before = case.program()
        part = rewrite_of_a_part(before, rng)
        if part is None:
            return 0
        after, matches = part.applied(before)
        assert matches, f"{case.name}: a part of it is not found: {part.skeletons(None, 0, False)}"
        type_check(after)
        if values:
            same(before, after, case.arguments(), gradients=False)
    return len(matches)


def prove_harnesses(every: int, start: int, step: int) -> Counter[int]:
    found: Counter[int] = Counter()
    for number, case in enumerate(harness_programs(every)[start::step]):
        found[prove_part(case, random.Random(number))] += 1
        if number % 200 == 199:
            jax.clear_caches()
    return found


def prove_random_programs(count: int, *, values: bool) -> Counter[str]:
    def prove_random(number: int, case: Any) -> int:
        return prove_part(case, random.Random(number), values=values)

    return prove_corpus(count, prove_random)


def test_parts_of_some_harnesses_are_replaced_by_themselves():
    found = prove_harnesses(10, 3, 60)
    assert found.total() - found[0] > 8


def test_parts_of_random_programs_are_replaced_by_themselves():
    assert prove_random_programs(4, values=False).total() >= 4


def test_parts_of_a_few_random_programs_compute_the_same():
    assert prove_random_programs(1, values=True).total() >= 1


def prove(number: int, case, turns: int = 1) -> str:
    """Replace parts of a program by themselves, `turns` times."""
    found = sum(prove_part(case, random.Random(turns * number + turn)) for turn in range(turns))
    return "found" if found else "no part"


REFUSALS = ("no part",)
SWEEP = [
    Part(
        "patterns: harnesses",
        Harnesses(),
        prove,
        refusals=REFUSALS,
        expected=lambda n: n["found"] > 4000,
    ),
    Part("patterns: random programs", RandomPrograms(800, first_seed=200), prove, REFUSALS),
    Part("patterns: samples", Samples(), partial(prove, turns=4), REFUSALS),
]
