"""Compare the estimate of `jaxprtool memory` with the memory that XLA reports.

    python tests/benchmarks/bench_memory.py [--max N] [--gradients]

Measures the benchmark models, and the samples that need 100 kB or more. XLA's number is the sum of
arguments, results and temporaries in `memory_analysis` on the CPU, minus aliased bytes. The script
then measures the CPU seconds to analyze programs of up to N equations. With --gradients, it
measures the gradients of `memory_models` with and without `jax.checkpoint`, and prints the pairs
that XLA ranks at least a fifth apart and the estimate ranks the other way.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxprtool import jaxcompat, memory, trace
from jaxprtool.ir.program import Program
from tests.benchmarks import gradient_models, mapped_models
from tests.benchmarks.memory_models import cases
from tests.benchmarks.models import synthetic
from tests.programs.samples import sample_files, sample_programs

#: In smaller programs, XLA's rounding of buffer sizes dominates.
LEAST = 100_000

#: XLA needs minutes and 20 GB to compile the gradients of these for a CPU.
LARGE = "transformer, 48 layers", "RNN, 200 steps"


def programs() -> Iterator[tuple[str, Program]]:
    for name, (loss, args) in gradient_models.losses().items():
        yield name, trace(loss, *args)
        if name not in LARGE:
            yield f"{name}, gradient", trace(jax.value_and_grad(loss), *args)
    for name, (closed, args, _) in mapped_models.models().items():
        yield name, trace(jaxcompat.jaxpr_as_fun(closed), *args)
    for file in sample_files():
        for case in sample_programs(file):
            yield case.name, case.program()


def compiled_bytes(program: Program) -> int:
    """Return the bytes that XLA reports for a program."""
    args = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.in_avals]
    fun = jax.jit(jaxcompat.jaxpr_as_fun(program.jaxpr), **program.jit_keywords)
    stats: Any = fun.lower(*args).compile().memory_analysis()
    sizes = stats.argument_size_in_bytes, stats.output_size_in_bytes, stats.temp_size_in_bytes
    return sum(sizes) - stats.alias_size_in_bytes


def compared(named: Iterable[tuple[str, Program]]) -> dict[str, tuple[int, int]]:
    """Return and print XLA's bytes and ours for each program."""
    table = Table(title="bytes that a program needs, and ours to XLA's")
    for column in ("program", "XLA", "ours", "ratio"):
        table.add_column(column, justify="left" if column == "program" else "right")
    found = {}
    for name, program in named:
        theirs, ours = compiled_bytes(program), memory(program).peak_bytes
        if theirs >= LEAST:
            found[name] = theirs, ours
            table.add_row(name, f"{theirs:,}", f"{ours:,}", f"{ours / theirs:.2f}")
    within = sum(0.8 <= ours / theirs <= 1.2 for theirs, ours in found.values())
    Console().print(table, f"{within} of {len(found)} within a fifth")
    return found


def seconds(size: int) -> float:
    closed = synthetic(size)
    gc.collect()
    gc.disable()  # as the command line does
    start = time.process_time()
    memory(closed)
    taken = time.process_time() - start
    gc.enable()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max", type=int, default=100_000, help="equations of the largest program")
    parser.add_argument("--gradients", action="store_true", help="only the gradients")
    options = parser.parse_args()
    if options.gradients:
        found = compared((case.name, trace(case.function, *case.args)) for case in cases())
        pairs = [(a, b) for a in found.items() for b in found.items()]
        exchanged = [
            f"{one} and {other}"
            for (one, a), (other, b) in pairs
            if a[0] > 1.2 * b[0] and a[1] < b[1]
        ]
        Console().print(f"ranked the other way: {', '.join(exchanged) or 'none'}")
        return
    compared(programs())
    for size in (10**3, 10**4, 10**5):
        if size <= options.max:
            print(f"{size:,} equations: {seconds(size):.2f} s")


if __name__ == "__main__":
    main()
