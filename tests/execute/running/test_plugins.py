"""Third-party PJRT plug-ins: their backends are used by name, and failures have a reason."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.execute.running import pjrt_plugins as written

ROOT = Path(__file__).parents[3]


@pytest.fixture
def commands(tmp_path):
    """Return a function that runs commands in one process with the plug-ins installed."""

    def run(*commands):
        code = "import sys, json\nfrom jaxprtool.cli.main import main\n"
        code += "for each in json.loads(sys.argv[1]): print('code', main(each), flush=True)"
        path = os.pathsep.join([str(tmp_path), str(ROOT)])
        unset = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
        env = {k: v for k, v in os.environ.items() if k not in unset} | {"PYTHONPATH": path}
        (tmp_path / "model.py").write_text("def double(x):\n    return x * 2\n")
        return subprocess.run(
            [sys.executable, "-c", code, json.dumps(commands)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=env,
            timeout=100,
        )

    return run


DOUBLE = ("model.py:double", "--args", "f32[3]")


@pytest.mark.usefixtures("processes")
def test_the_backend_of_a_plugin_is_used_by_its_name(tmp_path, commands):
    written.install(tmp_path, "dummy_pjrt", written.DUMMY)
    done = commands(
        ("show", *DOUBLE),
        ("run", *DOUBLE, "--backend", "dummy"),
        ("emit", *DOUBLE, "--to", "hlo-optimized", "--backend", "dummy"),
        ("emit", *DOUBLE, "--to", "stablehlo", "--backend", "dummy"),
        ("compare", *DOUBLE, "--backends", "cpu,dummy"),
        ("run", *DOUBLE, "--backend", "dumy"),
    )
    assert done.stdout.count("code 0") == 5 and done.stdout.endswith("code 2\n"), done
    assert "is_scheduled=true" in done.stdout and "module @jit_double" in done.stdout
    assert "dummy (1 device)" in done.stderr and "hint: did you mean 'dummy'?" in done.stderr


@pytest.mark.usefixtures("processes")
def test_backends_lists_plugins_and_the_reasons_of_failures(tmp_path, commands):
    written.install(tmp_path, "dummy_pjrt", written.DUMMY)
    written.install(tmp_path, "abacus_pjrt", written.NO_LIBRARY)
    written.install(tmp_path, "driverless_pjrt", written.NOT_INITIALIZED)
    written.install(tmp_path, "silent_pjrt", written.NO_DEVICE.format(quietly=True))
    done = commands(("backends", "--json"))
    document, _ = json.JSONDecoder().raw_decode(done.stdout)
    assert {"cpu", "dummy"} <= {each["platform"] for each in document["backends"]}
    assert {"module": "dummy_pjrt", "package": "dummy_pjrt", "version": "1.5"} in (
        document["plugins"]
    )
    failures = {each["name"]: each["reason"] for each in document["failures"]}
    assert failures == {
        "abacus_pjrt": "ImportError: libabacus.so: cannot open shared object file",
        "driverless_pjrt": "OSError: no driver",
        "silent": "no device answers",
    }
    table = commands(("backends",)).stdout
    assert "dummy_pjrt" in table
    assert "does not start" in table and "no device answers" in table
    assert done.stderr == ""


@pytest.mark.usefixtures("processes")
def test_a_plugin_that_stops_jax_is_named_with_its_reason(tmp_path, commands):
    written.install(tmp_path, "silent_pjrt", written.NO_DEVICE.format(quietly=False))
    done = commands(("backends", "--json"), ("run", *DOUBLE))
    document, _ = json.JSONDecoder().raw_decode(done.stdout)
    assert [each["platform"] for each in document["backends"]] == ["cpu"]
    assert document["failures"] == [{"name": "silent", "reason": "no device answers"}]


@pytest.mark.usefixtures("processes")
def test_a_plugin_that_breaks_jax_is_a_one_line_error(tmp_path, commands):
    written.install(tmp_path, "odd_pjrt", written.RAISES)
    done = commands(("backends",))
    assert done.stdout == "code 2\n"
    assert done.stderr.splitlines() == [
        "error: JAX cannot start: its plug-in odd_pjrt raised ValueError: written for another JAX",
        "hint: uninstall odd_pjrt",
    ]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("command", ["run", "emit --to hlo-optimized"])
def test_a_missing_backend_is_refused_without_waiting_for_it(command, commands):
    start = time.perf_counter()
    done = commands((*command.split(), *DOUBLE, "--backend", "rocm"))
    seconds = time.perf_counter() - start
    if "code 0" in done.stdout:
        pytest.skip("this machine has ROCm")
    assert done.stdout == "code 2\n" and "it has: " in done.stderr
    assert seconds < 30  # JAX waits longer for a device
