"""Compare the estimate of `jaxprtool memory` with XLA for each primitive, at megabytes.

    python tests/benchmarks/bench_memory_primitives.py [--only TEXT]

The programs are those of `tests/programs/megabytes.py`, and JAX's own test programs mapped until
their data has megabytes, each forward and as a gradient. Prints those that are more than a factor
of 1.5 apart, and the number of the others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxprtool import jaxcompat, memory, trace
from jaxprtool.errors import JaxprToolError
from jaxprtool.ir.program import Program
from tests.programs.megabytes import PROGRAMS, batched_harnesses, gradient

#: The factor that an estimate may be off by.
FACTOR = 1.5


class Row(NamedTuple):
    """The bytes of a program by the estimate and by XLA."""

    name: str
    estimate: int
    compiled: int
    unknown: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """The estimate divided by XLA's bytes."""
        return self.estimate / self.compiled

    @property
    def agrees(self) -> bool:
        """True if the estimate is within the factor of XLA's bytes."""
        return 1 / FACTOR - 1e-3 <= self.ratio <= FACTOR + 1e-3


def programs() -> Iterator[tuple[str, Program]]:
    """Yield the programs, each and then its gradient, if it has one."""
    own = ((name, *program) for name, program in PROGRAMS.items())
    for name, function, types in (*own, *batched_harnesses()):
        for suffix, (fun, args) in (
            ("", (function, types)),
            (", gradient", gradient(function, types)),
        ):
            try:
                yield name + suffix, trace(fun, *args)
            except (JaxprToolError, TypeError, ValueError, NotImplementedError):
                continue  # it has no gradient


def compared(name: str, program: Program) -> Row:
    """Return the bytes that a program needs by the estimate, and once it is compiled."""
    args = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.in_avals]
    options = {**program.jit_keywords, "keep_unused": True}
    lowered = jax.jit(jaxcompat.jaxpr_as_fun(program.jaxpr), **options).lower(*args)
    stats: Any = lowered.compile().memory_analysis()
    sizes = stats.argument_size_in_bytes, stats.output_size_in_bytes, stats.temp_size_in_bytes
    found = memory(program)
    compiled = sum(sizes) - stats.alias_size_in_bytes + found.constant_bytes
    return Row(name, found.peak_bytes, compiled, tuple(found.unknown))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--all", action="store_true", help="print all rows")
    options = parser.parse_args()
    rows = list[Row]()
    for name, program in programs():
        if options.only in name:
            rows.append(compared(name, program))
    apart = [row for row in rows if not row.agrees]
    print("| program | estimated | compiled | ratio |")
    print("| --- | ---: | ---: | ---: |")
    for row in rows if options.all else sorted(apart, key=lambda row: row.ratio):
        sizes = f"{row.estimate / 2**20:.1f} MiB | {row.compiled / 2**20:.1f} MiB"
        print(f"| {row.name[:60]} | {sizes} | {row.ratio:.2f} |")
    named = sum(1 for row in apart if row.unknown)
    print(f"{len(rows) - len(apart)} of {len(rows)} within a factor of {FACTOR}, {named} named")


if __name__ == "__main__":
    main()
