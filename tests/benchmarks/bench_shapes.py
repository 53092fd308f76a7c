"""Measure programs whose sizes vary: `python tests/benchmarks/bench_shapes.py`.

Lengths are those of the sentences of Python's own documentation (`pydoc_data.topics`), in words and
punctuation marks, or drawn from a lognormal distribution with the same mean and deviation of the
logarithm. Lengths above the largest bucket are left out.

Speed: examples per second, for a loss and for its gradient with respect to the parameters. The ways
are

    a compile a length    `jax.jit` of the function of one example;
    longest, by hand      all examples padded to the maximum, with hand-written masks;
    buckets, by hand      padded to the next of a few sizes, with hand-written masks;
    mask, buckets         the same sizes, with the masks that `mask` inserts;
    ragged                examples concatenated, in arrays with the rows of all.

With one example per call, the time includes the padding. With several, the examples of a bucket are
batched by `vmap`, and arrays are padded in advance. All ways alternate. The tables have medians,
and the medians of the ratios of each round. Compilations are counted and timed separately.

Masks: the `select_n` equations of a masked program, at all depths, and those of hand-written masks.
Also the time of the passes mask and ragged, on a deep transformer.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.backends import clear_caches
from jaxprtool.ir.equations import equations
from jaxprtool.ir.program import Program
from jaxprtool.ir.ragged import unchecked
from jaxprtool.passes.mapping.mask import Mask
from jaxprtool.passes.mapping.ragged import RaggedBatch as RaggedPass
from tests.benchmarks.length_models import MODELS, Model
from tests.benchmarks.models import transformer_loss, transformer_shapes
from tests.programs.masking import count_masks

BUCKETS = (16, 32, 64, 128)
LONGEST = BUCKETS[-1]

#: The examples in a call, and the examples of a packed call with the rows that they share.
LANES = 32
PACKED, ROWS = 48, 1024


# --- lengths --------------------------------------------------------------------------------------


def sentence_lengths() -> np.ndarray:
    """Count the words and punctuation marks of each sentence of Python's documentation."""
    paragraphs = (
        " ".join(text.split())
        for topic in topics.values()
        for text in re.split(r"\n\s*\n", topic)
        if not text.startswith("   ") and "::=" not in text and re.search(r"\w", text)
    )
    sentences = (s for text in paragraphs for s in re.split(r"(?<=[.!?])\s+(?=[A-Z])", text))
    lengths = np.array([len(re.findall(r"\w+|[^\w\s]", s)) for s in sentences])
    return lengths[(lengths > 1) & (lengths <= LONGEST)]


def drawn_lengths(count: int) -> dict[str, np.ndarray]:
    """Return lengths drawn from the sentences, and from a lognormal distribution fitted to them."""
    rng, sentences = np.random.RandomState(0), sentence_lengths()
    logs = np.log(sentences)
    fitted = np.rint(np.exp(rng.normal(logs.mean(), logs.std(), size=count)))
    return {
        "sentences": rng.choice(sentences, count),
        "lognormal": np.clip(fitted, 1, LONGEST).astype(int),
    }


def lengths_table(drawn: dict[str, np.ndarray]) -> Table:
    table = Table(title="lengths drawn")
    for heading in ("", "examples", "different", "mean", "10%", "50%", "90%", "longest"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, each in drawn.items():
        tenths = np.percentile(each, (10, 50, 90, 100))
        numbers = (f"{x:.0f}" for x in tenths)
        table.add_row(name, f"{len(each)}", f"{len(set(each))}", f"{each.mean():.1f}", *numbers)
    return table


# --- compilations ---------------------------------------------------------------------------------


class Compilations:
    """Counts the programs that XLA has compiled."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, seconds: float, **_: Any) -> None:
        self.count += event.endswith("backend_compile_duration")


# --- the ways -------------------------------------------------------------------------------------

Example = tuple[Any, ...]

#: A way takes no arguments and returns the results of all examples.
Way = Callable[[], list[Any]]


def bucket_of(n: int) -> int:
    return next(bucket for bucket in BUCKETS if n <= bucket)


def padded(example: Example, size: int) -> Example:
    return tuple(
        np.concatenate([x, np.zeros((size - len(x), *x.shape[1:]), x.dtype)]) for x in example
    )


def masked(fun: Callable[..., Any], model: Model, parameters: Any, bound: int) -> Program:
    program = symbolic(fun, model, parameters).apply(f"mask(n={bound})")
    assert isinstance(program, Program)
    return program


def symbolic(fun: Callable[..., Any], model: Model, parameters: Any) -> Program:
    """Return the program of a function of parameters and an example of n rows."""
    (n,) = jax.export.symbolic_shape("n")
    structs = (
        jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype)
        for x in model.example(np.random.RandomState(0), 3)
    )
    return jaxprtool.trace(fun, parameters, *structs)


def one_a_call(
    model: Model, gradient: bool, parameters: Any, examples: list[Example]
) -> dict[str, Way]:
    """Return the ways to process one example per call."""
    fun, by_hand = model.fun, model.by_hand
    if gradient:
        fun, by_hand = jax.grad(fun), jax.grad(by_hand)
    alone, with_masks = jax.jit(fun), jax.jit(by_hand)
    names = list(inspect.signature(model.fun).parameters)[1:]
    types = dict(zip(names, model.types, strict=True))
    bucketed = jaxprtool.jit(fun, shapes={"n": BUCKETS}, types=types)

    def hand_padded(size_of: Callable[[int], int]) -> list[Any]:
        return [with_masks(parameters, *padded(x, size_of(len(x[0]))), len(x[0])) for x in examples]

    return {
        "a compile a length": lambda: [alone(parameters, *x) for x in examples],
        "longest, by hand": lambda: hand_padded(lambda n: LONGEST),
        "buckets, by hand": lambda: hand_padded(bucket_of),
        "mask, buckets": lambda: [bucketed(parameters, *x) for x in examples],
    }


def batched(
    model: Model, gradient: bool, parameters: Any, examples: list[Example]
) -> dict[str, Way]:
    """Return the ways to process several examples per call."""
    makers = {bound: masked(model.fun, model, parameters, bound) for bound in BUCKETS}

    def of_batch(fun: Callable[..., Any]) -> Any:
        """Return the losses of a batch, or the gradient of the sum of the real ones."""
        mapped = jax.vmap(fun, in_axes=(None, *(0,) * (len(examples[0]) + 1)))
        return finished(lambda p, *args: mapped(p, *args))

    def of_ragged(p: Any, *xs: Any) -> Any:
        return jaxprtool.vmap(model.fun, in_axes=(None, *(0,) * len(xs)))(p, *xs)

    def finished(losses: Callable[..., Any]) -> Any:
        def total(p: Any, real: Any, *xs: Any) -> Any:
            return jnp.where(real, losses(p, *xs), 0).sum()

        return jax.jit(jax.grad(total) if gradient else total)

    hand = of_batch(model.by_hand)
    written = {bound: of_batch(program) for bound, program in makers.items()}
    ragged = finished(of_ragged)
    longest, buckets = batches(examples, (LONGEST,)), batches(examples, BUCKETS)
    packs = packed(examples)
    return {
        "longest, by hand": lambda: [hand(parameters, *xs) for _, xs in longest],
        "buckets, by hand": lambda: [hand(parameters, *xs) for _, xs in buckets],
        "mask, buckets": lambda: [written[bound](parameters, *xs) for bound, xs in buckets],
        "ragged": lambda: [ragged(parameters, *xs) for xs in packs],
    }


def batches(examples: list[Example], sizes: Sequence[int]) -> list[tuple[int, Example]]:
    """Return batches of one size each: a mask of the real examples, their arrays, and lengths."""
    by_size: dict[int, list[Example]] = defaultdict(list)
    for x in examples:
        by_size[next(size for size in sizes if len(x[0]) <= size)].append(x)
    found = []
    for size, each in sorted(by_size.items()):
        for i in range(0, len(each), LANES):
            some, real = filled(each[i : i + LANES], LANES)
            columns = zip(*(padded(x, size) for x in some), strict=True)
            lengths = np.array([len(x[0]) for x in some], np.int32)
            found.append((size, (real, *map(np.stack, columns), lengths)))
    return found


def filled(examples: list[Example], lanes: int) -> tuple[list[Example], np.ndarray]:
    """Pad a batch to `lanes` examples with examples of one row, and return a mask too."""
    count = len(examples)
    one = tuple(np.ones_like(x[:1]) for x in examples[0])
    return [*examples, *[one] * (lanes - count)], np.arange(lanes) < count


def packed(examples: list[Example]) -> list[Example]:
    """Concatenate as many examples as fit into the rows. Return a mask of the real ones too."""
    packs: list[list[Example]] = [[]]
    for x in examples:
        rows = sum(len(each[0]) for each in (*packs[-1], x))
        if rows + PACKED - len(packs[-1]) > ROWS or len(packs[-1]) == PACKED:
            packs.append([])
        packs[-1].append(x)
    found = []
    for pack in packs:
        some, real = filled(pack, PACKED)
        ragged = (jaxprtool.Ragged.of(each, rows=ROWS) for each in zip(*some, strict=True))
        bounded = (unchecked(r.values, r.lengths, "n", LONGEST, False) for r in ragged)
        found.append((real, *bounded))
    return found


# --- speed ----------------------------------------------------------------------------------------


def speed_table(
    title: str, lengths: np.ndarray, options: argparse.Namespace, compilations: Compilations
) -> Table:
    table = Table(title=title)
    table.add_column("model")
    table.add_column("way")
    headings = ("examples/s", "of longest", "of the same by hand", "compiled", "first time, s")
    for heading in headings:
        table.add_column(heading, justify="right")
    for model in MODELS:
        if model.name not in ("transformer layer", "RNN") or options.model not in model.name:
            continue
        rng = np.random.RandomState(1)
        parameters = model.parameters(rng)
        examples = [model.example(rng, int(n)) for n in lengths]
        for gradient in (False, True):
            for make, how in ((one_a_call, "1 a call"), (batched, f"{LANES} a call")):
                if not how.startswith(options.calls):
                    continue
                ways = make(model, gradient, parameters, examples)
                firsts = {name: first_time(way, compilations) for name, way in ways.items()}
                same_totals(ways)
                times = by_turns(ways, options.rounds)
                what = f"{model.name}{', gradient' if gradient else ''}, {how}"
                for row in rows(times, firsts, len(examples)):
                    table.add_row(what, *row)
                    what = ""
                table.add_section()
    return table


def first_time(way: Way, compilations: Compilations) -> tuple[int, float]:
    before, start = compilations.count, time.perf_counter()
    jax.block_until_ready(way())
    return compilations.count - before, time.perf_counter() - start


def same_totals(ways: dict[str, Way]) -> None:
    """Assert that the sums of the results of all ways agree."""
    first, *others = (
        [sum(map(jnp.sum, leaves)) for leaves in zip(*map(jax.tree.leaves, way()), strict=True)]
        for way in ways.values()
    )
    for other in others:
        np.testing.assert_allclose(first, other, rtol=2e-3, atol=1e-2)


def by_turns(ways: dict[str, Way], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds):
        for name in sorted(ways, reverse=bool(i % 2)):
            gc.collect()
            start = time.perf_counter()
            jax.block_until_ready(ways[name]())
            times[name].append(time.perf_counter() - start)
    return times


def rows(
    times: dict[str, list[float]], firsts: dict[str, tuple[int, float]], count: int
) -> Iterator[list[str]]:
    for name, taken in times.items():
        compiled, first = firsts[name]
        yield [
            name,
            f"{count / statistics.median(taken):,.0f}",
            f"{ratio(times['longest, by hand'], taken):.2f}",
            f"{ratio(times['buckets, by hand'], taken):.2f}" if name == "mask, buckets" else "",
            str(compiled),
            f"{first:.2f}",
        ]


def ratio(before: Sequence[float], after: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(before, after, strict=True))


# --- masks ----------------------------------------------------------------------------------------


def masks_table() -> Table:
    """Count the masks. The programs are checked to return the same values."""
    table = Table(title="select_n at all depths: by hand, mask, and simplified after it")
    table.add_column("model")
    for heading in ("", "gradient: "):
        for what in ("by hand", "mask", "mask, simplify"):
            table.add_column(f"{heading}{what}", justify="right")
    for model in MODELS:
        counts: list[str] = []
        for gradient in (False, True):
            try:
                counts += map(str, masks(model, gradient))
            except UnsupportedError as error:
                counts += ["", error.message, ""]
        table.add_row(model.name, *counts)
    return table


def masks(model: Model, gradient: bool) -> list[int]:
    fun, by_hand = (
        jax.grad(summed(f, model)) if gradient else f for f in (model.fun, model.by_hand)
    )
    rng = np.random.RandomState(2)
    parameters, n, size = model.parameters(rng), np.int32(5), 8
    example = model.example(rng, 5)
    args = parameters, *padded(example, size), n
    hand = jaxprtool.trace(by_hand, *args)
    extra = count_masks(jaxprtool.trace(fun, parameters, *example).apply("inline"))
    ours = masked(fun, model, parameters, size)
    programs = [hand, ours, ours.apply("simplify, dce")]
    expected = fun(parameters, *example)
    for program in programs:
        check(expected, program(*args))
    return [count_masks(program.apply("inline")) - extra for program in programs]


def summed(fun: Callable[..., Any], model: Model) -> Callable[..., Any]:
    """Return the function, or the sum of the squares of the real rows of its result."""
    if model.is_loss:
        return fun

    def of_rows(p: Any, x: Any, *n: Any) -> Any:
        squares = jnp.square(fun(p, x, *n))
        if n and squares.ndim > 1:
            squares = jnp.where(jnp.arange(len(x))[:, None] < n[0], squares, 0)
        return squares.sum()

    return of_rows


def check(expected: Any, got: Any) -> None:
    """Assert that both agree. A masked program returns its sizes as additional last results."""
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=False):
        b = np.asarray(b)[tuple(map(slice, np.shape(a)))]
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


# --- the pass -------------------------------------------------------------------------------------


def pass_table(rounds: int) -> Table:
    """Time the passes on the loss of a deep transformer, and on its gradient."""
    table = Table(title="the passes, seconds (medians): with empty caches, and again")
    table.add_column("pass")
    table.add_column("program")
    for heading in ("equations", "made", "cold", "warm", "warm, of 10,000 equations"):
        table.add_column(heading, justify="right")
    (n,) = jax.export.symbolic_shape("n")
    passes = {"mask": Mask({"n": 128}), "ragged": RaggedPass("n", lanes=LANES)}
    for name, fun, layers in (
        ("transformer", transformer_loss, 300),
        ("transformer, gradient", jax.grad(transformer_loss), 90),
    ):
        parameters, x = transformer_shapes(layers)
        x = jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype)
        for which, apply in passes.items():
            times: dict[str, list[float]] = {"cold": [], "warm": []}
            for i in range(2 * rounds):
                kind = "cold" if i < rounds else "warm"
                if kind == "cold":
                    jax.clear_caches()
                    clear_caches()
                fresh = jaxprtool.trace(fun, parameters, x)
                gc.collect()
                start = time.perf_counter()
                made = apply(fresh)
                times[kind].append(time.perf_counter() - start)
            assert isinstance(made, Program)
            cold, warm = (statistics.median(each) for each in times.values())
            size = count(fresh)
            row = (f"{size:,}", f"{count(made):,}", f"{cold:.2f}", f"{warm:.2f}")
            table.add_row(which, name, *row, f"{warm * 1e4 / size:.2f}")
    return table


def count(program: Program) -> int:
    return sum(1 for _ in equations(jaxcompat.open_jaxpr(program.jaxpr)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--examples", type=int, default=512)
    parser.add_argument("--only", default="", help="masks, speed or pass")
    parser.add_argument("--model", default="", help="part of the name of a model")
    parser.add_argument("--lengths", default="", help="sentences or lognormal")
    parser.add_argument("--calls", default="", help="1 or 32: examples per call")
    options = parser.parse_args()
    console = Console(width=150)
    compilations = Compilations()
    if options.only in ("", "masks"):
        console.print(masks_table())
    if options.only in ("", "pass"):
        console.print(pass_table(max(1, options.rounds // 2)))
    if options.only in ("", "speed"):
        drawn = drawn_lengths(options.examples)
        console.print(lengths_table(drawn))
        for name, lengths in drawn.items():
            if options.lengths not in name:
                continue
            console.print(
                speed_table(f"{name}, JAX {jax.__version__}", lengths, options, compilations)
            )


if __name__ == "__main__":
    main()
