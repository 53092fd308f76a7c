"""Compare `bench` and `run` with loops written by hand.

    run     a warm call as `run` times it, and the same call of `jax.jit`
    bench   a turn of `bench`, and a loop over `jax.jit`
    itself  a program against itself: how often the 95% interval contains 1

All alternate, and ratios have the intervals of `bench`. `--trials N` sets the number of repetitions
of `itself`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import jaxprtool
from jaxprtool.commands.bench.bench import RoundLimits, TurnsHere, paired_ratio, rounds
from jaxprtool.commands.compare.variants import Variant
from jaxprtool.execute.running.run import arguments_placed, compiled_program
from jaxprtool.ir.process import without_collector


def small(x: Any) -> Any:
    return x * 2 + 1


def matmul(x: Any) -> Any:
    return x @ x


def step(params: Any) -> Any:
    return {name: value - 0.1 * jnp.sin(value) for name, value in params.items()}


def mlp(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return jnp.square(y).mean()

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "x * 2 + 1, 8 elements": (small, (jnp.ones(8),), {}),
    "x @ x, 200 x 200": (matmul, (jnp.ones((200, 200)),), {}),
    "300 arrays in a dict": (step, ({f"p{i:03}": jnp.ones(8) for i in range(300)},), {}),
    "300 arrays, donated": (
        step,
        ({f"p{i:03}": jnp.ones(8) for i in range(300)},),
        {"donate_argnums": 0},
    ),
    "a training step, 6 ms": (mlp, ([jnp.ones((256, 256)) / 256] * 6, jnp.ones((256, 256))), {}),
}


class Hand:
    """The loop that a user writes, as a variant."""

    def __init__(self, case: str, number: int):
        fun, self._args, options = CASES[case]
        self._call, self._donates, self._number = jax.jit(fun, **options), bool(options), number
        if self._donates:
            self._args = jax.tree.map(jnp.copy, self._args)
        seconds = min(self._loop(1) for _ in range(20))
        self._repeat = max(1, int(5e-3 / (number * seconds)))

    def _loop(self, number: int) -> float:
        call, args, block = self._call, self._args, jax.block_until_ready
        start = time.perf_counter()
        if self._donates:  # each result is the argument of the next call
            (state,) = args
            for _ in range(number):
                state = block(call(state))
            self._args = (state,)
        else:
            for _ in range(number):
                block(call(*args))
        return (time.perf_counter() - start) / number

    def start(self) -> Any:
        raise NotImplementedError

    def turn(self) -> float:
        self._loop(1)
        return statistics.median(self._loop(self._number) for _ in range(self._repeat))


class Once(Hand):
    """Ten calls, each timed separately, as a user times a call."""

    def turn(self) -> float:
        return statistics.median(self._loop(1) for _ in range(10))


class OfRun:
    """Ten warm calls, as `run` times them."""

    def __init__(self, program: jaxprtool.Program, arguments: list[Any]):
        self._program, self._arguments = program, arguments
        with arguments_placed(program, arguments, None) as (there, _):
            self._made = compiled_program(program, there, lambda doing: None)
            self._made.first_call(there)

    def start(self) -> Any:
        raise NotImplementedError

    def turn(self) -> float:
        with (
            arguments_placed(self._program, self._arguments, None) as (there, _),
            without_collector(),
        ):
            return statistics.median(self._made.seconds(there) for _ in range(10))


def traced(case: str) -> tuple[jaxprtool.Program, list[Any]]:
    fun, args, options = CASES[case]
    return jaxprtool.trace(jax.jit(fun, **options), *args), jax.tree.leaves(args)


def row(name: str, ours: Any, theirs: Any, count: int) -> tuple[str, ...]:
    mine, hand = rounds([ours, theirs], RoundLimits(count), lambda doing: None)
    found = paired_ratio(mine, hand)
    medians = (f"{statistics.median(each) * 1e6:.2f}" for each in (mine, hand))
    return (name, *medians, f"{found.median:.3f}", f"{found.low:.3f} to {found.high:.3f}")


def beside(title: str, count: int, which: str) -> Table:
    table = Table("", "ours µs", "by hand µs", "ratio", "95% interval", title=title)
    for case in CASES:
        program, arguments = traced(case)
        if which == "run":
            table.add_row(*row(case, OfRun(program, arguments), Once(case, 1), count))
            continue
        ours = TurnsHere(Variant(case, program), arguments)
        table.add_row(*row(case, ours, Hand(case, ours.start().calls), count))
    return table


def itself(trials: int) -> Table:
    table = Table("", "trials", "contain 1", "half width", "farthest ratio", title="itself")
    for case in CASES:
        program, arguments = traced(case)
        found = []
        for _ in range(trials):
            pair = [TurnsHere(Variant(name, program), arguments) for name in ("a", "b")]
            for each in pair:
                each.start()
            found.append(paired_ratio(*rounds(pair, RoundLimits(50), lambda doing: None)))
        hits = sum(each.low <= 1 <= each.high for each in found)
        width = statistics.median(each.precision for each in found)
        farthest = max((each.median for each in found), key=lambda ratio: abs(ratio - 1))
        table.add_row(case, str(trials), str(hits), f"{width:.1%}", f"{farthest:.3f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--trials", type=int, default=10)
    given = parser.parse_args()
    console = Console()
    console.print(f"JAX {jax.__version__}")
    console.print(beside("a warm call of run", given.rounds, "run"))
    console.print(beside("a turn of bench", given.rounds, "bench"))
    console.print(itself(given.trials))


if __name__ == "__main__":
    main()
