"""Train an Equinox network under `filter_jit`."""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

optimizer = optax.adamw(1e-3)


@eqx.filter_jit
def step(model, state, x, y):
    @eqx.filter_value_and_grad
    def loss(model):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    value, slopes = loss(model)
    updates, state = optimizer.update(slopes, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, value


model = eqx.nn.MLP(64, 8, 256, 6, key=jax.random.key(0))
state = optimizer.init(eqx.filter(model, eqx.is_array))
x, y = jnp.ones((256, 64)), jnp.zeros((256, 8))
for i in range(int(sys.argv[1]) if sys.argv[1:] else 400):
    model, state, value = step(model, state, x, y)
    if i % 100 == 0:
        print(i, float(value))
jax.block_until_ready(value)
