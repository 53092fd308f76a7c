"""`--rewrite file.py`: rewrites from a file, as passes."""

import textwrap

import pytest

from jaxprtool.cli.main import main

REWRITES = """
    import jax.numpy as jnp, jaxprtool

    @jaxprtool.rewrite(x="f32[...]")
    def twice(x):
        return x * 2.0

    @twice.to
    def _(x):
        return x + x

    @jaxprtool.rewrite(x="f32[...]")
    def once(x):
        "Sums of a value and itself are something else."
        return x + x

    once.to(lambda x: jnp.sinh(x))
"""
PROGRAM = """
    import jax.numpy as jnp, jaxprtool

    @jaxprtool.example("f32[3]")
    def f(x):
        return jnp.sin(x * 2.0)
"""


@pytest.fixture
def cli(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(textwrap.dedent(REWRITES))
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))

    def run(*args):
        code = main(["opt", "program.py:f", *args])
        out, err = capfd.readouterr()
        return code, out, err.splitlines()

    return run


def test_the_rewrites_of_a_file_run_in_order_and_report_their_matches(cli, tmp_path):
    code, out, err = cli("--rewrite", "mine.py")
    assert code == 0 and "sinh" in out and "mul" not in out and "add" not in out
    assert err == [
        f"note: rewrite '{name}': 1 match, at program.py:6" for name in ("twice", "once")
    ]


def test_a_pipeline_may_name_rewrites_of_a_file(cli):
    code, out, err = cli("--rewrite", "mine.py", "-p", "once, twice", "--stats")
    assert code == 0 and "add" in out and "sinh" not in out
    assert err[0].startswith("warning: rewrite 'once' has no matches") or err[1].startswith(
        "warning: rewrite 'once' has no matches"
    )
    rows = [line.split()[0] for line in err if line.startswith(("once", "twice"))]
    assert rows == ["once", "twice"]


def test_unnamed_rewrites_run_before_the_pipeline(cli):
    code, _, err = cli("--rewrite", "mine.py", "-p", "dce, once", "--stats")
    rows = [line.split()[0] for line in err if line.startswith(("once", "twice", "dce"))]
    assert code == 0 and rows == ["twice", "dce", "once"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise RuntimeError('two\\nlines')", "cannot be imported: RuntimeError: two lines"),
        ("def broken(:", "cannot be imported: SyntaxError"),
        ("x = 1", "bad.py has no rewrites"),
        (
            "import jaxprtool\njaxprtool.rewrite('f32[n]', name='z')(lambda x: x)",
            "the pattern of rewrite 'z' computes nothing",
        ),
        (
            "import jaxprtool\nr = jaxprtool.rewrite('f32[n]', name='dce')(lambda x: x * 2)",
            "rewrite 'dce' of bad.py has the name of another pass",
        ),
        (
            "import jaxprtool\nr = jaxprtool.rewrite('f32[n]', name='z')(lambda x: x * 2.0)",
            "rewrite 'z' has no replacement",
        ),
    ],
)
def test_an_invalid_file_is_one_error(cli, tmp_path, text, message):
    (tmp_path / "bad.py").write_text(text + "\n")
    code, out, err = cli("--rewrite", "bad.py")
    assert code == 2 and out == ""
    assert err[0].startswith("error: ") and message in err[0]
    assert len(err) == 1 or (len(err) == 2 and err[1].startswith("hint: "))


def test_a_missing_file_is_an_error(cli):
    assert cli("--rewrite", "none.py") == (2, "", ["error: no file none.py"])


def test_a_file_that_is_not_python_is_an_error(cli, tmp_path):
    (tmp_path / "notes.txt").write_text("x\n")
    code, _, err = cli("--rewrite", "notes.txt")
    assert (code, err[0]) == (2, "error: notes.txt is not a Python file")
