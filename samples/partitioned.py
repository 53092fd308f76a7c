"""A training step that XLA partitions over a mesh, with a mistake that `jaxprtool shardings` finds.

The batch is sharded over the axis "data" of the mesh, and the hidden units of each block over
"model". The constraint on the activations in `step` names no axis, so each device gathers the whole
batch after every block, and computes all of it. `mended_step` keeps the batch sharded.

    jaxprtool shardings samples/partitioned.py:step --mesh data=8 --in-specs "(P(), P('data'))"
    jaxprtool show samples/partitioned.py:mended_step
"""

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint
from jax.sharding import PartitionSpec as P

import jaxprtool

BLOCKS, WIDTH, HIDDEN, BATCH = 4, 64, 256, 1024


def loss(weights, batch, activations):
    """The mean square of the activations after all blocks."""

    def block(x, layer):
        hidden = jax.nn.gelu(x @ layer["up"])
        x = x + hidden @ layer["down"]
        if not jax.sharding.get_abstract_mesh().empty:  # on several devices
            x = with_sharding_constraint(x, activations)
        return x, None

    x, _ = jax.lax.scan(block, batch, weights)
    return jnp.mean(jnp.square(x))


def trained(weights, batch, activations):
    """One step of gradient descent; `activations` is the spec of the values between blocks."""
    value, grads = jax.value_and_grad(loss)(weights, batch, activations)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)


EXAMPLE = f"{{'up': f32[{BLOCKS},{WIDTH},{HIDDEN}], 'down': f32[{BLOCKS},{HIDDEN},{WIDTH}]}}"


@jaxprtool.example(EXAMPLE, f"f32[{BATCH},{WIDTH}]")
def step(weights, batch):
    """A step in which each device gathers the whole batch after every block."""
    return trained(weights, batch, P())


@jaxprtool.example(EXAMPLE, f"f32[{BATCH},{WIDTH}]")
def mended_step(weights, batch):
    """The same step, in which the batch stays sharded."""
    return trained(weights, batch, P("data"))
