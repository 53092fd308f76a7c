"""checkpoint(only=…) on random programs and samples, and in the sweep on JAX's test programs.

Each result is type-checked, and `tests.programs.same` compares values to the bit, and gradients.
"""

from __future__ import annotations

from jaxprtool.errors import PipelineError, UnsupportedError
from jaxprtool.passes.transforms.calls import Checkpoint
from tests.programs import prove, sample_programs
from tests.programs.corpus import prove_corpus
from tests.sweep.corpora import Harnesses, RandomPrograms, Samples
from tests.sweep.parts import Part


def prove_scoped(number: int, case) -> str:
    """Put all outermost scopes of a program under `jax.checkpoint`, and return the outcome."""
    policy = (None, "dots_saveable")[number % 2]
    try:
        prove(case, Checkpoint(policy, only="*"))
    except PipelineError:
        return "no scopes"
    except UnsupportedError as error:
        assert "effect" in error.message
        return "refused"
    return "same"


def test_random_programs_compute_the_same():
    prove_corpus(6, prove_scoped)


def test_a_sample_computes_the_same():
    outcomes = [prove_scoped(i, case) for i, case in enumerate(sample_programs("branches.py"))]
    assert "same" in outcomes


SWEEP = [
    Part("scoped checkpoint: harnesses", Harnesses(), prove_scoped),
    Part(
        "scoped checkpoint: random programs",
        RandomPrograms(200),
        prove_scoped,
        expected=lambda n: n["same"] > 40,
    ),
    Part("scoped checkpoint: samples", Samples(), prove_scoped),
]
