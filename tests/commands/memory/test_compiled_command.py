"""`memory --compiled` and `--limit`; and `run` of a program that does not fit."""

import json
import textwrap

import pytest

FUNCTIONS = """
    import jax.numpy as jnp
    import jaxprtool

    @jaxprtool.example("f32[256,64]", "f32[64,256]")
    def product(x, w):
        y = jnp.sin(x @ w)
        return jnp.sort(y, axis=0)[0]

    @jaxprtool.example("f32[400000]")
    def huge(x):
        y = jnp.sin(x[:, None] * x[None, :])
        return jnp.sort(y, axis=0)[0]

    @jaxprtool.example("f32[400000,400000]")
    def huge_argument(x):
        return x.sum()
"""


@pytest.fixture(autouse=True)
def filled(folder):
    (folder / "filled.py").write_text(textwrap.dedent(FUNCTIONS))
    return folder


@pytest.mark.parametrize("columns", [80, 160])
def test_a_table_has_the_lines_with_their_buffers_and_the_estimate(cli, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    found = cli("memory", "filled.py:product", "--compiled")
    heading, at, parts, *_ = found.out.splitlines()
    assert found.code == 0 and found.err == ""
    assert heading.startswith("product: ") and heading.endswith("estimated")
    assert at.startswith("peak at filled.py:") and parts.startswith("arguments 128.0 KiB, results")
    assert "share" in found.out and "estimate" in found.out and "filled.py:7" in found.out
    assert "f32[256,64] x" in found.out and "f32[256,256]" in found.out
    assert max(map(len, found.out.splitlines())) <= columns
    assert "more" in cli("memory", "filled.py:product", "--compiled", "--top", "1").out


def test_json_has_the_buffers(cli):
    found = json.loads(cli("memory", "filled.py:product", "--compiled", "--json").out)
    compiled = found["compiled"]
    assert compiled["peak_bytes"] == sum(each["bytes"] for each in compiled["buffers"])
    assert {"bytes", "place", "what"} <= compiled["buffers"][0].keys()
    assert compiled["estimate_bytes"] == found["peak_bytes"]
    assert "compiled" not in json.loads(cli("memory", "filled.py:product", "--json").out)


@pytest.mark.parametrize("compiled", [(), ("--compiled",)])
def test_a_limit_is_checked(cli, compiled):
    command = "memory", "filled.py:product", *compiled, "--limit"
    assert cli(*command, "1GiB").code == 0
    found = cli(*command, "100kB")
    assert found.code == 1 and found.out.startswith("product: ")
    error = found.err
    assert error.startswith("error: product needs ") and error.count("\n") == 1
    assert "more than --limit 97.7 KiB; 256.0 KiB of it at filled.py:7" in error
    assert json.loads(cli(*command, "100kB", "--json").out)["peak_bytes"]
    wrong = cli(*command, "much")
    assert wrong.code == 2 and "'much' is not a number of bytes" in wrong.err


def test_only_one_program_can_be_compiled(cli):
    found = cli("memory", "filled.py:product", "-p", "vjp", "--compiled")
    assert found.code == 2 and found.err.startswith("error: --compiled takes one program")


@pytest.mark.parametrize(
    "name, fault, what",
    [
        ("huge", "huge failed while it ran: RESOURCE_EXHAUSTED", "filled.py:12"),
        ("huge_argument", "argument 'x' of huge_argument does not fit", "arguments"),
    ],
)
def test_a_program_that_does_not_fit_in_memory_shows_its_buffers(cli, name, fault, what):
    found = cli("run", f"filled.py:{name}")
    first, second, *rest = found.err.splitlines()
    assert found.code == 2 and found.out == "" and first.startswith(f"error: {fault}")
    assert second.strip().startswith(f"{name}: 596.0 GiB compiled")
    table = "\n".join(rest)
    assert "596.0 GiB" in table and what in table
