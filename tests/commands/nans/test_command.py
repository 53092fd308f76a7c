"""`jaxprtool nans` names the first equation that produces a NaN or an infinity."""

import json
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprtool.commands.record.record import record
from jaxprtool.ir.source_text import Place

FUNCTIONS = """
    import jax
    import jax.numpy as jnp

    def norm(x):
        return x / jnp.sqrt((x * x).sum())

    def loss(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (norm(x * w), None), batch["x"], params)
        jax.debug.print("seen")
        return jnp.where(x > 0, jnp.log(x), 0.0).sum()

    def stats(x):
        return x.mean(), jnp.nan

    def check(x):
        if x.dtype.kind == "c" or any(number != number for number in x.tolist()):
            raise ValueError("no NaNs here")
        return x

    def raising(x):
        y = jnp.sqrt(x - 1.0)
        return jax.pure_callback(check, jax.ShapeDtypeStruct(y.shape, y.dtype), y)

    def case():
        return loss, (jnp.array([[1.0, 2.0], [0.0, 0.0], [1.0, 2.0]]), {"x": jnp.ones(2)})
"""

LOSS = "nans", "bad.py:case", "--factory"


@pytest.fixture(autouse=True)
def bad(folder):
    (folder / "bad.py").write_text(textwrap.dedent(FUNCTIONS))
    return folder


def test_the_first_one_that_reaches_a_result_has_its_line_iteration_and_operands(cli):
    found = cli(*LOSS)
    assert found.code == 1 and found.err == ""
    heading, _, line, *facts = found.out.splitlines()
    assert (
        heading == "loss: div makes a NaN, which reaches no result: select_n at bad.py:11 drops it"
    )
    assert line == "bad.py:6  return x / jnp.sqrt((x * x).sum())"
    assert facts[0] == "value      f32[2], all NaN, the first at [0]"
    assert "iteration  1 (counted from 0)" in facts
    assert any(fact.split()[:3] == ["sqrt", "bad.py:6", "f32[]"] for fact in facts)
    assert max(map(len, found.out.splitlines())) <= 80


@pytest.mark.proof
def test_all_are_listed_with_those_that_reach_a_result_first(cli):
    found = cli(*LOSS, "-p", "grad", "--all")
    rows = [row.split() for row in found.out.splitlines() if "bad.py" in row]
    reach = ["no" not in row for row in rows]
    assert found.code == 1 and len(rows) > 1
    assert reach == sorted(reach, reverse=True) and reach[0]


def test_equal_rows_are_one_with_their_number(cli, bad):
    lines = (
        "import jax.numpy as jnp",
        "def f(x):",
        "    return sum(jnp.log(-1 - x * x) for _ in 'abc')",
    )
    (bad / "blocks.py").write_text("\n".join(lines))
    found = cli("nans", "blocks.py:f", "--args", "f32[4]", "--all")
    (row,) = (row for row in found.out.splitlines() if "blocks.py:3" in row)
    assert row.startswith("NaN (3 times)")


def test_json_has_the_first_and_all(cli):
    found = cli(*LOSS, "--json")
    document = json.loads(found.out)
    assert found.code == 1 and document["found"] and document["primitive"] == "div"
    assert (Place.from_json(document["place"]), document["iteration"]) == ("bad.py:6", [1])
    assert document["path"] == ["scan at bad.py:9"]
    assert document["operands"][1]["high"] == 0.0
    assert document["all"][0]["kind"] == "NaN"


def test_no_finding_is_reported_with_exit_code_0(cli):
    found = cli("nans", "jax.numpy:exp", "--args", "arange(4.)")
    assert (found.code, found.out) == (0, "exp: no equation makes a NaN or an infinity\n")
    assert not json.loads(cli("nans", "jax.numpy:exp", "--args", "arange(4.)", "--json").out)[
        "found"
    ]


def test_a_nan_constant_is_reported_with_the_result_it_reaches(cli):
    stats = "nans", "bad.py:stats", "--args", "arange(4.)"
    found = cli(*stats)
    assert found.code == 1
    assert found.out.startswith("stats: result[1] is NaN (a constant of the program)\n")
    assert "the program" in cli(*stats, "--all").out
    document = json.loads(cli(*stats, "--json").out)
    assert document["found"] and document["primitive"] == ""
    assert document["all"][0]["reaches"] == ["result[1]"]


def test_an_argument_with_a_nan_is_named(cli, bad):
    np.save(bad / "x.npy", np.array([1.0, np.nan], np.float32))
    found = cli("nans", "jax.numpy:sin", "--args", "load('x.npy')")
    assert found.code == 1
    assert found.out.startswith("sin: argument x contains a NaN, which reaches result\n")


def test_a_nan_is_reported_with_the_error_that_the_program_then_raised(cli):
    raising = "nans", "bad.py:raising", "--args", "arange(3.)"
    found = cli(*raising)
    assert found.code == 1 and found.err == ""
    heading, _, line, *_ = found.out.splitlines()
    assert heading == "raising: sqrt makes a NaN; the program then raised ValueError: no NaNs here"
    assert line == "bad.py:22  y = jnp.sqrt(x - 1.0)"
    table = cli(*raising, "--all").out.splitlines()
    assert table[-3].split() == ["NaN", "sqrt", "bad.py:22", "the", "error"]
    assert table[-1] == "the program then raised ValueError: no NaNs here"
    document = json.loads(cli(*raising, "--json").out)
    assert document["raised"] == "ValueError: no NaNs here" and document["primitive"] == "sqrt"
    assert "raised" not in json.loads(cli(*LOSS, "--json").out)


def test_an_error_without_a_nan_is_the_users(cli):
    found = cli("nans", "bad.py:raising", "--args", "arange(1., 4.)")
    assert (found.code, found.out) == (0, "raising: no equation makes a NaN or an infinity\n")
    found = cli("nans", "bad.py:raising", "--args", "c64[3]")
    assert found.code == 3 and "error: raising raised ValueError: no NaNs here" in found.err


def test_random_values_are_reported(cli):
    found = cli("nans", "jax.numpy:log", "--args", "f32[64]")
    assert found.code == 0 and "x filled with random values (--seed 0); x is positive" in found.err


def test_a_recorded_program_explains_how_to_keep_its_arguments(cli):
    def step(x):
        return jnp.exp(x)

    for keep in ({}, {"step": 1}):
        with record("run", overwrite=True, keep=keep):
            jax.jit(step)(np.float32(1000.0))
        message = cli("nans", "run/step").err
        assert ("`record --keep step` keeps the arguments" in message) == (not keep)


def test_mistakes_are_one_line_errors(cli):
    for arguments in (
        ("nans", "bad.py:nothing"),
        ("nans", "jax.numpy:sin", "--args", "arange(3.)", "--backend", "nowhere"),
        ("nans", "jax.numpy:sin", "--args", "arange(3.)", "-p", "vjp"),
    ):
        found = cli(*arguments)
        assert found.code == 2 and found.out == ""
        assert sum(line.startswith("error: ") for line in found.err.splitlines()) == 1


def test_an_operand_is_not_repeated_among_the_earlier_values(cli, folder):
    (folder / "root.py").write_text(ROOT)
    out = cli("nans", "root.py:f", "--args", "f32[4]").out
    assert out.count("sub root.py:5") == 1 and out.count("mul root.py:4") == 1


ROOT = """
import jax.numpy as jnp
def f(x):
    a = x * 0.0
    b = a - 1.0
    return jnp.sqrt(b)
"""
