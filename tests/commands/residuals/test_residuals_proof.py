"""The gradient under each policy equals that of applying it: `checkpoint(policy=…), vjp`.

On random programs, samples, and JAX's own test programs.
"""

from __future__ import annotations

from collections import Counter

import pytest

from jaxprtool import jaxcompat
from jaxprtool.commands.cost.estimate import total_flops
from jaxprtool.commands.memory.estimate import peak_memory
from jaxprtool.commands.residuals.policies import WholeCheckpoint, joined_halves
from jaxprtool.commands.residuals.residuals import total_bytes
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.custom_rules import POLICIES, POLICY_FACTORIES
from jaxprtool.passes.retrace import positional
from jaxprtool.passes.transforms.calls import Checkpoint
from jaxprtool.passes.transforms.linear import Vjp
from tests.programs import harness_programs, sample_programs
from tests.programs.corpus import prove_corpus
from tests.sweep.corpora import Harnesses, RandomPrograms, Samples
from tests.sweep.parts import Part

NAMED = POLICY_FACTORIES["save_only_these_names"]("hidden", "loss", "attention")
NAMES = ("everything_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")
CHOSEN = {**{name: POLICIES[name] for name in NAMES}, "names": NAMED}


def prove_bytes(number: int, case) -> Counter[str]:
    """Compare bytes, peaks and FLOPs by policy. Return for how many policies JAX can apply them.

    Every second program is differentiated with respect to its first argument only.
    """
    outcomes: Counter[str] = Counter()
    with case.setting():
        program = case.program()
        try:
            numbers = tuple(range(len(positional(program))))[: 1 if number % 2 else None]
            vjp = Vjp(argnums=numbers) if numbers else Vjp()
            vjp(program)
            whole = WholeCheckpoint(program, numbers)
            kept = {name: whole.kept_bytes(policy) for name, policy in CHOSEN.items()}
        except JaxprToolError:
            return Counter(["refused"])
        for name, policy in CHOSEN.items():
            try:
                gradient = vjp(Checkpoint(policy)(program))
            except JaxprToolError:
                outcomes["not applied by JAX"] += 1  # complex residuals, for example
                continue
            assert kept[name] == total_bytes(gradient["backward"]), name
            outcomes["same"] += 1
            joined = whole.gradient(policy)
            if joined is not None and kept[name] is not None:
                jaxcompat.check_jaxpr(joined)
                assert figures(joined) == figures(joined_halves(gradient)), name
                outcomes["same figures"] += 1
    return outcomes


def figures(gradient):
    return peak_memory(gradient), total_flops(gradient)


def test_bytes_of_random_programs_agree_with_jax():
    prove_corpus(8, prove_bytes)


@pytest.mark.parametrize("file", ["branches.py", "custom_gradients.py", "layers.py"])
def test_bytes_of_samples_agree_with_jax(file):
    outcomes = [prove_bytes(0, case) for case in sample_programs(file)]
    assert sum(outcomes, Counter())["same"] >= 4


def test_bytes_of_some_of_jaxs_test_programs_agree_with_jax():
    outcomes = [prove_bytes(0, case) for case in harness_programs(1)[7::400]]
    assert sum(outcomes, Counter())["same"] > 20


SWEEP = [
    Part("residuals: harnesses", Harnesses(), prove_bytes, expected=lambda n: n["same"] > 4000),
    Part("residuals: random programs", RandomPrograms(200), prove_bytes),
    Part("residuals: samples", Samples(), prove_bytes),
]
