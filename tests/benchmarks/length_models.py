"""Models of one example of variable length, each with the masks that one would write by hand.

A `Model` is a function of parameters and an example, which consists of arrays of `n` rows. Its
`by_hand` takes the padded example and the length. It masks only what is needed: the example itself,
so that non-finite padding has no effect, and the operands of sums and maxima.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WIDTH, HEADS, FEATURES, STATE, CLASSES = 64, 4, 32, 64, 50


@dataclass(frozen=True)
class Model:
    """A function, the same function with masks, and its arguments.

    `parameters` and `example` draw arrays with a generator; an example has a length. With
    `is_loss`, the result is a scalar.
    """

    name: str
    fun: Callable[..., Any]
    by_hand: Callable[..., Any]
    parameters: Callable[[np.random.RandomState], Any]
    example: Callable[[np.random.RandomState, int], tuple[Any, ...]]
    types: tuple[str, ...]
    is_loss: bool = False


def _rows(x: Any, n: Any) -> Any:
    """Return the mask of the real rows of padded `x`, in a shape that broadcasts."""
    return (jnp.arange(x.shape[0]) < n).reshape(-1, *(1,) * (x.ndim - 1))


def _clean(x: Any, n: Any) -> Any:
    return jnp.where(_rows(x, n), x, 0)


def _normal(rng: np.random.RandomState, *shape: int) -> Any:
    return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), jnp.float32)


def _example(*shape: int) -> Callable[[np.random.RandomState, int], tuple[Any, ...]]:
    return lambda rng, n: (rng.normal(size=(n, *shape)).astype(np.float32),)


# --- attention, and a transformer layer -----------------------------------------------------------


def attention(p: Any, x: Any) -> Any:
    return _attention(p, x, lambda scores: scores)


def attention_by_hand(p: Any, x: Any, n: Any) -> Any:
    return _attention(p, _clean(x, n), _masking(n))


def _masking(n: Any) -> Callable[[Any], Any]:
    return lambda scores: jnp.where(jnp.arange(scores.shape[-1]) < n, scores, -1e30)


def _attention(p: Any, x: Any, masked: Callable[[Any], Any]) -> Any:
    def heads(weights: Any) -> Any:
        return (x @ weights).reshape(x.shape[0], HEADS, WIDTH // HEADS).swapaxes(0, 1)

    query, key, value = (heads(p[name]) for name in ("query", "key", "value"))
    scores = masked(query @ key.mT * (WIDTH // HEADS) ** -0.5)
    mixed = jax.nn.softmax(scores) @ value
    return mixed.swapaxes(0, 1).reshape(x.shape) @ p["out"]


def _layer(p: Any, x: Any, masked: Callable[[Any], Any]) -> Any:
    x = x + _attention(p, _norm(x, p["norm1"]), masked)
    return x + jax.nn.gelu(_norm(x, p["norm2"]) @ p["up"]) @ p["down"]


def _norm(x: Any, scale: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return scale * x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)


def transformer_loss(p: Any, x: Any) -> Any:
    """Return the mean square of a pre-norm layer's output for f32[n,64]."""
    return jnp.square(_layer(p, x, lambda scores: scores)).mean()


def transformer_loss_by_hand(p: Any, x: Any, n: Any) -> Any:
    squares = jnp.square(_layer(p, _clean(x, n), _masking(n)))
    return _clean(squares, n).sum() / (n * WIDTH)


def _layer_parameters(rng: np.random.RandomState) -> Any:
    p = {name: _normal(rng, WIDTH, WIDTH) for name in ("query", "key", "value", "out")}
    p |= {"up": _normal(rng, WIDTH, 4 * WIDTH), "down": _normal(rng, 4 * WIDTH, WIDTH)}
    return p | {"norm1": jnp.ones(WIDTH), "norm2": jnp.ones(WIDTH)}


# --- a recurrent network --------------------------------------------------------------------------


def rnn_loss(p: Any, xs: Any) -> Any:
    """Return the mean square of the states of a gated unit, and of its last state."""
    last, states = lax.scan(lambda s, x: (_gru(p, s, x),) * 2, jnp.zeros(STATE), xs)
    return jnp.square(states).mean() + jnp.square(last).mean()


def rnn_loss_by_hand(p: Any, xs: Any, n: Any) -> Any:
    def step(state: Any, given: tuple[Any, Any]) -> tuple[Any, Any]:
        i, x = given
        state = jnp.where(i < n, _gru(p, state, x), state)
        return state, state

    given = jnp.arange(xs.shape[0]), _clean(xs, n)
    last, states = lax.scan(step, jnp.zeros(STATE), given)
    return _clean(jnp.square(states), n).sum() / (n * STATE) + jnp.square(last).mean()


def _gru(p: Any, state: Any, x: Any) -> Any:
    keep, reset = jnp.split(jax.nn.sigmoid(x @ p["gates"] + state @ p["gates_state"]), 2)
    update = jnp.tanh(x @ p["update"] + (reset * state) @ p["update_state"])
    return keep * state + (1 - keep) * update


def _rnn_parameters(rng: np.random.RandomState) -> Any:
    return {
        "gates": _normal(rng, FEATURES, 2 * STATE),
        "gates_state": _normal(rng, STATE, 2 * STATE),
        "update": _normal(rng, FEATURES, STATE),
        "update_state": _normal(rng, STATE, STATE),
    }


# --- layer norm over the variable axis, cross-entropy, a convolution ------------------------------


def layer_norm(p: Any, x: Any) -> Any:
    """Normalize the columns of f32[n,64]."""
    x = x - x.mean(0)
    return p * x * lax.rsqrt(jnp.square(x).mean(0) + 1e-5)


def layer_norm_by_hand(p: Any, x: Any, n: Any) -> Any:
    x = _clean(x, n)
    x = _clean(x - x.sum(0) / n, n)
    return p * x * lax.rsqrt(jnp.square(x).sum(0) / n + 1e-5)


def cross_entropy(p: Any, logits: Any, labels: Any) -> Any:
    logs = jax.nn.log_softmax(logits @ p)
    return -jnp.take_along_axis(logs, labels[:, None], axis=-1).mean()


def cross_entropy_by_hand(p: Any, logits: Any, labels: Any, n: Any) -> Any:
    logs = jax.nn.log_softmax(_clean(logits, n) @ p)
    taken = jnp.take_along_axis(logs, labels[:, None], axis=-1, mode="clip")
    return -_clean(taken, n).sum() / n


def _labelled(rng: np.random.RandomState, n: int) -> tuple[Any, ...]:
    (x,) = _example(WIDTH)(rng, n)
    return x, rng.randint(CLASSES, size=n).astype(np.int32)


def convolution(p: Any, x: Any) -> Any:
    """Return the mean over the rows of two convolutions along them."""
    return _convolve(p["second"], jax.nn.relu(_convolve(p["first"], x))).mean(0)


def convolution_by_hand(p: Any, x: Any, n: Any) -> Any:
    hidden = _clean(jax.nn.relu(_convolve(p["first"], _clean(x, n))), n)
    return _clean(_convolve(p["second"], hidden), n).sum(0) / n


def _convolve(kernel: Any, x: Any) -> Any:
    dimensions = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x[None], kernel, (1,), "SAME", dimension_numbers=dimensions)[0]


MODELS = [
    Model(
        "attention",
        attention,
        attention_by_hand,
        _layer_parameters,
        _example(WIDTH),
        ("f32[n,64]",),
    ),
    Model(
        "layer norm",
        layer_norm,
        layer_norm_by_hand,
        lambda rng: _normal(rng, 1, WIDTH)[0],
        _example(WIDTH),
        ("f32[n,64]",),
    ),
    Model(
        "cross-entropy",
        cross_entropy,
        cross_entropy_by_hand,
        lambda rng: _normal(rng, WIDTH, CLASSES),
        _labelled,
        ("f32[n,64]", "i32[n]"),
        is_loss=True,
    ),
    Model(
        "convolution",
        convolution,
        convolution_by_hand,
        lambda rng: {k: _normal(rng, 3, WIDTH, WIDTH) for k in ("first", "second")},
        _example(WIDTH),
        ("f32[n,64]",),
    ),
    Model(
        "RNN",
        rnn_loss,
        rnn_loss_by_hand,
        _rnn_parameters,
        _example(FEATURES),
        ("f32[n,32]",),
        is_loss=True,
    ),
    Model(
        "transformer layer",
        transformer_loss,
        transformer_loss_by_hand,
        _layer_parameters,
        _example(WIDTH),
        ("f32[n,64]",),
        is_loss=True,
    ),
]
