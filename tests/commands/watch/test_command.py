"""`jaxprtool watch` shows the intermediate values of a function."""

import json
import sys
import textwrap

import numpy as np
import pytest

from jaxprtool.cli.completion import complete_checks
from jaxprtool.commands.run.checked import CHECKS
from jaxprtool.commands.watch.command import parsed_rounds

FUNCTIONS = """
    import jax
    import jax.numpy as jnp

    def loss(w, x):
        def layer(x, w):
            y = x * w
            return jnp.where(y > 0, jnp.log(y), 0.0), None

        x, _ = jax.lax.scan(layer, x, w)
        jax.debug.print("seen")
        return (x * 1e6).sum()

    def case():
        return loss, (jnp.arange(3.0) + 1.0, jnp.arange(4.0))
"""

LOSS = "watch", "model.py:case", "--factory"


@pytest.fixture(autouse=True)
def model(folder):
    (folder / "model.py").write_text(textwrap.dedent(FUNCTIONS))
    return folder


def test_lines_have_statistics_and_the_loss_of_narrow_formats(cli):
    found = cli(*LOSS)
    assert found.code == 0 and found.err == ""
    lines = found.out.splitlines()
    assert lines[0] == "loss: values by line"
    assert lines[1].split()[:4] == ["minimum", "maximum", "mean", "std"]
    assert lines[2] == "model.py:7  y = x * w"
    assert lines[3].split()[:2] == ["0", "3"] and "41.7% zero" in lines[3]
    assert any("infinite" in line for line in lines)
    assert any("f16 " in line for line in lines)
    assert max(map(len, lines)) <= 80


def test_chosen_iterations_have_their_own_rows(cli):
    found = cli(*LOSS, "--only", "mul", "--by", "equation", "--rounds", "0,-1")
    rows = [line.split() for line in found.out.splitlines() if line.startswith("  iteration")]
    assert [row[:4] for row in rows] == [
        ["iteration", "0", "0", "3"],
        ["iteration", "2", "0", "2.36"],
    ]


def test_values_are_saved_by_name(cli, model):
    found = cli(*LOSS, "--only", "mul", "--save", "values.npz")
    assert found.code == 0
    values = np.load(model / "values.npz")
    assert {name: values[name].shape for name in values} == {"mul": (4,), "y": (3, 4)}
    np.testing.assert_allclose(values["y"][0], np.arange(4.0))


def test_json_has_every_number(cli):
    document = json.loads(cli(*LOSS, "--by", "equation", "--only", "mul,log", "--json").out)
    named = {row["name"]: row for row in document["rows"]}
    assert document["by"] == "equation" and named["log"]["infs"] > 0
    assert named["y"]["path"] == ["scan at model.py:10"] and named["y"]["times"] == 3
    assert named["mul"]["lost"]["f16"]["overflow"] == 0.25
    assert sum(named["mul"]["exponents"].values()) == 2


@pytest.fixture
def without_ipython(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython.terminal", None)


def test_a_prompt_opens_after_a_line(cli, monkeypatch, without_ipython):
    typed = iter(["print('y is', y.tolist())", "exit()"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    found = cli(*LOSS, "--break", "7")
    assert found.code == 0 and "y is [0.0, 1.0, 2.0, 3.0]" in found.out
    assert "model.py:7, iteration 0" in found.err and "values by line" not in found.out


def test_the_end_of_the_input_continues_to_the_next_breakpoint(cli, monkeypatch, without_ipython):
    def ended(prompt):
        raise EOFError

    monkeypatch.setattr("builtins.input", ended)
    found = cli(*LOSS, "--break", "model.py:7", "--rounds", "0,-1")
    assert found.code == 0 and found.err.count("Ctrl-D continues") == 2
    assert "values by line" in found.out


def test_an_empty_selection_is_reported(cli):
    found = cli(*LOSS, "--only", "fft")
    assert (found.code, found.out) == (0, "loss: no selected value is computed\n")


def test_iterations_are_numbers_and_slices():
    assert parsed_rounds("0, 10,-1") == (0, 10, -1)
    assert parsed_rounds("::100,5:") == (slice(None, None, 100), slice(5, None))


def test_mistakes_are_one_line_errors(cli):
    for arguments, message in (
        (("--rounds", "first"), "is not a list of iterations such as 0,10,-1 or ::100"),
        (("--rounds", "::0"), "has a step of 0"),
        (("--by", "file"), "--by"),
        (("--break", "99"), "no equation"),
        (("--break", "nowhere.py:7"), "nowhere.py"),
        (("--save", "-"), "--save takes a file"),
        (("-p", "vjp"), "one program"),
        (("--backend", "nowhere"), "no backend"),
    ):
        found = cli(*LOSS, *arguments)
        assert found.code == 2 and found.out == "", arguments
        errors = [line for line in found.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and message in found.err.replace("\n", " "), (arguments, found.err)
    assert (
        "is not a line of it"
        in cli("watch", "jax.numpy:sin", "--args", "f32[3]", "--break", "3").err
    )


# --- run --check ------------------------------------------------------------------------------


def test_run_checks_intermediate_values(cli):
    found = cli("run", *LOSS[1:], "--check", "nan,inf,overflow-f16,overflow-bf16", "--repeat", "0")
    assert found.code == 1 and found.out.splitlines()[-1].startswith("first call")
    assert found.err.splitlines() == [
        "error: loss fails --check inf, overflow-f16",
        "  inf           model.py:8 log: iteration 0, 1 of 4 elements",
        "  overflow-f16  model.py:12 mul, reduce_sum: 2 of 5 elements",
        "hint: `jaxprtool nans` finds where a NaN comes from; `jaxprtool watch` shows all values",
    ]


def test_run_without_a_finding_exits_with_0_and_json_has_the_findings(cli):
    arguments = ("run", *LOSS[1:], "--json", "--check")
    fine = cli(*arguments, "nan,subnormal")
    assert fine.code == 0 and json.loads(fine.out)["found"] == [] and fine.err == "seen\n"
    wrong = cli(*arguments, "inf")
    (only,) = json.loads(wrong.out)["found"]
    assert wrong.code == 1 and (only["check"], only["name"]) == ("inf", "model.py:8")
    assert "found" not in json.loads(cli("run", *LOSS[1:], "--json").out)


def test_an_unknown_check_is_a_one_line_error(cli):
    found = cli("run", *LOSS[1:], "--check", "nan,overflow-f61")
    assert found.code == 2 and found.err.splitlines() == [
        "error: unknown check 'overflow-f61'",
        "hint: did you mean 'overflow-f16'?",
    ]


def test_every_check_is_completed():
    assert sorted(complete_checks("")) == sorted(CHECKS)
    assert complete_checks("nan,over")[0] == "nan,overflow-bf16"
