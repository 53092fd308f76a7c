"""`jaxprtool check` compares targets with the budgets of pyproject.toml, and updates them."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from jaxprtool.ir.source_text import Place

MODEL = """
    from functools import partial

    import jax
    import jax.numpy as jnp
    import numpy as np

    PARAMS = {"w": jnp.ones((64, 64)), "out": jnp.ones((64, 8))}

    def loss(params, batch):
        hidden = jnp.sin(batch @ params["w"])
        return ((hidden @ params["out"]) ** 2).mean()

    @partial(jax.jit, donate_argnums=0)
    def step(params, batch):
        slopes = jax.grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, slopes)

    def train():
        params = jax.tree.map(jnp.copy, PARAMS)
        for size in (16, 16, 8):
            params = step(params, jnp.ones((size, 64)))

    def made(scale):
        return lambda x: x * scale, (np.ones(4, np.float32),)

    def boom(x):
        raise ValueError("no")

    def widens(x):
        return x.astype("float64") * 2

    def twice(x):
        return jnp.exp(x) + jnp.exp(x)

    def softmax(x):
        scores = jnp.exp(x)
        return scores / scores.sum(-1, keepdims=True)
"""

STEP = """
    [tool.jaxprtool.targets.step]
    target = "model.py:step"
    args = "{'w': f32[64,64], 'out': f32[64,8]}, f32[16,64]"
"""


@pytest.fixture
def project(folder):
    """Write the project's table in the current folder."""
    (folder / "model.py").write_text(textwrap.dedent(MODEL))

    def write(text, path="pyproject.toml"):
        (folder / path).write_text(textwrap.dedent(text).lstrip())
        return folder / path

    return write


@pytest.fixture
def check(cli):
    def run(*arguments, code=0):
        found = cli("check", *arguments)
        assert found.code == code, found.err + found.out
        return found

    return run


def documents(check, *arguments, code=0):
    """Return the checked targets by name."""
    document = json.loads(check("--json", *arguments, code=code).out)
    return {each["name"]: each for each in document["targets"]}


# --- budgets ------------------------------------------------------------------------------------


def test_a_target_within_its_budgets_passes(project, check):
    project(STEP + 'flops = "323 kFLOP"\n    equations = 30\n')
    assert check().out.splitlines()[2:] == [
        "step  flops      323.0 kFLOP   322.0 kFLOP   99.7%",
        "step  equations  30 equations  21 equations  70.0%",
        "",
        "1 target passed",
    ]


def test_the_document_has_budgets_and_measured_values(project, check):
    project(STEP + 'flops = "300 kFLOP"\n    peak-bytes = "1MiB"\n')
    (step,) = json.loads(check("--json", code=1).out)["targets"]
    assert step["budget"] == {"flops": 300_000, "peak_bytes": 1 << 20}
    assert step["measured"] == {"flops": 322_049, "peak_bytes": 43_008}
    assert step["passed"] is False
    (problem,) = step["problems"]
    assert (problem["code"], Place.from_json(problem["place"])) == ("flops", "model.py:11")
    assert problem["message"] == (
        "step takes 322.0 kFLOP, but the budget is 300.0 kFLOP, 7.3% more"
    )
    assert problem["details"][1] == "  model.py:11  263.2 kFLOP  81.7%"


def test_the_worst_is_first_and_unknown_lines_are_left_out(project, check):
    project(
        """
        [tool.jaxprtool.targets.fine]
        target = "model.py:softmax"
        args = "f32[8]"
        equations = 6

        [tool.jaxprtool.targets.worse]
        target = "model.py:softmax"
        args = "f32[8]"
        equations = 1

        [tool.jaxprtool.targets.bad]
        target = "model.py:softmax"
        args = "f32[8]"
        equations = 3
        """
    )
    rows = [line.split() for line in check(code=1).out.splitlines()[2:5]]
    assert [(row[0], row[-1]) for row in rows] == [
        ("worse", "400.0%"),
        ("bad", "133.3%"),
        ("fine", "66.7%"),
    ]


def test_only_named_targets_are_checked(project, check):
    project(
        STEP + 'flops = 1\n    [tool.jaxprtool.targets.other]\n    target = "model.py:softmax"\n'
        '    args = "f32[8]"\n'
    )
    assert check("other").out == "1 target passed\n"
    assert check("nope", code=2).err.splitlines() == [
        "error: pyproject.toml has no target 'nope'",
        "hint: the targets are step, other",
    ]


def test_a_target_that_fails_to_trace_is_a_problem_and_the_others_are_checked(project, check):
    project(
        """
        [tool.jaxprtool.targets.boom]
        target = "model.py:boom"
        args = "f32[]"

        [tool.jaxprtool.targets.gone]
        target = "modle.py:boom"

        [tool.jaxprtool.targets.types]
        target = "model.py:softmax"
        args = "f32["

        [tool.jaxprtool.targets.fine]
        target = "model.py:softmax"
        args = "f32[8]"
        """
    )
    found = documents(check, code=1)
    assert found["fine"]["passed"] and not found["fine"]["problems"]
    (boom,), (gone,), (types,) = (found[name]["problems"] for name in ("boom", "gone", "types"))
    line = MODEL.splitlines().index('        raise ValueError("no")') + 1
    assert Place.from_json(boom["place"]) == f"model.py:{line}"
    assert boom["message"] == f"boom: model.py:{line}: boom raised ValueError: no"
    assert gone["message"] == "gone: no file 'modle.py'"
    assert gone["details"] == ["hint: did you mean 'model.py'?"]
    assert types["code"] == "error"
    assert check(code=1).out.splitlines()[-1] == "3 of 4 targets failed"


def test_compilations_are_counted_by_calls_as_in_a_new_process(project, check):
    project(
        """
        [tool.jaxprtool.targets.train]
        target = "model.py:train"
        compiles = 1

        [tool.jaxprtool.targets.again]
        target = "model.py:train"
        compiles = 2

        [tool.jaxprtool.targets.types]
        target = "model.py:softmax"
        args = "f32[8]"
        compiles = 1
        """
    )
    found = documents(check, code=1)
    assert [found[name]["measured"] for name in ("train", "again")] == [{"compiles": 2}] * 2
    assert [found[name]["passed"] for name in ("train", "again", "types")] == [False, True, False]
    assert "batch: f32[16,64] → f32[8,64]" in "\n".join(found["train"]["problems"][0]["details"])
    (types,) = found["types"]["problems"]
    assert types["message"] == "types: softmax is called, so its arguments must be values"


def test_targets_are_loaded_with_the_options_of_the_command_line(project, check):
    project(
        """
        [tool.jaxprtool.targets]
        made = { target = "model.py:made(2.0)", equations = 1 }
        factory = { target = "model.py:made", factory = true, equations = 1 }
        grad = { target = "jax.numpy:sin", args = "f32[]", passes = "grad, dce", no = ["sin"] }
        level = { target = "model.py:twice", args = "f32[8]", passes = "-O2", equations = 2 }
        wide = { target = "model.py:widens", args = "f32[8]", x64 = true, no = ["f64"] }
        narrow = { target = "model.py:widens", args = "f32[8]", no = ["f64"] }
        static = { target = "jax.numpy:cumsum", args = "f32[4], 0", static-argnums = [1] }
        sharded = { target = "jax.numpy:sin", args = "f32[8@x]", mesh = { x = 2 }, equations = 1 }
        """
    )
    found = documents(check, code=1)
    failed = {name for name, each in found.items() if not each["passed"]}
    # `factory` lacks the argument of its factory. 64-bit types are enabled where configured.
    assert failed == {"factory", "wide"}
    assert found["level"]["measured"]["equations"] == 2  # the same exponential, once
    assert found["wide"]["problems"][0]["message"] == "wide has 2 values of dtype f64:"


def test_a_module_that_enables_64_bit_types_affects_only_its_own_targets(project, check, folder):
    (folder / "wide.py").write_text(
        "import jax\njax.config.update('jax_enable_x64', True)\ndef f(x): return x.astype('f8')\n"
    )
    project(
        """
        [tool.jaxprtool.targets]
        wide = { target = "wide.py:f", args = "f32[8]", no = ["f64"] }
        narrow = { target = "model.py:widens", args = "f32[8]", no = ["f64"] }
        again = { target = "wide.py:f", args = "f32[4]", no = ["f64"] }
        """
    )
    found = documents(check, code=1)
    assert {name: each["passed"] for name, each in found.items()} == {
        "wide": False,
        "narrow": True,
        "again": False,
    }


def test_contents_donation_and_lint_are_checked(project, check):
    project(
        STEP
        + 'no = ["sort", "sin"]\n    donated = true\n'
        + """
    [tool.jaxprtool.targets.loss]
    target = "model.py:loss"
    args = "{'w': f32[64,64], 'out': f32[64,8]}, f32[16,64]"
    donated = true

    [tool.jaxprtool.targets.softmax]
    target = "model.py:softmax"
    args = "f32[8]"
    lint = true

    [tool.jaxprtool.targets.ignored]
    target = "model.py:softmax"
    args = "f32[8]"
    lint = true
    select = ["JT1"]

    [tool.jaxprtool.targets.quiet]
    target = "model.py:softmax"
    args = "f32[8]"
    lint = true
    ignore = ["JT7"]
    """
    )
    found = documents(check, code=1)
    messages = {name: [p["message"] for p in each["problems"]] for name, each in found.items()}
    assert messages["step"] == ["step has 1 sin equation:"]
    assert messages["loss"] == [
        "loss donates no argument: jax.jit takes donate_argnums or donate_argnames"
    ]
    assert [each["code"] for each in found["softmax"]["problems"]] == ["JT701"]
    assert messages["softmax"][0].startswith("softmax: model.py:37: JT701 the exponentials")
    assert messages["ignored"] == messages["quiet"] == []


def test_codes_of_the_lint_table_apply_to_all_targets(project, check):
    project(
        """
        [tool.jaxprtool.lint]
        ignore = ["JT701"]

        [tool.jaxprtool.targets]
        softmax = { target = "model.py:softmax", args = "f32[8]", lint = true }
        own = { target = "model.py:softmax", args = "f32[8]", lint = true, ignore = ["JT1"] }
        """
    )
    found = documents(check, code=1)
    assert found["softmax"]["passed"] and not found["own"]["passed"]


# --- snapshots ----------------------------------------------------------------------------------


def test_a_snapshot_is_written_and_then_compared(project, check, folder):
    project(STEP + "snapshot = true\n    flops = 0\n")
    assert "step has no snapshot __jaxprs__/step.jaxpr" in check(code=1).out
    out = check("--update").out
    assert "step: flops = 0 → 322049" in out and "step: wrote __jaxprs__/step.jaxpr" in out
    assert check().out.endswith("1 target passed\n")
    text = (folder / "model.py").read_text().replace("p - 0.1 * g", "p - 0.1 * g @ (g.T @ g)")
    (folder / "changed.py").write_text(text)
    path = folder / "pyproject.toml"
    path.write_text(path.read_text().replace("model.py", "changed.py"))
    found = check(code=1).out
    assert "FLOPs grew since the snapshot __jaxprs__/step.jaxpr" in found
    assert "step differs from the snapshot __jaxprs__/step.jaxpr" in found
    assert "dot_general" in found and "hint: `jaxprtool check --update` writes the program" in found
    assert max(map(len, found.splitlines())) <= 80


def test_two_targets_cannot_share_a_snapshot(project, check):
    project(
        STEP
        + 'snapshot = "a.jaxpr"\n    [tool.jaxprtool.targets.other]\n    snapshot = "a.jaxpr"\n'
        '    target = "model.py:softmax"\n'
    )
    assert check(code=2).err == (
        "error: pyproject.toml: tool.jaxprtool.targets.other.snapshot: a.jaxpr is the snapshot of "
        "'step' too\n"
    )


# --- updating -----------------------------------------------------------------------------------


def test_updating_keeps_comments_units_and_layout(project, check):
    text = """
        # Ours.
        [project]
        name   =   "x"

        [tool.jaxprtool.targets.step]
        target = "model.py:step"   # the step
        args = "{'w': f32[64,64], 'out': f32[64,8]}, f32[16,64]"
        flops = "3 MFLOP"   # measured in May
        peak-bytes = '1KiB'
        equations = 100 # too many

        [tool.other]
        a = [1,
             2]
    """
    path = project(text)
    out = check("--update").out
    expected = textwrap.dedent(text).lstrip()
    expected = expected.replace('"3 MFLOP"', '"323 kFLOP"').replace("100 #", "21 #")
    assert path.read_text() == expected.replace("'1KiB'", '"42KiB"')
    assert out.splitlines()[-5:] == [
        'step: flops = "3 MFLOP" → "323 kFLOP"',
        'step: peak-bytes = "1KiB" → "42KiB"',
        "step: equations = 100 → 21",
        "",
        "1 target passed; 3 values updated",
    ]
    before = path.read_bytes(), path.stat().st_mtime_ns
    assert check("--update").out.endswith("1 target passed; 0 values updated\n")
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert check().code == 0


def test_the_document_lists_the_updates_too(project, check):
    project(STEP + "flops = 1\n")
    document = json.loads(check("--update", "--json").out)
    change = {"name": "step", "key": "flops", "before": "1", "after": "322049"}
    assert document["updated"] == [change]
    assert document["targets"][0]["budget"] == {"flops": 322_049}


def test_what_cannot_be_updated_still_fails_and_the_rest_is_written(project, check):
    path = project(
        STEP + 'flops = 1\n    no = ["sin"]\n    [tool.jaxprtool.targets.boom]\n'
        '    target = "model.py:boom"\n    args = "f32[]"\n    flops = 1\n'
    )
    assert check("--update", code=1).out.endswith("2 of 2 targets failed; 1 value updated\n")
    assert "flops = 322049" in path.read_text() and path.read_text().count("flops = 1\n") == 1


def test_an_unwritable_file_is_unchanged(project, check, monkeypatch):
    path = project(STEP + "flops = 1\n")
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxprtool.files.os.replace", full)
    error = check("--update", code=2).err
    assert error == f"error: cannot write '{path}': No space left on device\n"
    assert path.read_bytes() == before
    assert {each.name for each in path.parent.iterdir() if each.is_file()} == {
        "functions.py",
        "model.py",
        "pyproject.toml",
    }


# --- files and mistakes -------------------------------------------------------------------------


def test_the_nearest_table_in_a_parent_folder_is_used_with_paths_relative_to_it(
    project, check, folder, monkeypatch
):
    project(STEP + "snapshot = true\n")
    check("--update")
    below = folder / "src" / "deep"
    below.mkdir(parents=True)
    (folder / "src" / "pyproject.toml").write_text("[tool.ruff]\n")
    monkeypatch.chdir(below)
    assert check().out == "1 target passed\n"
    assert os.getcwd() == str(below)
    monkeypatch.chdir("/")
    assert check("--config", str(folder / "pyproject.toml")).out == "1 target passed\n"


MISTAKES = {
    "flps = 3": "targets.step.flps: unknown key; did you mean 'flops'?",
    "peak_bytes = 3": "targets.step.peak_bytes: unknown key; did you mean 'peak-bytes'?",
    'flops = "3 GB"': "targets.step.flops: '3 GB' is not a number of FLOPs such as 3 GFLOP, 500M",
    "equations = -1": "targets.step.equations: -1 is not a budget of equations; write a number",
    "equations = nan": "targets.step.equations: nan is not a budget of equations",
    'no = "sort"': "targets.step.no: write a list of strings",
    'no = ["srot"]': "targets.step.no: JAX has no primitive or dtype 'srot'; did you mean 's",
    "donated = 1": "targets.step.donated: write true or false",
    "x64 = 1": "targets.step.x64: write true or false",
    'snapshot = "a.txt"': "targets.step.snapshot: write true, or the name of a file",
    'passes = "dcee"': "targets.step.passes: unknown pass 'dcee'; did you mean 'dce'?",
    'static-argnums = "x"': "targets.step.static-argnums: 'x' is not a list of numbers such as 1,2",
    "args = true": "targets.step.args: write what --args takes, as a string",
    'select = ["JT1"]': "targets.step.select: needs lint = true",
    'lint = true\nselect = ["XX"]': "targets.step.select: no lint rule has the code 'XX'",
    'compiles = 1\npasses = "dce"': "targets.step.compiles: cannot be combined with passes",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_with_the_file_and_the_key(project, check, line):
    project('[tool.jaxprtool.targets.step]\ntarget = "model.py:step"\n' + line)
    (error,) = check(code=2).err.splitlines()
    assert error.startswith(f"error: pyproject.toml: tool.jaxprtool.{MISTAKES[line]}")


def test_each_of_several_mistakes_is_a_line(project, check):
    project(
        """
        [tool.jaxprtool]
        target = 1
        [tool.jaxprtool.targets]
        a = 3
        b = { flops = "x" }
        """
    )
    assert check(code=2).err.splitlines() == [
        "error: pyproject.toml has 4 mistakes",
        "  tool.jaxprtool.target            unknown key; did you mean 'targets'?",
        "  tool.jaxprtool.targets.a         write a table",
        '  tool.jaxprtool.targets.b.target  write a function, "train.py:step", or a program, '
        '"step.jaxpr"',
        "  tool.jaxprtool.targets.b.flops   'x' is not a number of FLOPs such as 3 GFLOP, 500M or "
        "2e9",
    ]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[tool.jaxprtool", "pyproject.toml is not valid TOML: Expected ']' at the end of a table"),
        ("[tool.jaxprtool]\n", "pyproject.toml: tool.jaxprtool.targets: there is no target"),
        ("[tool]\njaxprtool = 3\n", "pyproject.toml: tool.jaxprtool: write a table"),
        ("[tool.ruff]\n", "no pyproject.toml here or above has a table [tool.jaxprtool]"),
    ],
)
def test_a_file_without_a_readable_table_is_one_error(project, check, text, error):
    project(text)
    assert check(code=2).err.splitlines()[0].startswith(f"error: {error}")


def test_unreadable_files_are_one_error(project, check, folder):
    assert check("--config", "no.toml", code=2).err.startswith("error: cannot read '")
    (folder / "pyproject.toml").write_bytes(b"\xff[tool.jaxprtool]")
    assert "pyproject.toml is not valid TOML: 'utf-8' codec" in check(code=2).err
    (folder / "pyproject.toml").unlink()
    (folder / "pyproject.toml").mkdir()
    assert check("--config", ".", code=2).err.startswith("error: cannot read '")


# --- formats ------------------------------------------------------------------------------------


def test_github_annotations_are_escaped_and_relative_to_the_root_of_the_repository(
    project, check, folder, monkeypatch
):
    (folder / ".git").mkdir()
    (folder / "a, b").mkdir()
    (folder / "a, b" / "model.py").write_text((folder / "model.py").read_text())
    project(STEP + 'flops = "300 kFLOP"\n', "a, b/pyproject.toml")
    monkeypatch.chdir(folder / "a, b")
    found = check("--format", "github", code=1)
    (line,) = found.out.splitlines()
    assert line.startswith(
        "::error file=a%2C b/model.py,line=11,title=jaxprtool flops::step takes 322.0 kFLOP, but "
        "the budget is 300.0 kFLOP, 7.3%25 more%0Athe parts:%0A"
    )
    assert found.err == "1 of 1 target failed\n"


def test_problems_without_a_line_are_at_the_table_of_the_target(project, check):
    project(
        '# first\n[tool.jaxprtool.targets.gone]\ntarget = "no.py:f"\n\n'
        '[tool.jaxprtool.targets]\nother = { target = "no.py:g" }\n'
    )
    lines = check("--format", "github", code=1).out.splitlines()
    project("[project]\nscripts.x = 1\nx = 2\n[tool.jaxprtool]\ntargets.x.target = 'no.py:f'\n")
    (line,) = check("--format", "github", code=1).out.splitlines()
    assert line.startswith("::error file=pyproject.toml,line=5,")
    assert [line.partition(",title")[0] for line in lines] == [
        "::error file=pyproject.toml,line=2",
        "::error file=pyproject.toml,line=6",
    ]


def test_sarif_has_the_rules_and_the_lines(project, check):
    project(STEP + 'flops = 1\n    no = ["sin"]\n')
    log = json.loads(check("--format", "sarif", code=1).out)
    assert_sarif(log)
    (run,) = log["runs"]
    assert [each["id"] for each in run["tool"]["driver"]["rules"]] == ["flops", "no"]
    assert [each["ruleId"] for each in run["results"]] == ["flops", "no"]
    location = run["results"][0]["locations"][0]["physicalLocation"]
    assert location == {
        "artifactLocation": {"uri": "model.py", "uriBaseId": "%SRCROOT%"},
        "region": {"startLine": 11},
    }


def assert_sarif(log):
    """Check the requirements of SARIF 2.1.0 for the parts that we write."""
    assert log["version"] == "2.1.0" and log["$schema"].endswith("sarif-2.1.0.json")
    for run in log["runs"]:
        driver = run["tool"]["driver"]
        assert driver["name"] == "jaxprtool"
        rules = [each["id"] for each in driver["rules"]]
        assert len(set(rules)) == len(rules)
        assert all(each["shortDescription"]["text"] for each in driver["rules"])
        assert all(type(each["executionSuccessful"]) is bool for each in run["invocations"])
        for result in run["results"]:
            assert rules[result["ruleIndex"]] == result["ruleId"]
            assert result["level"] in ("none", "note", "warning", "error")
            assert result["message"]["text"]
            for each in result["locations"]:
                place = each["physicalLocation"]
                uri = place["artifactLocation"]["uri"]
                assert not uri.startswith("/") and " " not in uri and "\\" not in uri
                assert place["region"]["startLine"] >= 1


def test_findings_of_lint_are_written_in_both_formats(project, cli):
    line = "lint", "model.py:softmax", "--args", "f32[8]"
    found = cli(*line, "--format", "github")
    assert found.code == 1
    assert found.out.startswith(
        "::error file=model.py,line=37,title=jaxprtool JT701::model.py:37: JT701 the exponentials"
    )
    log = json.loads(cli(*line, "--format", "sarif").out)
    assert_sarif(log)
    assert log["runs"][0]["results"][0]["ruleId"] == "JT701"
    assert "softmax" in log["runs"][0]["tool"]["driver"]["rules"][0]["shortDescription"]["text"]
    assert cli(*line, "--format", "json").out == cli(*line, "--json").out
    assert cli(*line, "--format", "github", "--select", "JT1").out == ""


def test_no_line_of_a_file_that_has_changed_is_annotated(project, check, cli, folder):
    cli("emit", "model.py:softmax", "--args", "f32[8]", "-o", "softmax.jaxpr")
    (folder / "model.py").write_text("# a comment\n" + (folder / "model.py").read_text())
    found = cli("lint", "softmax.jaxpr", "--format", "github")
    assert found.out.startswith("::error title=jaxprtool JT701::model.py:37: JT701 the exponent")
    project('[tool.jaxprtool.targets.softmax]\ntarget = "softmax.jaxpr"\nno = ["exp"]\n')
    found = check("--format", "github", code=1)
    assert found.out.startswith("::error file=pyproject.toml,line=1,title=jaxprtool no::")
    assert "model.py:37" in found.out
    assert "note: model.py has changed since it was recorded" in found.err


def test_an_error_is_written_in_the_format_too(project, check, cli):
    project("[tool.jaxprtool]\nx = 1\n")
    message = "pyproject.toml: tool.jaxprtool.x: unknown key; the keys are targets"
    (line,) = check("--format=github", code=2).out.splitlines()
    assert line.startswith(f"::error title=jaxprtool error::{message}")
    log = json.loads(check("--format", "sarif", code=2).out)
    assert_sarif(log)
    (invocation,) = log["runs"][0]["invocations"]
    assert invocation["executionSuccessful"] is False
    text = invocation["toolExecutionNotifications"][0]["message"]["text"]
    assert text.startswith(message)
    assert json.loads(check("--format", "json", code=2).out)["error"]["message"].startswith(message)
    assert "are two formats: give one" in check("--json", "--format", "github", code=2).err
    assert json.loads(cli("lint", "no.py:f", "--format", "sarif").out)["runs"][0]["results"] == []


def test_an_interrupt_leaves_the_file_unchanged(project, check, folder):
    (folder / "stops.py").write_text("def f(x):\n    raise KeyboardInterrupt\n")
    path = project(
        STEP + "flops = 1\n    [tool.jaxprtool.targets.stops]\n"
        '    target = "stops.py:f"\n    args = "f32[]"\n'
    )
    before = path.read_bytes()
    assert check("--update", code=130).err.splitlines()[-1] == "interrupted"
    assert path.read_bytes() == before


def test_the_names_of_targets_are_completed_without_jax(project, folder):
    project(STEP + '[tool.jaxprtool.targets.start]\n    target = "a.py:f"\n')
    code = "import sys; from jaxprtool.cli.completion import complete_configured as c; "
    code += "print(c('st'), c('sta'), c('x'), 'jax' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert found.stdout == "['step', 'start'] ['start'] [] False\n", found.stderr
