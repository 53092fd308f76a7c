"""One step of a rigid-body simulation in JaxSim: a double pendulum that is read from SDF."""

from functools import cache

import jax.numpy as jnp
import jaxsim.api as js

LINK = """
<link name="{name}"><pose relative_to="{frame}">0 0 0 0 0 0</pose><inertial>
<pose>0 0 -0.25 0 0 0</pose><mass>1.0</mass><inertia><ixx>0.02</ixx><iyy>0.02</iyy><izz>0.01</izz>
<ixy>0</ixy><ixz>0</ixz><iyz>0</iyz></inertia></inertial></link>
"""
JOINT = """
<joint name="{name}" type="revolute"><parent>{parent}</parent><child>{child}</child>
<pose relative_to="{parent}">0 0 {height} 0 0 0</pose><axis><xyz>0 1 0</xyz></axis></joint>
"""
PENDULUM = f"""<sdf version="1.7"><model name="pendulum">
{LINK.format(name="base", frame="__model__")}
{LINK.format(name="upper", frame="shoulder")}{LINK.format(name="lower", frame="elbow")}
<joint name="fixed" type="fixed"><parent>world</parent><child>base</child></joint>
{JOINT.format(name="shoulder", parent="base", child="upper", height=0.0)}
{JOINT.format(name="elbow", parent="upper", child="lower", height=-0.5)}
</model></sdf>"""


@cache
def model():
    """Return the step, of the joints' positions and velocities and their torques."""
    robot = js.model.JaxSimModel.build_from_model_description(PENDULUM, time_step=0.01)

    def step(state, torques):
        """Return positions and velocities after a step, and the power of the torques."""
        data = js.data.JaxSimModelData.build(
            robot, joint_positions=state[0], joint_velocities=state[1]
        )
        data = js.model.step(robot, data, joint_force_references=torques)
        return (data.joint_positions, data.joint_velocities), torques @ data.joint_velocities

    return step, ((jnp.array([0.5, -0.2]), jnp.zeros(2)), jnp.array([0.1, 0.0]))
