"""The models among the samples, and their gradients, with symbols for variable sizes.

These are the length and the number of texts, the steps and the batch size of a recurrent network,
and the number, height and width of images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from runpy import run_path
from typing import Any

import jax
import jax.numpy as jnp

from tests.programs.case import Case
from tests.programs.samples import SAMPLES
from tests.programs.symbolic import SymbolicProgram, symbolic_program

#: The symbolic axes of each leaf of the arguments after the weights.
Axes = tuple[dict[int, str], ...]


def symbolic_models() -> list[str]:
    """Return the names of the models."""
    return sorted(_MODELS)


def symbolic_model(name: str) -> Iterator[SymbolicProgram]:
    """Yield a model's loss and its gradient by the weights, for each choice of symbols."""
    loss, weights, rest, choices = _MODELS[name]()
    for axes in choices:
        for fun, what in ((loss, "loss"), (jax.grad(loss), "gradient")):
            args = (weights, *rest)
            before = len(jax.tree.leaves(weights))
            places = {
                (before + i, axis): symbol
                for i, each in enumerate(axes)
                for axis, symbol in each.items()
            }
            yield symbolic_program(Case(f"{name}, {what}", fun, args), places)


def _transformer() -> tuple[Callable[..., Any], Any, tuple[Any, ...], list[Axes]]:
    sample = run_path(str(SAMPLES / "transformer.py"))
    weights = sample["init"](jax.random.key(0))
    positions = weights.pop("positions")
    tokens = jax.random.randint(jax.random.key(1), (2, 2, 5), 0, 256)

    def loss(weights: Any, positions: Any, tokens: Any, following: Any) -> Any:
        logits = sample["forward"]({**weights, "positions": positions}, tokens)
        logs = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(logs, following[..., None], axis=-1).mean()

    rest = positions[:5], *tokens
    length, batch = {1: "n"}, {0: "n"}
    both = {0: "m", 1: "n"}
    choices: list[Axes] = [({0: "n"}, length, length), ({}, batch, batch), ({0: "n"}, both, both)]
    return loss, weights, rest, choices


def _rnn() -> tuple[Callable[..., Any], Any, tuple[Any, ...], list[Axes]]:
    sample = run_path(str(SAMPLES / "rnn.py"))
    weights = sample["init"](jax.random.key(0))
    xs = jax.random.normal(jax.random.key(1), (4, 3, 8))
    choices: list[Axes] = [({0: "n"},), ({1: "n"},), ({0: "n", 1: "m"},)]
    return sample["loss"], weights, (xs,), choices


def _convnet() -> tuple[Callable[..., Any], Any, tuple[Any, ...], list[Axes]]:
    sample = run_path(str(SAMPLES / "convnet.py"))
    weights = sample["init"](jax.random.key(0))
    images = jax.random.normal(jax.random.key(1), (3, 4, 4, 3))
    choices: list[Axes] = [({0: "n"}, {0: "n"}), ({1: "n"},), ({1: "n", 2: "m"},)]
    return sample["loss"], weights, (images, jnp.arange(3)), choices


_MODELS = {"transformer": _transformer, "rnn": _rnn, "convnet": _convnet}
