"""Compare models as traced, outlined and rolled: `python tests/benchmarks/bench_outline.py`.

Each model is traced, lowered, compiled and run in these ways, or those of `--ways`:

    traced  as JAX traces it
    units   with the pass `outline`: repeated code is compiled once
    calls   with `outline(mark="call")`: each copy is a call, which XLA does not inline
    roll    with the pass `roll`: repeated code becomes a scan over stacked operands
    scan    written by hand as a scan over stacked parameters, for models that have this form

The ways alternate in one process, each with empty caches. The table has medians, and ratios to
"traced". Tracing is the CPU time of the calling thread, and includes the pass. Compiling and
running have the wall time and the CPU time, which includes XLA's threads. Memory is XLA's temporary
memory. Equations are counted at all depths, a body that several calls share once. "differs" is the
largest difference of a result from the result as traced, relative to the largest absolute value of
its array.

Name models to measure only those. `--depths 12 24 48` sets the number of layers, for models that
have it. A deep model takes minutes to compile as traced, so models of more than `--traced-up-to`
equations are not. `--json FILE` adds the measurements to a file, which `plot_outline.py` draws.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import jaxprtool
from jaxprtool.ir.backends import clear_caches
from tests.benchmarks.outline_models import MODELS, Case
from tests.programs.interpreter import bodies
from tests.programs.same import count_equations

#: The pipeline of each way, by name.
PIPELINES = {"units": "outline", "calls": "outline(mark='call')", "roll": "roll"}

TRACED, SCAN = "traced", "scan"
WAYS = (TRACED, *PIPELINES, SCAN)


@dataclass
class Measured:
    """The measurements of one way: times in seconds, one per round; memory in bytes."""

    model: str
    depth: int | None
    way: str
    equations: int = 0
    memory: int = 0
    differs: float = 0.0
    trace: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    compile: list[float] = field(default_factory=list)
    compile_cpu: list[float] = field(default_factory=list)
    run: list[float] = field(default_factory=list)
    run_cpu: list[float] = field(default_factory=list)


# --- one model ------------------------------------------------------------------------------------


class Subject:
    """A model in one of its ways."""

    def __init__(self, case: Case, measured: Measured) -> None:
        self.measured = measured
        self.fun = case.fun
        self.args = case.scan_args if measured.way == SCAN else case.args
        self.compiled: Any = None

    def trace(self) -> Any:
        """Trace it with empty caches."""
        forget()

        def fresh(*args: Any) -> Any:
            return self.fun(*args)

        pipeline = PIPELINES.get(self.measured.way)
        jitted = jaxprtool.jit(fresh, passes=pipeline) if pipeline else jax.jit(fresh)
        gc.collect()
        start = time.thread_time()
        traced = jitted.trace(*self.args)
        self.measured.trace.append(time.thread_time() - start)
        self.measured.equations = written_equations(traced.jaxpr)
        return traced

    def compile(self, traced: Any) -> None:
        start = time.perf_counter()
        lowered = traced.lower()
        self.measured.lower.append(time.perf_counter() - start)
        start, cpu = time.perf_counter(), time.process_time()
        self.compiled = lowered.compile()
        self.measured.compile.append(time.perf_counter() - start)
        self.measured.compile_cpu.append(time.process_time() - cpu)
        self.measured.memory = self.compiled.memory_analysis().temp_size_in_bytes

    def run(self) -> Any:
        gc.collect()
        start, cpu = time.perf_counter(), time.process_time()
        results = jax.block_until_ready(self.compiled(*self.args))
        self.measured.run.append(time.perf_counter() - start)
        self.measured.run_cpu.append(time.process_time() - cpu)
        return results


def forget() -> None:
    """Clear all caches, JAX's and ours."""
    jax.clear_caches()
    clear_caches()


def written_equations(closed: Any) -> int:
    """Count the equations at all depths, those of a shared body once."""
    seen: dict[int, Any] = {}

    def visit(jaxpr: Any) -> int:
        if id(jaxpr) in seen:
            return 0
        seen[id(jaxpr)] = jaxpr
        return len(jaxpr.eqns) + sum(visit(body) for eqn in jaxpr.eqns for body in bodies(eqn))

    return visit(closed.jaxpr if hasattr(closed, "jaxpr") else closed)


def measure(subjects: Sequence[Subject], rounds: int, runs: int, once_above: float) -> None:
    """Trace and compile alternately, then run alternately."""
    for i in range(rounds):
        for subject in subjects[:: -1 if i % 2 else 1]:
            traced = subject.trace()
            if not i or max(subject.measured.compile) < once_above:
                subject.compile(traced)
    forget()
    results = [subject.run() for subject in subjects]
    for subject, result in zip(subjects, results, strict=True):
        subject.measured.differs = difference(results[0], result)
        subject.measured.run.clear()
        subject.measured.run_cpu.clear()
    del results
    for i in range(runs):
        for subject in subjects[:: -1 if i % 2 else 1]:
            subject.run()


def difference(expected: Any, result: Any) -> float:
    """Return the largest difference of a float, relative to the largest value of its array.

    For a scan by hand, only the results that are not stacked are compared.
    """
    found, others = 0.0, dict(jax.tree.leaves_with_path(result))
    for path, a in jax.tree.leaves_with_path(expected):
        b = others.get(path)
        if b is None or a.shape != b.shape or not jax.numpy.issubdtype(a.dtype, np.floating):
            continue
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        found = max(found, float(np.abs(a - b).max() / (np.abs(a).max() or 1.0)))
    return found


# --- tables ---------------------------------------------------------------------------------------


def table_of(measured: Sequence[Measured]) -> Table:
    first = measured[0]
    depth = "" if first.depth is None else f", {first.depth}"
    table = Table(title=f"{first.model}{depth}", title_justify="left")
    for heading in ("", "equations", "trace, s", "", "lower, s", "compile, s", "", "CPU, s", ""):
        table.add_column(heading, justify="right")
    for heading in ("run, ms", "", "CPU, ms", "", "memory, MB", "", "differs"):
        table.add_column(heading, justify="right")
    for each in measured:
        base = first if first.way == TRACED else None

        def cells(name: str, scale: float, digits: int, each=each, base=base) -> Iterator[str]:
            value = statistics.median(getattr(each, name))
            yield f"{value * scale:.{digits}f}"
            yield f"{value / statistics.median(getattr(base, name)):.2f}" if base else ""

        memory = f"{each.memory / max(1, base.memory):.2f}" if base else ""
        table.add_row(
            each.way,
            f"{each.equations:,}",
            *cells("trace", 1, 2),
            f"{statistics.median(each.lower):.2f}",
            *cells("compile", 1, 2),
            *cells("compile_cpu", 1, 2),
            *cells("run", 1e3, 1),
            *cells("run_cpu", 1e3, 1),
            f"{each.memory / 1e6:.1f}",
            memory,
            f"{each.differs:.0e}" if base else "",
        )
    return table


def save(path: Path, measured: Sequence[Measured]) -> None:
    """Add the measurements to a file. Replace those of the same model, release and way."""
    machine = {
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "cpus": os.cpu_count(),
        "jaxprtool": importlib.metadata.version("jaxprtool"),
    }
    new = [{**machine, **asdict(each)} for each in measured]
    names = ("jax", "device", "model", "depth", "way")
    keys = [[row[name] for name in names] for row in new]
    old = json.loads(path.read_text()) if path.exists() else []
    kept = [row for row in old if [row[name] for name in names] not in keys]
    path.write_text(json.dumps(kept + new, indent=1) + "\n")


# --- main -----------------------------------------------------------------------------------------


def subjects_of(name: str, depth: int | None, options: argparse.Namespace) -> list[Subject]:
    case = MODELS[name].case(depth)
    size = count_equations(jax.jit(case.fun).trace(*case.args).jaxpr)
    ways = [
        way
        for way in options.ways
        if not (way == TRACED and size > options.traced_up_to)
        and not (way == SCAN and case.scan_args is None)
    ]
    return [Subject(case, Measured(name, depth, way)) for way in ways]


def cases(options: argparse.Namespace) -> Iterator[tuple[str, int | None]]:
    for name in options.models or MODELS:
        depths = MODELS[name].depths
        for depth in (options.depths or depths) if depths else (None,):
            yield name, depth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--depths", type=int, nargs="+")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--traced-up-to", type=int, default=8000, metavar="EQUATIONS")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of tracing and compiling")
    parser.add_argument(
        "--once-above", type=float, default=20.0, help="run once if compiling takes more seconds"
    )
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    console = Console(width=170)
    jax.config.update("jax_enable_compilation_cache", False)
    jax.jit(lambda x: x + 1)(1.0)  # start XLA before the first measurement
    console.print(f"JAX {jax.__version__}, {jax.devices()[0].device_kind}, {os.cpu_count()} cores")
    for name, depth in cases(options):
        try:
            subjects = subjects_of(name, depth, options)
        except ImportError as error:
            console.print(f"{name}: left out, {error}")
            continue
        if not subjects:
            continue
        measure(subjects, options.rounds, options.runs, options.once_above)
        measured = [subject.measured for subject in subjects]
        console.print(table_of(measured))
        if options.json:
            save(options.json, measured)


if __name__ == "__main__":
    main()
