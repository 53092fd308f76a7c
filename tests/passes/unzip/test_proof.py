"""unzip on JAX's own test programs and on random programs, with values sown at every depth.

Keys are some of the arguments, whatever their types. Each result is compared with the reference of
`tests.programs.variables` by `tests.programs.init_apply`: bits of variables and results, callbacks,
gradients. If unzip refuses a program, the reference must find the same reason.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.program import Program, type_check
from jaxprtool.passes.unzip import UnzipError
from jaxprtool.primitives import VARIABLE
from tests.programs import Case, harness_programs
from tests.programs.corpus import prove_corpus
from tests.programs.dead_code import DEAD_CODE, with_dead_code
from tests.programs.gradients import has_refs
from tests.programs.init_apply import prove_unzip
from tests.programs.rewriting import prove_all
from tests.programs.sowing import CUSTOM_RULES, in_custom_rule, sown
from tests.programs.variables import KEY, LATE, flow
from tests.share import share
from tests.sweep.corpora import Harnesses, RandomPrograms
from tests.sweep.parts import Part

CHUNKS = 2

#: Why unzip may refuse a program whose variables cut it.
LIMITS = (
    "number of iterations is unknown",
    "has an effect that belongs to init",
    "ordered effect",
)

#: Why it may refuse a call with custom rules that contains a variable.
LIMITS_OF_RULES = ("closes over", "cannot be written as a jaxpr")


def key_args(program: Program, rng: random.Random) -> tuple[list[int], list[int]]:
    """Draw some of the positional arguments, but not all if there are several; and their leaves."""
    positional, _ = jax.tree.unflatten(program.in_tree, range(len(program.in_avals)))
    count = len(positional)
    chosen = sorted(rng.sample(range(count), rng.randint(min(1, count), max(1, count - 1))))
    return chosen, jax.tree.leaves([positional[i] for i in chosen])


def prove_sown(case: Case, rng: random.Random, *, leak: float = 0.0, gradients: bool) -> str:
    """Sow values in a case and unzip it. Return the outcome in a few words."""
    with case.setting():
        program, args = case.program(), case.arguments()
        if not args:
            return "no arguments"
        keys, early = key_args(program, rng)
        program = sown(program, early, rng, leak=leak)
        type_check(program)
        facts = [KEY if i in early else LATE for i in range(len(args))]
        is_cut = flow(program.jaxpr, facts, VARIABLE).is_cut
        try:
            proof = prove_unzip(program, tuple(keys), args, gradients=gradients)
        except UnzipError as error:
            assert "do not cut" in error.message, error.message
            assert not is_cut or has_refs(program.jaxpr), error.message
            return "not cut"
        except UnsupportedError as error:
            assert any(limit in error.message for limit in LIMITS), error.message
            return "refused"
        # Equations with refs inside may be kept whole, or not, for other reasons.
        assert is_cut or has_refs(program.jaxpr)
    return "no variables" if not proof.variables else f"gradients: {proof.gradients.split(':')[0]}"


# --- the sower ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jit", "remat", "cond", "scan", "while"])
def test_values_are_sown_at_every_depth(kind):
    case = Case("tanh", lambda x, y: jnp.tanh(x * y) + x, (jnp.float32(0.3), jnp.arange(3.0)))
    case = with_dead_code(with_dead_code(case, kind), "scan")
    program = case.program()
    deepest = 0
    for seed in range(20):
        made = flow(sown(program, [0], random.Random(seed)).jaxpr, [KEY, LATE], VARIABLE)
        assert made.is_cut
        deepest = max([deepest, *(len(site.lengths) for site in made.sites)])
    assert deepest == (2 if kind in ("scan", "while") else 1)


# --- JAX's own test programs ------------------------------------------------------------------


def prove_harness(number: int, case: Case, gradients: int = 4) -> str:
    """Prove a program as it is or, each third, inside calls, loops and branches in turn."""
    kinds = [kind for kind in DEAD_CODE if not kind.startswith("custom")]
    if number % 3 == 0:
        case = with_dead_code(case, kinds[number // 3 % len(kinds)])
    outcome = prove_sown(case, random.Random(number), gradients=number % gradients == 0)
    assert outcome not in ("refused", "not cut"), outcome
    return outcome


def prove_some(every: int, chunk: int, prove: Callable[[int, Case], str]) -> Counter[str]:
    """Prove this release's half of each `every`-th of JAX's programs, in `CHUNKS` parts."""
    cases = enumerate(share(harness_programs(1)[::every])[chunk::CHUNKS])
    return prove_all(cases, lambda number, case: Counter([prove(number, case)]))


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_some_harnesses_unzip(chunk):
    outcomes = prove_some(97, chunk, partial(prove_harness, gradients=6))
    assert sum(outcomes.values()) > 10


# --- custom rules -----------------------------------------------------------------------------


def prove_custom_rules(number: int, case: Case) -> str:
    """Prove a program as the body of a function with rules, one argument being a variable there."""
    arrays = [i for i, x in enumerate(case.args) if hasattr(x, "dtype")]
    if not arrays:
        return "no arguments"
    chosen = arrays[number % len(arrays)]
    case = in_custom_rule(case, chosen, list(CUSTOM_RULES)[number % len(CUSTOM_RULES)])
    try:
        with case.setting():
            proof = prove_unzip(case.program(), chosen, case.arguments())
    except UnsupportedError as error:
        if any(limit in error.message for limit in LIMITS_OF_RULES):
            return "refused"
        raise
    return proof.gradients.split(":")[0]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_custom_rules_hold_with_variables_inside(chunk):
    assert prove_some(173, chunk, prove_custom_rules)["reverse"] > 0


# --- random programs --------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", share(range(4)))
def test_random_programs_unzip(chunk):
    prove_corpus(14, prove_random, start=chunk // 2, step=2)


def prove_random(number: int, case: Case) -> str:
    """Prove a program whose variables may not cut it."""
    rng = random.Random(number)
    leak = 0.3 if rng.random() < 0.2 else 0.0
    return prove_sown(case, rng, leak=leak, gradients=number % 2 == 0)


REFUSALS = ("refused", "not cut", "no arguments")
SWEEP = [
    Part(
        "unzip: harnesses",
        Harnesses(),
        prove_harness,
        refusals=REFUSALS,
        expected=lambda n: n.total() > 4800,
    ),
    Part(
        "unzip: custom rules in harnesses",
        Harnesses(),
        prove_custom_rules,
        refusals=REFUSALS,
        expected=lambda n: n["reverse"] > 2000,
    ),
    Part(
        "unzip: random programs",
        RandomPrograms(2000, first_seed=1000),
        prove_random,
        refusals=REFUSALS,
        expected=lambda n: n["not cut"] < 0.2 * n.total(),
    ),
]
