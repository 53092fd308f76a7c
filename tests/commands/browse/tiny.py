"""A program that JAX lists alike in every release."""

import jax
import jax.numpy as jnp

import jaxprtool


@jax.jit
def layer(h, w):
    with jax.named_scope("dense"):
        z = h * w
        z = z + 1.0
    return jnp.tanh(z)


@jaxprtool.example({"w": "f32[3]", "scale": "f32[3]"}, "f32[3]")
def net(params, x):
    hidden = layer(x, params["w"])
    unused = jnp.cos(hidden)  # noqa: F841
    with jax.named_scope("loop"):
        total, _ = jax.lax.scan(lambda c, _: (jnp.sin(c) * 2.0, None), hidden, length=3)
        scaled = total * params["scale"]
    return scaled - hidden
