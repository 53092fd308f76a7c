"""A gated recurrent unit, scanned over a sequence.

Look at how the weights enter the scan as constants, the state as its carry, and the sequence as
its xs; and how the gradient is a second scan, reversed, whose carry collects the weights'
gradients. In `last_state`, `dce` takes out of the scan what only its unused output needs.

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
    """Weights to start training from: inputs and readout scaled, states orthogonal, no bias."""
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
    """A linear function of the input and the state, and a bias."""
    return x @ params["input"] + state @ params["state"] + params["bias"]


def gru(params, state, x):
    """One step: how much of the state to keep, and what to put in place of the rest."""
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
    """What the sequence leaves behind; the predictions on the way are computed for nobody."""
    state, _ = encode(params, xs)
    return state


@jaxprtool.example(PARAMS, SEQUENCE)
def loss(params, xs):
    """The mean squared error of predicting each input from those before it."""
    _, predictions = encode(params, xs[:-1])
    return jnp.square(predictions - xs[1:]).mean()


@jaxprtool.example(PARAMS, SEQUENCE)
def grad_loss(params, xs):
    """The gradient of the loss by every weight."""
    return jax.grad(loss)(params, xs)
