"""`jaxprtool bench` reports how long variants take, and whether their results differ."""

import json
import subprocess
import textwrap

import pytest

from jaxprtool.commands.bench import bench
from jaxprtool.commands.bench import command as render
from tests.external import needs
from tests.share import on_one_release

FUNCTIONS = """
    import jax, jax.numpy as jnp, jaxprtool

    @jaxprtool.example("f32[64]")
    def once(x):
        return jnp.sin(x)

    @jaxprtool.example("f32[64]")
    def twice(x):
        return jnp.sin(jnp.sin(x))

    @jaxprtool.example("f32[3]")
    def other(x):
        return x
"""


@pytest.fixture(autouse=True)
def parts(folder):
    (folder / "parts.py").write_text(textwrap.dedent(FUNCTIONS))
    return folder


def test_variants_are_rows_with_times_ratios_and_memory(cli):
    found = cli("bench", "parts.py:once", "parts.py:twice", "--repeat", "8")
    assert found.code == 0 and found.err == ""
    heading, _, titles, _, first, second, *_ = found.out.splitlines()
    assert heading.endswith("random values, seed 0; 8 rounds in turns")
    assert titles.split() == ["variant", "a", "call", "±", "ratio", "95%", "interval"]
    assert first.startswith("parts.py:once ") and second.startswith("parts.py:twice ")
    for column in ("trace", "compile", "first call", "temporary", "estimate"):
        assert column in found.out
    assert max(map(len, found.out.splitlines())) <= 80


@pytest.mark.parametrize(("others", "is_busy"), [(None, False), (0.0, False), (64.0, True)])
def test_a_busy_machine_is_named_below_the_intervals(cli, monkeypatch, others, is_busy):
    monkeypatch.setattr("jaxprtool.ir.process.OtherPrograms.cpus", lambda self: others)
    monkeypatch.setattr("os.cpu_count", lambda: 128)
    out = " ".join(cli("bench", "parts.py:once", "parts.py:twice", "--repeat", "7").out.split())
    assert "the intervals are of this run: another run may differ by more" in out
    note = "the machine was busy: other programs used 64.0 of 128 CPUs during the rounds"
    assert (note in out) == is_busy


def test_json_has_the_keys_that_scripts_read(cli):
    found = cli("bench", "parts.py:once", "-p", "", "-p", "dce", "--repeat", "7", "--json")
    document = json.loads(found.out)
    assert [each["name"] for each in document["variants"]] == ["as traced", "dce"]
    assert all(each["median_seconds"] > 0 for each in document["variants"])
    assert all(each["trace_seconds"] > 0 for each in document["variants"])
    assert document["ratios"][0].keys() >= {"of", "to", "ratio", "low", "high"}


def test_a_single_variant_is_named_by_its_passes(cli):
    found = cli("bench", "parts.py:once", "-p", "-O1", "--repeat", "7", "--json")
    (variant,) = json.loads(found.out)["variants"]
    assert variant["name"] == "-O1" and json.loads(found.out)["ratios"] == []


@on_one_release
@needs("git")
def test_a_git_revision_is_a_variant_traced_elsewhere(cli, folder):
    def git(*arguments):
        subprocess.run(["git", *arguments], check=True, capture_output=True)

    git("init", "-q")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    parts = folder / "parts.py"
    parts.write_text(parts.read_text().replace("jnp.sin(x)", "jnp.cos(x)"))
    found = cli("bench", "parts.py:once@HEAD", "parts.py:once", "--repeat", "7", "--json")
    there, here = json.loads(found.out)["variants"]
    assert (there["name"], here["name"]) == ("parts.py:once@HEAD", "parts.py:once")
    assert there["trace_seconds"] is None and here["trace_seconds"] > 0


def test_an_unreached_precision_is_reported(cli):
    found = cli("bench", "parts.py:once", "--repeat", "7", "--precision", "0.0001%")
    assert found.code == 0
    assert found.err.startswith("warning: the precision of 0.0001% was not reached in 7 rounds")


def test_effects_are_noted_if_requested(cli):
    found = cli("bench", "functions.py:prints", "--repeat", "7")
    assert found.code == 0 and found.out.count("the sum is") == 8
    assert "functions.py:prints has effects, which each of its calls repeats" in found.err


def test_a_variant_that_is_slower_than_its_baseline_is_exit_code_1(cli, folder):
    given = "bench", "parts.py:once", "--repeat", "8"
    assert cli(*given, "--save-baseline", "base.json").code == 0
    path, compared = folder / "base.json", ("--compare-baseline", "base.json")
    document = json.loads(path.read_text())
    for times, code in ((1e6, 0), (1e-6, 1)):
        (variant,) = document["variants"]
        seconds = [times * each for each in variant["seconds"]]
        document["variants"] = [{**variant, "seconds": seconds}]
        path.write_text(json.dumps(document))
        found = cli(*given, *compared, "--fail-over", "1.1")
        assert found.code == code and "compared with base.json" in found.out
        document["variants"] = [variant]
    assert found.err.startswith("error: once takes more than 1.1 times the time in base.json")
    assert cli(*given, *compared).code == 0


@pytest.mark.parametrize("seconds", [["a"] * 7, 5, None])
def test_a_baseline_without_times_is_refused(cli, folder, seconds):
    machine = {"processor": "", "devices": "", "jax": ""}
    variants = [{"name": "parts.py:once", "seconds": seconds}]
    document = {"machine": machine, "name": "once", "arguments": [], "variants": variants}
    (folder / "base.json").write_text(json.dumps(document))
    found = cli("bench", "parts.py:once", "--compare-baseline", "base.json")
    assert found.code == 2 and "'base.json' is not a baseline of bench" in found.err


def test_a_baseline_of_another_release_is_a_warning(cli, folder):
    given = "bench", "parts.py:once", "--repeat", "7"
    cli(*given, "--save-baseline", "base.json")
    path = folder / "base.json"
    document = json.loads(path.read_text())
    document["machine"]["jax"] = "0.9.0"
    path.write_text(json.dumps(document))
    found = cli(*given, "--compare-baseline", "base.json", "--json")
    assert found.code == 0 and "base.json: the release of JAX was 0.9.0, and is" in found.err
    assert json.loads(found.out)["baseline"]["mismatches"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("parts.py:nothing",), "'parts.py' has no attribute 'nothing'"),
        (("parts.py:other",), "parts.py:other cannot be compared, because it takes different"),
        (("--precision", "2"), "'2' is not a percentage such as 2%"),
        (("--precision", "0%"), "'0%' is not a percentage such as 2%"),
        (("--repeat", "6"), "6 is not in the range x>=7"),
        (("--fail-over", "1.1"), "--fail-over needs --compare-baseline"),
        (("--compare-baseline", "none.json"), "cannot read 'none.json'"),
        (("--compare-baseline", "parts.py"), "'parts.py' is not a baseline"),
        (("--save-baseline", "-"), "--save-baseline takes a file"),
        (("--args", "f32[n]"), "n needs a number"),
        (("--backend", "abacus"), "no backend 'abacus'"),
        (("functions.py:callback", "--isolate"), "cannot be written to a file"),
    ],
)
def test_bad_input_is_a_one_line_error_with_exit_code_2(cli, arguments, message):
    target = () if arguments[0] == "functions.py:callback" else ("parts.py:once",)
    found = cli("bench", *target, *arguments)
    errors = [line for line in found.lines if line.startswith("error: ")]
    assert found.code == 2 and len(errors) == 1 and message in errors[0]


@pytest.mark.parametrize(
    ("ratio", "low", "high", "message"),
    [
        (0.5, 0.4, 0.6, "2.00 times faster"),
        (0.5, 0.4, 1.1, "no difference seen"),
        (1.0, 1.0, 1.0, "no difference seen"),
        (1.005, 1.001, 1.01, "1.005 times slower"),
        (25.0, 20.0, 30.0, "25.0 times slower"),
    ],
)
def test_a_ratio_is_described_in_words(ratio, low, high, message):
    assert render.ratio_verdict(bench.Ratio("a", "b", ratio, low, high)) == message
