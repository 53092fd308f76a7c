"""Compare XLA's buffers at the memory peak with what `jaxprtool memory --compiled` reports.

    python tests/benchmarks/bench_compiled_memory.py [NAME …]

Measures the benchmark models, and the samples that need 100 kB or more. The table has the bytes
that XLA assigned, the temporary bytes unused at the peak, the estimate, the CPU seconds to compile
and to find the buffers, and the source line whose estimate is furthest from XLA's buffers.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxprtool import memory
from jaxprtool.commands.memory.compiled import LineBytes, compiled_peak
from jaxprtool.formats.lowering import compiled_with_memory
from tests.benchmarks.bench_memory import LARGE, LEAST, programs


def error(line: LineBytes) -> int:
    """Return how many bytes the estimate of a line is too low."""
    return line.bytes - line.estimate_bytes


def main() -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    table = Table("program", "XLA, MB", "unused", "estimate", "compile, s", "buffers, s", "line")
    for name, program in programs():
        wanted = sys.argv[1:] or [name]
        estimate = memory(program)
        if not any(each in name for each in wanted) or estimate.peak_bytes < LEAST or name in LARGE:
            continue
        start = time.process_time()
        stored = compiled_with_memory(program)
        middle = time.process_time()
        found = compiled_peak(program, stored, estimate)
        end = time.process_time()
        worst = max(found.lines, key=lambda line: abs(error(line)))
        table.add_row(
            name,
            f"{found.peak_bytes / 1e6:.2f}",
            f"{found.unused_bytes / max(1, found.temporary_bytes):.1%}",
            f"{found.estimate_bytes / found.peak_bytes:.2f}",
            f"{middle - start:.1f}",
            f"{end - middle:.2f}",
            f"{error(worst) / 1e6:+.2f} MB at {worst.line}",
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
