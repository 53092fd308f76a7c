"""Programs on eight devices, each around one operation or construct that communicates.

OPERATIONS["cumsum"]() -> Sharded(function, arguments, mesh)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.programs.sharded import Sharded, floats, integers, mesh_of, trained, under_jit


def _split(function: Callable[..., Any], *arguments: Any, specs: Any = None) -> Sharded:
    """Return a function whose arguments are all split along the only axis, or by some specs."""
    mesh = mesh_of(data=8)
    specs = (P("data"),) * len(arguments) if specs is None else specs
    return Sharded(under_jit(function, mesh, *specs), arguments, mesh)


def cumsum() -> Sharded:
    """A running sum along the batch."""
    return _split(
        lambda x, w: jnp.cumsum(x @ w, axis=0),
        floats(64, 16),
        floats(16, 8),
        specs=(P("data"), P()),
    )


def sort() -> Sharded:
    """A sort along the batch."""
    return _split(lambda x: jnp.sort(x, axis=0), floats(64, 16))


def argmax() -> Sharded:
    """The maximum along the batch, and its index."""
    return _split(lambda x: (jnp.argmax(x, axis=0), x.max(axis=0)), floats(64, 16))


def top_k() -> Sharded:
    """The largest values of rows, split along the columns."""
    return _split(lambda x: jax.lax.top_k(x, 4), floats(16, 64), specs=(P(None, "data"),))


def convolution() -> Sharded:
    """A convolution along a split dimension: neighbors exchange halos."""

    def smooth(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME")

    return _split(smooth, floats(2, 4, 64), floats(4, 4, 3), specs=(P(None, None, "data"), P()))


def _convolved(features: int = 1, batches: int = 1) -> Callable[..., Any]:
    """Return a convolution of images in groups of features, or of batches."""

    def convolved(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", feature_group_count=features, batch_group_count=batches
        )

    return convolved


def grouped_convolution() -> Sharded:
    """A convolution in groups, which the partitioner does not split along the batch."""
    return _split(
        lambda x, kernel: _convolved(features=4)(jnp.tanh(x), kernel),
        floats(16, 8, 6, 6), floats(8, 2, 3, 3), specs=(P("data"), P()),
    )  # fmt: skip


def depthwise_convolution() -> Sharded:
    """A convolution of each feature alone, which the partitioner splits."""
    return _split(
        _convolved(features=8), floats(16, 8, 6, 6), floats(8, 1, 3, 3), specs=(P("data"), P())
    )


def batch_groups() -> Sharded:
    """A convolution in groups of the batch."""
    return _split(
        _convolved(batches=4), floats(16, 8, 6, 6), floats(8, 8, 3, 3), specs=(P("data"), P())
    )


def convolution_gradient() -> Sharded:
    """The gradient of a grouped convolution by its image and its kernel."""

    def loss(x, kernel):
        return jnp.square(_convolved(features=4)(x, kernel)).sum()

    return _split(
        jax.grad(loss, (0, 1)), floats(16, 8, 6, 6), floats(8, 2, 3, 3), specs=(P("data"), P())
    )


def solve() -> Sharded:
    """A triangular system, whose right-hand sides are split."""

    def solved(a, b):
        return jax.scipy.linalg.solve_triangular(a, b)

    return _split(solved, floats(16, 16), floats(16, 32), specs=(P("data"), P(None, "data")))


def pooling() -> Sharded:
    """A pooling whose windows span two devices."""

    def pooled(x):
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (3, 1), (1, 1), "SAME")

    return _split(pooled, floats(64, 8))


def gather() -> Sharded:
    """Rows of a table that is split along its rows, and the gradient: a scatter."""

    def loss(table, index):
        return jnp.square(table[index]).mean()

    return _split(trained(loss), floats(64, 16), integers(32), specs=(P("data"), P()))


def embedding() -> Sharded:
    """Rows of a table that is split along its columns, for a batch that is split."""
    return _split(
        lambda table, index: jnp.tanh(table[index]),
        floats(64, 16), integers(32), specs=(P(None, "data"), P("data")),
    )  # fmt: skip


def dynamic_slice() -> Sharded:
    """A slice at a computed position of a split dimension, and an update there."""

    def shifted(x, i):
        part = jax.lax.dynamic_slice_in_dim(x, i, 16)
        return jax.lax.dynamic_update_slice_in_dim(x, part * 2, i, 0)

    return _split(shifted, floats(64, 16), integers(), specs=(P("data"), P()))


def roll() -> Sharded:
    """A rotation along a split dimension."""
    return _split(lambda x: jnp.roll(x, 1, axis=0) - x, floats(64, 16))


def reverse() -> Sharded:
    """A flip along a split dimension."""
    return _split(lambda x: jnp.flip(x, axis=0), floats(64, 16))


def concatenation() -> Sharded:
    """Two arrays concatenated along a split dimension."""
    return _split(lambda x, y: jnp.concatenate([x, y]) * 2, floats(64, 16), floats(64, 16))


def padding() -> Sharded:
    """Zeros before a split dimension."""
    return _split(lambda x: jnp.pad(x, ((8, 0), (0, 0))), floats(64, 16))


def transposed() -> Sharded:
    """A matrix split along rows, times itself split along columns: an all-to-all."""
    return _split(
        lambda x: with_sharding_constraint(jnp.sin(x), P(None, "data")) + 1.0, floats(64, 64)
    )


def fft() -> Sharded:
    """A Fourier transform along a split dimension."""
    return _split(lambda x: jnp.abs(jnp.fft.fft(x, axis=0)), floats(64, 16))


def cholesky() -> Sharded:
    """A factorization of a split matrix."""
    return _split(lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(16)), floats(16, 16))


def variance() -> Sharded:
    """Statistics along the batch, twice: the second needs the result of the first."""
    return _split(lambda x: (x - x.mean(0)) / x.std(0), floats(64, 16))


def any_nan() -> Sharded:
    """A logical reduction over all devices."""
    return _split(lambda x: jnp.where(jnp.isnan(x).any(), 0.0, x), floats(64, 16))


def norm_clip() -> Sharded:
    """Gradients scaled by a global norm."""

    def step(params, x):
        grads = jax.grad(lambda p: jnp.square(jnp.tanh(x @ p["a"]) @ p["b"]).mean())(params)
        norm = jnp.sqrt(sum(jnp.square(g).sum() for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda p, g: p - g / jnp.maximum(norm, 1.0), params, grads)

    return _split(step, {"a": floats(16, 32), "b": floats(32, 8)}, floats(64, 16))


def unknown_loop() -> Sharded:
    """A loop until a sum over all devices is small."""

    def halved(x):
        return jax.lax.while_loop(lambda x: jnp.square(x).sum() > 1.0, lambda x: x * 0.5, x)

    return _split(halved, floats(64, 16))


def branches() -> Sharded:
    """A branch that sums over devices, and one that does not."""

    def chosen(flag, x):
        return jax.lax.cond(flag, lambda x: x - x.mean(0), lambda x: x * 2.0, x)

    return _split(
        chosen, jax.ShapeDtypeStruct((), jnp.bool_), floats(64, 16), specs=(P(), P("data"))
    )


def donated() -> Sharded:
    """A donated argument that is returned with another sharding."""
    mesh = mesh_of(data=8)
    function = jax.jit(
        lambda x: x * 2.0,
        in_shardings=NamedSharding(mesh, P("data")),
        out_shardings=NamedSharding(mesh, P(None, "data")),
        donate_argnums=0,
    )
    return Sharded(function, (floats(64, 64),), mesh)


def gathered_result() -> Sharded:
    """Two results, one of which is requested replicated."""
    mesh = mesh_of(data=8)
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    function = jax.jit(
        lambda x: {"whole": jnp.tanh(x), "split": x * 2.0},
        in_shardings=split,
        out_shardings={"whole": whole, "split": split},
    )
    return Sharded(function, (floats(64, 16),), mesh)


def random() -> Sharded:
    """Random bits in a split array, with typed keys."""

    def noisy(keys, x):
        noise = jax.vmap(lambda key: jax.random.normal(key, (16,)))(keys)
        return (x + noise).sum(0) + jax.random.uniform(keys[0], (16,))

    mesh = mesh_of(data=8)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 64))
    return Sharded(under_jit(noisy, mesh, P("data"), P("data")), (keys, floats(64, 16)), mesh)


def dropout() -> Sharded:
    """A mask drawn from one key for a split batch."""

    def masked(key, x):
        kept = jax.random.bernoulli(key, 0.9, x.shape)
        return jnp.where(kept, x / 0.9, 0.0).sum(0)

    key = jax.eval_shape(lambda: jax.random.key(0))
    return _split(masked, key, floats(64, 16), specs=(P(), P("data")))


def callback() -> Sharded:
    """A host callback in between, which receives the whole array."""

    def called(x):
        y = jax.pure_callback(
            lambda a: np.asarray(a) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x
        )
        return (jnp.tanh(x) + y).sum(0)

    return _split(called, floats(64, 16))


def printed() -> Sharded:
    """A value printed by a callback."""

    def shown(x):
        total = x.sum()
        jax.debug.print("total {}", total)
        return x / total

    return _split(shown, floats(64, 16))


def pmapped() -> Sharded:
    """A `pmap` over eight devices, with a mean over all."""
    mesh = mesh_of(i=8)

    def step(w, x):
        grad = jax.grad(lambda w: jnp.square(jnp.tanh(x @ w)).mean())(w)
        return w - jax.lax.pmean(grad, "i")

    return Sharded(jax.pmap(step, "i"), (floats(8, 16, 4), floats(8, 32, 16)), mesh)


def manual_kinds() -> Sharded:
    """Each collective that a `shard_map` supports."""
    mesh = mesh_of(x=2, y=4)

    def body(a):
        parts = jax.lax.psum_scatter(a, "y", scatter_dimension=0, tiled=True)
        whole = jax.lax.all_gather(parts, "y", tiled=True)
        ring = jax.lax.ppermute(whole, "y", [(i, (i + 1) % 4) for i in range(4)])
        swapped = jax.lax.all_to_all(ring, "x", 1, 0, tiled=True)
        return jax.lax.pmax(swapped, ("x", "y")) + jax.lax.axis_index("y")

    over = jax.shard_map(
        body, mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y"), check_vma=False
    )
    return Sharded(under_jit(over, mesh, P("x", "y")), (floats(16, 32),), mesh)


def nested_manual() -> Sharded:
    """A `shard_map` over one axis inside one over the other."""
    mesh = mesh_of(x=2, y=4)

    def inner(a):
        return jax.lax.psum(jnp.sin(a), "y")

    def outer(a):
        over = jax.shard_map(inner, in_specs=P(None, "y"), out_specs=P(), axis_names={"y"})
        return jax.lax.psum(over(a), "x")

    over = jax.shard_map(outer, mesh=mesh, in_specs=P("x"), out_specs=P(), axis_names={"x"})
    return Sharded(under_jit(over, mesh, P("x", "y")), (floats(16, 32),), mesh)


def mixed_axes() -> Sharded:
    """One axis each that is explicit, automatic, and manual in a part."""
    devices = jax.devices("cpu")[:8]
    mesh = jax.make_mesh(
        (2, 2, 2),
        ("e", "a", "m"),
        (AxisType.Explicit, AxisType.Auto, AxisType.Auto),
        devices=devices,
    )

    def body(x):
        return x - jax.lax.pmean(x, "m")

    def forward(x, w):
        x = jax.shard_map(body, mesh=mesh, in_specs=P("m"), out_specs=P("m"), axis_names={"m"})(x)
        hidden = with_sharding_constraint(jnp.tanh(x @ w), P(None, "a"))
        return (hidden @ w.T).sum(1)

    x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(mesh, P(None, None)))
    w = jax.ShapeDtypeStruct((32, 64), jnp.float32, sharding=NamedSharding(mesh, P(None, None)))
    return Sharded(jax.jit(forward), (x, w), mesh)


def ring_loop() -> Sharded:
    """A ring of permutations in a loop whose length XLA does not know."""
    mesh = mesh_of(x=8)

    def body(a, n):
        ring = [(i, (i + 1) % 8) for i in range(8)]
        return jax.lax.fori_loop(0, n, lambda _, a: jax.lax.ppermute(a, "x", ring) + 1.0, a)

    over = jax.shard_map(body, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    return Sharded(under_jit(over, mesh, P("x"), P()), (floats(16, 32), integers()), mesh)


def spmd_vmap() -> Sharded:
    """A `vmap` with a mesh axis as `spmd_axis_name`."""

    def one(x):
        return with_sharding_constraint(jnp.tanh(x), P(None, None)).sum(0)

    return _split(jax.vmap(one, spmd_axis_name="data"), floats(16, 8, 8))


def remat_scan() -> Sharded:
    """Layers under `scan` and `remat`, whose weights are split along both axes."""
    mesh = mesh_of(fsdp=4, tensor=2)

    @jax.checkpoint
    def layer(x, w):
        hidden = with_sharding_constraint(jax.nn.gelu(x @ w["up"]), P("fsdp", "tensor"))
        return with_sharding_constraint(x + hidden @ w["down"], P("fsdp")), None

    def loss(params, x):
        return jnp.square(jax.lax.scan(layer, x, params)[0]).mean()

    specs = {"up": P(None, "fsdp", "tensor"), "down": P(None, "tensor", "fsdp")}
    step = under_jit(trained(loss), mesh, specs, P("fsdp"))
    return Sharded(
        step, ({"up": floats(3, 16, 64), "down": floats(3, 64, 16)}, floats(32, 16)), mesh
    )


def token_loss() -> Sharded:
    """The cross entropy of logits with a split vocabulary."""

    def loss(logits, labels):
        logp = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(logp, labels[:, None], 1).mean()

    mesh = mesh_of(data=2, model=4)
    function = under_jit(jax.value_and_grad(loss), mesh, P("data", "model"), P("data"))
    return Sharded(function, (floats(16, 64), integers(16)), mesh)


def one_hot_experts() -> Sharded:
    """A mixture of experts by products with masks, as in GShard."""
    mesh = mesh_of(data=2, expert=4)

    def mixture(params, x):
        gates = jax.nn.softmax(x @ params["gate"])
        mask = jax.nn.one_hot(gates.argmax(-1), 4)
        sent = with_sharding_constraint(jnp.einsum("te,td->etd", mask, x), P("expert", "data"))
        hidden = jax.nn.relu(jnp.einsum("etd,edf->etf", sent, params["up"]))
        done = with_sharding_constraint(
            jnp.einsum("etf,efd->etd", hidden, params["down"]), P("expert", "data")
        )
        return jnp.einsum("te,etd->td", mask * gates, done)

    specs = {"gate": P(), "up": P("expert"), "down": P("expert")}
    params = {"gate": floats(16, 4), "up": floats(4, 16, 32), "down": floats(4, 32, 16)}
    step = trained(lambda params, x: jnp.square(mixture(params, x)).mean())
    return Sharded(under_jit(step, mesh, specs, P("data")), (params, floats(32, 16)), mesh)


def small_integers() -> Sharded:
    """Types of less than 32 bits, and of one bit."""

    def mixed(x, flags):
        return x.astype(jnp.bfloat16).sum(0), flags.all(0), (x > 0).sum(0).astype(jnp.int8)

    flags = jax.ShapeDtypeStruct((64, 16), jnp.bool_)
    return _split(mixed, floats(64, 16), flags)


def custom_gradient() -> Sharded:
    """A custom gradient whose forward and backward pass both sum over devices."""

    @jax.custom_vjp
    def norm(x):
        return jnp.sqrt(jnp.square(x).sum(0))

    norm.defvjp(lambda x: (norm(x), x), lambda x, g: (g * x / norm(x),))
    return _split(lambda x: jax.grad(lambda x: norm(x).sum())(x), floats(64, 16))


#: One program per operation.
OPERATIONS: dict[str, Callable[[], Sharded]] = {
    make.__name__: make
    for make in (
        cumsum, sort, argmax, top_k, convolution, grouped_convolution, depthwise_convolution,
        batch_groups, convolution_gradient, solve, pooling, gather, embedding, dynamic_slice, roll,
        reverse, concatenation, padding, transposed, fft, cholesky, variance, any_nan, norm_clip,
        unknown_loop, branches, donated, gathered_result, random, dropout, callback, printed,
        pmapped, manual_kinds, nested_manual, mixed_axes, ring_loop, spmd_vmap, remat_scan,
        token_loss, one_hot_experts, small_integers, custom_gradient,
    )
}  # fmt: skip
