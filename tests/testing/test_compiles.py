"""The limit of compilations in a block, from the start of a test, with other recordings active."""

import os
import re

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.errors import ArgumentsError
from jaxprtool.testing.assertions import counting_compiles


def test_a_block_is_compared_with_earlier_compilations():
    triple = jax.jit(lambda x: 3 * x)
    with counting_compiles() as jax_compiles:
        triple(jnp.ones(2))
        with jax_compiles(at_most=0):
            triple(jnp.ones(2))
        why = r"lambda@2 at .*test_compiles\.py:\d+: x: f32\[2\] → i32\[2\]"
        with pytest.raises(AssertionError, match=why), jax_compiles(at_most=0):
            triple(jnp.ones(2, "int32"))
        with pytest.raises(AssertionError, match="lambda@3"), jax_compiles(at_most=0):
            triple(jnp.ones(5))


def test_operations_outside_of_jit_and_lowering_do_not_count():
    with counting_compiles() as jax_compiles, jax_compiles(at_most=0):
        jnp.ones(17) + 4
        jax.jit(lambda x: x).lower(1.0)


def test_an_exception_in_a_block_is_raised_unchanged():
    with counting_compiles() as jax_compiles, pytest.raises(KeyError), jax_compiles(at_most=0):
        jax.jit(lambda x: x)(1.0)
        raise KeyError


def test_an_invalid_limit_is_an_error():
    with counting_compiles() as jax_compiles, pytest.raises(ArgumentsError, match="'few'"):
        jax_compiles(at_most="few")


def test_a_recording_inside_the_block_and_the_count_are_both_complete(tmp_path):
    many = pytest.raises(AssertionError, match="compiled 2 programs")
    with counting_compiles() as jax_compiles, many, jax_compiles(at_most=1):
        with jaxprtool.record(tmp_path / "run") as run:
            jax.jit(lambda x: x + 1)(1.0)
        jax.jit(lambda x: x - 1)(1.0)
    assert list(run.programs) == ["lambda"]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files as Linux does")
def test_counting_leaves_no_open_file_and_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with counting_compiles() as jax_compiles, jax_compiles(at_most=1):
            jax.jit(lambda x: x)(1.0)
            (folder,) = tmp_path.iterdir()
            assert not re.findall(r"\.jaxpr", " ".join(os.listdir(folder / "process-0")))
    assert len(os.listdir("/proc/self/fd")) == before and not list(tmp_path.iterdir())
