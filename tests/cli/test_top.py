"""`--top N` and `--all`, which every command that lists rows has."""

import re

import pytest

from jaxprtool.cli.app import COMMANDS
from jaxprtool.cli.main import main

#: How many values, lines, results and residuals `long.py` has.
MANY = 30

#: The commands that list rows whose number grows with the program, and what they are asked.
LISTING = {
    "cost": ["long.py:values"],
    "memory": ["long.py:values"],
    "profile": ["long.py:values"],
    "residuals": ["long.py:loss"],
    "shardings": ["long.py:values", "--mesh", "x=2", "--in-specs", "(P('x'),)"],
}

#: Those of them that show less without either option: a run of XLA is not the same each time.
BOUNDED = sorted(LISTING.keys() - {"profile"})


@pytest.fixture
def long(folder):
    """A module whose functions have `MANY` different values, each in its own line."""
    numbers = range(1, MANY + 1)
    head = "import jax, jax.numpy as jnp, jaxprtool\n\n"
    head += '@jaxprtool.example("f32[2,4]")\ndef {}(x):\n'
    lines = [f"    v{i} = jnp.tanh({i}.5 * jnp.repeat(x, {i}, axis=1))\n" for i in numbers]
    names = ", ".join(f"v{i}" for i in numbers)
    ends = {
        "values": f"    return [{names}]\n",
        "loss": f"    return sum((v ** 2).mean() for v in [{names}])\n",
    }
    texts = (head.format(name) + "".join(lines) + end for name, end in ends.items())
    (folder / "long.py").write_text("\n".join(texts))


def more(text):
    return re.findall(r"… ([\d,]+) more.*: --all", text)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_list_rows_declare_both_options_alike(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    shown = re.search(r"--top +N \[x>=1\] +Show N rows of each list\. Default: ", text)
    assert bool(shown) == (command in LISTING)
    assert bool(re.search(r"--all +Show all rows\.", text)) == (command in LISTING)


@pytest.mark.parametrize("command", sorted(LISTING))
def test_both_options_are_refused(cli, command):
    found = cli(command, "functions.py:double", "--top", "3", "--all")
    assert found.code == 2 and not found.out
    assert found.lines == [
        "error: --top and --all cannot be combined",
        "hint: give one of them",
    ]


@pytest.mark.parametrize("command", sorted(LISTING))
def test_at_least_one_row_is_shown(cli, command):
    assert cli(command, "functions.py:double", "--top", "0").code == 2


@pytest.mark.parametrize("command", BOUNDED)
def test_lists_end_with_how_many_more_rows_there_are(cli, long, command):
    some, two, every = (
        cli(command, *LISTING[command], *asked).out for asked in ([], ["--top", "2"], ["--all"])
    )
    assert more(some) and more(two) and not more(every)
    assert max(map(int, more(two))) >= MANY - 2
    assert len(two.splitlines()) < len(some.splitlines()) < len(every.splitlines())
