"""A program that is written and read back is the same program: the proof of the format.

On JAX's own test programs, on random programs, and on the samples and their gradients.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.formats.jaxpr.round_trips import count, prove_round_trip
from tests.programs import Case, harness_share, sample_programs
from tests.programs.corpus import prove_corpus
from tests.programs.samples import sample_files
from tests.share import share
from tests.sweep.corpora import Harnesses, RandomPrograms, Samples
from tests.sweep.parts import Part

CHUNKS = 4

#: Features with Python functions: callbacks; a rule that differentiates by a custom_vjp; and from
#: JAX 0.12 on, the equations of `custom_root`.
LIVE = ("callback", "custom_lin", "CustomRoot")


@pytest.mark.proof
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_share_of_the_harnesses_round_trips(chunk):
    outcomes = count(harness_share()[chunk::CHUNKS], run_every=10)
    assert outcomes["round trip"] > 50


def comes_back(case: Any, run: bool) -> bool:
    """Assert that a case round-trips. Return False if it contains Python functions."""
    outcome = prove_round_trip(case, run=run)
    assert outcome == "round trip" or any(live in outcome for live in LIVE), outcome
    return outcome == "round trip"


@pytest.mark.parametrize("file", share(sample_files()))
def test_samples_and_their_gradients_round_trip(file):
    outcomes = [comes_back(case, run=False) for case in sample_programs(file)]
    assert any(outcomes)


@pytest.mark.proof
@pytest.mark.parametrize("chunk", share(range(4)))
def test_random_programs_round_trip(chunk):
    prove_corpus(10, prove_written, start=chunk // 2, step=2)


def prove(number: int, case: Any) -> str:
    return prove_round_trip(case, run=True)


def prove_written(number: int, case: Any) -> str:
    return "round trip" if comes_back(case, run=True) else "refused"


SWEEP = [
    Part("files: harnesses", Harnesses(), prove, expected=lambda n: n["round trip"] > 4800),
    Part("files: random programs", RandomPrograms(2500), prove_written),
    Part("files: samples", Samples(), prove_written),
]


# --- objects of JAX 0.12 --------------------------------------------------------------------------


@pytest.mark.proof
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[jnp.nonzero(x > 0, size=3)],
        lambda x: jnp.searchsorted(x, x / 2, side="right") * x,
        lambda x: jnp.interp(x / 2, x, x**2),
        lambda x: jnp.ldexp(x, 2) + jnp.frexp(x)[0],
    ],
)
def test_functions_of_numpy_round_trip(function, wrap):
    case = Case("f", wrap(function), (np.linspace(-1, 1, 7, dtype=np.float32),))
    assert prove_round_trip(case, run=True) == "round trip"
