import io
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import jaxprtool
from jaxprtool.cli.main import main
from tests.external import missing

COMMANDS = (
    "show",
    "browse",
    "opt",
    "run",
    "emit",
    "unzip",
    "vmap",
    "outline",
    "shapecheck",
    "passes",
    "explain",
    "backends",
)
ROOT = Path(__file__).parents[2]

#: The program that an example needs, by what stands in it.
PROGRAMS = {"@HEAD": "git", "loss.svg": "dot"}


def help_of(capsys, *arguments):
    assert main([*arguments]) == 0
    return capsys.readouterr().out


def test_no_arguments_show_the_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert help_of(capsys) == help_of(capsys, "--help")


def test_the_help_names_every_command_and_exit_code(capsys):
    text = help_of(capsys, "--help")
    assert all(re.search(rf"^│ {command} ", text, re.MULTILINE) for command in COMMANDS)
    assert "Exit codes: 0 done" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_fits_80_columns_and_has_examples(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(capsys, command, "--help")
    assert max(map(len, text.splitlines())) <= 80
    assert f" jaxprtool {command} " in text
    assert help_of(capsys, command, "-h") == text


def test_types_are_shown_with_their_symbols(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    claim = 'jaxprtool shapecheck jax.nn:softmax "f32[n,d]" "f32[n,d]"'
    assert claim in help_of(capsys, "--help")
    text = help_of(capsys, "shapecheck", "--help")
    assert claim in text and '"f32[n,d]", or "(f32[n], f32[])"' in text
    assert '"x=f32[n,8]"' in help_of(capsys, "opt", "--help")
    assert '--args "f32[8]"' in help_of(capsys, "show", "--help")


def test_the_version(capsys):
    assert help_of(capsys, "--version") == f"jaxprtool {jaxprtool.__version__}\n"


def examples():
    for path in sorted((ROOT / "jaxprtool" / "cli").glob("*.py")):
        for line in path.read_text().splitlines():
            if line.startswith("      jaxprtool "):
                yield line.strip()


@pytest.mark.parametrize("example", sorted(set(examples())))
def test_every_example_of_the_help_works(capfd, monkeypatch, tmp_path, example):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jaxprtool.cli.browse._require_terminal", lambda target: None)
    monkeypatch.setattr("jaxprtool.browse.app.browse", print)
    (tmp_path / "samples").symlink_to(ROOT / "samples")
    (tmp_path / "my_passes.py").write_text("")
    files = set(os.listdir())
    if lacking := missing(*(program for sign, program in PROGRAMS.items() if sign in example)):
        pytest.skip(lacking)
    if "@HEAD" in example and subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"]).returncode:
        pytest.skip("this is no git checkout")
    shown = ""
    for command in example.split(" | "):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(shown.encode())))
        done = (0, 1) if command.split()[1] == "diff" else (0,)  # a diff is no fault
        assert main(shlex.split(command)[1:]) in done, capfd.readouterr().err
        shown = capfd.readouterr().out
    assert shown or set(os.listdir()) > files
