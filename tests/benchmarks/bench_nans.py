"""Compare the search for a NaN with JAX's tools: `python tests/benchmarks/bench_nans.py`.

A NaN is planted in the gradient of a transformer and of a scan over many iterations. The table has
CPU seconds in a process that has compiled nothing: compiling and running the program, `find_nan`,
`find_nan` again, JAX's `debug_nans` under `disable_jit`, and `checkify`. It also has what each
reports.

Name models of `tests/models/zoo` (`… bench_nans.py ppo_loop mjx_pendulum`), or `zoo` for four with
many loops, to measure those instead: `find_nan`, and `watch` of a model without a NaN, are compared
with compiling and running the program, in medians over processes that have compiled nothing.
`faulty_ppo` is the PPO loop with the logarithm of a negative reward, `faulty_mjx` the step of MJX
from an infinite angle, `divided_mjx` that step with a control that is divided by a speed of zero,
and `faulty_diffrax` a gradient with the norm of a difference that starts at zero. `faults` is
all of these. `nan_NAME` is a model with a NaN in its first argument.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.execute.running.run import fitting, flat_arguments
from tests.benchmarks.models import transformer_loss, transformer_shapes


def layers(number: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the gradient of a transformer, and parameters of which some are zero."""
    shapes = transformer_shapes(number)
    values = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def loss(*args: Any) -> Any:
        return jnp.sqrt(transformer_loss(*args) * 0.0)

    return jax.grad(loss), values


def rounds(number: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the gradient of a scan with a NaN in the middle of its iterations."""

    def loss(w: Any, xs: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            return jnp.sqrt(jnp.tanh(carry @ w) + 1.0 - x), None

        return jax.lax.scan(body, jnp.ones((8, 32)), xs)[0].sum()

    xs = jnp.zeros(number).at[number // 2].set(3.0)
    return jax.grad(loss), (jnp.eye(32) / 32, xs)


def plain(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    jax.block_until_ready(jax.jit(function)(*args))
    return ""


def ours(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    first = jaxprtool.find_nan(jaxprtool.trace(function, *args), args).first
    return "nothing" if first is None else f"{first.primitive} {first.source} {first.iteration}"


def debug_nans(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    try:
        with jax.debug_nans(True), jax.debug_infs(True), jax.disable_jit():
            function(*args)
    except FloatingPointError as error:
        return str(error).splitlines()[0]
    return "nothing"


def checked(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    error, _ = jax.jit(checkify.checkify(function, errors=checkify.nan_checks))(*args)
    return (error.get() or "nothing").splitlines()[0]


PROGRAMS = {"4 layers": (layers, 4), "12 layers": (layers, 12), "1000 rounds": (rounds, 1000)}
MEANS = {"compile and run": plain, "find_nan": ours, "debug_nans": debug_nans, "checkify": checked}


def measured(program: str, means: str, results: Any) -> None:
    """Put the seconds of the first and the second call into a queue, and what was reported."""
    make, number = PROGRAMS[program]
    function, args = make(number)
    times = []
    for _ in range(2):
        start = time.process_time()
        message = MEANS[means](function, args)
        times.append(time.process_time() - start)
    results.put((*times, message))


ZOO = ("ppo_loop", "diffrax_gradient", "mjx_pendulum", "brax_pendulum")
TIMES = 3


def faulty_ppo() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the PPO loop with the logarithm of a negative reward."""
    ppo = importlib.import_module("tests.models.zoo.ppo_loop")
    move = ppo.move

    def faulty(*args: Any) -> Any:
        after, reward, done = move(*args)
        return after, jnp.log(reward - 0.85), done

    ppo.move = faulty
    function, args = ppo.model()
    return function, args


def faulty_mjx() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the step of MJX, and an infinite angle."""
    step, ((angles, speeds), control) = importlib.import_module(
        "tests.models.zoo.mjx_pendulum"
    ).model()
    return step, ((angles.at[0].set(jnp.inf), speeds), control)


def divided_mjx() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the step of MJX with a control that is divided by a speed, which is zero."""
    step, args = importlib.import_module("tests.models.zoo.mjx_pendulum").model()
    return lambda state, control: step(state, control / state[1][:1]), args


def with_nan(function: Callable[..., Any], args: Any) -> tuple[Callable[..., Any], Any]:
    """Return a model with a NaN in the first of its arguments that can have one."""
    leaves, tree = jax.tree.flatten(args)
    first = next(i for i, x in enumerate(leaves) if jnp.issubdtype(jnp.result_type(x), jnp.inexact))
    x = jnp.asarray(leaves[first])
    leaves[first] = x.at[(0,) * x.ndim].set(jnp.nan)
    return function, jax.tree.unflatten(tree, leaves)


def faulty_diffrax() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the gradient of a Diffrax solve, with the norm of a difference that starts at zero."""
    equinox = importlib.import_module("equinox")
    diffrax_gradient = importlib.import_module("tests.models.zoo.diffrax_gradient")
    _, (field, start) = diffrax_gradient.model()

    def loss(field: Any, start: Any) -> Any:
        return diffrax_gradient.loss(lambda y: field(y) - jnp.linalg.norm(y - start), start)

    return equinox.filter_value_and_grad(loss), (field, start)


FAULTY = {
    "faulty_ppo": faulty_ppo,
    "faulty_mjx": faulty_mjx,
    "divided_mjx": divided_mjx,
    "faulty_diffrax": faulty_diffrax,
}


#: The prefix of a model with a NaN in its first argument.
WITH_NAN = "nan_"


def has_fault(name: str) -> bool:
    return name in FAULTY or name.startswith(WITH_NAN)


def measured_model(name: str, means: str, results: Any) -> None:
    """Put the seconds that a tool takes for a model into a queue."""
    is_faulty, has_nan = has_fault(name), name.startswith(WITH_NAN)
    name = name.removeprefix(WITH_NAN)
    model = FAULTY.get(name) or importlib.import_module(f"tests.models.zoo.{name}").model
    function, args = with_nan(*model()) if has_nan else model()
    program = jaxprtool.trace(function, *args)
    flat = fitting(program, flat_arguments(program, args))
    jax.jit(lambda: jnp.zeros(()))()
    start = time.process_time()
    if means == "compile and run":
        jax.block_until_ready(jax.jit(jaxcompat.jaxpr_as_fun(program.jaxpr))(*flat))
    elif means == "find_nan":
        assert bool(jaxprtool.find_nan(program, args).found) == is_faulty
    else:
        jaxprtool.watch(program, args)
    results.put(time.process_time() - start)


def models(names: Sequence[str]) -> None:
    """Print the times of models."""
    means = "compile and run", "find_nan", "watch"
    table = Table("s of CPU time", *means[:2], "times", means[2], "times")
    spawn = multiprocessing.get_context("spawn")
    for name in names:
        seconds = []
        for each in means[: 2 if has_fault(name) else 3]:
            results = spawn.Queue()
            for _ in range(TIMES):
                process = spawn.Process(target=measured_model, args=(name, each, results))
                process.start()
                process.join()
                if process.exitcode:
                    sys.exit(f"{each} of {name} failed")
            seconds.append(median(results.get() for _ in range(TIMES)))
        plain, *ours = seconds
        row = [plain, *(x for each in ours for x in (each, each / plain))]
        table.add_row(name, *(f"{x:.2f}" for x in row))
    Console(width=140).print(table)


def tools() -> None:
    """Print the times of JAX's tools and ours."""
    table = Table("", "by", "s, first", "s, again", "says")
    spawn = multiprocessing.get_context("spawn")
    for program in PROGRAMS:
        for means in MEANS:
            results = spawn.Queue()
            process = spawn.Process(target=measured, args=(program, means, results))
            process.start()
            first, again, message = results.get()
            process.join()
            table.add_row(program, means, f"{first:.2f}", f"{again:.2f}", message)
    Console(width=140).print(table)


def main() -> None:
    groups = {"zoo": (*ZOO, *FAULTY), "faults": tuple(FAULTY)}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="models of the zoo, faulty ones, zoo or faults")
    names = [name for given in parser.parse_args().models for name in groups.get(given, (given,))]
    if names:
        models(names)
    else:
        tools()


if __name__ == "__main__":
    main()
