"""One step of MuJoCo's MJX: a double pendulum."""

from functools import cache

import jax.numpy as jnp
import mujoco
from mujoco import mjx

XML = """
<mujoco>
  <option timestep="0.01"><flag contact="disable"/></option>
  <worldbody>
    <body>
      <joint name="shoulder" type="hinge" axis="0 1 0" damping="0.1"/>
      <geom type="capsule" size="0.05" fromto="0 0 0 0 0 -0.5"/>
      <body pos="0 0 -0.5">
        <joint name="elbow" type="hinge" axis="0 1 0" damping="0.1"/>
        <geom type="capsule" size="0.05" fromto="0 0 0 0 0 -0.5"/>
      </body>
    </body>
  </worldbody>
  <actuator><motor joint="elbow"/></actuator>
</mujoco>
"""


@cache
def model():
    """Return the step, of the positions and velocities and the control, and its arguments."""
    description = mjx.put_model(mujoco.MjModel.from_xml_string(XML))
    start = mjx.make_data(description)

    def step(state, control):
        """Return positions and velocities after a step, and the control's power."""
        data = start.replace(qpos=state[0], qvel=state[1], ctrl=control)
        data = mjx.step(description, data)
        return (data.qpos, data.qvel), control @ data.qvel[1:]

    return step, ((jnp.array([0.5, -0.2]), jnp.zeros(2)), jnp.array([0.1]))
