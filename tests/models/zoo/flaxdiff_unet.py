"""The diffusion U-Net of FlaxDiff, on a noisy image, a time and a text."""

from functools import cache

import jax
import jax.numpy as jnp
from flaxdiff.models.simple_unet import Unet


@cache
def model():
    """Return the network and its arguments."""
    attention = {"heads": 2, "use_projection": False, "use_self_and_cross": False}
    unet = Unet(
        emb_features=16,
        feature_depths=[8, 16],
        attention_configs=[None, attention],
        num_res_blocks=1,
        num_middle_res_blocks=1,
        norm_groups=4,
    )
    arguments = jnp.ones((1, 8, 8, 3)), jnp.ones((1,)), jnp.ones((1, 4, 16))
    return unet.apply, (jax.jit(unet.init)(jax.random.key(0), *arguments), *arguments)
