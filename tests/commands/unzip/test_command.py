"""`jaxprtool unzip`: the table of variables, the two programs, and how to run and write them."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxprtool
from jaxprtool.ir.source_text import Place
from tests.share import on_one_release

NETS = """
    import jax, jax.numpy as jnp, jaxprtool
    from jaxprtool import nest, sow, variable

    def dense(key, x, features):
        w = variable(jax.random.normal(key, (x.shape[-1], features)), name="w")
        return x @ w + variable(jnp.zeros(features), name="b")

    @jaxprtool.example("key(0)", "f32[8,3]")
    def net(key, x):
        first, second = jax.random.split(key)
        x = jnp.tanh(nest(dense, scope="first")(first, x, 4))
        return nest(dense, scope="second")(second, x, 2)

    @jaxprtool.example("static(3)", "f32[3]", "key(7)", "key<fry>[]")
    def several(n, x, key, other):
        params = {"b": jax.random.normal(key, (n,)).astype(jnp.bfloat16), "n": [jnp.arange(n)]}
        params = variable(params, name="params")
        for i in range(2):
            x = x * sow(jax.random.key_data(other)[i], tag="variable", name="words", mode="append")
        return {"y": x + params["b"], "n": params["n"]}

    @jaxprtool.example("key(0)", "{'w': f32[3]}")
    def clash(key, variables):
        return variable(jax.random.normal(key, (3,)), name="w") + 100 * variables["w"]

    @jaxprtool.example("key(0)", "f32[3]")
    def uncut(key, x):
        w = variable(jax.random.normal(key, (3,)), name="w")
        return x * w + jax.random.normal(key, (3,))

    @jaxprtool.example("key(0)", "f32[3]")
    def undeclared(key, x):
        return x * jax.random.normal(key, (3,))

    @jaxprtool.example("key(0)", "f32[3]")
    def twice(key, x):
        return variable(x * 0 + 1, name="x") + variable(jax.random.normal(key, (3,)), name="w") \\
            + variable(jax.random.normal(key, (3,)), name="w")

    @jaxprtool.example("key(0)", "f32[3]")
    def alive(key, x):
        w = variable(jax.random.normal(key, (3,)), name="w")
        return jax.pure_callback(lambda x: 1 / 0, x, x * w)

    @jaxprtool.example("key(0)")
    def same_path(key):
        return variable({"b": key}, name="a"), variable(key, name="a/b")

    @jaxprtool.example("f32[3]", "f32[3]")
    def partial(x, y):
        return jnp.sin(x).sum() * y
"""


@pytest.fixture
def nets(folder):
    (folder / "nets.py").write_text(textwrap.dedent(NETS))
    return folder


@pytest.fixture
def cli(nets, cli):
    return cli


def table(out):
    """Return the rows of the first table: its cells by the name of the variable."""
    lines = out.split("\n\n")[0].splitlines()[3:]
    return {line.split()[0]: re.split(r"  +", line)[1:] for line in lines}


# --- output ---------------------------------------------------------------------------------------


def test_the_variables_are_a_table_before_the_programs(cli):
    result = cli("unzip", "nets.py:net")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(
        textwrap.dedent("""\
        4 variables, 104 bytes
        variable   type       bytes   source
        ───────────────────────────────────────
        first/w    f32[3,4]      48   nets.py:6
        first/b    f32[4]        16   nets.py:7
        second/w   f32[4,2]      32   nets.py:6
        second/b   f32[2]         8   nets.py:7

        # init
        """)
    )
    assert result.out.count("\n# apply\n") == 1
    init, apply = result.out.split("\n# apply\n")
    assert "random_split" in init and "random" not in apply and "dot_general" in apply


def test_a_table_of_long_names_keeps_to_80_columns(cli, nets):
    scope = "a_scope_whose_name_goes_on_and_on"
    (nets / "long.py").write_text(
        f"from nets import *\ndef f(key, x):\n"
        f"    return nest(nest(dense, scope={scope!r}), scope={scope!r})(key, x, 2)\n"
    )
    lines = cli("unzip", "long.py:f", "--args", "key(0), f32[8,3]").out.split("\n\n")[0]
    assert max(map(len, lines.splitlines())) <= 80
    assert "f32[3,2]" in lines and "nets.py:6" in lines.replace("\n", "")


def test_the_json_document(cli):
    result = cli("unzip", "nets.py:several", "--key-args", "2,3", "--json")
    document = json.loads(result.out)
    assert list(document) == ["schema", "variables", "programs"]
    first, *_, last = document["variables"]
    assert Place.from_json(first.pop("place")) == "nets.py:18"
    assert first == {
        "name": "params/b",
        "type": "bf16[3]",
        "shape": [3],
        "dtype": "bfloat16",
        "bytes": 6,
    }
    assert last["name"] == "words/1" and last["place"]["line"] == 20
    assert [p["name"] for p in document["programs"]] == ["several_init", "several_apply"]
    assert [a["name"] for a in document["programs"][0]["arguments"]] == ["key", "other"]


def test_a_program_without_variables_is_reported(cli):
    out = cli("unzip", "functions.py:double", "--key-args", "none").out
    assert out.startswith("no variables\n\n# init\n{ lambda ; . let  in () }\n\n# apply\n{ lambda")
    assert "no variables" in cli("unzip", "functions.py:double", "--args", "x=f32[3]").out


def test_a_program_in_a_file_is_a_target_as_well(cli, monkeypatch):
    assert cli("opt", "nets.py:net", "-o", "net.jaxpr").code == 0
    expected = cli("unzip", "nets.py:net", "--json").out
    documents = [json.loads(text) for text in (expected, cli("unzip", "net.jaxpr", "--json").out)]
    assert documents[0]["variables"] == documents[1]["variables"]


# --- options --------------------------------------------------------------------------------------


def test_argument_numbers_include_static_arguments(cli):
    result = cli("unzip", "nets.py:several", "--key-args", "-1,2", "--json")
    arguments = json.loads(result.out)["programs"][1]["arguments"]
    assert [a["name"] for a in arguments][-1] == "x"


def test_an_argument_of_any_type_may_be_a_key_as_in_python(cli, nets):
    def f(w, x):
        return jaxprtool.variable(w * 2, name="w") * x

    init, apply = jaxprtool.unzip(f, key_args=0)(np.ones(3, np.float32), np.ones(3, np.float32))
    (nets / "rows.py").write_text(
        "from nets import *\n@jaxprtool.example('f32[3]', 'f32[3]')\ndef f(w, x):\n"
        "    return variable(w * 2, name='w') * x\n"
        "@jaxprtool.example('f32[3]', 'key(0)')\ndef g(x, key):\n"
        "    return x * variable(jax.random.normal(key, (3,)), name='w')\n"
    )
    written = cli("unzip", "rows.py:f", "--key-args", "0")
    assert written.code == 0
    assert written.out.endswith(f"\n# init\n{init}\n\n# apply\n{apply}\n")
    assert cli("unzip", "rows.py:f").out == written.out
    assert cli("unzip", "rows.py:g").lines == [
        "error: Variables do not cut dependence graph. x -> mul at rows.py:7 -> result",
        "hint: 'x' is f32[3], not a key: name the arguments that are keys with --key-args",
    ]


def test_another_tag_can_be_split(cli, nets):
    (nets / "tagged.py").write_text(
        "from nets import *\n@jaxprtool.example('key(0)', 'f32[3]')\ndef f(key, x):\n"
        "    return x * sow(jax.random.normal(key, (3,)), tag='param', name='w')\n"
    )
    assert list(table(cli("unzip", "tagged.py:f", "--tag", "param").out)) == ["w"]
    wrong = cli("unzip", "tagged.py:f", "--tag", "params")
    assert wrong.lines == [
        "error: f sows nothing under the tag 'params'",
        "hint: did you mean 'param'?",
    ]


def test_auto_chooses_variables_if_none_are_sown(cli):
    refused = cli("unzip", "nets.py:undeclared")
    assert refused.code == 2
    assert refused.lines[-1] == "hint: --auto chooses variables where none are declared"
    result = cli("unzip", "nets.py:undeclared", "--auto")
    assert result.code == 0, result.err
    ((kind, size, source),) = table(result.out).values()
    assert (kind, size, source) == ("f32[3]", "12", "nets.py:34")


def test_computations_of_known_arguments_are_done_once(cli):
    result = cli("unzip", "nets.py:partial", "--known", "0")
    assert result.code == 0, result.err
    assert [row[0] for row in table(result.out).values()] == ["f32[]"]
    init, apply = result.out.split("\n# apply\n")
    assert "sin" in init and "reduce_sum" in init and "mul" in apply and "sin" not in apply
    arguments = cli("unzip", "nets.py:partial", "--known", "1").out
    assert arguments.splitlines()[1].split() == ["variable", "type", "bytes"]
    assert table(arguments) == {"y": ["f32[3]", "12"]}


def test_passes_run_on_both_programs_or_on_one(cli, nets):
    (nets / "mark.py").write_text(
        textwrap.dedent("""
        from dataclasses import dataclass
        from typing import ClassVar
        import jaxprtool

        @dataclass(frozen=True)
        class Mark(jaxprtool.Pass):
            \"\"\"Add to the name.\"\"\"

            name: ClassVar[str] = "mark"

            def __call__(self, program):
                return program.replace(name=program.name + "_marked")
        """)
    )
    command = ["unzip", "nets.py:net", "--plugin", "mark.py", "--json", "-p"]
    names = [p["name"] for p in json.loads(cli(*command, "mark, dce").out)["programs"]]
    assert names == ["net_init_marked", "net_apply_marked"]
    names = [p["name"] for p in json.loads(cli(*command, "apply.mark").out)["programs"]]
    assert names == ["net_init", "net_apply_marked"]


# --- writing and running --------------------------------------------------------------------------


@pytest.mark.proof
def test_the_programs_are_written_into_a_folder(cli, nets):
    result = cli("unzip", "nets.py:net", "-o", "net/")
    assert result.code == 0 and result.out.startswith("4 variables") and "lambda" not in result.out
    assert sorted(os.listdir(nets / "net")) == ["apply.jaxpr", "init.jaxpr"]
    init, apply = (jaxprtool.read(nets / "net" / f"{half}.jaxpr") for half in ("init", "apply"))
    variables = init(jax.random.key(0))
    assert {k: sorted(v) for k, v in variables.items()} == {
        "first": ["b", "w"],
        "second": ["b", "w"],
    }
    assert apply(variables, np.ones((8, 3), np.float32)).shape == (8, 2)
    assert cli("unzip", "nets.py:net", "-o", "net").code == 0  # now it is a folder


@pytest.mark.proof
def test_init_and_apply_return_the_results_of_the_function(cli, nets):
    whole = json.loads(cli("run", "nets.py:several", "--json", "--seed", "3").out)
    command = ["unzip", "nets.py:several", "--key-args", "2,3", "--run", "--json", "--seed", "3"]
    document = json.loads(cli(*command).out)
    init, apply = document["runs"]
    assert apply["outputs"] == whole["outputs"]
    assert init["times"]["repeats"] == 0 and apply["times"]["repeats"] == 10
    assert init["outputs"][0]["name"] == "variables['params']['b']"
    assert whole["random"] == init["random"] == apply["random"] == ["x", "other"]


def test_a_run_shows_results_and_the_times_of_both(cli):
    result = cli("unzip", "nets.py:several", "--key-args", "2,3", "--run", "--backend", "cpu")
    _, results, times = result.out.split("\n\n")
    assert len(table(result.out)) == 4 and "lambda" not in result.out
    assert results.startswith("result['n'][0]: i32[3] [0, 1, 2]\nresult['y']: f32[3] [")
    steps = [line.split("  ")[0] for line in times.splitlines()]
    assert steps[0].split()[0] == "step"
    assert steps[2:] == ["device", "trace", "lower", "compile", "first call", "later calls"]
    assert result.err == "note: x, other filled with random values (--seed 0)\n"


def test_saved_variables_are_arguments_of_apply(cli, nets):
    command = ["unzip", "nets.py:several", "--key-args", "2,3", "--args"]
    given = ["static(3), arange(3, dtype=f32), key(7), key(8)", "--run", "--json"]
    document = json.loads(cli(*command, *given, "--save", "params.npz", "-o", "net/").out)
    with np.load(nets / "params.npz") as saved:
        assert list(saved) == ["params/b", "params/n/0", "words/0", "words/1"]
        assert saved["params/b"].dtype == np.float32
    args = "load('params.npz'), arange(3, dtype=f32)"
    result = cli("run", "net/apply.jaxpr", "--args", args, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["outputs"] == document["runs"][1]["outputs"]
    with np.load(nets / "params.npz") as saved:
        np.savez(nets / "less.npz", **{k: saved[k] for k in saved if k != "words/1"}, word=1)
    less = cli("run", "net/apply.jaxpr", "--args", args.replace("params", "less"))
    assert less.lines == [
        "error: argument 'variables' lacks 'words/1', and has 'word', which several_apply does not "
        "take",
        "hint: it takes 'params/b', 'params/n/0', 'words/0', 'words/1'",
    ]


@pytest.mark.proof
def test_an_argument_named_variables_is_not_confused_with_them(cli):
    args = ["--args", "key(0), {'w': zeros(f32[3])}", "--json"]
    whole = json.loads(cli("run", "nets.py:clash", *args).out)
    document = json.loads(cli("unzip", "nets.py:clash", "--run", *args).out)
    assert document["runs"][1]["outputs"] == whole["outputs"]


def test_run_suggests_unzip_for_two_programs(cli):
    result = cli("run", "nets.py:net", "-p", "unzip")
    assert result.lines == [
        "error: run takes one program, but the passes returned init, apply",
        "hint: run both with `jaxprtool unzip --run`",
    ]


# --- mistakes ---------------------------------------------------------------------------------

NET = ["unzip", "nets.py:net"]
MISTAKES = {
    "no such argument": (
        [*NET, "--key-args", "2"],
        "no positional argument 2 is given; the call has",
    ),
    "an argument that is no number": (
        [*NET, "--key-args", "key"],
        "invalid value for '--key-args'",
    ),
    "a key that is no key": (
        [*NET, "--key-args", "1"],
        "Variables do not cut dependence graph. x -> ",
    ),
    "a static key": (["unzip", "nets.py:several", "--key-args", "0"], "argument 0 is static"),
    "a tag of nothing": ([*NET, "--tag", "no"], "net sows nothing under the tag 'no'"),
    "auto and known": ([*NET, "--auto", "--known", "0"], "--known and --auto cannot be combined"),
    "auto and a tag": (
        [*NET, "--auto", "--tag", "variable"],
        "--auto and --tag cannot be combined",
    ),
    "known and a tag": ([*NET, "--known", "0", "--tag", "t"], "--known and --tag cannot be"),
    "keys and known": ([*NET, "--key-args", "0", "--known", "0"], "--known and --key-args cannot"),
    "known that is not there": ([*NET, "--known", "5"], "no positional argument 5 is given"),
    "saving what is not run": ([*NET, "--save", "p.npz"], "--save needs --run"),
    "a backend for nothing": ([*NET, "--backend", "cpu"], "--backend needs --run"),
    "an unknown backend": ([*NET, "--run", "--backend", "abacus"], "no backend 'abacus'"),
    "a file for two programs": (
        [*NET, "-o", "net.jaxpr"],
        "unzip writes two files, and 'net.jaxpr'",
    ),
    "stdout for two programs": (
        [*NET, "-o", "-"],
        "unzip writes two files, and '-' is not a folder",
    ),
    "an empty path": ([*NET, "-o", ""], "unzip writes two files, and '' is not a folder"),
    "a folder that cannot be": (
        [*NET, "-o", "nets.py/net/"],
        "cannot create the folder 'nets.py/net/'",
    ),
    "a folder to save into": ([*NET, "--run", "--save", "."], "cannot write '.': it is a folder"),
    "variables that do not cut": (
        ["unzip", "nets.py:uncut"],
        "Variables do not cut dependence graph.",
    ),
    "a name given twice": (["unzip", "nets.py:twice"], "Cannot use duplicate variable name: w"),
    "one path for two": (
        ["unzip", "nets.py:same_path", "--run", "--save", "p.npz"],
        "two variables have the path 'a/b'",
    ),
    "what cannot be written": (["unzip", "nets.py:alive", "-o", "net/"], "pure_callback at "),
    "a pass for nobody": ([*NET, "-p", "first.dce"], "no program 'first' for 'first.dce'"),
    "passes that leave no apply": (
        [*NET, "--run", "-p", "apply.unzip(key_args=None)"],
        "--run takes init and apply, but the passes returned init, apply.init, apply.apply",
    ),
    "a symbolic size to run": (
        [*NET, "--run", "--args", "key(0), f32[n,3]"],
        "argument 'x' is f32[n",
    ),
    "static arguments of a file": (
        ["unzip", "no.jaxpr", "--static-argnums", "1"],
        "'no.jaxpr' is a",
    ),
}


@pytest.mark.parametrize("command, message", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_a_one_line_error_and_nothing_is_written(cli, nets, command, message):
    before = set(os.listdir(nets))
    result = cli(*command)
    assert result.code == 2, result
    assert result.out == ""
    assert result.lines[0].startswith(f"error: {message}"), result.err
    assert all(line.startswith("hint: ") for line in result.lines[1:]) and len(result.lines) <= 2
    assert set(os.listdir(nets)) - before <= {"__pycache__"}


def test_a_function_that_raises_while_running_leaves_no_files(cli, nets):
    before = set(os.listdir(nets))
    result = cli("unzip", "nets.py:alive", "--run", "--save", "params.npz")
    assert (result.code, result.out) == (3, "")
    assert result.lines[-1] == "error: alive_apply raised ZeroDivisionError: division by zero"
    assert set(os.listdir(nets)) - before <= {"__pycache__"}


def test_the_uncut_path_has_source_lines(cli):
    (line,) = cli("unzip", "nets.py:uncut").lines
    assert re.search(r"key -> _normal, add at nets\.py:30 -> result$", line)


# --- processes ------------------------------------------------------------------------------------


@on_one_release
def test_a_process_unzips_a_piped_program(nets):
    command = f"{sys.executable} -m jaxprtool"
    line = (
        f"{command} opt nets.py:net -o - | {command} unzip - -o net/ --run --save p.npz"
        f" && {command} run net/apply.jaxpr --args \"load('p.npz'), f32[8,3]\""
    )
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("4 variables, 104 bytes\n")
    assert done.stdout.count("result: f32[8,2]") == 2
    assert sorted(os.listdir("net")) == ["apply.jaxpr", "init.jaxpr"]
    failed = subprocess.run(
        ["bash", "-c", f"{command} unzip nets.py:uncut -o out/"], capture_output=True, text=True
    )
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.startswith("error: Variables do not cut") and not os.path.exists("out")


def test_large_programs_are_paged_on_a_terminal(terminal):
    samples = Path(__file__).parents[3] / "samples"
    target = f"{samples}/transformer_variables.py:loss"
    shown = terminal("unzip", target, lines=40)
    assert shown.count("… --full or --pager shows all") == 2 and len(shown.splitlines()) < 100
    assert "… --full" not in terminal("unzip", target, "--full")
