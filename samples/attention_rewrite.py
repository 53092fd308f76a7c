"""Attention as it is taught, replaced by attention as it is shipped: a rewrite from a pattern.

A rewrite is two functions of the same arguments. Wherever the first occurs in a program, whatever
the names, sizes, dtype and number of heads, the second takes its place. `attention` finds softmax
attention written out, and puts `jax.nn.dot_product_attention` there, which can run as one kernel on
a GPU. Look at what goes and what comes: `exp`, `div` and all that is between the two products. With
`--verify` the results of both are compared. (A row that is masked altogether is NaN before, and a
mean after.)

    jaxprtool show samples/attention_rewrite.py:causal
    jaxprtool opt samples/attention_rewrite.py:causal --rewrite samples/attention_rewrite.py
    jaxprtool opt samples/attention_rewrite.py:causal --rewrite samples/attention_rewrite.py --stats

It is also found inside the layers of a whole model that knows nothing of it: give `opt` the target
`samples/transformer.py:loss`. In `samples/transformer.py:grad_loss`, JAX's gradient, the forward
part keeps the probabilities and more for the backward part. A match that shares values with the
rest of a program is left alone, so `attention` does not match there; `saved_attention` does, since
it gives these values too. It shows how, and no more, since it computes them as before. To have the
kernel in a gradient, rewrite first: `-p "attention, grad"`.
"""

import jax
import jax.numpy as jnp

import jaxprtool

TYPES = {
    "query": "f32[...,n,d]",
    "key": "f32[...,m,d]",
    "value": "f32[...,m,d]",
    "mask": "bool[...,n,m]",
    "scale": "f32[]",
}


@jaxprtool.rewrite(**TYPES)
def attention(query, key, value, mask, scale):
    """Replace softmax attention by jax.nn.dot_product_attention."""
    scores = jnp.where(mask, query @ key.mT * scale, -jnp.inf)
    return jax.nn.softmax(scores) @ value


@attention.to
def fused(query, key, value, mask, scale):
    """All leading dimensions become one batch, of one head each: B, T, N = 1, H."""

    def one_head(x):
        return x.reshape(-1, 1, *x.shape[-2:])

    mask = jnp.broadcast_to(mask, (*query.shape[:-1], key.shape[-2]))
    query, key, value = (one_head(x).swapaxes(1, 2) for x in (query * scale, key, value))
    mixed = jax.nn.dot_product_attention(query, key, value, mask=one_head(mask), scale=1.0)
    return mixed.swapaxes(1, 2).reshape(*mask.shape[:-1], value.shape[-1])


@attention.check
def _(match):
    """Only a number for all scores: a scale of one's own for each would not fit the kernel."""
    return "scale" in match.values


@jaxprtool.rewrite(**TYPES)
def saved_attention(query, key, value, mask, scale):
    """The same in a gradient's forward part, with what the backward part wants of it."""
    mixed, backward = jax.vjp(
        lambda q, k, v: attention.pattern(q, k, v, mask, scale), query, key, value
    )
    return mixed, jax.tree.leaves(backward)


@saved_attention.to
def _(query, key, value, mask, scale):
    _, saved = saved_attention.pattern(query, key, value, mask, scale)
    return fused(query, key, value, mask, scale), saved


@jaxprtool.example("f32[2,4,32,16]", "f32[2,4,32,16]", "f32[2,4,32,16]")
def causal(query, key, value):
    """Each position reads from itself and those before it: batch, heads, positions, features."""
    position = jnp.arange(query.shape[-2])
    scores = query @ key.mT * query.shape[-1] ** -0.5
    scores = jnp.where(position[:, None] >= position, scores, -jnp.inf)
    return jax.nn.softmax(scores) @ value
