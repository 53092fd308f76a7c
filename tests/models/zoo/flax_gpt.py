"""A GPT in Flax Linen, and the step that trains it with optax's AdamW."""

from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState


class Block(nn.Module):
    """A pre-norm transformer block with dropout."""

    heads: int
    dropout: float = 0.1

    @nn.compact
    def __call__(self, x, mask):
        attention = nn.MultiHeadDotProductAttention(self.heads, dropout_rate=self.dropout)
        x = x + attention(nn.LayerNorm()(x), mask=mask, deterministic=False)
        hidden = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dropout(self.dropout, deterministic=False)(nn.Dense(x.shape[-1])(hidden))


class GPT(nn.Module):
    """A decoder over tokens."""

    vocabulary: int = 64
    width: int = 32
    layers: int = 2
    dropout: float = 0.1

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocabulary, self.width)
        x = embed(tokens) + nn.Embed(128, self.width)(jnp.arange(tokens.shape[-1]))
        for _ in range(self.layers):
            x = Block(4, self.dropout)(x, nn.make_causal_mask(tokens))
        return embed.attend(nn.LayerNorm()(x))


@jax.jit
def step(state, tokens, key):
    """Return the state after one step of AdamW, and the loss."""
    key = jax.random.fold_in(key, state.step)

    def loss(params):
        logits = state.apply_fn({"params": params}, tokens[:, :-1], rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


@cache
def model(layers=2, width=32, length=8, dropout=0.1):
    """Return the step and its arguments."""
    tokens = jax.random.randint(jax.random.key(1), (2, length + 1), 0, 64)
    gpt = GPT(width=width, layers=layers, dropout=dropout)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(3)}
    params = jax.jit(gpt.init)(keys, tokens[:, :-1])["params"]
    # Gradients of the keys' biases are rounding errors, which AdamW's default epsilon would
    # amplify.
    optimizer = optax.adamw(1e-3, eps=1e-6)
    state = TrainState.create(apply_fn=gpt.apply, params=params, tx=optimizer)
    return step, (state, tokens, jax.random.key(2))
