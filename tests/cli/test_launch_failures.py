"""Failing processes end soon, together, with a one-line error, and leave no partial files."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.share import on_one_release

MODULE = """
import os
import resource
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.cpu import _lapack

ELEMENTS = 1 << 28  # 1 GiB


def note(name):
    with open(f"{name}{jax.process_index()}", "w") as file:
        file.write(str(os.getpid()))


def limit_memory():
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + ELEMENTS
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def iota(x, count):
    note("pid")
    return jax.lax.iota(jnp.float32, count) + x


def too_large(x):
    return iota(x, 1 << 44)


def limited_in_all(x):
    limit_memory()
    return iota(x, ELEMENTS)


def limited_in_one(x):
    if jax.process_index() == 1:
        limit_memory()
    return iota(x, ELEMENTS)


def unknown_target(x):
    note("pid")
    return jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct((), jnp.float32))(x)


def target_of_one(x):
    note("pid")
    if jax.process_index() == 0:
        _lapack.initialize()
        cholesky = _lapack.registrations()["lapack_spotrf_ffi"]
        jax.ffi.register_ffi_target("target_of_one", cholesky, platform="cpu")
    results = jax.ShapeDtypeStruct((1, 1), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    return jax.ffi.ffi_call("target_of_one", results)(x[None, None], uplo=np.uint8(ord("L")))


def disk_full(x):
    note("pid")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    return x * 2


def disk_full_in_one(x):
    return disk_full(x) if jax.process_index() else x * 2


def stop_while_saving():
    while not any(name.startswith(".jaxprtool-") for name in os.listdir()):
        time.sleep(0.001)
    note("saving")
    os.kill(os.getpid(), signal.SIGSTOP)


def stopped(x):
    note("pid")
    threading.Thread(target=stop_while_saving, daemon=True).start()
    return x * 2
"""

LAUNCHED = ("--repeat", "0", "--launch", "2")
ROWS = ("--mesh", "x=2", "--in-specs", "P('x')", "--out-specs", "P('x')")
SHARDED = ("--args", "normal(f32[8,100000], seed=1)", *ROWS, *LAUNCHED)

#: The time limit from the trace of a failing program to the end of all processes: five seconds, and
#: a margin for a busy machine.
SOON = 10


@pytest.fixture
def programs(folder, monkeypatch):
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)  # one device per process
    (folder / "failing.py").write_text(MODULE)
    return folder


def assert_ended_soon(folder):
    """Assert that the processes that wrote their numbers when they traced ended soon after."""
    files = list(folder.glob("pid*"))
    assert files and time.time() - max(file.stat().st_mtime for file in files) < SOON
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def assert_one_line(err, line):
    """Assert that one error is reported, followed by details at most."""
    errors = [text for text in err.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1 and line in errors[0], err
    assert "Traceback" not in err


@on_one_release
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("too_large", "too_large failed while it ran: RESOURCE_EXHAUSTED: Out of memory"),
        ("limited_in_one", "process 1: limited_in_one failed while it ran: RESOURCE_EXHAUSTED"),
        pytest.param(
            "limited_in_all",
            "limited_in_all failed while it ran: RESOURCE_EXHAUSTED",
            marks=pytest.mark.sweep,
        ),
        # Process 0 runs it without process 1, and must not save its results.
        ("target_of_one", "process 1: target_of_one cannot be compiled: NOT_FOUND: No FFI handler"),
        pytest.param(
            "unknown_target",
            "unknown_target cannot be compiled: NOT_FOUND: No FFI handler",
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_a_program_that_fails_to_compile_or_allocate_ends_all_processes(
    cli, programs, target, message
):
    result = cli("run", f"failing.py:{target}", "--args", "1.0", *LAUNCHED, "--save", "out.npz")
    assert result.code == 2
    assert_one_line(result.err, message)
    assert_ended_soon(programs)
    assert left(programs) == [] and "result" not in result.out


@on_one_release
def test_devices_that_do_not_start_are_a_one_line_error(cli, programs, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "no_such_platform")
    result = cli("run", "failing.py:disk_full", "--args", "1.0", *LAUNCHED)
    assert result.code == 2
    assert_one_line(result.err, "no_such_platform")
    assert "internal error" not in result.err


@on_one_release
@pytest.mark.parametrize(
    ("target", "path", "number"),
    [
        ("disk_full", "out", ""),
        ("disk_full_in_one", "out", " 1"),
        pytest.param("disk_full", "out.npz", " 0", marks=pytest.mark.sweep),
    ],
)
def test_a_full_disk_leaves_no_files_of_any_process(cli, programs, target, path, number):
    result = cli("run", f"failing.py:{target}", *SHARDED, "--save", path)
    assert result.code == 2
    assert_one_line(result.err, f"error: process{number}")
    assert_one_line(result.err, f": cannot write '{path}': File too large")
    assert_ended_soon(programs)
    assert left(programs) == []


@on_one_release
@pytest.mark.parametrize("path", ["out", "out.npz"])
def test_a_signal_during_save_leaves_no_files(programs, path):
    command = ["run", "failing.py:stopped", *SHARDED, "--save", path]
    with subprocess.Popen(
        [sys.executable, "-m", "jaxprtool", *command], stderr=subprocess.PIPE, text=True
    ) as run:
        end = time.monotonic() + 60
        while not any(programs.glob("saving*")) and time.monotonic() < end:
            time.sleep(0.05)
        assert left(programs)
        start = time.monotonic()
        run.send_signal(signal.SIGTERM)
        _, err = run.communicate(timeout=20)
    assert run.returncode == -signal.SIGTERM and time.monotonic() - start < SOON
    assert err == "error: the run was ended by signal 15 (SIGTERM)\n"
    assert_ended_soon(programs)
    assert left(programs) == []


def left(folder):
    """Return the names of result files, complete or not."""
    return sorted(n for n in os.listdir(folder) if n.startswith((".jaxprtool-", "out")))
