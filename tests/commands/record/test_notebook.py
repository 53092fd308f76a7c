"""`%%record` in a notebook's shell."""

import re
from pathlib import Path

import pytest
from IPython.testing.globalipapp import start_ipython

from jaxprtool.recording.read import read_run

CELL = """%%record -o run --overwrite
import jax
f = jax.jit(lambda x: x + 1)
f(1.0), f(1)
"""


@pytest.fixture(scope="module")
def shell():
    shell = start_ipython()
    shell.run_line_magic("load_ext", "jaxprtool")
    return shell


@pytest.fixture
def shown(shell, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = []
    monkeypatch.setattr("jaxprtool.commands.record.notebook.display", found.append)
    return found


def test_a_cell_is_run_and_its_compilations_are_shown(shell, shown):
    shell.run_cell_magic(
        "record", "-o here --calls", "import jax\nf = jax.jit(lambda x: x + 1)\nvalue = f(1.0)"
    )
    assert float(shell.user_ns["value"]) == 2.0
    (cell,) = shown
    assert "lambda" in cell.data
    assert "1 program" in cell.data
    assert Path("here/index.html").exists()
    assert "<samp>!jaxprtool report here/lambda</samp>" in cell.data


def test_an_ipython_terminal_shows_the_summary(shell, shown):
    shell.run_cell(CELL)
    lines = repr(shown[0]).splitlines()
    assert "compiling 2 programs" in lines[0] and "page: run/index.html" in lines
    assert lines[-1] == "    !jaxprtool diff run/lambda run/lambda@2"


def test_a_cell_ends_with_what_to_do(shell, shown):
    shell.run_cell(
        "%%record\n"
        "import jax\n"
        "step = jax.jit(lambda key: jax.random.normal(key) + jax.random.normal(key))\n"
        "value = step(jax.random.key(0))"
    )
    assert "What to do" in shown[0].data and "key reuse" in shown[0].data
    assert "<samp>!jaxprtool lint run/</samp>" in shown[0].data


def test_the_help_of_the_magic_is_found_under_both_its_names(shell, shown, capsys):
    shell.run_cell("%record?")
    shell.run_cell("%%record?")
    assert capsys.readouterr().out.count("--no-constants") == 4
    shell.run_cell("%record f(1.0)")
    message = "".join(capsys.readouterr())
    assert "UsageError: %record records a cell" in message and "%%record" in message


def test_an_error_in_a_cell_is_raised_after_the_table(shell, shown):
    with pytest.raises(ZeroDivisionError):
        shell.run_cell_magic("record", "", "import jax\njax.jit(lambda x: x)(1.0)\n1 / 0")
    assert len(shown) == 1
    assert Path("run/run.json").exists()


def test_an_error_of_a_cell_is_shown_once_and_ends_it(shell, shown, capsys):
    result = shell.run_cell(CELL + "1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        result.raise_error()
    message = re.sub(r"\x1b\[[0-9;]*m", "", "".join(capsys.readouterr()))
    assert message.count("ZeroDivisionError: ") == 1
    assert len(read_run("run").compilations) == 2


def test_a_recorded_cell_needs_no_command_and_ends_on_its_own(shell, shown):
    shell.run_cell("1 / 0")
    shell.run_cell(CELL).raise_error()
    run = read_run("run")
    assert (run.command, run.exit_code, run.processes[0].ending) == ((), 0, "")


def test_a_run_in_the_folder_is_renamed(shell, shown):
    shell.run_cell(CELL).raise_error()
    shell.run_cell("%%record\n1").raise_error()
    assert len(read_run("run-1").compilations) == 2
    assert len(read_run("run").compilations) == 0


def test_a_run_has_the_text_of_cells(shell, shown):
    code = "import jax\nf = jax.jit(lambda x: x * 3 + 1)\nvalue = f(1.0)"
    shell.run_cell(f"%%record\n{code}").raise_error()
    texts = [path.read_text() for path in Path("run/sources").iterdir()]
    assert any("lambda x: x * 3 + 1" in text for text in texts)


def test_lines_of_cells_have_the_number_of_the_cell(shell):
    shell.run_cell("import jax.numpy as jnp, jaxprtool", store_history=True)
    number = shell.execution_count
    shell.run_cell("def f(x):\n    return jnp.sin(x).sum()", store_history=True)
    shell.run_cell("found = jaxprtool.cost(jaxprtool.trace(f, jnp.ones(3)))", store_history=True)
    (group,) = shell.user_ns["found"].groups
    assert group.name == f"In [{number}]:2"
    assert "return jnp.sin(x).sum()" in str(shell.user_ns["found"])
