"""The gradient of the transmission of a Mach-Zehnder interferometer, a circuit in SAX."""

from functools import cache

import jax
import jax.numpy as jnp
import sax

CIRCUIT, _ = sax.circuit(
    netlist={
        "instances": {
            "split": "coupler",
            "top": "straight",
            "bottom": "straight",
            "join": "coupler",
        },
        "connections": {
            "split,out0": "bottom,in0",
            "bottom,out0": "join,in0",
            "split,out1": "top,in0",
            "top,out0": "join,in1",
        },
        "ports": {"in0": "split,in0", "in1": "split,in1", "out0": "join,out0", "out1": "join,out1"},
    },
    models={"coupler": sax.models.coupler_ideal, "straight": sax.models.straight},
)


def step(lengths, wavelengths):
    """Return the lengths of both arms after one step, and the mean transmission."""

    def loss(lengths):
        scattering = CIRCUIT(
            wl=wavelengths, top={"length": lengths["top"]}, bottom={"length": lengths["bottom"]}
        )
        return jnp.mean(jnp.abs(scattering["in0", "out0"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(lengths)
    return jax.tree.map(lambda x, g: x - g, lengths, gradient), value


@cache
def model():
    """Return the step and its arguments."""
    lengths = {"top": jnp.array(25.0), "bottom": jnp.array(15.0)}
    return step, (lengths, jnp.linspace(1.53, 1.57, 9))
