"""Run every command on large programs: `python tests/benchmarks/bench_commands.py [--equations N]`.

The programs are a chain of elementwise equations, the gradient of a transformer, one with 3,000
arguments and results, one of 2,000 jits, and one of jits nested 100 deep. The first four are read
from files, the last is traced, as a file nests 80 jaxprs at most. Each command runs in a process of
its own. The table has its CPU seconds, and the microseconds an equation that it takes in addition
to starting and reading the program. A command ends after 120 CPU seconds.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial, reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

import jaxprtool
from jaxprtool.analysis.stats import count_equations
from tests.benchmarks.models import transformer_loss, transformer_shapes

ROOT = Path(__file__).parents[2]

#: The most CPU seconds of a command.
LONGEST = 120

#: The commands that compile nothing; FILE is the program, and OUT a new file.
COMMANDS = {
    "show": "show FILE",
    "show --full": "show FILE --full --names",
    "show page": "show FILE -o OUT.html",
    "source": "source FILE",
    "diff, same": "diff FILE FILE",
    "diff, -O1": "diff FILE -p -O1",
    "why": "why FILE result",
    "bounds": "bounds FILE",
    "cost": "cost FILE",
    "memory": "memory FILE",
    "lint": "lint FILE",
    "outline": "outline FILE",
    "opt -p dce": "opt FILE -p dce -o OUT.jaxpr",
    "opt -O1": "opt FILE -O1 -o OUT.jaxpr",
    "opt -O2": "opt FILE -O2 -o OUT.jaxpr",
    "vmap": "vmap FILE --axis-size 8",
    "emit python": "emit FILE -o OUT.py",
    "emit dot": "emit FILE --to dot -o OUT.dot",
    "emit explorer": "emit FILE --to model-explorer -o OUT.json",
    "emit stablehlo": "emit FILE --to stablehlo -o OUT.mlir",
    "residuals": "residuals FILE",
    "report": "report FILE -o OUT.html",
}

#: Those that compile, and run.
COMPILED = {
    "run": "run FILE",
    "emit optimized": "emit FILE --to hlo-optimized -o OUT.hlo",
    "memory --compiled": "memory FILE --compiled",
    "shardings": "shardings FILE",
    "profile": "profile FILE",
    "bench": "bench FILE",
    "nans": "nans FILE",
    "watch": "watch FILE",
    "compare": "compare FILE -p -O1",
    "determinism": "determinism FILE",
}

NESTED = """
import jax, jaxprtool
from jax import numpy as jnp

@jaxprtool.example("f32[8]")
def nested(x):
    function = lambda x: jnp.sin(x) * 2.0
    for i in range(100):
        function = jax.jit(lambda x, i=i, inner=function: inner(x) * (i + 1.0) + x)
    return jnp.sum(function(x))
"""


def chain(count: int) -> Callable[..., Any]:
    def step(x: Any, i: int) -> Any:
        return jnp.sin(x) if i % 2 else x * 1.5

    return lambda x: jnp.sum(reduce(step, range(count), x))


def wide(count: int, *arguments: Any) -> list[Any]:
    return [chain(max(count // len(arguments) - 1, 1))(x) for x in arguments]


def jits(count: int, calls: int = 2000) -> Callable[..., Any]:
    functions = [
        jax.jit(lambda x, i=i: reduce(lambda y, _: jnp.sin(y) + i, range(max(count, 2) // 2), x))
        for i in range(calls)
    ]
    return lambda x: jnp.sum(reduce(lambda y, function: function(y), functions, x))


def programs(count: int) -> dict[str, jaxprtool.Program]:
    """Return the programs by kind, each of about so many equations."""
    vector = jax.ShapeDtypeStruct((8,), "float32")
    layers = transformer_shapes(max(count // 182, 1))
    return {
        "chain": jaxprtool.trace(chain(count), vector),
        "transformer": jaxprtool.trace(jax.grad(transformer_loss), *layers),
        "wide": jaxprtool.trace(partial(wide, count), *[vector] * 3000),
        "jits": jaxprtool.trace(jits(count // 2000 - 1), vector),
    }


def cpu_seconds(command: list[str]) -> tuple[float, str]:
    """Return the CPU seconds of a command, and the last line it prints on stderr if it fails."""
    limit = (resource.RLIMIT_CPU, (LONGEST, LONGEST))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(*limit),
        env={**os.environ, "COLUMNS": "100"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode in (0, 1):  # a difference, or findings
        return seconds, ""
    said = done.stderr.strip().splitlines() or [""]
    fault = next((line for line in said if line.startswith("error")), said[-1])
    return seconds, f"more than {LONGEST} s" if done.returncode < 0 else fault


def measured(line: str, file: str, folder: str) -> tuple[float, str]:
    """Return the result of `cpu_seconds` for a command line of a table."""
    words = line.replace("FILE", file).replace("OUT", os.path.join(folder, "out")).split()
    return cpu_seconds([sys.executable, "-m", "jaxprtool", *words])


def rows(
    targets: Mapping[str, tuple[str, int]], commands: Mapping[str, str], folder: str
) -> list[tuple[str, ...]]:
    """Return a row of texts for each command: seconds, and microseconds an equation."""
    read = {}
    for kind, (file, _) in targets.items():
        code = f"import jaxprtool; jaxprtool.read({file!r})"
        if not file.endswith(".jaxpr"):
            path, _, name = file.rpartition(":")
            code = f"import runpy, jax; f = runpy.run_path({path!r})[{name!r}]; "
            code += "jax.make_jaxpr(f)(jax.ShapeDtypeStruct((8,), 'float32'))"
        read[kind] = cpu_seconds([sys.executable, "-c", code])[0]
    table = [("start and read", *(f"{read[kind]:.1f}" for kind in targets))]
    for name, line in commands.items():
        cells = []
        for kind, (file, count) in targets.items():
            seconds, fault = measured(line, file, folder)
            cells.append(fault or f"{seconds:.1f}, {(seconds - read[kind]) / count * 1e6:.0f}")
            print(f"{name:18} {kind:12} {cells[-1]}", file=sys.stderr, flush=True)
        table.append((name, *cells))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--equations", type=int, default=10_000)
    parser.add_argument("--only", default="", help="commands, separated by commas")
    parser.add_argument("--kinds", default="chain,transformer,wide,jits,nested")
    parser.add_argument("--compiled", action="store_true", help="those that compile")
    options = parser.parse_args()
    commands = COMPILED if options.compiled else COMMANDS
    if options.only:
        commands = {k: v for k, v in commands.items() if k in options.only.split(",")}
    with tempfile.TemporaryDirectory() as folder:
        targets: dict[str, tuple[str, int]] = {}
        for kind, program in programs(options.equations).items():
            if kind in options.kinds.split(","):
                file = os.path.join(folder, f"{kind}.jaxpr")
                jaxprtool.write(program, file)
                targets[kind] = file, count_equations(program)
        if "nested" in options.kinds.split(","):
            path = Path(folder, "nested.py")
            path.write_text(NESTED)
            targets["nested"] = f"{path}:nested", 303
        heads = [f"{kind}, {count:,}" for kind, (_, count) in targets.items()]
        title = f"CPU seconds; microseconds an equation (JAX {jax.__version__})"
        table = Table("command", *heads, title=title)
        for row in rows(targets, commands, folder):
            table.add_row(*row)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
