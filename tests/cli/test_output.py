import io
import os
import stat

import pytest

from jaxprtool.cli import output
from jaxprtool.errors import OutputError
from jaxprtool.files import file_written_whole
from jaxprtool.ir.documents import as_json


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "expected"),
    [
        (Terminal(), {}, True),
        (io.StringIO(), {}, False),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {"FORCE_COLOR": "1"}, True),
        (io.StringIO(), {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_colors_are_for_terminals_unless_told_otherwise(monkeypatch, stream, environment, expected):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert output.colors(stream) is expected


def test_messages_on_a_terminal_wrap_between_words(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    message = " ".join(["loss-and-gradient", "a/long/path.py:12"] * 5)
    output.note(message)
    lines = stream.getvalue().splitlines()
    label = "\x1b[1;38;5;30mnote\x1b[0m"
    assert lines[0].startswith(f"{label}: loss-and-gradient a/long/path.py:12")
    assert len(lines) == 3 and all(len(line) <= 80 + len(label) - len("note") for line in lines)
    assert " ".join(lines).split()[1:] == message.split()


def test_a_piped_message_is_one_line(capsys):
    output.note("word " * 40)
    assert capsys.readouterr().err == f"note: {'word ' * 40}\n"


def test_values_that_json_lacks_are_converted():
    value = {"a": (float("nan"), -float("inf"), 1.5), "b": 1 + 2j, 3: [True, None]}
    assert as_json(value) == {
        "a": ["NaN", "-Infinity", 1.5],
        "b": [1.0, 2.0],
        "3": [True, None],
    }


def test_a_file_gets_its_name_once_it_is_complete(tmp_path):
    path = tmp_path / "out.bin"
    with file_written_whole(str(path)) as file:
        file.write(b"whole")
        assert not path.exists()
    assert path.read_bytes() == b"whole"
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    assert os.listdir(tmp_path) == ["out.bin"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_incomplete_file_leaves_the_old_one(tmp_path, error):
    path = tmp_path / "out.bin"
    path.write_bytes(b"old")
    with pytest.raises(error), file_written_whole(str(path)) as file:
        file.write(b"half")
        raise error
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out.bin"]


@pytest.mark.parametrize("path", ["missing/out.bin", ".", "folder/"])
def test_an_unwritable_path_is_refused_at_once(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError, match="cannot write"), file_written_whole(path):
        raise AssertionError("the work was begun")
    assert os.listdir(tmp_path) == []


def test_tables_have_no_trailing_blanks(capsys):
    output.write_table(("name", "count"), [("a", "1"), ("long name", "20")], right=("count",))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "name        count",
        "─────────────────",
        "a               1",
        "long name      20",
    ]
