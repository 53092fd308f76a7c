"""One step of variational Monte Carlo on NetKet's parts: the Ising chain by a Boltzmann machine."""

import os
from functools import cache

import jax
import jax.numpy as jnp

# otherwise, NetKet enables x64 for all models of the process
os.environ.setdefault("NETKET_ENABLE_X64", "0")

import netket as nk

SPACE = nk.hilbert.Spin(0.5, 6)
HAMILTONIAN = nk.operator.IsingJax(SPACE, nk.graph.Chain(6), h=1.0)
SAMPLER = nk.sampler.MetropolisLocal(SPACE, n_chains=4, sweep_size=6)
MACHINE = nk.models.RBM(alpha=1, param_dtype=jnp.float32)


def step(training):
    """Return the weights and the sampler after one step, and the energy."""
    variables, sampler = training
    samples, sampler = SAMPLER.sample(MACHINE, variables, state=sampler, chain_length=8)
    samples = samples.reshape(-1, SPACE.size)
    connected, elements = HAMILTONIAN.get_conn_padded(samples)
    ratio = MACHINE.apply(variables, connected) - MACHINE.apply(variables, samples)[:, None]
    local = jnp.sum(elements * jnp.exp(ratio), -1)
    energy = local.mean()

    def surrogate(variables):
        return 2.0 * jnp.mean((local - energy) * MACHINE.apply(variables, samples))

    gradient = jax.grad(surrogate)(variables)
    return (jax.tree.map(lambda w, g: w - 0.05 * g, variables, gradient), sampler), energy


@cache
def model():
    """Return the step and its arguments."""
    variables = MACHINE.init(jax.random.key(0), jnp.ones((1, SPACE.size)))
    sampler = SAMPLER.init_state(MACHINE, variables, seed=jax.random.key(1))
    return step, ((variables, SAMPLER.reset(MACHINE, variables, sampler)),)
