"""The gradient of a likelihood of a galaxy's image in JAX-GalSim, with respect to its shape."""

from functools import cache

import jax
import jax.numpy as jnp
import jax_galsim as galsim

#: A fixed size of the FFT, without which images are not drawn under `jax.jit`.
FIXED = galsim.GSParams(minimum_fft_size=64, maximum_fft_size=64)


def image(params):
    """Draw a sheared galaxy, seen through a telescope."""
    galaxy = galsim.Exponential(half_light_radius=params["radius"], flux=params["flux"])
    galaxy = galaxy.shear(g1=params["g1"], g2=params["g2"])
    blurred = galsim.Convolve([galaxy, galsim.Gaussian(fwhm=0.9)], gsparams=FIXED)
    return blurred.drawImage(nx=16, ny=16, scale=0.4, method="no_pixel").array


def step(params, observed):
    """Return the parameters after one step, and the loss."""

    def loss(params):
        return jnp.mean((image(params) - observed) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradient), value


@cache
def model():
    """Return the step and its arguments."""
    params = {"radius": 1.0, "flux": 2.0, "g1": 0.1, "g2": -0.05}
    params = {name: jnp.array(value) for name, value in params.items()}
    return step, (params, image(params | {"g1": jnp.array(0.02)}))
