"""Run every command on large programs: `python tests/benchmarks/bench_commands.py`.

    --equations 10000,100000   the sizes of a chain of elementwise equations, of the gradient of a
                               transformer, of a program with 3,000 arguments and results, and of
                               2,000 jits
    --levels 100               the depths of nested jits; none for ""
    --recursion-limit 40000    what the module of a function passes to `sys.setrecursionlimit`
    --only "show,JAX str"      rows of the table
    --compiled                 the commands that compile and run

A program is traced once. Each command runs in a fork of the process that has traced it, with limits
of memory and CPU time, after it has run on a small program, so that its imports do not count. The
table has the microseconds of CPU time for each equation of the largest size and, in parentheses,
how many times that is of the smallest size: a linear command has 1. For nested jits it has CPU
seconds. The rows of JAX are what JAX takes to print, lower and transform the same program.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial, reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

import jaxprtool
from jaxprtool.analysis.stats import count_equations
from jaxprtool.api import targets
from jaxprtool.cli.main import main as command_line
from jaxprtool.execute.calls import ForkOutcome, Limits, call_in_fork
from jaxprtool.ir.process import limit_raised
from tests.benchmarks.models import transformer_loss, transformer_shapes

#: The most CPU seconds and bytes of a command.
SECONDS, MEMORY = 120, 8 << 30

#: The commands that compile nothing; FILE is the program, and OUT a new file.
COMMANDS = {
    "show": "show FILE",
    "show --full": "show FILE --full --names",
    "show page": "show FILE -o OUT.html",
    "source": "source FILE",
    "diff same": "diff FILE FILE",
    "diff -O1": "diff FILE -p -O1",
    "why": "why FILE result",
    "bounds": "bounds FILE",
    "cost": "cost FILE",
    "kernels": "kernels FILE",
    "memory": "memory FILE",
    "lint": "lint FILE",
    "outline": "outline FILE",
    "opt -p dce": "opt FILE -p dce -o OUT.jaxpr",
    "opt -O1": "opt FILE -O1 -o OUT.jaxpr",
    "opt -O2": "opt FILE -O2 -o OUT.jaxpr",
    "opt -p roll": "opt FILE -p roll -o OUT.jaxpr",
    "opt -p jvp": "opt FILE -p jvp -o OUT.jaxpr",
    "vmap": "vmap FILE --axis-size 8",
    "emit python": "emit FILE -o OUT.py",
    "emit jaxpr": "emit FILE --to jaxpr",
    "emit dot": "emit FILE --to dot -o OUT.dot",
    "emit explorer": "emit FILE --to model-explorer -o OUT.json",
    "emit stablehlo": "emit FILE --to stablehlo -o OUT.mlir",
    "opt -p vjp": "opt FILE -p vjp",
    "residuals": "residuals FILE",
    "report": "report FILE -o OUT.html",
}

#: Those that compile, and run.
COMPILED = {
    "run": "run FILE",
    "emit optimized": "emit FILE --to hlo-optimized -o OUT.hlo",
    "memory --compiled": "memory FILE --compiled",
    "shardings": "shardings FILE",
    "profile": "profile FILE",
    "bench": "bench FILE",
    "nans": "nans FILE",
    "watch": "watch FILE",
    "compare": "compare FILE -p -O1",
    "determinism": "determinism FILE",
}


def _jax_vjp(jaxpr: Any, *types: Any) -> Any:
    """Trace the derivative of all results by all arguments."""

    def derivative(*args: Any) -> Any:
        results, backward = jax.vjp(jaxpr_as_fun(jaxpr), *args)
        return backward(results)

    return jax.make_jaxpr(derivative)(*types)


#: What JAX takes itself, with a function and the types of its arguments.
JAX: dict[str, Callable[..., Any]] = {
    "JAX str": lambda jaxpr, *types: str(jaxpr),
    "JAX lower": lambda jaxpr, *types: jax.jit(jaxpr_as_fun(jaxpr)).lower(*types).as_text(),
    "JAX vmap": lambda jaxpr, *types: jax.make_jaxpr(jax.vmap(jaxpr_as_fun(jaxpr)))(
        *(type.update(shape=(8, *type.shape)) for type in types)
    ),
    "JAX jvp": lambda jaxpr, *types: jax.make_jaxpr(partial(jax.jvp, jaxpr_as_fun(jaxpr)))(
        types, types
    ),
    "JAX vjp": _jax_vjp,
}

#: A program and the recursion limit, None for that of a command, to an exit code.
Task = Callable[[jaxprtool.Program, int | None], int]

# --- programs -------------------------------------------------------------------------------------

VECTOR = jax.ShapeDtypeStruct((8,), "float32")


def chain(count: int) -> Callable[..., Any]:
    def step(x: Any, i: int) -> Any:
        return jnp.sin(x) if i % 2 else x * 1.5

    return lambda x: jnp.sum(reduce(step, range(count), x))


def wide(count: int, *arguments: Any) -> list[Any]:
    return [chain(max(count // len(arguments) - 1, 1))(x) for x in arguments]


def jits(count: int, calls: int = 2000) -> Callable[..., Any]:
    functions = [
        jax.jit(lambda x, i=i: reduce(lambda y, _: jnp.sin(y) + i, range(max(count, 2) // 2), x))
        for i in range(calls)
    ]
    return lambda x: jnp.sum(reduce(lambda y, function: function(y), functions, x))


def nested(levels: int) -> jaxprtool.Program:
    """Return the program of nested jits: each is traced by itself, before the one around it.

    JAX then finds it in its cache. Traced from outside, 140 levels reach Python's recursion limit.
    """
    function = lambda x: jnp.sin(x) * 2.0  # noqa: E731
    for i in range(levels):
        function = jax.jit(lambda x, i=i, inner=function: inner(x) * (i + 1.0) + x)
        if i % 50 == 0:
            jaxprtool.trace(function, VECTOR)
        function.trace(VECTOR)
    return jaxprtool.trace(lambda x: jnp.sum(function(x)), VECTOR)


#: The program of each kind, of about so many equations.
KINDS: dict[str, Callable[[int], jaxprtool.Program]] = {
    "chain": lambda count: jaxprtool.trace(chain(count), VECTOR),
    "transformer": lambda count: jaxprtool.trace(
        jax.grad(transformer_loss), *transformer_shapes(max(count // 182, 1))
    ),
    "wide": lambda count: jaxprtool.trace(partial(wide, count), *[VECTOR] * 3000),
    "jits": lambda count: jaxprtool.trace(jits(count // 2000 - 1), VECTOR),
}

# --- measuring ------------------------------------------------------------------------------------


def run_command(line: str, program: jaxprtool.Program, limit: int | None) -> int:
    """Run a command on a program as if it were in a file, and return its exit code."""

    def read(*_: object) -> tuple[jaxprtool.Program, None, str]:
        if limit is not None:
            sys.setrecursionlimit(limit)
        return program, None, ""

    targets._stored = read  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        words = line.replace("FILE", "a.jaxpr").replace("OUT", os.path.join(folder, "out"))
        return command_line(words.split())


def run_jax(task: Callable[..., Any], program: jaxprtool.Program, limit: int | None) -> int:
    """Let JAX do one of `JAX` with the recursion limit and the stack of a command."""
    with limit_raised():
        if limit is not None:
            sys.setrecursionlimit(limit)
        types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.in_avals]
        task(program.jaxpr, *types)
    return 0


def tasks(only: str, compiled: bool) -> dict[str, Task]:
    """Return what is measured, by name."""
    found: dict[str, Task] = {name: partial(run_jax, task) for name, task in JAX.items()}
    commands = COMPILED if compiled else COMMANDS
    found |= {name: partial(run_command, line) for name, line in commands.items()}
    names = only.replace("JAX ", "JAX; ").split(",") if only else found
    return {name: found[name] for name in (name.replace("JAX; ", "JAX ") for name in names)}


def measured(
    name: str, program: jaxprtool.Program, chosen: Mapping[str, Task], limit: int | None = None
) -> dict[str, float | str]:
    """Return the CPU seconds of all tasks on a program, or why they failed."""
    small = jaxprtool.trace(chain(10), VECTOR)
    found: dict[str, float | str] = {}
    for label, task in chosen.items():
        found[label] = _cpu_seconds(task, small, program, limit)
        shown = found[label] if isinstance(found[label], str) else f"{found[label]:.2f} s"
        print(f"{name:24} {label:18} {shown}", file=sys.stderr, flush=True)
    return found


def _cpu_seconds(
    task: Task, small: jaxprtool.Program, program: jaxprtool.Program, limit: int | None
) -> float | str:
    """Return the CPU seconds of a task in a fork, or why it failed."""

    def call() -> tuple[int, float]:
        task(small, None)
        start = time.process_time()
        most = int(start) + SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (most, most + 1))
        return task(program, limit), time.process_time() - start

    outcome = call_in_fork(call, Limits(10 * SECONDS, MEMORY))
    code, seconds = outcome.value or (None, 0.0)
    return seconds if code in (0, 1) else _fault(outcome)  # 1: a difference, or findings


def _fault(outcome: ForkOutcome) -> str:
    if outcome.signal == "SIGXCPU" or outcome.timed_out:
        return f"> {SECONDS} s"
    said = [line for line in outcome.output.splitlines() if line.startswith("error")]
    return said[-1] if said else str(outcome)


def traced(make: Callable[[int], jaxprtool.Program], size: int) -> tuple[jaxprtool.Program, float]:
    """Return a program, and the CPU seconds to trace it; earlier objects are not collected."""
    gc.collect()
    gc.freeze()
    start = time.process_time()
    return make(size), time.process_time() - start


def by_equation(kind: str, sizes: list[int], chosen: Mapping[str, Task]) -> Iterator[str]:
    """Yield the cells of a kind: microseconds an equation, and their growth; tracing first."""
    tables: list[dict[str, float | str]] = []
    for size in sizes:
        program, seconds = traced(KINDS[kind], size)
        count = count_equations(program)
        found = {"trace": seconds, **measured(f"{kind}, {count:,}", program, chosen)}
        tables.append({k: v if isinstance(v, str) else v / count * 1e6 for k, v in found.items()})
    for name in tables[0]:
        first, last = tables[0][name], tables[-1][name]
        if isinstance(last, str):
            yield last
        elif len(sizes) == 1 or isinstance(first, str):
            yield f"{last:.0f}"
        else:
            yield f"{last:.0f} ({last / first:.1f})"


def by_level(levels: int, chosen: Mapping[str, Task], limit: int | None) -> Iterator[str]:
    """Yield the cells of nested jits: seconds; tracing first."""
    program, seconds = traced(nested, levels)
    found = {"trace": seconds, **measured(f"nested, {levels:,}", program, chosen, limit)}
    yield from (v if isinstance(v, str) else f"{v:.2f}" for v in found.values())


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(each) for each in text.split(",") if each]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--equations", type=numbers, default=[10_000])
    parser.add_argument("--levels", type=numbers, default=[100])
    parser.add_argument("--recursion-limit", type=int, help="of the module of a function")
    parser.add_argument("--only", default="", help="rows, separated by commas")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--compiled", action="store_true", help="those that compile")
    options = parser.parse_args()
    os.environ["COLUMNS"] = "100"
    chosen, limit = tasks(options.only, options.compiled), options.recursion_limit
    kinds = options.kinds.split(",") if options.equations else []
    columns = {kind: list(by_equation(kind, options.equations, chosen)) for kind in kinds}
    columns |= {f"{n:,} levels": list(by_level(n, chosen, limit)) for n in options.levels}
    title = f"Microseconds an equation (growth); seconds of nested jits (JAX {jax.__version__})"
    table = Table("command", *columns, title=title)
    for row in zip(["trace", *chosen], *columns.values(), strict=True):
        table.add_row(*row)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
