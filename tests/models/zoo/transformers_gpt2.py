"""The GPT-2 of Hugging Face's transformers in Flax, and the gradient of its loss."""

from functools import cache

import jax
import jax.numpy as jnp
import optax
from transformers import FlaxGPT2LMHeadModel, GPT2Config


@cache
def model(layers=2, width=16, heads=2, length=8):
    """Return the gradient and its arguments."""
    sizes = {"n_embd": width, "n_layer": layers, "n_head": heads}
    config = GPT2Config(vocab_size=64, n_positions=2 * length, **sizes)
    gpt2 = FlaxGPT2LMHeadModel(config, seed=0)

    def loss(params, tokens, key):
        logits = gpt2(tokens[:, :-1], params=params, dropout_rng=key, train=True).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    tokens = jax.random.randint(jax.random.key(1), (2, length + 1), 0, 64)
    return jax.value_and_grad(loss), (gpt2.params, jnp.asarray(tokens), jax.random.PRNGKey(2))
