"""The script of the GitHub Action annotates, summarises, and exits with the code of the check."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.external import needs
from tests.share import on_one_release

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / ".github" / "action" / "check.sh"

MODEL = """
def double(x):
    return x * 2 + 1
"""

TABLE = """
[tool.jaxprtool.targets.double]
target = "model.py:double"
args = "f32[8]"
equations = {budget}

[tool.jaxprtool.targets.other]
target = "model.py:double"
args = "f32[4]"
equations = 2
"""


@pytest.fixture
def repository(tmp_path):
    """A repository with a package in a folder; a function that runs the script in it."""
    folder = tmp_path / "package"
    (folder / "src").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (folder / "model.py").write_text(MODEL)

    def run(budget, **settings):
        (folder / "pyproject.toml").write_text(TABLE.format(budget=budget))
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
            "GITHUB_OUTPUT": str(tmp_path / "output"),
            "CHECK_DIRECTORY": "package/src",
            **settings,
        }
        command = [shutil.which("bash"), SCRIPT]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )

    return run


@on_one_release
@needs("bash", "realpath")
def test_an_exceeded_budget_is_annotated_and_written_as_sarif(repository, tmp_path):
    ended = repository(1, CHECK_SARIF="found.sarif")
    assert ended.returncode == 1, ended.stderr
    (line,) = ended.stdout.splitlines()
    assert line.startswith(
        "::error file=package/model.py,line=3,title=jaxprtool equations::double has 2 equations"
    )
    summary = (tmp_path / "summary.md").read_text()
    assert summary.startswith("```text\nname ") and "1 of 2 targets failed\n```" in summary
    log = json.loads((tmp_path / "found.sarif").read_text())
    assert [each["ruleId"] for each in log["runs"][0]["results"]] == ["equations"]
    assert (tmp_path / "output").read_text() == f"sarif={tmp_path}/found.sarif\n"


@on_one_release
@needs("bash", "realpath")
def test_passing_named_targets_exit_with_0_and_a_mistake_with_2(repository, tmp_path):
    ended = repository(1, CHECK_TARGETS="other", GITHUB_STEP_SUMMARY="")
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert ended.stderr == "1 target passed\n"
    ended = repository('"many"')
    assert ended.returncode == 2
    assert ended.stdout.startswith("::error title=jaxprtool error::pyproject.toml: tool.jaxprtool")


def test_the_action_sets_the_variables_that_the_script_reads():
    action, script = (ROOT / "action.yml").read_text(), SCRIPT.read_text()
    assert ".github/action/check.sh" in action
    given = re.findall(r"^ +(CHECK_\w+): \$\{\{ inputs\.(\w+) \}\}$", action, re.MULTILINE)
    assert {name for name, _ in given} == set(re.findall(r"CHECK_\w+", script))
    inputs = action.partition("inputs:")[2].partition("runs:")[0]
    assert {each for _, each in given} <= set(re.findall(r"^  (\w+):$", inputs, re.MULTILINE))
