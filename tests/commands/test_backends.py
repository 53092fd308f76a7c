import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxprtool.registry import commands
from tests.cli.platforms import ON_DEVICES, OTHERS, WITHOUT_DEVICES, lines
from tests.share import HALF as RELEASE

#: Values of JAX_PLATFORMS with which JAX does not start on a machine that has only a CPU.
FAILING = ["cuda", "tpu", "gpu", "rocm", "nope", "CPU", " cpu", ",", "cuda,tpu", "nope,cpu", "é x"]

#: Values with which it starts. After `cpu` it fails once, and then uses the CPU.
STARTING, HALF = [None, "", "cpu", "cuda,cpu"], ["cpu,nope", "cpu,"]


def outcomes(values, chosen, **environment):
    """Return the exit code and the lines on stderr of each command under each value."""
    if any(device.platform != "cpu" for device in jax.devices()):
        pytest.skip("this machine has more than a CPU")
    unset = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
    done = subprocess.run(
        [sys.executable, "-m", "tests.cli.platforms", json.dumps(values), json.dumps(chosen)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={k: v for k, v in os.environ.items() if k not in unset} | environment,
    )
    return {
        (value, line): (code, out, errors.splitlines())
        for value, line, code, out, errors in json.loads(done.stdout)
    }


def require_one_line(value, line, code, errors):
    """Require one line about the backend that does not start, and a hint."""
    error, *hints = errors
    assert code == 2, (value, line, errors)
    assert error.startswith("error: ") and "JAX cannot start the backend '" in error, (line, errors)
    if not line.startswith("reduce"):
        (hint,) = hints
        assert hint.startswith(f"hint: JAX_PLATFORMS is set to '{value}' in the env"), (line, hint)


def test_backends_are_listed_with_their_devices(cli):
    result = cli("backends")
    assert result.code == 0 and result.err == ""
    default = result.out.splitlines()[2].split()
    assert default[:3] == [jax.devices()[0].platform, "(default)", str(len(jax.local_devices()))]


def test_backends_as_json(cli):
    found = json.loads(cli("backends", "--json").out)["backends"]
    assert [b["default"] for b in found].count(True) == 1
    (cpu,) = [b for b in found if b["platform"] == "cpu"]
    assert [d["id"] for d in cpu["devices"]] == [d.id for d in jax.local_devices(backend="cpu")]


def failures(document):
    return [failure["name"] for failure in json.loads(document)["failures"]]


#: A value of JAX_PLATFORMS for each half of the releases, and a line that needs a device.
ONE_LINE = (
    ("cuda", "run m.py:f --backend gpu"),
    ("CPU", "show on_import.py:f --args f32[3]"),
)


@pytest.mark.usefixtures("processes")
def test_a_platform_that_does_not_start_is_one_line():
    value, line = ONE_LINE[RELEASE]
    found = outcomes([value], [line, "backends --json"])
    require_one_line(value, line, *found[value, line][::2])
    assert ("did you mean 'cpu'?" in found[value, line][2][1]) == (value == "CPU")
    code, out, errors = found[value, "backends --json"]
    assert (code, failures(out), errors) == (0, [value], [])


#: All lines: those that need a device, and the others.
DEVICE, REST = lines(ON_DEVICES), [*lines(WITHOUT_DEVICES), *lines(OTHERS)]


@pytest.fixture(scope="module")
def usual():
    """The exit code of each line on a CPU."""
    found = outcomes(["cpu"], [*DEVICE, *REST])
    for (_, line), (code, _, errors) in found.items():
        assert code in (0, 1, 2) and "no such" not in "".join(errors), (line, errors)
    return {line: code for (_, line), (code, _, _) in found.items()}


@pytest.mark.sweep
def test_each_command_has_a_line():
    named = {line.split()[0] for line in [*DEVICE, *REST]}
    ours = {name for name, info in commands().items() if info.run.startswith("jaxprtool.")}
    # `browse` has no terminal here, and `upgrade` starts interpreters that it is given.
    assert named == ours - {"browse", "upgrade"}


@pytest.mark.sweep
@pytest.mark.parametrize("value", [*STARTING, *HALF, *FAILING])
def test_no_platform_makes_a_command_fail_in_another_way(value, usual):
    for (_, line), (code, out, errors) in outcomes([value], [*DEVICE, *REST]).items():
        if line == "backends --json":
            assert code == 0 and bool(failures(out)) == (value not in (None, "", "cpu"))
        elif value in STARTING or (value in HALF and code == usual[line]):
            assert code == usual[line], (line, errors)
        elif line in DEVICE:
            require_one_line(value, line, code, errors)
        elif line.startswith("record"):
            assert code == 1, errors
        else:
            assert code == usual[line], (line, errors)
