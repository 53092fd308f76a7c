"""Proximal policy optimization in plain JAX: environment, network and update in a scan of scans."""

from functools import cache

import jax
import jax.numpy as jnp
import optax

OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3))
STEPS, ENVS, EPOCHS, UPDATES = 4, 3, 2, 2


def policy(params, observation):
    """Return the logits of two actions, and the value."""
    hidden = jnp.tanh(observation @ params["in"])
    return hidden @ params["actor"], (hidden @ params["critic"])[..., 0]


def move(state, action, key):
    """Push a particle left or right. It restarts when it leaves the interval."""
    place, speed = state[..., 0], state[..., 1]
    speed = speed + 0.2 * (2.0 * action - 1.0) - 0.1 * place
    place = place + 0.1 * speed
    done = jnp.abs(place) > 1.0
    fresh = 0.1 * jax.random.normal(key, state.shape)
    after = jnp.where(done[..., None], fresh, jnp.stack([place, speed], -1))
    return after, 1.0 - jnp.abs(place), done


def collect(params, carry, _):
    """Take one step in each environment."""
    state, key = carry
    key, act, begin = jax.random.split(key, 3)
    logits, value = policy(params, state)
    action = jax.random.categorical(act, logits)
    log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
    after, reward, done = move(state, action, begin)
    return (after, key), (state, action, log_prob, value, reward, done)


def advantages(last, value, reward, done):
    """Return the generalized advantages, by a scan from the end."""

    def back(carry, step):
        gathered, following = carry
        value, reward, going = step
        delta = reward + 0.99 * following * going - value
        gathered = delta + 0.99 * 0.95 * going * gathered
        return (gathered, value), gathered

    start = (jnp.zeros_like(last), last)
    return jax.lax.scan(back, start, (value, reward, 1.0 - done), reverse=True)[1]


def loss(params, batch, gained):
    """Return the clipped objective with the value's loss and the entropy."""
    state, action, old, value, _, _ = batch
    logits, now = policy(params, state)
    log_probs = jax.nn.log_softmax(logits)
    ratio = jnp.exp(jnp.take_along_axis(log_probs, action[..., None], -1)[..., 0] - old)
    scaled = (gained - gained.mean()) / (gained.std() + 1e-8)
    actor = -jnp.minimum(ratio * scaled, jnp.clip(ratio, 0.8, 1.2) * scaled).mean()
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
    return actor + 0.5 * jnp.square(now - value - gained).mean() - 0.01 * entropy


def update(training, _):
    """Collect steps, and optimize for some epochs."""
    params, moments, state, key = training
    collecting = jax.tree_util.Partial(collect, params)
    (state, key), batch = jax.lax.scan(collecting, (state, key), length=STEPS)
    _, _, _, value, reward, done = batch
    gained = advantages(policy(params, state)[1], value, reward, done)

    def epoch(learned, _):
        params, moments = learned
        value, gradient = jax.value_and_grad(loss)(params, batch, gained)
        updates, moments = OPTIMIZER.update(gradient, moments)
        return (optax.apply_updates(params, updates), moments), value

    (params, moments), losses = jax.lax.scan(epoch, (params, moments), length=EPOCHS)
    return (params, moments, state, key), (losses, reward.mean())


def train(training):
    """Return the training state after some updates, and the losses and rewards."""
    return jax.lax.scan(update, training, length=UPDATES)


@cache
def model():
    """Return the training and its arguments."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"in": (2, 8), "actor": (8, 2), "critic": (8, 1)}
    params = {
        name: 0.5 * jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    state = 0.1 * jax.random.normal(keys[3], (ENVS, 2))
    return train, ((params, OPTIMIZER.init(params), state, jax.random.key(1)),)
