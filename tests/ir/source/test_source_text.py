"""The text of source files is shown only if it is that of the traced program."""

import os
import shutil

import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool import trace
from jaxprtool.ir.source import source_text
from jaxprtool.ir.source.frames import frames_now

SOURCE = "def f(x):\n    return x * 2\n"


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Write a program of a file `NAME.py` to `NAME.jaxpr`, in the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(name):
        path = tmp_path / f"{name}.py"
        path.write_text(SOURCE)
        scope = {}
        exec(compile(SOURCE, str(path), "exec"), scope)
        jaxprtool.write(trace(scope["f"], jnp.float32(1)), f"{name}.jaxpr")
        return path

    return write


def code(name):
    program = jaxprtool.read(f"{name}.jaxpr")
    return frames_now(program.roots).code_of(program.jaxpr.eqns[:1])


def test_a_file_shows_source_that_has_not_changed(written):
    written("same")
    assert code("same") == "return x * 2"


def test_a_file_shows_no_source_that_has_changed_and_the_reason(written):
    path = written("edited")
    # An old time of a new text, as of a checkout or a copied folder, does not hide the change.
    path.write_text("# a comment\n" + SOURCE)
    os.utime(path, (0, 0))
    assert code("edited") == ""
    assert source_text.reason("edited.py").startswith("has changed since it was recorded")
    [reason] = [each for each in source_text.withheld() if each.startswith("edited.py")]
    assert "record it again" in reason


def test_a_file_of_the_same_name_elsewhere_is_not_its_source(written, tmp_path, monkeypatch):
    written("moved")
    (tmp_path / "other").mkdir()
    shutil.copy("moved.jaxpr", "other")
    monkeypatch.chdir("other")
    (tmp_path / "other/moved.py").write_text(SOURCE.replace("2", "3"))
    assert code("moved") == ""


def test_a_file_edited_after_it_was_read_has_no_digest(tmp_path):
    path = tmp_path / "late.py"
    path.write_text(SOURCE)
    assert source_text.digest(str(path))
    assert source_text.digest(str(path), since=path.stat().st_mtime - 1) == ""
