"""`--top N` and `--all`, which every command that lists rows has."""

import re

import pytest

import jaxprtool
from jaxprtool.api.targets import RunInputs
from jaxprtool.cli.main import main
from jaxprtool.cli.output import silent
from jaxprtool.commands.memory.command import buffers_shown
from jaxprtool.errors import OutOfMemoryError
from jaxprtool.registry import commands
from tests.share import shared_proofs

#: The number of values, lines, results and residuals in `long.py`.
MANY = 30

#: The commands that list rows whose number grows with the program, and their arguments.
LISTING = {
    "compare": ["long.py:values", "long.py:others"],
    "cost": ["long.py:values"],
    "diff": ["long.py:values", "long.py:others"],
    "kernels": [],
    "lint": ["long.py:sorts"],
    "memory": ["long.py:values"],
    "nans": ["long.py:logs"],
    "outline": [],
    "precision": [],
    "profile": ["long.py:values"],
    "record": [],
    "residuals": ["long.py:loss"],
    "run": ["long.py:values"],
    "shardings": ["long.py:values", "--mesh", "x=2", "--in-specs", "(P('x'),)"],
    "show": ["long.py:values", "--stats"],
    "unzip": ["long.py:net"],
    "watch": ["long.py:values"],
    "why": ["long.py:values", "x"],
}

#: The commands whose lists are compared here. `nans` shows details of one finding without either
#: option, times of `profile` vary, `record` fits a screen, `kernels` finds none in the module, and
#: `outline` and `precision` have long lists for large programs only.
BOUNDED = sorted(LISTING.keys() - {"kernels", "nans", "profile", "record", "outline", "precision"})

#: Those that compile a program several times.
COMPILING = ("compare", "residuals", "shardings")

#: The functions of `long.py`: the computation of each line, and the result.
FUNCTIONS = {
    "values": ("jnp.tanh({i}.5 * jnp.repeat(x, {i}, axis=1))", "[{names}]"),
    "others": ("jnp.tanh({i}.6 * jnp.repeat(x, {i}, axis=1))", "[{names}]"),
    "sorts": ("jnp.sort(jnp.tile({i}.5 * x, (1, 128)))[:, :1]", "[{names}]"),
    "logs": ("jnp.log(x - x)", "[{names}]"),
    "loss": ("jnp.tanh({i}.5 * jnp.repeat(x, {i}, axis=1)).mean()", "sum([{names}])"),
    "net": ("jaxprtool.variable(jax.random.normal(x, (3,)), name='v{i}')", "sum([{names}])"),
}


@pytest.fixture
def long(folder):
    """A module whose functions have `MANY` different values, each in its own line."""
    names = ", ".join(f"v{i}" for i in range(1, MANY + 1))
    text = "import jax, jax.numpy as jnp, jaxprtool\n"
    for name, (code, result) in FUNCTIONS.items():
        type = "key<fry>[]" if name == "net" else "f32[2,8]"
        text += f'\n@jaxprtool.example("{type}")\ndef {name}(x):\n'
        text += "".join(f"    v{i} = {code.format(i=i)}\n" for i in range(1, MANY + 1))
        text += f"    return {result.format(names=names)}\n"
    (folder / "long.py").write_text(text)


def more(text):
    return [int(number) for number in re.findall(r"… (\d+) more.*: --all$", text, re.MULTILINE)]


@pytest.mark.parametrize("command", commands())
def test_all_commands_that_list_rows_declare_both_options(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    shown = re.search(r"--top +N \[x>=1\] +Show N rows of each list\. Default: ", text)
    assert bool(shown) == (command in LISTING)
    assert bool(re.search(r"--all +Show all rows\.", text)) == (command in LISTING)


@pytest.mark.parametrize("command", sorted(LISTING))
def test_both_options_together_are_refused(cli, command):
    found = cli(command, "--top", "3", "--all", "functions.py:double")
    assert found.code == 2 and not found.out
    assert found.lines == [
        "error: --top and --all cannot be combined",
        "hint: give one of them",
    ]


@pytest.mark.parametrize("command", sorted(LISTING))
def test_at_least_one_row_is_shown(cli, command):
    assert cli(command, "--top", "0", "functions.py:double").code == 2


@pytest.mark.parametrize(
    "command",
    [
        *(name for name in BOUNDED if name not in COMPILING),
        *shared_proofs(COMPILING),
    ],
)
def test_lists_end_with_the_number_of_further_rows(cli, long, command):
    some, two, every = (
        cli(command, *LISTING[command], *asked).out for asked in ([], ["--top", "2"], ["--all"])
    )
    assert more(some) and more(two) and not more(every)
    assert max(more(two)) >= MANY - 2
    assert len(two.splitlines()) < len(some.splitlines()) < len(every.splitlines())


@pytest.mark.parametrize("command", ["diff", "show", "watch"])
def test_a_pager_gets_all_rows(cli, long, command):
    whole = cli(command, *LISTING[command], "--pager").out
    assert whole and not more(whole)
    assert more(cli(command, *LISTING[command], "--pager", "--top", "2").out)


def test_show_uses_the_options_for_lists_only(cli):
    found = cli("show", "functions.py:double", "--top", "3")
    assert found.code == 2
    assert found.lines[0] == "error: --top and --all need --stats"


def test_a_row_of_nans_names_few_results_if_their_names_are_long(cli, folder):
    text = "import jax.numpy as jnp\n\ndef f(x):\n    bad = jnp.log(x)\n"
    text += "    return {f'a_result_with_quite_a_long_name_{i}': bad for i in range(9)}\n"
    (folder / "named.py").write_text(text)
    table = " ".join(cli("nans", "named.py:f", "--args", "-1.0", "--all").out.split())
    assert "and 8 more" in table and "name_1" not in table


def test_nans_lists_its_findings_with_either_option(cli, long):
    assert "29 others make one; --all shows them" in cli("nans", "long.py:logs").out
    assert more(cli("nans", "long.py:logs", "--top", "2").out) == [MANY - 2]
    every = cli("nans", "long.py:logs", "--all").out
    assert every.count("infinity") == MANY and not more(every)


@pytest.mark.parametrize("asked", [[], ["--stat"]])
def test_a_diff_limits_lines_and_arguments(cli, long, asked):
    found = cli("diff", *LISTING["diff"], *asked, "--top", "28").out
    assert more(found) == [2]


@pytest.mark.proof
def test_a_diff_limits_arguments_and_results(cli, long):
    given = "diff", "long.py:values", "long.py:loss"
    few, default, every = (cli(*given, *asked).out for asked in (["--top", "1"], [], ["--all"]))
    assert len(more(few)) == 2 and len(more(default)) == 1 and not more(every)


def test_equations_of_large_hunks_are_limited_separately(cli, long):
    removed = cli("diff", "long.py:values", "functions.py:double", "--args", "f32[2,8]").out
    assert removed.count("\n  - ") <= 20 < 20 + more(removed)[-1]
    every = cli("diff", "long.py:values", "functions.py:double", "--args", "f32[2,8]", "--all").out
    assert len(re.findall(r"^  [-+~] ", every, re.MULTILINE)) == 20 + more(removed)[-1]


def test_paths_are_limited(cli, folder):
    lines = "".join("    x = jnp.sin(x)\n" for _ in range(MANY))
    text = f"import jax.numpy as jnp\n\ndef f(x):\n{lines}    return x\n"
    (folder / "path.py").write_text(text)
    given = "why", "path.py:f", "--args", "f32[2]", "--path", "x", "result"
    assert more(cli(*given).out) == [10] and more(cli(*given, "--top", "29").out) == [1]
    assert not more(cli(*given, "--all").out)


def test_the_buffers_in_an_error_name_no_option(long):
    program = jaxprtool.load("long.py:values")
    with pytest.raises(OutOfMemoryError) as caught, buffers_shown(RunInputs(program, {}), silent):
        raise OutOfMemoryError("out of memory")
    text = "\n".join(line for _, line in caught.value.details)
    assert re.search(r"… \d+ more$", text, re.MULTILINE) and "--all" not in text


def test_why_uses_the_options_for_lines_only(cli):
    found = cli("why", "functions.py:double", "x", "--format", "text", "--all")
    assert found.code == 2
    assert found.lines[0].startswith("error: --top and --all are for source lines")


def test_omitted_non_finite_results_are_counted(cli, long):
    found = cli("run", "long.py:logs", "--top", "28")
    assert "… 2 more, 2 of them with NaN or inf: --all\n" in found.out
