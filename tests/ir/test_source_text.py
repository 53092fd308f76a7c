"""The text of source files is shown only if it is that of the traced program."""

import os
import shutil

import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool import trace
from jaxprtool.ir import source_text
from jaxprtool.ir.frames import frames_now, own_frame

SOURCE = "def f(x):\n    return x * 2\n"


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Write a program of a file `NAME.py` to `NAME.jaxpr`, or another, in the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(name, source=SOURCE, program=None):
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        scope = {}
        exec(compile(source, str(path), "exec"), scope)
        jaxprtool.write(trace(scope["f"], jnp.float32(1)), f"{program or name}.jaxpr")
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
    with source_text.citations() as cited:
        assert code("edited") == ""
    assert [*cited.values()] == ["edited.py"]
    assert "record it again" in source_text.citation_note("edited.py")
    frame = own_frame(jaxprtool.read("edited.jaxpr").jaxpr.eqns[0])
    assert source_text.reason(frame.file).startswith("has changed since it was recorded")
    assert frames_now().text(frame) == "edited.py:2"


@pytest.mark.parametrize("order", [("old", "new", "old"), ("new", "old", "new")])
def test_a_program_has_the_same_source_whatever_was_read_before(written, order):
    written("both", program="old")
    written("both", "\n" + SOURCE, program="new")
    expected = {"old": "", "new": "return x * 2"}
    assert [code(name) for name in order] == [expected[name] for name in order]


def test_a_program_of_two_versions_of_a_file_keeps_both(written):
    written("both", program="old")
    written("both", "\n" + SOURCE, program="new")
    old, new = jaxprtool.read("old.jaxpr"), jaxprtool.read("new.jaxpr")
    jaxprtool.write(trace(lambda x: old(new(x)), jnp.float32(1)).apply("inline"), "two.jaxpr")
    eqns = jaxprtool.read("two.jaxpr").jaxpr.eqns
    assert [frames_now().code_of([eqn]) for eqn in eqns] == ["return x * 2", ""]
    written("both")
    eqns = jaxprtool.read("two.jaxpr").jaxpr.eqns
    assert [frames_now().code_of([eqn]) for eqn in eqns] == ["", "return x * 2"]


def test_lines_are_cited_only_in_their_own_block(written):
    path = written("cited")
    path.write_text("\n" + SOURCE)
    code("cited")
    with source_text.citations() as cited:
        assert not cited
        program = jaxprtool.read("cited.jaxpr")
        frames_now(program.roots, chosen=False).texts(program.jaxpr.eqns[0])
        assert not cited  # a name, which is not shown
        assert frames_now(program.roots).texts(program.jaxpr.eqns[0]) == ("cited.py:2",)
    assert [*cited.values()] == ["cited.py"]


def test_a_changed_program_that_is_written_again_keeps_what_its_files_were(written):
    path = written("again")
    path.write_text("\n" + SOURCE)
    jaxprtool.write(jaxprtool.read("again.jaxpr"), "copy.jaxpr")
    path.unlink()
    jaxprtool.write(jaxprtool.read("copy.jaxpr"), "again.jaxpr")
    assert code("again") == ""
    path.write_text(SOURCE)
    assert code("again") == code("copy") == "return x * 2"


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
    assert source_text.source_digest(str(path))
    assert source_text.source_digest(str(path), since=path.stat().st_mtime - 1) == ""
