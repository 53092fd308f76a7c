"""Loops and branches outside of `jit` are recorded as programs, with reasons like functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool.commands.record.record import record


def rolled(x, length):
    return jax.lax.scan(lambda carry, _: (jnp.sin(carry) * 2, None), x, None, length)[0]


def test_a_loop_with_a_new_body_is_compiled_again(tmp_path):
    x = np.ones(3, np.float32)
    with record(tmp_path / "run") as recording:
        for length, size in ((4, 3), (4, 3), (5, 3), (5, 4)):
            expected = rolled(np.ones(size, np.float32), length)
        found = recording.run
        programs = recording.programs
    (function,) = found.functions
    assert function.name == "scan"
    assert function.line.endswith(f"test_loops_outside_jit.py:{rolled.__code__.co_firstlineno + 1}")
    assert [each.error for each in function.compilations] == [""] * 4
    first, *again = [each.reasons for each in function.compilations]
    assert first == ()
    kinds = [(reason.kind, reason.before, reason.after) for (reason,) in again]
    assert kinds == [
        ("function", "the function", "another function object"),
        ("static", "4", "5"),
        ("shape", "f32[3]", "f32[4]"),
    ]
    assert again[0][0].advice.startswith("call jax.lax.scan under jax.jit")
    assert [reason.advice for (reason,) in again[1:]] == ["", ""]
    np.testing.assert_array_equal(programs["scan@4"](np.ones(4, np.float32))[0], expected)
    assert programs["scan"].in_avals[0].shape == x.shape


def test_while_loops_and_branches_are_programs_and_operations_are_not(tmp_path):
    with record(tmp_path / "run") as recording:
        x = jnp.ones(1237) * 2  # a size whose operations no other test has compiled
        jax.lax.while_loop(lambda v: (v < 9).all(), lambda v: v + 1, x)
        jax.lax.cond(x.sum() > 0, lambda: 1.0, lambda: 2.0)
        found = recording.run
    assert sorted(each.name for each in found.functions) == ["cond", "while"]
    assert found.outside_jit


@pytest.mark.proof
def test_a_cleared_cache_is_the_reason_for_the_same_loop_again(tmp_path):
    def body(v):
        return v + 1

    with record(tmp_path / "run") as recording:
        for _ in range(2):
            jax.lax.while_loop(jnp.isfinite, body, jnp.float32(np.inf))
            jax.clear_caches()
        (why,) = recording.reasons["while@2"]
    assert (why.kind, why.after) == ("cache", "JAX's cache was cleared")
