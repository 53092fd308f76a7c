"""Larger versions of the models of PyPI packages in `tests.models.zoo`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.benchmarks.outline_models.case import Case


def zoo(name: str, **sizes: Any) -> Callable[[], Case]:
    """Return the factory of a zoo model with these sizes."""
    return lambda: _of_arrays(*importlib.import_module(f"tests.models.zoo.{name}").model(**sizes))


def _of_arrays(fun: Callable[..., Any], args: tuple[Any, ...]) -> Case:
    """Return the case of a function, restricted to the leaves that are arrays."""
    leaves, tree = jax.tree.flatten(args)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def of_arrays(*arrays: Any) -> Any:
        given = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            given[place] = array
        out = fun(*jax.tree.unflatten(tree, given))
        return [jnp.asarray(x) for x in jax.tree.leaves(out) if isinstance(x, jax.Array)]

    return Case(of_arrays, tuple(leaves[i] for i in places))


def flax_gpt(layers: int) -> Case:
    """One step of optax's AdamW on a GPT in Flax Linen."""
    return zoo("flax_gpt", layers=layers, width=128, length=64)()


def nnx_resnet(blocks: int) -> Case:
    """One step of optax's momentum on a residual network in Flax NNX."""
    return zoo("nnx_resnet", blocks=blocks, width=32, size=32)()


def equinox_vit(blocks: int) -> Case:
    """One step of optax's AdamW on a vision transformer in Equinox."""
    return zoo("equinox_vit", blocks=blocks, width=64, size=32)()


def haiku_resnet50() -> Case:
    """The gradient of Haiku's ResNet-50."""
    sizes = {"blocks": (3, 4, 6, 3), "channels": (256, 512, 1024, 2048), "size": 64}
    return zoo("haiku_resnet", bottleneck=True, **sizes)()


def flax_gpt2(layers: int) -> Case:
    """The gradient of the GPT-2 of transformers."""
    return zoo("transformers_gpt2", layers=layers, width=128, heads=4, length=64)()
