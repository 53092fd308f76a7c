"""mask: slices, reshapes, concatenation, padding, indexing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.passes.mapping.mask.proving import marked, prove

SLICES = {
    "column": lambda x: x[:, 0],
    "from": lambda x: x[1:],
    "until": lambda x: x[:-1],
    "last": lambda x: x[-1:],
    "reversed": lambda x: x[::-1],
    "rev": lambda x: lax.rev(x, (0, 1)),
    "strided": lambda x: x[1::2],
    "split": lambda x: jnp.split(x, 2, 1),
    "limit": lambda x: lax.slice(x, (0, 1), (x.shape[0], 2)),
    "halves": lambda x: lax.slice(x, (x.shape[0] // 2, 0), x.shape),
    "first_half": lambda x: x[: x.shape[0] // 2],
    "roll": lambda x: jnp.roll(x, 1, 0),
    "dynamic_roll": lambda x: jnp.roll(x, jnp.int32(x[0].sum() * 9), 0),
    "window": lambda x: lax.dynamic_slice(x, (x.shape[0] // 2, 1), (x.shape[0] // 2 + 1, 1)),
    "beyond": lambda x: lax.dynamic_slice(x, (x.shape[0] + 3, 1), (x.shape[0] // 2, 1)),
    "update": lambda x: lax.dynamic_update_slice(x, x[: x.shape[0] // 2] * 2, (5, 0)),
    "update_all": lambda x: lax.dynamic_update_slice(x, jnp.sin(x)[:, :1], (1, 1)),
    "concatenated": lambda x: jnp.concatenate([x, x[1:], jnp.ones((2, 4)), x * 2]),
    "concatenated_beside": lambda x: jnp.concatenate([x, x * 2], axis=1),
    "stacked": lambda x: jnp.stack([x, x * 2], axis=1),
    "padded": lambda x: jnp.pad(x, ((1, 2), (0, 1)), constant_values=3.0).sum(0),
    "padded_with": lambda x: lax.pad(x, x[0, 0], ((2, 1, 1), (0, 0, 0))),
    "cropped": lambda x: lax.pad(x, 0.0, ((-1, 0, 0), (1, -1, 0))),
    "cropped_behind": lambda x: lax.pad(x, 0.0, ((1, -1, 0), (0, 0, 0))),
    "padded_by_size": lambda x: jnp.pad(x, ((x.shape[0], x.shape[0]), (0, 0))),
    "edge": lambda x: jnp.pad(x, ((1, 1), (0, 0)), mode="edge"),
    "flat": lambda x: x.reshape(-1),
    "flat_by_column": lambda x: x.T.reshape(-1),
    "split_rows": lambda x: x.reshape(x.shape[0], 2, 2),
    "merged_and_split": lambda x: jnp.sin(x.T.reshape(-1)).reshape(4, -1).T,
    "outer": lambda x: (x @ x.T).reshape(-1),
    "outer_and_back": lambda x: (x @ x.T).reshape(-1).reshape(x.shape[0], -1),
    "ones": lambda x: x[None, :, None].reshape(x.shape[0], 1, 4, 1),
    "tiled": lambda x: jnp.tile(x, (2, 3)),
    "repeated": lambda x: jnp.repeat(x, 2, axis=0),
    "together": lambda x: lax.optimization_barrier((x * 2, x.sum(1))),
    "put": lambda x: jax.device_put((x * 2, x.sum(1))),
    "grouped": lambda x: jnp.concatenate([x, x]).reshape(2, x.shape[0], 4),
}

#: Functions of x: f32[n,4] and i: i32[n].
INDEXING = {
    "rows": lambda x, i: x[i % x.shape[0]],
    "taken": lambda x, i: jnp.take(x, i, axis=0),
    "clipped": lambda x, i: jnp.take(x, i, axis=0, mode="clip"),
    "filled": lambda x, i: x.at[i].get(mode="fill", fill_value=7.0),
    "along": lambda x, i: jnp.take_along_axis(x, i[:, None], 1),
    "along_rows": lambda x, i: jnp.take_along_axis(x, i[:, None] % x.shape[0], 0),
    "diagonal": lambda x, i: jnp.diagonal(x @ x.T),
    "embedded": lambda x, i: jnp.arange(8.0).reshape(4, 2)[i] @ jnp.ones(2) * x.sum(),
    "one": lambda x, i: x[i[0] % x.shape[0]],
    "windows": lambda x, i: jax.vmap(lambda j: lax.dynamic_slice(x, (j, 0), (1, 3)))(i),
    "add": lambda x, i: x.at[i].add(jnp.sin(x)),
    "set": lambda x, i: x.at[i[:1]].set(jnp.cos(x[:1])),
    "max": lambda x, i: jnp.zeros((4, 4)).at[i].max(x),
    "count": lambda x, i: jnp.zeros(4, jnp.int32).at[i].add(1) * x.sum(),
    "clip_add": lambda x, i: x.at[i + 2].add(jnp.sin(x), mode="clip"),
    "multiply": lambda x, i: x.at[jnp.arange(x.shape[0])].multiply(x, unique_indices=True),
    "set_slice": lambda x, i: x.at[1:].set(jnp.sin(x[:-1])),
    "add_slice": lambda x, i: x.at[:-1, 1].add(jnp.sin(x[1:, 0])),
    "set_column": lambda x, i: x.at[:, 1].set(jnp.sin(x[:, 2])),
    "set_last": lambda x, i: x.at[-1].set(2.0),
    "bytes": lambda x, i: jnp.take(x, i.astype(jnp.int8), axis=0),
    "unsigned": lambda x, i: jnp.take(x, i.astype(jnp.uint32), axis=0, mode="clip"),
    "segments": lambda x, i: jax.ops.segment_sum(x, i, num_segments=4),
    "segments_of_rows": lambda x, i: jax.ops.segment_max(x, i, num_segments=x.shape[0]),
    "one_hot": lambda x, i: jax.nn.one_hot(i, 4) * x,
}


EVERY_DAY = "until", "set_slice"


@pytest.mark.parametrize("name", marked(SLICES, pytest.mark.sweep, *EVERY_DAY))
def test_moving_elements(name):
    prove(SLICES[name], "f32[n,4]")


@pytest.mark.parametrize("name", marked(INDEXING, pytest.mark.sweep, *EVERY_DAY))
def test_indexing(name):
    prove(INDEXING[name], "f32[n,4], i32[n]")


def test_random_keys_are_moved_like_numbers():
    def bits(x):
        keys = jax.random.split(jax.random.key(0), x.shape[0])
        moved = jnp.concatenate([keys[::-1], keys])
        return jax.vmap(jax.random.bits)(moved)

    prove(bits, "f32[n]", seed=1)
