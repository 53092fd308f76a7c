"""Compare `unzip` with Flax linen, Haiku and parameters passed by hand.

    python tests/benchmarks/bench_unzip.py [--rounds N] [--max EQUATIONS]

One 12-layer transformer is written four times (see `unzip_models`). For each version, the programs
of init and apply are made, counted, compiled by XLA and run. The four alternate, in an order that
rotates with every round. The tables have medians, and medians of the ratios of each round to ours
(for run times, to the one by hand). "first" means that JAX has traced nothing yet, "later" that its
own functions are in its caches but ours are not. Equations are counted at all depths, those of a
shared body once. Instructions are counted after XLA's optimization; "same" means that they equal
those of the version by hand, except for names. All versions must return the same output from the
same parameters. The output and the parameters of ours must equal those by hand bit for bit.

Then unzip alone is timed on synthetic programs with a variable in every few equations:
`split_body`, and the whole pass, which also builds init and apply and eliminates their dead code.
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

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.ir.equations import equations
from jaxprtool.ir.program import Program
from jaxprtool.passes.unzip import Unzip
from jaxprtool.passes.unzip.split import EARLY, READY, Context, split_body
from tests.benchmarks.models import with_variables_inside

try:
    import haiku as hk

    from tests.benchmarks import unzip_models as written
except ImportError as error:
    sys.exit(f"{error}: this benchmark compares with Flax and Haiku; pip install flax dm-haiku")

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (4, 32, written.WIDTH))

OURS, BY_HAND = "variable, unzip", "by hand"


# --- the four versions ----------------------------------------------------------------------------

Programs = tuple[Any, Any]  # the closed jaxprs of init and apply


def by_hand() -> Programs:
    return _programs(lambda key, x: written.init_by_hand(key), written.apply_by_hand)


def with_flax() -> Programs:
    model = written.FlaxTransformer()
    return _programs(model.init, model.apply)


def with_haiku() -> Programs:
    model = hk.without_apply_rng(hk.transform(lambda x: written.haiku_forward(x)))
    return _programs(model.init, model.apply)


def with_unzip() -> Programs:
    init, apply = jaxprtool.unzip(lambda key, x: written.with_variables(key, x))(KEY, X)
    return init.jaxpr, apply.jaxpr


def _programs(init: Callable, apply: Callable) -> Programs:
    """Trace both anew. A fresh lambda is in no cache of JAX."""
    traced, params = jax.make_jaxpr(lambda key, x: init(key, x), return_shape=True)(KEY, X)
    return traced, jax.make_jaxpr(lambda params, x: apply(params, x))(params, X)


BUILDS = {"Flax": with_flax, "Haiku": with_haiku, BY_HAND: by_hand, OURS: with_unzip}


def parameters() -> dict[str, list[Any]]:
    """Return corresponding flat parameters for each version."""
    params = written.init_by_hand(KEY)
    trees = {
        "Flax": written.flax_parameters(params),
        "Haiku": written.haiku_parameters(params),
        BY_HAND: params,
        OURS: params,
    }
    return {name: jax.tree.leaves(tree) for name, tree in trees.items()}


# --- alternating ----------------------------------------------------------------------------------


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def take_turns(
    functions: dict[str, Callable[[], Any]], rounds: int, before: Callable[[], Any] = gc.collect
) -> dict[str, list[float]]:
    """Return the seconds of each function in each round. The order rotates by one each round."""
    names = list(functions)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            before()
            times[name].append(seconds(functions[name]))
    return times


def compiler(jaxpr: Any) -> Callable[[], Any]:
    """Return a function that lowers and compiles a program anew at each call."""
    types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
    return lambda: jax.jit(jaxcompat.jaxpr_as_fun(jaxpr)).lower(*types).compile()


# --- the transformer ------------------------------------------------------------------------------


def transformer(rounds: int) -> Table:
    """Make, compile and run the four versions, and compare their outputs."""
    first = take_turns(BUILDS, max(3, rounds // 4), jax.clear_caches)
    programs = {name: build() for name, build in BUILDS.items()}
    later = take_turns(BUILDS, rounds)
    init, apply = ({name: pair[i] for name, pair in programs.items()} for i in (0, 1))
    compiled = {name: compiler(jaxpr)() for name, jaxpr in apply.items()}
    check(init[OURS], compiled)

    table = Table(title=f"a {written.LAYERS}-layer transformer (JAX {jax.__version__}, medians)")
    table.add_column()
    for name in BUILDS:
        table.add_column(name, justify="right")
    table.add_row("both programs, first, ms", *shown(first, OURS))
    table.add_row("both programs, later, ms", *shown(later, OURS))
    table.add_row("equations of init", *(f"{count(jaxpr)}     " for jaxpr in init.values()))
    table.add_row("equations of apply", *(f"{count(jaxpr)}     " for jaxpr in apply.values()))
    for half, jaxprs in ("init", init), ("apply", apply):
        times = take_turns({name: compiler(jaxpr) for name, jaxpr in jaxprs.items()}, 3)
        table.add_row(f"lower and compile {half}, ms", *shown(times, OURS))
    made = {name: instructions(each) for name, each in compiled.items()}
    same = {name: "same" if each == made[BY_HAND] else "    " for name, each in made.items()}
    table.add_row("instructions of apply", *(f"{len(made[n])} {same[n]}" for n in made))
    table.add_row("run apply, ms", *shown(runs(compiled, 20 * rounds), BY_HAND))
    return table


def shown(times: dict[str, list[float]], beside: str) -> list[str]:
    """Return the median of each in milliseconds, and the median of its ratios to one of them."""
    return [
        f"{statistics.median(taken) * 1e3:.{2 if taken[0] < 0.01 else 0}f} "
        f"{statistics.median(a / b for a, b in zip(taken, times[beside], strict=True)):.2f}"
        for taken in times.values()
    ]


def count(jaxpr: Any) -> int:
    return sum(1 for _ in equations(jaxcompat.open_jaxpr(jaxpr)))


def instructions(compiled: Any) -> list[str]:
    """Return the instructions of a compiled program with their types, without names, sorted."""
    text = re.sub(r", metadata=\{[^}]*\}", "", compiled.as_text())
    lines = re.sub(r"%?[A-Za-z_][\w\-]*\.[\w\-.]+|%[\w\-.]+", "_", text).splitlines()
    return sorted(line for line in lines if " = " in line)


def check(init: Any, compiled: dict[str, Any]) -> None:
    """Assert that all outputs agree, and that ours equals the one by hand exactly."""
    given = parameters()
    outputs = {name: np.asarray(run(*given[name], X)[0]) for name, run in compiled.items()}
    for name, output in outputs.items():
        np.testing.assert_allclose(output, outputs[BY_HAND], rtol=1e-5, atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(outputs[OURS], outputs[BY_HAND])
    for ours, by_hand in zip(jaxcompat.jaxpr_as_fun(init)(KEY), given[BY_HAND], strict=True):
        np.testing.assert_array_equal(ours, by_hand)


def runs(compiled: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of the calls of each, on corresponding parameters."""
    given = parameters()

    def call(run: Any, args: Sequence[Any]) -> Callable[[], Any]:
        return lambda: run(*args)[0].block_until_ready()

    calls = {name: call(run, (*given[name], X)) for name, run in compiled.items()}
    return take_turns(calls, rounds, lambda: None)


# --- scaling --------------------------------------------------------------------------------------


def linearity(sizes: Sequence[int]) -> Table:
    """Print the microseconds per equation that unzip takes for synthetic programs."""
    table = Table(title="unzip alone, microseconds per equation (medians)")
    table.add_column("program")
    for heading in ("equations", "variables", "split", "the whole pass", "in all s"):
        table.add_column(heading, justify="right")
    for nested in (False, True):
        for size in sizes:
            program = with_variables_inside(size, nested)
            equation_count = count(program.jaxpr)
            functions = {"split": splitter(program), "whole": lambda p=program: Unzip()(p)}
            gc.collect()
            gc.freeze()  # exclude the program from garbage collection
            times = take_turns(functions, max(3, min(15, 10**5 // size)))
            taken = {name: statistics.median(each) for name, each in times.items()}
            table.add_row(
                "in scopes" if nested else "flat",
                f"{equation_count:,}",
                f"{len(Unzip().unzipped(program).variables):,}",
                *(f"{each / equation_count * 1e6:.1f}" for each in taken.values()),
                f"{taken['whole']:.3f}",
            )
    return table


def splitter(program: Program) -> Callable[[], Any]:
    ins = [EARLY, READY]
    return lambda: split_body(program.jaxpr, ins, Context("variable"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="rounds of making the programs")
    parser.add_argument("--max", type=int, default=100_000, help="equations of the largest program")
    options = parser.parse_args()
    console = Console(width=110)
    console.print(transformer(options.rounds))
    console.print(linearity([n for n in (10**3, 10**4, 10**5) if n <= options.max]))


if __name__ == "__main__":
    main()
