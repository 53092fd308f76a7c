"""`jaxprtool lint` prints findings by line, and exits with 1 if there are any."""

import json
import runpy
import shutil
import textwrap

import pytest

import jaxprtool
from jaxprtool.ir.source_text import Place
from jaxprtool.render.documents import SCHEMA
from tests.share import on_one_release

FUNCTIONS = """
    import jax
    import jax.numpy as jnp
    import numpy as np

    TABLE = np.ones((1024, 512), np.float32)

    def bad(x, unused):
        scores = jnp.exp(x @ TABLE)
        weights = scores / scores.sum(-1, keepdims=True)
        best = jnp.sort(weights)[:, -5:]
        return best.sum() + jnp.sort(scores)[:, 0].sum()

    def good(x):
        return jnp.tanh(x).sum()

    # jaxprtool: ignore[JT101]
    def silenced(x, unused):  # jaxprtool: ignore[JT1, JT3]
        scores = jnp.exp(x @ TABLE)  # jaxprtool: ignore
        # jaxprtool: ignore[JT403]
        best = jnp.sort(scores / scores.sum(-1, keepdims=True))[:, -5:]
        return best.sum()

    def other_code(x):
        return jnp.sort(x)[:, :5]  # jaxprtool: ignore[JT401]
"""

ARGS = "--args", "f32[8,1024], f32[64,64]"


@pytest.fixture(autouse=True)
def linted(folder):
    (folder / "linted.py").write_text(textwrap.dedent(FUNCTIONS).lstrip())


@pytest.fixture
def run(cli):
    def run(*arguments, code=0):
        found = cli("lint", *arguments)
        assert found.code == code, found.err
        return found

    return run


def test_findings_are_by_line_worst_first(run):
    found = run("linted.py:bad", *ARGS, code=1)
    lines = found.out.splitlines()
    heads = [line.split()[:2] for line in lines if not line.startswith(" ")]
    assert heads == [
        ["linted.py:8:", "JT701"],
        ["linted.py:8:", "JT101"],
        ["linted.py:7:", "JT301"],
        ["linted.py:10:", "JT403"],
        ["linted.py:11:", "JT403"],
        ["5", "findings"],
    ]
    assert (
        lines[3]
        == "linted.py:8: JT101 'TABLE' is a constant of the program, f32[1024,512] of 2.0 MiB"
    )
    assert lines[4] == "    costs 2.0 MiB in every executable that is compiled from it"
    assert lines[5] == "    hint: pass it as an argument, or compute it inside the function"


def test_no_findings_are_reported_with_exit_code_0(run):
    assert run("linted.py:good", "--args", "f32[8]").out == "nothing found in good\n"
    document = json.loads(run("linted.py:good", "--args", "f32[8]", "--json").out)
    assert document == {"schema": SCHEMA, "name": "good", "findings": [], "programs": 1}


def test_the_document_has_code_line_message_and_cost(run):
    document = json.loads(run("linted.py:bad", *ARGS, "--json", "--select", "JT1", code=1).out)
    (finding,) = document["findings"]
    assert finding["code"] == "JT101" and Place.from_json(finding["place"]) == "linted.py:8"
    assert finding["cost"]["bytes"] == 2 * 2**20 and finding["cost"]["flops"] == 0
    assert "'TABLE'" in finding["message"] and finding["kind"] == "waste"


def test_codes_are_selected_and_ignored_by_prefix(run):
    def codes(*options):
        found = json.loads(run("linted.py:bad", *ARGS, "--json", *options, code=1).out)
        return {each["code"] for each in found["findings"]}

    assert codes("--select", "JT1,JT403") == {"JT101", "JT403"}
    assert codes("--ignore", "JT1,JT403") == {"JT301", "JT701"}
    assert codes("--select", "JT4,JT7", "--ignore", "JT403") == {"JT701"}
    wrong = run("linted.py:bad", *ARGS, "--select", "JT0", code=2)
    assert wrong.err.startswith("error: no lint rule has the code 'JT0'\nhint: ")


def test_comments_silence_a_line_the_line_below_and_a_function(run):
    found = run("linted.py:silenced", *ARGS)
    assert found.out == "nothing found in silenced; 4 silenced\n"
    other = run("linted.py:other_code", "--args", "f32[8,1024]", code=1)
    assert other.out.startswith("linted.py:24: JT403 ")


def test_top_shows_only_the_worst_findings(run):
    found = run("linted.py:bad", *ARGS, "--top", "1", code=1).out.splitlines()
    assert found[0].split()[1] == "JT701" and found[-2:] == ["… 4 more: --all", "5 findings"]


def test_passes_run_first(run):
    found = run("linted.py:bad", *ARGS, "-p", "grad", "--select", "JT101", code=1)
    assert "JT101" in found.out
    several = run("linted.py:bad", *ARGS, "-p", "nonsense", code=2)
    assert several.err.startswith("error: unknown pass 'nonsense'")


RECORDED = """
    import jax, jax.numpy as jnp

    def best(x, unused):
        weights = jnp.exp(x)
        weights = weights / weights.sum(-1, keepdims=True)
        return jnp.sort(weights)[:, -5:]

    @jax.jit
    def doubled(x):
        return 2 * jnp.sort(x)[:5]  # jaxprtool: ignore[JT403]

    for size in (256, 1024, 512):
        jax.jit(best)(jnp.ones((8, size)), jnp.ones((2, size)))
    doubled(jnp.ones(64)), doubled(jnp.ones(128))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return the folder of the script, with its run."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "script.py").write_text(textwrap.dedent(RECORDED))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with jaxprtool.record("run"):
            runpy.run_path("script.py")
    return folder


@pytest.fixture
def recorded(folder, place, monkeypatch):
    """Return the run of the recorded script, in whose folder the test runs."""
    monkeypatch.chdir(place)
    return "run"


@pytest.mark.proof
def test_a_line_is_reported_once_in_all_programs_of_a_run_where_it_costs_most(run, recorded):
    found = run(f"{recorded}/", code=1).out.splitlines()
    assert [line for line in found if not line.startswith(" ")] == [
        "script.py:5: JT701 the exponentials of a softmax or logsumexp overflow: no maximum is "
        "subtracted",
        "script.py:4: JT301 no result depends on unused (f32[2,1024])",
        "script.py:7: JT403 1,024 elements are sorted, but at most 5 of them are read",
        "3 findings in 5 programs; 1 silenced",
    ]
    assert found.count("    in best, best@2, best@3") == 3
    document = json.loads(run("run", "--json", "--select", "JT403", code=1).out)
    (finding,) = document["findings"]
    assert document["programs"] == 5 and finding["programs"] == ["best", "best@2", "best@3"]
    assert finding["cost"]["flops"] == 8 * 1024 * 10
    alone = json.loads(run("run/best", "--json", "--select", "JT403", code=1).out)
    assert run("run/best", "--select", "JT3", code=1).out.startswith("script.py:4: JT301 ")
    assert alone["programs"] == 1 and alone["findings"][0]["programs"] == ["best"]


def test_a_run_or_its_program_has_the_advice_of_record_for_a_function_of_many_sizes(
    run, cli, recorded
):
    advice = (
        "note: script.py:14: best was compiled 3 times: jaxprtool.jit(best, "
        'types="x=f32[8,n], unused=f32[2,n]", shapes={"n": (256, 512, 1024)}) pads and compiles '
        "once per size\n"
    )
    assert advice in run(recorded, "--select", "JT403", code=1).err
    assert cli("outline", f"{recorded}/best@2").err == advice
    assert cli("outline", f"{recorded}/doubled").err != advice


@on_one_release
def test_a_run_without_readable_programs_is_an_error(run, cli, folder):
    (folder / "script.py").write_text("import jax.numpy as jnp; jnp.ones(8) + 1")
    assert cli("record", "-o", "run", "script.py").code == 0
    empty = run("run", code=2)
    assert empty.err == "error: 'run' is a recorded run without programs: nothing was compiled\n"


def test_unreadable_programs_are_noted_and_the_others_linted(run, recorded, folder):
    shutil.copytree(recorded, folder / "run")
    (folder / "run/process-0/best@2.jaxpr").write_text("nothing")
    found = run(f"{folder}/run", "--select", "JT403", code=1)
    assert "1,0" not in found.out and "in best, best@3" in found.out
    assert found.err.startswith("note: 1 program cannot be read: best@2: ")


def test_passes_and_arguments_need_one_program_of_a_run(run, recorded):
    for option in (("-p", "dce"), ("--args", "f32[8]"), ("--mesh", "x=2")):
        wrong = run("run", *option, code=2)
        assert wrong.err == (
            f"error: {option[0]} does not apply to a recorded run of programs\n"
            "hint: give the name of one program: run/NAME\n"
        )


def test_programs_by_name_are_linted_together(recorded):
    from jaxprtool.commands.record.record import Recording

    found = jaxprtool.lint(Recording(recorded).programs, select="JT4")
    assert [each.programs for each in found] == [("best", "best@2", "best@3")]
    assert found.name == "5 programs" and found.silenced == 1


def test_codes_of_pyproject_apply_without_options(run, cli, folder):
    (folder / "pyproject.toml").write_text('[tool.jaxprtool.lint]\nselect = ["JT7", "JT3"]\n')
    found = json.loads(run("linted.py:bad", *ARGS, "--json", code=1).out)["findings"]
    assert {each["code"][:3] for each in found} == {"JT7", "JT3"}
    found = json.loads(run("linted.py:bad", *ARGS, "--select", "JT1", "--json", code=1).out)
    assert {each["code"] for each in found["findings"]} == {"JT101"}
    (folder / "pyproject.toml").write_text('[tool.jaxprtool.lint]\nselct = ["JT7"]\n')
    assert cli("lint", "linted.py:good", "--args", "f32[3]").lines == [
        "error: pyproject.toml: tool.jaxprtool.lint.selct: unknown key; did you mean 'select'?"
    ]
