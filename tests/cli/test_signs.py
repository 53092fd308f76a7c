"""Output to streams whose encoding lacks some characters, and to streams that cannot be written."""

import io
import subprocess
import sys

import pytest

from jaxprtool.cli import app
from jaxprtool.cli.main import main
from tests.share import on_one_release


@pytest.fixture
def narrow(monkeypatch, folder):
    """`narrow("cp1252", "show", "f.py:f")` returns the exit code, stdout and stderr as bytes."""

    def run(encoding, *arguments, errors="strict"):
        streams = [
            io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=each)
            for each in (errors, "backslashreplace")
        ]
        for name, stream in zip(("stdout", "stderr"), streams, strict=True):
            monkeypatch.setattr(sys, name, stream)
        code = main(arguments)
        for stream in streams:
            stream.flush()
        return code, *(stream.buffer.getvalue() for stream in streams)

    return run


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "latin-1", "cp437"])
@pytest.mark.parametrize(
    "command",
    [
        ("cost", "functions.py:wasteful"),
        ("memory", "functions.py:wasteful"),
        ("watch", "functions.py:wasteful"),
        ("residuals", "functions.py:wasteful"),
        ("diff", "functions.py:wasteful", "-p", "dce"),
        ("show", "--help"),
    ],
    ids=lambda command: command[0],
)
def test_symbols_missing_in_an_encoding_become_ascii(narrow, encoding, command):
    code, out, err = narrow(encoding, *command)
    assert code in (0, 1) and out and b"error" not in err
    assert b"\\u" not in out and b"?" not in out.replace(b"_", b"")


CYRILLIC = """
import jax.numpy as jnp, jaxprtool

@jaxprtool.example("f32[3]")
def f(ж):
    return jnp.sin(ж)
"""


def test_names_missing_in_an_encoding_are_escaped_but_not_in_programs(narrow, folder):
    (folder / "names.py").write_text(CYRILLIC, "utf-8")
    code, out, _ = narrow("cp1252", "memory", "names.py:f")
    assert code == 0 and rb"\u0436" in out
    code, out, err = narrow("cp1252", "opt", "names.py:f", "-o", "-")
    assert code == 2 and not out
    assert err.startswith(
        "error: stdout uses the encoding cp1252, which lacks 'ж'".encode(
            "cp1252", "backslashreplace"
        )
    )
    assert narrow("utf-8", "opt", "names.py:f", "-o", "-")[:1] == (0,)


def test_the_error_handler_of_pythonioencoding_is_used(narrow):
    _, out, _ = narrow("ascii", "cost", "functions.py:wasteful", errors="replace")
    assert b"??" in out


@pytest.mark.parametrize(
    ("sign", "text"), [("╭", "+"), ("━", "-"), ("│", "|"), ("┤", "+"), ("⠀", " "), ("⣿", "*")]
)
def test_lines_and_dots_have_ascii_equivalents(sign, text):
    assert app.in_ascii(sign) == text


@on_one_release
@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
@pytest.mark.parametrize("redirected", ["> /dev/full", ">&-", "2> /dev/full", "2>&-"])
def test_an_unwritable_stream_is_a_one_line_error(redirected):
    command = f"{sys.executable} -m jaxprtool explain nowhere {redirected}"
    if ">" in redirected and "2" not in redirected:
        command = command.replace(" nowhere", " --help")
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    message = {
        "> /dev/full": "error: cannot write to stdout: No space left on device\n",
        ">&-": "error: stdout is closed\n",
        "2> /dev/full": "",
        "2>&-": "",
    }
    assert (ended.returncode, ended.stderr) == (2, message[redirected])
