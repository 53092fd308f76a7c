"""A small GPT: embedding, causal attention, layer norm, MLP, a head tied to the embedding.

The layers are one `scan` over stacked weights, so the jaxpr has the same length for 48 layers as
for 4. Read the types in one layer, and then its gradient: a second scan, in reverse, over the
residuals that the first one stores.

    jaxprtool show samples/transformer.py:loss
    jaxprtool show samples/transformer.py:grad_loss --only scan,dot_general
    jaxprtool run  samples/transformer.py:loss -p mixed_precision
"""

import jax
import jax.numpy as jnp

import jaxprtool

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 256, 32, 64, 4, 4

#: The type of every weight; `init` returns values. Those in "layers" are stacked, one per layer.
PARAMS = {
    "tokens": "f32[256,64]",
    "positions": "f32[32,64]",
    "layers": {
        "attention": {
            "norm": "f32[4,64]",
            "query": "f32[4,64,64]",
            "key": "f32[4,64,64]",
            "value": "f32[4,64,64]",
            "out": "f32[4,64,64]",
        },
        "mlp": {"norm": "f32[4,64]", "up": "f32[4,64,256]", "down": "f32[4,256,64]"},
    },
    "norm": "f32[64]",
}
TOKENS = "i32[8,33]"


def init(key):
    """Initial weights: small random numbers, and ones for norms."""
    keys = iter(jax.random.split(key, 8))

    def weights(*shape):
        return 0.02 * jax.random.normal(next(keys), shape)

    layer = (LAYERS, WIDTH)
    return {
        "tokens": weights(VOCABULARY, WIDTH),
        "positions": weights(LENGTH, WIDTH),
        "layers": {
            "attention": {
                "norm": jnp.ones(layer),
                "query": weights(*layer, WIDTH),
                "key": weights(*layer, WIDTH),
                "value": weights(*layer, WIDTH),
                "out": weights(*layer, WIDTH),
            },
            "mlp": {
                "norm": jnp.ones(layer),
                "up": weights(*layer, 4 * WIDTH),
                "down": weights(LAYERS, 4 * WIDTH, WIDTH),
            },
        },
        "norm": jnp.ones(WIDTH),
    }


def layer_norm(x, scale):
    """Normalize the features of each position to mean zero and variance one."""
    x = x - x.mean(axis=-1, keepdims=True)
    return scale * x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-5)


def attention(params, x):
    """Causal attention with HEADS heads."""
    batch, length, width = x.shape

    def heads(weights):
        return (x @ weights).reshape(batch, length, HEADS, -1).swapaxes(1, 2)

    query, key, value = (heads(params[name]) for name in ("query", "key", "value"))
    scores = query @ key.mT * (width // HEADS) ** -0.5
    position = jnp.arange(length)
    causal = position[:, None] >= position
    mixed = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)) @ value
    return mixed.swapaxes(1, 2).reshape(x.shape) @ params["out"]


def mlp(params, x):
    """A wider hidden layer, applied to each position separately."""
    return jax.nn.gelu(x @ params["up"]) @ params["down"]


def layer(x, params):
    """One layer with the signature that `scan` requires: carry and weights in, carry out."""
    for sublayer, p in (attention, params["attention"]), (mlp, params["mlp"]):
        with jax.named_scope(sublayer.__name__):
            x = x + sublayer(p, layer_norm(x, p["norm"]))
    return x, None


@jaxprtool.example(PARAMS, "i32[8,32]")
def forward(params, tokens):
    """The logits of each position's next token: i32[batch, length] -> f32[batch, length, 256]."""
    x = params["tokens"][tokens] + params["positions"]
    x, _ = jax.lax.scan(layer, x, params["layers"])
    return layer_norm(x, params["norm"]) @ params["tokens"].T


@jaxprtool.example(PARAMS, TOKENS)
def loss(params, tokens):
    """The mean cross-entropy of predicting each token from those before it."""
    log_probabilities = jax.nn.log_softmax(forward(params, tokens[:, :-1]))
    following = tokens[:, 1:, None]
    return -jnp.take_along_axis(log_probabilities, following, axis=-1).mean()


@jaxprtool.example(PARAMS, TOKENS)
def grad_loss(params, tokens):
    """The gradient of the loss with respect to every weight."""
    return jax.grad(loss)(params, tokens)


@jaxprtool.example(PARAMS, PARAMS, TOKENS, learning_rate=0.1)
@jax.jit
def train_step(params, momentum, tokens, *, learning_rate):
    """One step of gradient descent with momentum: new weights, new momentum, the loss."""
    value, gradient = jax.value_and_grad(loss)(params, tokens)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
    params = jax.tree.map(lambda p, m: p - learning_rate * m, params, momentum)
    return params, momentum, value
