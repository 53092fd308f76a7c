"""Programs whose sizes vary, in one run: `python tests/benchmarks/bench_shapes.py`.

Lengths are those of the sentences of Python's own documentation (`pydoc_data.topics`), in words and
punctuation, and of a lognormal with the same mean and deviation of their logarithms. Longer ones
than the longest bucket are left out.

Speed: examples a second, the value of a loss and its gradient by the parameters. The ways are

    a compile a length    `jax.jit` of the function of one example;
    longest, by hand      all examples padded to the longest, with hand-written masks;
    buckets, by hand      padded to the next of a few sizes, with hand-written masks;
    mask, buckets         the same sizes, with the masks that `mask` writes;
    ragged                examples one after the other, in arrays with the rows of all.

One example a call pads within the time that is taken. With several a call, by `vmap`, the examples
of a bucket are batched, and arrays are padded before. All ways take turns; medians are given, and
the medians of ratios round by round. What is compiled is counted, and timed, apart.

Masks: the `select_n` of a masked program, at all depths, beside those written by hand. And the time
of the pass, on a deep transformer.
"""

from __future__ import annotations

import argparse
import gc
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
from jaxprtool.ir.caches import clear_caches
from jaxprtool.ir.equations import equations
from jaxprtool.ir.program import Program
from tests.benchmarks.length_models import MODELS, Model
from tests.benchmarks.models import transformer_loss, transformer_shapes

BUCKETS = (16, 32, 64, 128)
LONGEST = BUCKETS[-1]

#: Examples in a call, and rows of those that are packed.
LANES, ROWS = 32, 1024


# --- lengths --------------------------------------------------------------------------------------


def sentence_lengths() -> np.ndarray:
    """The words and punctuation of each sentence of Python's documentation."""
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
    """Lengths drawn from the sentences, and from a lognormal fitted to them."""
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


# --- what is compiled -----------------------------------------------------------------------------


class Compilations:
    """How many programs XLA has compiled."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, seconds: float, **_: Any) -> None:
        self.count += event.endswith("backend_compile_duration")


# --- the ways -------------------------------------------------------------------------------------

Example = tuple[Any, ...]

#: A way takes nothing and gives the results of all examples, which are held ready.
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
    """A function of parameters and an example of n rows, as a program."""
    (n,) = jax.export.symbolic_shape("n")
    structs = (
        jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype)
        for x in model.example(np.random.RandomState(0), 3)
    )
    return jaxprtool.trace(fun, parameters, *structs)


def one_a_call(
    model: Model, gradient: bool, parameters: Any, examples: list[Example]
) -> dict[str, Way]:
    """The ways to take one example after the other."""
    fun, by_hand = model.fun, model.by_hand
    if gradient:
        fun, by_hand = jax.grad(fun), jax.grad(by_hand)
    alone, with_masks = jax.jit(fun), jax.jit(by_hand)
    bucketed = jaxprtool.jit(fun, shapes={"n": BUCKETS})

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
    """The ways to take several examples in a call."""
    makers = {bound: masked(model.fun, model, parameters, bound) for bound in BUCKETS}

    def of_batch(fun: Callable[..., Any]) -> Any:
        """The losses of a batch, or the gradient of their sum."""
        axes = (None, *(0,) * (len(examples[0]) + 1))
        mapped = jax.vmap(fun, in_axes=axes)
        return jax.jit(jax.grad(lambda *args: mapped(*args).sum()) if gradient else mapped)

    def of_ragged(p: Any, *xs: Any) -> Any:
        losses = jaxprtool.vmap(model.fun, in_axes=(None, *(0,) * len(xs)))(p, *xs)
        return losses[:-1].sum() if gradient else losses  # the last one is what fills the rows

    hand = of_batch(model.by_hand)
    written = {bound: of_batch(program) for bound, program in makers.items()}
    ragged = jax.jit(jax.grad(of_ragged) if gradient else of_ragged)
    longest, buckets = batches(examples, (LONGEST,)), batches(examples, BUCKETS)
    packs = list(packed(examples))
    return {
        "longest, by hand": lambda: [hand(parameters, *xs) for _, xs in longest],
        "buckets, by hand": lambda: [hand(parameters, *xs) for _, xs in buckets],
        "mask, buckets": lambda: [written[bound](parameters, *xs) for bound, xs in buckets],
        "ragged": lambda: [ragged(parameters, *xs) for xs in packs],
    }


def batches(examples: list[Example], sizes: Sequence[int]) -> list[tuple[int, Example]]:
    """Batches of examples of alike sizes, with their lengths; what fills the last has length 0."""
    by_size: dict[int, list[Example]] = defaultdict(list)
    for x in examples:
        by_size[next(size for size in sizes if len(x[0]) <= size)].append(x)
    found = []
    for size, each in sorted(by_size.items()):
        for i in range(0, len(each), LANES):
            some = each[i : i + LANES]
            fill = [tuple(x[:0] for x in some[0])] * (LANES - len(some))
            rows = [padded(x, size) for x in (*some, *fill)]
            lengths = np.array([len(x[0]) for x in (*some, *fill)], np.int32)
            found.append((size, (*map(np.stack, zip(*rows, strict=True)), lengths)))
    return found


def packed(examples: list[Example]) -> Iterator[Example]:
    """As many examples as fit, one after the other, and a last one that fills the rows."""
    lanes = 1 + max(map(len, _packs(examples)))
    for some in _packs(examples):
        lengths = [len(x[0]) for x in some]
        lengths += [0] * (lanes - 1 - len(some)) + [ROWS - sum(lengths)]
        columns = (np.concatenate(each) for each in zip(*some, strict=True))
        yield tuple(
            jaxprtool.Ragged(*padded((x,), ROWS), np.array(lengths, np.int32)) for x in columns
        )


def _packs(examples: list[Example]) -> list[list[Example]]:
    packs: list[list[Example]] = [[]]
    left = ROWS
    for x in examples:
        if len(x[0]) > left:
            packs.append([])
            left = ROWS
        packs[-1].append(x)
        left -= len(x[0])
    return packs


# --- speed ----------------------------------------------------------------------------------------


def speed_table(title: str, lengths: np.ndarray, rounds: int, compilations: Compilations) -> Table:
    table = Table(title=title)
    table.add_column("model")
    table.add_column("way")
    headings = ("examples/s", "of longest", "of the same by hand", "compiled", "first time, s")
    for heading in headings:
        table.add_column(heading, justify="right")
    for model in (m for m in MODELS if m.name in ("transformer layer", "RNN")):
        rng = np.random.RandomState(1)
        parameters = model.parameters(rng)
        examples = [model.example(rng, int(n)) for n in lengths]
        for gradient in (False, True):
            for make, how in ((one_a_call, "1 a call"), (batched, f"{LANES} a call")):
                ways = make(model, gradient, parameters, examples)
                firsts = {name: first_time(way, compilations) for name, way in ways.items()}
                times = by_turns(ways, rounds)
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
    """Count the masks, of programs that are checked to give the same."""
    table = Table(title="select_n at all depths: by hand, mask, and simplified after it")
    table.add_column("model")
    for heading in ("", "gradient: "):
        for what in ("by hand", "mask", "mask, simplify"):
            table.add_column(f"{heading}{what}", justify="right")
    for model in MODELS:
        counts: list[str] = []
        for gradient in (False, True):
            counts += map(str, masks(model, gradient))
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
    extra = selects(jaxprtool.trace(fun, parameters, *example))
    ours = masked(fun, model, parameters, size)
    simple = ours.apply("simplify, dce")
    assert isinstance(simple, Program)
    expected = fun(parameters, *example)
    for program in (hand, ours, simple):
        check(expected, program(*args))
    return [selects(program) - extra for program in (hand, ours, simple)]


def summed(fun: Callable[..., Any], model: Model) -> Callable[..., Any]:
    """The function, or the sum of the squares of the real rows of its result."""
    if model.is_loss:
        return fun

    def of_rows(p: Any, x: Any, *n: Any) -> Any:
        squares = jnp.square(fun(p, x, *n))
        if n and squares.ndim > 1:
            squares = jnp.where(jnp.arange(len(x))[:, None] < n[0], squares, 0)
        return squares.sum()

    return of_rows


def selects(program: Program) -> int:
    top = jaxcompat.open_jaxpr(program.jaxpr)
    return sum(eqn.primitive.name == "select_n" for eqn in equations(top))


def check(expected: Any, got: Any) -> None:
    """What a masked program gives besides, its sizes, comes last."""
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=False):
        b = np.asarray(b)[tuple(map(slice, np.shape(a)))]
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


# --- the pass -------------------------------------------------------------------------------------


def pass_table(rounds: int) -> Table:
    """Time the pass on the loss of a deep transformer, and on its gradient."""
    table = Table(title="the pass, seconds (medians): when nothing is remembered, and again")
    table.add_column("program")
    for heading in ("equations", "made", "cold", "warm", "warm, of 10,000 equations"):
        table.add_column(heading, justify="right")
    (n,) = jax.export.symbolic_shape("n")
    for name, fun, layers in (
        ("transformer", transformer_loss, 300),
        ("transformer, gradient", jax.grad(transformer_loss), 90),
    ):
        parameters, x = transformer_shapes(layers)
        program = jaxprtool.trace(fun, parameters, x.update(shape=(n, *x.shape[1:])))
        size = count(program)
        times: dict[str, list[float]] = {"cold": [], "warm": []}
        for i in range(2 * rounds):
            kind = "cold" if i < rounds else "warm"
            if kind == "cold":
                jax.clear_caches()
                clear_caches()
            fresh = program.replace(
                jaxpr=jaxprtool.trace(fun, parameters, x.update(shape=(n, *x.shape[1:]))).jaxpr
            )
            gc.collect()
            start = time.perf_counter()
            made = fresh.apply("mask(n=128)")
            times[kind].append(time.perf_counter() - start)
        cold, warm = (statistics.median(each) for each in times.values())
        assert isinstance(made, Program)
        row = (f"{size:,}", f"{count(made):,}", f"{cold:.2f}", f"{warm:.2f}")
        table.add_row(name, *row, f"{warm * 1e4 / size:.2f}")
    return table


def count(program: Program) -> int:
    return sum(1 for _ in equations(jaxcompat.open_jaxpr(program.jaxpr)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--examples", type=int, default=512)
    parser.add_argument("--only", default="", help="masks, speed or pass")
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
            console.print(
                speed_table(f"{name}, JAX {jax.__version__}", lengths, options.rounds, compilations)
            )


if __name__ == "__main__":
    main()
