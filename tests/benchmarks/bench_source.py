"""Measure slices, paths and annotated source of programs of many equations.

    python tests/benchmarks/bench_source.py [--sizes N,N] [--rounds N]

Medians of CPU seconds without tracing, in one process.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxprtool import flow_path, why
from jaxprtool.commands.source.lines import source_lines
from jaxprtool.ir.program import program_signature
from tests.benchmarks.bench_cost import median
from tests.benchmarks.models import synthetic


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="10000,30000,100000")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    table = Table("equations", "s, why an argument", "why a result", "a path", "source")
    for size in map(int, options.sizes.split(",")):
        jaxpr = synthetic(size)
        about = program_signature(jaxpr)
        first, last = about.arguments[0].name, about.outputs[-1].name
        first, last = f"argument:{first}", f"result:{last}"
        ways = (
            lambda j=jaxpr, a=first: why(j, a),
            lambda j=jaxpr, b=last: why(j, b),
            lambda j=jaxpr, a=first, b=last: flow_path(j, a, b),
            lambda j=jaxpr: source_lines(j),
        )
        table.add_row(f"{size:,}", *(f"{median(way, options.rounds):.2f}" for way in ways))
    Console().print(table)


if __name__ == "__main__":
    main()
