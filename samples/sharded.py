"""One program on several devices: `shard_map` over a mesh, with collectives between its shards.

This module runs on any machine, because it configures JAX with four devices on the CPU. If JAX has
already started, or its number of devices is set, the module uses the existing devices, whose number
must divide sixteen. The types inside the `shard_map` are those of one shard. The collectives are
`psum`, `ppermute` and `all_gather`.

    jaxprtool show samples/sharded.py:loss
    jaxprtool show samples/sharded.py:neighbours
    jaxprtool run  samples/sharded.py:grad_loss
"""

import os
from contextlib import suppress
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxprtool

is_configured = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
if not is_configured and jax.config.jax_num_cpu_devices < 0:
    with suppress(RuntimeError):  # JAX has started: its devices are fixed
        jax.config.update("jax_num_cpu_devices", 4)


def over_devices(function, in_specs, out_specs):
    """Map a function over shards of its arguments, on a mesh of CPU devices with axis "data"."""
    devices = jax.devices("cpu")
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


@jaxprtool.example("f32[6]", "f32[16,6]", "f32[16]")
def loss(weights, inputs, targets):
    """A mean squared error: each device has all weights and its shard of the data."""

    @partial(over_devices, in_specs=(P(), P("data"), P("data")), out_specs=P())
    def mean_error(weights, inputs, targets):
        return jax.lax.pmean(jnp.square(inputs @ weights - targets).mean(), "data")

    return mean_error(weights, inputs, targets)


@jaxprtool.example("f32[6]", "f32[16,6]", "f32[16]")
def grad_loss(weights, inputs, targets):
    """The gradient of the loss: the sum of the gradients of all devices."""
    return jax.grad(loss)(weights, inputs, targets)


@jaxprtool.example("f32[16]")
def neighbours(x):
    """The mean of each value and its two neighbours on a ring; only edges cross between devices."""

    @partial(over_devices, in_specs=P("data"), out_specs=P("data"))
    def smooth(x):
        size = jax.lax.axis_size("data")
        send = partial(jax.lax.ppermute, axis_name="data")
        before = send(x[-1:], perm=[(i, (i + 1) % size) for i in range(size)])
        after = send(x[:1], perm=[((i + 1) % size, i) for i in range(size)])
        padded = jnp.concatenate([before, x, after])
        return (padded[:-2] + padded[1:-1] + padded[2:]) / 3

    return smooth(x)


@jaxprtool.example("f32[16,8]", "f32[8,16]")
def gathered_product(x, weights):
    """A product with sharded weights, which are gathered just before they are used."""

    @partial(over_devices, in_specs=(P("data"), P(None, "data")), out_specs=P("data"))
    def product(x, weights):
        return x @ jax.lax.all_gather(weights, "data", axis=1, tiled=True)

    return product(x, weights)
