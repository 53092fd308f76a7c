"""Replace explicit attention by `jax.nn.dot_product_attention`: a rewrite of a pattern.

A rewrite is two functions of the same arguments. The second replaces each match of the first in a
program, whatever its names, sizes, dtype and number of heads. `attention` matches explicit softmax
attention and replaces it by `jax.nn.dot_product_attention`, which can run as one kernel on a GPU.
Compare the programs before and after: `exp`, `div` and all other equations between the two products
are gone. `--verify` compares the results of both. (A row that is masked entirely is NaN before the
rewrite, and a mean after it.)

    jaxprtool show samples/attention_rewrite.py:causal
    jaxprtool opt samples/attention_rewrite.py:causal --rewrite samples/attention_rewrite.py
    jaxprtool opt samples/attention_rewrite.py:causal --rewrite samples/attention_rewrite.py --stats

It also matches in the layers of another model: give `opt` the target `samples/transformer.py:loss`.
In its gradient, `samples/transformer.py:grad_loss`, the forward pass stores the probabilities and
other values for the backward pass. `attention` does not match there, because a match is not
replaced if other equations use its inner values. `saved_attention` matches, because it returns
these values too. It only shows how to match them, and computes them as before. To use the kernel
in a gradient, rewrite first: `-p "attention, grad"`.
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
    """Reshape all leading dimensions into one batch, of one head each: B, T, N = 1, H."""

    def one_head(x):
        return x.reshape(-1, 1, *x.shape[-2:])

    mask = jnp.broadcast_to(mask, (*query.shape[:-1], key.shape[-2]))
    query, key, value = (one_head(x).swapaxes(1, 2) for x in (query * scale, key, value))
    mixed = jax.nn.dot_product_attention(query, key, value, mask=one_head(mask), scale=1.0)
    return mixed.swapaxes(1, 2).reshape(*mask.shape[:-1], value.shape[-1])


@attention.check
def _(match):
    """Accept only a scalar scale: the kernel does not support a scale for each score."""
    return "scale" in match.values


@jaxprtool.rewrite(**TYPES)
def saved_attention(query, key, value, mask, scale):
    """Replace attention in the forward pass of a gradient, with the values stored for backward."""
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
    """Causal attention over arrays of shape batch, heads, positions, features."""
    position = jnp.arange(query.shape[-2])
    scores = query @ key.mT * query.shape[-1] ** -0.5
    scores = jnp.where(position[:, None] >= position, scores, -jnp.inf)
    return jax.nn.softmax(scores) @ value
