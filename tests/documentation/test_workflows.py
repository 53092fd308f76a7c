"""The workflows in `.github/` are well formed, and everything they call exists."""

import re
import tomllib

import pytest

import jaxprtool
from tests.documentation.blocks import ROOT

yaml = pytest.importorskip("yaml")

WORKFLOWS = {path.stem: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(params=WORKFLOWS)
def workflow(request):
    return yaml.safe_load(WORKFLOWS[request.param].read_text())


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_workflows_exist_for_the_site_and_for_releases():
    assert WORKFLOWS.keys() == {"docs", "release"}


def test_a_workflow_has_what_github_requires(workflow):
    assert workflow["name"] and workflow[True]  # `on` is a boolean of YAML 1.1
    for job in workflow["jobs"].values():
        assert job["runs-on"] and job["steps"]
        assert {job["needs"]} <= workflow["jobs"].keys() if "needs" in job else True
    for step in steps(workflow):
        assert ("uses" in step) != ("run" in step)
        assert re.fullmatch(r"[\w-]+/[\w-]+@[\w./]+", step.get("uses", "a/b@v1"))


def test_everything_a_workflow_names_exists(workflow):
    commands = "\n".join(step["run"] for step in steps(workflow) if "run" in step)
    for extras in re.findall(r"\.\[([\w,]+)\]", commands):
        assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    for source in re.findall(r"-m sphinx .*?(\w+) \S+$", commands, re.MULTILINE):
        assert (ROOT / source / "conf.py").exists()
    for step in steps(workflow):
        options = step.get("with", {})
        if "python-version" in options:
            assert tuple(map(int, options["python-version"].split("."))) >= (3, 11)
        if "cache-dependency-path" in options:
            assert (ROOT / options["cache-dependency-path"]).exists()


def test_artifacts_uploaded_by_one_job_are_published_by_the_next():
    docs, release = (yaml.safe_load(path.read_text()) for path in WORKFLOWS.values())
    (built,) = (s["run"] for s in steps(docs) if "sphinx" in s.get("run", ""))
    (uploaded,) = (s["with"]["path"] for s in steps(docs) if "pages-artifact" in s.get("uses", ""))
    assert built.split()[-1] == uploaded
    names = {s["with"]["name"] for s in steps(release) if "artifact" in s.get("uses", "")}
    assert names == {"dist"}
    for workflow in (docs, release):
        assert workflow["permissions"] == {"contents": "read"}
        assert workflow["jobs"]["publish"]["permissions"]["id-token"] == "write"


def test_a_release_tag_matches_the_version_of_the_package():
    # The workflow compares the tag with `__version__`; the wheel has the project's version.
    assert jaxprtool.__version__ == PROJECT["version"]
