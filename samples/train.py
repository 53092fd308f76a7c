"""A training script, for `jaxprtool record samples/train.py --steps 60`.

It trains a small recurrent network to continue a text. The script works, but is slower than
necessary; `record` shows why.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

TEXT = "the quick brown fox jumps over the lazy dog. " * 20
LETTERS = sorted(set(TEXT))


def batches(size, length):
    """Yield the letters of the text in batches, the last of which is smaller."""
    codes = np.array([LETTERS.index(letter) for letter in TEXT], np.int32)
    starts = np.arange(0, len(codes) - length, length)
    for i in range(0, len(starts), size):
        yield np.stack([codes[at : at + length + 1] for at in starts[i : i + size]])


def init(key, width=32):
    embed, cell = jax.random.split(key)
    return {
        "embed": 0.3 * jax.random.normal(embed, (len(LETTERS), width)),
        "cell": 0.3 * jax.random.normal(cell, (2 * width, width)),
        "out": jnp.zeros((width, len(LETTERS))),
    }


def loss(params, letters):
    def cell(state, letter):
        state = jnp.tanh(jnp.concatenate([state, params["embed"][letter]], -1) @ params["cell"])
        return state, state

    start = jnp.zeros((letters.shape[0], params["cell"].shape[1]))
    _, states = jax.lax.scan(cell, start, letters[:, :-1].T)
    logits = states @ params["out"]
    exps = jnp.exp(logits)
    chosen = jnp.take_along_axis(exps, letters[:, 1:].T[..., None], -1)[..., 0]
    return -jnp.log(chosen / exps.sum(-1)).mean()


@partial(jax.jit, donate_argnames="params")
def step(params, letters, rate):
    value, slopes = jax.value_and_grad(loss)(params, letters)
    return jax.tree.map(lambda p, g: p - rate * g, params, slopes), value


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rate", type=float, default=0.5)
    given = parser.parse_args()

    params, done = init(jax.random.key(0)), 0
    while done < given.steps:
        for letters in batches(16, 12):
            rate = given.rate if done < 20 else np.float32(given.rate * 0.99 ** (done - 20))
            params, value = step(params, letters, rate)
            done += 1
            if done % 10 == 0:
                print(f"step {done}: loss {value:.3f}")


if __name__ == "__main__":
    main()
