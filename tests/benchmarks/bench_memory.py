"""The memory that `jaxprtool memory` says a program needs, beside what XLA says of it, compiled.

    python tests/benchmarks/bench_memory.py [--max N]

Of the benchmark models and the samples that need 100 kB or more: the sum of what `memory_analysis`
has of arguments, results and temporaries on the CPU, less what is aliased. Then the CPU seconds
that it takes to analyse programs of up to N equations.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxprtool import jaxcompat, memory, trace
from jaxprtool.ir.programs.program import Program
from tests.benchmarks import gradient_models, mapped_models
from tests.benchmarks.models import synthetic
from tests.programs.samples import sample_files, sample_programs

#: Programs of less are mostly what XLA rounds sizes up to.
LEAST = 100_000

#: XLA takes minutes and 20 GB for the gradients of these on a CPU.
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
    """What XLA says that a program needs."""
    args = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.in_avals]
    fun = jax.jit(jaxcompat.jaxpr_as_fun(program.jaxpr), **program.jit_keywords)
    told: Any = fun.lower(*args).compile().memory_analysis()
    sizes = told.argument_size_in_bytes, told.output_size_in_bytes, told.temp_size_in_bytes
    return sum(sizes) - told.alias_size_in_bytes


def seconds(size: int) -> float:
    closed = synthetic(size)
    gc.collect()
    gc.disable()  # as on the command line
    start = time.process_time()
    memory(closed)
    taken = time.process_time() - start
    gc.enable()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max", type=int, default=100_000, help="equations of the largest program")
    options = parser.parse_args()
    table = Table(title="bytes that a program needs, and ours to XLA's")
    for column in ("program", "XLA", "ours", "ratio"):
        table.add_column(column, justify="left" if column == "program" else "right")
    count = within = 0
    for name, program in programs():
        theirs, ours = compiled_bytes(program), memory(program).peak_bytes
        if theirs < LEAST:
            continue
        count, within = count + 1, within + (0.8 <= ours / theirs <= 1.2)
        table.add_row(name, f"{theirs:,}", f"{ours:,}", f"{ours / theirs:.2f}")
    Console().print(table, f"{within} of {count} within a fifth")
    for size in (10**3, 10**4, 10**5):
        if size <= options.max:
            print(f"{size:,} equations: {seconds(size):.2f} s")


if __name__ == "__main__":
    main()
