"""Variants in separate processes: a crash is reported, and the others continue."""

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.commands.compare import variants
from jaxprtool.errors import UnsupportedError
from tests.share import on_one_release


def f(key, x):
    keys = jax.random.split(key)
    return {"x": x.astype(jnp.bfloat16) + 1, "keys": keys, "i": x.argmax(), "none": x[:0]}


ARGS = jax.random.key(1), jnp.arange(4.0)


@on_one_release
def test_results_of_any_dtype_are_returned_unchanged():
    program = jaxprtool.trace(f, *ARGS)
    runner = variants.IsolatedRunner(variants.Variant("f", program))
    here = jax.tree.leaves(f(*ARGS))
    assert [jax.typeof(x).dtype for x in runner(ARGS)] == [x.dtype for x in here]


@on_one_release
def test_a_crash_is_one_line_with_its_signal_and_the_others_continue(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os, signal; os.kill(os.getpid(), 11)")
    start, started = variants.python_process, []

    def crashing(failure, environment):
        started.append(failure)
        path = {"PYTHONPATH": str(tmp_path)} if len(started) == 2 else {}
        return start(failure, {**environment, **path})

    monkeypatch.setattr(variants, "python_process", crashing)
    program = jaxprtool.trace(lambda x: x * 2, 1.0)
    found = jaxprtool.compare(program, (1.0,), passes=["", "dce", "cse"], isolate=True)
    crashed, other = found.variants
    assert crashed.error.startswith("dce crashed: SIGSEGV")
    assert "\n" not in crashed.error and other.equal and not found.within


def test_a_program_that_cannot_be_written_to_a_file_is_refused():
    program = jaxprtool.trace(lambda x: jax.pure_callback(lambda v: v, x, x), 1.0)
    with pytest.raises(UnsupportedError, match="callback"):
        variants.IsolatedRunner(variants.Variant("f", program))((1.0,))
