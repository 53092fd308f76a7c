"""`jaxprtool vmap`: the line about the mapped arguments, the program, its file, and mistakes."""

import json
import os
import re
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

import jaxprtool
from jaxprtool.render.documents import SCHEMA
from tests.share import on_one_release

LANES = """
    import jax, jax.numpy as jnp, jaxprtool
    from jax.experimental import io_callback

    @jaxprtool.example({"w": "f32[3,4]", "b": "f32[4]"}, "f32[3]")
    def layer(params, x):
        return jnp.tanh(x @ params["w"] + params["b"])

    @jaxprtool.example("f32[3]", "static(2)", "f32[4]")
    def power(x, n, y):
        return x ** n, y.sum()

    @jaxprtool.example("f32[3]")
    def centred(x):
        return x - jax.lax.pmean(x, "rows")

    @jaxprtool.example("ones(f32[2])", "ones(f32[2])", "key(0)")
    def values(w, x, key):
        return w * x + jax.random.normal(key)

    @jaxprtool.example("f32[2]")
    def ordered(x):
        io_callback(print, None, x, ordered=True)
        return x
"""


@pytest.fixture
def lanes(folder):
    (folder / "lanes.py").write_text(textwrap.dedent(LANES))
    return folder


@pytest.fixture
def cli(lanes, cli):
    return cli


LAYER = ["vmap", "lanes.py:layer", "--in-axes", "(None, 0)", "--axis-size", "5"]


# --- output ---------------------------------------------------------------------------------------


def test_a_line_describes_the_mapping_before_the_program(cli):
    result = cli(*LAYER)
    assert (result.code, result.lines) == (0, [])
    head, program = result.out.split("\n\n", 1)
    assert re.fullmatch(r"5 batch elements: x at axis 0, params unmapped; 3 -> \d equations", head)
    assert program.startswith("{ lambda ; a:f32[4] b:f32[3,4] c:f32[5,3]. let\n")
    assert program == cli("show", "lanes.py:layer", "-p", "batch((None, 0), axis_size=5)").out


@pytest.mark.parametrize(
    "options, head",
    [
        (["lanes.py:layer"], "4 batch elements: params, x at axis 0; "),
        (
            ["lanes.py:layer", "--in-axes", "-1"],
            "4 batch elements: params['b'], x at axis 1, params['w'] at axis 2; ",
        ),
        (
            ["lanes.py:layer", "--in-axes", "({'w': None, 'b': 1}, 0)"],
            "4 batch elements: x at axis 0, params['b'] at axis 1, params['w'] unmapped; ",
        ),
        (["lanes.py:layer", "--in-axes", "None"], "4 batch elements: params, x unmapped; 3 -> "),
        (
            ["lanes.py:power", "--in-axes", "(0, None)"],
            "4 batch elements: x at axis 0, y unmapped; ",
        ),
        (
            ["lanes.py:layer", "--chunk", "3"],
            "4 batch elements, 3 at a time: params, x at axis 0; ",
        ),
        (
            ["lanes.py:centred", "--axis-name", "rows"],
            "4 batch elements of axis 'rows': x at axis 0; ",
        ),
        (
            ["functions.py:double", "--args", "x=f32[3]"],
            "4 batch elements: x at axis 0; 1 -> 1 equations",
        ),
    ],
)
def test_the_mapping_is_described_in_one_line(cli, options, head):
    result = cli("vmap", *options, "--axis-size", "4")
    assert result.code == 0, result.err
    assert result.out.startswith(head)


def test_results_have_their_axis_at_out_axes(cli):
    document = json.loads(cli(*LAYER, "--out-axes", "1", "--json").out)
    assert document["programs"][0]["outputs"][0]["type"] == "f32[4,5]"
    out = cli(
        "vmap", "lanes.py:layer", "--in-axes", "None", "--out-axes", "None", "--axis-size", "5"
    )
    assert out.out.splitlines()[0].endswith("3 -> 3 equations")


def test_the_json_document(cli):
    document = json.loads(cli(*LAYER, "--axis-name", "rows", "--chunk", "2", "--json").out)
    programs = document.pop("programs")
    assert document == {
        "schema": SCHEMA,
        "axis_size": 5,
        "axis_name": "rows",
        "chunk": 2,
        "arguments": [
            {"name": "params['b']", "axis": None},
            {"name": "params['w']", "axis": None},
            {"name": "x", "axis": 0},
        ],
        "equations_before": 3,
        "equations_after": document["equations_after"],
    }
    assert [program["name"] for program in programs] == ["layer"]


def test_results_without_an_axis_are_summed(cli):
    shown = cli(*LAYER, "--out-axes", "None", "--sum-match")
    assert shown.code == 0 and "reduce_sum[axes=(0,)" in shown.out


def test_passes_run_afterwards_and_are_not_counted(cli):
    once = cli(*LAYER).out.splitlines()[0]
    result = cli(*LAYER, "-p", "dce, batch(axis_size=2)")
    assert result.out.splitlines()[0] == once
    assert "f32[2,5,3]" in result.out


def test_collectives_over_the_axis_become_operations_on_it(cli):
    result = cli("vmap", "lanes.py:centred", "--axis-size", "4", "--axis-name", "rows")
    assert "reduce_sum[axes=(0,)" in result.out and "rows" not in result.out.split("\n\n", 1)[1]


# --- files ----------------------------------------------------------------------------------------

XS = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
PARAMS = {"w": np.ones((3, 4), np.float32), "b": np.arange(4, dtype=np.float32)}


def expected():
    return np.tanh(XS @ PARAMS["w"] + PARAMS["b"])


def test_a_program_is_written_as_a_file_that_other_commands_take(cli, lanes):
    result = cli(*LAYER, "-o", "five.jaxpr")
    assert (result.code, result.lines) == (0, [])
    assert result.out == cli(*LAYER).out.partition("\n")[0] + "\n"
    np.testing.assert_allclose(jaxprtool.read("five.jaxpr")(PARAMS, XS), expected(), rtol=1e-6)
    np.save(lanes / "xs.npy", XS)
    args = "{'w': ones(f32[3,4]), 'b': arange(4.0)}, load('xs.npy')"
    ran = cli("run", "five.jaxpr", "--args", args, "--save", "out.npz")
    assert (ran.code, ran.lines) == (0, [])
    np.testing.assert_allclose(np.load("out.npz")["result"], expected(), rtol=1e-6)
    again = cli("vmap", "five.jaxpr", "--axis-size", "2", "--in-axes", "(None, 1)")
    assert again.out.startswith("2 batch elements: x at axis 1, params unmapped; ")


def test_a_name_that_ends_in_py_is_written_as_python(cli, lanes):
    assert cli(*LAYER, "-o", "five.py").code == 0
    assert "import jax" in (lanes / "five.py").read_text()
    result = cli("show", "five.py:layer", "--args", "{'w': f32[3,4], 'b': f32[4]}, f32[5,3]")
    assert "f32[5,4] = tanh" in result.out, result.err


def test_only_the_program_goes_to_stdout(cli):
    result = cli(*LAYER, "-o", "-")
    assert result.out.startswith("jaxprtool 2\n") and "5 batch elements" not in result.out


def test_a_folder_gets_a_file_for_each_program(cli, lanes):
    assert cli(*LAYER, "-o", "out/", "-p", "unzip(key_args=None)").code == 0
    assert sorted(os.listdir(lanes / "out")) == ["apply.jaxpr", "init.jaxpr"]


# --- batch and tile in the pipelines of other commands ------------------------------------------


@pytest.mark.parametrize("command", ["show", "opt", "run", "emit"])
@pytest.mark.parametrize("passes", ["batch(axis_size=4, axis_name='rows')", "tile(4, 'rows')"])
def test_a_pipeline_binds_the_axes_that_a_function_is_traced_with(cli, command, passes):
    more = ["--to", "stablehlo"] if command == "emit" else []
    result = cli(command, "lanes.py:centred", "-p", f"dce, {passes}", *more)
    assert result.code == 0, result.err
    unbound = cli(command, "lanes.py:centred", *more)
    assert unbound.code == 3 and "unbound axis name" in unbound.err
    assert unbound.lines[-1].startswith("hint: bind it with `jaxprtool vmap --axis-name NAME`")


@pytest.mark.proof
def test_run_keeps_values_that_still_fit(cli):
    result = cli(
        *("run", "lanes.py:values", "-p", "batch(in_axes=(None, 0, None), axis_size=3)"),
        *("--save", "out.npz", "--json"),
    )
    assert result.code == 0, result.err
    assert result.lines == [
        "note: x filled with random values (--seed 0)",
        "note: the value given for x does not fit after the passes",
    ]
    assert json.loads(result.out)["random"] == ["x"]
    saved, key = np.load("out.npz")["result"], jax.random.key(0)
    assert saved.shape == (3, 2) and len(np.unique(saved - jax.random.normal(key))) == 6


def test_run_reports_values_it_cannot_use(cli):
    result = cli("run", "lanes.py:values", "-p", "batch(axis_size=3)")
    assert result.lines == [
        "note: w, x, key filled with random values (--seed 0)",
        "note: the values given for w, x, key do not fit after the passes",
    ]
    assert "result: f32[3,2]" in result.out


# --- mistakes ---------------------------------------------------------------------------------

MISTAKES = {
    "no size": (["vmap", "lanes.py:layer"], "missing option '--axis-size'"),
    "a size that cannot be": ([*LAYER[:-1], "-2"], "invalid value for '--axis-size'"),
    "a name for axes": ([*LAYER, "--in-axes", "first"], "the name 'first' is not allowed in --in"),
    "a call for axes": ([*LAYER, "--out-axes", "f()"], "a call is not allowed in --out-axes"),
    "a bracket left open": ([*LAYER, "--in-axes", "(None, 0"], "'(' in --in-axes is not closed"),
    "nothing": ([*LAYER, "--in-axes", ""], "--in-axes takes one value, not ''"),
    "a tuple without parentheses": ([*LAYER, "--in-axes", "None, 0"], "--in-axes takes one value"),
    "axes by name": ([*LAYER, "--in-axes", "x=0"], "--in-axes takes one value, not 'x=0'"),
    "a float": ([*LAYER, "--in-axes", "0.5"], "vmap in_axes must be an int, None, or a tuple"),
    "a string": ([*LAYER, "--in-axes", "(None, 'x')"], "vmap in_axes must be an int, None, or ("),
    "too many axes": ([*LAYER, "--in-axes", "(None, 0, 0)"], "vmap in_axes must be an int, None"),
    "an axis too far": (
        [*LAYER, "--in-axes", "(None, 2)"],
        "in_axes has 2 for x, but its mapped axis is from -2 to 1",
    ),
    "no such key": ([*LAYER, "--in-axes", "({'v': 0}, 0)"], "vmap in_axes specification must be a"),
    "a result's axis too far": ([*LAYER, "--out-axes", "2"], "axis 2 is out of bounds"),
    "a mapped result unmapped": ([*LAYER, "--out-axes", "None"], "at vmap out_axes"),
    "two axes for one result": ([*LAYER, "--out-axes", "(0, 0)"], "vmap out_axes specification"),
    "no lanes at a time": ([*LAYER, "--chunk", "0"], "invalid value for '--chunk'"),
    "a collective in chunks": (
        ["vmap", "lanes.py:centred", "--axis-size", "8", "--axis-name", "rows", "--chunk", "4"],
        "psum at ",
    ),
    "lanes spread and in chunks": (
        [*LAYER, "--spmd-axis-name", "data", "--chunk", "2"],
        "chunk and spmd_axis_name cannot be combined",
    ),
    "an ordered effect": (["vmap", "lanes.py:ordered", "--axis-size", "2"], "io_callback at "),
    "an unknown pass": ([*LAYER, "-p", "dcf"], "unknown pass 'dcf'"),
    "another format": (
        [*LAYER, "-o", "x.mlir"],
        "vmap writes .jaxpr and .py files, but -o names 'x.mlir'",
    ),
    "two documents": ([*LAYER, "-o", "-", "--json"], "--json and -o - cannot both write to stdout"),
    "a file for two programs": (
        [*LAYER, "-o", "two.py", "-p", "unzip(key_args=None)"],
        "'two.py' takes one program",
    ),
    "a place that is not there": ([*LAYER, "-o", "no/where.py"], "cannot write 'no/where.py'"),
}


@pytest.mark.parametrize("command, message", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_a_one_line_error_and_nothing_is_written(cli, lanes, command, message):
    before = set(os.listdir(lanes))
    result = cli(*command)
    assert result.code == 2, result
    assert not result.result
    assert result.lines[0].startswith(f"error: {message}"), result.err
    assert all(line.startswith("hint: ") for line in result.lines[1:]) and len(result.lines) <= 2
    assert set(os.listdir(lanes)) - before <= {"__pycache__"}


@on_one_release
def test_a_process_maps_a_piped_program(lanes):
    command = f"{sys.executable} -m jaxprtool"
    line = f"{command} opt lanes.py:layer -o - | {command} vmap - --axis-size 3 --chunk 2"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("3 batch elements, 2 at a time: params, x at axis 0; 3 -> ")
