"""Masked or ragged attention blocks of Flax and Equinox support every length."""

import jax
import jax.numpy as jnp
import pytest

from tests.programs.case import Case

pytestmark = pytest.mark.models


def flax_block():
    """Return the loss of a pre-norm block in Flax Linen, and its weights."""
    nn = pytest.importorskip("flax.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
            return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))

    block = Block()
    weights = block.init(jax.random.key(0), jnp.ones((3, 8)))
    return lambda weights, x: jnp.square(block.apply(weights, x)).mean(), weights


def equinox_block():
    """Return the loss of a pre-norm block in Equinox, and its weights."""
    eqx = pytest.importorskip("equinox")
    attention, up, down = jax.random.split(jax.random.key(0), 3)
    modules = {
        "attention": eqx.nn.MultiheadAttention(2, 8, key=attention),
        "norm": eqx.nn.LayerNorm(8),
        "up": eqx.nn.Linear(8, 16, key=up),
        "down": eqx.nn.Linear(16, 8, key=down),
    }
    weights, rest = eqx.partition(modules, eqx.is_array)

    def loss(weights, x):
        block = eqx.combine(weights, rest)
        h = jax.vmap(block["norm"])(x)
        x = x + block["attention"](h, h, h)
        hidden = jax.nn.gelu(jax.vmap(block["up"])(jax.vmap(block["norm"])(x)))
        return jnp.square(x + jax.vmap(block["down"])(hidden)).mean()

    return loss, weights


def symbolic_block(block, order):
    """Return the loss of a block, or its gradient, with a symbol for the length."""
    from tests.programs.symbolic import symbolic_program

    loss, weights = block()
    fun = loss if order == "loss" else jax.grad(loss)
    place = (len(jax.tree.leaves(weights)), 0)
    case = Case(block.__name__, fun, (weights, jax.random.normal(jax.random.key(1), (3, 8))))
    return symbolic_program(case, {place: "n"})


@pytest.mark.parametrize("block", [flax_block, equinox_block])
@pytest.mark.parametrize("order", ["loss", "gradient"])
def test_a_masked_block_equals_the_block_at_every_length(block, order):
    from tests.programs.masking import prove_masked

    outcomes = prove_masked(symbolic_block(block, order), 0)
    assert outcomes["sizes"] == 5, outcomes


@pytest.mark.parametrize("block", [flax_block, equinox_block])
@pytest.mark.parametrize("seed, layout", [(0, "chosen"), (1, "packed")])
def test_a_ragged_block_equals_the_block_for_each_example(block, seed, layout):
    from tests.programs.lanes import prove_ragged

    outcomes = prove_ragged(symbolic_block(block, "loss"), seed)
    assert outcomes[f"lanes, {layout}"] and outcomes["differentiated"], outcomes
