"""Sharded programs of several parts, with data movement that is hard to attribute.

    FEATURES["grouped_batches"]() -> Sharded(function, arguments, mesh)

As in `tests.programs.sharded`: functions under `jax.jit`, abstract arguments, eight devices.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.programs.sharded import Sharded, floats, integers, mesh_of, trained, under_jit


def unknown_length() -> Sharded:
    """Power iteration until convergence: the number of iterations is unknown."""
    mesh = mesh_of(data=8)

    def iterate(matrix, x):
        def keep_on(state):
            return jnp.max(jnp.abs(state[0] - state[1])) > 1e-3

        def better(state):
            _, x = state
            new = matrix @ x
            return x, new / jnp.linalg.norm(new)

        return lax.while_loop(keep_on, better, (jnp.zeros_like(x), x))[1]

    return Sharded(under_jit(iterate, mesh, P("data"), P()), (floats(64, 64), floats(64)), mesh)


def branches_by_hand() -> Sharded:
    """Branches with collectives in the body of a `shard_map`."""
    mesh = mesh_of(data=8)

    def body(flag, x):
        return lax.cond(
            flag[0] > 0,
            lambda x: lax.psum(x, "data"),
            lambda x: lax.ppermute(x, "data", [(i, 7 - i) for i in range(8)]) + lax.pmax(x, "data"),
            x,
        )

    over = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False
    )
    return Sharded(under_jit(over, mesh, P(), P("data")), (integers(1), floats(64, 4)), mesh)


def grouped_batches() -> Sharded:
    """A batch over two axes, whose weights are split over one of them, the other, and both."""
    mesh = mesh_of(replica=2, fsdp=2, tensor=2)

    def loss(params, x):
        for layer in params:
            hidden = jax.nn.relu(x @ layer["in"])
            hidden = with_sharding_constraint(hidden, P(("replica", "fsdp"), "tensor"))
            x = with_sharding_constraint(x + hidden @ layer["out"], P(("replica", "fsdp")))
        return jnp.mean(jnp.square(x))

    layer = {"in": floats(16, 64), "out": floats(64, 16)}
    specs = {"in": P("fsdp", "tensor"), "out": P("tensor", "fsdp")}
    step = under_jit(trained(loss), mesh, [specs] * 2, P(("replica", "fsdp")))
    return Sharded(step, ([layer] * 2, floats(32, 16)), mesh)


def sorted_and_sliced() -> Sharded:
    """A sort, a slice, a concatenation and a gather along the sharded axis."""
    mesh = mesh_of(data=8)

    def mixed(x, indices):
        ordered = jnp.sort(x, axis=0)
        halves = jnp.concatenate([ordered[32:], x[:32]])
        return halves[indices] + lax.cumsum(x, axis=0) + jnp.roll(x, 3, axis=0)

    return Sharded(
        under_jit(mixed, mesh, P("data"), P("data")), (floats(64, 8), integers(64)), mesh
    )


def cached() -> Sharded:
    """One decoding step: a cache that is split over heads and batch, updated in place."""
    mesh = mesh_of(data=2, model=4)

    def decode(weights, cache, x, position):
        q, k, v = jnp.einsum("bm,nmhd->nbhd", x, weights["qkv"])
        cache = lax.dynamic_update_slice(
            cache, jnp.stack([k, v])[:, :, None], (0, 0, position, 0, 0)
        )
        scores = jnp.einsum("bhd,bkhd->bhk", q, cache[0])
        mixed = jnp.einsum("bhk,bkhd->bhd", jax.nn.softmax(scores), cache[1])
        out = jnp.einsum("bhd,hdm->bm", mixed, weights["out"])
        logits = out @ weights["head"]
        return cache, jnp.argmax(logits, -1)

    weights = {
        "qkv": floats(3, 32, 4, 8), "out": floats(4, 8, 32), "head": floats(32, 64)
    }  # fmt: skip
    specs = {"qkv": P(None, None, "model"), "out": P("model"), "head": P(None, "model")}
    step = under_jit(decode, mesh, specs, P(None, "data", None, "model"), P("data"), P())
    return Sharded(step, (weights, floats(2, 4, 16, 4, 8), floats(4, 32), integers()), mesh)


def unreduced() -> Sharded:
    """Partial sums on each device: one that is returned, and one whose sum is read."""
    mesh = mesh_of(AxisType.Explicit, x=2, y=2)

    def projected(a, b):
        partial = jnp.einsum("bf,f->b", a, b, out_sharding=P(None, unreduced={"x"}))
        doubled = partial + partial
        return {"partial": partial, "sum": jax.sharding.reshard(doubled, P("y"))}

    def typed(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    return Sharded(jax.jit(projected), (typed(P(None, "x"), 16, 8), typed(P("x"), 8)), mesh)


def moved_result() -> Sharded:
    """Sums that are computed where their operands are; no direct way leads to their constraint."""
    mesh = mesh_of(x=4, y=2)

    def added(a, b, c):
        total = with_sharding_constraint(a * b - a, P(None, ("x", "y")))
        return with_sharding_constraint(c + total, P(None, ("x", "y")))

    specs = P("y", None, "x"), P("y", None, "x"), P(None, ("x", "y"))
    return Sharded(under_jit(added, mesh, *specs), (floats(16, 16, 16),) * 3, mesh)


FEATURES: dict[str, Callable[[], Sharded]] = {
    make.__name__: make
    for make in (
        unknown_length,
        branches_by_hand,
        grouped_batches,
        sorted_and_sliced,
        cached,
        unreduced,
        moved_result,
    )
}
