"""A small GPT that creates its own weights, with its layers in one `scan` over keys.

The body of the scan is one layer: it takes a key, draws its weights and names them. `unzip` turns
this loop into two loops that you would otherwise write by hand. In `init`, a scan over keys returns
the weights, stacked along a new first axis with one row for each layer. In `apply`, a scan over
these stacks computes the layers. The listings show the shapes under "layers". Both programs would
have the same length for 48 layers.

    jaxprtool unzip samples/transformer_variables.py:forward --key-args 0
    jaxprtool unzip samples/transformer_variables.py:loss --key-args 0 -o loss/
    jaxprtool run   samples/transformer_variables.py:train
"""

import jax
import jax.numpy as jnp

import jaxprtool
from jaxprtool import nest, variable

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 32, 16, 32, 4, 3


def weights(key, *shape, name):
    """A small random matrix, as a variable."""
    return variable(0.05 * jax.random.normal(key, shape), name=name)


def layer_norm(x):
    """Normalize the features of each position, and multiply them by a learned scale."""
    scale = variable(jnp.ones(x.shape[-1]), name="norm")
    x = x - x.mean(axis=-1, keepdims=True)
    return scale * x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-5)


def attention(key, x):
    """Causal attention with HEADS heads."""
    keys = jax.random.split(key, 4)
    normed = layer_norm(x)

    def heads(key, name):
        mapped = normed @ weights(key, WIDTH, WIDTH, name=name)
        return mapped.reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2)

    q, k, v = heads(keys[0], "query"), heads(keys[1], "key"), heads(keys[2], "value")
    scores = q @ k.mT * (WIDTH // HEADS) ** -0.5
    position = jnp.arange(x.shape[1])
    causal = position[:, None] >= position
    mixed = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)) @ v
    return mixed.swapaxes(1, 2).reshape(x.shape) @ weights(keys[3], WIDTH, WIDTH, name="out")


def mlp(key, x):
    """A wider hidden layer, applied to each position separately."""
    up, down = jax.random.split(key)
    hidden = jax.nn.gelu(layer_norm(x) @ weights(up, WIDTH, 4 * WIDTH, name="up"))
    return hidden @ weights(down, 4 * WIDTH, WIDTH, name="down")


def layer(x, key):
    """One layer with the signature that `scan` requires: carry and key in, carry out."""
    attention_key, mlp_key = jax.random.split(key)
    x = x + nest(attention, scope="attention")(attention_key, x)
    x = x + nest(mlp, scope="mlp")(mlp_key, x)
    return x, None


@jaxprtool.example("key<fry>[]", "i32[8,16]")
def forward(key, tokens):
    """The logits of each position's next token: i32[batch, length] -> f32[batch, length, 32]."""
    tokens_key, positions_key, layers_key = jax.random.split(key, 3)
    embedding = weights(tokens_key, VOCABULARY, WIDTH, name="tokens")
    x = embedding[tokens] + weights(positions_key, LENGTH, WIDTH, name="positions")
    keys = jax.random.split(layers_key, LAYERS)
    x, _ = jax.lax.scan(nest(layer, scope="layers"), x, keys)
    return layer_norm(x) @ embedding.T


@jaxprtool.example("key<fry>[]", "i32[8,17]")
def loss(key, tokens):
    """The mean cross-entropy of predicting each token from those before it."""
    log_probabilities = jax.nn.log_softmax(forward(key, tokens[:, :-1]))
    following = tokens[:, 1:, None]
    return -jnp.take_along_axis(log_probabilities, following, axis=-1).mean()


def text(key, grammar):
    """Eight sequences in which each token is followed by one of two tokens at random."""
    first_key, choice_key = jax.random.split(key)
    first = jax.random.randint(first_key, (8,), 0, VOCABULARY)
    choices = jax.random.randint(choice_key, (LENGTH, 8), 0, 2)

    def speak(word, choice):
        following = grammar[word, choice]
        return following, following

    _, rest = jax.lax.scan(speak, first, choices)
    return jnp.vstack([first, rest]).T


@jaxprtool.example("key<fry>[]")
def train(key):
    """Run 100 steps with momentum: the weights, and the loss before every tenth step."""
    init_key, grammar_key, text_key = jax.random.split(key, 3)
    grammar = jax.random.randint(grammar_key, (VOCABULARY, 2), 0, VOCABULARY)
    init, apply = jaxprtool.unzip(loss)(init_key, text(text_key, grammar))

    def step(state, key):
        params, momentum = state
        value, gradient = jax.value_and_grad(apply)(params, text(key, grammar))
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum)
        return (params, momentum), value

    params = init(init_key)
    state = params, jax.tree.map(jnp.zeros_like, params)
    (params, _), losses = jax.lax.scan(step, state, jax.random.split(text_key, 100))
    return params, losses[::10]
