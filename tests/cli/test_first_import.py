"""A module may say how many devices it wants: no command starts a backend before it is imported."""

import subprocess
import sys

MODULE = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jaxprtool

two = jax.make_mesh((2,), ("x",))

@jaxprtool.example("f32[8]")
def total(v):
    return (v * v).sum()
"""

#: Runs command lines one after the other, each as if it were the first of its process.
RUNS = """
import shlex, sys
import jax.extend
from jaxprtool.cli.main import main

for line in sys.argv[1:]:
    jax.extend.backend.clear_backends()
    for name in ("first", "second"):
        sys.modules.pop(name, None)
    if code := main(shlex.split(line)):
        print("exit code", code, "of", line, file=sys.stderr)
"""

COMMANDS = (
    *(
        f"emit first.py:total --to {name} -o first.{name}"
        for name in ("python", "jaxpr", "stablehlo", "hlo", "hlo-optimized", "dot", "exported")
    ),
    "emit first.py:total --to hlo-optimized --backend cpu",
    "emit first.py:total --to exported --platforms cpu,cuda -o first.exported",
    *(
        f"{command} first.py:total --mesh x=2 --args f32[8@x]"
        for command in ("show", "opt", "cost", "memory", "run", "nans", "watch")
    ),
    *(f"{command} first.py:total --backend cpu" for command in ("run", "nans", "watch")),
    "run first.py:total --device 1",
    "outline first.py:total --compile --backend cpu",
    "unzip first.py:total --known 0 --run --backend cpu",
    "compare first.py:total second.py:total --args ones(f32[8])",
    "compare first.py:total --backends cpu -p '' -p dce",
    "diff first.py:total second.py:total --args ones(f32[8])",
    "reduce first.py:total --check 'mismatch --backends cpu,cpu'",
)


def test_backends_start_after_the_import(tmp_path):
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text(MODULE)
    command = [sys.executable, "-c", RUNS, *COMMANDS]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    codes = [line for line in ended.stderr.splitlines() if line.startswith("exit code")]
    assert ended.returncode == 0 and "Number of devices" not in ended.stderr, ended.stderr
    (code,) = codes  # a check that does not hold
    assert code.startswith("exit code 2 of reduce")
