"""Commands on a GPU; skipped if there is none."""

import functools
import json

import jax
import pytest

LOSS = ("functions.py:double", "--args", "f32[300,200]")


@functools.cache
def why_no_gpu():
    try:
        jax.devices("gpu")
    except RuntimeError as error:
        return f"JAX has no GPU here: {str(error).splitlines()[0]}"
    return None


@pytest.fixture(autouse=True)
def needs_gpu():
    if reason := why_no_gpu():
        pytest.skip(reason)


pytestmark = pytest.mark.gpu


def test_backends_have_the_name_and_the_memory_of_a_gpu(cli):
    found = json.loads(cli("backends", "--json").out)["backends"]
    (gpu,) = [each for each in found if each["platform"] in ("cuda", "rocm")]
    assert gpu["devices"][0]["kind"] and gpu["devices"][0]["memory"] > 2**30


def test_a_program_returns_the_same_on_a_gpu_as_on_the_cpu(cli):
    assert cli("run", *LOSS, "--backend", "gpu").code == 0
    assert cli("compare", *LOSS, "--backends", "cpu,gpu").code == 0


def test_a_program_is_compiled_for_a_gpu(cli):
    result = cli("emit", *LOSS, "--to", "hlo-optimized", "--backend", "gpu")
    assert result.code == 0 and "is_scheduled=true" in result.out
