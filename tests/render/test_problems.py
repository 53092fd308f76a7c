"""Problems are escaped for GitHub, and their files are named from the root of the repository."""

import os

import pytest

from jaxprtool.ir.source_text import UNKNOWN, Place
from jaxprtool.render.documents import Problem, github_annotations, repository_root, sarif


def line_of(path, number):
    return Place(str(path), number, display=path.name)


def unescaped(text):
    """Undo GitHub's escaping: https://github.com/actions/toolkit, `unescapeProperty`."""
    for code, sign in {"%2C": ",", "%3A": ":", "%0A": "\n", "%0D": "\r", "%25": "%"}.items():
        text = text.replace(code, sign)
    return text


@pytest.mark.parametrize("text", ["100%", "a\r\nb", "%0A", "a,b:c::d", "größer → 2"])
def test_an_annotation_is_one_line_that_can_be_unescaped(tmp_path, text):
    place = line_of(tmp_path / "a,b:c%.py", 3)
    found = github_annotations([Problem("flops", UNKNOWN, text, ["more"], place)], str(tmp_path))
    assert found.count("\n") == found.count("\r") == 0
    assert found.startswith("::error file=")
    head, _, message = found.removeprefix("::error ").partition("::")
    properties = dict(each.split("=", 1) for each in head.split(","))
    assert unescaped(properties["file"]) == "a,b:c%.py" and properties["line"] == "3"
    assert unescaped(message) == f"{text}\nmore"


def test_a_file_outside_of_the_repository_has_a_location_only_in_sarif(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    problem = Problem("no", UNKNOWN, "wrong", [], line_of(tmp_path / "x y.py", 1), "warning")
    assert github_annotations([problem], str(root)) == "::warning title=jaxprtool no::wrong"
    (result,) = sarif([problem], "1", str(root), {})["runs"][0]["results"]
    location = result["locations"][0]["physicalLocation"]["artifactLocation"]
    assert location == {"uri": f"file://{tmp_path}/x%20y.py"}
    assert result["level"] == "warning"


def test_a_file_behind_a_symlink_is_in_the_repository(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x.py").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    problem = Problem("no", UNKNOWN, "wrong", [], line_of(tmp_path / "link" / "x.py", 1))
    found = github_annotations([problem], str(tmp_path / "there"))
    assert found.startswith("::error file=x.py,line=1,")


def test_the_root_is_that_of_git_or_the_folder_itself(tmp_path):
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    assert repository_root(str(deep)) == os.path.realpath(deep)
    (tmp_path / ".git").write_text("gitdir: elsewhere")  # as in a git worktree
    assert repository_root(str(deep)) == os.path.realpath(tmp_path)
