"""Measure the time of `jaxprtool check`, without importing and tracing its targets.

    python tests/benchmarks/bench_check.py [--targets N] [--size N] [--rounds N]

Each target is a program of `--size` equations with budgets, a snapshot and `no`. The check is
measured with and without a budget of residuals, for which JAX also traces the gradient. Each
measurement runs in a new process, as from a shell. The table has the medians of CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

#: A module of functions that have many equations and differ from each other.
MODULE = """
import jax
import jax.numpy as jnp


def made(number, size):
    def f(w, x):
        for i in range(size // 4):
            x = x + jnp.sin((x @ w) * (i + number))
        return x.sum()

    return f, (jax.ShapeDtypeStruct((16, 16), "float32"),) * 2
"""

TARGET = """
[tool.jaxprtool.targets.target{number}]
target = "functions.py:made({number}, {size})"
flops = 0
peak-bytes = 0
equations = 0
no = ["sort", "f64"]
snapshot = true
"""

#: Prints the seconds of importing and tracing within a command line, and the total.
TIMED = """
import json, sys, time
start = time.process_time()
from jaxprtool.cli.main import main
import jax, jaxprtool.commands.check.config, jaxprtool.commands.check.checks, jaxprtool.api.program
from jaxprtool.cli.session import FunctionOptions
importing, tracing, trace = time.process_time() - start, 0.0, FunctionOptions.trace

def timed(*args, **kwargs):
    global tracing
    before = time.process_time()
    try:
        return trace(*args, **kwargs)
    finally:
        tracing += time.process_time() - before

FunctionOptions.trace = timed
code = main(sys.argv[1:])
whole = time.process_time() - start
print(json.dumps([code, importing, tracing, whole - importing - tracing]), file=sys.stderr)
"""


def run(folder: Path, *arguments: str) -> tuple[int, float, float, float]:
    """Return the exit code of the check, and the seconds to import, to trace, and for the rest."""
    command = [sys.executable, "-c", TIMED, "check", *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    code, *seconds = json.loads(ended.stderr.splitlines()[-1])
    return (code, *seconds)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", type=int, default=20)
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    table = Table("check", "exit code", "import, s", "trace, s", "check beyond it, s")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "functions.py").write_text(MODULE)
        for kind, more in {"budgets": "", "and residuals": "residual-bytes = 0\n"}.items():
            targets = (TARGET.format(number=i, size=asked.size) for i in range(asked.targets))
            text = "".join(each + more for each in targets)
            (folder / "pyproject.toml").write_text(text)
            for what, arguments in {"--update": ["--update"], "that passes": []}.items():
                found = [run(folder, *arguments) for _ in range(asked.rounds)]
                medians = [statistics.median(each) for each in list(zip(*found, strict=True))[1:]]
                codes = {each[0] for each in found}
                table.add_row(f"{kind}, {what}", str(codes), *(f"{each:.2f}" for each in medians))
    Console().print(f"{asked.targets} targets of {asked.size:,} equations", table)


if __name__ == "__main__":
    main()
