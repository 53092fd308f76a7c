"""`jaxprtool bounds` prints the bounds of each result, and `--help` lists it quickly."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxprtool.cli.main import main

MODULE = """
import jax.numpy as jnp
import jaxprtool

@jaxprtool.example("f32[4]", "i32[]")
def f(x, n):
    return {"y": jnp.maximum(jnp.tanh(x), -2.0) + 1, "n": n}
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a command line in a folder with the module `f.py`; return its code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.py").write_text(MODULE)

    def run(*arguments):
        code = main([*arguments])
        return code, *capsys.readouterr()

    return run


def test_the_table_has_a_row_for_each_result(run):
    code, out, _ = run("bounds", "f.py:f", "--within", "x=-1:1, n=0:9")
    rows = [line.split() for line in out.splitlines()[2:]]
    assert code == 0 and rows[0] == ["result['n']", "i32[]", "0", "9"]
    name, type, low, high = rows[1]
    assert (name, type) == ("result['y']", "f32[4]")
    assert float(low) == pytest.approx(0.2384, abs=1e-3)
    assert float(high) == pytest.approx(1.7616, abs=1e-3)


def test_arguments_without_bounds_may_be_nan(run):
    _, out, _ = run("bounds", "f.py:f")
    assert out.splitlines()[-1].split()[-1] == "NaN"


def test_the_document_has_the_bounds_after_the_passes(run):
    code, out, _ = run("bounds", "f.py:f", "-p", "intervals", "--json")
    document = json.loads(out)
    assert code == 0 and document["name"] == "f"
    of_n, of_y = document["results"]
    assert of_n == {"name": "result['n']", "type": "i32[]", "low": "-Infinity",
                    "high": "Infinity", "nan": False}  # fmt: skip
    assert of_y["type"] == "f32[4]" and -0.01 < of_y["low"] < 0 and of_y["nan"]


@pytest.mark.parametrize("text", ["x", "x=1", "=0:1", "x=1:0", "x=nan:1", "x=a:b"])
def test_bounds_that_are_none_are_refused_in_one_line(run, text):
    code, out, err = run("bounds", "f.py:f", "--within", text)
    assert code == 2 and not out
    assert f"'{text}' is not NAME=LOW:HIGH, such as x=0:1" in err.splitlines()[0]


def test_an_unknown_argument_has_a_hint(run):
    code, _, err = run("bounds", "f.py:f", "--within", "weight=0:1")
    assert code == 2
    assert err.splitlines() == ["error: f has no argument weight", "hint: its arguments are x, n"]


def test_several_programs_are_refused(run):
    code, _, err = run("bounds", "f.py:f", "-p", "vjp(argnums=0)")
    assert code == 2 and "bounds takes one program" in err


@pytest.mark.proof
def test_the_help_lists_the_command_and_imports_neither_jax_nor_the_domain():
    code = "import sys; from jaxprtool.cli.main import main; main(['--help'])\n"
    code += "print(sorted({'jax', 'jaxprtool_intervals.domain', 'jaxprtool_intervals.info'}"
    code += " & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "│ bounds       Bound the results of a function" in done.stdout
    assert done.stdout.splitlines()[-1] == "['jaxprtool_intervals.info']"


#: The page that shows how a package adds a command.
PAGE = Path(__file__).parents[3] / "docs" / "plugins.md"


def test_the_page_about_commands_shows_one_that_works(run, tmp_path, monkeypatch):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    info, command = (
        next(block for block in blocks if words in block)
        for words in ("CommandInfo(", "def bounds_command")
    )
    info = info.replace("jaxprtool_intervals.command", "command_of_the_page")
    (tmp_path / "info_of_the_page.py").write_text(info)
    (tmp_path / "command_of_the_page.py").write_text(command)
    folder = tmp_path / "page-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: page\nVersion: 1\n")
    entry = "[jaxprtool.commands]\nas_on_page = info_of_the_page:INFO\n"
    (folder / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, _ = run("as_on_page", "f.py:f", "-p", "intervals")
    assert code == 0 and out.split()[:3] == ["result", "low", "high"]
