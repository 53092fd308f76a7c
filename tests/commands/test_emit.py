"""`jaxprtool emit`: each format to stdout, to files and into folders; each mistake is one line."""

import json
import os
import re
import stat

import jax
import numpy as np
import pytest

DOUBLE = "functions.py:double"

#: The first characters of each text format, for a function called `double`.
BEGINNINGS = {
    "stablehlo": "module @jit_double ",
    "hlo": "HloModule jit_double,",
    "hlo-optimized": "HloModule jit_double, is_scheduled=true",
    "dot": 'digraph "double" {',
    "model-explorer": '{"label": "double", "graphs": [',
    "jaxpr": "jaxprtool 2\n",
    "python": '"""',
}


@pytest.mark.parametrize("to", BEGINNINGS)
def test_text_goes_to_stdout_and_to_files(cli, folder, to):
    result = cli("emit", DOUBLE, "--to", to)
    assert result.code == 0 and result.out.startswith(BEGINNINGS[to]), result
    assert cli("emit", DOUBLE, "--to", to, "-o", "-").out.startswith(BEGINNINGS[to])
    written = cli("emit", DOUBLE, "--to", to, "-o", "result")
    assert (written.code, written.out) == (0, "")
    assert (folder / "result").read_text().startswith(BEGINNINGS[to])


@pytest.mark.parametrize(
    ("name", "beginning"),
    [
        ("x.mlir", b"module @jit_double "),
        ("x.mlirbc", b"ML\xefR\rStableHLO_v"),
        ("x.hlo", b"HloModule jit_double, entry"),
        ("x.optimized.hlo", b"HloModule jit_double, is_scheduled=true"),
        ("x.pb", b"\n\njit_double"),
        ("x.dot", b'digraph "double"'),
        ("x.gv", b'digraph "double"'),
        ("x.GV", b'digraph "double"'),
        ("x.json", b'{"label": "double"'),
        ("x.jaxpr", b"jaxprtool 2\n"),
        ("x.py", b'"""'),
    ],
)
def test_the_file_name_determines_the_format(cli, folder, name, beginning):
    assert cli("emit", DOUBLE, "-o", name).code == 0
    assert (folder / name).read_bytes().startswith(beginning)


def test_a_picture_has_the_requested_depth(cli):
    whole = cli("emit", "functions.py:kinds", "--to", "dot").out
    assert whole == cli("emit", "functions.py:kinds", "--to", "dot", "--full").out
    assert "subgraph" in whole
    folded = cli("emit", "functions.py:kinds", "--to", "dot", "--depth", "0").out
    assert "subgraph" not in folded and ", folded" in folded


def test_passes_run_first(cli):
    plain = cli("emit", "functions.py:wasteful", "--to", "dot").out
    assert "<b>sin</b>" in plain
    assert "<b>sin</b>" not in cli("emit", "functions.py:wasteful", "--to", "dot", "-p", "dce").out


@pytest.mark.parametrize("options", [("--binary", "-o", "x"), ("-o", "x.mlirbc")])
def test_stablehlo_is_binary_on_request(cli, folder, options):
    assert cli("emit", DOUBLE, "--to", "stablehlo", *options).code == 0
    assert (folder / options[-1]).read_bytes().startswith(b"ML\xefR")


def test_bytes_are_written_to_stdout_unchanged(folder, capfdbinary):
    from jaxprtool.cli.main import main

    assert main(["emit", DOUBLE, "--to", "hlo-proto"]) == 0
    assert capfdbinary.readouterr().out.startswith(b"\n\njit_double")


@pytest.mark.parametrize("to", ["hlo-proto", "exported"])
def test_binary_output_to_a_terminal_is_refused(cli, monkeypatch, to):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    result = cli("emit", DOUBLE, "--to", to)
    assert result.code == 2
    assert result.lines == [
        f"error: {to} is binary, but stdout is a terminal",
        "hint: write a file: -o FILE",
    ]


def test_source_lines_are_kept_on_request(cli):
    assert "functions.py" not in cli("emit", DOUBLE, "--to", "stablehlo").out
    text = cli("emit", DOUBLE, "--to", "stablehlo", "--source").out
    assert 'functions.py":' in text and 'loc("x")' in text


def test_other_backends_need_not_be_installed(cli, folder):
    (folder / "solves.py").write_text("import jax.numpy as jnp\nsolve = jnp.linalg.cholesky\n")
    command = ("emit", "solves.py:solve", "--args", "f32[3,3]", "--to", "stablehlo", "--backend")
    assert "cusolver" in cli(*command, "gpu").out and "lapack" in cli(*command, "cpu").out


def test_xlas_own_graph_is_a_format(cli):
    assert cli("emit", DOUBLE, "--to", "dot", "--graph", "hlo").out.startswith("digraph G {")


# --- artifacts of jax.export ------------------------------------------------------------------


def test_an_artifact_can_be_called_by_jax_and_run_by_jaxprtool(cli, folder):
    assert cli("emit", DOUBLE, "-o", "double.exported", "--platforms", "cpu,cuda").code == 0
    data = (folder / "double.exported").read_bytes()
    artifact = jax.export.deserialize(bytearray(data))
    assert artifact.platforms == ("cpu", "cuda")
    np.testing.assert_array_equal(artifact.call(np.ones(3, np.float32)), [2, 2, 2])
    ran = cli("run", "double.exported", "--args", "ones(f32[3])")
    assert ran.code == 0 and "result: f32[3] [2., 2., 2.]" in ran.out
    shown = cli("show", "double.exported")
    assert shown.out.count("call_exported") == 1


# --- pictures ---------------------------------------------------------------------------------


@pytest.fixture
def graphviz(folder, monkeypatch):
    program = folder / "bin" / "dot"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "picture of kind $1"\ncat\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize("kind", ["svg", "png", "pdf", "PNG"])
@pytest.mark.parametrize("graph", ["jaxpr", "hlo"])
def test_a_graph_becomes_a_picture(cli, folder, graphviz, kind, graph):
    assert cli("emit", DOUBLE, "-o", f"x.{kind}", "--graph", graph).code == 0
    text = (folder / f"x.{kind}").read_text()
    assert text.startswith(f"picture of kind -T{kind.lower()}\ndigraph ")


def test_without_graphviz_the_error_explains_what_to_install(cli, folder, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    result = cli("emit", DOUBLE, "-o", "x.svg")
    assert result.code == 2 and "traced" not in result.lines
    assert (
        result.lines[0] == "error: cannot draw 'x.svg': Graphviz's program 'dot' is not on the PATH"
    )
    assert result.lines[1].startswith("hint: install it with apt-get install graphviz")
    assert not (folder / "x.svg").exists()


# --- several programs -------------------------------------------------------------------------


@pytest.fixture
def halves(folder):
    (folder / "halves.py").write_text(
        "import jaxprtool\n"
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "@dataclass(frozen=True)\n"
        "class Halves(jaxprtool.Pass):\n"
        "    '''Give the program twice.'''\n"
        "    name: ClassVar[str] = 'cli_emit_halves'\n"
        "    def __call__(self, program):\n"
        "        names = ('left', 'right')\n"
        "        return jaxprtool.Programs({n: program.replace(name=n) for n in names})\n"
        "jaxprtool.register(Halves)\n"
    )
    return ("emit", DOUBLE, "--plugin", "halves.py", "-p", "cli_emit_halves")


@pytest.mark.parametrize("to", ["stablehlo", "hlo", "dot"])
def test_several_programs_have_their_names_above_them(cli, halves, to):
    out = cli(*halves, "--to", to).out
    assert out.startswith("// left\n") and "\n\n// right\n" in out


@pytest.mark.parametrize(
    ("options", "ending"),
    [
        (("--to", "stablehlo"), ".mlir"),
        (("--to", "stablehlo", "--binary"), ".mlirbc"),
        (("--to", "hlo-optimized"), ".optimized.hlo"),
        (("--to", "hlo-proto"), ".pb"),
        (("--to", "dot"), ".dot"),
        (("--to", "model-explorer"), ".json"),
        (("--to", "jaxpr"), ".jaxpr"),
        (("--to", "python"), ".py"),
    ],
)
def test_several_programs_go_into_a_folder(cli, folder, halves, options, ending):
    assert cli(*halves, *options, "-o", "both/").code == 0
    assert sorted(os.listdir(folder / "both")) == [f"left{ending}", f"right{ending}"]


def test_several_programs_need_a_folder(cli, halves):
    result = cli(*halves, "-o", "one.mlir")
    assert (
        result.code == 2 and "takes one program, but the passes returned left, right" in result.err
    )
    result = cli(*halves, "--to", "hlo-proto")
    assert result.code == 2 and "hlo-proto is binary and takes one program" in result.err
    result = cli(*halves, "--to", "model-explorer")
    assert result.code == 2 and "one document and takes one program" in result.err


# --- mistakes ---------------------------------------------------------------------------------


MISTAKES = {
    "no format": (("emit", DOUBLE), "--to is missing"),
    "unknown format": (("emit", DOUBLE, "--to", "xml"), "'xml' is not one of 'python'"),
    "a name that says nothing": (("emit", DOUBLE, "-o", "x.foo"), "'x.foo' is not a known format"),
    "a name without an end": (("emit", DOUBLE, "-o", "x"), "--to is missing"),
    "binary text": (("emit", DOUBLE, "--to", "hlo", "--binary"), "--binary applies to stablehlo, "),
    "binary source": (
        ("emit", DOUBLE, "--to", "stablehlo", "--binary", "--source"),
        "--source applies to text",
    ),
    "graph of no dot": (
        ("emit", DOUBLE, "--to", "hlo", "--graph", "hlo"),
        "--graph applies to dot",
    ),
    "depth of no dot": (("emit", DOUBLE, "--to", "hlo", "--depth", "1"), "--depth applies to dot"),
    "all of no dot": (("emit", DOUBLE, "-o", "x.json", "--full"), "--full applies to dot"),
    "depth of all": (
        ("emit", DOUBLE, "--to", "dot", "--full", "--depth", "1"),
        "--depth and --full cannot be combined",
    ),
    "depth of HLO": (
        ("emit", DOUBLE, "--to", "dot", "--graph", "hlo", "--depth", "1"),
        "--depth and --full apply to the graph of a jaxpr",
    ),
    "unknown graph": (("emit", DOUBLE, "--to", "dot", "--graph", "ast"), "'ast' is not one of"),
    "backend of a jaxpr": (
        ("emit", DOUBLE, "--to", "dot", "--backend", "cpu"),
        "--backend applies to --graph hlo",
    ),
    "backend of python": (
        ("emit", DOUBLE, "--to", "python", "--backend", "cpu"),
        "--backend applies to stablehlo, hlo",
    ),
    "platforms of hlo": (
        ("emit", DOUBLE, "--to", "hlo", "--platforms", "cpu"),
        "--platforms applies to exported",
    ),
    "unknown backend": (
        ("emit", DOUBLE, "--to", "hlo", "--backend", "abacus"),
        "JAX does not lower for 'abacus', only for cpu, cuda, rocm, tpu",
    ),
    "unknown platform": (
        ("emit", DOUBLE, "--to", "exported", "--platforms", "cpu,abacus", "-o", "x"),
        "JAX does not lower for 'abacus'",
    ),
    "a backend that is not there": (
        ("emit", DOUBLE, "--to", "hlo-optimized", "--backend", "tpu"),
        "no backend 'tpu' on this machine",
    ),
    "a folder that is not there": (
        ("emit", DOUBLE, "-o", "no/such/x.mlir"),
        "cannot write 'no/such/x.mlir': No such file or directory",
    ),
    "an empty path": (("emit", DOUBLE, "--to", "hlo", "-o", ""), "the path to write to is empty"),
    "symbolic sizes in hlo": (
        ("emit", DOUBLE, "--args", "f32[n]", "--to", "hlo"),
        "takes x:f32[n], but HLO has no symbolic sizes",
    ),
    "a callback that is exported": (
        ("emit", "functions.py:callback", "--to", "exported", "-o", "x"),
        "callback cannot be exported: pure_callback at",
    ),
    "a callback for another backend": (
        ("emit", "functions.py:prints", "--to", "stablehlo", "--backend", "cuda"),
        "prints cannot be lowered for cuda because of debug_print at",
    ),
}


@pytest.mark.parametrize(("command", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(cli, folder, command, message):
    before = set(os.listdir(folder))
    result = cli(*command)
    said = [line for line in result.lines if line not in ("imported", "traced")]
    assert (result.code, result.out) == (2, ""), result
    assert said[0].startswith("error: ") and message in said[0], said
    assert all(line.startswith("hint: ") for line in said[1:]) and len(said) <= 2, said
    assert set(os.listdir(folder)) - before <= {"__pycache__"}


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        (("emit", DOUBLE, "-o", "x.sgv"), "hint: did you mean '.gv'?"),
        (("emit", DOUBLE, "--to", "hlo", "--backend", "cdua"), "hint: did you mean 'cuda'?"),
        (
            ("emit", DOUBLE, "--to", "exported", "--backend", "tpu"),
            "hint: write --platforms tpu",
        ),
    ],
)
def test_similar_names_are_hinted_at(cli, command, hint):
    assert cli(*command).lines[-1] == hint


def test_optimized_hlo_is_compiled_for_the_devices_of_a_mesh(cli, folder):
    (folder / "sums.py").write_text("def add(x, y):\n    return x + y\n")
    command = ("emit", "sums.py:add", "--args", "f32[4@x,4], f32[4@x,4]", "--to", "hlo-optimized")
    result = cli(*command, "--mesh", "x=2")
    assert result.code == 0 and "num_partitions=2" in result.out and "f32[2,4]" in result.out
    result = cli(*command, "--mesh", "x=64", "--args", "f32[64@x], f32[64@x]")
    assert result.code == 2 and "runs on a mesh of 64 devices (x=64)" in result.err


# --- like jax.xla_computation ---------------------------------------------------------------------


STEP = """
import jax

def step(params, x, unused):
    return {"y": params["w"] @ x, "total": x.sum()}

def total(x):
    return jax.lax.psum(x, "i")

def split(x, y):
    return jax.sharding.reshard(x, jax.P("x")) @ y
"""
ON_STEP = ("emit", "steps.py:step", "--args", "{'w': f32[4,4]}, f32[4], f32[]")


@pytest.fixture
def steps(folder):
    (folder / "steps.py").write_text(STEP)


def test_hlo_has_the_options_of_xla_computation(cli, steps):
    import jax
    import jax.numpy as jnp

    from jaxprtool import xla_computation

    sys_path_module = {}
    exec(STEP, sys_path_module)
    spec = jax.sharding.PartitionSpec
    made = xla_computation(
        sys_path_module["step"],
        in_parts=({"w": spec(2, 1)}, spec(2), None),
        out_parts={"y": spec(2), "total": None},
        tuple_args=True,
        donate_argnums=1,
    )({"w": jnp.ones((4, 4))}, jnp.ones(4), 1.0)
    result = cli(
        *(*ON_STEP, "--to", "hlo", "--in-parts", "({'w': P(2, 1)}, P(2), None)"),
        *("--out-parts", "{'y': P(2), 'total': None}", "--tuple-args", "--donate", "1"),
    )
    assert result.code == 0

    def facts(text):
        header = text.splitlines()[0].partition(",")[2].partition(", frontend")[0]
        return header, sorted(re.findall(r"sharding=(\{.*?\})(?:,|$)", text, re.MULTILINE))

    assert facts(result.out) == facts(made.as_hlo_text())
    assert "{1}: (0, {1}, may-alias)" in result.out


def test_stablehlo_and_protos_have_these_options_too(cli, steps, folder):
    result = cli(*ON_STEP, "--to", "stablehlo", "--donate", "1", "--in-parts", "None, P(4), None")
    assert result.code == 0 and "tf.aliasing_output" in result.out
    assert "{devices=[4]0,1,2,3}" in result.out and result.out.count("%arg2: tensor<f32>") == 1
    assert cli(*ON_STEP, "-o", "step.pb", "--tuple-args").code == 0
    assert (folder / "step.pb").stat().st_size > 100


def test_the_tree_of_result_types_is_printed_too(cli, steps):
    result = cli(*ON_STEP, "--to", "hlo", "--return-shape")
    assert result.err == "note: step returns {'total': f32[], 'y': f32[4]}\n"
    assert result.out.startswith("HloModule jit_step")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--in-parts", "P('x')"), "--in-parts has P('x'"),
        (("--in-parts", "(P(2),"), "'(' in --in-parts is not closed"),
        (("--in-parts", "(P(2), None)"), "--in-parts is not a prefix of the tree of values"),
        (("--in-parts", "open('x')"), "a call is not allowed in --in-parts"),
        (("--in-parts", "P(a=2)"), "a PartitionSpec takes numbers of parts by position"),
        (("--out-parts", "{'y': P(2)}"), "--out-parts is not a prefix of the tree of values"),
        (("--out-parts", "P(2)"), "--out-parts has P(2"),
        (("--donate", "7"), "no positional argument 7 is given"),
        (("--donate", "2", "-p", "closed({2: 1.0})"), "--donate has 2, but step has 2 positional"),
        (("--tuple-args", "--to", "stablehlo"), "--tuple-args applies to hlo and hlo-proto"),
        (("--in-parts", "P(2)", "--to", "python"), "--in-parts applies to stablehlo, hlo, hlo-"),
        (("--return-shape", "--to", "dot"), "--return-shape applies to stablehlo, hlo, hlo-proto"),
    ],
)
def test_a_wrong_option_of_xla_computation_is_a_one_line_error(cli, steps, options, message):
    result = cli(*ON_STEP, "--to", "hlo", *options)
    assert result.code == 2 and result.out == ""
    assert result.lines[0].startswith(f"error: {message}")


# --- named axes and meshes ------------------------------------------------------------------------


def test_a_function_is_traced_under_named_axes(cli, steps, folder):
    total = ("steps.py:total", "--args", "f32[3]", "--axis-env", "i=4,j=2")
    assert "psum[axes=('i',)" in cli("show", *total).out
    assert "mhlo.num_replicas = 8" in cli("emit", *total, "--to", "stablehlo").out
    assert cli("opt", *total, "-o", "total.jaxpr").code == 0
    assert "reduce_sum" in cli("opt", *total, "-p", "batch(axis_size=4, axis_name='i')").out
    for command in ("run", "profile", "memory --compiled", "emit --to hlo-optimized"):
        result = cli(*command.split(), "total.jaxpr")
        assert result.code == 2 and " free named axes " in result.lines[0], command


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("show", "steps.py:total", "--axis-env", "i="), "invalid value for '--axis-env': 'i='"),
        (("run", "steps.py:total", "--axis-env", "i=2"), "no such option: --axis-env"),
        (
            (
                "opt",
                "steps.py:total",
                "--axis-env",
                "i=2",
                "-p",
                "batch(axis_size=3, axis_name='i')",
            ),
            "--axis-env has axis 'i' of size 2, but a pass binds it with size 3",
        ),
    ],
)
def test_wrong_named_axes_are_a_one_line_error(cli, steps, command, message):
    result = cli(*command, "--args", "f32[3]")
    assert result.code == 2 and result.lines[0].startswith(f"error: {message}")


@pytest.mark.parametrize("size", [2, 64])
@pytest.mark.parametrize("to", ["stablehlo", "hlo", "exported"])
def test_a_program_is_lowered_for_its_mesh_even_without_arguments_on_it(cli, steps, to, size):
    out = ("-o", "split.out") if to == "exported" else ()
    args = ("--args", "f32[64,4], f32[4,4]", "--mesh", f"x={size}")
    result = cli("emit", "steps.py:split", *args, "--to", to, *out)
    assert result.code == 0, result.err
    if to == "stablehlo":
        assert f"mhlo.num_partitions = {size}" in result.out


def test_an_absent_tpu_is_compiled_for_with_its_library(cli, steps):
    pytest.importorskip("libtpu", reason="needs the package libtpu")
    command = ("emit", "steps.py:split", "--args", "f32[8,8], f32[8,8]", "--mesh", "x=2")
    result = cli(*command, "--to", "hlo-optimized", "--backend", "tpu:v5e:2x2")
    assert result.code == 0 and "T(8,128)" in result.out and "num_partitions=2" in result.out


def test_json_has_the_text_or_the_file(cli, folder):
    shown = json.loads(cli("emit", "functions.py:double", "--to", "hlo", "--json").out)
    (program,) = shown["programs"]
    assert shown["format"] == "hlo" and program["text"].startswith("HloModule")
    found = cli("emit", "functions.py:double", "-o", "d.py", "--json")
    (program,) = json.loads(found.out)["programs"]
    size = (folder / "d.py").stat().st_size
    assert program == {"name": "double", "path": "d.py", "bytes": size}
    assert "wrote d.py, " in found.err
    assert cli("emit", "functions.py:double", "--to", "exported", "--json").code == 2
    assert cli("emit", "functions.py:double", "--to", "hlo", "-o", "-", "--json").code == 2
