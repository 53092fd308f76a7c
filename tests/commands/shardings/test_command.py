"""`jaxprtool shardings` on the command line."""

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest

from jaxprtool.ir.source_text import Place
from tests.share import on_one_release

MODEL = """
    import jax
    import jax.numpy as jnp
    from jax.lax import with_sharding_constraint
    from jax.sharding import PartitionSpec as P

    def step(weights, x):
        hidden = jnp.tanh(x @ weights)
        whole = with_sharding_constraint(hidden, P())
        return with_sharding_constraint(jnp.exp(whole), P("data")), x.sum()

    def alone(x):
        return x * 2

    def partial(a, b, c):
        return jnp.einsum("bf,f->b", a, b, out_sharding=P(None, unreduced={"x"})), c + c

    def grouped(x, kernel):
        x = jnp.tanh(x) * 2
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", feature_group_count=4)

    def summed(x):
        def body(x):
            return jax.lax.psum(x, "data")
        return jax.shard_map(body, in_specs=P("data"), out_specs=P())(x)
"""
ARGS = "--args", "f32[64,64], f32[256,64]"
MESH = "--mesh", "data=8"
STEP = "shardings", "sharded.py:step", *ARGS, *MESH, "--in-specs", "(P(), P('data'))"


@pytest.fixture(autouse=True)
def model(folder):
    (folder / "sharded.py").write_text(textwrap.dedent(MODEL))
    return folder


@pytest.mark.proof
def test_collectives_have_their_lines_and_the_specs_that_cause_them(cli):
    found = cli(*STEP)
    assert found.code == 0 and found.err == ""
    heading, *_ = found.out.splitlines()
    assert heading == "step: 8 devices (data=8), each sends 56.0 KiB a call"
    text = re.sub(r"\s+", " ", found.out)
    assert "added by the partitioner" in text and "asked for by the program" not in text
    assert "sharded.py:9" in text  # the constraint, not the tanh before it
    assert "all-gather along data, 64.0 KiB" in text
    assert "dot_general at sharded.py:8: P('data') → P() for sharding_constraint" in text
    assert re.search(r"8.0 KiB 64.0 KiB P\('data'\) argument x f32\[256,64\] in \[32,64\]", text)
    assert max(map(len, found.out.splitlines())) <= 80


def test_explicit_collectives_are_listed_separately(cli):
    found = cli("shardings", "sharded.py:summed", "--args", "f32[64@data]", *MESH)
    assert found.code == 0
    assert "asked for by the program" in found.out and "partitioner\n" not in found.out


@pytest.mark.proof
def test_json_has_the_contents_of_the_table(cli):
    found = json.loads(cli(*STEP, "--json").out)
    first = found["collectives"][0]
    assert {"kind", "axes", "bytes", "count", "place", "source"} <= first.keys()
    assert (first["kind"], first["axes"], first["bytes"]) == ("all-gather", ["data"], 65536)
    assert (first["count"], Place.from_json(first["place"]), first["source"]) == (
        1,
        "sharded.py:9",
        "partitioner",
    )
    assert found["devices"] == 8 and found["mesh"] == {"data": 8}
    (weights,) = (each for each in found["values"] if each["name"] == "weights")
    assert weights["spec"] == "P()" and weights["replicated"]
    assert weights["bytes"] == weights["bytes_per_device"] == 64 * 64 * 4


def test_an_unreduced_result_is_a_term_of_a_sum_on_each_device(cli):
    types = "f32[16,8@x], f32[8@x], f32[8]{R:y}"
    options = "shardings", "sharded.py:partial", "--args", types, "--mesh", "x=2,y=2"
    text = re.sub(r"\s+", " ", cli(*options).out)
    assert "P(None, unreduced={'x'}) result[0] f32[16], unreduced: each device holds" in text
    assert "a term of the sum along x" in text and "P(None, reduced={'y'}) result[1]" in text
    (value,) = (v for v in json.loads(cli(*options, "--json").out)["values"] if "[0]" in v["name"])
    assert value["unreduced"] == ["x"] and not value["replicated"] and value["copies"] == 2
    assert "result[0]" not in cli(*options, "--replicated").out
    assert "(0, 1) + (2, 3)" in cli(*options, "--picture", "result[0]").out


def test_what_every_device_computes_whole_has_its_line_and_its_share(cli):
    types = "f32[16,8,4,4], f32[8,2,3,3]"
    options = "shardings", "sharded.py:grouped", "--args", types, *MESH
    found = cli(*options, "--in-specs", "(P('data'), P())", "--out-specs", "P('data')")
    text = re.sub(r"\s+", " ", found.out)
    assert "73.7 kFLOP in matrix products on each device, 8 times its share" in text
    assert "computed by several devices alike" in text
    assert re.search(r"73.7 kFLOP 9.2 kFLOP sharded.py:\d+ conv_general_dilated: each of 8", text)
    assert "mul at sharded.py" in text and "P('data') → P() for conv_general_dilated" in text


@pytest.mark.proof
def test_only_replicated_values_are_shown_on_request(cli):
    found = cli(*STEP, "--replicated")
    assert found.code == 0
    assert "weights" in found.out and "argument x" not in found.out
    assert "all-gather" not in found.out


def test_a_picture_shows_the_parts_of_each_device(cli):
    found = cli(*STEP, "--picture", "x")
    assert found.code == 0 and "x f32[256,64] P('data')" in found.out
    for device in range(8):
        assert re.search(rf"{32 * device}:{32 * device + 32} │ {device} │", found.out)
    wrong = cli(*STEP, "--picture", "weihgts")
    assert wrong.code == 2 and "no value of step is named 'weihgts'" in wrong.err
    assert "did you mean 'weights'?" in wrong.err


def test_a_picture_cannot_be_combined_with_other_formats(cli):
    for option in ("--json", "--replicated"):
        found = cli(*STEP, "--picture", "x", option)
        assert found.code == 2 and not found.result
        assert found.err == "error: --picture cannot be combined with --json or --replicated\n"


@pytest.mark.proof
def test_times_are_those_of_an_interconnect_and_a_device(cli):
    found = cli(*STEP, "--bandwidth", "1GB/s", "--device", "h100")
    assert found.code == 0 and "57.3 µs" in found.out  # 56 KiB at a gigabyte per second
    assert "products at least" in found.out and "collectives at least" in found.out
    wrong = cli(*STEP, "--bandwidth", "nvlnk4")
    assert wrong.code == 2 and "did you mean 'nvlink4'?" in wrong.err


@pytest.mark.proof
def test_constraints_are_proposed_on_request(cli):
    found = cli(*STEP, "--propose")
    assert found.code == 0
    text = re.sub(r"\s+", " ", found.out)
    assert "sharded.py:9 with_sharding_constraint(…, P('data')) instead of" in text
    assert "constraints" not in json.loads(cli(*STEP, "--json").out)
    assert "avoidable: with_sharding_constraint(…, P('data')) instead of" in text
    (best, *_) = json.loads(cli(*STEP, "--propose", "--json").out)["constraints"]
    assert best["spec"] == "P('data')" and best["sent_bytes"] < 10


def test_a_single_device_function_is_refused(cli):
    found = cli("shardings", "sharded.py:alone", "--args", "f32[8]")
    assert found.code == 2 and not found.result
    assert found.err.startswith("error: alone is not partitioned: it is compiled for one device")
    assert found.err.count("\n") <= 3


def test_mistakes_in_the_mesh_are_one_line_errors(cli):
    few = cli(*STEP[:4], "--mesh", "data=512", "--in-specs", "(P(), None)")
    assert few.code == 2 and few.err.startswith("error: ") and "Traceback" not in few.err
    axis = cli(*STEP[:4], *MESH, "--in-specs", "(P(), P('dat'))")
    assert axis.code == 2 and "did you mean 'data'?" in axis.err


#: A module that does not set the number of devices, sets it, and sets it by an XLA flag.
MODULES = {
    "": 16,
    "import jax; jax.config.update('jax_num_cpu_devices', 4)": 4,
    "import os; os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'": 2,
}


@on_one_release
@pytest.mark.parametrize("start", MODULES)
def test_virtual_devices_are_created_unless_the_module_sets_their_number(model, start):
    count = MODULES[start]
    (model / "own.py").write_text(f"{start}\n{textwrap.dedent(MODEL)}")
    command = ["-m", "jaxprtool", "shardings", "own.py:step", *STEP[2:4], "--mesh", f"data={count}"]
    clean = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    made = subprocess.run(
        [sys.executable, *command, *STEP[6:], "--json"],
        capture_output=True, text=True, cwd=model, env=clean,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["devices"] == count


def test_an_absent_tpu_is_compiled_for_with_its_library(cli):
    pytest.importorskip("libtpu", reason="needs the package libtpu")
    found = cli(*STEP, "--backend", "tpu:v5e:2x4", "--json")
    assert found.code == 0, found.err
    document = json.loads(found.out)
    assert document["platform"] == "tpu" and document["devices"] == 8
    few = cli(*STEP, "--backend", "tpu:v5e:2x2")
    assert few.code == 2 and "runs on a mesh of 8 devices, but 'tpu:v5e:2x2' has 4" in few.err


def test_a_backend_needs_a_mesh_and_devices(cli):
    alone = cli("shardings", "sharded.py:alone", "--args", "f32[8]", "--backend", "cpu")
    assert alone.code == 2 and "alone names no mesh to compile for 'cpu'" in alone.err
    missing = cli(*STEP, "--backend", "cuda")
    assert missing.code == 2 and missing.err.count("\n") <= 3


@pytest.mark.proof
def test_a_program_file_is_partitioned_for_another_mesh(cli):
    made = cli("opt", *STEP[1:], "-p", "dce", "-o", "step.jaxpr")
    assert made.code == 0, made.err
    found = cli("shardings", "step.jaxpr", "--mesh", "data=2")
    assert found.code == 0, found.err
    assert found.out.startswith("step: 2 devices (data=2), each sends 32.0 KiB a call\n")


SCRIPT = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
weights = jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, P()))
batch = jax.device_put(jnp.ones((256, 64)), NamedSharding(mesh, P("data")))

@jax.jit
def step(weights, x):
    return weights - jax.grad(lambda w: jnp.tanh(x @ w).sum())(weights)

step(weights, batch)
"""


@on_one_release
def test_a_recorded_program_is_partitioned_like_its_arguments(cli, model):
    (model / "train.py").write_text(SCRIPT)
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "8"}
    made = subprocess.run(
        [sys.executable, "-m", "jaxprtool", "record", "train.py"],
        capture_output=True, text=True, cwd=model, env=env,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    found = json.loads(cli("shardings", "run/step", "--json").out)
    specs = {each["name"]: each["spec"] for each in found["values"]}
    assert specs["weights"] == "P()" and specs["x"] == "P('data')"
    (summed,) = found["collectives"]
    assert (summed["kind"], summed["axes"], summed["bytes"]) == (
        "all-reduce",
        ["data"],
        64 * 64 * 4,
    )
    assert Place.from_json(summed["place"]) == "train.py:11"
