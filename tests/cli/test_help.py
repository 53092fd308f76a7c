import importlib.util
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer import Context

import jaxprtool
from jaxprtool.cli import app
from jaxprtool.cli.main import main
from jaxprtool.registry import command_info, commands, imported
from tests.external import missing
from tests.programs.modules import OLD
from tests.share import share

ROOT = Path(__file__).parents[2]

#: The program that an example needs, by a part of its text.
PROGRAMS = {"@HEAD": "git", "loss.svg": "dot"}


def help_of(capsys, *arguments):
    assert main([*arguments]) == 0
    return capsys.readouterr().out


def test_no_arguments_show_the_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert help_of(capsys) == help_of(capsys, "--help")


def test_the_help_names_every_command_and_exit_code(capsys):
    text = help_of(capsys, "--help")
    assert all(re.search(rf"^│ {command} ", text, re.MULTILINE) for command in commands())
    assert "Exit codes: 0 done" in text


@pytest.mark.parametrize("name", ["", "cost", "record"])
def test_the_short_name_of_the_help_option_is_first(name):
    shown = app.load_command(name, command_info(name)) if name else app._Commands()
    context = Context(shown, help_option_names=["--help", "-h"])
    assert shown.get_help_option_names(context) == ["-h", "--help"]


def test_each_command_is_listed_with_the_first_line_of_its_docstring():
    for command in commands().values():
        assert inspect.getdoc(imported(command.run)).splitlines()[0] == command.summary


@pytest.mark.parametrize("arguments", [("--help",), ("cost", "--help"), ("frob",)])
def test_only_the_command_that_is_called_is_imported(arguments):
    code = (
        "import sys; from jaxprtool.cli.main import main; main(sys.argv[1:]); "
        f"names = {list(commands())}; "
        "print([name for name in names if f'jaxprtool.commands.{name}.command' in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    imported = [name for name in arguments if name in commands()]
    assert done.stdout.splitlines()[-1] == repr(imported)


@pytest.mark.parametrize("command", commands())
def test_the_help_of_a_command_fits_80_columns_and_has_examples(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(capsys, command, "--help")
    assert max(map(len, text.splitlines())) <= 80
    assert f" jaxprtool {command} " in text
    assert help_of(capsys, command, "-h") == text


def test_types_are_shown_with_their_symbols(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    claim = 'jaxprtool shapecheck jax.nn:softmax "f32[n,d]" "f32[n,d]"'
    assert '--args "f32[4,4]"' in help_of(capsys, "--help")
    text = help_of(capsys, "shapecheck", "--help")
    assert claim in text and '"f32[n,d]", or "(f32[n], f32[])"' in text
    assert '"x=f32[n,8]"' in help_of(capsys, "opt", "--help")
    assert '--args "f32[8]"' in help_of(capsys, "show", "--help")


def test_version_option_prints_the_version(capsys):
    assert help_of(capsys, "--version") == f"jaxprtool {jaxprtool.__version__}\n"


@pytest.mark.proof
def test_old_names_of_options_work_with_a_hint(cli, folder):
    found = cli("memory", "functions.py:wasteful", "--plot", "m.svg")
    assert found.code == 0 and (folder / "m.svg").exists()
    assert found.lines[0] == "warning: `memory --plot` is now `--output`"
    found = cli("memory", "functions.py:wasteful", "--plot=other.svg")
    assert found.code == 0 and (folder / "other.svg").exists()


#: The targets of the examples of `check`.
TARGETS = """
[tool.jaxprtool.targets]
step = { target = "samples/rnn.py:grad_loss", flops = "1 GFLOP" }
loss = { target = "samples/rnn.py:loss", flops = "1 GFLOP" }
"""


def examples():
    for path in sorted((ROOT / "jaxprtool" / "commands").rglob("*.py")):
        for line in path.read_text().splitlines():
            if line.startswith("      jaxprtool "):
                yield line.strip()


#: A function of the examples of `upgrade`.
TRAIN = """
import jax.numpy as jnp
import jaxprtool

@jaxprtool.example("f32[4,4]")
def step(x):
    return jnp.tanh(x @ x).sum()
"""


def write_modules(folder):
    """Write folders of --xla_dump_to with a module."""
    for name in ("dump", "old", "new"):
        (folder / name).mkdir()
        file = folder / name / "module_0001.jit_step.cpu_after_optimizations.txt"
        file.write_text(OLD.replace("tanh(", "exponential(") if name == "new" else OLD)


def write_interpreters(folder):
    """Write the interpreters of two environments, which are this one."""
    for name in ("old", "new"):
        (folder / name / "bin").mkdir()
        python = folder / name / "bin" / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)


def test_each_command_has_an_example():
    ours = {name for name, command in commands().items() if command.run.startswith("jaxprtool.")}
    assert {line.split()[1] for line in examples()} >= ours - {"serve"}  # which reads stdin


@pytest.mark.proof
@pytest.mark.parametrize("example", share(sorted(set(examples()))))
def test_every_example_of_the_help_works(capfd, monkeypatch, empty_folder, example):
    monkeypatch.setattr("jaxprtool.commands.browse.command._require_terminal", lambda target: None)
    monkeypatch.setattr("jaxprtool.commands.browse.app.browse", print)
    (empty_folder / "samples").symlink_to(ROOT / "samples")
    (empty_folder / "my_passes.py").write_text("")
    (empty_folder / "pyproject.toml").write_text(TARGETS)
    (empty_folder / "train.py").write_text(TRAIN)
    write_modules(empty_folder)
    write_interpreters(empty_folder)
    files = set(os.listdir())
    if lacking := missing(*(program for sign, program in PROGRAMS.items() if sign in example)):
        pytest.skip(lacking)
    if "@HEAD" in example and subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"]).returncode:
        pytest.skip("this is no git checkout")
    if "tpu:" in example and importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    shown = ""
    for command in example.partition(" > ")[0].split(" | "):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(shown.encode())))
        # A difference is no fault, nor is a time that grows.
        finds = command.split()[1] in ("diff", "determinism", "upgrade")
        done = (0, 1) if finds else (0,)
        assert main(shlex.split(command)[1:]) in done, capfd.readouterr().err
        shown = capfd.readouterr().out
    assert shown or set(os.listdir()) > files
