"""JAX is for others as it was: after the import of every public name, and after every command."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def printed(code: str, **environment: str) -> list[str]:
    """What a new process prints, as JSON, whose code has `jax_state`, `caches` and `changed`."""
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


def test_importing_every_public_name_changes_nothing_in_jax():
    code = """
before, filled = jax_state(), caches()
import jaxprtool, jaxprtool.extend
for module in (jaxprtool, jaxprtool.extend):
    for name in module.__all__:
        getattr(module, name)
print(json.dumps(changed(before, jax_state()) + changed(filled, caches())))
"""
    assert printed(code) == []


def test_a_change_is_told():
    """Of a function, a row, a switch, and a row that is added for a primitive of JAX's."""
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
    told = "\n".join(printed(code))
    for part in ("core.check_jaxpr was", "_lowerings[jit] was", "primitive_transposes[jit] has"):
        assert part in told
    assert "configuration.jax_enable_x64 was False" in told
