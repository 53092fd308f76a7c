"""A constraint is proposed if it reduces the sent bytes and computes the same."""

import ast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import with_sharding_constraint
from jax.sharding import PartitionSpec as P

import jaxprtool
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.equations import equations
from jaxprtool.passes.transforms.scoped_checkpoint import constrain_values
from tests.commands.shardings.test_collectives import shardings, totals
from tests.programs.sharded import MISTAKES, SHARDED, Sharded, floats, mesh_of, trained, under_jit
from tests.share import shared_proofs


def proposed(made: Sharded):
    with jax.set_mesh(made.mesh):
        program = jaxprtool.trace(made.function, *made.arguments)
        return jaxprtool.shardings(program, program.in_avals, propose=True)


@pytest.mark.parametrize("name", shared_proofs(["missing_constraint", "gathered_in_loop"]))
def test_a_wrong_constraint_is_changed(name):
    found = proposed(MISTAKES[name]())
    best = found.constraints[0]
    assert best.replaces and best.spec == "P('data')"
    assert best.line == found.collectives[0].line
    assert best.sent_bytes < found.sent_bytes / 100
    assert best.change in found.collectives[0].avoided_by


def test_a_gather_for_a_wrong_constraint_is_avoidable_and_the_sum_of_a_gradient_is_not():
    mesh = mesh_of(data=8)

    def loss(weights, x):
        hidden = with_sharding_constraint(jnp.tanh(x @ weights), P())
        return jnp.square(hidden).sum()

    made = under_jit(trained(loss), mesh, P(), P("data"))
    with jax.set_mesh(mesh):
        program = jaxprtool.trace(made, floats(32, 64), floats(1024, 32))
        found = jaxprtool.shardings(program, program.in_avals, avoidable=True)
    assert found.constraints is None
    kinds = {collective.kind: collective.avoided_by for collective in found.collectives}
    assert kinds["all-reduce"] == ""
    assert "instead of P() at test_constraints.py" in kinds["all-gather"].replace(
        "tests/commands/shardings/", ""
    )


@pytest.mark.proof
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


@pytest.mark.proof
def test_nothing_is_proposed_if_nothing_helps():
    assert proposed(SHARDED["tensor"]()).constraints == ()


@pytest.mark.proof
def test_a_value_on_one_device_has_constraints_too():
    mesh = mesh_of(data=8)

    def called(x):
        made = jax.pure_callback(lambda v: np.asarray(v) * 2, floats(64, 8), x)
        return with_sharding_constraint(made, P("data")) * x

    found = proposed(Sharded(under_jit(called, mesh, P("data")), (floats(64, 8),), mesh))
    assert "one device" in {each.reason.operand_spec for each in found.collectives if each.reason}
    assert all(each.sent_bytes < found.sent_bytes for each in found.constraints)


def attention(constrain):
    """Scores whose rows are constrained, between two products of batches."""

    def scores(q, k, v):
        s = constrain(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v)

    mesh = mesh_of(data=8)
    return Sharded(under_jit(scores, mesh, *(P("data"),) * 3), (floats(16, 16, 8, 4),) * 3, mesh)


def micro_batches(constrain):
    """Gradients of a loss, summed in a scan."""

    def loss(p, x):
        hidden = constrain(jnp.tanh(x @ p["w1"]))
        return jnp.square(hidden @ p["w2"] - x).mean()

    def step(p, xs):
        def micro(sums, x):
            return jax.tree.map(jnp.add, sums, jax.grad(loss)(p, x)), None

        return jax.lax.scan(micro, jax.tree.map(jnp.zeros_like, p), xs)[0]

    mesh, p = mesh_of(data=8), {"w1": floats(16, 32), "w2": floats(32, 16)}
    return Sharded(under_jit(step, mesh, P(), P(None, "data")), (p, floats(4, 64, 16)), mesh)


def rematerialized(constrain):
    """Layers under remat in a scan, whose gradient is taken."""

    @jax.checkpoint
    def layer(x, w):
        return constrain(jnp.tanh(x @ w)), None

    def step(ws, x):
        return jax.grad(lambda ws: jax.lax.scan(layer, x, ws)[0].sum())(ws)

    mesh = mesh_of(data=8)
    return Sharded(under_jit(step, mesh, P(), P("data")), (floats(3, 16, 16), floats(64, 16)), mesh)


def two_axes(constrain):
    """Hidden units over one axis, and the batch over another, in a function that is called."""

    @jax.jit
    def hidden(x, w):
        return constrain(x @ w)

    mesh = mesh_of(data=4, model=2)
    specs = P("data"), P(None, "model"), P("model")
    forward = under_jit(lambda x, up, down: jnp.tanh(hidden(x, up)) @ down, mesh, *specs)
    return Sharded(forward, (floats(64, 16), floats(16, 32), floats(32, 16)), mesh)


def branched(constrain):
    """A constraint in a branch, beside a right one of the same value."""

    def chosen(flag, x):
        y = with_sharding_constraint(jnp.sin(x), P("data"))
        y = jax.lax.cond(flag, lambda y: constrain(y * 2.0), lambda y: y + 1.0, y)
        return with_sharding_constraint(y, P("data"))

    mesh, flag = mesh_of(data=8), jax.ShapeDtypeStruct((), bool)
    return Sharded(under_jit(chosen, mesh, P(), P("data")), (flag, floats(64, 16)), mesh)


def tree(constrain):
    """A constraint on arrays of different shapes."""

    def split(x, w):
        both = constrain({"product": x @ w, "half": jnp.sin(x)[:, :8]})
        return both["product"] @ w, both["half"] * 2.0

    mesh = mesh_of(data=8)
    return Sharded(under_jit(split, mesh, P("data"), P()), (floats(64, 16), floats(16, 16)), mesh)


def batched(constrain):
    """A constraint on the rows of a batch."""
    rows = jax.vmap(lambda row, w: constrain(jnp.tanh(row @ w)), (0, None))
    mesh = mesh_of(data=8)
    return Sharded(under_jit(rows, mesh, P("data"), P()), (floats(64, 16), floats(16, 16)), mesh)


#: Programs with a bad constraint: its spec, the spec that mends it, and the bytes that are left.
BAD = {
    attention: (P(None, None, "data"), "P('data')", 0),
    micro_batches: (P(None, "data"), "P('data')", 2 * 7 / 8 * 16 * 32 * 4 * 2 * 4),
    rematerialized: (P(None, "data"), "P('data')", None),
    two_axes: (P("model", "data"), "P('data', 'model')", 2 * 1 / 2 * 16 * 16 * 4),
    branched: (P(None, "data"), "P('data')", 0),
    tree: (P(None, "data"), "P('data')", 0),
    batched: (P("data"), "", 0),
}


def _constrain(spec):
    return lambda value: value if spec is None else with_sharding_constraint(value, spec)


def _made(make):
    return pytest.param(make, marks=[] if make is micro_batches else pytest.mark.sweep)


@pytest.mark.proof
@pytest.mark.parametrize("make", map(_made, BAD))
def test_a_bad_constraint_is_mended_and_each_proposal_comes_true(make):
    bad, mend, left = BAD[make]
    found = proposed(make(_constrain(bad)))
    assert 0 < found.tried <= 16 and found.constraints
    best = found.constraints[0]
    good = [each for each in found.constraints if each.replaces and each.spec == mend]
    assert good and good[0].sent_bytes == best.sent_bytes
    assert left is None or best.sent_bytes == left
    for each in found.constraints:
        if each.replaces and _spec(each.replaced) == bad:
            spec = _spec(each.spec) if each.spec else None
            edited = make(_constrain(spec))
            after = shardings(edited)
            assert after.sent_bytes == each.sent_bytes
            assert after.memory_bytes == each.memory_bytes
            listed, by_kind = totals(after, edited)
            assert listed == by_kind


def _spec(text):
    return P(*ast.literal_eval(f"({text[2:-1]},)"))


def test_explicit_axes_are_refused():
    with pytest.raises(UnsupportedError, match="the axes of the mesh of forward are explicit"):
        proposed(SHARDED["explicit"]())


@pytest.mark.proof
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
