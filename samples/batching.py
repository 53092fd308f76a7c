"""One example at a time, and many at once: what mapping does to a program.

These functions are written for one example, and nothing in them knows of a batch; `vmap` maps them
over as many examples as there are. Look at how the weights stay as they are where all share them;
how a vector times a matrix becomes a matrix times a matrix; and how in `grad_loss` each example
gets a gradient of its own. `chunk=64` makes a scan over 64 examples at a time, for when there is no
room for all. In `standardized` the examples meet: `pmean` over the axis called "batch" is a mean
over the lanes, and becomes a plain sum in the program that has them all.

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
    """How surprising the label of one example is, of eight."""
    logits = jnp.tanh(example["features"] @ params["hidden"]) @ params["readout"]
    return -jax.nn.log_softmax(logits)[example["label"]]


@jaxprtool.example(PARAMS, EXAMPLE)
def grad_loss(params, example):
    """Where one example wants the weights to go."""
    return jax.grad(loss)(params, example)


@jaxprtool.example(PARAMS, EXAMPLE)
def pull(params, example):
    """How hard it pulls at them: of a batch, this tells difficult examples from easy ones."""
    gradient = grad_loss(params, example)
    return jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)))


def standardized(x):
    """The features of one example, as deviations from the mean of its batch."""
    deviation = x - jax.lax.pmean(x, "batch")
    return deviation / jnp.sqrt(jax.lax.pmean(deviation**2, "batch") + 1e-6)


@jaxprtool.example("f32[32,8]")
def standardized_batch(xs):
    """Those of all examples: `jaxprtool.vmap` is to Python what the command is to the shell."""
    return jaxprtool.vmap(standardized, axis_name="batch")(xs)
