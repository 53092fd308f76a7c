"""No command starts a backend before it imports the module, which may set the number of devices."""

import subprocess
import sys

import pytest

from jaxprtool.cli.app import load_command
from jaxprtool.registry import command_info, commands
from tests.share import share

MODULE = """
import jax, jaxprtool

jax.config.update("jax_num_cpu_devices", 2)  # raises if a backend has started
two = jax.make_mesh((2,), ("x",))

@jaxprtool.example("f32[8]")
def total(v):
    return (v * v).sum()
"""

#: Runs command lines in order, each as if it were the first in its process.
RUNS = """
import contextlib, io, shlex, sys, traceback
import jax, jax.extend
import jaxprtool.commands.browse.app, jaxprtool.commands.browse.command
from jaxprtool.cli.main import main

jaxprtool.commands.browse.app.browse = print
jaxprtool.commands.browse.command._require_terminal = lambda target: None
for line in sys.argv[1:]:
    jax.extend.backend.clear_backends()
    jax.config.update("jax_num_cpu_devices", -1)
    for name in ("first", "second"):
        sys.modules.pop(name, None)
    if code := main(shlex.split(line)):
        print("exit code", code, "of", line, file=sys.stderr)
"""

#: The arguments after TARGET.
ARGUMENTS = {
    "compare": "second.py:total",
    "bench": "second.py:total --repeat 7",
    "diff": "second.py:total",
    "emit": "--to stablehlo",
    "reduce": "--check 'mismatch -p dce'",
    "report": "-o report.html",
    "shapecheck": "f32[n] f32[]",
    "shardings": "--mesh x=2 --args f32[8@x]",
    "unzip": "--known 0",
    "vmap": "--axis-size 4",
    "why": "result",
}

#: The options that make commands compile, for a backend.
COMPILING = {
    "diff": "--measure",
    "memory": "--compiled",
    "outline": "--compile",
    "report": "--measure",
    "source": "--measure",
    "unzip": "--run",
}

#: The exit codes of command lines that start so: a check fails, or the backend is no TPU.
CODES = {"reduce": 2, "kernels first.py:total  --backend": 2}

#: More command lines: file formats, devices, and options that start backends.
MORE = (
    *(
        f"emit first.py:total --to {name} -o first.{name}"
        for name in ("python", "jaxpr", "hlo", "hlo-optimized", "dot", "exported")
    ),
    "emit first.py:total --to hlo-optimized --backend cpu",
    "emit first.py:total --to exported --platforms cpu,cuda -o first.exported",
    "cost first.py:total --measure",
    "memory first.py:total --compiled",
    "run first.py:total --device 1",
    "run first.py:total --timeout 60",
    "compare first.py:total --backends cpu -p '' -p dce",
    "reduce first.py:total --check 'mismatch --backends cpu,cpu'",
)


def options_of(name):
    return {
        option for each in load_command(name, command_info(name)).params for option in each.opts
    }


def lines_of(name):
    """Return the command lines of a command: the default one, on a mesh, and on a backend."""
    line = f"{name} first.py:total {ARGUMENTS.get(name, '')}"
    options = {
        "--mesh": "--mesh x=2 --args f32[8@x]",
        "--backend": f"--backend cpu {COMPILING.get(name, '')}",
    }
    known = options_of(name)
    return [line, *(f"{line} {given}" for option, given in options.items() if option in known)]


LINES = (
    *(line for name in commands() if "target" in options_of(name) for line in lines_of(name)),
    *MORE,
)


@pytest.mark.proof
@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(share(LINES), id="share"),
        pytest.param(LINES, id="all", marks=pytest.mark.sweep),
    ],
)
def test_backends_start_only_after_the_import(tmp_path, lines):
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text(MODULE)
    command = [sys.executable, "-c", RUNS, *lines]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    codes = [line for line in ended.stderr.splitlines() if line.startswith("exit code")]
    expected = [
        f"exit code {code} of {line}"
        for line in lines
        for start, code in CODES.items()
        if line.startswith(start)
    ]
    assert ended.returncode == 0 and codes == expected, ended.stderr
