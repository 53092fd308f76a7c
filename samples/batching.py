"""Batching: what `vmap` does to a program of one example.

These functions take one example, without a batch dimension; `vmap` maps them over a batch. Weights
that all examples share stay unchanged, a vector times a matrix becomes a matrix times a matrix, and
`grad_loss` returns a gradient for each example. `chunk=64` makes a scan over 64 examples at a time,
which needs less memory than all at once. In `standardized` the result of an example depends on the
others: `pmean` over the axis "batch" is a mean over the examples, and becomes a plain sum in the
batched program.

    jaxprtool vmap samples/batching.py:loss --in-axes "(None, 0)" --axis-size 32
    jaxprtool vmap samples/batching.py:grad_loss --in-axes "(None, 0)" --axis-size 32
    jaxprtool run  samples/batching.py:pull -p "batch((None, 0), axis_size=1000, chunk=64)"
    jaxprtool vmap samples/batching.py:standardized --args "f32[8]" --axis-size 32 --axis-name batch
    jaxprtool show samples/batching.py:standardized_batch
"""

import jax
import jax.numpy as jnp

import jaxprtool

PARAMS = {"hidden": "f32[8,16]", "readout": "f32[16,8]"}
EXAMPLE = {"features": "f32[8]", "label": "i32[]"}


@jaxprtool.example(PARAMS, EXAMPLE)
def loss(params, example):
    """The cross-entropy of the label of one example, one of eight classes."""
    logits = jnp.tanh(example["features"] @ params["hidden"]) @ params["readout"]
    return -jax.nn.log_softmax(logits)[example["label"]]


@jaxprtool.example(PARAMS, EXAMPLE)
def grad_loss(params, example):
    """The gradient of the loss of one example."""
    return jax.grad(loss)(params, example)


@jaxprtool.example(PARAMS, EXAMPLE)
def pull(params, example):
    """The norm of the gradient, which is large for difficult examples."""
    gradient = grad_loss(params, example)
    return jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)))


def standardized(x):
    """The features of one example, as deviations from the mean of its batch."""
    deviation = x - jax.lax.pmean(x, "batch")
    return deviation / jnp.sqrt(jax.lax.pmean(deviation**2, "batch") + 1e-6)


@jaxprtool.example("f32[32,8]")
def standardized_batch(xs):
    """The standardized features of all examples, by `jaxprtool.vmap`."""
    return jaxprtool.vmap(standardized, axis_name="batch")(xs)
