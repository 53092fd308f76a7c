"""A training step of a Keras model, stateless on the back end JAX."""

import os
from functools import cache

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras


def _network():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(3),
        ]
    )


@cache
def model():
    """Return the step, of the weights and the statistics, and its arguments."""
    network = _network()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(network.trainable_variables)
    measure = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(state, x, y):
        """Return the weights, statistics and momenta after one step, and the loss."""
        weights, statistics, momenta = state

        def loss(weights):
            outs, after = network.stateless_call(weights, statistics, x, training=True)
            return measure(y, outs), after

        (value, statistics), gradient = jax.value_and_grad(loss, has_aux=True)(weights)
        weights, momenta = optimizer.stateless_apply(momenta, gradient, weights)
        return (weights, statistics, momenta), value

    variables = (
        network.trainable_variables,
        network.non_trainable_variables,
        optimizer.variables,
    )
    state = tuple([variable.value for variable in group] for group in variables)
    x = jax.random.normal(jax.random.key(0), (4, 8, 8, 1))
    return step, (state, x, jax.numpy.array([0, 1, 2, 1]))
