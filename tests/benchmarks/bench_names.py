"""Measure how long user variable names and source locations take in large programs.

    python tests/benchmarks/bench_names.py [--max N] [--rounds N]

One kind of program has as many source lines as equations (a generated module), the other has three
lines in a Python loop. Times are medians of CPU seconds, each with empty caches.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import linecache
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxprtool.ir.equations import equations
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.program import ProgramSignature, program_signature
from jaxprtool.render.terminal.listing import ShowOptions
from jaxprtool.render.terminal.tree import Reader

LOOP = """
from jax import lax

def fun(x):
    for _ in range({size} // 3):
        left = lax.sin(x)
        right = left * left
        x = left + right
    return x
"""


def module_of_lines(size: int) -> str:
    """Return the source of a module with a line for each of `size` equations."""
    lines = [f"    v{i + 1} = v{i} * v{i // 2}" for i in range(size)]
    return "\n".join(["def fun(v0):", *lines, f"    return v{size}", ""])


def traced(source: str, folder: str) -> ProgramSignature:
    """Return the program of `fun` in a module with this source."""
    path = Path(folder, f"module{len(source)}.py")
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return program_signature(jax.make_jaxpr(module.fun)(1.0))


def letters(about: ProgramSignature) -> object:
    return Reader(about)


def names(about: ProgramSignature) -> object:
    linecache.clearcache()
    return Reader(about, ShowOptions(names=True))


def places(about: ProgramSignature) -> object:
    frames = frames_now()
    return [frames.texts(eqn) for eqn in equations(about.jaxpr)]


def median(
    function: Callable[[ProgramSignature], Any], about: ProgramSignature, rounds: int
) -> float:
    """Return the median CPU time of a function, in seconds."""
    taken = []
    for _ in range(rounds):
        gc.collect()
        start = time.process_time()
        function(about)
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max", type=int, default=100_000, help="equations of the largest program")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    table = Table(title="CPU seconds (medians)")
    for name in ("program", "equations", "letters", "names", "places"):
        table.add_column(name, justify="left" if name == "program" else "right")
    with tempfile.TemporaryDirectory() as folder:
        for size in (n for n in (10**4, 10**5) if n <= options.max):
            for name, source in (
                ("a loop", LOOP.format(size=size)),
                ("a line each", module_of_lines(size)),
            ):
                about = traced(source, folder)
                figures = [median(f, about, options.rounds) for f in (letters, names, places)]
                table.add_row(name, f"{len(about.jaxpr.eqns):,}", *(f"{s:.3f}" for s in figures))
    Console().print(table)


if __name__ == "__main__":
    main()
