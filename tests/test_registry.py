"""Packages add commands by the group `jaxprtool.commands`. A broken one does not affect others."""

import importlib

import pytest

import jaxprtool
from jaxprtool.cli.main import main
from jaxprtool.registry import renderers

INFO = """
from jaxprtool.registry import CommandInfo

INFO = CommandInfo(panel="{panel}", summary="Say hello.", run="{name}_command:greet")
"""

COMMAND = """
from jaxprtool.cli import output
from jaxprtool.cli.session import command

@command
def greet() -> None:
    "Say hello."
    output.write_text("hello")
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a package with one command, and return its name."""

    def install(name, info=INFO, command=COMMAND, panel="Greetings", entry=None):
        (tmp_path / f"{name}.py").write_text(info.format(panel=panel, name=name))
        (tmp_path / f"{name}_command.py").write_text(command)
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        text = f"[jaxprtool.commands]\n{entry or name} = {name}:INFO\n"
        (folder / "entry_points.txt").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


def errors(capsys, *arguments, code):
    assert main([*arguments]) == code
    return capsys.readouterr().err.splitlines()


def test_a_command_of_a_package_is_listed_in_its_own_panel_after_ours_and_runs(install, capsys):
    install("greets_in_a_panel")
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert text.index("Reference") < text.index("Greetings") < text.index("greets_in_a_panel")
    assert main(["greets_in_a_panel"]) == 0 and capsys.readouterr().out == "hello\n"


def test_a_command_in_one_of_our_panels_follows_ours(install, capsys):
    install("greets_among_ours", panel="Look")
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert text.index("─ Look") < text.index("greets_among_ours") < text.index("─ Measure")


def test_a_package_that_cannot_be_imported_is_one_warning_and_the_help_is_whole(install, capsys):
    install("greets_not", info="import nothing_of_this_name")
    assert main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert " show " in out and "Exit codes" in out
    (line,) = err.splitlines()
    assert line.startswith("warning: command 'greets_not' of greets_not cannot be imported: ")
    assert "No module named 'nothing_of_this_name'" in line
    assert errors(capsys, "explain", "dce", code=0) == []
    line, *_ = errors(capsys, "greets_not", code=2)
    assert line.startswith("error: command 'greets_not' of greets_not cannot be imported: ")


def test_an_entry_point_that_is_no_command_is_one_warning(install, capsys):
    install("greets_otherwise", info="INFO = print")
    (line,) = errors(capsys, "--help", code=0)
    assert line == "warning: command 'greets_otherwise' of greets_otherwise is not a CommandInfo"


def test_a_command_whose_module_cannot_be_imported_is_an_error_in_one_line(install, capsys):
    install("greets_badly", command="from jaxprtool.cli.session import nothing")
    assert errors(capsys, "--help", code=0) == []
    (line,) = errors(capsys, "greets_badly", code=2)
    assert line.startswith("error: command 'greets_badly' cannot be imported: ImportError: ")


def test_a_command_with_the_name_of_ours_is_ignored_with_a_warning(install, capsys):
    install("greets_as_show", entry="show")
    (line,) = errors(capsys, "--help", code=0)
    assert line == (
        "warning: command 'show' of greets_as_show is ignored: jaxprtool has a command of that name"
    )


def test_completion_prints_no_warning(install, monkeypatch, capsys):
    install("greets_as_show", entry="show")
    monkeypatch.setenv("_JAXPRTOOL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "jaxprtool sho")
    monkeypatch.setenv("COMP_CWORD", "1")
    main([])
    completed = capsys.readouterr()
    assert completed.out.split() == ["show"] and completed.err == ""


def test_metadata_older_than_the_code_is_an_error_with_the_remedy(monkeypatch, capsys):
    monkeypatch.setattr("jaxprtool.registry._own", lambda path: {})
    assert main(["cost", "f.py:f"]) == 2
    assert capsys.readouterr().err == (
        "error: the installed metadata of jaxprtool names no commands\n"
        "hint: install it again, in a clone with `pip install -e .`\n"
    )


#: A command with a result that has the name of one of ours.
CLOCK = (
    COMMAND
    + """
from jaxprtool.ir.documents import Printed

class Cost(Printed):
    pass

class Drawn:
    def plain(self):
        return "tick"

def drawn(cost, width):
    return Drawn()
"""
)


def test_results_of_the_same_name_are_printed_each_by_its_own_table(install):
    tables = 'tables={{"clock_command:Cost": "clock_command:drawn"}}, '
    install("clock", INFO.replace("run=", f"{tables}run="), CLOCK, panel="Reference")
    renderers.cache_clear()
    try:
        theirs = importlib.import_module("clock_command").Cost()
        ours = jaxprtool.cost(jaxprtool.trace(lambda x: x + 1, 1.0))
        assert str(theirs) == "tick" and str(ours).startswith("lambda: 1 FLOP")
    finally:
        renderers.cache_clear()
