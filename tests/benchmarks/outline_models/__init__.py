"""The models of `bench_outline.py`, by name.

Those of `packages` use the libraries of the extra `models`. If one is not installed, making its
model raises ImportError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.benchmarks.outline_models import networks, packages, transformer
from tests.benchmarks.outline_models.case import Case

__all__ = ["MODELS", "Case", "Model"]


@dataclass(frozen=True)
class Model:
    """A factory of a model, and the depths to measure it at; empty if it has one depth."""

    make: Callable[..., Case]
    depths: tuple[int, ...] = ()

    def case(self, depth: int | None) -> Case:
        """Return the model with this many layers."""
        return self.make() if depth is None else self.make(depth)


MODELS: Mapping[str, Model] = {
    "transformer_forward": Model(transformer.forward_case, (12,)),
    "transformer_gradient": Model(transformer.gradient_case, (12,)),
    "transformer_adamw": Model(transformer.adamw_case, (12,)),
    "transformer_optax": Model(transformer.optax_case, (12,)),
    "resnet50": Model(networks.resnet50),
    "resnet152": Model(networks.resnet152),
    "unet": Model(networks.unet),
    "lstm": Model(networks.lstm, (200,)),
    "experts": Model(networks.experts, (6,)),
    "mlp": Model(networks.mlp),
    "flax_gpt": Model(packages.flax_gpt, (12,)),
    "nnx_resnet": Model(packages.nnx_resnet, (12,)),
    "equinox_vit": Model(packages.equinox_vit, (12,)),
    "haiku_resnet50": Model(packages.haiku_resnet50),
    "flax_gpt2": Model(packages.flax_gpt2, (12,)),
    "flaxdiff_unet": Model(packages.zoo("flaxdiff_unet")),
    "diffrax_gradient": Model(packages.zoo("diffrax_gradient")),
    "numpyro_svi": Model(packages.zoo("numpyro_svi")),
}
