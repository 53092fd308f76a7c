"""Random programs with variants: the same sums and products in another order, and wrong ones.

The programs are gradients, means and nondimensional states. The functions that a program sums and
multiplies with are given to it (`Ways`), so that a variant differs from it in nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_WIDE_RANGE = tuple(10.0 ** np.linspace(-12, 12, 20))

#: The magnitudes of the arguments by dtype.
MAGNITUDES = {
    "float64": _WIDE_RANGE,
    "float32": _WIDE_RANGE,
    "bfloat16": _WIDE_RANGE,
    "float16": tuple(10.0 ** np.linspace(-2, 0.7, 20)),
}

#: The factors of wrong results: wrong by more than a relative 1e-2 in each dtype.
WRONG = (0.98, 0.989, 1.0156, 1.02, 1.1, 0.5, 2.0, -1.0, 100.0)


@dataclass(frozen=True)
class Case:
    """A program, its variants, and the magnitudes of its arguments.

    Attributes:
        name: The family, the dtype, and the choices.
        reference: The program.
        same: The same with other orders of its operations.
        wrong: A wrong variant.
        arguments: The arguments for each magnitude.
    """

    name: str
    reference: Callable[..., Any]
    same: Callable[..., Any]
    wrong: Callable[..., Any]
    arguments: Sequence[tuple[Any, ...]]


# --- sums and products ----------------------------------------------------------------------------


def _halves(x: Any, axis: int) -> Any:
    n = x.shape[axis] // 2
    one, other = jnp.split(x, [n], axis)
    return one.sum(axis) + other.sum(axis)


def _one_by_one(x: Any, axis: int) -> Any:
    rows = jnp.moveaxis(x, axis, 0)
    return jax.lax.scan(lambda s, row: (s + row, None), jnp.zeros_like(rows[0]), rows)[0]


SUMS: list[Callable[[Any, int], Any]] = [
    lambda x, axis: x.sum(axis),
    lambda x, axis: jnp.flip(x, axis).sum(axis),
    _halves,
    lambda x, axis: jnp.moveaxis(x, axis, -1) @ jnp.ones(x.shape[axis], x.dtype),
    _one_by_one,
]
MEANS = [
    lambda total, x, axis: total(x, axis) / x.shape[axis],
    lambda total, x, axis: total(x / x.shape[axis], axis),
    lambda total, x, axis: total(x, axis) * (1 / x.shape[axis]),
]
PRODUCTS: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a @ b,
    lambda a, b: (b.T @ a.T).T,
    lambda a, b: a[:, ::2] @ b[::2] + a[:, 1::2] @ b[1::2],
]
CHAINS: list[Callable[[Any, Any, Any], Any]] = [
    lambda product, a, b, c: product(product(a, b), c),
    lambda product, a, b, c: product(a, product(b, c)),
]
THREES = [
    lambda a, b, c: (a + b) + c,
    lambda a, b, c: a + (b + c),
    lambda a, b, c: (a + c) + b,
]
SCALINGS = [
    lambda a, b, c: (a * b) * c,
    lambda a, b, c: a * (b * c),
    lambda a, b, c: (a * c) * b,
]


@dataclass(frozen=True)
class Ways:
    """A way to compute each sum and product."""

    total: Callable[..., Any]
    mean_of: Callable[..., Any]
    product: Callable[..., Any]
    chain_of: Callable[..., Any]
    three: Callable[..., Any]
    scaled: Callable[..., Any]

    @classmethod
    def drawn(cls, draw: random.Random) -> Ways:
        """Return random ways."""
        tables = SUMS, MEANS, PRODUCTS, CHAINS, THREES, SCALINGS
        return cls(*map(draw.choice, tables))

    def mean(self, x: Any, axis: int = 0) -> Any:
        """Return the mean along an axis."""
        return self.mean_of(self.total, x, axis)

    def chain(self, a: Any, b: Any, c: Any) -> Any:
        """Return the product of three matrices."""
        return self.chain_of(self.product, a, b, c)


# --- families -------------------------------------------------------------------------------------


def loss_gradient(ways: Ways, act: Callable[[Any], Any], x: Any, w: Any, y: Any) -> Any:
    def loss(w: Any) -> Any:
        error = act(ways.product(x, w)) - y
        return ways.mean(ways.mean(error * error))

    return jax.grad(loss)(w)


def chain_gradient(ways: Ways, act: Callable[[Any], Any], x: Any, w: Any, y: Any) -> Any:
    return jax.grad(lambda w: ways.mean(ways.total(act(ways.chain(x, w, w)) * y, 0)))(w)


def variance(ways: Ways, act: Callable[[Any], Any], x: Any, w: Any, y: Any) -> Any:
    centered = x - ways.mean(x, 1)[:, None]
    return ways.mean(act(centered) * centered, 1)


def normalized(ways: Ways, act: Callable[[Any], Any], x: Any, w: Any, y: Any) -> Any:
    centered = x - ways.mean(x, 1)[:, None]
    spread = jnp.sqrt(ways.mean(centered * centered, 1))
    return ways.mean(act(centered) / spread[:, None] * y)


def covariance(ways: Ways, act: Callable[[Any], Any], x: Any, w: Any, y: Any) -> Any:
    return ways.mean(act(x) * y) - ways.mean(act(x)) * ways.mean(y)


def diffusion(ways: Ways, act: Callable[[Any], Any], x: Any, w: Any, y: Any) -> Any:
    for _ in range(3):
        left, right = jnp.roll(x, 1, 1), jnp.roll(x, -1, 1)
        x = x + 0.1 * ways.three(left, right, -2 * x)
    return ways.three(x, -y, 0.5 * act(y))


def energy(ways: Ways, act: Callable[[Any], Any], x: Any, w: Any, y: Any) -> Any:
    kinetic, potential = ways.scaled(x, x, jnp.asarray(0.5, x.dtype)), ways.scaled(x, y, act(y))
    return ways.total(kinetic - potential, 1)


def advection(ways: Ways, act: Callable[[Any], Any], x: Any, w: Any, y: Any) -> Any:
    def step(u: Any, _: Any) -> Any:
        flux = act(ways.product(u, w)) * 0.1
        return ways.three(u, flux, -jnp.roll(flux, 1, 1)), ways.mean(u)

    return jax.lax.scan(step, x, length=4)[1]


FAMILIES = {
    "gradients": (loss_gradient, chain_gradient),
    "means": (variance, normalized, covariance),
    "states": (diffusion, energy, advection),
}
_ACTS = (jnp.tanh, jnp.sin, lambda x: x, jax.nn.relu, lambda x: x / (1 + jnp.abs(x)))


def case(seed: int) -> Case:
    """Return the case of a seed."""
    draw = random.Random(seed)
    dtype = draw.choice(list(MAGNITUDES))
    family = draw.choice(list(FAMILIES))
    body, act = draw.choice(FAMILIES[family]), draw.choice(_ACTS)
    rows, columns = draw.choice((4, 16, 64)), draw.choice((8, 32, 128))
    ways, others = Ways.drawn(draw), Ways.drawn(draw)
    factor, part = draw.choice(WRONG), draw.random() < 0.5

    def wrong(*args: Any) -> Any:
        result = body(ways, act, *args)
        by = jnp.asarray(factor, result.dtype)
        return result * by if part or result.ndim == 0 else result.at[..., 0].multiply(by)

    return Case(
        f"{family}: {body.__name__} {dtype} {rows}x{columns}, wrong by {factor}",
        partial(body, ways, act),
        partial(body, others, act),
        wrong,
        list(_arguments(seed, dtype, rows, columns)),
    )


def _arguments(seed: int, dtype: str, rows: int, columns: int) -> Iterator[tuple[Any, ...]]:
    rng = np.random.default_rng(seed)
    shapes = (rows, columns), (columns, columns), (rows, columns)
    x, w, y = (rng.standard_normal(shape) for shape in shapes)
    x += rng.choice([0.0, 3.0, 30.0])  # a common value, which cancels in differences
    for magnitude in MAGNITUDES[dtype]:
        values = magnitude * x, w / np.sqrt(columns), magnitude * y
        yield tuple(jnp.asarray(value, dtype) for value in values)
