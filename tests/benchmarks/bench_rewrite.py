"""Compare the named pipelines with JAX and XLA: `python tests/benchmarks/bench_rewrite.py`.

For the gradients of the models in `gradient_models.py`, the tables have the number of equations
after -O1, the time of the passes per equation and relative to JAX's tracing, and the cost of
tracing again, lowering, compiling and running the rewritten and the original program. The two
alternate, each with empty caches, and medians are compared. Equations are counted at all depths.
`--linear` prints the time of each pass on synthetic programs of growing size.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxprtool import Program, jaxcompat, trace
from jaxprtool.passes import Observer, Pipeline, Step
from tests.benchmarks.gradient_models import losses
from tests.benchmarks.models import synthetic
from tests.programs.same import count_equations


class Stopwatch(Observer):
    """The seconds of each pass, and the programs that passes returned."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def after(self, step: Step, program: Any, result: Any, seconds: float) -> None:
        self.seconds[str(step)] += seconds


@dataclass
class Built:
    """The cost to build one program: seconds of each stage, and XLA's statistics."""

    trace: float
    lower: float
    compile: float
    temporary: int
    run: Callable[[], Any]


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def traced(loss: Any, arguments: Any) -> tuple[float, Program]:
    """Return the time of JAX's tracing of the gradient with empty caches, and the program."""
    jax.clear_caches()
    gradient = jax.value_and_grad(lambda *args: loss(*args))
    seconds, _ = timed(lambda: jax.make_jaxpr(gradient)(*arguments))
    return seconds, trace(gradient, *arguments)


def built(jaxpr: Any, flat: Any) -> Built:
    jax.clear_caches()
    function = jax.jit(lambda *args: jaxcompat.jaxpr_as_fun(jaxpr)(*args))
    tracing, staged = timed(lambda: function.trace(*flat))
    lowering, lowered = timed(staged.lower)
    compiling, compiled = timed(lowered.compile)
    memory = compiled.memory_analysis().temp_size_in_bytes
    return Built(tracing, lowering, compiling, memory, lambda: compiled(*flat))


def run_ratio(before: Built, after: Built, rounds: int) -> tuple[float, float]:
    """Return the median seconds of a run before, and the median ratio of the alternating runs."""
    times = []
    for number in range(rounds + 2):
        pair = (before, after) if number % 2 else (after, before)
        seconds = {id(b): timed(lambda b=b: jax.block_until_ready(b.run()))[0] for b in pair}
        times.append((seconds[id(before)], seconds[id(after)]))
    times = times[2:]  # the first runs page in the memory
    return statistics.median(b for b, _ in times), statistics.median(a / b for b, a in times)


def rewritten(pipeline: str, program: Program) -> tuple[dict[str, float], Program]:
    watch = Stopwatch()
    result = Pipeline.parse(pipeline).run(program, watch, check=False)
    return dict(watch.seconds), result


def measure(console: Console, options: argparse.Namespace) -> None:
    equations = table("equations", "before", "after", "fewer", "trace ms", "passes ms", "ratio")
    passes: Table | None = None
    stages = table(
        "before / after", "trace ms", "lower ms", "compile s", "ratio", "run ms", "ratio", "temp MB"
    )
    for name, (loss, arguments) in losses().items():
        if options.only and options.only not in name:
            continue
        tracing, rewriting, seconds = [], [], []
        for _ in range(options.rounds):
            taken, program = traced(loss, arguments)
            each, after = rewritten(options.passes, program)
            tracing.append(taken)
            seconds.append(each)
            rewriting.append(sum(each.values()))
        old, new = count_equations(program.jaxpr), count_equations(after.jaxpr)
        ours, theirs = statistics.median(rewriting), statistics.median(tracing)
        equations.add_row(
            name,
            f"{old:,}",
            f"{new:,}",
            f"{1 - new / old:.0%}",
            f"{theirs * 1e3:.0f}",
            f"{ours * 1e3:.0f}",
            f"{ours / theirs:.2f}",
        )
        each = {step: statistics.median(s.get(step, 0.0) for s in seconds) for step in seconds[0]}
        passes = passes or table("µs an equation", *each)
        passes.add_row(name, *(f"{s / old * 1e6:.1f}" for s in each.values()))
        if options.compile:
            stages.add_row(name, *compiled(program, after, jax.tree.leaves(arguments), options))
    console.print(equations)
    if passes:
        console.print(passes)
    if options.compile:
        console.print(stages)


def compiled(before: Program, after: Program, flat: Any, options: argparse.Namespace) -> list[str]:
    sides = [[built(p.jaxpr, flat) for p in (before, after)] for _ in range(options.builds)]

    def medians(stage: str) -> list[float]:
        return [
            statistics.median(getattr(b, stage) for b in side) for side in zip(*sides, strict=True)
        ]

    run, ratio = run_ratio(*sides[-1], options.runs)
    compiling = medians("compile")
    return [
        *(" / ".join(f"{s * 1e3:.0f}" for s in medians(stage)) for stage in ("trace", "lower")),
        " / ".join(f"{s:.1f}" for s in compiling),
        f"{compiling[1] / compiling[0]:.2f}",
        f"{run * 1e3:.1f}",
        f"{ratio:.3f}",
        " / ".join(f"{b.temporary / 1e6:.1f}" for b in sides[-1]),
    ]


def linear(console: Console, options: argparse.Namespace) -> None:
    shown: Table | None = None
    for size in (10**3, 10**4, 10**5):
        jaxpr = synthetic(size)
        program = trace(jaxcompat.jaxpr_as_fun(jaxpr), *jaxpr.in_avals)
        seconds, _ = rewritten(options.passes, program)
        shown = shown or table("µs an equation", *seconds)
        shown.add_row(f"synthetic, {size:,}", *(f"{s / size * 1e6:.1f}" for s in seconds.values()))
    console.print(shown)


def table(first: str, *columns: str) -> Table:
    result = Table(first)
    for column in columns:
        result.add_column(column, justify="right")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passes", default="-O1", help="the pipeline to measure")
    parser.add_argument("--only", help="part of the names of the models")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of tracing and rewriting")
    parser.add_argument("--builds", type=int, default=1, help="rounds of lowering and compiling")
    parser.add_argument("--runs", type=int, default=11, help="runs of the compiled programs")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--linear", action="store_true", help="measure synthetic programs instead")
    options = parser.parse_args()
    gc.freeze()
    (linear if options.linear else measure)(Console(width=120), options)


if __name__ == "__main__":
    main()
