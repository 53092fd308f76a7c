"""A constraint is proposed if it reduces the sent bytes and computes the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import with_sharding_constraint
from jax.sharding import PartitionSpec as P

import jaxprtool
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.core.equations import equations
from jaxprtool.passes.transforms.constrained_values import constrain_values
from tests.programs.sharded import MISTAKES, SHARDED, Sharded, floats, mesh_of, trained, under_jit


def proposed(made: Sharded):
    with jax.set_mesh(made.mesh):
        program = jaxprtool.trace(made.function, *made.arguments)
        return jaxprtool.shardings(program, program.in_avals, propose=True)


@pytest.mark.parametrize("name", ["missing_constraint", "gathered_in_loop"])
def test_a_wrong_constraint_is_changed(name):
    found = proposed(MISTAKES[name]())
    best = found.constraints[0]
    assert best.replaces and best.spec == "P('data')"
    assert best.line == found.collectives[0].line
    assert best.sent_bytes < found.sent_bytes / 100


def test_a_new_constraint_is_proposed_without_differentiation():
    mesh = mesh_of(data=8)

    def forward(weights, x):
        hidden = jnp.tanh(x.T.reshape(-1, 32) @ weights)
        return with_sharding_constraint(hidden, P("data")).sum()

    made = under_jit(forward, mesh, P(), P("data"))
    found = proposed(Sharded(made, (floats(32, 32), floats(64, 32)), mesh))
    assert found.constraints[0].value.startswith("transpose at ")
    assert not found.constraints[0].replaces
    assert found.constraints[0].sent_bytes < found.sent_bytes / 8

    def loss(weights, x):
        return forward(weights, x)

    step = under_jit(trained(loss), mesh, P(), P("data"))
    trained_step = proposed(Sharded(step, (floats(32, 32), floats(64, 32)), mesh))
    assert all(each.replaces for each in trained_step.constraints)


def test_nothing_is_proposed_if_nothing_helps():
    assert proposed(SHARDED["tensor"]()).constraints == ()


def test_a_value_on_one_device_has_constraints_too():
    mesh = mesh_of(data=8)

    def called(x):
        made = jax.pure_callback(lambda v: np.asarray(v) * 2, floats(64, 8), x)
        return with_sharding_constraint(made, P("data")) * x

    found = proposed(Sharded(under_jit(called, mesh, P("data")), (floats(64, 8),), mesh))
    assert "one device" in {each.reason.operand_spec for each in found.collectives if each.reason}
    assert all(each.sent_bytes < found.sent_bytes for each in found.constraints)


def test_explicit_axes_are_refused():
    with pytest.raises(UnsupportedError, match="the axes of the mesh of forward are explicit"):
        proposed(SHARDED["explicit"]())


def test_values_with_constraints_are_unchanged():
    made = MISTAKES["gathered_in_loop"]()
    rng = np.random.default_rng(0)
    args = [rng.normal(size=each.shape).astype(np.float32) for each in made.arguments]
    with jax.set_mesh(made.mesh):
        program = jaxprtool.trace(made.function, *made.arguments)
        sharding = jax.NamedSharding(made.mesh, P(None, "data"))
        wanted = {
            eqn.outvars[0]: sharding
            for eqn in equations(program.jaxpr)
            if eqn.outvars[0].aval.shape == (64, 32)
        }
        changed = constrain_values(program, wanted)
        constraints = [e for e in equations(changed.jaxpr) if e.params.get("sharding") == sharding]
        assert len(constraints) == len(wanted) > 2
        np.testing.assert_allclose(changed(*args), program(*args), rtol=1e-5)
