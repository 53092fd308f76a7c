"""A gated recurrent unit, scanned over a sequence.

The weights are constants of the scan, the state is its carry, and the sequence is its xs. The
gradient is a second, reversed scan, whose carry accumulates the gradients of the weights. In
`last_state`, `dce` removes all equations of the scan that only its unused output needs.

    jaxprtool show samples/rnn.py:encode
    jaxprtool show samples/rnn.py:grad_loss --format tree
    jaxprtool opt  samples/rnn.py:last_state -p dce --stats
"""

import jax
import jax.numpy as jnp

import jaxprtool

FEATURES, STATE = 8, 16

GATE = {"input": "f32[8,16]", "state": "f32[16,16]", "bias": "f32[16]"}
PARAMS = {"keep": GATE, "reset": GATE, "update": GATE, "readout": "f32[16,8]"}
SEQUENCE = "f32[20,4,8]"


def init(key):
    """Initial weights: inputs and readout scaled, states orthogonal, biases zero."""
    keys = iter(jax.random.split(key, 7))
    scaled = jax.nn.initializers.lecun_normal()
    orthogonal = jax.nn.initializers.orthogonal()

    def gate():
        return {
            "input": scaled(next(keys), (FEATURES, STATE)),
            "state": orthogonal(next(keys), (STATE, STATE)),
            "bias": jnp.zeros(STATE),
        }

    return {
        "keep": gate(),
        "reset": gate(),
        "update": gate(),
        "readout": scaled(next(keys), (STATE, FEATURES)),
    }


def affine(params, x, state):
    """A linear function of the input and the state, plus a bias."""
    return x @ params["input"] + state @ params["state"] + params["bias"]


def gru(params, state, x):
    """One step: interpolate between the old state and an update, with learned gates."""
    keep = jax.nn.sigmoid(affine(params["keep"], x, state))
    reset = jax.nn.sigmoid(affine(params["reset"], x, state))
    update = jnp.tanh(affine(params["update"], x, reset * state))
    return keep * state + (1 - keep) * update


@jaxprtool.example(PARAMS, SEQUENCE)
def encode(params, xs):
    """The last state, and a prediction after each step, from f32[time, batch, 8]."""

    def step(state, x):
        state = gru(params, state, x)
        return state, state @ params["readout"]

    return jax.lax.scan(step, jnp.zeros((xs.shape[1], STATE)), xs)


@jaxprtool.example(PARAMS, SEQUENCE)
def last_state(params, xs):
    """The last state alone; the predictions after each step are dead code."""
    state, _ = encode(params, xs)
    return state


@jaxprtool.example(PARAMS, SEQUENCE)
def loss(params, xs):
    """The mean squared error of predicting each input from those before it."""
    _, predictions = encode(params, xs[:-1])
    return jnp.square(predictions - xs[1:]).mean()


@jaxprtool.example(PARAMS, SEQUENCE)
def grad_loss(params, xs):
    """The gradient of the loss with respect to every weight."""
    return jax.grad(loss)(params, xs)
