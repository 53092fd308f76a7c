"""JAX is unchanged after the import of every public name, and after every command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def printed(code: str, **environment: str) -> list[str]:
    """Return the JSON output of a new process. Its code has `jax_state`, `caches`, `changed`."""
    start = "import json, jax, jax.numpy\nfrom tests.jax_state import jax_state, caches, changed\n"
    run = subprocess.run(
        [sys.executable, "-c", start + code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.usefixtures("processes")
def test_importing_every_public_name_does_not_change_jax():
    code = """
before, filled = jax_state(), caches()
import jaxprtool, jaxprtool.extend
for module in (jaxprtool, jaxprtool.extend):
    for name in module.__all__:
        getattr(module, name)
print(json.dumps(changed(before, jax_state()) + changed(filled, caches())))
"""
    assert printed(code) == []


FUNCTIONS = """
import jax, jax.numpy as jnp, jaxprtool

@jaxprtool.example("f32[3]")
def double(x):
    return jnp.sin(x).sum() * 2

@jaxprtool.example("key<fry>[]", "f32[3]")
def sown(key, x):
    return x * jaxprtool.variable(jax.random.normal(key, (3,)), name="w")

@jaxprtool.example("f32[3,3]")
def layers(x):
    for _ in range(8):
        x = jnp.tanh(x @ x.T) @ x
    return x
"""

#: Each command, except the interactive ones.
COMMANDS = {
    "show": "f.py:double",
    "cost": "f.py:double",
    "source": "f.py:double",
    "memory": "f.py:double",
    "residuals": "f.py:double",
    "why": "f.py:double result",
    "report": "f.py:double -o report.html",
    "opt": "f.py:double -p -O3 --verify",
    "diff": "f.py:double f.py:layers",
    "run": "f.py:double --x64",
    "nans": "f.py:double",
    "watch": "f.py:double",
    "compare": "f.py:double f.py:double",
    "bench": "f.py:double --repeat 7",
    "reduce": "f.py:double --check 'grep -q sin {}' -o small.jaxpr",
    "emit": "f.py:layers -p outline(equations=2) --to hlo",
    "unzip": "f.py:sown",
    "vmap": "f.py:double --axis-size 4",
    "outline": "f.py:layers",
    "shapecheck": "f.py:layers f32[n,n] f32[n,n]",
    "passes": "",
    "explain": "sin",
    "backends": "",
}


@pytest.mark.usefixtures("processes")
def test_no_command_changes_jax(tmp_path):
    (tmp_path / "f.py").write_text(FUNCTIONS)
    code = f"""
import contextlib, io, os, shlex
import jaxprtool
from jaxprtool.cli.main import main
os.chdir({str(tmp_path)!r})
jax.jit(jax.numpy.sin)(1.0)
outcomes = {{}}
for name, arguments in {COMMANDS!r}.items():
    before = jax_state()
    with contextlib.redirect_stdout(io.StringIO()):
        ended = main([name, *shlex.split(arguments)])
    outcomes[name] = [ended, changed(before, jax_state())]
print(json.dumps([outcomes]))
"""
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    (outcomes,) = printed(code, **environment)
    different = {"diff"}  # which exits with 1 for different programs
    assert outcomes == {name: [int(name in different), []] for name in COMMANDS}


@pytest.mark.usefixtures("processes")
def test_changes_are_detected():
    """Of a function, a row, the config, and a row that is added for a primitive of JAX."""
    code = """
from jax._src import core, pjit
from jax.interpreters import ad, mlir
before = jax_state()
core.check_jaxpr = print
mlir.register_lowering(pjit.jit_p, print)
ad.primitive_transposes[pjit.jit_p] = print
jax.config.update("jax_enable_x64", True)
print(json.dumps(changed(before, jax_state())))
"""
    outcomes = "\n".join(printed(code))
    for part in ("core.check_jaxpr was", "_lowerings[jit] was", "primitive_transposes[jit] has"):
        assert part in outcomes
    assert "configuration.jax_enable_x64 was False" in outcomes
