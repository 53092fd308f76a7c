"""`jaxprtool precision` names the lines to keep, their savings, and the pass to use."""

import json
import textwrap

import pytest

FUNCTIONS = """
    import jax.numpy as jnp, jaxprtool

    @jaxprtool.example("f32[8,16]", "f32[16,16]")
    def norm(x, w):
        h = jnp.tanh(x @ w)
        big = jnp.square(1000 * h)
        return jnp.sqrt(big.mean()) / 1000

    @jaxprtool.example("i32[3]")
    def integers(x):
        return x + 1
"""


@pytest.fixture(autouse=True)
def parts(folder):
    (folder / "parts.py").write_text(textwrap.dedent(FUNCTIONS))
    return folder


def test_output_has_the_lines_to_keep_and_the_pass(cli):
    found = cli("precision", "parts.py:norm", "--dtype", "float16")
    assert found.code == 0 and found.err == ""
    lines = found.out.splitlines()
    assert lines[0] == "norm: 2 of 3 lines stay wide, the others can be float16"
    assert any("inf" in each and "parts.py:7  big = jnp.square" in each for each in lines)
    assert "checked on 3 more" in found.out
    assert max(map(len, lines[:-1])) <= 80
    assert lines[-1].startswith("-p \"mixed_precision(compute_dtype='float16', keep=['parts.py:7'")
    again = cli("opt", "parts.py:norm", *lines[-1].replace('"', "").split(" ", 1))
    assert again.code == 0 and "f16[8,16] = dot_general" in again.out


def test_the_printed_pipeline_extends_the_given_one(cli):
    found = cli("precision", "parts.py:norm", "-p", "jit", "--json")
    document = json.loads(found.out)
    assert document["within"] is True and document["pipeline"].startswith("mixed_precision")
    text = cli("precision", "parts.py:norm", "-p", "jit").out
    assert '-p "jit, mixed_precision' in text


def test_nothing_to_narrow_is_one_line(cli):
    found = cli("precision", "parts.py:integers")
    assert found.code == 2
    assert found.err == "error: integers computes no floats wider than bfloat16\n"
