"""`jaxprtool memory` shows the peak, a curve, and the live values at the peak."""

import json
import re
import textwrap

import pytest

from jaxprtool.jaxcompat.lowering import read_pprof

FUNCTIONS = """
    import jax
    import jax.numpy as jnp

    def loss(params, x):
        for w in params:
            x = jnp.sin(x @ w)
        return jnp.sort(x, axis=0)[0].sum()

    def square(x):
        return x @ x
"""

LOSS = "memory", "filled.py:loss", "--args", "[f32[64,64], f32[64,64], f32[64,64]], f32[128,64]"


@pytest.fixture(autouse=True)
def filled(folder):
    (folder / "filled.py").write_text(textwrap.dedent(FUNCTIONS))
    return folder


def test_a_page_has_the_peak_a_curve_and_live_values(cli):
    found = cli(*LOSS, "-p", "grad(argnums=0)")
    heading, totals, *_ = found.out.splitlines()
    assert found.code == 0 and re.match(r"loss: \d+\.\d KiB, peak at filled.py:\d \S+$", heading)
    assert totals.startswith("arguments 80.0 KiB, results 48.0 KiB, temporaries")
    assert "3 x f32[64,64]" in found.out and "params[0..2]" in found.out
    assert re.search(r"filled.py:\d \S+\n +until \w+", found.out)
    assert "⣿⣿⣿" in found.out and "peak\n" in found.out
    assert max(map(len, found.out.splitlines())) <= 80
    assert re.search(r"… \d+ more", cli(*LOSS, "--top", "1").out)


def test_json_has_the_contents_of_the_page(cli):
    found = json.loads(cli(*LOSS, "--json").out)
    assert found["peak_bytes"] == sum(live["bytes"] for live in found["live"])
    assert found["at"].keys() == {"position", "bytes", "primitive", "place"}
    assert found["at"]["bytes"] == found["peak_bytes"]
    (program,) = found["programs"]
    assert program["name"] == "loss" and program["argument_bytes"] == 80 * 1024
    assert max(point["bytes"] for point in program["curve"]) == found["peak_bytes"]


def test_a_profile_has_the_live_values_at_the_peak_by_calls(cli, filled):
    assert cli(*LOSS, "--pprof", "memory.pb.gz").code == 0
    profile = json.loads(read_pprof((filled / "memory.pb.gz").read_bytes()))
    strings = profile["stringTable"]
    told = json.loads(cli(*LOSS, "--json").out)
    assert sum(int(row["value"][0]) for row in profile["sample"]) == told["peak_bytes"]
    assert {"params[0..2] f32[64,64]", "sin f32[128,64]", "loss"} <= set(strings)
    several = cli(*LOSS, "-p", "vjp", "--pprof", "memory.pb.gz")
    assert several.code == 2 and several.err.startswith("error: --pprof takes one program")


def test_several_programs_have_a_page_each(cli):
    found = cli(*LOSS, "-p", "vjp")
    assert "loss_forward: " in found.out and "\n\nloss_backward: " in found.out
    assert len(json.loads(cli(*LOSS, "-p", "vjp", "--json").out)["programs"]) == 2


@pytest.mark.parametrize("end, start", [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_the_curve_can_be_a_picture(cli, filled, end, start):
    found = cli(*LOSS, "-o", f"curve.{end}")
    assert found.code == 0 and found.out.startswith("loss: ")
    assert (filled / f"curve.{end}").read_bytes().startswith(start)


def test_a_program_file_without_sources_has_primitives(cli, filled):
    assert cli("opt", "filled.py:square", "--args", "f32[64,64]", "-o", "bare.jaxpr").code == 0
    file = filled / "bare.jaxpr"
    file.write_text(re.sub(r"\s*#.*|sources = .*", "", file.read_text()))
    found = cli("memory", "bare.jaxpr")
    assert found.code == 0 and "filled.py" not in found.out
    assert found.out.splitlines()[1] == "arguments 16.0 KiB, results 16.0 KiB"


def test_mistakes_are_one_line_errors(cli, monkeypatch):
    found = cli("memory", "filled.py:square", "--args", "f32[n,n]")
    assert (found.code, found.out) == (2, "")
    assert found.err.startswith("error: the memory of square needs sizes that are numbers\nhint: ")
    found = cli(*LOSS, "-o", "curve.gif")
    assert found.code == 2 and found.err.startswith("error: cannot draw 'curve.gif'")
    found = cli(*LOSS, "-p", "vjp", "-o", "curve.svg")
    assert found.code == 2 and found.err.startswith("error: -o takes one program")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    found = cli(*LOSS, "-o", "curve.svg")
    assert found.code == 2 and "pip install matplotlib" in found.err
    assert cli(*LOSS, "--top", "0").code == 2


@pytest.mark.parametrize("command", ["memory", "show", "run"])
def test_unusable_donated_arguments_are_named_with_the_reason(cli, folder, command):
    text = """
        import jax
        import jax.numpy as jnp
        from functools import partial

        @partial(jax.jit, donate_argnames="state")
        def step(state, x):
            return {"m": (state["m"] + x).astype(jnp.bfloat16)}
    """
    (folder / "step.py").write_text(textwrap.dedent(text))
    told = cli(command, "step.py:step", "--args", "{'m': f32[8]}, f32[8]")
    assert told.code == 0 and (
        "note: step cannot use the donated state['m'], f32[8]: no result has this type; "
        "result['m'] is bf16[8]"
    ) in " ".join(told.err.split())
