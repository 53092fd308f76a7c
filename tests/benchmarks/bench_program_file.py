"""Compare writing and reading `.jaxpr` files with JAX's means.

Each program is written with `program_file_text` and read with `parse_program`, alternating with
`str(jaxpr)`, which only prints, and with the serialize and deserialize of `jax.export` of the same
program. Medians are compared. The export itself is timed once: it lowers the program, eliminates
dead code and makes the bytes, which serialize only puts into a container. The last two columns are
the bytes of the files. The parsed program must be equivalent to the original.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax import export
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxprtool import jaxcompat
from jaxprtool.formats.jaxpr.read import parse_program
from jaxprtool.formats.jaxpr.write import program_file_text
from jaxprtool.ir.equivalence import structural_difference
from jaxprtool.ir.program import Program
from tests.benchmarks.models import synthetic, transformer_gradient

COLUMNS = (
    *("program", "equations", "write", "read", "str", "serialize", "deserialize", "(export)"),
    *("kB", "export kB"),
)


def seconds(function: Callable[[], Any]) -> float:
    gc.collect()
    start = time.process_time()
    function()
    return time.process_time() - start


def medians(functions: Sequence[Callable[[], Any]], repeat: int) -> list[float]:
    """Return the median CPU time of each function, in seconds. The functions alternate."""
    times = [[seconds(function) for function in functions] for _ in range(repeat)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def as_program(jaxpr: Any) -> Program:
    arguments = [f"x{i}" for i in range(len(jaxpr.invars))]
    results = [f"y{i}" for i in range(len(jaxpr.outvars))]
    trees = jax.tree.structure((tuple(arguments), {})), jax.tree.structure(tuple(results))
    return Program("f", jaxpr, *trees, tuple(arguments), tuple(results))


def exported(program: Program) -> export.Exported:
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.in_avals]
    return export.export(jax.jit(jaxcompat.jaxpr_as_fun(program.jaxpr)))(*types)


def measure(program: Program, repeat: int) -> tuple[list[float], list[int]]:
    """Return median seconds, in the order of the columns, and the bytes of both files."""
    written = program_file_text(program)
    assert structural_difference(program, parse_program(written, "f.jaxpr")) is None
    jaxpr = jaxcompat.open_jaxpr(program.jaxpr)
    start = time.process_time()
    artifact = exported(program)
    taken = time.process_time() - start
    data = artifact.serialize()
    functions: list[Callable[[], Any]] = [
        lambda: program_file_text(program),
        lambda: parse_program(written, "f.jaxpr"),
        lambda: str(jaxpr),
        artifact.serialize,
        lambda: export.deserialize(data),
    ]
    return [*medians(functions, repeat), taken], [len(written.encode()), len(data)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max", type=int, default=100_000, help="equations of the largest program")
    options = parser.parse_args()
    table = Table(title=f"program files, medians in milliseconds (JAX {jax.__version__})")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "program" else "right")
    counts = [n for n in (10**3, 10**4, 3 * 10**4, 10**5) if n <= options.max]
    programs = [("transformer gradient", as_program(transformer_gradient()))]
    programs += [("synthetic", as_program(synthetic(n))) for n in counts]
    for name, program in programs:
        size = len(program.jaxpr.eqns)
        times, sizes = measure(program, max(3, min(15, 10**5 // size)))
        kilobytes = [f"{size / 1e3:,.0f}" for size in sizes]
        table.add_row(name, f"{size:,}", *[f"{time * 1e3:.1f}" for time in times], *kilobytes)
        table.add_row("", "ratio to write", *[f"{time / times[0]:.2f}" for time in times])
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
