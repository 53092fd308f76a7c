"""`jaxprtool shapecheck` reports whether a claim holds, and the equation that violates it."""

import textwrap

import pytest

FUNCTIONS = """
    import jax.numpy as jnp

    def encode(x):
        hidden = jnp.tanh(x * 2)
        return jnp.concatenate([hidden, hidden], axis=1)

    def product(x, w):
        return x @ w

    def made():
        return encode
"""


@pytest.fixture(autouse=True)
def shapes(folder):
    (folder / "shapes.py").write_text(textwrap.dedent(FUNCTIONS))


def test_a_claim_that_holds_is_printed(cli):
    found = cli("shapecheck", "shapes.py:encode", "f32[n,d]", "f32[n,2*d]")
    assert (found.code, found.out) == (0, "encode: (f32[n,d]) -> f32[n,2*d]\n")
    assert cli("shapecheck", "shapes.py:made", "f32[3,4]", "f32[3,8]", "--factory").code == 0


def test_a_claim_that_fails_is_one_line_with_the_equation(cli):
    found = cli("shapecheck", "shapes.py:encode", "f32[n,d]", "f32[n,d]")
    assert (found.code, found.out) == (1, "")
    assert found.err == (
        "error: result of encode is f32[n,2*d], not f32[n,d]: caused by concatenate at "
        "shapes.py:6\n"
    )


def test_a_program_file_is_checked_too(cli):
    cli("opt", "shapes.py:encode", "--args", "f32[n,d]", "-o", "encode.jaxpr")
    assert cli("shapecheck", "encode.jaxpr", "f32[k,4]", "f32[k,8]").code == 0
    assert cli("shapecheck", "encode.jaxpr", "f32[k,4]", "f32[k,4]").code == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("shapes.py:encode", "f32[n,d]"), 2, "missing argument 'RESULTS'"),
        (("shapes.py:encode", "f32[n,d]", "f32[n,k]"), 2, "no argument has the symbol 'k'"),
        (("shapes.py:encode", "f32[n,d", "f32[n,d]"), 2, "'[' in --args is not closed"),
        (("shapes.py:encod", "f32[n,d]", "f32[n,d]"), 2, "has no attribute 'encod'"),
        (("shapes.py:product", "f32[n,d], f32[k]", "f32[n]"), 3, "product raised TypeError"),
    ],
)
def test_what_cannot_be_checked_is_a_one_line_error(cli, arguments, code, message):
    found = cli("shapecheck", *arguments)
    assert found.code == code and message in found.err
