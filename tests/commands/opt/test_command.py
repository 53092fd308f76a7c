import json

import pytest


def test_only_the_result_goes_to_stdout(cli):
    result = cli("opt", "functions.py:wasteful", "-p", "dce", "--print-after-all")
    assert result.code == 0
    assert "cos" in result.out and "sin" not in result.out and "#" not in result.out
    assert "# after dce: wasteful\n" + result.out in result.err


def test_print_before_and_after_name_passes(cli):
    result = cli("opt", "functions.py:wasteful", "-p", "dce", "--print-before-all")
    assert "# before dce: wasteful" in result.err and "sin" in result.err
    result = cli("opt", "functions.py:wasteful", "-p", "dce, dce", "--print-after", "dce")
    assert result.err.count("# after dce: wasteful") == 2


def test_stats_and_timing_are_a_table_of_passes(cli):
    result = cli("opt", "functions.py:wasteful", "-p", "dce", "--stats", "--timing")
    (row,) = [line.split() for line in result.lines if line.startswith("dce")]
    assert row[:5] == ["dce", "wasteful", "2", "1", "1"] and float(row[5]) >= 0
    assert result.lines[-1].startswith("total")


def test_json_holds_the_program_and_the_passes(cli):
    result = cli("opt", "functions.py:wasteful", "-p", "dce(drop_inputs=True)", "--json")
    document = json.loads(result.out)
    assert [eqn["primitive"] for eqn in document["programs"][0]["equations"]] == ["cos"]
    (row,) = document["passes"]
    assert row["pass"] == "dce(drop_inputs=True)" and row["program"] == "wasteful"
    assert (row["equations_before"], row["equations_after"]) == (2, 1)


def test_without_passes_the_program_is_unchanged(cli):
    assert cli("opt", "functions.py:double").out == cli("show", "functions.py:double").out


PLUGIN = """
    from dataclasses import dataclass
    from typing import ClassVar
    from jaxprtool import Pass, Programs

    @dataclass(frozen=True)
    class Halves(Pass):
        '''Give the program twice.'''
        name: ClassVar[str] = "cli_halves"
        def __call__(self, program):
            return Programs({"left": program, "right": program})

    @dataclass(frozen=True)
    class Raises(Pass):
        '''Raise.'''
        name: ClassVar[str] = "cli_raises"
        def __call__(self, program):
            return {}["nothing"]

    @dataclass(frozen=True)
    class Exits(Pass):
        '''Leave Python.'''
        name: ClassVar[str] = "cli_exits"
        def __call__(self, program):
            raise SystemExit(0)

    @dataclass(frozen=True)
    class GivesNone(Pass):
        '''Give None.'''
        name: ClassVar[str] = "cli_gives_none"
        def __call__(self, program):
            return None

    @dataclass(frozen=True)
    class Breaks(Pass):
        '''Make an ill-typed program.'''
        name: ClassVar[str] = "cli_breaks"
        def __call__(self, program):
            return program.replace(arg_names=())
"""


@pytest.fixture
def plugin(folder):
    lines = [line[4:] for line in PLUGIN.splitlines()]
    (folder / "cli_plugin.py").write_text("\n".join(lines))
    return ["--plugin", "cli_plugin.py"]


def test_several_programs_have_their_names(cli, plugin):
    result = cli("opt", "functions.py:double", "-p", "cli_halves", *plugin)
    assert result.out.startswith("# left\n{ lambda") and "\n\n# right\n{ lambda" in result.out


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("cli_raises", 2, "error: pass 'cli_raises' failed on double: KeyError: 'nothing'"),
        ("cli_exits", 2, "error: pass 'cli_exits' failed on double: SystemExit: 0"),
        ("cli_gives_none", 2, "error: pass 'cli_gives_none' returned NoneType, not a Program"),
        ("cli_breaks", 1, "error: pass 'cli_breaks' produced an invalid program"),
    ],
)
def test_a_pass_that_fails_is_named(cli, plugin, name, code, message):
    result = cli("opt", "functions.py:double", "-p", f"dce, {name}", *plugin)
    assert result.code == code and result.out == ""
    assert any(line.startswith(message) for line in result.lines), result.err
    assert "Traceback" not in result.err


def test_the_type_check_can_be_skipped(cli, plugin):
    command = ["opt", "functions.py:double", "-p", "cli_breaks", "--no-check", "--json", *plugin]
    assert cli(*command).code != 1


def test_a_plug_ins_pass_reports_its_changes(cli, folder):
    (folder / "saying.py").write_text(
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "import jaxprtool\n"
        "@dataclass(frozen=True)\n"
        "class Saying(jaxprtool.Pass):\n"
        '    """Say something."""\n'
        '    name: ClassVar[str] = "cli_saying"\n'
        "    def __call__(self, program): return program\n"
        "    def notes(self, before, after):\n"
        '        yield f"{before.name} is as it was" if after is before else "new"\n'
    )
    result = cli("opt", "functions.py:double", "-p", "cli_saying", "--plugin", "saying.py")
    assert result.code == 0 and "note: cli_saying: double is as it was" in result.lines


def test_roll_reports_the_memory_of_its_scans_or_that_nothing_repeats(cli, tmp_path):
    path = tmp_path / "deep.py"
    path.write_text(
        "import jax.numpy as jnp\n"
        "def run(weights, x):\n"
        "    for w in weights:\n"
        "        x = jnp.tanh(x @ w) * 2 + jnp.cos(x)\n"
        "    return x\n"
    )
    args = "[f32[4,4], f32[4,4], f32[4,4], f32[4,4]], f32[2,4]"
    result = cli("opt", f"{path}:run", "--args", args, "-p", "roll")
    assert "note: roll: run has 1 scan; stacking copies 256 bytes" in " ".join(result.err.split())
    result = cli("opt", f"{path}:run", "--args", "[f32[4,4]], f32[2,4]", "-p", "roll")
    assert "note: roll: run has no repetition" in " ".join(result.err.split())


def test_a_page_has_a_tab_for_each_pass(cli, folder):
    result = cli("opt", "functions.py:wasteful", "-p", "dce, cse", "-o", "wasteful.html")
    assert result.code == 0 and result.out == ""
    page = (folder / "wasteful.html").read_text()
    assert page.count('type="radio" name="state"') == 3 and "functions.py" in page
    shown = cli("opt", "functions.py:wasteful", "--format", "html", "--no-source").out
    assert 'name="state"' not in shown and "functions.py" not in shown


def test_a_page_names_the_program_that_a_pass_changed(cli, folder):
    (folder / "noisy.py").write_text(
        "import jax, jaxprtool\n"
        "@jaxprtool.example('key<fry>[]', 'f32[3]')\n"
        "def net(key, x):\n"
        "    return jaxprtool.variable(jax.random.normal(key, (3,)), name='w') * x * 1.0\n"
    )
    page = cli("opt", "noisy.py:net", "-p", "unzip, apply.simplify", "--format", "html").out
    assert "<b>apply.simplify, net_apply</b>" in page
    assert page.count("<article") == 2


def test_a_page_and_json_cannot_both_go_to_stdout(cli):
    result = cli("opt", "functions.py:double", "--format", "html", "--json")
    assert result.code == 2 and "--json and an HTML page cannot both write to stdout" in result.err


def test_print_changed_shows_the_changes_of_each_pass_and_skips_unchanged_programs(cli):
    result = cli("opt", "functions.py:wasteful", "-p", "dce, dce", "--print-changed")
    assert result.err.count("# dce") == 1
    assert ": different: " in result.err and "removed" in result.err and "  - " in result.err
