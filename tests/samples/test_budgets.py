"""Regression tests of the samples: their costs, their contents, and a snapshot of one."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.testing import assert_budget, assert_donated, assert_equivalent, assert_no

SAMPLES = Path(__file__).parents[2] / "samples"

#: The budgets of each sample, with margins for JAX releases.
BUDGETS = {
    "batching:pull": {"flops": 1923, "equations": 49},
    "convnet:loss": {"flops": "11.7 MFLOP", "peak_bytes": "243KiB", "residual_bytes": "572KiB"},
    "layers:loss": {"flops": "5.1 MFLOP", "equations": 234, "residual_bytes": "862KiB"},
    "rnn:loss": {"flops": "210 kFLOP", "peak_bytes": "15KiB", "residual_bytes": "58KiB"},
    "sharded:loss": {"flops": 248, "collectives_bytes": 7},
    "transformer:loss": {"peak_bytes": "1.4MiB", "equations": 118, "residual_bytes": "11.6MiB"},
    "transformer:train_step": {"flops": "365 MFLOP", "peak_bytes": "14.6MiB"},
    "vae_variables:train": {"flops": "306 MFLOP", "equations": 314},
}


def program(target, **options):
    name, function = target.split(":")
    return jaxprtool.load(f"{SAMPLES / name}.py:{function}", **options)


@pytest.mark.parametrize("target", BUDGETS)
def test_a_sample_stays_within_its_budgets(target):
    assert_budget(program(target), **BUDGETS[target])
    assert_no(program(target), "f64")


@pytest.mark.proof
def test_the_corrected_step_sends_less_than_the_wrong_one():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        specs = "({'up': P(None, None, 'model'), 'down': P(None, 'model')}, P('data'))"
        mended, step = (
            program(f"partitioned:{name}", in_specs=specs) for name in ("mended_step", "step")
        )
        assert_budget(mended, collectives_bytes="1.3MiB")
        with pytest.raises(AssertionError, match=r"samples/partitioned\.py:28 "):
            assert_budget(step, collectives_bytes="1.3MiB")


def test_a_sample_is_the_program_of_its_snapshot(jaxpr_snapshot):
    jaxpr_snapshot(program("rnn:loss"))
    jaxpr_snapshot(program("branches:huber_batch").apply("grad"), name="huber_slopes")


def test_equivalent_samples_are_equivalent():
    assert_equivalent(program("rnn:loss").apply("grad"), program("rnn:grad_loss"))


@pytest.mark.proof
def test_the_script_donates_its_parameters_and_recompiles_for_its_last_batch(jax_compiles):
    spec = importlib.util.spec_from_file_location("train", SAMPLES / "train.py")
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    params = train.init(jax.random.key(0), width=4)
    letters = next(train.batches(16, 12))
    assert_donated(train.step, params, letters, 0.5)
    with jax_compiles(at_most=1):
        for _ in range(2):
            params, _ = train.step(params, jnp.asarray(letters), 0.5)
    again = r"letters: i32\[16,13\] → i32\[10,13\]"
    with pytest.raises(AssertionError, match=again), jax_compiles(at_most=0):
        train.step(params, jnp.asarray(letters[:10]), 0.5)
