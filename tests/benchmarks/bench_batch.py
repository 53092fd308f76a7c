"""Compare `batch` with `jax.vmap`: `python tests/benchmarks/bench_batch.py`.

Ours is the pass, JAX's is `jax.make_jaxpr(jax.vmap(jaxpr_as_fun(j)))` of the same jaxpr. The two
alternate and medians are compared. Making the batched program is measured

    cold    with all caches cleared: JAX's, and our templates and bodies;
    warm    after both have batched such a program, with a fresh copy of it, so that neither
            has this one in a cache (nested bodies are in both caches);
    again   with the same program object once more.

Equations are counted at all depths, a body once per call. Bytes moved are the outputs of transpose,
broadcast and copy, multiplied by the iterations of a scan. Both results are compiled with XLA's
default settings and run alternately, with parameters that are not batched and examples that are.
The deep gradient has 6 layers here, since XLA takes long to compile 48. "same" means that both
compile to the same instructions. The ratio of run times is the median of the ratios of each round.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxprtool import jaxcompat
from jaxprtool.ir.backends import clear_caches
from jaxprtool.ir.program import Program
from tests.benchmarks.mapped_models import models
from tests.benchmarks.models import synthetic, transformer_gradient
from tests.programs.mapped import Mapping, cost, flat, ours, stacked, theirs
from tests.programs.samples import sample_files, sample_programs

LANES = 8

OURS, JAX = "ours", "jax.vmap"


def program_of(name: str, closed: Any) -> Program:
    """Return the flat program of a closed jaxpr."""
    ins = tuple(f"x{i}" for i in range(len(closed.invars)))
    outs = tuple(f"y{i}" for i in range(len(closed.outvars)))
    return flat(Program(name, closed, None, None, ins, outs))


def mapping_of(program: Program, shared: int) -> Mapping:
    """Map all arguments along axis 0, except for the first `shared` ones."""
    rest = len(program.in_avals) - shared
    return Mapping((None,) * shared + (0,) * rest, (0,) * len(program.out_avals), LANES)


# --- making the program ---------------------------------------------------------------------------


def forget() -> None:
    """Clear all caches, JAX's and ours."""
    jax.clear_caches()
    clear_caches()


def seconds(function: Callable[[], Any]) -> float:
    gc.collect()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def making(program: Program, mapping: Mapping, rounds: int) -> dict[str, dict[str, float]]:
    """Return the median seconds of each side: cold, warm and again."""
    makers = {JAX: theirs, OURS: ours}
    times: dict[str, dict[str, list[float]]] = {}
    for how in ("cold", "warm", "again"):
        times[how] = {name: [] for name in makers}
        for i in range(rounds if how != "cold" else max(2, rounds // 3)):
            for name in sorted(makers, reverse=bool(i % 2)):
                make = makers[name]
                if how == "cold":
                    forget()
                given = program if how == "again" else fresh(program)
                if how == "again" or (how == "warm" and i == 0):
                    make(given, mapping)
                    given = program if how == "again" else fresh(program)
                times[how][name].append(seconds(lambda m=make, p=given: m(p, mapping)))
    return {
        how: {name: statistics.median(taken) for name, taken in each.items()}
        for how, each in times.items()
    }


def fresh(program: Program) -> Program:
    """Return the program with a copy of its jaxpr that is in no cache."""
    opened = jaxcompat.open_jaxpr(program.jaxpr)
    return program.replace(
        jaxpr=jaxcompat.replace_jaxpr(
            program.jaxpr,
            constvars=opened.constvars,
            consts=program.jaxpr.consts,
            invars=opened.invars,
            outvars=opened.outvars,
            eqns=opened.eqns,
            debug_info=opened.debug_info,
        )
    )


def make_table(programs: dict[str, tuple[Program, Mapping]], rounds: int) -> Table:
    table = Table(title=f"making the batched program, ms (medians, JAX {jax.__version__})")
    table.add_column("program")
    for how in ("cold", "warm", "again"):
        for heading in (f"{how}: JAX", "ours", "times"):
            table.add_column(heading, justify="right")
    for name, (program, mapping) in programs.items():
        size = len(program.jaxpr.eqns)
        found = making(program, mapping, max(2, min(rounds, 3 * 10**4 // max(1, size))))
        cells = []
        for each in found.values():
            faster = f"{each[JAX] / each[OURS]:.1f}"
            cells += [f"{each[JAX] * 1e3:.2f}", f"{each[OURS] * 1e3:.2f}", faster]
        table.add_row(name, *cells)
    return table


# --- the batched program --------------------------------------------------------------------------


def cost_table(programs: dict[str, tuple[Program, Mapping]]) -> Table:
    table = Table(title="the batched program: equations, and bytes that moves write")
    table.add_column("program")
    for heading in ("equations", "JAX's", "ours", "moved: JAX's", "ours", ""):
        table.add_column(heading, justify="right")
    for name, (program, mapping) in programs.items():
        mine, reference = (
            cost(made.jaxpr) for made in (ours(program, mapping), theirs(program, mapping)[0])
        )
        table.add_row(
            name,
            f"{cost(program.jaxpr).equations:,}",
            f"{reference.equations:,}",
            f"{mine.equations:,}",
            f"{reference.moved:,}",
            f"{mine.moved:,}",
            "WORSE" if mine.exceeds(reference) else "",
        )
    return table


# --- running it -----------------------------------------------------------------------------------


def run_table(given: dict[str, tuple[Program, Mapping, list[Any]]], rounds: int) -> Table:
    table = Table(title=f"compiling and running the batched program, batch size {LANES} (medians)")
    table.add_column("program")
    for heading in ("compile, s: JAX", "ours", "instructions: JAX", "ours", ""):
        table.add_column(heading, justify="right")
    for heading in ("run, ms: JAX", "ours", "ratio"):
        table.add_column(heading, justify="right")
    for name, (program, mapping, args) in given.items():
        compiled, compiling = {}, {}
        for who, made in ((JAX, theirs(program, mapping)[0]), (OURS, ours(program, mapping))):
            start = time.perf_counter()
            compiled[who] = compile_(made.jaxpr, args)
            compiling[who] = time.perf_counter() - start
        check(compiled, args)
        lines = {who: instructions(each) for who, each in compiled.items()}
        times = runs(compiled, args, rounds)
        ratio = statistics.median(a / b for a, b in zip(times[OURS], times[JAX], strict=True))
        table.add_row(
            name,
            *(f"{compiling[who]:.2f}" for who in (JAX, OURS)),
            *(f"{len(lines[who])}" for who in (JAX, OURS)),
            "same" if lines[JAX] == lines[OURS] else "",
            *(f"{statistics.median(times[who]) * 1e3:.3f}" for who in (JAX, OURS)),
            f"{ratio:.3f}",
        )
    return table


def compile_(jaxpr: Any, args: Sequence[Any]) -> Any:
    return jax.jit(jaxcompat.jaxpr_as_fun(jaxpr)).lower(*args).compile()


def check(compiled: dict[str, Any], args: Sequence[Any]) -> None:
    """Assert that both return the same values."""
    for a, b in zip(compiled[OURS](*args), compiled[JAX](*args), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-4)


def runs(compiled: dict[str, Any], args: Sequence[Any], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each call in each round. The calls alternate."""
    times: dict[str, list[float]] = {who: [] for who in compiled}
    once = min(_called(compiled[JAX], args, 1) for _ in range(3))
    calls = max(1, min(50, int(0.005 / once)))
    for i in range(rounds):
        for who in sorted(compiled, reverse=bool(i % 2)):
            times[who].append(_called(compiled[who], args, calls) / calls)
    return times


def _called(run: Any, args: Sequence[Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        results = run(*args)
    jax.block_until_ready(results)
    return time.perf_counter() - start


def instructions(compiled: Any) -> list[str]:
    """Return the instructions of the compiled program, without names and source locations."""
    text = re.sub(r", metadata=\{[^}]*\}", "", compiled.as_text())
    text = re.sub(r"%?[A-Za-z_][\w\-]*\.[\w\-.]+|%[\w\-.]+", "_", text)
    return sorted(line for line in text.splitlines() if " = " in line)


# --- main -----------------------------------------------------------------------------------------


def sample_cases() -> dict[str, tuple[Program, Mapping]]:
    """Return the samples that JAX can batch, and their gradients, mapped over all arguments."""
    found = {}
    for file in sample_files():
        for case in sample_programs(file):
            program = flat(case.program())
            mapping = mapping_of(program, 0)
            try:
                theirs(program, mapping)
            except (NotImplementedError, ValueError):
                continue
            found[case.name] = program, mapping
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds of making the programs")
    parser.add_argument("--max", type=int, default=100_000, help="equations of the largest program")
    parser.add_argument("--only", default="", help="part of the names of the programs to measure")
    options = parser.parse_args()
    console = Console(width=150)

    runnable = {}
    for name, (closed, args, shared) in models().items():
        program = program_of(name, closed)
        lanes = [*args[:shared], *(stacked(x, 0, LANES) for x in args[shared:])]
        runnable[name] = program, mapping_of(program, shared), lanes
    deep = program_of("48-layer gradient", transformer_gradient())
    programs = {"48-layer gradient": (deep, mapping_of(deep, len(deep.in_avals) - 1))}
    programs |= {name: (program, mapping) for name, (program, mapping, _) in runnable.items()}
    for size in (10**3, 10**4, 10**5):
        if size <= options.max:
            program = program_of("synthetic", synthetic(size))
            programs[f"synthetic, {size:,}"] = program, mapping_of(program, 0)
    programs |= sample_cases()
    programs = {name: each for name, each in programs.items() if options.only in name}
    runnable = {name: each for name, each in runnable.items() if name in programs}

    gc.freeze()  # exclude the programs from garbage collection, which keeps collections fast
    console.print(make_table(programs, options.rounds))
    console.print(cost_table(programs))
    console.print(run_table(runnable, 8 * options.rounds))


if __name__ == "__main__":
    main()
