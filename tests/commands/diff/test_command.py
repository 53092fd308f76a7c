"""`jaxprtool diff` reports the differences of two programs, at the user's lines."""

import json
import subprocess
import sys
import textwrap

import pytest

from jaxprtool.ir.source_text import Place
from tests.external import missing, needs
from tests.share import on_one_release

BEFORE = """
    import jax
    import jax.numpy as jnp
    import jaxprtool

    @jaxprtool.example("f32[6]")
    def loss(a):
        c, _ = jax.lax.scan(lambda c, row: (jnp.tanh(c * 2.0) + row, None), a, jnp.ones((5, 6)))
        return (c * c).sum()
"""
AFTER = BEFORE.replace("2.0", "3.0").replace("(c * c)", "jnp.abs(c)")


@pytest.fixture(autouse=True)
def model(folder):
    (folder / "old.py").write_text(textwrap.dedent(BEFORE))
    (folder / "new.py").write_text(textwrap.dedent(AFTER))
    return folder


def test_differences_are_shown_with_their_lines_and_exit_code_1(cli):
    found = cli("diff", "old.py:loss", "new.py:loss")
    assert found.code == 1 and found.err == ""
    heading, _, equations, *_ = lines = found.out.splitlines()
    assert heading == "loss: different: 1 removed, 1 added, 1 changed"
    assert equations.split() == ["equations", "7"]
    assert "in scan at new.py:8" in lines
    assert "  ~ e:f32[6] = mul c (2.0:f32[] → 3.0:f32[])" in lines
    one_sided = [line.split() for line in lines if line.startswith(("  - ", "  + "))]
    assert [(mark, op) for mark, _, _, op, *_ in one_sided] == [("-", "mul"), ("+", "abs")]
    assert "old.py:9" in lines and "new.py:9" in lines
    assert max(map(len, lines)) <= 80


SPLITS = """
import jax, jaxprtool

def splits(sizes):
    return jaxprtool.example("f32[120]")(lambda x: jax.lax.split(x, sizes)[0])

ones = (1,) * 120
old, new = splits(ones), splits((*ones[:60], 2, 0, *ones[62:]))
"""


def test_a_difference_within_a_long_value_is_shown(cli, folder):
    (folder / "splits.py").write_text(SPLITS)
    found = cli("diff", "splits.py:old", "splits.py:new")
    assert found.code == 1 and "1, 1, 2, 0, 1, 1" in " ".join(found.out.split())


def test_enclosing_equations_are_named_once(cli, folder):
    other = BEFORE.replace("jnp.tanh(c * 2.0) + row", "jnp.tanh(jnp.sin(c) * 2.0) + row * row")
    (folder / "edited.py").write_text(textwrap.dedent(other))
    lines = cli("diff", "old.py:loss", "edited.py:loss").out.splitlines()
    assert lines.count("in scan at edited.py:8") == 1
    assert [line.split()[3] for line in lines if line.startswith("  + ")] == ["sin", "mul"]


def test_arguments_and_results_of_one_program_only_are_named(cli, folder):
    other = BEFORE.replace("loss(a)", "loss(a, b)").replace('"f32[6]"', '"f32[6]", "f32[]"')
    (folder / "edited.py").write_text(textwrap.dedent(other.replace("(c * c).sum()", "c * c, b")))
    lines = cli("diff", "old.py:loss", "edited.py:loss").out.splitlines()
    assert "+ argument b: f32[]" in lines
    assert "+ result[0]: f32[6]" in lines and "- result: f32[]" in lines


def test_a_pytree_of_one_program_only_is_one_line(cli, folder):
    module = """
        import jax.numpy as jnp
        def one(params, x):
            return {"out": x * params["a"]["w"]}
        def two(params, x):
            y = x * params["b"]["w"]
            return {"out": x * params["a"]["w"], "more": [y, -y, y * y, y + y], "z": y}
    """
    (folder / "more.py").write_text(textwrap.dedent(module))
    a, b = "'a': {'w': f32[]}", "'b': {'s': f32[], 'u': f32[], 'v': f32[], 'w': f32[]}"
    calls = "--args", f"{{{a}}}, f32[]", "--args", f"{{{a}, {b}}}, f32[]"
    lines = cli("diff", "more.py:one", "more.py:two", *calls).out.splitlines()
    assert "+ arguments params['b']: 4 arrays" in lines
    assert "+ result['more']: 4 arrays" in lines and "+ result['z']: f32[]" in lines
    found = json.loads(cli("diff", "more.py:one", "more.py:two", *calls, "--json").out)
    names = [each["name"] for each in found["border"]]
    assert names[:2] == ["params['b']['s']", "params['b']['u']"]


def test_a_call_with_other_results_reports_their_numbers(cli, folder):
    pair = """
        import jax
        import jax.numpy as jnp

        def loss(a):
            return jax.jit(lambda b: (jnp.sin(b), jnp.cos(b)))(a)

        def one(a):
            return jax.jit(lambda b: jnp.sin(b))(a)
    """
    (folder / "pair.py").write_text(textwrap.dedent(pair))
    for order, message in ((("loss", "one"), "1 result fewer"), (("one", "loss"), "1 result more")):
        found = cli("diff", *(f"pair.py:{name}" for name in order), "--args", "f32[6]")
        assert message in found.out


def test_a_loop_with_fewer_values_shows_the_removed_ones(cli, folder):
    loop = """
        import jax
        import jax.numpy as jnp

        def loss(a):
            def step(carry, _):
                unused, number = carry
                return (unused * 2.0, number + 1), None

            (_, number), _ = jax.lax.scan(step, (a, 1), None, length=3)
            return number
    """
    (folder / "loop.py").write_text(textwrap.dedent(loop))
    shown = cli("diff", "loop.py:loss", "--args", "f32[6]", "-p", "dce").out
    found = " ".join(shown.split())
    assert "(a → nothing) 1:i32[]" in found and "1 result fewer" in found


def test_a_value_that_only_the_first_program_uses_has_a_name(cli, folder):
    split = """
        import jax
        import jax.numpy as jnp

        def loss(a):
            first, rest = jnp.split(a, 2)
            return first * 2.0 + jnp.sin(rest)

        def one(a):
            first, rest = jnp.split(a, 2)
            return first * 2.0
    """
    (folder / "split.py").write_text(textwrap.dedent(split))
    found = cli("diff", "split.py:loss", "split.py:one", "--args", "f32[6]").out
    assert "_" not in next(line for line in found.splitlines() if "= sin" in line).split("= sin")[1]


def test_calls_inlined_one_after_another_are_one_line(cli, folder):
    calls = """
        import jax
        import jax.numpy as jnp

        @jax.jit
        def inner(a):
            return jnp.sin(a) * 2.0

        def loss(a):
            for _ in range(3):
                a = inner(a)
            return a
    """
    (folder / "calls.py").write_text(textwrap.dedent(calls))
    found = cli("diff", "calls.py:loss", "--args", "f32[6]", "-p", "inline").out
    assert "~ jit inner was inlined, 3 times: 6 equations moved" in found


def test_equal_programs_give_one_line_and_exit_code_0(cli, folder):
    cli("opt", "old.py:loss", "-o", "loss.jaxpr")
    for other in ("old.py:loss", "loss.jaxpr"):
        found = cli("diff", "old.py:loss", other)
        assert found.code == 0 and found.out.startswith("loss: equivalent\n")


def test_json_document(cli):
    document = json.loads(cli("diff", "old.py:loss", "new.py:loss", "--json").out)
    assert document["verdict"] == "different"
    assert [each["primitive"] for each in document["removed"]] == ["mul"]
    assert [Place.from_json(each["place"]) for each in document["added"]] == ["new.py:9"]
    (changed,) = document["changed"]
    assert changed["differs_in"] == ["constant"] and changed["path"] == ["scan at new.py:8"]


def test_inlined_equations_of_a_library_have_the_line_of_their_call(cli, folder):
    source = """
        import jax
        import jax.numpy as jnp

        def fun(a):
            b = jax.nn.silu(a)
            return jax.nn.silu(b)

        def more(a):
            b = jax.nn.silu(a)
            return jax.nn.silu(jnp.sin(b)) / 2

        fun(jnp.ones(6))
    """
    (folder / "calls.py").write_text(textwrap.dedent(source))
    given = ["--args", "f32[6]", "-p", "inline"]
    shown = cli("show", "calls.py:fun", *given, "--source").out.splitlines()[1:-1]
    assert [line.split("# ")[1] for line in shown] == [f"calls.py:{n}" for n in (6, 6, 7, 7)]
    costs = cli("cost", "calls.py:fun", *given, "--by", "line").out
    assert "calls.py:6" in costs and "calls.py:7" in costs
    document = json.loads(cli("diff", "calls.py:fun", "calls.py:more", *given, "--json").out)
    added = [(each["primitive"], Place.from_json(each["place"])) for each in document["added"]]
    assert added == [("sin", "calls.py:11"), ("div", "calls.py:11")]
    found = cli("diff", "calls.py:fun", "--args", "f32[6]", "-p", "", "-p", "-O2").out.splitlines()
    assert {"calls.py:6", "calls.py:7"} <= set(found)


def test_stat_counts_by_line(cli):
    found = cli("diff", "old.py:loss", "new.py:loss", "--stat").out.splitlines()
    assert {tuple(line.split()) for line in found[-3:]} == {
        ("old.py:9", "-1"),
        ("new.py:9", "+1"),
        ("new.py:8", "~1"),
    }


def test_stat_reports_different_arguments_and_the_number_of_equations_with_other_types(cli, folder):
    (folder / "sine.py").write_text(
        "import jax.numpy\n\ndef sine(a):\n    return jax.numpy.sin(a)\n"
    )
    found = cli("diff", "sine.py:sine", "--args", "bf16[6]", "--args", "f32[6]", "--stat").out
    assert "~ argument a: bf16[6] → f32[6]" in found and "1 equation has other types" in found


def test_passes_and_arguments_apply_to_one_or_both_programs(cli):
    assert cli("diff", "old.py:loss", "-p", "grad").code == 1
    assert cli("diff", "old.py:loss", "-p", "grad", "-p", "grad").code == 0
    assert cli("diff", "old.py:loss", "old.py:loss", "-p", "grad").code == 0
    found = cli("diff", "old.py:loss", "--args", "f32[6]", "--args", "bf16[6]")
    assert found.code in (1, 3)
    nothing = cli("diff", "old.py:loss")
    assert nothing.code == 2 and "no other program to be compared" in nothing.err
    many = cli("diff", "old.py:loss", "-p", "", "-p", "dce", "-p", "cse")
    assert many.code == 2 and "there are two programs" in many.err


# --- revisions, other environments ----------------------------------------------------------------


def git(*arguments):
    who = "-c", "user.name=A", "-c", "user.email=a@b"
    subprocess.run(["git", *who, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(folder):
    if lacking := missing("git"):
        pytest.skip(lacking)
    git("init", "-q")
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "scale.py").write_text("FACTOR = 2.0\n")
    model = "from package.scale import FACTOR\n\ndef loss(a):\n    return (a * FACTOR).sum()\n"
    (folder / "package" / "model.py").write_text(model)
    (folder / "broken.py").write_text("import nothing_of_the_kind\n")
    (folder / ".gitignore").write_text("__pycache__/\n")
    git("add", "-A")
    git("commit", "-qm", "first")
    (folder / "package" / "scale.py").write_text("FACTOR = 3.0\n")
    (folder / "broken.py").write_text("def loss(a):\n    return a\n")
    return folder


@on_one_release
@pytest.mark.parametrize(
    "target", ["package/model.py:loss", pytest.param("package.model:loss", marks=pytest.mark.sweep)]
)
def test_a_revision_is_traced_with_its_own_modules_and_by_another_python(cli, repository, target):
    arguments = "--args", "f32[6]", "--jax-a", sys.executable
    found = cli("diff", f"{target}@HEAD", target, *arguments)
    assert "same up to constants: 1 changed" in found.out and found.code == 1, found.err
    assert "(2.0:f32[] → 3.0:f32[])" in found.out and "package/model.py:4" in found.out
    status = subprocess.run(["git", "status", "--short"], capture_output=True, text=True).stdout
    assert status.split() == ["M", "broken.py", "M", "package/scale.py"]


@on_one_release
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("package/model.py:loss@nowhere", "no revision 'nowhere'"),
        ("broken.py:loss@HEAD", "No module named 'nothing_of_the_kind'"),
        ("package/edited.py:loss@HEAD", "no file 'package/edited.py' in that revision"),
        ("jax.numpy:sin@HEAD", "the module 'jax' is not in the git repository"),
    ],
)
def test_unknown_revisions_are_errors(cli, repository, target, message):
    found = cli("diff", target, "broken.py:loss", "--args", "f32[6]")
    assert found.code in (2, 3) and message in found.err and found.err.count("error:") == 1


@on_one_release
def test_callbacks_of_a_revision_are_equal_if_their_source_is(cli, folder, repository):
    source = """
        import jax
        import numpy as np

        def host(a):
            return np.sin(a)

        def fun(a):
            jax.debug.callback(lambda b: None, a)
            return jax.pure_callback(host, jax.ShapeDtypeStruct(a.shape, a.dtype), a)
    """
    file = folder / "called_back.py"
    file.write_text(textwrap.dedent(source))
    git("add", "called_back.py")
    git("commit", "-qm", "with callbacks")
    given = (
        "diff",
        "called_back.py:fun@HEAD",
        "called_back.py:fun",
        "--args",
        "f32[6]",
    )
    assert cli(*given).out.startswith("fun: equivalent\n")
    file.write_text(file.read_text().replace("np.sin", "np.tanh"))
    found = cli(*given)
    assert found.code == 1 and "1 changed" in found.out and "pure_callback" in found.out


def test_callbacks_that_differ_in_what_they_close_over_are_told_apart(cli, folder):
    source = """
        import jax

        def called(factor):
            like = jax.ShapeDtypeStruct((), "float32")
            return lambda a: jax.pure_callback(lambda v: v * factor, like, a)

        twice, again, thrice = called(2), called(2), called(3)
    """
    (folder / "local.py").write_text(textwrap.dedent(source))
    types = "--args", "f32[]"
    assert cli("diff", "local.py:twice", "local.py:twice", *types).code == 0
    assert cli("diff", "local.py:twice", "local.py:again", *types).code == 0
    found = cli("diff", "local.py:twice", "local.py:thrice", *types)
    assert found.code == 1
    assert "callback=<lambda>: factor = 2 → <lambda>: factor = 3" in " ".join(found.out.split())


@needs("git")
def test_outside_of_a_repository_revisions_are_errors(cli):
    found = cli("diff", "old.py:loss@HEAD", "new.py:loss")
    assert found.code == 2 and "is not in a git repository" in found.err


def test_without_git_there_are_no_revisions(cli, monkeypatch, folder):
    monkeypatch.setenv("PATH", str(folder))
    found = cli("diff", "old.py:loss@HEAD", "new.py:loss")
    assert found.code == 2 and "git revisions need git, which is not installed" in found.err


def test_a_python_that_cannot_trace_is_an_error(cli, folder):
    missing = cli("diff", "old.py:loss", "--jax-b", "nowhere/python")
    assert missing.code == 2 and "as a Python interpreter" in missing.err
    bare = folder / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    found = cli("diff", "old.py:loss", "--jax-b", "./python")
    assert found.code == 2 and "jaxprtool is not installed" in found.err


def test_two_targets_may_be_calls_of_a_factory(cli, folder):
    (folder / "made.py").write_text("def make(config):\n    return lambda x: x * config['lr']\n")
    one, two = (f"made.py:make({{'lr': {lr}}})" for lr in (0.5, 0.25))
    assert cli("diff", one, one, "--args", "f32[3]").code == 0
    found = cli("diff", one, two, "--args", "f32[3]")
    assert found.code == 1 and "1 changed" in found.out


def test_a_factory_is_compared_with_its_program_in_a_file(cli, folder):
    made = "\ndef make():\n    return loss, (jnp.ones(6),)\n"
    (folder / "old.py").write_text(textwrap.dedent(BEFORE) + made)
    assert cli("opt", "old.py:make", "--factory", "-o", "old.jaxpr").code == 0
    assert cli("diff", "old.py:make", "old.jaxpr", "--factory").code == 0
    assert cli("diff", "old.jaxpr", "old.py:make", "--factory").code == 0
    found = cli("compare", "old.py:make", "old.jaxpr", "--factory")
    assert found.code == 0 and "bitwise equal" in found.out
    assert (
        "--factory and static arguments do not apply"
        in cli("diff", "old.jaxpr", "old.jaxpr", "--factory").err
    )


# --- measured times -----------------------------------------------------------------------------

TIMED = """
    import jax
    import jax.numpy as jnp
    import jaxprtool

    @jaxprtool.example("f32[300,200]", "f32[200,200]")
    def loss(x, w):
        y = jnp.tanh(x @ w)
        z = jnp.cos(x).sum()
        return jnp.exp(y).sum() + z
"""
SORTS = TIMED.replace("jnp.exp(y)", "jnp.sort(jnp.exp(y), axis=0)").replace("jnp.cos", "jnp.sin")


@pytest.fixture
def timed(folder):
    (folder / "plain.py").write_text(textwrap.dedent(TIMED))
    (folder / "sorts.py").write_text(textwrap.dedent(SORTS))
    return "diff", "plain.py:loss", "sorts.py:loss", "--measure"


def test_measured_times_are_shown_by_hunk_with_the_largest_change_first(cli, timed):
    found = cli(*timed)
    assert found.code == 1 and max(map(len, found.out.splitlines())) <= 80
    parts = [line.split("  ")[0] for line in found.out.splitlines() if " → " in line]
    assert "measured time" in parts and "bench" in found.out
    assert found.out.count("time of these lines: ") == 2
    first = found.out.partition("time of these lines: ")[2]
    assert first.index("sorts.py:10") < first.index("sorts.py:9") and "sort" in first


@pytest.mark.proof
def test_measured_times_in_json_add_up(cli, timed):
    told = json.loads(cli(*timed, "--json").out)
    times = told["measured"]
    for key in ("before_seconds", "after_seconds"):
        parts = [times[part][key] for part in ("differing", "others", "no_line")]
        assert sum(parts) == pytest.approx(times["whole"][key])
        assert sum(hunk[key] for hunk in times["hunks"]) == pytest.approx(parts[0])
    # The line that sorts now took its time before, too: its other equations are unchanged.
    assert 0 < times["hunks"][0]["before_seconds"] < times["hunks"][0]["after_seconds"]
    assert times["others"]["before_seconds"] > 0
    assert [each["hunk"] for each in told["added"] if each["place"]["line"] == 10] == [0]


def test_equal_programs_have_times_too(cli, timed):
    found = cli("diff", "plain.py:loss", "plain.py:loss", "--measure")
    assert found.code == 0 and "lines that differ" not in found.out
    assert "measured time" in found.out and "other lines" in found.out


def test_what_cannot_be_measured_is_a_one_line_error(cli, timed):
    found = cli(*timed, "--args", "f32[n,200], f32[200,200]")
    assert (found.code, found.out) == (2, "") and "n needs a number" in found.err
    found = cli(*timed[:3], "--device", "0")
    assert found.code == 2 and "--device needs --measure, which runs the program" in found.err
