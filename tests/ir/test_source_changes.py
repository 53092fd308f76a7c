"""Notes on source files that have changed: one for each run, with the numbers of lines."""

from pathlib import Path

import pytest

from jaxprtool.ir import source_text
from jaxprtool.ir.source_text import changed_notes
from jaxprtool.recording.folder import KeptSources


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """Keep files of ten lines in a run, change lines of them, and return their displayed paths."""
    monkeypatch.chdir(tmp_path)
    sources = KeptSources("run-2", 2e9)

    def change(*files):
        cited = {}
        for name, lines in files:
            text = [f"{name} {i}\n" for i in range(10)]
            Path(name).write_text("".join(text))
            digest = sources.keep(str(Path(name).absolute()))
            Path(name).write_text("".join(["changed\n"] * lines + text[lines:]))
            cited[source_text.name_read(name, name, digest, False)] = name
        source_text.use_kept("run-2")
        return cited

    return change


def test_one_file_is_named_with_its_lines(changed):
    assert changed_notes(changed(("train.py", 4))) == [
        "train.py has changed since run-2/ was recorded (4 lines); record it again"
    ]


def test_several_files_are_one_note(changed):
    names = [("a.py", 1), ("b.py", 2), ("c.py", 3), ("d.py", 4), ("e.py", 5)]
    assert changed_notes(changed(*names[:2])) == [
        "a.py (1 line) and b.py (2 lines) have changed since run-2/ was recorded; record it again"
    ]
    assert changed_notes(changed(*names)) == [
        "a.py (1 line), b.py (2 lines), c.py (3 lines) and 2 more files have changed since run-2/"
        " was recorded; record it again"
    ]


def test_the_text_of_then_is_shown(changed):
    (file,) = changed(("model.py", 3))
    assert source_text.line(file, 1) == "model.py 0"
    assert not source_text.reason(file) and source_text.has_changed(file)
    Path("model.py").unlink()
    gone = source_text.name_read("model.py", "model.py", source_text.source_digest(file), False)
    assert source_text.line(gone, 1) == "model.py 0" and not source_text.has_changed(gone)


def test_a_file_that_no_run_keeps_has_a_note_of_its_own(changed):
    Path("own.py").touch()
    name = source_text.name_read("own.py", "own.py", "0123456789abcdef", False)
    (note,) = changed_notes({name: "own.py"})
    assert note == source_text.citation_note("own.py")
    assert source_text.lines(name) == [] and source_text.reason(name)
