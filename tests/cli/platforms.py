"""Command lines under values of JAX_PLATFORMS, as a process of its own.

    python -m tests.cli.platforms VALUES LINES > results.json

The process imports JAX without starting it, and runs each command in a fork, so that hundreds of
runs take minutes. VALUES and LINES are JSON. It prints for each run the value, the line, the exit
code, stdout and stderr.
"""

import itertools
import json
import os
import sys
import tempfile
import textwrap
from pathlib import Path

#: Lines that need a device, and must fail without one.
ON_DEVICES = """
    show m.py:random
    show on_import.py:f --args f32[3]
    show m.py:f --mesh x=2
    diff m.py:random m.py:random
    cost m.py:f --measure
    cost m.py:f --compiled
    memory m.py:f --compiled
    profile m.py:f
    bench m.py:f
    run m.py:f
    run m.py:f --args 3.,4.
    run m.py:f --backend gpu
    run m.py:f --backend cpu
    run m.py:f --device 0
    run m.py:f --check nan
    run m.py:f --mesh x=1
    run m.py:constant
    run loss.jaxpr
    run m.py:f --launch 2
    nans m.py:f
    watch m.py:f
    compare m.py:f m.py:same
    compare m.py:f --backends cpu,gpu
    precision m.py:loss
    determinism m.py:f
    reduce m.py:infinite --check nan -o reduced.jaxpr
    opt m.py:constant -p pmap
    emit m.py:f --to hlo
    emit m.py:f --to stablehlo
    emit m.py:f --to hlo-optimized
    emit m.py:f --to hlo --backend gpu
    emit m.py:f --to exported -o exported.bin
    emit m.py:f --to dot --graph hlo
    unzip m.py:random
    shardings m.py:f --mesh x=2 --in-specs P('x'),P('x')
"""

#: Lines that only look at programs.
WITHOUT_DEVICES = """
    show m.py:f
    show m.py:constant
    show loss.jaxpr
    source m.py:loss
    diff m.py:f m.py:loss
    why m.py:loss x
    cost m.py:f
    kernels m.py:f
    memory m.py:f
    residuals m.py:loss
    outline m.py:loss
    report m.py:f -o report.html
    opt m.py:f -p dce
    emit m.py:f --to python
    emit m.py:f --to jaxpr
    emit m.py:f --to dot
    vmap m.py:f --axis-size 3
    shapecheck m.py:f f32[n],f32[n] f32[n]
    lint m.py:f
    explain dce
    skill
    check
"""

#: Lines with an ending of their own.
OTHERS = """
    backends
    backends --json
    run m.py:f --host-devices 2
    record script.py -o run --overwrite
    serve
"""

FILES = {
    "m.py": """
        import jax, jax.numpy as jnp, jaxprtool

        @jaxprtool.example("f32[3]", "f32[3]")
        def f(x, y):
            return jnp.sin(x) * y

        same = f

        @jaxprtool.example("f32[3]", "f32[3]")
        def loss(x, y):
            return f(x, y).sum()

        @jaxprtool.example("f32[1]")
        def constant(x):
            return x + jnp.array([1.0]) + jnp.arange(3.0)

        @jaxprtool.example("0.0")
        def infinite(x):
            return jnp.sin(x) / x

        @jaxprtool.example("key(0)", "f32[3]")
        def random(key, x):
            return jaxprtool.variable(jax.random.uniform(key, (3,)), name="w") * x
    """,
    "on_import.py": """
        import jax.numpy as jnp
        table = jnp.arange(3.0)
        def f(x): return x + table
    """,
    "script.py": "import jax\nprint(jax.devices())\n",
    "pyproject.toml": '[tool.jaxprtool.targets.f]\ntarget = "m.py:f"\nflops = "1 GFLOP"\n',
}


def lines(table: str) -> list[str]:
    """Return the command lines of a table."""
    return textwrap.dedent(table).strip().splitlines()


def run(line: str, value: str | None) -> tuple[int, str, str]:
    """Return the exit code and both outputs of a command in a fork."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        if not (pid := os.fork()):
            try:
                code = _run(line, value, out.fileno(), errors.fileno())
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            finally:
                os._exit(99)
        status = os.waitpid(pid, 0)[1]
        for file in (out, errors):
            file.seek(0)
        return os.waitstatus_to_exitcode(status), out.read().decode(), errors.read().decode()


def _run(line: str, value: str | None, out: int, errors: int) -> int:
    import jax

    from jaxprtool.cli.main import main

    os.dup2(out, 1)
    os.dup2(errors, 2)
    os.environ.pop("JAX_PLATFORMS", None)
    if value is not None:
        os.environ["JAX_PLATFORMS"] = value
    jax.config.update("jax_platforms", value)
    return main(line.split(" "))


def main() -> None:
    import jaxprtool.api.program  # noqa: F401  (what most commands need)

    values, chosen = map(json.loads, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, text in FILES.items():
            Path(name).write_text(textwrap.dedent(text))
        if "loss.jaxpr" in sys.argv[2]:
            run("opt m.py:loss -p dce -o loss.jaxpr", "cpu")
        pairs = itertools.product(values, chosen)
        print(json.dumps([[value, line, *run(line, value)] for value, line in pairs]))


if __name__ == "__main__":
    main()
