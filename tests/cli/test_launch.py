"""`run` in several processes: results equal those of one process, and all end together."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from jaxprtool.cli import launch
from tests.share import on_one_release

SAMPLES = Path(__file__).parents[2] / "samples"

TRAINING = f"""
import sys

import jax

sys.path.append({str(SAMPLES)!r})
import transformer


def train(key, tokens):
    params = transformer.init(key)
    momentum = jax.tree.map(lambda p: 0 * p, params)

    def step(state, _):
        *state, loss = transformer.train_step(*state, tokens * 7 % 61, learning_rate=0.1)
        return tuple(state), loss

    (params, _), losses = jax.lax.scan(step, (params, momentum), length=10)
    return losses, params["norm"]
"""

PROGRAMS = """
import os
import signal
import time

import jax
import jax.numpy as jnp


def differs(x):
    return jnp.sin(x) if jax.process_index() else jnp.cos(x)


def whole(x):
    return x * 2


def fails_in_one(x):
    if jax.process_index() == 1:
        raise ValueError("only here")
    return x


def called(action):
    def call(x):
        action()
        time.sleep(60)
        return x

    return lambda x: jax.pure_callback(call, jax.ShapeDtypeStruct((), jnp.float32), x)


def kill():
    if jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def note():
    with open(f"pid{jax.process_index()}", "w") as file:
        file.write(str(os.getpid()))


killed, sleeping = called(kill), called(note)
"""

TRAINED = ("training.py:train", "--args", "key(0), arange(i32[8,33])", "--mesh", "data=2")
BY_DATA = ("--in-specs", "(P(), P('data'))", "--out-specs", "P()")


@pytest.fixture
def programs(folder, monkeypatch):
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)  # one device per process
    (folder / "training.py").write_text(TRAINING)
    (folder / "programs.py").write_text(PROGRAMS)
    return folder


@pytest.mark.usefixtures("processes")
def test_ten_steps_in_two_processes_agree_with_one_process(cli, programs):
    alone = cli("run", *TRAINED, *BY_DATA, "--repeat", "0", "--save", "alone.npz")
    together = cli(
        *("run", *TRAINED, *BY_DATA, "--repeat", "0"), "--launch", "2", "--save", "together.npz"
    )
    assert (alone.code, together.code) == (0, 0), together.err
    assert "device       cpu:0, cpu:" in together.out
    assert together.out.count("first call") == 1 and "\n[1]" not in together.out
    with np.load("alone.npz") as one, np.load("together.npz") as two:
        assert set(one) == set(two) == {"result[0]", "result[1]"}
        for name in one:
            np.testing.assert_allclose(two[name], one[name], rtol=2e-5, atol=2e-6)
        assert one["result[0]"][9] < one["result[0]"][0]


@on_one_release
def test_processes_with_different_programs_end_with_an_error_about_the_difference(cli, programs):
    result = cli("run", "programs.py:differs", "--args", "1.0", "--launch", "2")
    assert result.code == 1
    assert "cos" in result.err and "sin" in result.err
    assert "processes 0 and 1 do not run the same program" in result.err


CONFIGURED = """
import jax

jax.config.update("jax_num_cpu_devices", 2)


def double(x):
    return x * 2
"""
SHARDED = ("--args", "f32[8@data]", "--repeat", "0", "--launch", "2")


@on_one_release
def test_a_module_may_set_the_devices_of_each_process(cli, programs):
    (programs / "configured.py").write_text(CONFIGURED)
    result = cli("run", "configured.py:double", *SHARDED, "--mesh", "data=4")
    assert result.code == 0, result.err
    assert len(re.findall(r"cpu:\d+", result.out)) == 4


@on_one_release
@pytest.mark.parametrize(
    ("target", "options", "code", "message"),
    [
        ("fails_in_one", (), 3, "error: process 1: fails_in_one raised ValueError: only here\n"),
        ("whole", ("--host-devices", "2"), 2, "mesh has 2 devices, but the 2 processes have 4\n"),
    ],
)
def test_the_failure_of_a_process_ends_the_others_soon(
    cli, programs, target, options, code, message
):
    start = time.monotonic()
    result = cli("run", f"programs.py:{target}", "--mesh", "data=2", *SHARDED, *options)
    assert result.code == code and message in result.err
    assert result.err.count("error: ") == 1 and time.monotonic() - start < 30  # JAX waits for 32
    assert not list(programs.glob("*.npz"))


@on_one_release
def test_a_file_has_all_shards_of_a_result(cli, programs):
    result = cli("run", "programs.py:whole", "--mesh", "data=2", *SHARDED, "--save", "out.npz")
    assert result.code == 0, result.err
    alone = cli("run", "programs.py:whole", "--args", "f32[8]", "--save", "alone.npz")
    assert alone.code == 0
    with np.load("out.npz") as together, np.load("alone.npz") as one:
        assert np.array_equal(together["result"], one["result"])


@on_one_release
def test_a_killed_process_ends_the_run_and_is_named(cli, programs):
    start = time.monotonic()
    result = cli("run", "programs.py:killed", "--args", "1.0", "--launch", "2", "--save", "out.npz")
    assert result.code == 137
    assert "error: process 1 was killed by signal 9 (SIGKILL)\nhint: " in result.err
    assert "memory" in result.err.splitlines()[-1]
    assert time.monotonic() - start < 40  # the functions sleep for a minute
    assert not list(programs.glob("*.npz"))


@on_one_release
def test_a_run_with_a_timeout_leaves_no_process(cli, programs):
    result = cli("run", "programs.py:sleeping", "--args", "1.0", "--launch", "2", "--timeout", "8")
    assert result.code == 124
    assert result.err.endswith("error: the run did not end within 8 s (--timeout)\n")
    assert_ended(programs)


SUMMED = """
import jax
from jax.sharding import PartitionSpec as P


@jax.shard_map(in_specs=P("x", "y"), out_specs=P(None, "y"))
def summed(v):
    print("traced")
    jax.debug.print("summed {}", v[0, 0])
    return jax.lax.psum(v, "x")
"""


def started_by_open_mpi(number, job):
    """Return the environment of one of two processes of an Open MPI job."""
    place = {"WORLD_SIZE": 2, "WORLD_RANK": number, "WORLD_LOCAL_RANK": number}
    return {
        **os.environ,
        **{f"OMPI_COMM_{name}": str(value) for name, value in place.items()},
        "OMPI_MCA_orte_hnp_uri": f"{job}.0;tcp://127.0.0.1:1",
        "JAX_NUM_CPU_DEVICES": "2",
    }


def unused_job():
    """Return the number of a job for which JAX computes a free port."""
    for job in range(os.getpid(), os.getpid() + 4096):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", 61440 + job % 4096))
            return job
    raise AssertionError("no port is free")


@on_one_release
def test_stdout_of_a_process_without_a_supervisor_is_one_document(programs):
    (programs / "sums.py").write_text(SUMMED)
    options = ("--args", "f32[4@x,2@y]", "--mesh", "x=2,y=2", "--repeat", "0", "--json")
    command = [sys.executable, "-m", "jaxprtool", "run", "sums.py:summed", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    job = unused_job()
    with (
        subprocess.Popen(command, env=started_by_open_mpi(0, job), **pipes) as one,
        subprocess.Popen(command, env=started_by_open_mpi(1, job), **pipes) as two,
    ):
        (out, err), (none, _) = (each.communicate(timeout=60) for each in (one, two))
    assert (one.returncode, two.returncode) == (0, 0), err
    assert json.loads(out)["name"] == "summed" and none == ""
    assert "[Gloo] Rank" in err and "summed " in err  # gloo must not write to stdout


def assert_ended(folder):
    """Assert that every process that has written its number is gone."""
    time.sleep(0.5)
    for file in folder.glob("pid*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


@on_one_release
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_an_interrupted_run_leaves_no_process(programs, number, code):
    command = ["run", "programs.py:sleeping", "--args", "1.0", "--launch", "2"]
    with subprocess.Popen(
        [sys.executable, "-m", "jaxprtool", *command],
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts its background jobs with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as run:
        end = time.monotonic() + 60
        while len(list(programs.glob("pid*"))) < 2 and time.monotonic() < end:
            time.sleep(0.1)
        run.send_signal(number)
        _, said = run.communicate(timeout=60)
    assert run.returncode == code and "Traceback" not in said
    assert len(list(programs.glob("pid*"))) == 2
    assert_ended(programs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--coordinator", "nowhere"),
            "--coordinator, --num-processes and --process-id go together",
        ),
        (
            ("--coordinator", "nowhere", "--num-processes", "2", "--process-id", "0"),
            "--coordinator takes HOST:PORT, not 'nowhere'",
        ),
        (
            ("--coordinator", "localhost:80", "--num-processes", "2", "--process-id", "2"),
            "--process-id is 2, but there are 2 processes",
        ),
        (
            ("--launch", "2", "--coordinator", "h:80", "--num-processes", "2", "--process-id", "0"),
            "--launch starts its own cluster: omit --coordinator",
        ),
    ],
)
def test_incompatible_options_are_a_one_line_error(cli, programs, options, message):
    result = cli("run", "programs.py:differs", "--args", "1.0", *options)
    assert result.code == 2 and message in result.err and len(result.err.splitlines()) <= 2


def test_a_process_that_exits_while_importing_jax_exits_as_usual(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.distributed", ModuleType("jax.distributed"))
    launch.leave_at_once(2)
    monkeypatch.delitem(sys.modules, "jax.distributed")
    launch.leave_at_once(2)
